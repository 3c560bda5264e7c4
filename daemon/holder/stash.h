/*
 * The descriptors that a holder or a keeper has, each with the name that the daemon gave it, and
 * the messages of sd_notify(3) that speak of them. One thread.
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>

#define STASH_NAME_MAX 255
#define STASH_TEXT_MAX 4096
#define STASH_MSG_FDS  253 /* the kernel's limit */

struct stash_one {
	int fd;
	char *name;
};

struct stash {
	struct stash_one *all;
	size_t n;
	size_t most; /* room for so many */
};

/* A line on standard error. */
void __attribute__((format(printf, 1, 2))) stash_say(const char *fmt, ...);

/* Raise the limit of descriptors, and set .most to half of it: the daemon has them open, too, beside
 * those that it needs. */
void stash_limit(struct stash *k);

/* Takes @fd. Return: whether it is kept. If not, it is closed, and a line says why. */
bool stash_add(struct stash *k, int fd, const char *name);
void stash_drop(struct stash *k, const char *name);
void stash_clear(struct stash *k);

bool stash_is_name(const char *name);

/* The value of @key in the lines of @text. @ret: STASH_NAME_MAX + 1 bytes. */
bool stash_value(const char *text, const char *key, char *ret);
bool stash_is_set(const char *text, const char *key);
