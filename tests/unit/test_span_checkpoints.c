/*
 * Checkpoints that the nodes of a job save and load together (cluster/round.h), from one world to another.
 */
#include <criterion/criterion.h>
#include <dirent.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "checkpoint/folder.h"
#include "checkpoint/parts.h"
#include "checkpoint/place.h"
#include "checkpoint/save.h"
#include "core/check.h"
#include "core/cleanup.h"
#include "job/loading.h"
#include "job/saving.h"
#include "roundfix.h"

TestSuite(span_checkpoints, .init = roundfix_begin_suite, .fini = roundfix_end_suite,
	  .timeout = 120);

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

static bool is_over(struct spanfix *w)
{
	return roundfix_turn() || (ended.over && roundfix_is_idle(w));
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

static void begin_load(unsigned node, const char *name)
{
	const struct loading_options o = { .path = name };
	struct fault f = FAULT_NULL;

	ended = (struct ended){ 0 };
	cr_assert_eq(loading_begin(spanfix.jobs[node], &o, on_loaded, &ended, &f), 0, "%s", f.text);
}

static void load(unsigned node, const char *name)
{
	begin_load(node, name);
	spanfix_turn_until(&spanfix, is_over);
}

static void well(uint64_t step_number)
{
	cr_assert_eq(ended.f.code, 0, "%s", ended.f.text);
	cr_assert_eq(ended.step, step_number);
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
	_cleanup_(fd_closep) int dir = place_open(roundfix_root, name, &f), fd = -1;

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

	roundfix_path(a, "a");
	roundfix_path(b, "b");
	roundfix_begin(from, from_spans, 0);
	roundfix_train(3);
	save(0, a);
	well(3);
	cr_expect_eq(rests(a, &whole), 0);
	roundfix_end();
	roundfix_begin(to, to_spans, to_spans && to[1] ? 1 : 0);
	spanfix_add_unit(&spanfix, 1003, roundfix_unit_changes);
	load(0, a);
	well(3);
	for (unsigned i = 0; i < spanfix_homes(&spanfix); i++) {
		cr_expect_eq(spanfix.jobs[i]->rec->step, 3);
		cr_expect(spanfix.jobs[i]->rec->has_commit);
		cr_expect_eq(spanfix.jobs[i]->joined, 0);
	}
	roundfix.last_step = 3;
	save(0, b);
	well(3);
	same(a, b, 3);
	roundfix_end();
}

#define THERE_AND_BACK(name, change, from, from_spans, to, to_spans) \
	Test(span_checkpoints, name)                                 \
	{                                                            \
		roundfix_unit_changes = change;                      \
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

	roundfix_path(a, "a");
	roundfix_path(b, "b");
	roundfix_begin(WORLD(1, 1), true, 0);
	roundfix_train(1);
	roundfix_step(2, false);
	begin_save(1, a); /* not the leader */
	for (unsigned i = 0; i < 200; i++) {
		roundfix_turn();
		for (unsigned k = 0; k < 2; k++)
			nodefix_turn(&spanfix.nodes[k]);
	}
	cr_expect(!ended.over);
	cr_expect(!roundfix.held, "commits may be made");
	ALL(&spanfix, nodefix_commit(n, m, 2, 0, op));
	roundfix_step(3, true); /* while it is written */
	spanfix_turn_until(&spanfix, is_over);
	well(2);
	save(0, b);
	well(3);
	roundfix_end();
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

	roundfix_path(a, "a");
	roundfix_begin(WORLD(1, 1), true, 0);
	roundfix_train(1);
	roundfix_step(2, false);
	roundfix.left = before;
	begin_save(node, a);
	for (unsigned i = 0; !before && i < 200; i++) {
		roundfix_turn();
		for (unsigned k = 0; k < 2; k++)
			nodefix_turn(&spanfix.nodes[k]);
	}
	cr_expect(!ended.over);
	roundfix.left = true;
	spanfix_turn_until(&spanfix, is_over);
	expect_failed(FAULT_STATE, "no rank of job 'job' is joined: nothing commits");
	cr_expect(!roundfix.held, "commits may be made");
	cr_expect_eq(rests(a, &whole), 0);
	cr_expect_eq(whole, 0);
	roundfix_end();
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

	roundfix_path(a, "a");
	roundfix_path(b, "b");
	roundfix_begin(WORLD(1, 1), true, 0);
	roundfix_train(1);
	roundfix_step(2, false);
	begin_save(1, a);
	while (!roundfix.n || roundfix.first < roundfix.n)
		roundfix_turn();
	ALL(&spanfix, nodefix_commit(n, m, 2, 0, op));
	roundfix.last_step = 2;
	roundfix.left = true;
	spanfix_turn_until(&spanfix, is_over);
	well(2);
	save(1, b);
	well(2);
	roundfix_end();
}

Test(span_checkpoints, in_folders_that_a_node_does_not_see_are_refused)
{
	char a[128];
	unsigned whole;

	roundfix_path(a, "a");
	roundfix_begin(WORLD(1, 1, 1), true, 0);
	roundfix_train(1);
	roundfix.blind = 1 + 2;
	save(0, a);
	expect_failed(FAULT_STATE, "these do not: node node2: it sees another");
	cr_expect_eq(rests(a, &whole), 0);
	cr_expect_eq(whole, 0);
	roundfix.blind = 0;
	save(1, a);
	well(1);
	roundfix_end();
}

/* A node, or the leader, dies in each phase; the one after it is whole, and nothing else is. */
static void dies(uint8_t phase, unsigned node)
{
	char a[128];
	unsigned whole;

	roundfix_path(a, "a");
	roundfix_begin(WORLD(1, 1, 1), true, 0);
	roundfix_train(1);
	roundfix.dies_at = phase;
	roundfix.dies = (uint8_t)(1 + node);
	save(1, a);
	cr_expect_neq(ended.f.code, 0);
	cr_expect(strstr(ended.f.text, node == 1 ? "it has died" : "is gone"), "%s", ended.f.text);
	rests(a, &whole);
	cr_expect_eq(whole, 0);
	memset(roundfix.dead, 0, sizeof(roundfix.dead));
	save(1, a);
	well(1);
	cr_expect_eq(rests(a, &whole), 0);
	cr_expect_eq(whole, 1);
	roundfix_end();
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

/* A job of two nodes like one that was saved at step 1; @a: the folder. */
static void begin_after_a_save(char a[128])
{
	roundfix_path(a, "a");
	roundfix_begin(WORLD(1, 1), true, 0);
	roundfix_train(1);
	save(0, a);
	well(1);
	roundfix_end();
	roundfix_begin(WORLD(1, 1), true, 0);
	spanfix_add_unit(&spanfix, 1003, roundfix_unit_changes);
}

Test(span_checkpoints, that_differ_between_nodes_are_not_loaded)
{
	char a[128];

	begin_after_a_save(a);
	roundfix.strays = 1 + 1;
	load(1, a);
	expect_failed(FAULT_STATE, "find different checkpoints of step 1");
	roundfix.strays = 0;
	load(1, a);
	well(1);
	roundfix_end();
}

Test(span_checkpoints, a_node_dies_while_they_are_loaded)
{
	char a[128];

	begin_after_a_save(a);
	roundfix.dies_at = SHARDD__V1__JOB_ROUND_WHAT__JOB_ROUND_WHAT_READ;
	roundfix.dies = 1 + 1;
	load(0, a);
	expect_failed(FAULT_ABORTED, "node node1 is gone");
	for (unsigned i = 0; i < 2; i++)
		cr_expect(!spanfix.jobs[i]->rec->has_commit);
	memset(roundfix.dead, 0, sizeof(roundfix.dead));
	load(0, a);
	well(1);
	roundfix_end();
}

static bool one_awaits_ops(struct spanfix *w)
{
	bool one = false;

	roundfix_turn();
	for (unsigned i = 0; i < w->n_nodes; i++)
		one = one || !condition_is_idle(&w->jobs[i]->settled);
	return one;
}

/* On a GPU a rank has the answer of its op before the device is done with it. */
Test(span_checkpoints, are_loaded_when_what_runs_for_ops_has_ended)
{
	char a[128];

	begin_after_a_save(a);
	for (unsigned i = 0; i < 2; i++)
		spanfix.jobs[i]->running++;
	begin_load(0, a);
	for (unsigned i = 0; i < 2; i++) { /* one node after the other */
		spanfix_turn_until(&spanfix, one_awaits_ops);
		cr_expect(!ended.over);
		job_ran(spanfix.jobs[i]);
	}
	spanfix_turn_until(&spanfix, is_over);
	well(1);
	roundfix_end();
}

/* ------------------------------------------------------------------------ a leader that is wrong */

static bool has_answered(struct spanfix *w)
{
	(void)w;
	return roundfix_turn() || !roundfix.rounds[1]->busy;
}

/* As node 0, which leads; the answer is noted. */
static void lead_by_hand(Shardd__V1__JobRoundPhase *m, uint8_t what)
{
	m->what = (Shardd__V1__JobRoundWhat)what;
	roundfix_on_phase(1, 0, m);
	spanfix_turn_until(&spanfix, has_answered);
	roundfix_turn();
}

/* It makes the folder of the last commit. */
static void make_folder(const char *name, Shardd__V1__JobRoundPhase *m, struct folder_new *ret)
{
	struct fault f = FAULT_NULL;
	int dir;

	mkdir(name, 0700);
	dir = place_open(roundfix_root, name, &f);
	cr_assert_geq(dir, 0, "%s", f.text);
	cr_assert_eq(parts_begin(dir, 1, 99, m->nonce, ret, &f), 0, "%s", f.text);
	fd_close(dir);
	m->name = ret->name;
}

/* The node has nothing frozen, and the leader, which it has told so, has it write that. */
Test(span_checkpoints, a_leader_that_does_not_wait_for_a_node_is_refused)
{
	Shardd__V1__JobRoundPhase m = SHARDD__V1__JOB_ROUND_PHASE__INIT;
	Shardd__V1__JobRoundPlan plan = SHARDD__V1__JOB_ROUND_PLAN__INIT;
	Shardd__V1__JobRoundEnd over = SHARDD__V1__JOB_ROUND_END__INIT;
	struct folder_new folder = FOLDER_NEW_NULL;
	char a[128];

	roundfix_path(a, "a");
	roundfix_begin(WORLD(1, 1), true, 0);
	roundfix_train(1);
	roundfix_step(2, false);
	plan.path = a;
	m.plan = &plan;
	m.id = over.id = 5;
	m.self = 1;
	m.nodes = 2;
	m.nonce = 9;
	make_folder(a, &m, &folder);
	lead_by_hand(&m, SHARDD__V1__JOB_ROUND_WHAT__JOB_ROUND_WHAT_NOW);
	cr_assert(roundfix.later && !roundfix.answered);
	lead_by_hand(&m, SHARDD__V1__JOB_ROUND_WHAT__JOB_ROUND_WHAT_SEE);
	cr_expect_eq(roundfix.answered, FAULT_STATE);
	lead_by_hand(&m, SHARDD__V1__JOB_ROUND_WHAT__JOB_ROUND_WHAT_WRITE);
	cr_expect_eq(roundfix.answered, FAULT_STATE);
	round_on_end(roundfix.rounds[1], 0, &over);
	cr_expect(strstr(roundfix.followed.text, "before this node was done"), "%s",
		  roundfix.followed.text);
	cr_expect(!saving_is_busy(spanfix.jobs[1]));
	folder_abandon(&folder);
	roundfix.last_step = 1;
	roundfix_step(2, true);
	save(0, a);
	well(2);
	roundfix_end();
}

/* The leader says that all is read, while this node reads. */
Test(span_checkpoints, a_node_that_still_reads_has_not_loaded)
{
	char a[128];

	begin_after_a_save(a);
	roundfix.ends_at = SHARDD__V1__JOB_ROUND_WHAT__JOB_ROUND_WHAT_READ;
	roundfix.ends = 1 + 1;
	begin_load(1, a);
	spanfix_turn_until(&spanfix, roundfix_has_told_the_end);
	roundfix_lose(1);
	spanfix_turn_until(&spanfix, is_over);
	expect_failed(FAULT_INTERNAL, "before this node was done");
	cr_expect(!spanfix.jobs[1]->rec->has_commit);
	roundfix_end();
}
