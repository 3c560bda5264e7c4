#include "restorefix.h"

#include <criterion/criterion.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "checkpoint/parts.h"
#include "core/check.h"
#include "core/cleanup.h"
#include "core/clock.h"
#include "fdcheck.h"

char restorefix_root[64];

void restorefix_begin_suite(void)
{
	const char *base = getenv("TMPDIR");

	if (!base || !*base ||
	    strlen(base) > sizeof(restorefix_root) - sizeof("/shardd-rest-XXXXXX"))
		base = "/tmp";
	fdcheck_begin();
	snprintf(restorefix_root, sizeof(restorefix_root), "%s/shardd-rest-XXXXXX", base);
	CHECK(mkdtemp(restorefix_root));
}

void restorefix_end_suite(void)
{
	char command[96];

	snprintf(command, sizeof(command), "rm -rf '%s'", restorefix_root);
	CHECK(system(command) == 0);
	fdcheck_end();
}

/* ------------------------------------------------------------------------ the worlds */

struct restorefix restorefix;

void restorefix_begin(const unsigned *ranks)
{
	restorefix = (struct restorefix){ .epoch = 1 };
	spanfix_begin(&spanfix, true, ranks);
	for (unsigned i = 0; i < spanfix.n_nodes; i++)
		spanfix.nodes[i].node.checkpoint_roots = restorefix_root;
}

void restorefix_end(void)
{
	spanfix_end(&spanfix);
	free(spanfix.notes);
	spanfix_queues = false;
}

unsigned restorefix_home(uint32_t rank)
{
	return spanfix.node_of[rank];
}

struct unit *restorefix_unit_of(unsigned node, const char *name)
{
	return htab_find(&spanfix.jobs[node]->unit_names, name);
}

/* The unit that the macros are about. */
bool restorefix_use(const char *name)
{
	struct unit *u = restorefix_unit_of(0, name);

	if (!u)
		return false;
	for (unsigned i = 1; i < spanfix.n_nodes; i++)
		CHECK(restorefix_unit_of(i, name) && restorefix_unit_of(i, name)->id == u->id);
	spanfix.unit = u->id;
	return true;
}

static void restorefix_by_rows(state_unit *spec)
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

/* A copy on each rank, in two types, with another name of a tensor of "rows". */
static void restorefix_replicated(state_unit *spec)
{
	const uint64_t shape[] = { 1003 };
	state_tensor *t = state_tensor_new("tied", shape, 1);

	spanfix_replicated(spec);
	spanfix_in_bf16(spec);
	CHECK(state_tensor_set_alias(t, "rows", "weight") == 0);
	CHECK(state_unit_add_tensor(spec, t) == 0);
}

static void restorefix_with_buffers(state_unit *spec)
{
	const uint64_t shape[] = { 3 };
	state_buffer *b = state_buffer_new("mean", shape, 1), *c = state_buffer_new("n", NULL, 0);

	spec->optimizer->kind = OPTIM_SGD;
	spec->optimizer->momentum = 0.9;
	spec->optimizer->beta1 = spec->optimizer->beta2 = spec->optimizer->eps = 0;
	b->dtype = BUFFER_FP32;
	c->dtype = BUFFER_INT64;
	CHECK(state_unit_add_buffer(spec, b) == 0 && state_unit_add_buffer(spec, c) == 0);
}

static void restorefix_by_trainer(state_unit *spec)
{
	spec->optimizer->when = OPTIM_BY_TRAINER;
}

static void restorefix_hybrid(state_unit *spec)
{
	spec->strategy = STRATEGY_HYBRID;
	spec->shard_ranks = 2;
}

static const char *const restorefix_names[] = { "rows", "copies", "sgd", "hybrid" };

static void restorefix_fill_buffers(void)
{
	for (uint32_t r = 0; r < spanfix.size; r++) {
		float *p = region_addr(&restorefix_unit_of(restorefix_home(r), "sgd")->buffers[r]);

		for (unsigned i = 0; i < 3; i++)
			p[i] = (float)(100 * r + i);
	}
}

/* A unit of the first and of the last rank, on their nodes. */
static void restorefix_add_pair(void)
{
	const uint32_t ranks[] = { 0, spanfix.size - 1 };
	struct nodefix_op ops[2] = { 0 };

	for (unsigned i = 0; i < spanfix.n_nodes; i++) {
		struct fault f = FAULT_NULL;
		struct group *g;

		cr_assert_eq(job_group(spanfix.jobs[i], "pair", ranks, 2, &g, &f), 0, "%s", f.text);
	}
	spanfix_turn_until(&spanfix, spanfix_is_placed);
	for (unsigned k = 0; k < 2; k++) {
		state_unit *spec = nodefix_spec("pair", 77);
		struct job *job = spanfix.jobs[restorefix_home(ranks[k])];

		spec->group = 1;
		if (restorefix_unit_of(restorefix_home(ranks[k]), "pair"))
			state_unit_free(spec);
		else
			nodefix_register(job, spec);
	}
	for (unsigned k = 0; k < 2; k++)
		nodefix_seed(&spanfix.nodes[restorefix_home(ranks[k])], spanfix.members[ranks[k]],
			     restorefix_unit_of(restorefix_home(ranks[k]), "pair"), 3, &ops[k]);
	memset(spanfix.ops, 0, sizeof(spanfix.ops));
	for (uint32_t r = 0; r < spanfix.size; r++)
		spanfix.ops[r].over = true;
	for (unsigned i = 0; i < 2000 && !(ops[0].over && ops[1].over); i++) {
		spanfix_turn(&spanfix);
		usleep(1000);
	}
	for (unsigned k = 0; k < 2; k++)
		cr_assert(ops[k].over && !ops[k].fault.code, "%s", ops[k].fault.text);
}

static void restorefix_add_unit(const char *name, uint64_t elements,
				void (*change)(state_unit *spec), unsigned seed)
{
	spanfix_add_named_unit(&spanfix, name, elements, change);
	if (!restorefix.unseeded)
		ALL(&spanfix, nodefix_seed(n, m, u, seed, op));
}

void restorefix_add_units(void)
{
	restorefix_add_unit("rows", 1003, restorefix_by_rows, 7);
	restorefix_add_unit("copies", 501, restorefix_replicated, 8);
	restorefix_add_unit("sgd", 257, restorefix_with_buffers, 9);
	restorefix_add_unit("theirs", 311, restorefix_by_trainer, 10);
	if (restorefix.hybrid)
		restorefix_add_unit("hybrid", 401, restorefix_hybrid, 11);
	if (restorefix.pair)
		restorefix_add_pair();
	restorefix_fill_buffers();
}

void restorefix_step(unsigned number)
{
	struct spanfix *w = &spanfix;

	for (unsigned i = 0; i < ARRAY_SIZE(restorefix_names); i++) {
		if (!restorefix_use(restorefix_names[i]))
			continue;
		ALL(w, nodefix_on_unit(n, m, "GradientBuffer", u, op));
		for (uint32_t r = 0; r < w->size; r++)
			spanfix_fill(spanfix_result(w, r), r, number + 10 * i);
		ALL(w, nodefix_reduce(n, m, u, false, op));
	}
	restorefix_use("copies"); /* in another type: it has a copy, which stays */
	ALL(w, nodefix_on_unit(n, m, "Gather", u, op));
	ALL(w, nodefix_on_unit(n, m, "Release", u, op));
	ALL(w, nodefix_step(n, m, op));
	ALL(w, nodefix_commit(n, m, number, 8 + m->rank, op));
}

void restorefix_train(unsigned from, unsigned to)
{
	for (unsigned i = from; i <= to; i++)
		restorefix_step(i);
}

void restorefix_epoch_ends(void)
{
	spanfix_epoch_ends(&spanfix, "a node is gone");
	spanfix_turn_until(&spanfix, spanfix_is_idle);
}

static bool restorefix_have_left(struct spanfix *w)
{
	for (unsigned i = 0; i < SPANFIX_NODES; i++)
		if (w->nodes[i].node.nodes_engine && engine_leaving(w->nodes[i].node.nodes_engine))
			return false;
	return true;
}

/* All processes of a node, and what it had, are gone. */
void restorefix_drop_members(unsigned node)
{
	struct nodefix *n = &spanfix.nodes[node];

	while (n->n_members)
		nodefix_drop(n, n->members[0], "is gone");
	for (uint32_t r = 0; r < spanfix.size; r++)
		if (restorefix_home(r) == node)
			spanfix.members[r] = NULL;
}

void restorefix_lose(unsigned node)
{
	struct nodefix *n = &spanfix.nodes[node];
	struct fault f = FAULT_NULL;

	restorefix_drop_members(node);
	cr_assert_eq(job_delete(spanfix.jobs[node], true, NULL, &f), 0, "%s", f.text);
	spanfix.jobs[node] = nodefix_job(n, "job", spanfix.size, 0);
}

/* The epoch has ended: ranks are elsewhere from here on. The job of a node that is new is empty. */
static void restorefix_move_rank(uint32_t rank, unsigned node)
{
	if (restorefix_home(rank) != node)
		spanfix.members[rank] = NULL;
	spanfix.node_of[rank] = node;
}

void restorefix_move_to(const unsigned *ranks, bool stay)
{
	unsigned n = 0;
	uint32_t rank = 0;

	while (n < SPANFIX_NODES && ranks[n])
		n++;
	for (unsigned i = 0; i < spanfix.n_nodes; i++) {
		if (!stay || i >= n)
			restorefix_drop_members(i);
		node_wake(&spanfix.nodes[i].node);
	}
	spanfix_turn_until(&spanfix, restorefix_have_left);
	for (unsigned i = spanfix.n_nodes; i > n; i--)
		nodefix_end(&spanfix.nodes[i - 1]);
	spanfix.size = 0;
	for (unsigned i = 0; i < n; i++)
		spanfix.size += ranks[i];
	for (unsigned i = spanfix.n_nodes; i < n; i++) {
		spanfix_make_node(&spanfix, i);
		spanfix.nodes[i].node.checkpoint_roots = restorefix_root;
	}
	spanfix.n_nodes = n;
	for (unsigned i = 0; i < n; i++) {
		spanfix.ranks[i] = ranks[i];
		for (unsigned k = 0; k < ranks[i]; k++)
			restorefix_move_rank(rank++, i);
	}
}

void restorefix_next_epoch(void)
{
	char prefix[32];

	spanfix_turn_until(&spanfix, spanfix_is_idle);
	restorefix.epoch += 100;
	snprintf(prefix, sizeof(prefix), "job/%u", (unsigned)restorefix.epoch);
	for (unsigned i = 0; i < spanfix.n_nodes; i++) {
		struct fault f = FAULT_NULL;

		cr_assert_eq(job_set_span(spanfix.jobs[i], spanfix_new_span(&spanfix, i, prefix),
					  restorefix.epoch, &f),
			     0, "%s", f.text);
		spanfix_begin_order(&spanfix, i);
	}
	spanfix.broken = FAULT_NULL;
	for (uint32_t r = 0; r < spanfix.size; r++) {
		struct member *m = NULL;
		struct fault f = FAULT_NULL;

		cr_assert_eq(nodefix_try_join(&spanfix.nodes[restorefix_home(r)],
					      spanfix.jobs[restorefix_home(r)], r, NULL,
					      spanfix.members[r], &m, &f),
			     RES_DONE, "%s", f.text);
		spanfix.members[r] = m;
		cr_assert_eq(m->epoch, restorefix.epoch);
	}
	spanfix_turn_until(&spanfix, spanfix_is_placed);
}

/* ------------------------------------------------------------------------------ parts */

void restorefix_free(struct restorefix_parts *p)
{
	for (unsigned i = 0; i < p->n; i++) {
		fd_close(p->all[i].fd);
		free((char *)(uintptr_t)p->all[i].index);
	}
	free(p->specs);
}

static void restorefix_on_answer(struct job *job, const struct saving_answer *a, void *userdata)
{
	unsigned node = (unsigned)(uintptr_t)userdata;

	(void)job;
	cr_assert(!a->f && !a->later, "%s", a->f ? a->f->text : "later");
	restorefix.said = *a;
	restorefix.crcs[node] = a->crc;
	restorefix.answers++;
}

static bool restorefix_have_answered(struct spanfix *w)
{
	for (unsigned i = 0; i < w->n_nodes; i++)
		jobs_tick(&w->nodes[i].jobs, clock_now_us());
	return restorefix.answers >= restorefix.awaited;
}

void restorefix_await(unsigned n)
{
	restorefix.awaited = n;
	spanfix_turn_until(&spanfix, restorefix_have_answered);
	restorefix.answers = 0;
}

static bool restorefix_saves_nothing(struct spanfix *w)
{
	for (unsigned i = 0; i < w->n_nodes; i++)
		if (saving_is_busy(w->jobs[i]))
			return false;
	return true;
}

static int restorefix_read_part(const char *folder, const char *file)
{
	char name[768], bytes[4096];
	_cleanup_(fd_closep) int from = -1;
	int fd = memfd_create("part", MFD_CLOEXEC);
	ssize_t n;

	snprintf(name, sizeof(name), "%s/%s", folder, file);
	from = open(name, O_RDONLY | O_CLOEXEC);
	cr_assert(from >= 0 && fd >= 0, "%s", name);
	while ((n = read(from, bytes, sizeof(bytes))) > 0)
		CHECK(write(fd, bytes, (size_t)n) == n);
	return fd;
}

static void restorefix_read_parts(struct restorefix_parts *p, const char *folder)
{
	for (unsigned i = 0; i < p->n; i++) {
		_cleanup_(fd_closep) int dir = open(folder, O_RDONLY | O_CLOEXEC);
		struct fault f = FAULT_NULL;
		char name[64];
		char *text;

		snprintf(name, sizeof(name), PARTS_FILE, i);
		p->all[i].fd = restorefix_read_part(folder, name);
		snprintf(name, sizeof(name), "index-%05u.json", i);
		cr_assert_eq(save_read_text(dir, name, &text, &p->all[i].index_bytes, &f), 0);
		p->all[i].index = text;
	}
}

/* @path: NULL: the checkpoint is not completed; else it is in there then. */
struct restorefix_parts restorefix_take(const char *path)
{
	struct spanfix *w = &spanfix;
	struct restorefix_parts p = { .n = w->n_nodes };
	const struct saving_freeze_how how = { .now = true, .deadline_us = UINT64_MAX };
	const struct saving_options o = { .path = path ? path : restorefix_root,
					  .deadline_us = UINT64_MAX };
	struct fault f = FAULT_NULL, over = FAULT_NULL;
	struct saving *saving[SPANFIX_NODES];
	char folder[512];

	if (path)
		mkdir(path, 0700);
	for (unsigned i = 0; i < p.n; i++) {
		saving[i] = saving_part_begin(w->jobs[i], &o, i, p.n, restorefix_on_answer,
					      (void *)(uintptr_t)i, &f);
		cr_assert(saving[i], "%s", f.text);
	}
	for (unsigned i = 0; i < p.n; i++)
		saving_part_freeze(saving[i], &how);
	restorefix_await(p.n);
	p.step = restorefix.said.step;
	saving_part_make(saving[0], 77, 99);
	restorefix_await(1);
	snprintf(folder, sizeof(folder), "%s/%s", o.path, saving_part_name(saving[0]));
	for (unsigned i = 1; i < p.n; i++)
		saving_part_see(saving[i], saving_part_name(saving[0]), 99);
	restorefix_await(p.n - 1);
	for (unsigned i = 0; i < p.n; i++)
		saving_part_write(saving[i]);
	restorefix_await(p.n);
	restorefix_read_parts(&p, folder);
	if (path) {
		saving_part_complete(saving[0], restorefix.crcs);
		restorefix_await(1);
	} else {
		fault_set(&over, FAULT_CANCELLED, NULL, "it is not wanted");
	}
	for (unsigned i = 0; i < p.n; i++)
		saving_part_end(saving[i], 0, path ? NULL : &over);
	spanfix_turn_until(w, restorefix_saves_nothing);
	p.specs = restore_pack_specs(w->jobs[p.n - 1], &p.specs_bytes);
	CHECK(p.specs);
	return p;
}

/* What parts have: parameters, optimizer state and steps, however they are cut; and what ranks have. */
struct restorefix_contents {
	struct index x;
	char *data; /* owned, as are the next two */
	size_t *places;
	char *state;
	size_t bytes, state_bytes;
};

static void *restorefix_room(void *arg, size_t piece, uint64_t offset, size_t bytes,
			     struct fault *f)
{
	struct restorefix_contents *c = arg;

	(void)bytes, (void)f;
	return c->data + c->places[piece] + offset;
}

static bool restorefix_is_of_rank(const struct index_piece *p)
{
	return p->array == INDEX_BLOB || p->array == INDEX_BUFFER;
}

static void restorefix_collect(struct restorefix_contents *c)
{
	c->state = malloc(c->bytes + c->x.n_pieces * sizeof(uint64_t));
	CHECK(c->state);
	for (size_t i = 0; i < c->x.n_pieces; i++) {
		const struct index_piece *p = &c->x.pieces[i];

		if (restorefix_is_of_rank(p))
			continue;
		if (!p->begin) {
			memcpy(c->state + c->state_bytes, &p->steps, sizeof(p->steps));
			c->state_bytes += sizeof(p->steps);
		}
		memcpy(c->state + c->state_bytes, c->data + c->places[i], index_piece_bytes(p));
		c->state_bytes += index_piece_bytes(p);
	}
}

static struct restorefix_contents restorefix_contents_of(const struct restorefix_parts *p)
{
	struct parts_memory all[SPANFIX_NODES];
	struct restorefix_contents c = { 0 };
	const struct save_sink sink = { .room = restorefix_room, .arg = &c };
	struct save_progress progress = { 0 };
	struct fault f = FAULT_NULL;

	for (unsigned i = 0; i < p->n; i++)
		all[i] = (struct parts_memory){ p->all[i].fd, p->all[i].index,
						p->all[i].index_bytes };
	cr_assert_eq(parts_merge(all, p->n, "job", p->step, &c.x, &f), 0, "%s", f.text);
	c.places = calloc(c.x.n_pieces, sizeof(*c.places));
	for (size_t i = 0; i < c.x.n_pieces; i++) {
		c.places[i] = c.bytes;
		c.bytes += index_piece_bytes(&c.x.pieces[i]);
	}
	c.data = malloc(c.bytes + 1);
	CHECK(c.places && c.data);
	cr_assert_eq(save_load(-1, &c.x, &sink, &progress, &f), 0, "%s", f.text);
	restorefix_collect(&c);
	return c;
}

static void restorefix_contents_free(struct restorefix_contents *c)
{
	index_deinit(&c->x);
	free(c->data);
	free(c->places);
	free(c->state);
}

/* Return: how many arrays of ranks both have. */
static unsigned restorefix_same_of_ranks(const struct restorefix_contents *a,
					 const struct restorefix_contents *b)
{
	unsigned n = 0;

	for (size_t i = 0; i < a->x.n_pieces; i++)
		for (size_t k = 0; k < b->x.n_pieces; k++) {
			const struct index_piece *p = &a->x.pieces[i], *q = &b->x.pieces[k];

			if (!restorefix_is_of_rank(p) || p->array != q->array ||
			    p->rank != q->rank || strcmp(p->unit, q->unit) != 0 ||
			    strcmp(p->tensor, q->tensor) != 0)
				continue;
			n++;
			cr_assert_eq(index_piece_bytes(p), index_piece_bytes(q));
			cr_expect(memcmp(a->data + a->places[i], b->data + b->places[k],
					 index_piece_bytes(p)) == 0,
				  "%s of rank %u differs", index_array_name(p->array), p->rank);
		}
	return n;
}

/* @ranks: of which both have a blob and two buffers. */
void restorefix_same(const struct restorefix_parts *a, const struct restorefix_parts *b,
		     unsigned ranks)
{
	struct restorefix_contents x = restorefix_contents_of(a), y = restorefix_contents_of(b);

	cr_assert_eq(a->step, b->step);
	cr_assert_gt(x.state_bytes, 20000);
	cr_assert_eq(x.state_bytes, y.state_bytes);
	cr_expect(memcmp(x.state, y.state, x.state_bytes) == 0, "they differ");
	cr_expect_eq(restorefix_same_of_ranks(&x, &y), 3 * ranks);
	restorefix_contents_free(&x);
	restorefix_contents_free(&y);
}

/* ---------------------------------------------------------------------------- restoring */

struct restorefix_ended restorefix_ended;

static void restorefix_on_restored(struct job *job, const struct fault *f, void *userdata)
{
	(void)job;
	restorefix_ended.f[(uintptr_t)userdata] = f ? *f : FAULT_NULL;
	restorefix_ended.over++;
}

int restorefix_try(unsigned node, const struct restorefix_parts *p, uint64_t step_number,
		   struct fault *f)
{
	struct restore_part parts[SPANFIX_NODES];
	struct restore_options o = { .step = step_number,
				     .parts = parts,
				     .n_parts = p->n,
				     .specs = p->specs,
				     .specs_bytes = p->specs_bytes };
	bool needed[SPANFIX_NODES] = { false };
	struct fault ignored = FAULT_NULL;

	o.span = spanfix_new_span(&spanfix, node, "between");
	memcpy(parts, p->all, sizeof(parts));
	(void)restore_needs(spanfix.jobs[node], &o, needed, &ignored);
	for (unsigned i = 0; i < p->n; i++) /* it does with what it says that it needs */
		if (!ignored.code && !needed[i])
			parts[i].fd = -1;
	return restore_begin(spanfix.jobs[node], &o, restorefix_on_restored,
			     (void *)(uintptr_t)node, f);
}

bool restorefix_is_over(struct spanfix *w)
{
	for (unsigned i = 0; i < w->n_nodes; i++)
		jobs_tick(&w->nodes[i].jobs, clock_now_us());
	return restorefix_ended.over >= restorefix.awaited;
}

void restorefix_all(const struct restorefix_parts *p)
{
	struct fault f = FAULT_NULL;

	memset(&restorefix_ended, 0, sizeof(restorefix_ended));
	for (unsigned i = 0; i < spanfix.n_nodes; i++) {
		cr_assert_eq(restorefix_try(i, p, p->step, &f), 0, "%s", f.text);
		cr_expect(restore_is_busy(spanfix.jobs[i]));
	}
	restorefix.awaited = spanfix.n_nodes;
	spanfix_turn_until(&spanfix, restorefix_is_over);
	restorefix.answers = 0;
	for (unsigned i = 0; i < spanfix.n_nodes; i++) {
		cr_assert_eq(restorefix_ended.f[i].code, 0, "node %u: %s", i,
			     restorefix_ended.f[i].text);
		cr_expect(spanfix.jobs[i]->rec->has_commit);
		cr_expect_eq(spanfix.jobs[i]->rec->step, p->step);
		cr_expect(!restore_is_busy(spanfix.jobs[i]));
	}
}
