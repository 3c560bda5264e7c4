/*
 * A key, followed: it is read, and watched from the next revision on. What a watch may have missed (it was
 * compacted, or the connection was lost) is read again. etcd 3.4.23 may lose events; so it tells soon
 * what conditions and leases decide anyway, and nothing depends on it alone.
 *
 *   OFF --begin--> READING --answered--> WATCHING --the watch is over--> PAUSED --.
 *                     ^  '--no answer--> PAUSED                                   |
 *                     '-----------------------------------------------------------'
 *
 * Loop thread only.
 */
#ifndef SHARDD_COORD_FOLLOW_H
#define SHARDD_COORD_FOLLOW_H

#include "coord/coord.h"

#define FOLLOW_KEY_BYTES 512

struct follow;

/* @kv: the key as it is now, borrowed; NULL: there is none. follow_end may be called from here. */
typedef void (*follow_cb)(struct follow *f, const struct coord_kv *kv);

/* Embedded by its owner. Zero at first. */
struct follow {
	struct coord *c; /* NULL: off */
	follow_cb changed;
	char key[FOLLOW_KEY_BYTES];
	struct coord_call call;
	struct coord_watch watch;
	uint64_t again_us; /* PAUSED: until then */
};

/* It must be off. @key: copied. */
void follow_begin(struct follow *f, struct coord *c, const char *key, follow_cb changed);
/* Read again, if it is time to. Call some times a second. */
void follow_tick(struct follow *f, uint64_t now_us);
/* Nothing is told any more. Safe twice. */
void follow_end(struct follow *f);

#endif
