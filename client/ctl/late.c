#include "ctl/late.h"

#include <errno.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "core/check.h"
#include "core/cleanup.h"

/* A rank was the last one in a collective. */
struct late_case {
	uint32_t rank;
	uint64_t us; /* behind the rank in the middle */
};

/* The records of one collective, the earliest first. */
struct late_meeting {
	const Shardd__V1__OpRecord **ops;
	size_t n;
	bool whole; /* as many ranks as any other collective of the group in that epoch */
};

struct late_search {
	const Shardd__V1__OpRecord **ops; /* of collectives: side by side if of one */
	struct late_meeting *meetings;
	struct late_case *cases;
	size_t n_ops, n_meetings, n_cases;
	uint64_t counted_us; /* waiting until then has been counted */
};

static int late_order(uint64_t a, uint64_t b)
{
	return a < b ? -1 : a > b;
}

static int late_compare_place(const Shardd__V1__OpRecord *a, const Shardd__V1__OpRecord *b)
{
	int r = late_order(a->epoch, b->epoch);

	r = r ? r : strcmp(a->group, b->group);
	return r ? r : late_order(a->number, b->number);
}

/* Of one rank's records at one place, the newest comes first: the others are of an earlier job of that name. */
static int late_compare_ops(const void *x, const void *y)
{
	const Shardd__V1__OpRecord *const *a = x, *const *b = y;
	int r = late_compare_place(*a, *b);

	r = r ? r : late_order((*a)->rank, (*b)->rank);
	return r ? r : late_order((*b)->id, (*a)->id);
}

static int late_compare_announced(const void *x, const void *y)
{
	const Shardd__V1__OpRecord *const *a = x, *const *b = y;
	int r = late_order((*a)->announced_us, (*b)->announced_us);

	return r ? r : late_order((*a)->rank, (*b)->rank);
}

static int late_compare_cases(const void *x, const void *y)
{
	const struct late_case *a = x, *b = y;
	int r = late_order(a->rank, b->rank);

	return r ? r : late_order(a->us, b->us);
}

static int late_compare_ranks(const void *x, const void *y)
{
	const struct late_rank *a = x, *b = y;
	int r = late_order(b->waited_us, a->waited_us);

	return r ? r : late_order(a->rank, b->rank);
}

static void late_take_ops(struct late_search *s, const Shardd__V1__OpsResponse *ops)
{
	size_t n = 0;

	for (size_t i = 0; i < ops->n_ops; i++)
		if (ops->ops[i]->number &&
		    ops->ops[i]->state == SHARDD__V1__OP_STATE__OP_STATE_DONE)
			s->ops[s->n_ops++] = ops->ops[i];
	qsort(s->ops, s->n_ops, sizeof(*s->ops), late_compare_ops);
	for (size_t i = 0; i < s->n_ops; i++)
		if (!n || late_compare_place(s->ops[n - 1], s->ops[i]) ||
		    s->ops[n - 1]->rank != s->ops[i]->rank)
			s->ops[n++] = s->ops[i];
	s->n_ops = n;
}

static void late_take_meetings(struct late_search *s)
{
	for (size_t i = 0, n; i < s->n_ops; i += n) {
		for (n = 1; i + n < s->n_ops && !late_compare_place(s->ops[i], s->ops[i + n]);)
			n++;
		qsort(s->ops + i, n, sizeof(*s->ops), late_compare_announced);
		s->meetings[s->n_meetings++] = (struct late_meeting){ s->ops + i, n, false };
	}
}

static bool late_same_group(const struct late_meeting *a, const struct late_meeting *b)
{
	return a->ops[0]->epoch == b->ops[0]->epoch &&
	       strcmp(a->ops[0]->group, b->ops[0]->group) == 0;
}

/* Meetings of a group in an epoch are side by side. */
static void late_mark_whole(struct late_search *s)
{
	for (size_t i = 0, n; i < s->n_meetings; i += n) {
		size_t most = 0;

		for (n = 0;
		     i + n < s->n_meetings && late_same_group(&s->meetings[i], &s->meetings[i + n]);
		     n++)
			most = s->meetings[i + n].n > most ? s->meetings[i + n].n : most;
		for (size_t k = i; k < i + n; k++)
			s->meetings[k].whole = s->meetings[k].n == most;
	}
}

static uint64_t late_first_us(const struct late_meeting *m)
{
	return m->ops[0]->announced_us;
}

static uint64_t late_last_us(const struct late_meeting *m)
{
	return m->ops[m->n - 1]->announced_us;
}

static uint64_t late_middle_us(const struct late_meeting *m)
{
	return m->ops[(m->n - 1) / 2]->announced_us;
}

static int late_compare_meetings(const void *x, const void *y)
{
	const struct late_meeting *a = x, *b = y;

	return late_order(late_middle_us(a), late_middle_us(b));
}

/* How long the rank in the middle waited, less what it waited in meetings before: ranks may announce many at
 * once. */
static uint64_t late_waited_us(struct late_search *s, const struct late_meeting *m)
{
	uint64_t from = late_middle_us(m), to = late_last_us(m);

	from = from < s->counted_us ? s->counted_us : from;
	s->counted_us = to < s->counted_us ? s->counted_us : to;
	return to > from ? to - from : 0;
}

static int late_compare_times(const void *x, const void *y)
{
	const uint64_t *a = x, *b = y;

	return late_order(*a, *b);
}

/* When the meetings of @op were over, in order. Return: how many. */
static size_t late_ends_of(const struct late_search *s, const char *op, uint64_t *ends)
{
	size_t n = 0;

	for (size_t i = 0; i < s->n_meetings; i++)
		if (s->meetings[i].whole && strcmp(s->meetings[i].ops[0]->op, op) == 0)
			ends[n++] = late_last_us(&s->meetings[i]);
	qsort(ends, n, sizeof(*ends), late_compare_times);
	return n;
}

/* What was announced before the last @steps counts no more. */
static int late_cut(struct late_search *s, uint64_t steps, uint64_t *ret_steps)
{
	_cleanup_(freep) uint64_t *ends = calloc(s->n_meetings + 1, sizeof(*ends));
	size_t n, left = 0;

	if (!ends)
		return -ENOMEM;
	n = late_ends_of(s, "Commit", ends);
	if (!n)
		n = late_ends_of(s, "Step", ends);
	*ret_steps = steps && n > steps ? steps : n;
	if (!steps || n <= steps)
		return 0;
	for (size_t i = 0; i < s->n_meetings; i++)
		if (late_first_us(&s->meetings[i]) > ends[n - steps - 1])
			s->meetings[left++] = s->meetings[i];
	s->n_meetings = left;
	return 0;
}

static struct late_rank *late_rank_of(struct late *l, const Shardd__V1__OpRecord *op)
{
	struct late_rank *r = l->ranks;

	while (r < l->ranks + l->n && r->rank != op->rank)
		r++;
	if (r == l->ranks + l->n) {
		*r = (struct late_rank){ .rank = op->rank };
		l->n++;
	}
	r->pid = op->pid;
	return r;
}

static void late_count(struct late *l, struct late_search *s, const struct late_meeting *m)
{
	uint64_t us = late_last_us(m) - late_middle_us(m), waited = late_waited_us(s, m);
	struct late_rank *r;

	l->collectives++;
	for (size_t i = 0; i < m->n; i++)
		late_rank_of(l, m->ops[i])->collectives++;
	if (!us)
		return;
	r = late_rank_of(l, m->ops[m->n - 1]);
	r->last++;
	r->waited_us += waited;
	l->waited_us += waited;
	s->cases[s->n_cases++] = (struct late_case){ r->rank, us };
}

static void late_spread(struct late_rank *r, const struct late_case *cases, size_t n)
{
	r->median_us = cases[(n - 1) / 2].us;
	r->p95_us = cases[(n * 95 + 99) / 100 - 1].us;
	r->worst_us = cases[n - 1].us;
}

static void late_spread_all(struct late *l, struct late_search *s)
{
	qsort(s->cases, s->n_cases, sizeof(*s->cases), late_compare_cases);
	for (size_t i = 0; i < s->n_cases;) {
		struct late_rank *r = l->ranks;

		while (r->rank != s->cases[i].rank)
			r++;
		CHECK(r->last && r->last <= s->n_cases - i);
		late_spread(r, s->cases + i, r->last);
		i += r->last;
	}
	qsort(l->ranks, l->n, sizeof(*l->ranks), late_compare_ranks);
}

static enum late_verdict late_judge(const struct late *l)
{
	if (!l->collectives)
		return LATE_UNKNOWN;
	if (!l->waited_us || l->waited_us * 100 < l->span_us * LATE_PERCENT)
		return LATE_NONE;
	/* half of what lies between its fair share of the waiting and all of it */
	if (l->ranks[0].waited_us * 2 * l->n >= l->waited_us * (l->n + 1))
		return LATE_ONE;
	return LATE_MANY;
}

/* A rank comes to the first collective of an epoch when it has joined: how late that is says nothing of the steps. */
static bool late_is_first(const struct late_meeting *m)
{
	return m->ops[0]->number == 1 && strcmp(m->ops[0]->group, "world") == 0;
}

static int late_look(struct late *l, struct late_search *s, uint64_t steps)
{
	uint64_t first = UINT64_MAX, last = 0;

	late_take_meetings(s);
	late_mark_whole(s);
	if (late_cut(s, steps, &l->steps) < 0)
		return -ENOMEM;
	qsort(s->meetings, s->n_meetings, sizeof(*s->meetings), late_compare_meetings);
	for (size_t i = 0; i < s->n_meetings; i++) {
		const struct late_meeting *m = &s->meetings[i];

		if (late_is_first(m))
			continue;
		l->incomplete += !m->whole;
		if (!m->whole || m->n < 2)
			continue;
		first = late_first_us(m) < first ? late_first_us(m) : first;
		last = late_last_us(m) > last ? late_last_us(m) : last;
		late_count(l, s, m);
	}
	l->span_us = l->collectives ? last - first : 0;
	late_spread_all(l, s);
	l->verdict = late_judge(l);
	return 0;
}

int late_find(const Shardd__V1__OpsResponse *ops, uint64_t steps, struct late *ret)
{
	size_t n = ops->n_ops + 1;
	_cleanup_(freep) const Shardd__V1__OpRecord **taken = malloc(n * sizeof(*taken));
	_cleanup_(freep) struct late_meeting *meetings = malloc(n * sizeof(*meetings));
	_cleanup_(freep) struct late_case *cases = malloc(n * sizeof(*cases));
	struct late_search s = { .ops = taken, .meetings = meetings, .cases = cases };
	struct late l = { .ranks = calloc(n, sizeof(*l.ranks)) };

	if (!taken || !meetings || !cases || !l.ranks) {
		late_deinit(&l);
		return -ENOMEM;
	}
	late_take_ops(&s, ops);
	if (late_look(&l, &s, steps) < 0) {
		late_deinit(&l);
		return -ENOMEM;
	}
	*ret = l;
	return 0;
}

void late_deinit(struct late *l)
{
	free(l->ranks);
	*l = (struct late){ 0 };
}
