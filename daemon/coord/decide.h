/*
 * A decision: the one who leads changes a key once, if it is still what it knows.
 *
 *   IDLE --begin--> ASKING --answer--> IDLE
 *                     '--in doubt--> DOUBT --after a moment--> ASKING
 *
 * One transaction with two conditions: the leader's token, which is the creation revision of the key
 * that makes the leader, and the last change of the key; and a third one, if somebody else's decision
 * must still be the last one. If its answer is lost nobody knows whether it took effect, or will. The
 * same transaction is made again, then: of all of them one at most takes effect, and the value of the
 * key says whether one has. So a decision ends with what the key is, or not at all. A key that is
 * decided is never removed. Loop thread only.
 */
#ifndef SHARDD_COORD_DECIDE_H
#define SHARDD_COORD_DECIDE_H

#include "coord/coord.h"

enum decide_outcome {
	DECIDE_DONE,      /* the key has our value; @revision is that of its change */
	DECIDE_FENCED,    /* another leads, or @also was changed: nothing was, and will not be */
	DECIDE_OVERTAKEN, /* the key was changed to another value before */
	DECIDE_REFUSED,   /* the store does not take it: nothing was changed */
	/* The key has another value, and an answer was lost: ours may have been there before. */
	DECIDE_SUPERSEDED,
};

enum decide_state { DECIDE_IDLE, DECIDE_ASKING, DECIDE_DOUBT };

struct decide;
typedef void (*decide_cb)(struct decide *d, enum decide_outcome outcome, int64_t revision,
			  const char *why);

struct decide_what {
	const char *key;
	const void
		*value; /* nobody else writes these bytes: it has the decider's name and number */
	size_t bytes;
	const char *leader; /* the key that makes the leader */
	int64_t token;      /* its creation revision */
	int64_t last;       /* revision of the key's last change; 0: there is no such key */
	const char *also;   /* another key that must not have changed since; NULL: none */
	int64_t also_last;
};

/* Zero at first. */
struct decide {
	struct coord *c;
	decide_cb done;
	uint8_t state; /* enum decide_state */
	char *key;     /* owned, as @value */
	uint8_t *value;
	size_t bytes;
	char *leader, *also; /* owned; @also: NULL: none */
	int64_t token, last, also_last;
	unsigned tries;
	uint64_t again_us;
	char why[200]; /* DOUBT: what the last answer was */
	struct coord_call call;
};

/* @what is copied; @done is called later. It must be IDLE. Return: 0, -EINVAL (too large), or -ENOMEM. */
int decide_begin(struct decide *d, struct coord *c, const struct decide_what *what, decide_cb done);
/* Ask again, if it is in doubt and it is time. Call several times a second. */
void decide_tick(struct decide *d, uint64_t now_us);
/* Its callback does not come; it may take effect. Safe if it is IDLE. */
void decide_cancel(struct decide *d);

#endif
