/*
 * The core under clients that do anything at any time: random walks over ops, cancels,
 * deadlines, deaths, joins that wait, leaves, deletions, failures of the device, and
 * completions in any order.
 * Nothing is expected of a single step but that no invariant breaks; at the end of each
 * walk every op has ended exactly once and every byte is back (nodefix_end).
 */
#include <criterion/criterion.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>

#include "core/check.h"
#include "core/clock.h"
#include "fdcheck.h"
#include "nodefix.h"
#include "op/op_run.h"
#include "op/op_time.h"

TestSuite(walk, .init = fdcheck_begin, .fini = fdcheck_end, .timeout = 300);

enum { JOBS = 2, WORLD = 3, UNITS = 3, OPS = 4096, MOVES = 1500, WALKS = 300 };

struct seat {
	struct member *m;
	bool numbers;    /* this session numbers its ops */
	uint64_t buffer; /* last one it was given */
};

struct walk {
	struct nodefix n;
	struct job *jobs[JOBS];
	struct seat seats[JOBS][WORLD];
	struct nodefix_op *ops;
	unsigned n_ops;
	uint64_t state;
	unsigned joined_late;
	unsigned ended_well;
};

/* A join that waits, as svc_shardd_jobs.c does it. */
struct late {
	struct waiter waiter;
	struct walk *w;
	struct job *job;
	unsigned j, rank;
};

static unsigned pick(struct walk *w, unsigned below)
{
	w->state ^= w->state << 13;
	w->state ^= w->state >> 7;
	w->state ^= w->state << 17;
	return (unsigned)(w->state >> 11) % below;
}

static void spec_units(struct walk *w, struct job *job)
{
	static const char *const names[UNITS] = { "direct", "cast", "part" };
	static const uint32_t some[] = { 2, 0 };
	struct fault f = FAULT_NULL;
	struct group *g = NULL;

	cr_assert_eq(job_group(job, "some", some, 2, &g, &f), 0, "%s", f.text);
	for (unsigned i = 0; i < UNITS; i++) {
		state_unit *spec = nodefix_spec(names[i], 50 + pick(w, 400));

		spec->compute_dtype = i == 1 ? DTYPE_BF16 : DTYPE_FP32;
		spec->group = i == 2 ? g->id : 0;
		spec->pre_divide = spec->post_divide = 1;
		nodefix_register(job, spec);
	}
}

static struct job *job_of(struct walk *w, unsigned j)
{
	char name[8];

	if (!w->jobs[j]) {
		snprintf(name, sizeof(name), "j%u", j);
		backend_fake_fail(w->n.node.devices[0].backend, 0,
				  0); /* of this the fixture expects all */
		w->jobs[j] = nodefix_job(&w->n, name, WORLD, 0);
		spec_units(w, w->jobs[j]);
	}
	return w->jobs[j];
}

/* ----------------------------------------------------------------- members */

static void seat_take(struct walk *w, unsigned j, unsigned rank, struct member *m)
{
	struct seat *s = &w->seats[j][rank];

	if (s->m && s->m != m)
		nodefix_drop(&w->n, s->m, "is gone");
	*s = (struct seat){ .m = m, .numbers = !pick(w, 4) };
}

static int try_join(struct walk *w, struct job *job, unsigned j, unsigned rank)
{
	struct member *again = w->seats[j][rank].m, *m = NULL;
	struct fault f = FAULT_NULL;
	int r;

	if (again && again->job != job)
		again = NULL;
	r = nodefix_try_join(&w->n, job, rank, NULL, again, &m, &f);
	if (r == 0)
		seat_take(w, j, rank, m);
	return r;
}

static void on_settled(struct waiter *waiter)
{
	struct late *l = CONTAINER_OF(waiter, struct late, waiter);

	if (!l->job->life.deleted && try_join(l->w, l->job, l->j, l->rank) == RES_WAIT) {
		condition_wait(&l->job->settled, &l->waiter);
		return;
	}
	l->w->joined_late++;
	free(l);
}

static void join(struct walk *w, unsigned j, unsigned rank)
{
	struct job *job = job_of(w, j);
	struct member *m = w->seats[j][rank].m;
	struct late *l;

	/* again and again would leave no time for anything else */
	if (m && m->job == job && m->state == MEMBER_JOINED && pick(w, 20))
		return;
	if (try_join(w, job, j, rank) != RES_WAIT)
		return;
	l = calloc(1, sizeof(*l));
	*l = (struct late){ .w = w, .job = job, .j = j, .rank = rank };
	waiter_init(&l->waiter, on_settled);
	condition_wait(&job->settled, &l->waiter);
}

static void drop(struct walk *w, unsigned j, unsigned rank)
{
	struct member *m = w->seats[j][rank].m;

	w->seats[j][rank].m = NULL;
	if (m)
		nodefix_drop(&w->n, m, "died");
}

static void leave(struct walk *w, unsigned j, unsigned rank)
{
	struct member *m = w->seats[j][rank].m;
	struct fault f = FAULT_NULL;
	bool freed;

	if (m && m->state != MEMBER_LEFT && m->state != MEMBER_DEAD)
		(void)job_leave(m, &freed, &f);
}

static void delete (struct walk *w, unsigned j, bool force)
{
	struct fault f = FAULT_NULL;

	if (w->jobs[j] && job_delete(w->jobs[j], force, NULL, &f) == 0)
		w->jobs[j] = NULL;
}

/* --------------------------------------------------------------------- ops */

static void submit(struct walk *w, struct seat *s)
{
	static const char *const on_unit[] = { "Gather", "Release", "GradientBuffer", "Reduce" };
	struct nodefix_op *op = &w->ops[w->n_ops];
	struct member *m = s->m;
	struct unit *u;

	if (!m || m->job->life.deleted || !m->job->n_units || w->n_ops == OPS)
		return;
	w->n_ops++;
	u = job_unit_by_id(m->job, 1 + pick(w, m->job->n_units));
	op->timeout_ms = pick(w, 8) ? 0 : 1;
	op->seq = s->numbers && m->state == MEMBER_JOINED ? m->next_seq + !pick(w, 10) : 0;
	switch (pick(w, 14)) {
	case 0:
	case 1:
		nodefix_seed(&w->n, m, u, 7, op);
		break;
	case 2:
		nodefix_alloc(&w->n, m, 4096, op);
		break;
	case 3:
		nodefix_free(&w->n, m, s->buffer, op);
		break;
	case 4:
		nodefix_all_reduce(&w->n, m, s->buffer, 100, op);
		break;
	case 5:
		nodefix_broadcast(&w->n, m, s->buffer, 100, op);
		break;
	case 6:
		nodefix_barrier(&w->n, m, pick(w, 2), op);
		break;
	case 7:
		nodefix_clip(&w->n, m, 1, op);
		break;
	case 8:
		nodefix_step(&w->n, m, op);
		break;
	case 9:
		nodefix_commit(&w->n, m, m->job->rec->step + 1, 10, op);
		break;
	default:
		nodefix_on_unit(&w->n, m, on_unit[pick(w, 4)], u, op);
		break;
	}
	if (op->result.buffer)
		s->buffer = op->result.buffer;
}

/* The same by all ranks, as trainers do it: else hardly a collective would run. */
static void submit_all(struct walk *w, unsigned j)
{
	uint64_t state = w->state;

	for (unsigned r = 0; r < WORLD; r++) {
		w->state = state;
		submit(w, &w->seats[j][r]);
	}
}

static void cancel(struct walk *w)
{
	unsigned first = w->n_ops > 64 ? w->n_ops - 64 : 0;
	struct nodefix_op *op;

	if (!w->n_ops)
		return;
	op = &w->ops[first + pick(w, w->n_ops - first)];
	if (op->op)
		op_cancel(op->op, pick(w, 2) ? FAULT_CANCELLED : FAULT_DEADLINE, "given up");
}

/* What Status does at any time, of all ops under way. */
static void look(void)
{
	struct op *op, *tmp;
	char text[512];

	list_for_each (op, tmp, &recorder.pending, recorded.link)
		op_waits_for(op, text, sizeof(text));
}

static void move(struct walk *w)
{
	unsigned j = pick(w, JOBS), rank = pick(w, WORLD), what = pick(w, 100);

	if (what < 30)
		submit(w, &w->seats[j][rank]);
	else if (what < 58)
		submit_all(w, j);
	else if (what < 64)
		cancel(w);
	else if (what < 76)
		join(w, j, rank);
	else if (what < 77)
		drop(w, j, rank);
	else if (what < 78)
		leave(w, j, rank);
	else if (what < 79)
		delete (w, j, !pick(w, 8));
	else if (what < 84)
		ops_tick(&w->n.jobs, clock_now_us() + pick(w, 2) * 10000u, 1 + pick(w, 2) * 1000u);
	else if (what < 87)
		backend_fake_hold(w->n.node.devices[0].backend, pick(w, 2));
	else if (what < 92)
		backend_fake_release(w->n.node.devices[0].backend, pick(w, 2));
	else if (what < 93)
		backend_fake_fail(w->n.node.devices[0].backend, 1 + pick(w, 30), -EIO);
	else if (what < 94)
		look();
	else if (what < 97)
		uv_run(&w->n.run.loop, UV_RUN_NOWAIT);
	else
		nodefix_turns(&w->n);
}

static void walk_once(uint64_t seed, unsigned *ended_well, unsigned *late)
{
	static struct walk w;

	w = (struct walk){ .state = seed * 0x9e3779b97f4a7c15u + 1 };
	w.ops = calloc(OPS, sizeof(*w.ops));
	nodefix_begin(&w.n, NULL);
	for (unsigned j = 0; j < JOBS; j++)
		for (unsigned r = 0; r < WORLD; r++)
			join(&w, j, r);
	for (unsigned i = 0; i < MOVES; i++)
		move(&w);
	backend_fake_hold(w.n.node.devices[0].backend, false);
	for (unsigned j = 0; j < JOBS; j++)
		delete (&w, j, true);
	nodefix_turns(&w.n);
	nodefix_end(&w.n);
	for (unsigned i = 0; i < w.n_ops; i++) {
		cr_assert(w.ops[i].over || w.ops[i].submitted, "walk %llu: op %u has not ended",
			  (unsigned long long)seed, i);
		*ended_well += w.ops[i].over && !w.ops[i].fault.code;
	}
	*late += w.joined_late;
	free(w.ops);
}

Test(walk, no_order_of_events_breaks_the_core)
{
	unsigned well = 0, late = 0;

	for (uint64_t seed = 1; seed <= WALKS; seed++)
		walk_once(seed, &well, &late);
	fprintf(stderr, "# %u ops ended well, %u joins had to wait\n", well, late);
	cr_assert_gt(well, 1000);
	cr_assert_gt(late, 10);
}

/* Two ranks ask for the same two barriers in opposite order, and one gives its second up.
 * That ends the other's first; its second meets the first of the one who gave up, which
 * ends, too, and lets begin what waited for it: the very op that is being given up. It
 * was ended twice. */
Test(walk, who_is_given_up_does_not_begin_meanwhile)
{
	static const uint32_t both[] = { 0, 1 };
	struct nodefix_op a = { 0 }, b = { 0 }, y = { 0 }, z = { 0 };
	struct fault f = FAULT_NULL;
	struct member *m[2];
	struct group *g;
	struct nodefix n;
	struct job *job;

	nodefix_begin(&n, NULL);
	job = nodefix_job(&n, "job", 2, 0);
	cr_assert_eq(job_group(job, "both", both, 2, &g, &f), 0);
	m[0] = nodefix_join(&n, job, 0);
	m[1] = nodefix_join(&n, job, 1);
	nodefix_barrier(&n, m[0], g->id, &a);
	nodefix_barrier(&n, m[0], 0, &b);
	nodefix_barrier(&n, m[1], 0, &y);
	nodefix_barrier(&n, m[1], g->id, &z);
	op_cancel(b.op, FAULT_DEADLINE, "too late");
	nodefix_ok(&a, "the first of rank 0");
	nodefix_ok(&z, "the second of rank 1");
	cr_assert(b.over && b.fault.code == FAULT_DEADLINE);
	cr_assert(y.over && y.fault.code == FAULT_DEADLINE);
	nodefix_end(&n);
}
