#include "job/admission.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/check.h"
#include "core/cleanup.h"
#include "core/clock.h"
#include "core/log.h"
#include "job/events.h"
#include "job/job_types.h"

/* Memory that the accounts have may not be there (a cgroup, other programs): a job that found none is
 * called again after that time. */
#define ADMISSION_AGAIN_US UINT64_C(1000000)

struct admission {
	struct list link; /* node->line.jobs, in the order in which they came */
	struct job *job;
	struct list calls;          /* of struct admission_call */
	struct admission_need need; /* of the last one that found no room */
	uint64_t since_us;
	uint64_t called_us; /* when the first of @calls was, last; 0: never */
	bool called;        /* it is to ask again */
};

void admission_call_init(struct admission_call *c, void (*resume)(struct admission_call *c))
{
	list_init(&c->link);
	c->until_us = 0;
	c->resume = resume;
}

/* ------------------------------------------------------------------ the order */

static bool admission_holds_shards(const struct job *job)
{
	return job->mem.n_slabs > 0;
}

/* Of one that is in the line, or @a: NULL: comes now. */
static bool admission_is_before(const struct job *x, const struct admission *a, const struct job *y,
				const struct admission *b)
{
	uint64_t held_x = x->owner.user ? x->owner.user->used[USER_STATE] : 0;
	uint64_t held_y = y->owner.user ? y->owner.user->used[USER_STATE] : 0;

	if (admission_holds_shards(x) != admission_holds_shards(y))
		return admission_holds_shards(x);
	if (x->rec->priority != y->rec->priority)
		return x->rec->priority > y->rec->priority;
	if (held_x != held_y)
		return held_x < held_y;
	if (!a || !b)
		return a != NULL;
	return a->since_us != b->since_us ? a->since_us < b->since_us : a < b;
}

static uint64_t admission_left(const struct job *job, unsigned d)
{
	return quota_left(&job->node->devices[d].quota);
}

/* Its owner's limits and its own quota, which the devices' accounts are not part of. */
static bool admission_owner_lets(const struct job *job, const struct admission_need *need)
{
	const struct quota *q = &job->quota;

	if (q->limit && (q->used > q->limit || need->all > q->limit - q->used))
		return false;
	return user_has_room(job->owner.user, USER_STATE, need->all) &&
	       user_has_room(job->owner.user, USER_SLABS, 1);
}

/* Devices without room for @need, as bits. */
static uint32_t admission_short_of(const struct job *job, const struct admission_need *need)
{
	uint32_t bits = 0;

	for (unsigned d = 0; d < job->node->n_devices; d++)
		bits |= (uint32_t)(need->bytes[d] > admission_left(job, d)) << d;
	return bits;
}

static uint32_t admission_devices(const struct admission_need *need)
{
	uint32_t bits = 0;

	for (unsigned d = 0; d < NODE_MAX_DEVICES; d++)
		bits |= (uint32_t)(need->bytes[d] > 0) << d;
	return bits;
}

/* Devices on which those behind it have to wait. */
static uint32_t admission_keeps(const struct admission *a)
{
	return admission_owner_lets(a->job, &a->need) ? admission_devices(&a->need) : 0;
}

bool admission_lets(const struct job *job, const struct admission_need *need, uint32_t *ret_ahead)
{
	const struct admission *mine = job->mem.admission;
	struct admission *a, *tmp;
	uint32_t devices = admission_devices(need), ahead = 0;

	list_for_each (a, tmp, (struct list *)&job->node->line.jobs, link)
		ahead += a != mine && admission_is_before(a->job, a, job, mine) &&
			 (admission_keeps(a) & devices);
	if (ret_ahead)
		*ret_ahead = ahead;
	return ahead == 0;
}

bool admission_can_fit(const struct job *job, const struct admission_need *need)
{
	const struct user *u = job->owner.user;

	for (unsigned d = 0; d < job->node->n_devices; d++)
		if (job->node->devices[d].quota.limit &&
		    need->bytes[d] > job->node->devices[d].quota.limit)
			return false;
	/* what the job has already stays */
	if (job->quota.limit && need->all > job->quota.limit - job->quota.by_class[MEM_SHARD])
		return false;
	return !u || need->all <= u->most[USER_STATE];
}

/* ------------------------------------------------------------------- the line */

static int admission_begin(struct job *job)
{
	struct admission *a = calloc(1, sizeof(*a));

	if (!a)
		return -ENOMEM;
	a->job = job;
	a->since_us = clock_now_us();
	list_init(&a->link);
	list_init(&a->calls);
	list_append(&job->node->line.jobs, &a->link);
	job->mem.admission = a;
	return 0;
}

static void admission_end(struct admission *a)
{
	CHECK(list_empty(&a->calls) && a->job->mem.admission == a);
	a->job->mem.admission = NULL;
	list_unlink(&a->link);
	free(a);
}

static void admission_tell_waits(const struct admission *a)
{
	char why[200];

	admission_why(a->job, why, sizeof(why));
	log_info("job", "waits for memory job=%s bytes=%" PRIu64 " priority=%d why=\"%s\"",
		 a->job->label, a->need.all, a->job->rec->priority, why);
	events_add(a->job, EVENTS_WAITS_FOR_MEMORY, "%s", why);
}

enum res admission_wait(struct admission_call *c, struct job *job,
			const struct admission_need *need)
{
	uint64_t now = clock_now_us();
	struct admission *a = job->mem.admission;
	bool begins = !a;

	if (!job->rec->wait_for_memory_ms)
		return RES_FAILED;
	if (!c->until_us)
		c->until_us = now + job->rec->wait_for_memory_ms * UINT64_C(1000);
	if (now >= c->until_us) {
		job->node->line.given_up++;
		return RES_FAILED;
	}
	if (begins && admission_begin(job) < 0)
		return RES_FAILED;
	a = job->mem.admission;
	a->need = *need;
	if (list_empty(&c->link)) {
		list_append(&a->calls, &c->link);
		c->of = a;
	} else if (list_first(&a->calls, struct admission_call, link) == c) {
		a->called = false;
	}
	c->waits = true;
	if (begins)
		admission_tell_waits(a);
	return RES_WAIT;
}

static void admission_unlink(struct admission_call *c)
{
	struct admission *a = c->of;

	if (list_first(&a->calls, struct admission_call, link) == c)
		a->called = false; /* the next one is called, when it is the job's turn */
	list_unlink(&c->link);
	c->waits = false;
}

void admission_leave(struct admission_call *c)
{
	struct admission *a = c->of;

	if (list_empty(&c->link))
		return;
	admission_unlink(c);
	if (list_empty(&a->calls))
		admission_end(a);
}

void admission_done(struct job *job, bool admitted)
{
	struct admission *a = job->mem.admission;
	uint64_t waited;

	if (!a)
		return;
	waited = clock_now_us() - a->since_us;
	if (admitted) {
		job->node->line.admitted++;
		job->node->line.waited_us += waited;
		log_info("job", "has memory job=%s waited_ms=%" PRIu64, job->label, waited / 1000);
		events_add(job, EVENTS_ADMITTED, "after %.1f s", (double)waited / 1e6);
	}
	while (!list_empty(&a->calls)) {
		struct admission_call *c = list_first(&a->calls, struct admission_call, link);
		bool waits = c->waits; /* else it is under way */

		admission_unlink(c);
		if (waits)
			c->resume(c);
	}
	admission_end(a);
}

/* ------------------------------------------------------------------- the turns */

static int admission_compare(const void *x, const void *y)
{
	const struct admission *const *a = x, *const *b = y;

	return admission_is_before((*a)->job, *a, (*b)->job, *b) ? -1 : 1;
}

/* Those in the line, in order. Return: the caller's; NULL: no memory. */
static struct admission **admission_sorted(const struct node *node, size_t *ret_n)
{
	struct list *line = (struct list *)&node->line.jobs;
	struct admission *a, *tmp, **all;
	size_t n = 0;

	list_for_each (a, tmp, line, link)
		n++;
	all = calloc(n + 1, sizeof(struct admission *));
	*ret_n = 0;
	if (!all)
		return NULL;
	list_for_each (a, tmp, line, link)
		all[(*ret_n)++] = a;
	qsort(all, n, sizeof(struct admission *), admission_compare);
	return all;
}

static bool admission_is_due(const struct admission *a, uint32_t kept, uint64_t now_us)
{
	if (a->called || (admission_devices(&a->need) & kept))
		return false;
	if (a->called_us && now_us - a->called_us < ADMISSION_AGAIN_US)
		return false;
	return admission_owner_lets(a->job, &a->need) && !admission_short_of(a->job, &a->need);
}

/* The first of its calls asks again; the others follow when it has the memory. */
static void admission_call_job(struct admission *a, uint64_t now_us)
{
	struct admission_call *c = list_first(&a->calls, struct admission_call, link);

	a->called = true;
	a->called_us = now_us;
	c->waits = false;
	c->resume(c);
}

/* They ask once more, and are told why there is no memory. */
static void admission_expire(struct node *node, uint64_t now_us)
{
	struct admission *a, *next_a;

	list_for_each (a, next_a, &node->line.jobs, link) {
		struct admission_call *c, *next;

		list_for_each (c, next, &a->calls, link) {
			if (!c->waits || c->until_us > now_us)
				continue;
			admission_unlink(c);
			c->resume(c);
		}
		if (list_empty(&a->calls))
			admission_end(a);
	}
}

void admission_tick(struct jobs *jobs, uint64_t now_us)
{
	struct node *node = jobs->node;
	_cleanup_(freep) struct admission **all = NULL;
	uint32_t kept = 0; /* devices that those who are first keep */
	size_t n;

	if (list_empty(&node->line.jobs))
		return;
	all = admission_sorted(node, &n);
	for (size_t i = 0; all && i < n; i++) {
		if (admission_is_due(all[i], kept, now_us))
			admission_call_job(all[i], now_us);
		kept |= admission_keeps(all[i]);
	}
	admission_expire(node, now_us);
}

/* ------------------------------------------------------------------ for status */

bool admission_place(const struct job *job, struct admission_place *ret)
{
	const struct admission *a = job->mem.admission;
	struct admission *other, *tmp;
	struct admission_call *c, *next;

	if (!a)
		return false;
	*ret = (struct admission_place){ .position = 1,
					 .bytes = a->need.all,
					 .since_us = a->since_us };
	list_for_each (other, tmp, (struct list *)&job->node->line.jobs, link)
		ret->position += other != a && admission_is_before(other->job, other, job, a);
	list_for_each (c, next, (struct list *)&a->calls, link) {
		ret->calls++;
		ret->until_us = c->until_us > ret->until_us ? c->until_us : ret->until_us;
	}
	return true;
}

static void admission_why_short(const struct job *job, const struct admission_need *need, char *buf,
				size_t bytes)
{
	uint32_t on = admission_short_of(job, need);
	unsigned d = on ? (unsigned)__builtin_ctz(on) : 0;

	snprintf(buf, bytes, "it needs %" PRIu64 " bytes on %s, of which %" PRIu64 " are free",
		 need->bytes[d], backend_info(job->node->devices[d].backend)->id,
		 admission_left(job, d));
}

void admission_why(const struct job *job, char *buf, size_t bytes)
{
	struct admission *a = job->mem.admission;
	uint32_t ahead;

	buf[0] = '\0';
	if (!a)
		return;
	if (!admission_owner_lets(job, &a->need))
		snprintf(buf, bytes,
			 "its owner's limits or its quota leave less than the %" PRIu64
			 " bytes that it needs",
			 a->need.all);
	else if (!admission_lets(job, &a->need, &ahead))
		snprintf(buf, bytes, "it needs %" PRIu64 " bytes, and %u %s before it", a->need.all,
			 ahead, ahead == 1 ? "job is" : "jobs are");
	else if (admission_short_of(job, &a->need))
		admission_why_short(job, &a->need, buf, bytes);
	else
		snprintf(buf, bytes, "it is about to get the %" PRIu64 " bytes that it needs",
			 a->need.all);
}

void admission_counts(const struct node *node, struct admission_counts *ret)
{
	struct admission *a, *tmp;

	*ret = (struct admission_counts){ .admitted = node->line.admitted,
					  .given_up = node->line.given_up,
					  .waited_us = node->line.waited_us };
	list_for_each (a, tmp, (struct list *)&node->line.jobs, link) {
		ret->jobs++;
		ret->bytes += a->need.all;
	}
}
