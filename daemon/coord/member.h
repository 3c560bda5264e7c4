/*
 * A member: this node among the nodes, while its lease lives, and the election of the one that leads.
 *
 *   OUT --join--> GRANTING --a lease--> JOINING --the key is ours--> IN --no lease any more--> OUT
 *                                          '--another node has it--> OUT
 *   any --leave--> LEAVING --the lease is revoked, or no answer--> OUT
 *
 * The key "members/NAME" hangs on the lease. Members that want to lead create the key "leader" with
 * their lease: the one who does leads, and the creation revision of the key is the token of all that it
 * decides. A member counts its own time: it is out as soon as the store may think so, whatever etcd
 * says. Loop thread only.
 */
#ifndef SHARDD_COORD_MEMBER_H
#define SHARDD_COORD_MEMBER_H

#include "coord/view.h"

#define MEMBER_NAME_BYTES 64

struct member_node;

struct member_ops {
	/* It is IN. */
	void (*joined)(struct member_node *m);
	/* It is OUT: another node has its name, the lease has gone, or it has left. @why: one sentence.
	 * It may join again, from here, too. */
	void (*out)(struct member_node *m, const char *why);
	/* Another leads now, or this one: @token is not 0 then. @name: "": nobody. The member must not
	 * leave or end from inside this. */
	void (*leader)(struct member_node *m, const char *name, int64_t token);
};

enum member_state { MEMBER_OUT, MEMBER_GRANTING, MEMBER_JOINING, MEMBER_IN, MEMBER_LEAVING };

struct member_node {
	struct coord *c;
	const struct member_ops *ops;
	char name[MEMBER_NAME_BYTES];
	uint8_t *value; /* owned: what others read of it */
	size_t bytes;
	int64_t ttl_s;
	uint8_t state; /* enum member_state */
	int64_t lease;
	uint64_t asked_us,
		kept_us;        /* when the last keeping was asked for; that of the last answer */
	uint64_t again_us;      /* the next try */
	char why[200];          /* why it is not IN yet */
	struct coord_call call; /* joining, then keeping */

	bool leads; /* it wants to */
	int64_t token;
	struct coord_call campaign;
	struct view leader;
};

/* Join as @name with @value (copied). @leads: be a candidate. @ttl_s: 2 or more.
 * Return: 0, -EINVAL (the name is too long, empty, or has a slash), or -ENOMEM. */
int member_join(struct member_node *m, struct coord *c, const char *name, const void *value,
		size_t bytes, int64_t ttl_s, bool leads, const struct member_ops *ops);
/* Keep the lease, try again. Call several times a second. */
void member_tick(struct member_node *m, uint64_t now_us);
/* Revoke its lease; it is OUT when that is answered, or after two seconds. Nothing to do if it is OUT. */
void member_leave(struct member_node *m);
/* At once: no callback comes any more, and the lease ends by itself. Safe twice. */
void member_end(struct member_node *m);

#endif
