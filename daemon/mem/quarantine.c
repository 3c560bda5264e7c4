#include "mem/quarantine.h"

#include <errno.h>
#include <stdlib.h>

#include "core/check.h"

/* A slab that waits for a process. */
struct entry {
	struct list link; /* quarantine.entries */
	struct quarantine *quarantine;
	struct proc *proc; /* holds a reference */
	struct proc_watch watch;
	struct slab *slab; /* holds a reference */
};

void quarantine_init(struct quarantine *q)
{
	*q = (struct quarantine){ 0 };
	list_init(&q->entries);
}

/* A slab counts once, however many wait for it. */
static void quarantine_count(struct quarantine *q, struct slab *s, uint64_t bytes)
{
	CHECK(q->bytes >= s->quarantined && s->device->quarantined >= s->quarantined);
	q->bytes += bytes - s->quarantined;
	s->device->quarantined += bytes - s->quarantined;
	s->quarantined = bytes;
}

static void quarantine_entry_free(struct entry *e)
{
	CHECK(e->slab->holds > 0);
	if (--e->slab->holds == 0)
		quarantine_count(e->quarantine, e->slab, 0);
	slab_unref(e->slab);
	list_unlink(&e->watch.link);
	proc_unref(e->proc);
	list_unlink(&e->link);
	free(e);
}

static void quarantine_on_gone(struct proc_watch *watch)
{
	quarantine_entry_free(CONTAINER_OF(watch, struct entry, watch));
}

static struct entry *quarantine_entry_new(struct quarantine *q, struct proc *p)
{
	struct entry *e = calloc(1, sizeof(*e));

	if (!e)
		return NULL;
	e->quarantine = q;
	e->proc = proc_ref(p);
	list_init(&e->watch.link);
	list_init(&e->link);
	list_append(&q->entries, &e->link);
	proc_watch(p, &e->watch, quarantine_on_gone);
	return e;
}

void quarantine_deinit(struct quarantine *q)
{
	while (!list_empty(&q->entries))
		quarantine_entry_free(list_first(&q->entries, struct entry, link));
	CHECK(q->bytes == 0);
}

int quarantine_slab(struct quarantine *q, struct proc *p, struct slab *s)
{
	struct entry *e;

	if (proc_gone(p))
		return 0;
	e = quarantine_entry_new(q, p);
	if (!e)
		return -ENOMEM;
	e->slab = slab_ref(s);
	s->holds++;
	quarantine_count(q, s, s->bytes);
	return 0;
}

void quarantine_release(struct quarantine *q, struct slab *s)
{
	struct entry *e, *tmp;

	slab_ref(s);
	list_for_each (e, tmp, &q->entries, link)
		if (e->slab == s)
			quarantine_entry_free(e);
	slab_unref(s);
}
