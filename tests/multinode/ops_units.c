/* Ops about units: what they hold besides parameters, passes, their layout, and the ranks' own memory. */
#include "ops.h"

#include <stdio.h>
#include <string.h>

/* -- a session that reads: replicas are whole on each node, and those of the last commit */

static void ops_read_published(shardd_client *other)
{
	const char *job = getenv("SHARDD_JOB");
	struct shardd_generation g;
	char name[32], json[64];
	shardd_live *l;

	snprintf(name, sizeof(name), "read.%u", ops.me.rank); /* a rank's own */
	snprintf(json, sizeof(json), "{\"name\": \"%s\"}", name);
	OK(shardd_publication_declare(other, job, json, NULL, &ops.err));
	OK(shardd_publication_publish(other, job, name, 0, NULL, &ops.err));
	OK(shardd_live_open(other, job, name, 0, &l, &ops.err));
	OK(shardd_live_acquire(l, 0, &g, &ops.err));
	for (size_t i = 0; i < g.n_tensors; i++)
		ops_say("published", g.tensors[i].data, g.tensors[i].bytes);
	shardd_live_close(l);
	OK(shardd_publication_drop(other, job, name, &ops.err));
}

void ops_readers(void)
{
	shardd_client *other;

	if (ops.on_gpu)
		return; /* they read host memory only */
	ops_make("read", (struct shardd_unit_spec){ .strategy = SHARDD_REPLICATE });
	ops_commit();
	OK(shardd_connect(NULL, &other, &ops.err));
	ops_read_published(other);
	shardd_close(other);
	OK(shardd_barrier(ops.client, SHARDD_WORLD, &ops.err)); /* before there are more units */
}

/* -- an optimizer of the trainers' own */

static void ops_step_shard(const struct shardd_shard *s)
{
	size_t bytes = s->elements * sizeof(float);
	float *p = malloc(bytes + 1), *g = malloc(bytes + 1);

	if (!p || !g)
		abort();
	OK(shardd_read(ops.client, p, s->params, bytes, &ops.err));
	OK(shardd_read(ops.client, g, s->gradient, bytes, &ops.err));
	for (uint64_t k = 0; k < s->elements; k++)
		p[k] -= g[k] / 2;
	OK(shardd_write(ops.client, s->params, p, bytes, &ops.err));
	free(p);
	free(g);
}

static void ops_own_of(const char *name, struct shardd_unit_spec spec)
{
	struct shardd_unit_info u;

	spec.optimizer.when = SHARDD_OPTIM_BY_TRAINER;
	u = ops_make(name, spec);
	for (unsigned i = 0; i < STEPS; i++) {
		struct shardd_shard s;

		ops_reduce(&u);
		OK(shardd_next_shard(ops.client, SHARDD_WORLD, &s, &ops.err));
		ops_step_shard(&s);
		OK(shardd_shard_done(ops.client, u.unit, &ops.err));
		ops_end_step(name, &u);
	}
}

void ops_own(void)
{
	ops_own_of("own", (struct shardd_unit_spec){ .strategy = SHARDD_SHARD });
	ops_own_of("own replicated", (struct shardd_unit_spec){ .strategy = SHARDD_REPLICATE });
	ops_own_of("own hybrid",
		   (struct shardd_unit_spec){ .strategy = SHARDD_HYBRID, .shard_ranks = 2 });
	ops_own_of("own by rows", (struct shardd_unit_spec){ .layout = SHARDD_LAYOUT_DIM0 });
}

/* -- tensors that are no parameters */

void ops_buffers(void)
{
	static const uint64_t shape[] = { 10 };
	static const struct shardd_buffer buffers[] = {
		{ .name = "mean", .shape = shape, .dims = 1 },
		{ .name = "count", .dtype = SHARDD_BUFFER_INT64 },
	};
	const struct shardd_unit_spec spec = { .buffers = buffers, .n_buffers = 2 };
	struct shardd_unit_info u[2];
	void *mine[2];

	u[0] = ops_make("buffers", spec);
	u[1] = ops_make("more buffers", spec);
	for (unsigned i = 0; i < 2; i++)
		OK(shardd_unit_buffers(ops.client, u[i].unit, &mine[i], &ops.err));
	for (uint32_t root = 0; root < 4; root++) {
		bool one = root % 2;

		for (unsigned i = 0; i < 2; i++) {
			ops_fill(mine[i], 10, root + i);
			ops_fill((char *)mine[i] + 40, 2, root + i);
		}
		OK(shardd_broadcast_buffers(ops.client, one ? u[0].unit : 0, SHARDD_WORLD, root,
					    &ops.err));
		for (unsigned i = 0; i < 2; i++)
			ops_show("buffers", mine[i], 48);
	}
	ops_commit();
	OK(shardd_verify_model(ops.client, SHARDD_WORLD, &ops.err));
}

/* -- passes */

enum { LAYERS = 3 };

static void ops_forward(const struct shardd_unit_info *u)
{
	for (unsigned i = 0; i < LAYERS; i++) {
		const void *full;

		OK(shardd_begin_pass(ops.client, u[i].unit, SHARDD_FORWARD, &full, &ops.err));
		ops_show_tensors("forward", &u[i], full, sizeof(float));
		OK(shardd_end_pass(ops.client, u[i].unit, SHARDD_FORWARD, false, &ops.err));
	}
}

/* @sync: false: gradients are added up for a later one. */
static void ops_backward(const struct shardd_unit_info *u, bool sync)
{
	for (unsigned i = LAYERS; i-- > 0;) {
		const void *full;

		OK(shardd_begin_pass(ops.client, u[i].unit, SHARDD_BACKWARD, &full, &ops.err));
		ops_show_tensors("backward", &u[i], full, sizeof(float));
		if (sync) {
			ops_reduce(&u[i]);
		} else {
			ops_fill_gradient(&u[i]);
			OK(shardd_accumulate(ops.client, u[i].unit, &ops.err));
		}
		OK(shardd_end_pass(ops.client, u[i].unit, SHARDD_BACKWARD, sync, &ops.err));
	}
}

static void ops_prefetch(const struct shardd_unit_info *u, bool on)
{
	OK(shardd_set_prefetch(ops.client, u[0].unit, SHARDD_FORWARD,
			       (shardd_unit[]){ u[1].unit, u[2].unit }, on ? 2 : 0, &ops.err));
	OK(shardd_set_prefetch(ops.client, u[2].unit, SHARDD_BACKWARD, &u[1].unit, on, &ops.err));
}

void ops_passes(void)
{
	static const enum shardd_reshard policies[] = { SHARDD_RESHARD_AFTER_FORWARD,
							SHARDD_RESHARD_AFTER_BACKWARD,
							SHARDD_RESHARD_NEVER,
							SHARDD_RESHARD_AFTER_FORWARD_ONLY, 0 };
	const struct shardd_unit_spec spec = { .optimizer = ops_sgd, .guarded = true };
	struct shardd_unit_info u[LAYERS];
	shardd_unit units[LAYERS];

	u[0] = ops_make("layer 0", spec);
	u[1] = ops_make("layer 1", spec);
	u[2] = ops_make("layer 2", spec);
	for (unsigned i = 0; i < LAYERS; i++)
		units[i] = u[i].unit;
	for (size_t i = 0; i < OPS_COUNT(policies); i++) {
		OK(shardd_set_reshard(ops.client, units, LAYERS, policies[i], &ops.err));
		ops_prefetch(u, i % 2);
		for (unsigned k = 0; k < 2; k++) {
			ops_forward(u);
			ops_backward(u, false);
			ops_forward(u);
			ops_backward(u, true);
			OK(shardd_step(ops.client, SHARDD_WORLD, NULL, &ops.err));
			ops_commit();
		}
	}
}

/* -- parameters: how they come in, whole copies of a rank's own, and the end of a unit */

static void ops_initialised(const struct shardd_unit_info *u)
{
	uint64_t buffer;
	void *values;

	OK(shardd_init_seed(ops.client, u->unit, 5, &ops.err));
	ops_look("of a seed", u);
	buffer = ops_buffer(ELEMENTS * sizeof(float), &values);
	OK(shardd_init_own(ops.client, u->unit, buffer, &ops.err));
	ops_look("of all ranks", u);
	for (uint32_t root = 0; root < 4; root++) {
		OK(shardd_init_broadcast(ops.client, u->unit, root,
					 ops.me.rank == root ? buffer : 0, &ops.err));
		ops_look("of a rank", u);
	}
	OK(shardd_free(ops.client, buffer, &ops.err));
}

/* Replicas must be given the same. */
static void ops_change(float *memory, uint64_t n)
{
	float values[ROWS * WIDTH];

	OK(shardd_read(ops.client, values, memory, n * sizeof(float), &ops.err));
	for (uint64_t i = 0; i < n; i++)
		values[i] = values[i] / 2 + (float)(i % 4);
	OK(shardd_write(ops.client, memory, values, n * sizeof(float), &ops.err));
}

/* @state: 0: the parameters. */
static void ops_summoned(const struct shardd_unit_info *u, uint32_t state)
{
	struct shardd_tensor_place places[TENSORS];
	uint64_t steps, of_tensors[TENSORS];
	void *full;

	OK(shardd_summon_state(ops.client, u->unit, state, &full, &steps, &ops.err));
	OK(shardd_unit_steps(ops.client, u->unit, of_tensors, TENSORS, &ops.err));
	ops_say("steps", &steps, sizeof(steps));
	ops_say("steps of tensors", of_tensors, sizeof(of_tensors));
	ops_show_tensors("summoned", u, full, sizeof(float));
	OK(shardd_tensor_places(ops.client, u->unit, places, TENSORS, &ops.err));
	for (unsigned i = 0; i < TENSORS; i++)
		ops_change((float *)full + places[i].offset, places[i].elements);
	steps += 2;
	OK(shardd_return_state(ops.client, u->unit, ops.step % 3, ops.step % 3 == 2 ? &steps : NULL,
			       &ops.err));
}

static void ops_drop(const struct shardd_unit_info *u)
{
	shardd_ticket t;

	OK(shardd_submit_free(ops.client, SHARDD_OPTIONS(free, .units = &u->unit, .n_units = 1), &t,
			      &ops.err));
	OK(shardd_wait(ops.client, t, -1, NULL, &ops.err));
}

static void ops_unit(const char *name, struct shardd_unit_spec spec)
{
	struct shardd_unit_info u;

	spec.optimizer = SHARDD_ADAMW_DEFAULTS(.lr = 0.125);
	u = ops_register(name, spec);
	ops_initialised(&u);
	for (unsigned i = 0; i < 2 * STEPS; i++) {
		ops_reduce(&u);
		ops_end_step(name, &u);
		ops_summoned(&u, i % 3);
		ops_look(name, &u);
	}
	ops_drop(&u);
}

void ops_units(void)
{
	for (unsigned turn = 0; turn < 2; turn++) { /* under the same names again */
		ops_unit("unit", (struct shardd_unit_spec){ .strategy = SHARDD_SHARD });
		ops_unit("replicas", (struct shardd_unit_spec){ .strategy = SHARDD_REPLICATE });
		ops_unit("hybrid unit",
			 (struct shardd_unit_spec){ .strategy = SHARDD_HYBRID, .shard_ranks = 2 });
		ops_unit("unit by rows", (struct shardd_unit_spec){ .layout = SHARDD_LAYOUT_DIM0 });
	}
}

/* -- other layouts */

void ops_converts(void)
{
	static const struct {
		enum shardd_layout layout;
		enum shardd_strategy strategy;
		uint32_t shard_ranks;
	} to[] = { { SHARDD_LAYOUT_DIM0, 0, 0 },
		   { SHARDD_LAYOUT_FLAT, SHARDD_REPLICATE, 0 },
		   { SHARDD_LAYOUT_DIM0, SHARDD_HYBRID, 2 },
		   { SHARDD_LAYOUT_FLAT, SHARDD_HYBRID, 1 },
		   { SHARDD_LAYOUT_FLAT, SHARDD_SHARD, 0 } };
	struct shardd_unit_info u =
		ops_make("converted",
			 (struct shardd_unit_spec){
				 .optimizer = SHARDD_SGD_DEFAULTS(.lr = 0.5, .momentum = 0.5) });

	for (size_t i = 0; i < OPS_COUNT(to); i++) {
		ops_reduce(&u); /* the gradient moves, too */
		OK(shardd_convert(ops.client,
				  SHARDD_OPTIONS(convert, .units = &u.unit, .n_units = 1,
						 .layout = to[i].layout, .strategy = to[i].strategy,
						 .shard_ranks = to[i].shard_ranks),
				  &ops.err));
		ops_reduce(&u);
		ops_end_step("converted", &u);
	}
}

/* -- shards that each rank writes by itself, where all nodes have as many ranks */

static void ops_write_shard(const struct shardd_unit_info *u, uint32_t t, enum shardd_array array,
			    uint64_t buffer, void *memory)
{
	struct shardd_tensor_place places[TENSORS];
	float values[ELEMENTS];
	uint64_t n;

	OK(shardd_tensor_places(ops.client, u->unit, places, TENSORS, &ops.err));
	n = places[t].shard_elements;
	OK(shardd_copy_shard(ops.client, u->unit, t, array, false, buffer, n, &ops.err));
	OK(shardd_read(ops.client, values, memory, n * sizeof(float), &ops.err));
	ops_say("shard", values, n * sizeof(float));
	for (uint64_t k = 0; k < n; k++)
		values[k] = values[k] / 2 + ops_number(k, t);
	OK(shardd_write(ops.client, memory, values, n * sizeof(float), &ops.err));
	OK(shardd_copy_shard(ops.client, u->unit, t, array, true, buffer, n, &ops.err));
}

void ops_shards(void)
{
	struct shardd_unit_info u =
		ops_make("shards", (struct shardd_unit_spec){ .optimizer = ops_sgd });
	uint64_t buffer;
	void *values;

	buffer = ops_buffer(4096, &values);
	for (unsigned i = 0; i < 5; i++) {
		for (uint32_t t = 0; t < TENSORS; t++)
			ops_write_shard(&u, t, SHARDD_PARAMETERS, buffer, values);
		OK(shardd_barrier(ops.client, SHARDD_WORLD,
				  &ops.err)); /* before others gather it */
		ops_look("written", &u);
		ops_reduce(&u);
		for (uint32_t t = 0; t < TENSORS; t++)
			ops_write_shard(&u, t, SHARDD_GRADIENT, buffer, values);
		ops_end_step("written", &u);
		OK(shardd_barrier(ops.client, SHARDD_WORLD, &ops.err)); /* nobody has it gathered */
	}
	OK(shardd_free(ops.client, buffer, &ops.err));
}
