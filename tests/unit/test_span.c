/*
 * A job over several nodes: two to three cores of the daemon in one process, each with its own loop, and
 * Gloo between them. In place of a leader there is a table: what all nodes have announced is started on
 * all of them. Every script runs twice: on the nodes, and on one node with as many devices. What it has
 * noted must be equal, bit for bit.
 */
#include <criterion/criterion.h>
#include <errno.h>
#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "core/check.h"
#include "core/clock.h"
#include "fdcheck.h"
#include "gather/turn.h"
#include "job/span.h"
#include "nodefix.h"
#include "step/shards.h"

TestSuite(span, .init = fdcheck_begin, .fini = fdcheck_end, .timeout = 120);

#define MAX_NODES 3
#define MAX_RANKS 8

/* ------------------------------------------------------------------------ the store */

static struct {
	pthread_mutex_t lock;
	pthread_cond_t news;
	struct {
		char key[256];
		unsigned char value[8192];
		size_t bytes;
	} keys[256];
	unsigned n;
} store = { .lock = PTHREAD_MUTEX_INITIALIZER, .news = PTHREAD_COND_INITIALIZER };

static int store_set(void *userdata, const char *key, const void *value, size_t bytes)
{
	(void)userdata;
	pthread_mutex_lock(&store.lock);
	CHECK(store.n < ARRAY_SIZE(store.keys) && bytes <= sizeof(store.keys[0].value));
	snprintf(store.keys[store.n].key, sizeof(store.keys[0].key), "%s", key);
	memcpy(store.keys[store.n].value, value, bytes);
	store.keys[store.n++].bytes = bytes;
	pthread_cond_broadcast(&store.news);
	pthread_mutex_unlock(&store.lock);
	return 0;
}

static long store_find(const char *key, void *value, size_t capacity)
{
	for (unsigned i = 0; i < store.n; i++) {
		if (strcmp(store.keys[i].key, key) != 0)
			continue;
		CHECK(store.keys[i].bytes <= capacity);
		memcpy(value, store.keys[i].value, store.keys[i].bytes);
		return (long)store.keys[i].bytes;
	}
	return -ETIMEDOUT;
}

static long store_get(void *userdata, const char *key, unsigned timeout_ms, void *value,
		      size_t capacity)
{
	struct timespec until;
	long r;

	(void)userdata;
	clock_gettime(CLOCK_REALTIME, &until);
	until.tv_sec += timeout_ms / 1000 + 1;
	pthread_mutex_lock(&store.lock);
	while ((r = store_find(key, value, capacity)) == -ETIMEDOUT)
		if (pthread_cond_timedwait(&store.news, &store.lock, &until))
			break;
	pthread_mutex_unlock(&store.lock);
	return r;
}

/* ------------------------------------------------------------------------ the worlds */

struct entry {
	uint32_t group;
	uint64_t number;
	struct match_entry first;
	const char *node;
	unsigned announced;
};

/* Ranks on several nodes, or on one node with several devices. */
struct world {
	bool spans;
	struct nodefix nodes[MAX_NODES];
	struct job *jobs[MAX_NODES];
	struct member *members[MAX_RANKS];
	unsigned node_of[MAX_RANKS]; /* else: its device */
	unsigned n_nodes, ranks[MAX_NODES];
	uint32_t size;
	uint32_t unit; /* the number of the last unit */
	struct nodefix_op ops[MAX_RANKS];
	struct entry entries[4096];
	unsigned n_entries;
	unsigned char *notes; /* owned */
	size_t n_notes, room;
};

static struct world world;

static unsigned home(const struct world *w, uint32_t rank)
{
	return w->spans ? w->node_of[rank] : 0;
}

static struct nodefix *node_of(struct world *w, uint32_t rank)
{
	return &w->nodes[home(w, rank)];
}

static struct unit *unit_of(struct world *w, uint32_t rank)
{
	return job_unit_by_id(w->jobs[home(w, rank)], w->unit);
}

static unsigned homes(const struct world *w)
{
	return w->spans ? w->n_nodes : 1;
}

static void note(struct world *w, const void *data, size_t bytes)
{
	if (w->n_notes + bytes > w->room) {
		w->room = 2 * (w->n_notes + bytes);
		w->notes = realloc(w->notes, w->room);
		CHECK(w->notes);
	}
	memcpy(w->notes + w->n_notes, data, bytes);
	w->n_notes += bytes;
}

/* -- in place of the leader */

static struct entry *entry_at(uint32_t group, uint64_t number)
{
	struct world *w = &world;

	for (unsigned i = 0; i < w->n_entries; i++)
		if (w->entries[i].group == group && w->entries[i].number == number)
			return &w->entries[i];
	CHECK(w->n_entries < ARRAY_SIZE(w->entries));
	w->entries[w->n_entries] = (struct entry){ .group = group, .number = number };
	return &w->entries[w->n_entries++];
}

static void fail_everywhere(struct group *g, uint64_t number, const struct fault *f)
{
	for (unsigned i = 0; i < world.n_nodes; i++)
		match_fail(&world.jobs[i]->groups[g->id]->match, number, f);
}

static void on_announce(struct nodefix *n, struct group *g, uint64_t number,
			const struct match_entry *first)
{
	struct entry *e = entry_at(g->id, number);
	unsigned nodes = 0;

	(void)n;
	if (!e->announced++)
		e->first = *first;
	if (memcmp(e->first.print.words, first->print.words, sizeof(first->print.words)) != 0) {
		struct fault f = FAULT_NULL;

		fault_set(&f, FAULT_STATE, NULL, "rank %u asks for %s, rank %u for %s",
			  e->first.rank, e->first.print.text, first->rank, first->print.text);
		fail_everywhere(g, number, &f);
		return;
	}
	for (unsigned i = 0; i < world.n_nodes; i++)
		nodes += world.jobs[i]->groups[g->id]->here > 0;
	if (e->announced < nodes)
		return;
	for (unsigned i = 0; i < world.n_nodes; i++)
		if (world.jobs[i]->groups[g->id]->here)
			CHECK(match_start(&world.jobs[i]->groups[g->id]->match, number));
}

static void on_refuse(struct nodefix *n, struct group *g, uint64_t number, const struct fault *f)
{
	(void)n;
	fail_everywhere(g, number, f);
}

static void on_want(struct nodefix *n, struct job *job, struct unit *u, uint64_t turn)
{
	(void)n;
	(void)job;
	for (unsigned i = 0; i < world.n_nodes; i++) {
		struct unit *v = job_unit_by_id(world.jobs[i], u->id);

		CHECK(v->turns.n + 1 == turn);
		CHECK(turn_start(world.jobs[i], v) == 0);
	}
}

/* -- their beginning and end */

/* Turn all loops until @done, for twenty seconds. */
static void turn_until(struct world *w, bool (*done)(struct world *w))
{
	const struct timespec pause = { 0, 100000 };
	uint64_t until = clock_now_us() + 20000000;

	while (!done(w)) {
		for (unsigned i = 0; i < homes(w); i++)
			nodefix_turn(&w->nodes[i]);
		nanosleep(&pause, NULL);
		cr_assert_lt(clock_now_us(), until, "it does not end");
	}
}

static struct span *new_span(const struct world *w, unsigned self, const char *prefix)
{
	static const uint16_t devices[MAX_RANKS];
	const struct comm_store s = { store_set, store_get, NULL };
	struct span_node nodes[MAX_NODES] = { 0 };
	struct span *span = NULL;
	struct fault f = FAULT_NULL;
	uint32_t first = 0;

	for (unsigned i = 0; i < w->n_nodes; i++) {
		snprintf(nodes[i].name, sizeof(nodes[i].name), "node%u", i);
		nodes[i].first = first;
		nodes[i].n = w->ranks[i];
		nodes[i].devices = devices;
		first += w->ranks[i];
	}
	cr_assert_eq(span_new(nodes, w->n_nodes, self, prefix, &s, &span, &f), 0, "%s", f.text);
	return span;
}

static void join(struct world *w, uint32_t rank)
{
	struct nodefix *n = node_of(w, rank);
	struct fault f = FAULT_NULL;
	char device[32];
	struct job_joining how = { .rank = rank, .device = device };

	snprintf(device, sizeof(device), "fake:%u", w->spans ? 0 : w->node_of[rank]);
	cr_assert_eq(job_join(w->jobs[home(w, rank)], &how, n->proc, rank + 1, NULL,
			      &w->members[rank], &f),
		     RES_DONE, "%s", f.text);
	n->members[n->n_members++] = w->members[rank];
}

static void begin_node(struct world *w, unsigned i)
{
	const struct nodefix_options o = { .beside = i > 0, .devices = w->spans ? 1 : w->n_nodes };
	const struct gloo_options gloo = { .address = "127.0.0.1" };
	struct nodefix *n = &w->nodes[i];
	struct fault f = FAULT_NULL;

	nodefix_begin(n, &o);
	n->node.limits.reduce_batch_bytes = 0;
	n->announce = on_announce;
	n->refuse = on_refuse;
	n->want = on_want;
	w->jobs[i] = nodefix_job(n, "job", w->size, 0);
	if (!w->spans)
		return;
	cr_assert_eq(engine_gloo_new(&n->run.queue, &gloo, &n->node.nodes_engine), 0);
	cr_assert_eq(job_set_span(w->jobs[i], new_span(w, i, "job/1"), 1, &f), 0, "%s", f.text);
}

static void begin(struct world *w, bool spans, const unsigned *ranks)
{
	uint32_t rank = 0;

	*w = (struct world){ .spans = spans };
	store.n = 0;
	while (w->n_nodes < MAX_NODES && ranks[w->n_nodes])
		w->size += w->ranks[w->n_nodes] = ranks[w->n_nodes], w->n_nodes++;
	for (unsigned i = 0; i < homes(w); i++)
		begin_node(w, i);
	for (unsigned i = 0; i < w->n_nodes; i++)
		for (unsigned r = 0; r < ranks[i]; r++) {
			w->node_of[rank] = i;
			join(w, rank++);
		}
}

static bool is_idle(struct world *w)
{
	for (unsigned i = 0; i < homes(w); i++)
		if (w->jobs[i]->running)
			return false;
	return true;
}

static bool has_left(struct world *w)
{
	for (unsigned i = 0; i < w->n_nodes; i++)
		if (engine_leaving(w->nodes[i].node.nodes_engine))
			return false;
	return true;
}

/* The communicators of all nodes end together. */
static void leave_all(struct world *w)
{
	struct fault f = FAULT_NULL;

	fault_set(&f, FAULT_ABORTED, NULL, "it is over");
	for (unsigned i = 0; i < w->n_nodes; i++) {
		job_epoch_end(w->jobs[i], &f);
		node_wake(&w->nodes[i].node);
	}
	turn_until(w, has_left);
}

static void end(struct world *w)
{
	turn_until(w, is_idle);
	if (w->spans)
		leave_all(w);
	for (unsigned i = homes(w); i--;)
		nodefix_end(&w->nodes[i]);
}

/* -- their ops */

static bool ops_are_over(struct world *w)
{
	for (uint32_t r = 0; r < w->size; r++)
		if (!w->ops[r].over)
			return false;
	return true;
}

static void all_ok(struct world *w, const char *what)
{
	turn_until(w, ops_are_over);
	for (uint32_t r = 0; r < w->size; r++)
		cr_assert_eq(w->ops[r].fault.code, 0, "%s of rank %u: %s", what, r,
			     w->ops[r].fault.text);
}

/* @call with n, m, u and op of each rank r. */
#define EACH(w, call)                                                  \
	do {                                                           \
		for (uint32_t r = 0; r < (w)->size; r++) {             \
			struct nodefix *n = node_of(w, r);             \
			struct unit *u = unit_of(w, r);                \
			struct nodefix_op *op = &(w)->ops[r];          \
			struct member *m = (w)->members[r];            \
                                                                       \
			(void)u;                                       \
			*op = (struct nodefix_op){ 0 };                \
			cr_assert_eq((call), 0, "%s", op->fault.text); \
		}                                                      \
	} while (0)
#define ALL(w, call)              \
	do {                      \
		EACH(w, call);    \
		all_ok(w, #call); \
	} while (0)

static bool is_placed(struct world *w)
{
	struct fault f = FAULT_NULL;
	bool all = true;

	for (unsigned i = 0; i < homes(w); i++) {
		struct job *job = w->jobs[i];

		for (uint32_t k = 0; k < job->n_groups; k++) {
			struct group *g = job->groups[k];

			if (!g->here)
				continue;
			all = group_place(g, &f) == RES_DONE && group_comms(g, &f) == RES_DONE &&
			      all;
			cr_assert_eq(f.code, 0, "%s", f.text);
		}
	}
	return all;
}

/* @change says how its record differs from nodefix_spec's. */
static void add_unit(struct world *w, uint64_t elements, void (*change)(state_unit *spec))
{
	turn_until(w, is_placed);
	for (unsigned i = 0; i < homes(w); i++) {
		state_unit *spec = nodefix_spec("u", elements);

		if (change)
			change(spec);
		w->unit = nodefix_register(w->jobs[i], spec)->id;
	}
}

/* Something of its own for each rank and element, with sums that are rounded. */
static void fill(const struct region *r, uint32_t rank, unsigned salt)
{
	float *p = region_addr(r);

	for (uint64_t i = 0; i < r->bytes / sizeof(*p); i++)
		p[i] = (float)((i * 2654435761u + rank * 40503u + salt * 97u) % 10007u) / 9973.0f -
		       0.5f;
}

/* --------------------------------------------------------------------- scripts */

static const struct region *result(struct world *w, uint32_t rank)
{
	return &w->ops[rank].result.place;
}

static void note_results(struct world *w)
{
	for (uint32_t r = 0; r < w->size; r++)
		note(w, region_addr(result(w, r)), result(w, r)->bytes);
}

static void gather_and_note(struct world *w)
{
	ALL(w, nodefix_on_unit(n, m, "Gather", u, op));
	note_results(w);
	ALL(w, nodefix_on_unit(n, m, "Release", u, op));
}

static void fill_gradients(struct world *w, unsigned salt)
{
	ALL(w, nodefix_on_unit(n, m, "GradientBuffer", u, op));
	for (uint32_t r = 0; r < w->size; r++)
		fill(result(w, r), r, salt);
}

static void note_norms(struct world *w)
{
	for (uint32_t r = 0; r < w->size; r++)
		note(w, &NODEFIX_OUTCOME(shards_outcome, &w->ops[r])->total_norm, sizeof(double));
}

static void train(struct world *w, unsigned step)
{
	gather_and_note(w);
	fill_gradients(w, 2 * step);
	ALL(w, nodefix_on_unit(n, m, "Accumulate", u, op));
	fill_gradients(w, 2 * step + 1);
	ALL(w, nodefix_reduce(n, m, u, false, op));
	ALL(w, nodefix_clip(n, m, 0.75, op));
	note_norms(w);
	ALL(w, nodefix_step(n, m, op));
	ALL(w, nodefix_commit(n, m, step, 0, op));
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

static void in_bf16(state_unit *spec)
{
	spec->compute_dtype = DTYPE_BF16;
}

static void replicated(state_unit *spec)
{
	spec->strategy = STRATEGY_REPLICATE;
	spec->shard_ranks = 1;
}

static void (*unit_changes)(state_unit *spec);

static void script_training(struct world *w)
{
	add_unit(w, 1003, unit_changes);
	ALL(w, nodefix_seed(n, m, u, 7, op));
	for (unsigned s = 1; s <= 3; s++)
		train(w, s);
	gather_and_note(w);
}

static uint64_t buffer_of(struct world *w, uint32_t rank)
{
	return w->ops[rank].result.buffer;
}

static int all_reduce(struct nodefix *n, struct member *m, uint64_t buffer,
		      Shardd__V1__ReduceOp how, Shardd__V1__Dtype dtype, struct nodefix_op *op)
{
	Shardd__V1__AllReduceRequest r = SHARDD__V1__ALL_REDUCE_REQUEST__INIT;

	r.buffer = buffer;
	r.count = 333;
	r.dtype = dtype;
	r.op = how;
	return nodefix_submit(n, m, "AllReduce", &r.base, op);
}

static int broadcast_from(struct nodefix *n, struct member *m, uint64_t buffer, uint32_t root,
			  struct nodefix_op *op)
{
	Shardd__V1__BroadcastRequest r = SHARDD__V1__BROADCAST_REQUEST__INIT;

	r.buffer = buffer;
	r.bytes = 1333;
	r.root = root;
	return nodefix_submit(n, m, "Broadcast", &r.base, op);
}

static void script_buffers(struct world *w)
{
	static const Shardd__V1__ReduceOp how[] = { SHARDD__V1__REDUCE_OP__REDUCE_OP_SUM,
						    SHARDD__V1__REDUCE_OP__REDUCE_OP_AVG,
						    SHARDD__V1__REDUCE_OP__REDUCE_OP_MAX,
						    SHARDD__V1__REDUCE_OP__REDUCE_OP_MIN };
	struct region place[MAX_RANKS];
	uint64_t buffers[MAX_RANKS];

	turn_until(w, is_placed);
	ALL(w, nodefix_alloc(n, m, 4096, op));
	for (uint32_t r = 0; r < w->size; r++) {
		place[r] = *result(w, r);
		buffers[r] = buffer_of(w, r);
	}
	for (unsigned i = 0; i < ARRAY_SIZE(how); i++) {
		for (uint32_t r = 0; r < w->size; r++)
			fill(&place[r], r, i);
		ALL(w, all_reduce(n, m, buffers[r], how[i], SHARDD__V1__DTYPE__DTYPE_FP32, op));
		for (uint32_t r = 0; r < w->size; r++)
			note(w, region_addr(&place[r]), place[r].bytes);
	}
	for (uint32_t root = 0; root < w->size; root++) {
		for (uint32_t r = 0; r < w->size; r++)
			fill(&place[r], r, root);
		ALL(w, broadcast_from(n, m, buffers[r], root, op));
		for (uint32_t r = 0; r < w->size; r++)
			note(w, region_addr(&place[r]), place[r].bytes);
	}
	ALL(w, nodefix_barrier(n, m, 0, op));
	ALL(w, nodefix_free(n, m, buffers[r], op));
}

static int from_root(struct nodefix *n, struct member *m, const struct unit *u, uint32_t root,
		     uint64_t buffer, struct nodefix_op *op)
{
	Shardd__V1__InitialiseRequest r = SHARDD__V1__INITIALISE_REQUEST__INIT;
	Shardd__V1__FromRank from = SHARDD__V1__FROM_RANK__INIT;

	from.root = root;
	r.unit = u->id;
	r.how_case = SHARDD__V1__INITIALISE_REQUEST__HOW_BROADCAST;
	r.broadcast = &from;
	r.buffer = m->rank == root ? buffer : 0;
	return nodefix_submit(n, m, "Initialise", &r.base, op);
}

/* From each root in turn, then each rank's own; and each time what is there is summoned. */
static void script_initialise(struct world *w)
{
	uint64_t buffers[MAX_RANKS];

	add_unit(w, 517, unit_changes);
	ALL(w, nodefix_alloc(n, m, 8192, op));
	for (uint32_t r = 0; r < w->size; r++) {
		fill(result(w, r), r, 3);
		buffers[r] = buffer_of(w, r);
	}
	for (uint32_t root = 0; root < w->size; root++) {
		ALL(w, from_root(n, m, u, root, buffers[r], op));
		gather_and_note(w);
	}
	ALL(w, nodefix_own(n, m, u, buffers[r], op));
	gather_and_note(w);
	ALL(w, nodefix_on_unit(n, m, "SummonFull", u, op));
	note_results(w);
	ALL(w, nodefix_on_unit(n, m, "ReturnFull", u, op));
	ALL(w, nodefix_free(n, m, buffers[r], op));
}

static int unscale(struct nodefix *n, struct member *m, struct nodefix_op *op)
{
	Shardd__V1__UnscaleRequest r = SHARDD__V1__UNSCALE_REQUEST__INIT;

	r.inv_scale = 0.25;
	return nodefix_submit(n, m, "Unscale", &r.base, op);
}

/* One rank's gradient has an infinity in what another node has: all ranks must know. */
static void script_found_inf(struct world *w)
{
	add_unit(w, 1003, unit_changes);
	ALL(w, nodefix_seed(n, m, u, 7, op));
	for (unsigned inf = 0; inf < 2; inf++) {
		fill_gradients(w, inf);
		if (inf)
			((float *)region_addr(result(w, 0)))[1002] = INFINITY;
		ALL(w, nodefix_reduce(n, m, u, false, op));
		ALL(w, unscale(n, m, op));
		for (uint32_t r = 0; r < w->size; r++) {
			bool found = NODEFIX_OUTCOME(shards_outcome, &w->ops[r])->found_inf;

			cr_expect_eq(found, inf > 0, "rank %u", r);
		}
		ALL(w, nodefix_clip(n, m, 0.75, op));
		note_norms(w);
		ALL(w, nodefix_step(n, m, op));
		ALL(w, nodefix_commit(n, m, inf + 1, 0, op));
	}
	gather_and_note(w);
}

/* -- what ends an epoch */

static void epoch_ends(struct world *w, const char *why)
{
	struct fault f = FAULT_NULL;

	fault_set(&f, FAULT_ABORTED, NULL, "%s", why);
	for (unsigned i = 0; i < w->n_nodes; i++)
		job_epoch_end(w->jobs[i], &f);
	w->n_entries = 0;
}

static void next_epoch(struct world *w, const char *prefix)
{
	turn_until(w, is_idle);
	for (unsigned i = 0; i < w->n_nodes; i++) {
		struct fault f = FAULT_NULL;

		cr_assert_eq(job_set_span(w->jobs[i], new_span(w, i, prefix), 100, &f), 0, "%s",
			     f.text);
	}
	for (uint32_t r = 0; r < w->size; r++) {
		struct member *m = NULL;
		struct fault f = FAULT_NULL;

		cr_assert_eq(nodefix_try_join(node_of(w, r), w->jobs[home(w, r)], r, NULL,
					      w->members[r], &m, &f),
			     RES_DONE, "%s", f.text);
		cr_assert_eq(m, w->members[r]);
		cr_assert_eq(m->epoch, 100);
	}
	turn_until(w, is_placed);
}

static void all_aborted(struct world *w, const char *why)
{
	turn_until(w, ops_are_over);
	for (uint32_t r = 0; r < w->size; r++) {
		cr_expect_eq(w->ops[r].fault.code, FAULT_ABORTED, "rank %u: %s: %s", r,
			     fault_code_name(w->ops[r].fault.code), w->ops[r].fault.text);
		cr_expect(strstr(w->ops[r].fault.text, why), "rank %u: %s", r,
			  w->ops[r].fault.text);
	}
}

/* One node alone has started the reduction: it waits for the other's data. */
Test(span, an_epoch_ends_while_a_collective_waits_for_another_node)
{
	struct world *w = &world;

	begin(w, true, (const unsigned[MAX_NODES]){ 2, 1 });
	add_unit(w, 1003, NULL);
	ALL(w, nodefix_seed(n, m, u, 7, op));
	train(w, 1);
	fill_gradients(w, 5);
	backend_fake_hold(w->nodes[1].node.devices[0].backend, true);
	EACH(w, nodefix_reduce(n, m, u, false, op));
	for (unsigned i = 0; i < 100; i++)
		nodefix_turn(&w->nodes[0]);
	cr_expect(w->ops[0].op && !w->ops[0].over);
	epoch_ends(w, "node node1 is gone");
	backend_fake_hold(w->nodes[1].node.devices[0].backend, false);
	backend_fake_release(w->nodes[1].node.devices[0].backend, false);
	all_aborted(w, "node node1 is gone");
	next_epoch(w, "job/100");
	train(w, 2);
	gather_and_note(w);
	end(w);
	free(w->notes);
}

/* What is wanted, or stands in line, is of its epoch. */
Test(span, an_epoch_ends_while_gathers_and_collectives_stand_in_line)
{
	struct world *w = &world;
	static struct nodefix_op gathers[MAX_RANKS], barriers[MAX_RANKS];

	begin(w, true, (const unsigned[MAX_NODES]){ 1, 1 });
	add_unit(w, 1003, in_bf16);
	ALL(w, nodefix_seed(n, m, u, 7, op));
	fill_gradients(w, 5);
	backend_fake_hold(w->nodes[1].node.devices[0].backend, true);
	EACH(w, nodefix_reduce(n, m, u, false, op));
	for (uint32_t r = 0; r < 2; r++) {
		cr_assert_eq(nodefix_barrier(node_of(w, r), w->members[r], 0, &barriers[r]), 0);
		cr_assert_eq(nodefix_on_unit(node_of(w, r), w->members[r], "Gather", unit_of(w, r),
					     &gathers[r]),
			     0);
	}
	for (unsigned i = 0; i < 100; i++)
		nodefix_turn(&w->nodes[0]);
	epoch_ends(w, "node node1 is gone");
	backend_fake_hold(w->nodes[1].node.devices[0].backend, false);
	backend_fake_release(w->nodes[1].node.devices[0].backend, false);
	all_aborted(w, "node node1 is gone");
	memcpy(w->ops, gathers, sizeof(gathers));
	turn_until(w, is_idle);
	for (uint32_t r = 0; r < 2; r++) {
		cr_expect(gathers[r].over);
		cr_expect_eq(gathers[r].fault.code, FAULT_ABORTED);
		cr_expect(barriers[r].over);
		cr_expect_eq(barriers[r].fault.code, FAULT_ABORTED);
	}
	next_epoch(w, "job/100");
	train(w, 1);
	end(w);
	free(w->notes);
}

Test(span, a_mismatch_between_nodes_fails_for_all)
{
	struct world *w = &world;

	begin(w, true, (const unsigned[MAX_NODES]){ 2, 1 });
	add_unit(w, 1003, NULL);
	ALL(w, nodefix_seed(n, m, u, 7, op));
	for (uint32_t r = 0; r < 3; r++) {
		w->ops[r] = (struct nodefix_op){ 0 };
		cr_assert_eq(nodefix_clip(node_of(w, r), w->members[r], r == 2 ? 1.0 : 2.0,
					  &w->ops[r]),
			     0);
	}
	turn_until(w, ops_are_over);
	for (uint32_t r = 0; r < 3; r++) {
		cr_expect_eq(w->ops[r].fault.code, FAULT_STATE);
		cr_expect(strstr(w->ops[r].fault.text, "ClipGradNorm to 1"), "%s",
			  w->ops[r].fault.text);
	}
	train(w, 1);
	end(w);
	free(w->notes);
}

/* A tensor that no rank has used keeps its value; one that a single rank has used does not. */
static void two_tensors(state_unit *spec)
{
	const uint64_t n = 501;
	state_tensor *t = state_tensor_new("second", &n, 1);

	t->init_kind = FILL_UNIFORM;
	t->init_b = 1;
	CHECK(state_unit_add_tensor(spec, t) == 0);
}

static void script_unused(struct world *w)
{
	static const uint32_t second = 1;

	add_unit(w, 502, unit_changes);
	ALL(w, nodefix_seed(n, m, u, 7, op));
	for (uint32_t users = 0; users < 2; users++) {
		fill_gradients(w, users);
		ALL(w, m->rank < users ? nodefix_reduce(n, m, u, false, op)
				       : nodefix_leave_out(n, m, u, &second, op));
		ALL(w, nodefix_step(n, m, op));
		ALL(w, nodefix_commit(n, m, users + 1, 0, op));
		gather_and_note(w);
	}
}

static void run(void (*script)(struct world *w), const unsigned *ranks)
{
	unsigned char *notes;
	size_t n;

	begin(&world, false, ranks);
	script(&world);
	end(&world);
	notes = world.notes;
	n = world.n_notes;
	begin(&world, true, ranks);
	script(&world);
	end(&world);
	cr_assert_gt(n, 0);
	cr_assert_eq(world.n_notes, n);
	cr_expect(memcmp(world.notes, notes, n) == 0, "nodes differ from devices");
	free(world.notes);
	free(notes);
}

#define SPAN_TEST(name, script, change, ...)                             \
	Test(span, name)                                                 \
	{                                                                \
		unit_changes = change;                                   \
		run(script, (const unsigned[MAX_NODES]){ __VA_ARGS__ }); \
	}

SPAN_TEST(training_on_1_1, script_training, NULL, 1, 1)
SPAN_TEST(training_on_2_2, script_training, NULL, 2, 2)
SPAN_TEST(training_on_1_2_3, script_training, NULL, 1, 2, 3)
SPAN_TEST(training_in_bf16_on_3_1, script_training, in_bf16, 3, 1)
SPAN_TEST(training_by_rows_on_2_2, script_training, by_rows, 2, 2)
SPAN_TEST(training_by_rows_on_1_2_3, script_training, by_rows, 1, 2, 3)
SPAN_TEST(training_replicas_on_1_2, script_training, replicated, 1, 2)
SPAN_TEST(buffers_on_1_2_3, script_buffers, NULL, 1, 2, 3)
SPAN_TEST(initialise_on_1_2_3, script_initialise, NULL, 1, 2, 3)
SPAN_TEST(initialise_by_rows_on_2_1, script_initialise, by_rows, 2, 1)
SPAN_TEST(initialise_replicas_on_2_1, script_initialise, replicated, 2, 1)
SPAN_TEST(unused_on_1_2, script_unused, two_tensors, 1, 2)
SPAN_TEST(found_inf_on_2_2, script_found_inf, NULL, 2, 2)
SPAN_TEST(found_inf_by_rows_on_1_2_3, script_found_inf, by_rows, 1, 2, 3)
