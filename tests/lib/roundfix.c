#include "roundfix.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "core/check.h"
#include "core/cleanup.h"
#include "core/clock.h"
#include "fdcheck.h"
#include "job/loading.h"
#include "job/saving.h"

char roundfix_root[64];
void (*roundfix_unit_changes)(state_unit *spec);

/* As tests/lib/daemonfix.c: where TMPDIR is too long, it is /tmp. */
void roundfix_begin_suite(void)
{
	const char *base = getenv("TMPDIR");

	if (!base || !*base || strlen(base) > sizeof(roundfix_root) - sizeof("/shardd-span-XXXXXX"))
		base = "/tmp";
	fdcheck_begin();
	snprintf(roundfix_root, sizeof(roundfix_root), "%s/shardd-span-XXXXXX", base);
	CHECK(mkdtemp(roundfix_root));
}

void roundfix_end_suite(void)
{
	char command[96];

	snprintf(command, sizeof(command), "rm -rf '%s'", roundfix_root);
	CHECK(system(command) == 0);
	fdcheck_end();
}

/* ------------------------------------------------------------------------ the rounds */

struct roundfix roundfix;

static unsigned roundfix_node_of_round(const struct round *r)
{
	for (unsigned i = 0; i < SPANFIX_NODES; i++)
		if (roundfix.rounds[i] == r)
			return i;
	CHECK_NOT_REACHED();
}

static void roundfix_on_send(struct round *r, unsigned to, Shardd__V1__JobMessage *m)
{
	struct roundfix_letter *l = &roundfix.letters[roundfix.n++ % ARRAY_SIZE(roundfix.letters)];

	CHECK(roundfix.n - roundfix.first <= ARRAY_SIZE(roundfix.letters));
	m->job = (char *)(uintptr_t) "0/job";
	l->from = roundfix_node_of_round(r);
	l->to = to;
	l->bytes = shardd__v1__job_message__get_packed_size(m);
	l->packed = malloc(l->bytes);
	CHECK(l->packed);
	shardd__v1__job_message__pack(m, l->packed);
}

static void roundfix_on_hold(struct round *r, bool on)
{
	(void)r;
	cr_expect_neq(roundfix.held, on);
	roundfix.held = on;
}

static bool roundfix_on_last(struct round *r, uint64_t *ret)
{
	(void)r;
	*ret = roundfix.last_step;
	return roundfix.last_step;
}

static void roundfix_on_over(struct round *r, const struct fault *f)
{
	if (r->leads) {
		roundfix.is_over = true;
		roundfix.ended = f ? *f : FAULT_NULL;
	} else {
		roundfix.followed = f ? *f : FAULT_NULL;
	}
	roundfix.rounds[roundfix_node_of_round(r)] = NULL;
	CHECK(roundfix.n_over < ARRAY_SIZE(roundfix.over));
	roundfix.over[roundfix.n_over++] = r;
}

static bool roundfix_on_left(struct round *r)
{
	(void)r;
	return roundfix.left;
}

static void roundfix_on_copy(struct round *r, unsigned from, uint64_t tensors, uint64_t tail)
{
	unsigned at = roundfix_node_of_round(r);

	roundfix.copies[at] = true;
	roundfix.from[at] = from;
	roundfix.copy_bytes[at][REPLICA_TENSORS] = tensors;
	roundfix.copy_bytes[at][REPLICA_TAIL] = tail;
}

const struct round_ops roundfix_ops = { .send = roundfix_on_send,
					.hold = roundfix_on_hold,
					.last = roundfix_on_last,
					.left = roundfix_on_left,
					.over = roundfix_on_over,
					.copy = roundfix_on_copy };

static unsigned roundfix_node_of_job(const struct job *job)
{
	for (unsigned i = 0; i < SPANFIX_NODES; i++)
		if (spanfix.jobs[i] == job)
			return i;
	CHECK_NOT_REACHED();
}

static int roundfix_ask(struct job *job, const struct saving_options *save,
			const struct loading_options *load)
{
	struct round_options o = { .ops = &roundfix_ops,
				   .id = 77,
				   .loads = load != NULL,
				   .asked = true,
				   .save = save,
				   .load = load,
				   .n = spanfix.n_nodes,
				   .self = roundfix_node_of_job(job),
				   .leader = roundfix.leader };
	char names[SPANFIX_NODES][SPAN_NAME_BYTES] = { "node0", "node1", "node2" };
	struct round **r = &roundfix.rounds[o.self];

	CHECK(!*r);
	*r = o.self == o.leader ? round_lead(job, &o, names, 99) : round_new_asked(job, &o);
	CHECK(*r);
	if (o.self != o.leader)
		round_ask(*r);
	return 0; /* the leader begins in the next turn */
}

static int roundfix_on_save(struct job *job, const struct saving_options *o, struct fault *f)
{
	(void)f;
	return roundfix_ask(job, o, NULL);
}

static int roundfix_on_load(struct job *job, const struct loading_options *o, struct fault *f)
{
	(void)f;
	return roundfix_ask(job, NULL, o);
}

static void roundfix_on_give_up(struct job *job, bool loads)
{
	struct round *r = roundfix.rounds[roundfix_node_of_job(job)];

	if (r && r->loads == loads)
		round_give_up(r);
}

void roundfix_lose(unsigned node)
{
	struct fault f = FAULT_NULL;

	roundfix.dead[node] = true;
	for (unsigned i = 0; i < spanfix.n_nodes; i++)
		if (i != node && roundfix.rounds[i] &&
		    (i == roundfix.leader || node == roundfix.leader))
			round_lost(roundfix.rounds[i], node, "its link is closed");
	fault_set(&f, FAULT_UNAVAILABLE, NULL, "it has died");
	if (roundfix.rounds[node])
		round_end_here(roundfix.rounds[node], &f);
}

static void roundfix_on_ask(unsigned at, const Shardd__V1__JobRoundAsk *m)
{
	const struct saving_options save = { .path = m->plan->path, .deadline_us = UINT64_MAX };
	const struct loading_options load = { m->plan->path, m->plan->has_step, m->plan->step };
	struct round_options o = { .ops = &roundfix_ops,
				   .id = m->id,
				   .loads = m->plan->loads,
				   .save = &save,
				   .load = &load,
				   .n = spanfix.n_nodes,
				   .self = at,
				   .leader = at };
	char names[SPANFIX_NODES][SPAN_NAME_BYTES] = { "node0", "node1", "node2" };

	roundfix.rounds[at] = round_lead(spanfix.jobs[at], &o, names, 99);
	CHECK(roundfix.rounds[at]);
}

void roundfix_on_phase(unsigned at, unsigned from, Shardd__V1__JobRoundPhase *m)
{
	if (roundfix.dies && m->what == roundfix.dies_at &&
	    at == (roundfix.dies - 1u ? roundfix.dies - 1u : 1)) {
		roundfix_lose(roundfix.dies - 1);
		roundfix.dies = 0;
		if (roundfix.dead[at] || roundfix.dead[from])
			return;
	}
	if (!roundfix.rounds[at])
		roundfix.rounds[at] = round_follow(spanfix.jobs[at], &roundfix_ops, from, m);
	CHECK(roundfix.rounds[at]);
	if (roundfix.blind == at + 1)
		m->nonce++;
	round_on_phase(roundfix.rounds[at], m);
	if (roundfix.ends == at + 1 && m->what == roundfix.ends_at && roundfix.rounds[at]) {
		Shardd__V1__JobRoundEnd end = SHARDD__V1__JOB_ROUND_END__INIT;

		roundfix.ends = 0;
		end.id = m->id;
		round_on_end(roundfix.rounds[at], from, &end);
	}
}

/* To a leader that has no round: the test is it. */
static void roundfix_note_answer(const Shardd__V1__JobRoundAnswer *m)
{
	if (m->progress)
		return;
	roundfix.answered = m->code;
	roundfix.later = m->later;
}

static void roundfix_deliver(const struct roundfix_letter *l)
{
	Shardd__V1__JobMessage *m = shardd__v1__job_message__unpack(NULL, l->bytes, l->packed);
	struct round *r = roundfix.rounds[l->to];

	CHECK(m);
	if (roundfix.dead[l->from] || roundfix.dead[l->to])
		;
	else if (m->body_case == SHARDD__V1__JOB_MESSAGE__BODY_ROUND_ANSWER && !r)
		roundfix_note_answer(m->round_answer);
	else if (m->body_case == SHARDD__V1__JOB_MESSAGE__BODY_ROUND_ASK)
		roundfix_on_ask(l->to, m->round_ask);
	else if (m->body_case == SHARDD__V1__JOB_MESSAGE__BODY_ROUND_PHASE)
		roundfix_on_phase(l->to, l->from, m->round_phase);
	else if (r && m->body_case == SHARDD__V1__JOB_MESSAGE__BODY_ROUND_END)
		round_on_end(r, l->from, m->round_end);
	else if (r) {
		if (roundfix.strays == l->from + 1)
			m->round_answer->crc++;
		round_on_answer(r, l->from, m->round_answer);
	}
	shardd__v1__job_message__free_unpacked(m, NULL);
	free(l->packed);
}

struct replica_id roundfix_replica_of(unsigned node, uint64_t step, unsigned part)
{
	return (struct replica_id){ step, replica_layout(spanfix.jobs[node], ROUNDFIX_ID), part,
				    spanfix.n_nodes };
}

static void roundfix_copy_file(struct replica *from, struct replica *to, unsigned file)
{
	ssize_t n = (ssize_t)from->bytes[file];
	_cleanup_(freep) char *bytes = malloc(from->bytes[file]);

	CHECK(bytes);
	cr_assert_eq(pread(from->fds[file], bytes, from->bytes[file], 0), n);
	cr_assert_eq(pwrite(to->fds[file], bytes, from->bytes[file], 0), n);
}

/* In place of the link. */
static void roundfix_take_copy(unsigned at)
{
	struct round *r = roundfix.rounds[at];
	const struct replica_id id = roundfix_replica_of(at, r->step, roundfix.from[at]);
	struct replica *from = replica_find(spanfix.jobs[roundfix.from[at]], &id), *to;
	struct fault f = FAULT_NULL;

	roundfix.copies[at] = false;
	cr_assert(from);
	for (unsigned i = 0; i < _REPLICA_FILES; i++)
		cr_assert_eq(from->bytes[i], roundfix.copy_bytes[at][i]);
	if (replica_new(spanfix.jobs[at], &id, from->bytes[0] + from->bytes[1], &to, &f) == 0) {
		roundfix_copy_file(from, to, REPLICA_TENSORS);
		roundfix_copy_file(from, to, REPLICA_TAIL);
		cr_assert_eq(replica_is_whole(to, &f), 0);
	}
	round_copied(r, from->bytes[0] + from->bytes[1], f.code ? &f : NULL);
}

bool roundfix_turn(void)
{
	struct round *leads = roundfix.rounds[roundfix.leader];

	if (leads && leads->leads && !leads->what)
		round_begin(leads);
	while (roundfix.first < roundfix.n) {
		struct roundfix_letter l =
			roundfix.letters[roundfix.first++ % ARRAY_SIZE(roundfix.letters)];

		roundfix_deliver(&l);
	}
	for (unsigned i = 0; i < spanfix_homes(&spanfix); i++)
		jobs_tick(&spanfix.nodes[i].jobs, clock_now_us());
	for (unsigned i = 0; i < SPANFIX_NODES; i++)
		if (roundfix.rounds[i] && roundfix.copies[i] && !roundfix.waits &&
		    !roundfix.dead[i])
			roundfix_take_copy(i);
	for (unsigned i = 0; i < SPANFIX_NODES; i++)
		if (roundfix.rounds[i])
			round_tick(roundfix.rounds[i], clock_now_us());
	while (roundfix.n_over)
		round_free(roundfix.over[--roundfix.n_over]);
	return false;
}

/* ------------------------------------------------------------------------ the worlds */

void roundfix_begin(const unsigned *ranks, bool spans, unsigned leader)
{
	spanfix_begin(&spanfix, spans, ranks);
	memset(&roundfix, 0, sizeof(roundfix));
	roundfix.leader = leader;
	for (unsigned i = 0; i < spanfix_homes(&spanfix); i++) {
		struct jobs *jobs = &spanfix.nodes[i].jobs;

		spanfix.nodes[i].node.checkpoint_roots = roundfix_root;
		jobs->ops.across.save = roundfix_on_save;
		jobs->ops.across.load = roundfix_on_load;
		jobs->ops.across.give_up = roundfix_on_give_up;
		jobs->ops.before_change = loading_let;
	}
}

void roundfix_end(void)
{
	spanfix_end(&spanfix);
	free(spanfix.notes);
}

void roundfix_step(unsigned number, bool commit)
{
	struct spanfix *w = &spanfix;

	ALL(w, nodefix_on_unit(n, m, "GradientBuffer", u, op));
	for (uint32_t r = 0; r < w->size; r++)
		spanfix_fill(spanfix_result(w, r), r, number);
	ALL(w, nodefix_reduce(n, m, u, false, op));
	ALL(w, nodefix_step(n, m, op));
	if (!commit)
		return;
	ALL(w, nodefix_commit(n, m, number, 8 + m->rank, op));
	roundfix.last_step = number;
}

void roundfix_train(unsigned steps)
{
	struct spanfix *w = &spanfix;

	spanfix_add_unit(w, 1003, roundfix_unit_changes);
	ALL(w, nodefix_seed(n, m, u, 7, op));
	for (unsigned i = 1; i <= steps; i++)
		roundfix_step(i, true);
}

bool roundfix_is_idle(struct spanfix *w)
{
	for (unsigned i = 0; i < spanfix_homes(w); i++)
		if (roundfix.rounds[i] || saving_is_busy(w->jobs[i]) ||
		    w->jobs[i]->checkpoints.loading)
			return false;
	return true;
}

void roundfix_path(char ret[128], const char *name)
{
	snprintf(ret, 128, "%s/%s", roundfix_root, name);
}

bool roundfix_has_told_the_end(struct spanfix *w)
{
	(void)w;
	return roundfix_turn() || !roundfix.ends;
}
