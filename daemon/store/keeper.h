/*
 * The keeper of descriptors that outlive the daemon: the service manager's descriptor store, or
 * shardd-holder, which speaks the same protocol (sd_notify(3), FDSTORE=1).
 *
 * It is there if NOTIFY_SOCKET and FDSTORE, the number of descriptors that it has room for, are in
 * the environment. It closes what is beyond that without a word, so they are counted here. Messages
 * are sent without blocking. One that was sent reaches the keeper even if this process is killed at
 * once; the keeper reads it before it sees the end.
 *
 * A successor gets the descriptors at its start, by name, in any order. Loop thread only.
 */
#ifndef SHARDD_STORE_KEEPER_H
#define SHARDD_STORE_KEEPER_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/socket.h>
#include <sys/un.h>

#include "core/list.h"

#define KEEPER_NAME_MAX 31

struct keeper {
	int fd;        /* -1: there is none */
	uint32_t most; /* descriptors */
	uint32_t used;
	struct list drops; /* names that it was not told of yet */
	struct sockaddr_un address;
	socklen_t address_bytes;
};

#define KEEPER_NULL(k) ((struct keeper){ .fd = -1, .drops = LIST_INIT((k).drops) })

/* From the environment. Return: 0 (also if there is none) or negative errno. */
int keeper_init(struct keeper *k);
/* What it has stays there. Safe to call twice. */
void keeper_deinit(struct keeper *k);
bool keeper_is_there(const struct keeper *k);
/* Has its process ended? Then so has what it kept. */
bool keeper_has_ended(const struct keeper *k);

/* @n descriptors are there already: of a predecessor. */
void keeper_has(struct keeper *k, uint32_t n);
/* Descriptors that it could still take. */
uint32_t keeper_room(const struct keeper *k);
/* Keep a duplicate of @fd. Return: 0, -EAGAIN (it has not read what was sent before: later),
 * -ENOSPC (it is full), or another negative errno. */
int keeper_add(struct keeper *k, const char *name, int fd);
/* Forget it: at once, or at a keeper_tick. */
void keeper_drop(struct keeper *k, const char *name);
void keeper_tick(struct keeper *k);

#endif
