#include "job/elastic.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

#include "core/check.h"
#include "core/cleanup.h"
#include "core/clock.h"
#include "core/log.h"
#include "core/loopq.h"
#include "core/text.h"
#include "job/job.h"
#include "job/launched.h"
#include "job/position.h"
#include "job/resize.h"

/* A resize that failed is tried again after the grace, twice the grace, and so on; up to this power. */
#define ELASTIC_MAX_FAILURES 6u

/* A rank of the job as it is going to be. */
struct elastic_rank {
	uint32_t number;
	uint32_t from; /* the present rank, or RESIZE_NEW */
	struct device *device;
};

/* Those that are there. */
struct elastic_target {
	uint32_t n;
	struct elastic_rank *ranks; /* owned, in the order of their numbers */
	uint32_t newcomers;         /* of them */
};

/* It looks from the loop whether a commit is one to grow at. */
struct elastic_turn {
	struct work work;
	struct job *job;
};

bool elastic_is_posted(const struct job *job)
{
	return job->elastic.turn;
}

/* ------------------------------------------------------------------- newcomers */

void elastic_newcomer_init(struct elastic_newcomer *n)
{
	*n = (struct elastic_newcomer){ 0 };
	list_init(&n->link);
}

void elastic_newcomer_leave(struct elastic_newcomer *n)
{
	list_unlink(&n->link);
}

bool elastic_gathers(const struct job *job, const struct job_joining *how)
{
	return job->rec->join_grace_ms && job->rec->n_numbers && !job->present && !how->returns &&
	       how->newcomer && !how->newcomer->taken;
}

static int elastic_check_newcomer(const struct job *job, uint32_t number,
				  const struct elastic_newcomer *own, struct fault *f)
{
	const struct elastic_newcomer *other, *tmp;
	struct list *all = (struct list *)&job->elastic.newcomers;

	if (!job->rec->join_grace_ms || number >= job->rec->max_ranks)
		return fault_set(
			f, FAULT_INVALID, "rank", "rank %u is out of range (0..%u)", number,
			(job->rec->join_grace_ms ? job->rec->max_ranks : job->rec->world_size) - 1);
	list_for_each (other, tmp, all, link)
		if (other != own && other->number == number)
			return fault_set(
				f, FAULT_STATE, NULL,
				"rank %u of job '%s' is taken by pid %d, which waits to join",
				number, job->rec->name, (int)other->pid);
	return 0;
}

/* A newcomer has come: more may follow. So many as there can be: a process that ends soon after each of its
 * starts does not keep the others waiting for ever. */
static void elastic_wait_for_more(struct job *job)
{
	if (job->elastic.waits >= job->rec->max_ranks)
		return;
	job->elastic.waits++;
	job->elastic.since_us = clock_now_us();
}

/* It has waited as long as a rank may keep others waiting. */
static int elastic_check_time(const struct job *job, const struct elastic_newcomer *n,
			      struct fault *f)
{
	char waits[256];
	uint64_t ms;

	if (!n || list_empty(&n->link) || !n->until_us || clock_now_us() < n->until_us)
		return 0;
	elastic_describe(job, waits, sizeof(waits), &ms);
	return fault_set(f, FAULT_DEADLINE, NULL,
			 "rank %u has waited %u ms (op_timeout_ms) to be taken into job '%s': %s",
			 n->number, job->rec->op_timeout_ms, job->rec->name, waits);
}

enum res elastic_wait(struct job *job, uint32_t number, const char *device, pid_t pid,
		      struct elastic_newcomer *n, struct fault *f)
{
	if (elastic_check_newcomer(job, number, n, f) || elastic_check_time(job, n, f))
		return RES_FAILED;
	CHECK(n);
	if (!list_empty(&n->link))
		return RES_WAIT;
	n->number = number;
	n->pid = pid;
	n->device = *device ? node_device(job->node, device) : NULL;
	if (*device && !n->device)
		return res_of(fault_set(f, FAULT_INVALID, "device",
					"there is no device '%.60s' on this node", device));
	n->until_us = job->rec->op_timeout_ms
			      ? clock_now_us() + job->rec->op_timeout_ms * UINT64_C(1000)
			      : 0;
	list_append(&job->elastic.newcomers, &n->link);
	elastic_wait_for_more(job);
	log_info("job", "waits to join job=%s rank=%u pid=%d ranks=%u", job->label, number,
		 (int)pid, job->rec->world_size);
	return RES_WAIT;
}

/* ------------------------------------------------------------------ who is there */

static uint32_t elastic_count_newcomers(const struct job *job)
{
	const struct elastic_newcomer *n, *tmp;
	struct list *all = (struct list *)&job->elastic.newcomers;
	uint32_t count = 0;

	list_for_each (n, tmp, all, link)
		count++;
	return count;
}

static int elastic_compare(const void *a, const void *b)
{
	const struct elastic_rank *x = a, *y = b;

	return x->number < y->number ? -1 : x->number > y->number;
}

/* The blob and the buffers of a rank that has ended are its own. */
static void elastic_add_newcomer(const struct job *job, const struct elastic_newcomer *n,
				 struct elastic_target *t)
{
	struct elastic_rank r = { n->number, RESIZE_NEW, n->device };

	if (launched_rank(job, n->number, &r.from) && job->ranks[r.from] &&
	    job->ranks[r.from]->state == MEMBER_JOINED)
		return; /* another process has come as this one */
	t->ranks[t->n++] = r;
	t->newcomers++;
}

/* Return: 0 or -ENOMEM. */
static int elastic_find_target(const struct job *job, struct elastic_target *ret)
{
	const struct elastic_newcomer *n, *tmp;
	struct list *all = (struct list *)&job->elastic.newcomers;
	struct elastic_target t = { 0 };

	t.ranks = calloc(job->rec->world_size + elastic_count_newcomers(job), sizeof(*t.ranks));
	if (!t.ranks)
		return -ENOMEM;
	for (uint32_t r = 0; r < job->rec->world_size; r++)
		if (job->ranks[r] && job->ranks[r]->state == MEMBER_JOINED)
			t.ranks[t.n++] = (struct elastic_rank){ .number = launched_number(job, r),
								.from = r };
	list_for_each (n, tmp, all, link)
		elastic_add_newcomer(job, n, &t);
	qsort(t.ranks, t.n, sizeof(*t.ranks), elastic_compare);
	*ret = t;
	return 0;
}

/* Are all that were started there? Their numbers ascend. */
static bool elastic_is_complete(const struct job *job, const struct elastic_target *t)
{
	uint32_t launched = launched_world(job);

	return t->n >= launched && t->ranks[launched - 1].number == launched - 1;
}

/* A rank has left in good order: the others finish what they do. */
static bool elastic_somebody_left(const struct job *job)
{
	if (!job->joined)
		return false;
	for (uint32_t r = 0; r < job->rec->world_size; r++)
		if (job->ranks[r] && job->ranks[r]->state == MEMBER_LEFT &&
		    job->ranks[r]->epoch == job->rec->epoch)
			return true;
	return false;
}

/* Does it change its size by itself now? */
static bool elastic_is_on(const struct job *job)
{
	return job->rec->join_grace_ms && !job->across.elastic && !job->life.deleted &&
	       !job->life.draining && !job->jobs->draining && !resize_is_busy(job);
}

static bool elastic_all_joined(const struct job *job)
{
	return job->joined == job->rec->world_size;
}

/* Are ranks missing that have been there? At its first start a job waits for all. */
static bool elastic_is_short(const struct job *job)
{
	return !elastic_all_joined(job) && job->rec->epoch > 1 && !elastic_somebody_left(job);
}

static uint64_t elastic_due_us(const struct job *job)
{
	return job->elastic.since_us +
	       (job->rec->join_grace_ms * UINT64_C(1000) << job->elastic.failures);
}

/* ------------------------------------------------------------------- the resize */

static void elastic_take(struct job *job, bool taken)
{
	struct elastic_newcomer *n, *tmp;

	list_for_each (n, tmp, &job->elastic.newcomers, link)
		n->taken = taken;
}

static void elastic_failed(struct job *job, const struct fault *f)
{
	struct job_elastic *e = &job->elastic;

	elastic_take(job, false);
	e->failures += e->failures < ELASTIC_MAX_FAILURES;
	e->since_us = clock_now_us();
	text_copy(e->why, sizeof(e->why), f->text);
	log_warn("job", "cannot change its number of ranks job=%s why=\"%s\"", job->label, f->text);
}

static void elastic_on_resized(const struct resize_report *r, const struct fault *f, void *userdata)
{
	struct job *job = userdata;

	(void)r;
	if (f) {
		elastic_failed(job, f);
		return;
	}
	job->elastic.failures = 0;
	job->elastic.waits = 0;
	job->elastic.why[0] = '\0';
	job->elastic.since_us = clock_now_us();
}

static bool elastic_has(const struct elastic_target *t, uint32_t number)
{
	for (uint32_t i = 0; i < t->n; i++)
		if (t->ranks[i].number == number)
			return true;
	return false;
}

/* The numbers of the ranks that are not in @t; while nobody trains, of the processes that were started.
 * Return: how many. */
static uint32_t elastic_list_missing(const struct job *job, const struct elastic_target *t,
				     char *buf, size_t bytes)
{
	uint32_t n = job->joined ? job->rec->world_size : launched_world(job), missing = 0;
	size_t at = 0;

	buf[0] = '\0';
	for (uint32_t i = 0; i < n; i++) {
		uint32_t number = job->joined ? launched_number(job, i) : i;

		if (elastic_has(t, number))
			continue;
		missing++;
		if (at + 16 < bytes)
			at += (size_t)snprintf(buf + at, bytes - at, "%s%u", at ? ", " : "",
					       number);
	}
	return missing;
}

static void elastic_tell(const struct job *job, const struct elastic_target *t, struct fault *ret)
{
	char missing[64], without[128] = "", more[64] = "";

	elastic_list_missing(job, t, missing, sizeof(missing));
	if (*missing)
		snprintf(without, sizeof(without), ", without rank %s, which did not come back",
			 missing);
	if (t->newcomers)
		snprintf(more, sizeof(more), ", %u of which %s joined now", t->newcomers,
			 t->newcomers == 1 ? "has" : "have");
	fault_set(ret, FAULT_ABORTED, NULL,
		  "job '%s' goes on with %u ranks (%u before)%s%s: join again", job->rec->name,
		  t->n, job->rec->world_size, more, without);
}

static int elastic_begin(struct job *job, const struct elastic_target *t, struct fault *f)
{
	_cleanup_(freep) uint32_t *from = calloc(t->n, sizeof(*from));
	_cleanup_(freep) uint32_t *numbers = calloc(t->n, sizeof(*numbers));
	_cleanup_(freep) struct device **devices = calloc(t->n, sizeof(struct device *));
	struct fault told = FAULT_NULL;
	struct resize_plan plan = { .world = t->n,
				    .from = from,
				    .numbers = numbers,
				    .devices = devices,
				    .launched = launched_world(job),
				    .told = &told };

	if (!from || !numbers || !devices)
		return fault_errno(f, -ENOMEM, "resizing a job");
	for (uint32_t i = 0; i < t->n; i++) {
		from[i] = t->ranks[i].from;
		numbers[i] = t->ranks[i].number;
		devices[i] = t->ranks[i].device;
	}
	elastic_tell(job, t, &told);
	if (resize_begin_staying(job, &plan, elastic_on_resized, job, f))
		return f->code;
	elastic_take(job, true);
	return 0;
}

/* May those that are there go on without waiting any longer? */
static bool elastic_is_due(const struct job *job, const struct elastic_target *t, uint64_t now_us)
{
	if (t->n < job->rec->min_ranks)
		return false;
	return now_us >= elastic_due_us(job) ||
	       (t->newcomers && !job->elastic.failures && elastic_is_complete(job, t));
}

static void elastic_go_on(struct job *job, uint64_t now_us)
{
	struct elastic_target t;
	struct fault f = FAULT_NULL;

	if (elastic_find_target(job, &t) < 0)
		return; /* again at the next tick */
	if (elastic_is_due(job, &t, now_us) && elastic_begin(job, &t, &f))
		elastic_failed(job, &f);
	free(t.ranks);
}

void elastic_joined(struct job *job)
{
	job->elastic.since_us = clock_now_us();
	if (elastic_all_joined(job))
		job->elastic.waits = 0;
}

/* A newcomer whose time is over finds that when it joins again, and so does one that has a rank in a job
 * that others are in by now. */
static void elastic_end_waits(struct job *job, uint64_t now_us)
{
	struct elastic_newcomer *n, *tmp;
	bool over = false;
	uint32_t rank;

	list_for_each (n, tmp, &job->elastic.newcomers, link)
		over = over || (n->until_us && now_us >= n->until_us) ||
		       (job->present && launched_rank(job, n->number, &rank));
	if (over)
		condition_signal(&job->settled);
}

void elastic_tick(struct job *job, uint64_t now_us)
{
	elastic_end_waits(job, now_us);
	if (!elastic_is_on(job) || elastic_all_joined(job))
		return;
	/* at the first start, those that come and have no rank yet are taken in when all are there */
	if (elastic_is_short(job))
		elastic_go_on(job, now_us);
}

/* ------------------------------------------------------------------ at a commit */

/* Nothing has changed since the step that a rank which joins is told of. */
static bool elastic_is_at_rest(const struct job *job)
{
	const struct job_step *step = &job->step;
	uint64_t number;

	if (step->state != JOB_STEP_NONE || step->committing || step->stepping || step->mid)
		return false;
	if (job->rec->has_commit && job->rec->uncommitted_steps)
		return false;
	return !job->rec->partial && position_of(job->rec, &number);
}

static void elastic_on_turn(struct work *w)
{
	struct elastic_turn *turn = CONTAINER_OF(w, struct elastic_turn, work);
	struct job *job = turn->job;

	job->elastic.turn = NULL;
	free(turn);
	if (elastic_is_on(job) && elastic_all_joined(job) && !list_empty(&job->elastic.newcomers) &&
	    elastic_is_at_rest(job))
		elastic_go_on(job, clock_now_us());
	job_settle(job); /* of a deleted one this was the last */
}

/* What ends the epoch comes from the loop, behind the end of the Commit. */
void elastic_committed(struct job *job)
{
	struct elastic_turn *turn;

	if (job->elastic.turn || list_empty(&job->elastic.newcomers))
		return;
	turn = calloc(1, sizeof(*turn));
	if (!turn)
		return; /* at the next commit */
	turn->job = job;
	job->elastic.turn = turn;
	loopq_post(job->node->loopq, &turn->work, elastic_on_turn);
}

/* Without commits, numbers of Steps say where a rank that joins goes on. */
void elastic_stepped(struct job *job)
{
	if (job->rec->anchored && !job->rec->has_commit)
		elastic_committed(job);
}

/* --------------------------------------------------------------------- in words */

struct elastic_text {
	char *at;
	size_t room;
};

__attribute__((format(printf, 2, 3))) static void elastic_say(struct elastic_text *t,
							      const char *format, ...)
{
	va_list args;
	int n;

	va_start(args, format);
	n = vsnprintf(t->at, t->room, format, args);
	va_end(args);
	if (n < 0 || !t->room)
		return;
	n = (size_t)n < t->room ? n : (int)t->room - 1;
	t->at += n;
	t->room -= (size_t)n;
}

static void elastic_describe_newcomers(const struct job *job, const struct elastic_target *t,
				       struct elastic_text *text)
{
	const struct elastic_newcomer *first;

	if (!t->newcomers)
		return;
	first = list_first((struct list *)&job->elastic.newcomers, struct elastic_newcomer, link);
	elastic_say(text, "rank %u (pid %d)", first->number, (int)first->pid);
	if (t->newcomers > 1)
		elastic_say(text, " and %u more", t->newcomers - 1);
	elastic_say(text, " %s to join", t->newcomers == 1 ? "waits" : "wait");
}

/* Ranks are missing. */
static void elastic_describe_short(const struct job *job, const struct elastic_target *t,
				   uint64_t left_ms, struct elastic_text *text)
{
	char missing[64];
	uint32_t n = elastic_list_missing(job, t, missing, sizeof(missing));

	if (t->newcomers)
		elastic_say(text, "; ");
	elastic_say(text, "waiting for %u of %u ranks (%s)", n,
		    job->joined ? job->rec->world_size : launched_world(job), missing);
	if (t->n < job->rec->min_ranks)
		elastic_say(text, "; %u at least must be there to go on", job->rec->min_ranks);
	else
		elastic_say(text, ", %s %u in %.1f s",
			    t->n < job->rec->world_size    ? "shrinks to"
			    : t->n == job->rec->world_size ? "goes on with other"
							   : "grows to",
			    t->n, (double)left_ms / 1000);
}

void elastic_describe(const struct job *job, char *buf, size_t bytes, uint64_t *ret_ms)
{
	struct elastic_text text = { buf, bytes };
	uint64_t now = clock_now_us(), due = elastic_due_us(job);
	uint64_t left = due > now ? (due - now + 999) / 1000 : 0;
	bool waits = !list_empty(&job->elastic.newcomers);
	struct elastic_target t;

	*ret_ms = 0;
	buf[0] = '\0';
	if (!elastic_is_on(job) || (!waits && (!elastic_is_short(job) || !job->joined)) ||
	    elastic_find_target(job, &t) < 0)
		return;
	elastic_describe_newcomers(job, &t, &text);
	if (elastic_is_short(job)) {
		elastic_describe_short(job, &t, left, &text);
		*ret_ms = t.n < job->rec->min_ranks ? 0 : left;
	} else if (elastic_all_joined(job)) {
		elastic_say(&text, ", grows to %u at the next commit", t.n);
	} else {
		elastic_say(&text, ", when all %u ranks are there", job->rec->world_size);
	}
	if (*job->elastic.why)
		elastic_say(&text, "; the last try failed: %.160s", job->elastic.why);
	free(t.ranks);
}
