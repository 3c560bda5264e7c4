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
	struct list
		calls; /* of struct admission_call, at least one; the first one is called in its turn */
	uint64_t since_us;
	uint64_t called_us; /* when the first of @calls was, last; 0: never */
};

static struct admission_call *admission_first(const struct admission *a)
{
	return list_first(&a->calls, struct admission_call, link);
}

static const struct admission_need *admission_need_of(const struct admission *a)
{
	return &admission_first(a)->need;
}

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

static bool admission_is_old(const struct admission *a, uint64_t now_us)
{
	return a && now_us - a->since_us >= ADMISSION_OLD_US;
}

static bool admission_came_before(const struct admission *a, const struct admission *b)
{
	if (!a || !b)
		return a != NULL;
	return a->since_us != b->since_us ? a->since_us < b->since_us : a < b;
}

/* @a, @b: NULL: it comes now. */
static bool admission_is_before(const struct job *x, const struct admission *a, const struct job *y,
				const struct admission *b, uint64_t now_us)
{
	uint64_t held_x = x->owner.user ? x->owner.user->used[USER_STATE] : 0;
	uint64_t held_y = y->owner.user ? y->owner.user->used[USER_STATE] : 0;

	if (x->rec->priority != y->rec->priority)
		return x->rec->priority > y->rec->priority;
	if (admission_holds_shards(x) != admission_holds_shards(y))
		return admission_holds_shards(x);
	if (admission_is_old(a, now_us) || admission_is_old(b, now_us) || held_x == held_y)
		return admission_came_before(a, b);
	return held_x < held_y;
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
	       user_has_room(job->owner.user, USER_SLABS, need->slabs);
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
	const struct admission_need *need = admission_need_of(a);

	return admission_owner_lets(a->job, need) ? admission_devices(need) : 0;
}

bool admission_lets(const struct job *job, const struct admission_need *need, uint32_t *ret_ahead)
{
	const struct admission *mine = job->mem.admission;
	struct admission *a, *tmp;
	uint32_t devices = admission_devices(need), ahead = 0;
	uint64_t now = clock_now_us();

	list_for_each (a, tmp, (struct list *)&job->node->line.jobs, link)
		ahead += a != mine && admission_is_before(a->job, a, job, mine, now) &&
			 (admission_keeps(a) & devices);
	if (ret_ahead)
		*ret_ahead = ahead;
	return ahead == 0;
}

/* Shards of @job on device @d. */
static uint64_t admission_held(const struct job *job, unsigned d)
{
	uint64_t bytes = 0;

	for (uint32_t i = 0; i < job->mem.n_slabs; i++)
		if (job->mem.slabs[i]->device->index == d)
			bytes += job->mem.slabs[i]->bytes;
	return bytes;
}

/* Is there room for @need on devices of which @held is not given back? */
static bool admission_has_room(const struct node *node, const struct admission_need *need,
			       const uint64_t *held)
{
	for (unsigned d = 0; d < node->n_devices; d++) {
		uint64_t limit = node->devices[d].quota.limit;

		if (limit && (held[d] > limit || need->bytes[d] > limit - held[d]))
			return false;
	}
	return true;
}

static bool admission_owner_could(const struct job *job, const struct admission_need *need)
{
	uint64_t held = job->quota.by_class[MEM_SHARD]; /* that stays */

	if (job->quota.limit && (held > job->quota.limit || need->all > job->quota.limit - held))
		return false;
	return !job->owner.user || (need->all <= user_limit(job->owner.user, USER_STATE) &&
				    need->slabs <= user_limit(job->owner.user, USER_SLABS));
}

bool admission_can_fit(const struct job *job, const struct admission_need *need)
{
	uint64_t held[NODE_MAX_DEVICES];
	struct admission *a, *tmp;
	bool somebody;

	for (unsigned d = 0; d < job->node->n_devices; d++)
		held[d] = admission_held(job, d);
	if (!admission_owner_could(job, need) || !admission_has_room(job->node, need, held))
		return false;
	/* those that wait keep what they have: if none of them can be served, nothing changes */
	list_for_each (a, tmp, (struct list *)&job->node->line.jobs, link)
		for (unsigned d = 0; a->job != job && d < job->node->n_devices; d++)
			held[d] += admission_held(a->job, d);
	somebody = admission_has_room(job->node, need, held);
	list_for_each (a, tmp, (struct list *)&job->node->line.jobs, link)
		somebody = somebody || (a->job != job &&
					admission_has_room(job->node, admission_need_of(a), held));
	return somebody;
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
		 a->job->label, admission_need_of(a)->all, a->job->rec->priority, why);
	events_add(a->job, EVENTS_WAITS_FOR_MEMORY, "%s", why);
}

enum res admission_wait(struct admission_call *c, struct job *job,
			const struct admission_need *need)
{
	uint64_t now = clock_now_us();
	bool begins = !job->mem.admission;

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
	c->need = *need;
	c->waits = true;
	if (list_empty(&c->link)) {
		c->of = job->mem.admission;
		list_append(&c->of->calls, &c->link);
	}
	if (begins)
		admission_tell_waits(c->of);
	return RES_WAIT;
}

static void admission_resume(struct admission_call *c)
{
	c->waits = false;
	c->resume(c);
}

void admission_leave(struct admission_call *c)
{
	struct admission *a = c->of;

	if (list_empty(&c->link))
		return;
	list_unlink(&c->link);
	c->waits = false;
	if (list_empty(&a->calls))
		admission_end(a);
}

void admission_recall(struct job *job)
{
	struct admission *a = job->mem.admission;
	struct admission_call *c, *next;

	if (!a)
		return;
	list_for_each (c, next, &a->calls, link)
		if (c->waits) /* else it is asking */
			admission_resume(c);
}

void admission_served(struct admission_call *c, struct job *job)
{
	uint64_t waited;

	if (!list_empty(&c->link)) {
		waited = clock_now_us() - c->of->since_us;
		job->node->line.admitted++;
		job->node->line.waited_us += waited;
		log_info("job", "has memory job=%s waited_ms=%" PRIu64, job->label, waited / 1000);
		events_add(job, EVENTS_ADMITTED, "after %.1f s", (double)waited / 1e6);
	}
	admission_recall(job);
}

/* ------------------------------------------------------------------- the turns */

static int admission_compare(const void *x, const void *y, void *now_us)
{
	const struct admission *const *a = x, *const *b = y;

	return admission_is_before((*a)->job, *a, (*b)->job, *b, *(uint64_t *)now_us) ? -1 : 1;
}

/* Those in the line, in order. Return: the caller's; NULL: no memory. */
static struct admission **admission_sorted(const struct node *node, uint64_t now_us, size_t *ret_n)
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
	qsort_r(all, n, sizeof(struct admission *), admission_compare, &now_us);
	return all;
}

static bool admission_is_due(const struct admission *a, uint32_t kept, uint64_t now_us)
{
	const struct admission_need *need = admission_need_of(a);

	if (!admission_first(a)->waits || (admission_devices(need) & kept))
		return false;
	if (a->called_us && now_us - a->called_us < ADMISSION_AGAIN_US)
		return false;
	return admission_owner_lets(a->job, need) && !admission_short_of(a->job, need);
}

/* The first of its calls asks again; the others follow when it has the memory. */
static void admission_call_job(struct admission *a, uint64_t now_us)
{
	a->called_us = now_us;
	admission_resume(admission_first(a));
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
			list_unlink(&c->link);
			admission_resume(c);
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
	all = admission_sorted(node, now_us, &n);
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
	uint64_t now;

	if (!a)
		return false;
	now = clock_now_us();
	*ret = (struct admission_place){ .position = 1,
					 .bytes = admission_need_of(a)->all,
					 .since_us = a->since_us };
	list_for_each (other, tmp, (struct list *)&job->node->line.jobs, link)
		ret->position += other != a && admission_is_before(other->job, other, job, a, now);
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

/* admission_owner_lets is false. */
static void admission_why_owner(const struct job *job, const struct admission_need *need, char *buf,
				size_t bytes)
{
	const struct user *u = job->owner.user;
	char limit[80] = "the job's quota";

	if (!user_has_room(u, USER_STATE, need->all)) {
		user_limit_in_the_way(u, USER_STATE, need->all, limit, sizeof(limit));
	} else if (!user_has_room(u, USER_SLABS, need->slabs)) {
		user_limit_in_the_way(u, USER_SLABS, need->slabs, limit, sizeof(limit));
		snprintf(buf, bytes, "%s leaves less than the %" PRIu64 " slabs that it needs",
			 limit, (uint64_t)need->slabs);
		return;
	}
	snprintf(buf, bytes, "%s leaves less than the %" PRIu64 " bytes that it needs", limit,
		 need->all);
}

void admission_why(const struct job *job, char *buf, size_t bytes)
{
	struct admission *a = job->mem.admission;
	const struct admission_need *need;
	uint32_t ahead;

	buf[0] = '\0';
	if (!a)
		return;
	need = admission_need_of(a);
	if (!admission_owner_lets(job, need))
		admission_why_owner(job, need, buf, bytes);
	else if (!admission_lets(job, need, &ahead))
		snprintf(buf, bytes, "it needs %" PRIu64 " bytes, and %u %s before it", need->all,
			 ahead, ahead == 1 ? "job is" : "jobs are");
	else if (admission_short_of(job, need))
		admission_why_short(job, need, buf, bytes);
	else
		snprintf(buf, bytes, "it is about to get the %" PRIu64 " bytes that it needs",
			 need->all);
}

void admission_counts(const struct node *node, struct admission_counts *ret)
{
	struct admission *a, *tmp;

	*ret = (struct admission_counts){ .admitted = node->line.admitted,
					  .given_up = node->line.given_up,
					  .waited_us = node->line.waited_us };
	list_for_each (a, tmp, (struct list *)&node->line.jobs, link) {
		ret->jobs++;
		ret->bytes += admission_need_of(a)->all;
	}
}
