/*
 * What things wait for: memory that is being made, a step that is applied, a copy that is cast.
 * A waiter is resumed at each change, and looks again itself. Loop thread only.
 */
#ifndef SHARDD_CORE_CONDITION_H
#define SHARDD_CORE_CONDITION_H

#include "core/list.h"

struct condition {
	struct list waiters; /* of struct waiter, first come first */
	const char *what;    /* in words, behind "waits for": a static string */
};

struct waiter {
	struct list link;
	const struct condition *on; /* valid while it waits: waiter_on */
	void (*resume)(struct waiter *w);
};

void condition_init(struct condition *c, const char *what);
void waiter_init(struct waiter *w, void (*resume)(struct waiter *w));

/* @w must not wait already (CHECKed). It is resumed once, and may wait again from there. */
void condition_wait(struct condition *c, struct waiter *w);

/* It waits no more. Safe if it does not. */
void waiter_leave(struct waiter *w);

/* What it waits for now, or NULL. */
const struct condition *waiter_on(const struct waiter *w);

/* Is there nobody? */
bool condition_is_idle(const struct condition *c);

/* Resume those that wait now, each once: one that waits again is resumed the next time. They may
 * end others that wait. */
void condition_signal(struct condition *c);

#endif
