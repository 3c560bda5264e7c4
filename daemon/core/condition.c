#include "core/condition.h"

#include <stddef.h>

#include "core/check.h"

void condition_init(struct condition *c, const char *what)
{
	list_init(&c->waiters);
	c->what = what;
}

void waiter_init(struct waiter *w, void (*resume)(struct waiter *w))
{
	list_init(&w->link);
	w->on = NULL;
	w->resume = resume;
}

void condition_wait(struct condition *c, struct waiter *w)
{
	CHECK(list_empty(&w->link) && w->resume);
	w->on = c;
	list_append(&c->waiters, &w->link);
}

void waiter_leave(struct waiter *w)
{
	list_unlink(&w->link);
}

const struct condition *waiter_on(const struct waiter *w)
{
	return list_empty(&w->link) ? NULL : w->on;
}

bool condition_is_idle(const struct condition *c)
{
	return list_empty(&c->waiters);
}

void condition_signal(struct condition *c)
{
	struct list now = LIST_INIT(now);

	list_take_all(&now, &c->waiters);
	while (!list_empty(&now)) {
		struct waiter *w = list_first(&now, struct waiter, link);

		list_unlink(&w->link);
		w->resume(w);
	}
}
