#include "asks.h"

#include <criterion/criterion.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include "core/check.h"
#include "core/clock.h"
#include "op/op_run.h"
#include "op/op_time.h"

enum { N = 1000, BUFFER_BYTES = 4096 };

static struct proc *gone; /* of a process that has ended */

/* ------------------------------------------------------------------- the node */

static bool is_gone(void *arg)
{
	return proc_gone(arg);
}

/* One child for all nodes of this process, which is not reaped: its pid stays its own. */
static struct proc *dead_process(struct nodefix *n)
{
	static pid_t pid;
	struct proc *p;
	siginfo_t end;

	if (!pid) {
		pid = fork();
		cr_assert_geq(pid, 0);
		if (pid == 0)
			_exit(0);
		cr_assert_eq(waitid(P_PID, (id_t)pid, &end, WEXITED | WNOWAIT), 0);
	}
	cr_assert_eq(proc_new_pid(&n->run.loop, pid, getuid(), getgid(), &p), 0);
	looprun_until(&n->run, is_gone, p, 10);
	return p;
}

void scene_node_begin(struct nodefix *n, const struct stage *stage)
{
	const struct nodefix_options o = { .devices = stage->devices, .queues = stage->queues };

	nodefix_begin(n, &o);
	n->node.limits.reduce_batch_bytes = stage->batches ? 1u << 20 : 0;
	gone = dead_process(n);
}

void scene_node_end(struct nodefix *n)
{
	gone = proc_unref(gone);
	nodefix_end(n);
}

/* --------------------------------------------------------------- completions */

static struct engine *engine_of(const struct scene *s)
{
	return s->n->node.engine;
}

void scene_hold(struct scene *s)
{
	for (unsigned d = 0; d < s->n->node.n_devices; d++) {
		backend_fake_later(s->n->node.devices[d].backend, s->stage->later);
		backend_fake_hold(s->n->node.devices[d].backend, true);
	}
	if (engine_of(s))
		engine_fake_hold(engine_of(s), true);
}

bool scene_step(struct scene *s)
{
	bool any = false;

	for (unsigned d = 0; !any && d < s->n->node.n_devices; d++)
		any = backend_fake_step(s->n->node.devices[d].backend);
	if (!any && engine_of(s))
		any = engine_fake_step(engine_of(s));
	nodefix_turns(s->n);
	return any;
}

void scene_let_go(struct scene *s)
{
	for (unsigned d = 0; d < s->n->node.n_devices; d++) {
		backend_fake_later(s->n->node.devices[d].backend, false);
		backend_fake_hold(s->n->node.devices[d].backend, false);
	}
	if (engine_of(s))
		engine_fake_hold(engine_of(s), false);
	nodefix_turns(s->n);
}

void scene_raise(struct scene *s)
{
	for (unsigned r = 0; r < s->stage->ranks; r++) {
		struct slab *page = s->m[r] ? member_signals_slab(s->m[r]) : NULL;

		if (page)
			*(uint64_t *)backend_addr(page->mem) = s->promised;
	}
	for (unsigned d = 0; d < s->n->node.n_devices; d++)
		backend_fake_look(s->n->node.devices[d].backend);
	nodefix_turns(s->n);
}

/* ------------------------------------------------------------------------ ops */

/* One that is over, if all were used. */
static unsigned free_op(const struct scene *s, unsigned rank)
{
	unsigned i = 0;

	while (i < s->n_ops[rank] && !s->op[rank][i].over && !s->op[rank][i].submitted)
		i++;
	return i;
}

struct nodefix_op *scene_op(struct scene *s, unsigned rank)
{
	bool more = s->n_ops[rank] < SCENE_OPS;
	unsigned i = more ? s->n_ops[rank]++ : free_op(s, rank);
	struct nodefix_op *op = &s->op[rank][i];

	CHECK(i < SCENE_OPS);
	*op = (struct nodefix_op){ .stream = s->stage->streams, .after = s->promised };
	return op;
}

bool scene_has_room(const struct scene *s, unsigned rank, unsigned n)
{
	for (unsigned i = 0; i < s->n_ops[rank]; i++)
		n += !s->op[rank][i].over && !s->op[rank][i].submitted;
	return n <= SCENE_OPS;
}

bool scene_over(const struct scene *s)
{
	for (unsigned r = 0; r < s->stage->ranks; r++)
		for (unsigned i = 0; i < s->n_ops[r]; i++)
			if (!s->op[r][i].over && !s->op[r][i].submitted)
				return false;
	return true;
}

void scene_clear(struct scene *s)
{
	CHECK(scene_over(s));
	for (unsigned r = 0; r < SCENE_RANKS; r++)
		s->n_ops[r] = 0;
}

/* All ranks, to the end; it must succeed. */
void scene_must(struct scene *s, ask_fn submit, const char *what)
{
	for (unsigned r = 0; r < s->stage->ranks; r++)
		submit(s, r);
	nodefix_turns(s->n);
	for (unsigned r = 0; r < s->stage->ranks; r++)
		for (unsigned i = 0; i < s->n_ops[r]; i++) {
			const struct nodefix_op *op = &s->op[r][i];

			cr_assert(op->over || op->submitted, "%s of rank %u waits for ever", what,
				  r);
			cr_assert(!op->fault.code, "%s of rank %u: %s", what, r, op->fault.text);
		}
	scene_clear(s);
}

/* ------------------------------------------------------------------ the scene */

/* Where memory is made later it has none: only ops with streams need them. */
static void link_streams(struct member *m)
{
	struct fault f = FAULT_NULL;
	cr_assert(member_link(m, &f) != RES_FAILED, "%s", f.text);
}

/* Again, when what still runs is over. Return: false: it is refused. */
bool scene_join(struct scene *s, unsigned r)
{
	struct fault f = FAULT_NULL;
	struct member *m = s->m[r];
	enum res e;

	if (m && (m->state == MEMBER_DEAD || m->state == MEMBER_LEFT)) {
		nodefix_drop(s->n, m, "is gone");
		s->m[r] = m = NULL;
	}
	if (m && m->state == MEMBER_JOINED)
		return true;
	e = nodefix_try_join(s->n, s->job, r, NULL, m, &s->m[r], &f);
	cr_assert(e != RES_FAILED, "rank %u cannot join: %s", r, f.text);
	nodefix_turns(s->n);
	if (e == 0)
		link_streams(s->m[r]);
	return e == 0;
}

static bool all_joined(const struct scene *s)
{
	for (unsigned r = 0; r < s->stage->ranks; r++)
		if (!s->m[r] || s->m[r]->state != MEMBER_JOINED)
			return false;
	return true;
}

static void join_all(struct scene *s)
{
	for (unsigned round = 0; !all_joined(s); round++) {
		cr_assert_lt(round, 5, "ranks cannot join");
		for (unsigned r = 0; r < s->stage->ranks; r++)
			(void)scene_join(s, r);
	}
}

static void alloc_all(struct scene *s)
{
	for (unsigned r = 0; r < s->stage->ranks; r++)
		nodefix_alloc(s->n, s->m[r], BUFFER_BYTES, scene_op(s, r));
	nodefix_turns(s->n);
	for (unsigned r = 0; r < s->stage->ranks; r++) {
		cr_assert_eq(s->op[r][0].fault.code, 0, "%s", s->op[r][0].fault.text);
		s->buffer[r] = s->op[r][0].result.buffer;
		nodefix_write(&s->op[r][0].result.place, 0);
	}
	scene_clear(s);
}

/* Make them again if an earlier scene has broken them. */
static void make_comms(struct nodefix *n)
{
	struct device *all[NODE_MAX_DEVICES];
	struct node_comm *nc;
	struct fault f = FAULT_NULL;
	enum res r = RES_WAIT;

	for (unsigned i = 0; i < n->node.n_devices; i++)
		all[i] = &n->node.devices[i];
	for (unsigned tries = 0; r == RES_WAIT && tries < 10; tries++) {
		r = node_comm(&n->node, all, n->node.n_devices, &nc, &f);
		nodefix_turns(n);
	}
	cr_assert_eq(r, 0, "%s", f.text);
}

void scene_begin(struct scene *s, struct nodefix *n, const struct stage *stage)
{
	*s = (struct scene){ .n = n, .stage = stage };
	make_comms(n);
	s->job = nodefix_job(n, "scene", stage->ranks, 0);
	join_all(s);
	s->plain = nodefix_register(s->job, nodefix_spec("plain", N));
	s->u = s->plain;
	MUST(s, ask_seed_plain);
	alloc_all(s);
	MUST(s, ask_commit);
	s->epoch = s->job->rec->epoch;
}

/* ---------------------------------------------------------------- disturbances */

const char *disturbance_name(enum disturbance d)
{
	static const char *const names[_DISTURB_N] = {
		"kill",   "disconnect",      "rejoin",      "replace", "leave",
		"delete", "cancel an op of", "deadline of", "drain",   "break the communicators of"
	};

	return names[d];
}

static void lose(struct scene *s, unsigned rank, const char *why)
{
	nodefix_drop(s->n, s->m[rank], why);
	s->m[rank] = NULL;
}

/* As if its pidfd had said so: what it had mapped is nobody's. */
static void kill_rank(struct scene *s, unsigned rank)
{
	struct member *m = s->m[rank];

	proc_unref(m->proc);
	m->proc = proc_ref(gone);
	lose(s, rank, "was killed");
}

static void try_join(struct scene *s, unsigned rank, struct member *again)
{
	struct fault f = FAULT_NULL;
	struct member *m = NULL;

	if (nodefix_try_join(s->n, s->job, rank, NULL, again, &m, &f) != RES_DONE)
		return;          /* an epoch still runs, or refused: later */
	if (again && m != again) /* who had left comes back as another member */
		nodefix_drop(s->n, again, "is gone");
	s->m[rank] = m;
	link_streams(m);
}

static bool is_present(const struct member *m)
{
	return m && (m->state == MEMBER_JOINED || m->state == MEMBER_STALE);
}

static void leave(struct scene *s, unsigned rank)
{
	struct fault f = FAULT_NULL;
	bool freed;

	if (is_present(s->m[rank])) /* else its session says so */
		(void)job_leave(s->m[rank], &freed, &f);
}

static void cancel(struct scene *s, unsigned rank)
{
	for (unsigned i = 0; i < s->n_ops[rank]; i++)
		if (s->op[rank][i].op)
			op_cancel(s->op[rank][i].op, FAULT_CANCELLED, "cancelled");
}

static void expire(struct scene *s, unsigned rank)
{
	for (unsigned i = 0; i < s->n_ops[rank]; i++)
		if (s->op[rank][i].op)
			s->op[rank][i].op->deadline_us = 1;
	ops_tick(&s->n->jobs, clock_now_us(), 0);
}

static bool break_comms(struct scene *s)
{
	struct node_comm *nc, *tmp;
	bool any = false;

	list_for_each (nc, tmp, &s->n->node.comms, link)
		if (nc->state == COMM_READY && nc->n > 1) {
			node_comm_break(nc, "the test breaks it");
			any = true;
		}
	return any;
}

static void delete_job(struct scene *s)
{
	struct fault f = FAULT_NULL;

	cr_assert_eq(job_delete(s->job, true, NULL, &f), 0, "%s", f.text);
}

bool scene_disturb(struct scene *s, enum disturbance d, unsigned rank)
{
	if (!s->m[rank])
		return false;
	if (d == DISTURB_KILL)
		kill_rank(s, rank);
	else if (d == DISTURB_DISCONNECT)
		lose(s, rank, "has lost its connection");
	else if (d == DISTURB_REJOIN)
		try_join(s, rank, s->m[rank]);
	else if (d == DISTURB_LEAVE)
		leave(s, rank);
	else if (d == DISTURB_DELETE)
		delete_job(s);
	else if (d == DISTURB_CANCEL)
		cancel(s, rank);
	else if (d == DISTURB_DEADLINE)
		expire(s, rank);
	else if (d == DISTURB_DRAIN)
		(void)job_drain(s->job);
	else if (d == DISTURB_BREAK)
		return break_comms(s);
	if (d == DISTURB_REPLACE) {
		lose(s, rank, "was replaced");
		try_join(s, rank, NULL);
	}
	return true;
}

/* ---------------------------------------------------------------- afterwards */

static void drop_all(struct scene *s)
{
	for (unsigned r = 0; r < s->stage->ranks; r++)
		if (s->m[r])
			lose(s, r, "is gone");
	nodefix_turns(s->n);
}

/* Nothing is held back any more: what is not over waits for a peer that has not asked, which
 * can only be while the epoch of the scene lasts. Every op ends well or with a reason. */
static void check_ops(struct scene *s)
{
	bool lasts = s->job->rec->epoch == s->epoch;

	for (unsigned r = 0; r < s->stage->ranks; r++)
		for (unsigned i = 0; i < s->n_ops[r]; i++) {
			const struct nodefix_op *op = &s->op[r][i];

			cr_assert(op->over || op->submitted || (lasts && op->op->state != OP_RUN),
				  "op %u of rank %u waits for ever", i, r);
			cr_assert(!op->fault.code || op->fault.text[0],
				  "op %u of rank %u failed without a word", i, r);
		}
}

/* A drain is over when all have left; who waits for a peer does so by going. */
static void end_drain(struct scene *s)
{
	for (unsigned r = 0; s->job->life.draining && r < s->stage->ranks; r++) {
		if (is_present(s->m[r]))
			leave(s, r);
		if (is_present(s->m[r]))
			lose(s, r, "goes");
	}
	cr_assert_not(s->job->life.draining);
}

/* A new epoch for all of them, in which nobody holds anything. */
static void new_epoch(struct scene *s)
{
	struct fault f = FAULT_NULL;
	struct member *m;

	end_drain(s);
	join_all(s);
	m = s->m[0];
	cr_assert_neq(nodefix_try_join(s->n, s->job, 0, NULL, m, &m, &f), RES_FAILED, "%s", f.text);
	join_all(s);
}

static bool lends(const struct scene *s)
{
	return s->u->rec->optimizer->when == OPTIM_BY_TRAINER;
}

/* Communicators that were broken are made again before. */
static struct unit *register_later(struct scene *s, state_unit *spec)
{
	struct fault f = FAULT_NULL;
	enum res res = RES_WAIT;
	uint64_t charged;
	uint32_t id = 0;

	for (unsigned i = 0; res == RES_WAIT && i < 100; i++) {
		res = nodefix_try_register(s->job, &spec, 1, &id, &charged, &f);
		nodefix_turns(s->n);
	}
	cr_assert_eq(res, RES_DONE, "%s", f.text);
	return job_unit_by_id(s->job, id);
}

/* What the scenario has dropped is there again, under another number. */
static void register_dropped(struct scene *s)
{
	if (s->plain->rec->dropped) {
		bool both = s->u == s->plain;

		s->plain = register_later(s, nodefix_spec("plain", N));
		s->u = both ? s->plain : s->u;
	}
	if (s->u->rec->dropped)
		s->u = s->plain;
}

static void seed_all(struct scene *s)
{
	register_dropped(s);
	for (uint32_t i = 0; i < s->job->n_units; i++) {
		struct unit *u = s->u;

		if (s->job->units[i]->rec->dropped)
			continue;
		s->u = s->job->units[i];
		MUST(s, ask_seed);
		s->u = u;
	}
}

static void train(struct scene *s)
{
	seed_all(s);
	cr_assert_not(s->job->life.torn);
	if (s->u->rec->guarded) {
		MUST(s, ask_begin_forward);
		MUST(s, ask_end_forward);
	} else {
		MUST(s, ask_gather);
		MUST(s, ask_release);
		MUST(s, ask_gradient);
		MUST(s, ask_reduce);
	}
	if (s->u != s->plain) {
		MUST(s, ask_gradient_plain);
		MUST(s, ask_reduce_plain);
	}
	if (lends(s)) {
		MUST(s, ask_next_shard);
		MUST(s, ask_shard_done);
	}
	MUST(s, ask_step);
	MUST(s, ask_commit);
	cr_assert_geq(s->plain->rec->optimizer->steps, 1);
}

void scene_end(struct scene *s, bool is_gone)
{
	s->promised = is_gone || !s->promised ? s->promised : UINT64_MAX >> 2;
	scene_raise(s);
	scene_let_go(s);
	check_ops(s);
	s->promised = 0;
	if (!is_gone) {
		new_epoch(s);
		check_ops(s);
	}
	scene_clear(s);
	if (!is_gone) {
		train(s);
		delete_job(s);
	}
	drop_all(s);
	cr_assert(list_empty(&s->n->jobs.zombies), "the job's memory is not back");
	cr_assert_eq(node_used(&s->n->node), 0, "%llu bytes are still charged",
		     (unsigned long long)node_used(&s->n->node));
}
