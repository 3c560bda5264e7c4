#include "spanfix.h"

#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "core/check.h"
#include "core/clock.h"
#include "gather/turn.h"
#include "step/external.h"

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

static int spanfix_store_set(void *userdata, const char *key, const void *value, size_t bytes)
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

static long spanfix_store_find(const char *key, void *value, size_t capacity)
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

static long spanfix_store_get(void *userdata, const char *key, unsigned timeout_ms, void *value,
			      size_t capacity)
{
	struct timespec until;
	long r;

	(void)userdata;
	clock_gettime(CLOCK_REALTIME, &until);
	until.tv_sec += timeout_ms / 1000 + 1;
	pthread_mutex_lock(&store.lock);
	while ((r = spanfix_store_find(key, value, capacity)) == -ETIMEDOUT)
		if (pthread_cond_timedwait(&store.news, &store.lock, &until))
			break;
	pthread_mutex_unlock(&store.lock);
	return r;
}

/* ------------------------------------------------------------------------ the worlds */

struct spanfix spanfix;

unsigned spanfix_home(const struct spanfix *w, uint32_t rank)
{
	return w->spans ? w->node_of[rank] : 0;
}

struct nodefix *spanfix_node_of(struct spanfix *w, uint32_t rank)
{
	return &w->nodes[spanfix_home(w, rank)];
}

struct unit *spanfix_unit_of(struct spanfix *w, uint32_t rank)
{
	return job_unit_by_id(w->jobs[spanfix_home(w, rank)], w->unit);
}

unsigned spanfix_homes(const struct spanfix *w)
{
	return w->spans ? w->n_nodes : 1;
}

void spanfix_note(struct spanfix *w, const void *data, size_t bytes)
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

static struct spanfix_entry *spanfix_entry_at(uint32_t group, uint64_t number)
{
	struct spanfix *w = &spanfix;

	for (unsigned i = 0; i < w->n_entries; i++)
		if (w->entries[i].group == group && w->entries[i].number == number)
			return &w->entries[i];
	CHECK(w->n_entries < ARRAY_SIZE(w->entries));
	w->entries[w->n_entries] = (struct spanfix_entry){ .group = group, .number = number };
	return &w->entries[w->n_entries++];
}

static void spanfix_fail_everywhere(struct group *g, uint64_t number, const struct fault *f)
{
	for (unsigned i = 0; i < spanfix.n_nodes; i++)
		match_fail(&spanfix.jobs[i]->groups[g->id]->match, number, f);
}

static void spanfix_on_announce(struct nodefix *n, struct group *g, uint64_t number,
				const struct match_entry *first)
{
	struct spanfix_entry *e = spanfix_entry_at(g->id, number);
	unsigned nodes = 0;

	(void)n;
	if (!e->announced++)
		e->first = *first;
	if (memcmp(e->first.print.words, first->print.words, sizeof(first->print.words)) != 0) {
		struct fault f = FAULT_NULL;

		fault_set(&f, FAULT_STATE, NULL, "rank %u asks for %s, rank %u for %s",
			  e->first.rank, e->first.print.text, first->rank, first->print.text);
		spanfix_fail_everywhere(g, number, &f);
		return;
	}
	for (unsigned i = 0; i < spanfix.n_nodes; i++)
		nodes += spanfix.jobs[i]->groups[g->id]->here > 0;
	if (e->announced < nodes)
		return;
	for (unsigned i = 0; i < spanfix.n_nodes; i++)
		if (spanfix.jobs[i]->groups[g->id]->here)
			CHECK(match_start(&spanfix.jobs[i]->groups[g->id]->match, number));
}

static void spanfix_on_refuse(struct nodefix *n, struct group *g, uint64_t number,
			      const struct fault *f)
{
	(void)n;
	spanfix_fail_everywhere(g, number, f);
}

static void spanfix_on_want(struct nodefix *n, struct job *job, struct unit *u, uint64_t turn)
{
	(void)n;
	(void)job;
	for (unsigned i = 0; i < spanfix.n_nodes; i++) {
		struct unit *v = job_unit_by_id(spanfix.jobs[i], u->id);

		CHECK(v->turns.n + 1 == turn);
		CHECK(turn_start(spanfix.jobs[i], v) == 0);
	}
}

/* Units are entries, too, beside the groups. */
static void spanfix_on_give(struct nodefix *n, struct job *job, struct unit *u, uint64_t turn)
{
	struct spanfix_entry *e = spanfix_entry_at(UINT32_MAX - u->id, turn);
	unsigned nodes = 0;

	(void)n;
	(void)job;
	for (unsigned i = 0; i < spanfix.n_nodes; i++)
		nodes += spanfix.jobs[i]->groups[u->rec->group]->here > 0;
	if (++e->announced < nodes)
		return;
	for (unsigned i = 0; i < spanfix.n_nodes; i++)
		if (spanfix.jobs[i]->groups[u->rec->group]->here)
			CHECK(external_start(spanfix.jobs[i],
					     job_unit_by_id(spanfix.jobs[i], u->id), turn));
}

/* -- their beginning and end */

void spanfix_turn_until(struct spanfix *w, bool (*done)(struct spanfix *w))
{
	const struct timespec pause = { 0, 100000 };
	uint64_t until = clock_now_us() + 20000000;

	while (!done(w)) {
		for (unsigned i = 0; i < spanfix_homes(w); i++)
			nodefix_turn(&w->nodes[i]);
		nanosleep(&pause, NULL);
		cr_assert_lt(clock_now_us(), until, "it does not end");
	}
}

struct span *spanfix_new_span(const struct spanfix *w, unsigned self, const char *prefix)
{
	static const uint16_t devices[SPANFIX_RANKS];
	const struct comm_store s = { spanfix_store_set, spanfix_store_get, NULL };
	struct span_node nodes[SPANFIX_NODES] = { 0 };
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

static void spanfix_join(struct spanfix *w, uint32_t rank)
{
	struct nodefix *n = spanfix_node_of(w, rank);
	struct fault f = FAULT_NULL;
	char device[32];
	struct job_joining how = { .rank = rank, .device = device };

	snprintf(device, sizeof(device), "fake:%u", w->spans ? 0 : w->node_of[rank]);
	cr_assert_eq(job_join(w->jobs[spanfix_home(w, rank)], &how, n->proc, rank + 1, NULL,
			      &w->members[rank], &f),
		     RES_DONE, "%s", f.text);
	n->members[n->n_members++] = w->members[rank];
}

static void spanfix_begin_node(struct spanfix *w, unsigned i)
{
	const struct nodefix_options o = { .beside = i > 0, .devices = w->spans ? 1 : w->n_nodes };
	const struct gloo_options gloo = { .address = "127.0.0.1" };
	struct nodefix *n = &w->nodes[i];
	struct fault f = FAULT_NULL;

	nodefix_begin(n, &o);
	n->node.limits.reduce_batch_bytes = 0;
	n->announce = spanfix_on_announce;
	n->refuse = spanfix_on_refuse;
	n->want = spanfix_on_want;
	n->give = spanfix_on_give;
	w->jobs[i] = nodefix_job(n, "job", w->size, 0);
	if (!w->spans)
		return;
	cr_assert_eq(engine_gloo_new(&n->run.queue, &gloo, &n->node.nodes_engine), 0);
	cr_assert_eq(job_set_span(w->jobs[i], spanfix_new_span(w, i, "job/1"), 1, &f), 0, "%s",
		     f.text);
}

void spanfix_begin(struct spanfix *w, bool spans, const unsigned *ranks)
{
	uint32_t rank = 0;

	*w = (struct spanfix){ .spans = spans };
	store.n = 0;
	while (w->n_nodes < SPANFIX_NODES && ranks[w->n_nodes])
		w->size += w->ranks[w->n_nodes] = ranks[w->n_nodes], w->n_nodes++;
	for (unsigned i = 0; i < spanfix_homes(w); i++)
		spanfix_begin_node(w, i);
	for (unsigned i = 0; i < w->n_nodes; i++)
		for (unsigned r = 0; r < ranks[i]; r++) {
			w->node_of[rank] = i;
			spanfix_join(w, rank++);
		}
}

bool spanfix_is_idle(struct spanfix *w)
{
	for (unsigned i = 0; i < spanfix_homes(w); i++)
		if (w->jobs[i]->running)
			return false;
	return true;
}

static bool spanfix_has_left(struct spanfix *w)
{
	for (unsigned i = 0; i < w->n_nodes; i++)
		if (engine_leaving(w->nodes[i].node.nodes_engine))
			return false;
	return true;
}

/* The communicators of all nodes end together. */
static void spanfix_leave_all(struct spanfix *w)
{
	struct fault f = FAULT_NULL;

	fault_set(&f, FAULT_ABORTED, NULL, "it is over");
	for (unsigned i = 0; i < w->n_nodes; i++) {
		job_epoch_end(w->jobs[i], &f);
		node_wake(&w->nodes[i].node);
	}
	spanfix_turn_until(w, spanfix_has_left);
}

void spanfix_end(struct spanfix *w)
{
	spanfix_turn_until(w, spanfix_is_idle);
	if (w->spans)
		spanfix_leave_all(w);
	for (unsigned i = spanfix_homes(w); i--;)
		nodefix_end(&w->nodes[i]);
}

/* -- their ops */

bool spanfix_ops_are_over(struct spanfix *w)
{
	for (uint32_t r = 0; r < w->size; r++)
		if (!w->ops[r].over)
			return false;
	return true;
}

void spanfix_all_ok(struct spanfix *w, const char *what)
{
	spanfix_turn_until(w, spanfix_ops_are_over);
	for (uint32_t r = 0; r < w->size; r++)
		cr_assert_eq(w->ops[r].fault.code, 0, "%s of rank %u: %s", what, r,
			     w->ops[r].fault.text);
}

bool spanfix_is_placed(struct spanfix *w)
{
	struct fault f = FAULT_NULL;
	bool all = true;

	for (unsigned i = 0; i < spanfix_homes(w); i++) {
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

void spanfix_add_unit(struct spanfix *w, uint64_t elements, void (*change)(state_unit *spec))
{
	spanfix_turn_until(w, spanfix_is_placed);
	for (unsigned i = 0; i < spanfix_homes(w); i++) {
		state_unit *spec = nodefix_spec("u", elements);

		if (change)
			change(spec);
		w->unit = nodefix_register(w->jobs[i], spec)->id;
	}
}

void spanfix_fill(const struct region *r, uint32_t rank, unsigned salt)
{
	float *p = region_addr(r);

	for (uint64_t i = 0; i < r->bytes / sizeof(*p); i++)
		p[i] = (float)((i * 2654435761u + rank * 40503u + salt * 97u) % 10007u) / 9973.0f -
		       0.5f;
}

const struct region *spanfix_result(struct spanfix *w, uint32_t rank)
{
	return &w->ops[rank].result.place;
}

void spanfix_note_results(struct spanfix *w)
{
	for (uint32_t r = 0; r < w->size; r++)
		spanfix_note(w, region_addr(spanfix_result(w, r)), spanfix_result(w, r)->bytes);
}

void spanfix_gather_and_note(struct spanfix *w)
{
	ALL(w, nodefix_on_unit(n, m, "Gather", u, op));
	spanfix_note_results(w);
	ALL(w, nodefix_on_unit(n, m, "Release", u, op));
}

void spanfix_run(void (*script)(struct spanfix *w), const unsigned *ranks)
{
	unsigned char *notes;
	size_t n;

	spanfix_begin(&spanfix, false, ranks);
	script(&spanfix);
	spanfix_end(&spanfix);
	notes = spanfix.notes;
	n = spanfix.n_notes;
	spanfix_begin(&spanfix, true, ranks);
	script(&spanfix);
	spanfix_end(&spanfix);
	cr_assert_gt(n, 0);
	cr_assert_eq(spanfix.n_notes, n);
	cr_expect(memcmp(spanfix.notes, notes, n) == 0, "nodes differ from devices");
	free(spanfix.notes);
	free(notes);
}

void spanfix_replicated(state_unit *spec)
{
	spec->strategy = STRATEGY_REPLICATE;
	spec->shard_ranks = 1;
}

void spanfix_epoch_ends(struct spanfix *w, const char *why)
{
	struct fault f = FAULT_NULL;

	fault_set(&f, FAULT_ABORTED, NULL, "%s", why);
	for (unsigned i = 0; i < w->n_nodes; i++)
		job_epoch_end(w->jobs[i], &f);
	w->n_entries = 0;
}

void spanfix_next_epoch(struct spanfix *w, const char *prefix)
{
	spanfix_turn_until(w, spanfix_is_idle);
	for (unsigned i = 0; i < w->n_nodes; i++) {
		struct fault f = FAULT_NULL;

		cr_assert_eq(job_set_span(w->jobs[i], spanfix_new_span(w, i, prefix), 100, &f), 0,
			     "%s", f.text);
	}
	for (uint32_t r = 0; r < w->size; r++) {
		struct member *m = NULL;
		struct fault f = FAULT_NULL;

		cr_assert_eq(nodefix_try_join(spanfix_node_of(w, r), w->jobs[spanfix_home(w, r)], r,
					      NULL, w->members[r], &m, &f),
			     RES_DONE, "%s", f.text);
		cr_assert_eq(m, w->members[r]);
		cr_assert_eq(m->epoch, 100);
	}
	spanfix_turn_until(w, spanfix_is_placed);
}
