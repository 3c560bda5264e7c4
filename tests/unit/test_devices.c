/* Jobs whose ranks are on several devices: what one device would give, or, where the order
 * of a sum is another, exactly that order. Fake devices, an engine that folds in order. */
#include <criterion/criterion.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "fdcheck.h"
#include "job/registration.h"
#include "nodefix.h"
#include "step/shards.h"

TestSuite(devices, .init = fdcheck_begin, .fini = fdcheck_end, .timeout = 60);

#define N    1003u
#define MOST 8u

struct world {
	struct nodefix n;
	struct job *job;
	struct member *m[MOST];
	unsigned ranks;
	struct nodefix_op ops[MOST];
};

/* @place: device of each rank; NULL: the default. */
static void test_devices_begin(struct world *w, unsigned devices, unsigned ranks,
			       const unsigned *place)
{
	struct nodefix_options o = { .devices = devices };

	memset(w, 0, sizeof(*w));
	nodefix_begin(&w->n, &o);
	w->ranks = ranks;
	w->job = nodefix_job(&w->n, "job", ranks, 0);
	for (unsigned r = 0; r < ranks; r++) {
		struct fault f = FAULT_NULL;
		char id[32] = "";

		if (place)
			snprintf(id, sizeof(id), "fake:%u", place[r]);
		cr_assert_eq(job_place(w->job, r, &(struct job_joining){ .device = id }, &f), 0,
			     "%s", f.text);
		w->m[r] = nodefix_join(&w->n, w->job, r);
	}
}

static void test_devices_end(struct world *w)
{
	nodefix_end(&w->n);
}

/* Registering asks for the group's communicators, which are made meanwhile. */
static struct unit *make_unit(struct world *w, state_unit *spec)
{
	uint64_t charged;
	uint32_t id = 0;
	enum res e = RES_WAIT;

	for (unsigned i = 0; i < 50 && e == RES_WAIT; i++) {
		struct fault f = FAULT_NULL;

		e = nodefix_try_register(w->job, &spec, 1, &id, &charged, &f);
		cr_assert(!f.code, "%s", f.text);
		nodefix_turns(&w->n);
	}
	cr_assert_eq(e, 0);
	return w->job->units[id - 1];
}

/* The same op on all ranks. */
#define ON_ALL(w, call)                                       \
	do {                                                  \
		for (unsigned r = 0; r < (w)->ranks; r++) {   \
			struct nodefix_op *op = &(w)->ops[r]; \
			struct member *m = (w)->m[r];         \
			call;                                 \
		}                                             \
		for (unsigned r = 0; r < (w)->ranks; r++)     \
			nodefix_ok(&(w)->ops[r], #call);      \
	} while (0)

static void params(const struct unit *u, float *ret)
{
	for (unsigned d = 0; d < u->n_parts; d++)
		memcpy(ret + u->parts[d].begin, region_addr(&u->parts[d].params),
		       u->parts[d].n * sizeof(float));
}

static void grads(const struct unit *u, float *ret)
{
	for (unsigned d = 0; d < u->n_parts; d++)
		memcpy(ret + u->parts[d].begin, region_addr(&u->parts[d].grads),
		       u->parts[d].n * sizeof(float));
}

static void seed_params(unsigned devices, unsigned ranks, float *ret)
{
	struct world w;
	struct unit *u;

	test_devices_begin(&w, devices, ranks, NULL);
	u = make_unit(&w, nodefix_spec("u", N));
	ON_ALL(&w, nodefix_seed(&w.n, m, u, 7, op));
	params(u, ret);
	test_devices_end(&w);
}

/* Its other ranks are on other nodes. Before, the ranks 4 to 7 of 8 had the second half of the devices. */
Test(devices, ranks_of_a_launcher_are_spread_by_their_local_numbers)
{
	static const unsigned first[] = { 0, 4 };
	struct nodefix_options o = { .devices = 2 };
	struct nodefix n;

	for (size_t i = 0; i < ARRAY_SIZE(first); i++) {
		struct fault f = FAULT_NULL;
		struct job *job;

		nodefix_begin(&n, &o);
		job = nodefix_job(&n, "job", 8, 0);
		for (uint32_t r = 0; r < 4; r++) {
			const struct job_joining how = { .device = "",
							 .local_rank = r,
							 .local_world_size = 4 };

			cr_assert_eq(job_place(job, first[i] + r, &how, &f), 0, "%s", f.text);
			cr_expect_eq(job->placed[first[i] + r]->index, r / 2, "rank %u", r);
		}
		nodefix_end(&n);
	}
}

Test(devices, parameters_from_a_seed_do_not_depend_on_devices)
{
	static const unsigned worlds[][2] = { { 2, 2 }, { 2, 4 }, { 3, 3 },
					      { 3, 8 }, { 2, 3 }, { 4, 2 } };
	float want[N], got[N];

	seed_params(1, 1, want);
	for (size_t i = 0; i < ARRAY_SIZE(worlds); i++) {
		seed_params(worlds[i][0], worlds[i][1], got);
		cr_expect_eq(memcmp(got, want, sizeof(want)), 0, "%u devices, %u ranks",
			     worlds[i][0], worlds[i][1]);
	}
}

static void fill(float *x, unsigned seed)
{
	const struct k_fill a = { .dst = x, .seed = seed, .kind = FILL_UNIFORM, .a = -1, .b = 1 };

	kernels_ref()->fill(&a, 0, N);
}

static void gathered_equals(struct world *w, struct unit *u, const void *want, size_t bytes)
{
	ON_ALL(w, nodefix_on_unit(&w->n, m, "Gather", u, op));
	for (unsigned r = 0; r < w->ranks; r++) {
		struct region place = w->ops[r].result.place;

		cr_expect_eq(place.slab->device, w->m[r]->device);
		cr_expect_eq(memcmp(region_addr(&place), want, bytes), 0, "rank %u", r);
	}
	ON_ALL(w, nodefix_on_unit(&w->n, m, "Release", u, op));
}

static void gather_on(unsigned devices, unsigned ranks, const unsigned *place, enum dtype dtype)
{
	state_unit *spec = nodefix_spec("u", N);
	float full[N];
	uint16_t half[N];
	struct k_cast cast = { half, full, dtype, DTYPE_FP32, false };
	struct world w;
	struct unit *u;

	spec->compute_dtype = dtype;
	test_devices_begin(&w, devices, ranks, place);
	u = make_unit(&w, spec);
	ON_ALL(&w, nodefix_seed(&w.n, m, u, 3, op));
	params(u, full);
	if (dtype != DTYPE_FP32)
		kernels_ref()->cast(&cast, 0, N);
	gathered_equals(&w, u, dtype == DTYPE_FP32 ? (void *)full : half, N * dtype_size(dtype));
	test_devices_end(&w);
}

static const unsigned round_robin[MOST] = { 0, 1, 2, 0, 1, 2, 0, 1 };
static const unsigned uneven[MOST] = { 1, 1, 1, 0 };

Test(devices, a_gather_gives_every_device_the_whole_unit)
{
	static const enum dtype dtypes[] = { DTYPE_FP32, DTYPE_BF16, DTYPE_FP16 };

	for (size_t i = 0; i < ARRAY_SIZE(dtypes); i++) {
		gather_on(2, 2, NULL, dtypes[i]);
		gather_on(2, 4, NULL, dtypes[i]);
		gather_on(2, 3, NULL, dtypes[i]);
		gather_on(3, 8, round_robin, dtypes[i]);
		gather_on(2, 4, uneven, dtypes[i]);
		gather_on(4, 1, NULL, dtypes[i]);
	}
}

static void hand_in(struct world *w, struct unit *u, unsigned seed)
{
	ON_ALL(w, nodefix_on_unit(&w->n, m, "GradientBuffer", u, op));
	for (unsigned r = 0; r < w->ranks; r++)
		fill(region_addr(&w->ops[r].result.place), seed + r);
	ON_ALL(w, nodefix_on_unit(&w->n, m, "Reduce", u, op));
}

/* In rank order inside a device, then over devices in the group's order, then divided. */
static void expect_sum(struct world *w, struct unit *u, unsigned seed, float *acc)
{
	float total[N] = { 0 }, on[N], x[N];

	for (unsigned d = 0; d < u->n_parts; d++) {
		bool first = true;

		for (unsigned r = 0; r < w->ranks; r++) {
			if (w->m[r]->device != u->parts[d].device)
				continue;
			fill(x, seed + r);
			for (unsigned i = 0; i < N; i++) {
				float v = x[i] / (float)u->rec->pre_divide;

				on[i] = first ? v : on[i] + v;
			}
			first = false;
		}
		for (unsigned i = 0; i < N; i++)
			total[i] = d ? total[i] + on[i] : on[i];
	}
	for (unsigned i = 0; i < N; i++)
		acc[i] += total[i] / (float)u->rec->post_divide;
}

static void reduce_on(unsigned devices, unsigned ranks, const unsigned *place)
{
	state_unit *spec = nodefix_spec("u", N);
	float want[N] = { 0 }, got[N];
	struct world w;
	struct unit *u;

	test_devices_begin(&w, devices, ranks, place);
	spec->div_mode = DIV_MODE_TRUE;
	u = make_unit(&w, spec);
	ON_ALL(&w, nodefix_seed(&w.n, m, u, 3, op));
	for (unsigned k = 0; k < 3; k++) {
		hand_in(&w, u, 100 * k);
		expect_sum(&w, u, 100 * k, want);
		grads(u, got);
		for (unsigned i = 0; i < N; i++)
			cr_assert_eq(got[i], want[i], "%u devices, %u ranks: %u", devices, ranks,
				     i);
	}
	for (unsigned d = 0; d < w.n.node.n_devices; d++)
		cr_expect_eq(w.job->mem.scratch[d].used, 0);
	test_devices_end(&w);
}

Test(devices, gradients_are_added_inside_a_device_then_between_devices)
{
	reduce_on(2, 2, NULL);
	reduce_on(2, 4, NULL);
	reduce_on(2, 3, NULL);
	reduce_on(3, 8, round_robin);
	reduce_on(2, 4, uneven);
	reduce_on(4, 8, NULL);
}

/* The optimizer steps each part as it would the whole. */
Test(devices, a_step_is_the_same_on_any_number_of_devices)
{
	float want[N], got[N];

	for (unsigned devices = 1; devices <= 4; devices++) {
		struct world w;
		struct unit *u;

		test_devices_begin(&w, devices, 4, NULL);
		u = make_unit(&w, nodefix_spec("u", N));
		ON_ALL(&w, nodefix_seed(&w.n, m, u, 3, op));
		for (unsigned step = 1; step < 4; step++) {
			/* equal on all ranks, so that no order of adding matters */
			ON_ALL(&w, nodefix_on_unit(&w.n, m, "GradientBuffer", u, op));
			for (unsigned r = 0; r < w.ranks; r++)
				fill(region_addr(&w.ops[r].result.place), step);
			ON_ALL(&w, nodefix_on_unit(&w.n, m, "Reduce", u, op));
			ON_ALL(&w, nodefix_step(&w.n, m, op));
			ON_ALL(&w, nodefix_commit(&w.n, m, step, 0, op));
		}
		params(u, devices == 1 ? want : got);
		cr_expect(devices == 1 || !memcmp(got, want, sizeof(want)), "%u devices", devices);
		test_devices_end(&w);
	}
}

Test(devices, the_norm_is_that_of_all_parts)
{
	double want = 0;

	for (unsigned devices = 1; devices <= 3; devices++) {
		struct world w;
		struct unit *u;
		float before[N], after[N];

		test_devices_begin(&w, devices, 3, NULL);
		u = make_unit(&w, nodefix_spec("u", N));
		ON_ALL(&w, nodefix_seed(&w.n, m, u, 3, op));
		ON_ALL(&w, nodefix_on_unit(&w.n, m, "GradientBuffer", u, op));
		for (unsigned r = 0; r < w.ranks; r++)
			fill(region_addr(&w.ops[r].result.place), 5);
		ON_ALL(&w, nodefix_on_unit(&w.n, m, "Reduce", u, op));
		grads(u, before);
		ON_ALL(&w, nodefix_clip(&w.n, m, 0.5, op));
		grads(u, after);
		if (devices == 1)
			want = NODEFIX_OUTCOME(shards_outcome, &w.ops[0])->total_norm;
		for (unsigned r = 0; r < w.ranks; r++)
			cr_expect_float_eq(NODEFIX_OUTCOME(shards_outcome, &w.ops[r])->total_norm,
					   want, 1e-9 * want);
		for (unsigned i = 0; i < N; i++)
			cr_assert_float_eq(after[i], before[i] * 0.5 / want, 1e-6);
		test_devices_end(&w);
	}
}

static float *buffer_of(struct world *w, unsigned r, uint64_t *id)
{
	NODEFIX_OK(nodefix_alloc(&w->n, w->m[r], N * sizeof(float), &w->ops[r]), &w->ops[r]);
	*id = w->ops[r].result.buffer;
	return region_addr(&w->ops[r].result.place);
}

static void own_on(unsigned devices, unsigned ranks, const unsigned *place)
{
	float want[N], got[N];
	uint64_t ids[MOST];
	struct world w;
	struct unit *u;

	test_devices_begin(&w, devices, ranks, place);
	u = make_unit(&w, nodefix_spec("u", N));
	for (unsigned r = 0; r < ranks; r++) {
		float *x = buffer_of(&w, r, &ids[r]);

		fill(x, r);
		for (uint64_t i = 0; i < layout_owned(&u->layout, r); i++)
			want[layout_begin(&u->layout, r) + i] = x[layout_begin(&u->layout, r) + i];
	}
	ON_ALL(&w, nodefix_own(&w.n, m, u, ids[r], op));
	params(u, got);
	cr_expect_eq(memcmp(got, want, sizeof(want)), 0, "%u devices, %u ranks", devices, ranks);
	test_devices_end(&w);
}

Test(devices, each_rank_brings_its_own_shard)
{
	own_on(1, 4, NULL);
	own_on(2, 4, NULL);
	own_on(3, 8, round_robin);
	own_on(2, 4, uneven);
	own_on(4, 3, NULL);
}

static void from_root(unsigned devices, unsigned ranks, const unsigned *place, unsigned root)
{
	float want[N], got[N];
	uint64_t id;
	struct world w;
	struct unit *u;

	test_devices_begin(&w, devices, ranks, place);
	u = make_unit(&w, nodefix_spec("u", N));
	fill(buffer_of(&w, root, &id), 77);
	fill(want, 77);
	for (unsigned r = 0; r < ranks; r++) {
		Shardd__V1__InitialiseRequest msg = SHARDD__V1__INITIALISE_REQUEST__INIT;
		Shardd__V1__FromRank from = SHARDD__V1__FROM_RANK__INIT;

		from.root = root;
		msg.unit = u->id;
		msg.how_case = SHARDD__V1__INITIALISE_REQUEST__HOW_BROADCAST;
		msg.broadcast = &from;
		msg.buffer = r == root ? id : 0;
		nodefix_submit(&w.n, w.m[r], "Initialise", &msg.base, &w.ops[r]);
	}
	for (unsigned r = 0; r < ranks; r++)
		nodefix_ok(&w.ops[r], "initialise from a root");
	params(u, got);
	cr_expect_eq(memcmp(got, want, sizeof(want)), 0, "%u devices, root %u", devices, root);
	test_devices_end(&w);
}

Test(devices, one_rank_brings_all_parameters)
{
	from_root(1, 2, NULL, 1);
	for (unsigned root = 0; root < 4; root++) {
		from_root(2, 4, NULL, root);
		from_root(3, 4, round_robin, root);
	}
}

Test(devices, buffers_are_broadcast_from_every_root)
{
	for (unsigned root = 0; root < 4; root++) {
		uint64_t ids[4];
		float *x[4], want[N];
		struct world w;

		test_devices_begin(&w, 3, 4, round_robin);
		for (unsigned r = 0; r < 4; r++) {
			x[r] = buffer_of(&w, r, &ids[r]);
			fill(x[r], r);
		}
		fill(want, root);
		for (unsigned r = 0; r < 4; r++) {
			Shardd__V1__BroadcastRequest msg = SHARDD__V1__BROADCAST_REQUEST__INIT;

			msg.buffer = ids[r];
			msg.bytes = sizeof(want);
			msg.root = root;
			nodefix_submit(&w.n, w.m[r], "Broadcast", &msg.base, &w.ops[r]);
		}
		for (unsigned r = 0; r < 4; r++) {
			nodefix_ok(&w.ops[r], "broadcast");
			cr_expect_eq(memcmp(x[r], want, sizeof(want)), 0, "root %u, rank %u", root,
				     r);
		}
		test_devices_end(&w);
	}
}

static void all_reduce(struct world *w, const uint64_t *ids, enum reduce_op how)
{
	for (unsigned r = 0; r < w->ranks; r++) {
		Shardd__V1__AllReduceRequest msg = SHARDD__V1__ALL_REDUCE_REQUEST__INIT;

		msg.buffer = ids[r];
		msg.count = N;
		msg.dtype = SHARDD__V1__DTYPE__DTYPE_FP32;
		msg.op = (Shardd__V1__ReduceOp)how;
		nodefix_submit(&w->n, w->m[r], "AllReduce", &msg.base, &w->ops[r]);
	}
	for (unsigned r = 0; r < w->ranks; r++)
		nodefix_ok(&w->ops[r], "all-reduce");
}

/* Small integers: exact in any order. NaN and both zeros as on one device. */
Test(devices, all_reduce_gives_all_the_same)
{
	static const enum reduce_op ops[] = { REDUCE_SUM, REDUCE_AVG, REDUCE_MAX, REDUCE_MIN };

	for (size_t k = 0; k < ARRAY_SIZE(ops); k++) {
		uint64_t ids[8];
		float *x[8];
		struct world w;

		test_devices_begin(&w, 3, 8, round_robin);
		for (unsigned r = 0; r < 8; r++) {
			x[r] = buffer_of(&w, r, &ids[r]);
			for (unsigned i = 0; i < N; i++)
				x[r][i] = (float)((i * 7 + r * 13) % 64);
		}
		x[5][9] = NAN;
		all_reduce(&w, ids, ops[k]);
		for (unsigned r = 0; r < 8; r++) {
			cr_expect(isnan(x[r][9]));
			cr_expect_eq(memcmp(x[r], x[0], N * sizeof(float)), 0, "rank %u", r);
		}
		for (unsigned i = 0; i < N; i++) {
			float sum = 0, max = -1, min = 1000;

			for (unsigned r = 0; r < 8; r++) {
				float v = (float)((i * 7 + r * 13) % 64);

				sum += v;
				max = v > max ? v : max;
				min = v < min ? v : min;
			}
			if (i != 9)
				cr_assert_eq(x[3][i], ops[k] == REDUCE_SUM   ? sum
						      : ops[k] == REDUCE_AVG ? sum / 8
						      : ops[k] == REDUCE_MAX ? max
									     : min);
		}
		test_devices_end(&w);
	}
}

/* --------------------------------------------------------------- placement */

Test(devices, ranks_are_spread_evenly_and_in_order)
{
	struct world w;

	test_devices_begin(&w, 4, 8, NULL);
	for (unsigned r = 0; r < 8; r++)
		cr_expect_eq(w.m[r]->device, &w.n.node.devices[r / 2]);
	test_devices_end(&w);
	test_devices_begin(&w, 4, 2, NULL);
	cr_expect_eq(w.m[1]->device, &w.n.node.devices[1], "no more devices than ranks");
	test_devices_end(&w);
}

Test(devices, units_wait_until_all_ranks_have_a_place)
{
	struct nodefix_options o = { .devices = 2 };
	struct nodefix n;
	struct job *job;
	state_unit *spec = nodefix_spec("u", N);
	struct fault f = FAULT_NULL;
	uint64_t charged;
	uint32_t id;

	nodefix_begin(&n, &o);
	job = nodefix_job(&n, "job", 2, 0);
	nodefix_join(&n, job, 0);
	cr_expect_eq(nodefix_try_register(job, &spec, 1, &id, &charged, &f), RES_WAIT);
	cr_expect(!f.code);
	nodefix_join(&n, job, 1);
	nodefix_turns(&n);
	cr_expect_eq(nodefix_try_register(job, &spec, 1, &id, &charged, &f), 0, "%s", f.text);
	nodefix_end(&n);
}

Test(devices, a_rank_with_memory_stays_where_it_is)
{
	struct fault f = FAULT_NULL;
	struct world w;

	test_devices_begin(&w, 2, 2, NULL);
	make_unit(&w, nodefix_spec("u", N));
	cr_expect_eq(job_place(w.job, 0, &(struct job_joining){ .device = "fake:1" }, &f),
		     FAULT_STATE);
	cr_expect(strstr(f.text, "fake:0"), "%s", f.text);
	f = FAULT_NULL;
	cr_expect_eq(job_place(w.job, 0, &(struct job_joining){ .device = "cuda:7" }, &f),
		     FAULT_INVALID);
	cr_expect(strstr(f.text, "fake:0, fake:1"), "%s", f.text);
	test_devices_end(&w);
}
