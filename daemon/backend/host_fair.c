#include "backend/host_fair.h"

#include "core/check.h"

static void host_fair_share_init(struct fair_share *s)
{
	*s = (struct fair_share){ .id = 0 };
	list_init(&s->link);
	list_init(&s->tasks);
	list_init(&s->jobs);
}

void fair_init(struct fair *f)
{
	f->active = 0;
	list_init(&f->users);
	for (unsigned u = 0; u < FAIR_USERS; u++) {
		host_fair_share_init(&f->user[u]);
		for (unsigned j = 0; j < FAIR_JOBS; j++)
			host_fair_share_init(&f->job[u][j]);
	}
}

/* The one in @active that has received least; among equals the one that came last. */
static struct fair_share *host_fair_share_least(const struct list *active)
{
	struct fair_share *s, *tmp, *least = NULL;

	list_for_each (s, tmp, active, link)
		if (!least || s->served < least->served)
			least = s;
	return least;
}

/* The place of @id among the @n of @all: its own in @active, or a free one, or, if all are taken,
 * one that it shares. @active is short, and empty most of the time, so the others are searched
 * last. */
static struct fair_share *host_fair_share_find(const struct list *active, struct fair_share *all,
					       unsigned n, uint32_t id)
{
	struct fair_share *s, *tmp;

	list_for_each (s, tmp, active, link)
		if (s->id == id)
			return s;
	for (unsigned i = 0; i < n; i++) {
		s = &all[(id + i) % n];
		if (list_empty(&s->link))
			return s;
	}
	return &all[id % n];
}

/* Add it to @active, if it is not there: its count starts at that of the one with least. */
static void host_fair_share_enter(struct list *active, struct fair_share *s, uint32_t id)
{
	const struct fair_share *least;

	if (!list_empty(&s->link))
		return;
	least = host_fair_share_least(active);
	s->id = id;
	s->served = least ? least->served : 0;
	list_append(active->next, &s->link); /* before the first one */
}

void fair_add(struct fair *f, struct fair_task *t, struct backend_owner owner)
{
	struct fair_share *u = host_fair_share_find(&f->users, f->user, FAIR_USERS, owner.user);
	struct fair_share *j =
		host_fair_share_find(&u->jobs, f->job[u - f->user], FAIR_JOBS, owner.job);

	host_fair_share_enter(&f->users, u, owner.user);
	u->weight = owner.weight ? owner.weight : BACKEND_WEIGHT;
	f->active += list_empty(&j->link);
	host_fair_share_enter(&u->jobs, j, owner.job);
	list_init(&t->link);
	list_append(&j->tasks, &t->link);
	t->user = u;
	t->job = j;
}

void fair_remove(struct fair *f, struct fair_task *t)
{
	if (list_empty(&t->link))
		return;
	list_unlink(&t->link);
	if (!list_empty(&t->job->tasks))
		return;
	CHECK(f->active > 0);
	f->active--;
	list_unlink(&t->job->link);
	if (list_empty(&t->user->jobs))
		list_unlink(&t->user->link);
}

struct fair_task *fair_next(const struct fair *f)
{
	const struct fair_share *u = host_fair_share_least(&f->users);

	if (!u)
		return NULL;
	return list_first(&host_fair_share_least(&u->jobs)->tasks, struct fair_task, link);
}

void fair_served(struct fair_task *t, uint64_t bytes)
{
	t->user->served += (bytes * BACKEND_WEIGHT + t->user->weight - 1) / t->user->weight;
	t->job->served += bytes;
}
