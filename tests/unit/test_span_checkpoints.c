/*
 * Checkpoints that the nodes of a job save and load together (cluster/round.h), from one world to another.
 * The messages of the rounds go through a queue, packed; in place of links there is @dead.
 */
#include <criterion/criterion.h>
#include <dirent.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "checkpoint/folder.h"
#include "checkpoint/place.h"
#include "checkpoint/save.h"
#include "cluster/round.h"
#include "core/check.h"
#include "core/cleanup.h"
#include "core/clock.h"
#include "fdcheck.h"
#include "job/loading.h"
#include "job/replica.h"
#include "job/saving.h"
#include "spanfix.h"

static char root[64];

/* As tests/lib/daemonfix.c: where TMPDIR is too long, it is /tmp. */
static void begin_suite(void)
{
	const char *base = getenv("TMPDIR");

	if (!base || !*base || strlen(base) > sizeof(root) - sizeof("/shardd-span-XXXXXX"))
		base = "/tmp";
	fdcheck_begin();
	snprintf(root, sizeof(root), "%s/shardd-span-XXXXXX", base);
	CHECK(mkdtemp(root));
}

static void end_suite(void)
{
	char command[96];

	snprintf(command, sizeof(command), "rm -rf '%s'", root);
	CHECK(system(command) == 0);
	fdcheck_end();
}

TestSuite(span_checkpoints, .init = begin_suite, .fini = end_suite, .timeout = 120);

/* ------------------------------------------------------------------------ the rounds */

struct letter {
	unsigned from, to;
	size_t bytes;
	uint8_t *packed; /* owned */
};

static struct {
	struct round *rounds[SPANFIX_NODES], *over[64];
	unsigned n_over;
	struct letter letters[256];
	unsigned first, n;
	unsigned leader;
	bool dead[SPANFIX_NODES], held, left;
	uint64_t last_step;
	/* what the message of a phase to a node is changed to */
	uint8_t blind;         /* 1 + node that sees another folder */
	uint8_t strays;        /* 1 + node that finds another checkpoint */
	uint8_t dies_at, dies; /* JobRoundWhat; 1 + node */
	/* of replicas */
	bool copies[SPANFIX_NODES]; /* a node is to take a copy */
	unsigned from[SPANFIX_NODES];
	uint64_t copy_bytes[SPANFIX_NODES][_REPLICA_FILES];
	struct fault ended; /* how the leader's round was over */
	bool is_over;
} net;

static unsigned node_of_round(const struct round *r)
{
	for (unsigned i = 0; i < SPANFIX_NODES; i++)
		if (net.rounds[i] == r)
			return i;
	CHECK_NOT_REACHED();
}

static void on_send(struct round *r, unsigned to, Shardd__V1__JobMessage *m)
{
	struct letter *l = &net.letters[net.n++ % ARRAY_SIZE(net.letters)];

	CHECK(net.n - net.first <= ARRAY_SIZE(net.letters));
	m->job = (char *)(uintptr_t) "0/job";
	l->from = node_of_round(r);
	l->to = to;
	l->bytes = shardd__v1__job_message__get_packed_size(m);
	l->packed = malloc(l->bytes);
	CHECK(l->packed);
	shardd__v1__job_message__pack(m, l->packed);
}

static void on_hold(struct round *r, bool on)
{
	(void)r;
	cr_expect_neq(net.held, on);
	net.held = on;
}

static bool on_last(struct round *r, uint64_t *ret)
{
	(void)r;
	*ret = net.last_step;
	return net.last_step;
}

static void on_over(struct round *r, const struct fault *f)
{
	if (r->leads) {
		net.is_over = true;
		net.ended = f ? *f : FAULT_NULL;
	}
	net.rounds[node_of_round(r)] = NULL;
	CHECK(net.n_over < ARRAY_SIZE(net.over));
	net.over[net.n_over++] = r;
}

static bool on_left(struct round *r)
{
	(void)r;
	return net.left;
}

static void on_copy(struct round *r, unsigned from, uint64_t tensors, uint64_t tail)
{
	unsigned at = node_of_round(r);

	net.copies[at] = true;
	net.from[at] = from;
	net.copy_bytes[at][REPLICA_TENSORS] = tensors;
	net.copy_bytes[at][REPLICA_TAIL] = tail;
}

static const struct round_ops round_ops = { .send = on_send,
					    .hold = on_hold,
					    .last = on_last,
					    .left = on_left,
					    .over = on_over,
					    .copy = on_copy };

static unsigned node_of_job(const struct job *job)
{
	for (unsigned i = 0; i < SPANFIX_NODES; i++)
		if (spanfix.jobs[i] == job)
			return i;
	CHECK_NOT_REACHED();
}

static int ask(struct job *job, const struct saving_options *save,
	       const struct loading_options *load)
{
	struct round_options o = { .ops = &round_ops,
				   .id = 77,
				   .loads = load != NULL,
				   .asked = true,
				   .save = save,
				   .load = load,
				   .n = spanfix.n_nodes,
				   .self = node_of_job(job),
				   .leader = net.leader };
	char names[SPANFIX_NODES][SPAN_NAME_BYTES] = { "node0", "node1", "node2" };
	struct round **r = &net.rounds[o.self];

	CHECK(!*r);
	*r = o.self == o.leader ? round_lead(job, &o, names, 99) : round_new_asked(job, &o);
	CHECK(*r);
	if (o.self != o.leader)
		round_ask(*r);
	return 0; /* the leader begins in the next turn */
}

static int on_save(struct job *job, const struct saving_options *o, struct fault *f)
{
	(void)f;
	return ask(job, o, NULL);
}

static int on_load(struct job *job, const struct loading_options *o, struct fault *f)
{
	(void)f;
	return ask(job, NULL, o);
}

static void on_give_up(struct job *job)
{
	struct round *r = net.rounds[node_of_job(job)];

	if (r)
		round_give_up(r);
}

static void lose(unsigned node)
{
	struct fault f = FAULT_NULL;

	net.dead[node] = true;
	for (unsigned i = 0; i < spanfix.n_nodes; i++)
		if (i != node && net.rounds[i] && (i == net.leader || node == net.leader))
			round_lost(net.rounds[i], node, "its link is closed");
	fault_set(&f, FAULT_UNAVAILABLE, NULL, "it has died");
	if (net.rounds[node])
		round_end_here(net.rounds[node], &f);
}

static void on_ask(unsigned at, const Shardd__V1__JobRoundAsk *m)
{
	const struct saving_options save = { .path = m->plan->path, .deadline_us = UINT64_MAX };
	const struct loading_options load = { m->plan->path, m->plan->has_step, m->plan->step };
	struct round_options o = { .ops = &round_ops,
				   .id = m->id,
				   .loads = m->plan->loads,
				   .save = &save,
				   .load = &load,
				   .n = spanfix.n_nodes,
				   .self = at,
				   .leader = at };
	char names[SPANFIX_NODES][SPAN_NAME_BYTES] = { "node0", "node1", "node2" };

	net.rounds[at] = round_lead(spanfix.jobs[at], &o, names, 99);
	CHECK(net.rounds[at]);
}

static void on_phase(unsigned at, unsigned from, Shardd__V1__JobRoundPhase *m)
{
	if (net.dies && m->what == net.dies_at && at == (net.dies - 1u ? net.dies - 1u : 1)) {
		lose(net.dies - 1);
		net.dies = 0;
		if (net.dead[at] || net.dead[from])
			return;
	}
	if (!net.rounds[at])
		net.rounds[at] = round_follow(spanfix.jobs[at], &round_ops, from, m);
	CHECK(net.rounds[at]);
	if (net.blind == at + 1)
		m->nonce++;
	round_on_phase(net.rounds[at], m);
}

static void deliver(const struct letter *l)
{
	Shardd__V1__JobMessage *m = shardd__v1__job_message__unpack(NULL, l->bytes, l->packed);
	struct round *r = net.rounds[l->to];

	CHECK(m);
	if (net.dead[l->from] || net.dead[l->to])
		;
	else if (m->body_case == SHARDD__V1__JOB_MESSAGE__BODY_ROUND_ASK)
		on_ask(l->to, m->round_ask);
	else if (m->body_case == SHARDD__V1__JOB_MESSAGE__BODY_ROUND_PHASE)
		on_phase(l->to, l->from, m->round_phase);
	else if (r && m->body_case == SHARDD__V1__JOB_MESSAGE__BODY_ROUND_END)
		round_on_end(r, l->from, m->round_end);
	else if (r) {
		if (net.strays == l->from + 1)
			m->round_answer->crc++;
		round_on_answer(r, l->from, m->round_answer);
	}
	shardd__v1__job_message__free_unpacked(m, NULL);
	free(l->packed);
}

#define ROUND_ID 78 /* of replicas */
static struct replica_id replica_of(unsigned node, uint64_t step, unsigned part)
{
	return (struct replica_id){ step, replica_layout(spanfix.jobs[node], ROUND_ID), part,
				    spanfix.n_nodes };
}

static void copy_file(struct replica *from, struct replica *to, unsigned file)
{
	_cleanup_(freep) char *bytes = malloc(from->bytes[file]);

	CHECK(bytes);
	cr_assert_eq(pread(from->fds[file], bytes, from->bytes[file], 0), from->bytes[file]);
	cr_assert_eq(pwrite(to->fds[file], bytes, from->bytes[file], 0), from->bytes[file]);
}

/* In place of the link. */
static void take_copy(unsigned at)
{
	struct round *r = net.rounds[at];
	const struct replica_id id = replica_of(at, r->step, net.from[at]);
	struct replica *from = replica_find(spanfix.jobs[net.from[at]], &id), *to;
	struct fault f = FAULT_NULL;

	net.copies[at] = false;
	cr_assert(from);
	for (unsigned i = 0; i < _REPLICA_FILES; i++)
		cr_assert_eq(from->bytes[i], net.copy_bytes[at][i]);
	if (replica_new(spanfix.jobs[at], &id, from->bytes[0] + from->bytes[1], &to, &f) == 0) {
		copy_file(from, to, REPLICA_TENSORS);
		copy_file(from, to, REPLICA_TAIL);
		cr_assert_eq(replica_is_whole(to, &f), 0);
	}
	round_copied(r, from->bytes[0] + from->bytes[1], f.code ? &f : NULL);
}

/* Return: always false, for spanfix_turn_until. */
static bool turn_rounds(void)
{
	struct round *leads = net.rounds[net.leader];

	if (leads && leads->leads && !leads->what)
		round_begin(leads);
	while (net.first < net.n) {
		struct letter l = net.letters[net.first++ % ARRAY_SIZE(net.letters)];

		deliver(&l);
	}
	for (unsigned i = 0; i < spanfix_homes(&spanfix); i++)
		jobs_tick(&spanfix.nodes[i].jobs, clock_now_us());
	for (unsigned i = 0; i < SPANFIX_NODES; i++)
		if (net.rounds[i] && net.copies[i] && !net.dead[i])
			take_copy(i);
	for (unsigned i = 0; i < SPANFIX_NODES; i++)
		if (net.rounds[i])
			round_tick(net.rounds[i], clock_now_us());
	while (net.n_over)
		round_free(net.over[--net.n_over]);
	return false;
}

/* ------------------------------------------------------------------------ the worlds */

static void begin(const unsigned *ranks, bool spans, unsigned leader)
{
	spanfix_begin(&spanfix, spans, ranks);
	memset(&net, 0, sizeof(net));
	net.leader = leader;
	for (unsigned i = 0; i < spanfix_homes(&spanfix); i++) {
		struct jobs *jobs = &spanfix.nodes[i].jobs;

		spanfix.nodes[i].node.checkpoint_roots = root;
		jobs->ops.across.save = on_save;
		jobs->ops.across.load = on_load;
		jobs->ops.across.give_up = on_give_up;
		jobs->ops.before_change = loading_let;
	}
}

static void end(void)
{
	spanfix_end(&spanfix);
	free(spanfix.notes);
}

static void by_rows(state_unit *spec)
{
	const uint64_t shape[] = { 37, 3 }, frozen[] = { 5, 2 };
	state_tensor *t = state_tensor_new("rows", shape, 2);

	t->init_kind = FILL_UNIFORM;
	t->init_a = -1;
	t->init_b = 1;
	CHECK(state_unit_add_tensor(spec, t) == 0);
	t = state_tensor_new("frozen", frozen, 2);
	t->frozen = true;
	t->init_kind = FILL_UNIFORM;
	t->init_b = 2;
	CHECK(state_unit_add_tensor(spec, t) == 0);
	spec->layout = LAYOUT_DIM0;
}

static void (*unit_changes)(state_unit *spec);

static void step(unsigned number, bool commit)
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
	net.last_step = number;
}

static void train(unsigned steps)
{
	struct spanfix *w = &spanfix;

	spanfix_add_unit(w, 1003, unit_changes);
	ALL(w, nodefix_seed(n, m, u, 7, op));
	for (unsigned i = 1; i <= steps; i++)
		step(i, true);
}

/* ------------------------------------------------------------- saving, loading, comparing */

static struct ended {
	bool over;
	struct fault f;
	uint64_t step, bytes;
} ended;

static void on_saved(const struct saving_report *r, const struct fault *f, void *userdata)
{
	struct ended *e = userdata;

	e->over = true;
	e->f = f ? *f : FAULT_NULL;
	e->step = r->step;
	e->bytes = r->bytes;
}

static void on_loaded(const struct loading_report *r, const struct fault *f, void *userdata)
{
	struct ended *e = userdata;

	e->over = true;
	e->f = f ? *f : FAULT_NULL;
	e->step = r->step;
	e->bytes = r->bytes;
}

static bool nothing_goes_on(struct spanfix *w)
{
	for (unsigned i = 0; i < spanfix_homes(w); i++)
		if (net.rounds[i] || saving_is_busy(w->jobs[i]) || w->jobs[i]->checkpoints.loading)
			return false;
	return true;
}

static bool is_over(struct spanfix *w)
{
	return turn_rounds() || (ended.over && nothing_goes_on(w));
}

static void begin_save(unsigned node, const char *name)
{
	const struct saving_options o = { .path = name, .deadline_us = UINT64_MAX };
	struct fault f = FAULT_NULL;

	mkdir(name, 0700);
	ended = (struct ended){ 0 };
	cr_assert_eq(saving_begin(spanfix.jobs[node], spanfix.nodes[node].proc, &o, on_saved,
				  &ended, &f),
		     0, "%s", f.text);
}

static void save(unsigned node, const char *name)
{
	begin_save(node, name);
	spanfix_turn_until(&spanfix, is_over);
}

static void load(unsigned node, const char *name)
{
	const struct loading_options o = { .path = name };
	struct fault f = FAULT_NULL;

	ended = (struct ended){ 0 };
	cr_assert_eq(loading_begin(spanfix.jobs[node], &o, on_loaded, &ended, &f), 0, "%s", f.text);
	spanfix_turn_until(&spanfix, is_over);
}

static void well(uint64_t step_number)
{
	cr_assert_eq(ended.f.code, 0, "%s", ended.f.text);
	cr_assert_eq(ended.step, step_number);
}

static void path(char ret[128], const char *name)
{
	snprintf(ret, 128, "%s/%s", root, name);
}

/* A checkpoint, in memory: each array in one piece. */
struct contents {
	struct index x;
	char *data; /* owned */
	size_t *at; /* owned: by piece */
	size_t bytes;
};

static void *room(void *arg, size_t piece, uint64_t offset, size_t bytes, struct fault *f)
{
	struct contents *c = arg;

	(void)bytes, (void)f;
	return c->data + c->at[piece] + offset;
}

static struct contents contents_of(const char *name, uint64_t step_number)
{
	struct contents c = { 0 };
	const struct save_sink sink = { .room = room, .arg = &c };
	struct save_progress p = { 0 };
	struct fault f = FAULT_NULL;
	_cleanup_(fd_closep) int dir = place_open(root, name, &f), fd = -1;

	cr_assert_geq(dir, 0, "%s", f.text);
	fd = folder_open(dir, step_number, &f);
	cr_assert_geq(fd, 0, "%s", f.text);
	cr_assert_eq(save_read(fd, &c.x, &f), 0, "%s", f.text);
	c.at = calloc(c.x.n_pieces, sizeof(*c.at));
	for (size_t i = 0; i < c.x.n_pieces; i++) {
		c.at[i] = c.bytes;
		c.bytes += index_piece_bytes(&c.x.pieces[i]);
	}
	c.data = malloc(c.bytes);
	CHECK(c.at && c.data);
	cr_assert_eq(save_load(fd, &c.x, &sink, &p, &f), 0, "%s", f.text);
	return c;
}

static void contents_free(struct contents *c)
{
	index_deinit(&c->x);
	free(c->data);
	free(c->at);
}

static bool is_state(const struct index_piece *p)
{
	return p->array != INDEX_BLOB && p->array != INDEX_BUFFER;
}

/* Bytes and steps of all arrays are equal, however they are cut. Blobs are of ranks: not compared. */
static void same(const char *a, const char *b, uint64_t step_number)
{
	struct contents x = contents_of(a, step_number), y = contents_of(b, step_number);
	size_t n = 0, m = 0, steps[2] = { 0 };

	for (size_t i = 0; i < x.x.n_pieces; i++)
		if (is_state(&x.x.pieces[i])) {
			n = x.at[i] + index_piece_bytes(&x.x.pieces[i]);
			steps[0] = x.x.pieces[i].steps > steps[0] ? x.x.pieces[i].steps : steps[0];
		}
	for (size_t i = 0; i < y.x.n_pieces; i++)
		if (is_state(&y.x.pieces[i])) {
			m = y.at[i] + index_piece_bytes(&y.x.pieces[i]);
			steps[1] = y.x.pieces[i].steps > steps[1] ? y.x.pieces[i].steps : steps[1];
		}
	/* blobs have no unit, and so come first */
	size_t bx = x.at[0], by = y.at[0];
	for (size_t i = 0; i < x.x.n_pieces && !is_state(&x.x.pieces[i]); i++)
		bx = x.at[i] + index_piece_bytes(&x.x.pieces[i]);
	for (size_t i = 0; i < y.x.n_pieces && !is_state(&y.x.pieces[i]); i++)
		by = y.at[i] + index_piece_bytes(&y.x.pieces[i]);
	cr_expect_gt(n - bx, 12000);
	cr_assert_eq(n - bx, m - by);
	cr_expect(memcmp(x.data + bx, y.data + by, n - bx) == 0, "%s and %s differ", a, b);
	cr_expect_eq(steps[0], steps[1]);
	contents_free(&x);
	contents_free(&y);
}

/* Entries of the folder that are no checkpoint. */
static unsigned rests(const char *name, unsigned *ret_whole)
{
	DIR *d = opendir(name);
	struct dirent *e;
	unsigned n = 0;
	uint64_t number;

	CHECK(d);
	*ret_whole = 0;
	while ((e = readdir(d))) {
		*ret_whole += folder_step_of(e->d_name, &number);
		n += !folder_step_of(e->d_name, &number) && strcmp(e->d_name, ".") != 0 &&
		     strcmp(e->d_name, "..") != 0;
	}
	closedir(d);
	return n;
}

/* Save in one world, load in another, and save there again. */
static void there_and_back(const unsigned *from, bool from_spans, const unsigned *to, bool to_spans)
{
	unsigned whole;
	char a[128], b[128];

	path(a, "a");
	path(b, "b");
	begin(from, from_spans, 0);
	train(3);
	save(0, a);
	well(3);
	cr_expect_eq(rests(a, &whole), 0);
	end();
	begin(to, to_spans, to_spans && to[1] ? 1 : 0);
	spanfix_add_unit(&spanfix, 1003, unit_changes);
	load(0, a);
	well(3);
	for (unsigned i = 0; i < spanfix_homes(&spanfix); i++) {
		cr_expect_eq(spanfix.jobs[i]->rec->step, 3);
		cr_expect(spanfix.jobs[i]->rec->has_commit);
		cr_expect_eq(spanfix.jobs[i]->joined, 0);
	}
	net.last_step = 3;
	save(0, b);
	well(3);
	same(a, b, 3);
	end();
}

#define WORLD(...) ((const unsigned[SPANFIX_NODES]){ __VA_ARGS__ })
#define THERE_AND_BACK(name, change, from, from_spans, to, to_spans) \
	Test(span_checkpoints, name)                                 \
	{                                                            \
		unit_changes = change;                               \
		there_and_back(from, from_spans, to, to_spans);      \
	}

THERE_AND_BACK(of_2_nodes_are_loaded_by_1, NULL, WORLD(2, 1), true, WORLD(3), false)
THERE_AND_BACK(of_2_nodes_are_loaded_by_3, NULL, WORLD(2, 1), true, WORLD(1, 2, 3), true)
THERE_AND_BACK(of_1_node_are_loaded_by_3, NULL, WORLD(2), false, WORLD(1, 2, 1), true)
THERE_AND_BACK(of_3_nodes_are_loaded_by_2, NULL, WORLD(1, 1, 1), true, WORLD(2, 2), true)
THERE_AND_BACK(of_rows_are_loaded_by_3, by_rows, WORLD(2, 1), true, WORLD(1, 1, 2), true)
THERE_AND_BACK(of_rows_are_loaded_by_1, by_rows, WORLD(1, 2, 3), true, WORLD(2), false)
THERE_AND_BACK(of_replicas_are_loaded_by_3, spanfix_replicated, WORLD(2, 1), true, WORLD(1, 1, 2),
	       true)

/* Not at once: a step was made that no commit has. The next commit is the one, on all nodes. */
Test(span_checkpoints, wait_for_the_next_commit)
{
	char a[128], b[128];

	path(a, "a");
	path(b, "b");
	begin(WORLD(1, 1), true, 0);
	train(1);
	step(2, false);
	begin_save(1, a); /* not the leader */
	for (unsigned i = 0; i < 200; i++) {
		turn_rounds();
		for (unsigned k = 0; k < 2; k++)
			nodefix_turn(&spanfix.nodes[k]);
	}
	cr_expect(!ended.over);
	cr_expect(!net.held, "commits may be made");
	ALL(&spanfix, nodefix_commit(n, m, 2, 0, op));
	step(3, true); /* while it is written */
	spanfix_turn_until(&spanfix, is_over);
	well(2);
	save(0, b);
	well(3);
	end();
}

static void expect_failed(enum fault_code code, const char *words)
{
	cr_expect_eq(ended.f.code, code, "%s", fault_code_name(ended.f.code));
	cr_expect(strstr(ended.f.text, words), "%s", ended.f.text);
}

/* A step was made that no commit has, and the ranks leave, before it is asked for or while it waits. */
static void of_ranks_that_have_left(unsigned node, bool before)
{
	char a[128];
	unsigned whole;

	path(a, "a");
	begin(WORLD(1, 1), true, 0);
	train(1);
	step(2, false);
	net.left = before;
	begin_save(node, a);
	for (unsigned i = 0; !before && i < 200; i++) {
		turn_rounds();
		for (unsigned k = 0; k < 2; k++)
			nodefix_turn(&spanfix.nodes[k]);
	}
	cr_expect(!ended.over);
	net.left = true;
	spanfix_turn_until(&spanfix, is_over);
	expect_failed(FAULT_STATE, "no rank of job 'job' is joined: nothing commits");
	cr_expect(!net.held, "commits may be made");
	cr_expect_eq(rests(a, &whole), 0);
	cr_expect_eq(whole, 0);
	end();
}

Test(span_checkpoints, when_all_ranks_have_left_are_refused)
{
	of_ranks_that_have_left(0, true);
	of_ranks_that_have_left(1, true);
}

Test(span_checkpoints, whose_ranks_leave_while_it_waits_are_refused)
{
	of_ranks_that_have_left(0, false);
	of_ranks_that_have_left(1, false);
}

/* They leave behind the commit that it is of. */
Test(span_checkpoints, of_ranks_that_have_left_behind_their_commit)
{
	char a[128], b[128];

	path(a, "a");
	path(b, "b");
	begin(WORLD(1, 1), true, 0);
	train(1);
	step(2, false);
	begin_save(1, a);
	while (!net.n || net.first < net.n)
		turn_rounds();
	ALL(&spanfix, nodefix_commit(n, m, 2, 0, op));
	net.last_step = 2;
	net.left = true;
	spanfix_turn_until(&spanfix, is_over);
	well(2);
	save(1, b);
	well(2);
	end();
}

Test(span_checkpoints, in_folders_that_a_node_does_not_see_are_refused)
{
	char a[128];
	unsigned whole;

	path(a, "a");
	begin(WORLD(1, 1, 1), true, 0);
	train(1);
	net.blind = 1 + 2;
	save(0, a);
	expect_failed(FAULT_STATE, "these do not: node node2: it sees another");
	cr_expect_eq(rests(a, &whole), 0);
	cr_expect_eq(whole, 0);
	net.blind = 0;
	save(1, a);
	well(1);
	end();
}

/* A node, or the leader, dies in each phase; the one after it is whole, and nothing else is. */
static void dies(uint8_t phase, unsigned node)
{
	char a[128];
	unsigned whole;

	path(a, "a");
	begin(WORLD(1, 1, 1), true, 0);
	train(1);
	net.dies_at = phase;
	net.dies = (uint8_t)(1 + node);
	save(1, a);
	cr_expect_neq(ended.f.code, 0);
	cr_expect(strstr(ended.f.text, node == 1 ? "it has died" : "is gone"), "%s", ended.f.text);
	rests(a, &whole);
	cr_expect_eq(whole, 0);
	memset(net.dead, 0, sizeof(net.dead));
	save(1, a);
	well(1);
	cr_expect_eq(rests(a, &whole), 0);
	cr_expect_eq(whole, 1);
	end();
}

#define DIES(name, phase, node)                                                 \
	Test(span_checkpoints, name)                                            \
	{                                                                       \
		dies(SHARDD__V1__JOB_ROUND_WHAT__JOB_ROUND_WHAT_##phase, node); \
	}

DIES(a_node_dies_before_it_has_frozen, NOW, 2)
DIES(a_node_dies_before_it_has_seen_the_folder, SEE, 2)
DIES(a_node_dies_before_it_has_written, WRITE, 2)
DIES(the_node_that_asked_dies_before_it_has_written, WRITE, 1)
DIES(the_leader_dies_before_others_have_seen_the_folder, SEE, 0)
DIES(the_leader_dies_before_others_have_written, WRITE, 0)

Test(span_checkpoints, that_differ_between_nodes_are_not_loaded)
{
	char a[128];

	path(a, "a");
	begin(WORLD(1, 1), true, 0);
	train(1);
	save(0, a);
	well(1);
	end();
	begin(WORLD(1, 1), true, 0);
	spanfix_add_unit(&spanfix, 1003, unit_changes);
	net.strays = 1 + 1;
	load(1, a);
	expect_failed(FAULT_STATE, "find different checkpoints of step 1");
	net.strays = 0;
	load(1, a);
	well(1);
	end();
}

Test(span_checkpoints, a_node_dies_while_they_are_loaded)
{
	char a[128];

	path(a, "a");
	begin(WORLD(1, 1), true, 0);
	train(1);
	save(0, a);
	well(1);
	end();
	begin(WORLD(1, 1), true, 0);
	spanfix_add_unit(&spanfix, 1003, unit_changes);
	net.dies_at = SHARDD__V1__JOB_ROUND_WHAT__JOB_ROUND_WHAT_READ;
	net.dies = 1 + 1;
	load(0, a);
	expect_failed(FAULT_ABORTED, "node node1 is gone");
	for (unsigned i = 0; i < 2; i++)
		cr_expect(!spanfix.jobs[i]->rec->has_commit);
	memset(net.dead, 0, sizeof(net.dead));
	load(0, a);
	well(1);
	end();
}

/* --------------------------------------------------------------------------- replicas */

static bool replicas_are_over(struct spanfix *w)
{
	return turn_rounds() || (net.is_over && nothing_goes_on(w));
}

/* The leader begins a round of the next commit, which then is made: that of @step. */
static void begin_replicas(uint64_t step_number)
{
	const struct saving_options save = {
		.path = "", .deadline_us = UINT64_MAX, .next = true, .memory = true
	};
	struct round_options o = { .ops = &round_ops,
				   .id = ROUND_ID,
				   .save = &save,
				   .n = spanfix.n_nodes,
				   .self = net.leader,
				   .leader = net.leader };
	char names[SPANFIX_NODES][SPAN_NAME_BYTES] = { "node0", "node1", "node2" };

	net.is_over = false;
	net.rounds[net.leader] = round_lead(spanfix.jobs[net.leader], &o, names, 99);
	CHECK(net.rounds[net.leader]);
	turn_rounds(); /* it begins, and the others hear of it */
	turn_rounds();
	ALL(&spanfix, nodefix_commit(n, m, step_number, 8 + m->rank, op));
	net.last_step = step_number;
}

static void replicate(uint64_t step_number)
{
	step((unsigned)step_number, false);
	begin_replicas(step_number);
	spanfix_turn_until(&spanfix, replicas_are_over);
}

/* Each node has its part, and that of the node before it, of this step and of no other one. */
static void expect_replicas(uint64_t step_number)
{
	for (unsigned i = 0; i < spanfix.n_nodes; i++) {
		struct job *job = spanfix.jobs[i];
		unsigned before = (i + spanfix.n_nodes - 1) % spanfix.n_nodes, all = 0;
		const struct replica_id own = replica_of(i, step_number, i),
					copy = replica_of(i, step_number, before);
		struct replica *a = replica_find(job, &own), *b = replica_find(job, &copy), *r,
			       *tmp;

		cr_assert(a && b && a->complete && b->complete, "node %u", i);
		list_for_each (r, tmp, &job->across.replicas, link)
			all++;
		cr_expect_eq(all, 2);
	}
}

static uint64_t control_bytes(unsigned node)
{
	return spanfix.jobs[node]->quota.by_class[MEM_CONTROL];
}

Test(span_checkpoints, replicas_are_on_two_nodes)
{
	begin(WORLD(1, 2, 1), true, 1);
	train(2);
	replicate(3);
	cr_expect_eq(net.ended.code, 0, "%s", net.ended.text);
	expect_replicas(3);
	replicate(4);
	expect_replicas(4);
	for (unsigned i = 0; i < 3; i++)
		replica_forget(spanfix.jobs[i]);
	replicate(5);
	expect_replicas(5);
	end();
}

/* The job trains on. */
Test(span_checkpoints, replicas_without_memory_are_refused)
{
	uint64_t limit;

	begin(WORLD(1, 1), true, 0);
	train(1);
	replicate(2);
	expect_replicas(2);
	limit = spanfix.jobs[1]->quota.limit;
	spanfix.jobs[1]->quota.limit = spanfix.jobs[1]->quota.used + 1024;
	replicate(3);
	cr_expect_eq(net.ended.code, FAULT_EXHAUSTED);
	cr_expect(strstr(net.ended.text, "node node1: ") &&
			  strstr(net.ended.text, "set replicas to 0"),
		  "%s", net.ended.text);
	spanfix.jobs[1]->quota.limit = limit;
	replicate(4);
	cr_expect_eq(net.ended.code, 0, "%s", net.ended.text);
	expect_replicas(4);
	end();
}

/* A node dies in a phase: what was complete before stays, and the account has no more than that. */
static void replicas_die(uint8_t phase, unsigned node)
{
	uint64_t before[3];

	begin(WORLD(1, 1, 1), true, 0);
	train(1);
	replicate(2);
	for (unsigned i = 0; i < 3; i++)
		before[i] = control_bytes(i);
	net.dies_at = phase;
	net.dies = (uint8_t)(1 + node);
	step(3, false);
	begin_replicas(3);
	spanfix_turn_until(&spanfix, replicas_are_over);
	cr_expect_neq(net.ended.code, 0);
	for (unsigned i = 0; i < 3; i++) {
		const struct replica_id own = replica_of(i, 2, i);

		cr_expect(replica_find(spanfix.jobs[i], &own));
	}
	memset(net.dead, 0, sizeof(net.dead));
	memset(net.copies, 0, sizeof(net.copies));
	replicate(4);
	cr_expect_eq(net.ended.code, 0, "%s", net.ended.text);
	expect_replicas(4);
	for (unsigned i = 0; i < 3; i++)
		cr_expect_eq(control_bytes(i), before[i]);
	end();
}

#define WRITE SHARDD__V1__JOB_ROUND_WHAT__JOB_ROUND_WHAT_WRITE
#define COPY  SHARDD__V1__JOB_ROUND_WHAT__JOB_ROUND_WHAT_COPY
#define REPLICAS_DIE(name, phase, node)            \
	Test(span_checkpoints, replicas_of_##name) \
	{                                          \
		replicas_die(phase, node);         \
	}
REPLICAS_DIE(a_node_that_dies_writing, WRITE, 1)
REPLICAS_DIE(a_leader_that_dies_writing, WRITE, 0)
REPLICAS_DIE(a_node_that_dies_copying, COPY, 2)
REPLICAS_DIE(a_leader_that_dies_copying, COPY, 0)
