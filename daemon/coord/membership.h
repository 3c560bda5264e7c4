/*
 * A member: this node among the nodes, while its lease lives.
 *
 *   OUT --join--> GRANTING --a lease--> JOINING --the key is ours--> IN --no lease any more--> OUT
 *                                          '--another node has it--> OUT
 *   any --leave--> LEAVING --the lease is revoked, or no answer--> OUT
 *
 * The key "members/NAME" hangs on the lease. One with the same value is of an earlier daemon at this
 * node's address, and is replaced; if that one lives, it is told at once, and is out until
 * the key goes. A member counts its own time: it is out as soon as the store may think so, whatever
 * etcd says. Loop thread only.
 */
#ifndef SHARDD_COORD_MEMBERSHIP_H
#define SHARDD_COORD_MEMBERSHIP_H

#include "coord/follow.h"
#include "core/name.h"

struct membership;

struct membership_ops {
	/* It is IN. */
	void (*joined)(struct membership *m);
	/* It is OUT: another node has its name, the lease has gone, or it has left. @why: one sentence.
	 * It may join again, from here, too. */
	void (*out)(struct membership *m, const char *why);
};

enum membership_state {
	MEMBERSHIP_OUT,
	MEMBERSHIP_GRANTING,
	MEMBERSHIP_JOINING,
	MEMBERSHIP_IN,
	MEMBERSHIP_LEAVING
};

struct membership {
	struct coord *c;
	const struct membership_ops *ops;
	char name[NAME_BYTES];
	uint8_t *value; /* owned: what others read of it */
	size_t bytes;
	int64_t ttl_s;
	uint8_t state; /* enum membership_state */
	int64_t lease;
	uint64_t asked_us,
		kept_us;        /* when the last keeping was asked for; that of the last answer */
	uint64_t again_us;      /* the next try */
	char why[256];          /* why it is not IN yet */
	struct follow own;      /* IN: its key */
	struct coord_call call; /* joining, then keeping */

	bool taken;  /* a living daemon has taken its key: it does not take it back */
	bool missed; /* IN: its key was not there when it looked last */
};

/* Join as @name with @value (copied). @ttl_s: 2 or more.
 * Return: 0, -EINVAL (@name is none), or -ENOMEM. */
int membership_join(struct membership *m, struct coord *c, const char *name, const void *value,
		    size_t bytes, int64_t ttl_s, const struct membership_ops *ops);
/* Keep the lease, try again. Call several times a second. */
void membership_tick(struct membership *m, uint64_t now_us);
/* Revoke its lease; it is OUT when that is answered, or after two seconds. Nothing to do if it is OUT. */
void membership_leave(struct membership *m);
/* At once: no callback comes any more, and the lease ends by itself. Safe twice. */
void membership_end(struct membership *m);

#endif
