/*
 * The link between a holder and a keeper, which is another process: in Kubernetes another container of
 * the pod. A unix socket of type SEQPACKET at a path that both containers mount. The messages are
 * lines, as those of sd_notify(3), with at most one descriptor:
 *
 *   either way     FDSTORE=1, FDNAME=name, and the descriptor   this one is kept
 *   to the keeper  FDSTOREREMOVE=1, FDNAME=name                 it is not needed any more
 *                  X_SHARDD_CLEAR=1                             nothing is: what is kept follows
 *                  X_SHARDD_HOLDER=1, X_SHARDD_END=1            the first one: a holder has come, or
 *                                                               the pod ends (--end)
 *   to the holder  READY=1, X_SHARDD_MOST=number                that was all, there is room for so many
 *                  X_SHARDD_END=1                               the pod ends: so shall the daemon
 *
 * The keeper answers a holder with what it has, and READY=1. A message that was sent is in the socket's
 * queue, and outlives its sender.
 */
#pragma once

#include <stdbool.h>

#include "stash.h"

#define OUTER_CLEAR "X_SHARDD_CLEAR"
#define OUTER_END   "X_SHARDD_END"
#define OUTER_HELLO "X_SHARDD_HOLDER"
#define OUTER_MOST  "X_SHARDD_MOST"

/* Return: a descriptor, or -1 with errno; EADDRINUSE: a keeper serves @path, EEXIST: it is no socket. */
int outer_listen(const char *path);
int outer_accept(int listener); /* EPERM: another user */
int outer_connect(const char *path);

/* @fd: borrowed, or -1. Waits for room at most ten seconds. Return: whether it was sent; errno. */
bool outer_send(int link, const char *text, int fd);
bool outer_send_kept(int link, const struct stash_one *one);
bool outer_send_drop(int link, const char *name);
/* All of @k, and READY=1 with its room behind it if @is_ready. */
bool outer_send_all(int link, const struct stash *k, bool is_ready);

/* @is_waiting: at most ten seconds. @text: STASH_TEXT_MAX + 1 bytes. @ret_fd: the caller's, or -1.
 * Return: bytes, 0: the other side is gone, -1: there is none yet (EAGAIN), or another error. */
int outer_receive(int link, bool is_waiting, char *text, int *ret_fd);

/* Obey FDSTORE, which takes @fd, FDSTOREREMOVE and CLEAR. */
void outer_obey(struct stash *k, const char *text, int fd);
