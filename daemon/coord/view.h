/*
 * A view: the keys that begin with a prefix, as they are in the store, kept up to date.
 *
 *   READING --answer--> WATCHING --the watch ends--> PAUSED --after a moment--> READING
 *      '----no answer----------------------------------^
 *
 * After a watch has ended all is read again, and what has changed meanwhile is told: nothing is missed
 * but what was undone in between. A view may be late; decisions have conditions. Loop thread only.
 */
#ifndef SHARDD_COORD_VIEW_H
#define SHARDD_COORD_VIEW_H

#include "coord/coord.h"
#include "core/list.h"

struct view;

struct view_key {
	struct list link;
	bool seen; /* by the reading that is under way */
	char *key; /* owned, as @value */
	uint8_t *value;
	size_t bytes;
	int64_t created, modified, lease;
};

/* From inside these the view must not be ended. */
struct view_ops {
	/* @k is new or has changed; @removed: it goes when this returns. */
	void (*changed)(struct view *v, const struct view_key *k, bool removed);
	/* (optional) All of a reading was told. */
	void (*complete)(struct view *v);
};

enum view_state { VIEW_OFF, VIEW_READING, VIEW_WATCHING, VIEW_PAUSED };

struct view {
	struct coord *c;
	const struct view_ops *ops;
	char *prefix;     /* owned */
	uint8_t state;    /* enum view_state */
	struct list keys; /* of struct view_key, in no order */
	int64_t revision; /* all changes up to it are in it */
	uint64_t again_us;
	char why[200]; /* PAUSED: what was in the way */
	struct coord_call call;
	struct coord_watch watch;
};

/* @c: borrowed until view_end. Return: 0 or -ENOMEM. */
int view_begin(struct view *v, struct coord *c, const char *prefix, const struct view_ops *ops);
/* Read again, if it is time. Call several times a second. */
void view_tick(struct view *v, uint64_t now_us);
/* NULL: there is none, as far as is known. */
const struct view_key *view_find(const struct view *v, const char *key);
/* Safe twice. */
void view_end(struct view *v);

#endif
