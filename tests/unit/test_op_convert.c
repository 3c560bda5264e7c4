/* Conversions and summoned units in the daemon's core: what is refused leaves everything as
 * it was, what is done is all there, also in the record. */
#include <criterion/criterion.h>
#include <stdlib.h>
#include <string.h>

#include "core/check.h"
#include "fdcheck.h"
#include "job/registration.h"
#include "nodefix.h"
#include "unit/optim.h"
#include "unit/runs.h"

TestSuite(op_convert, .init = fdcheck_begin, .fini = fdcheck_end, .timeout = 120);

#define RANKS 3

struct fixture {
	struct nodefix n;
	struct job *job;
	struct member *m[RANKS];
	struct unit *u;
	struct nodefix_op op[RANKS];
	float params[64]; /* as they were, packed */
};

static state_unit *spec(const char *name)
{
	static const uint64_t matrix[] = { 7, 3 }, frozen[] = { 5, 2 };
	state_unit *s = nodefix_spec(name, 4);
	state_tensor *f = state_tensor_new("frozen", frozen, 2);

	f->frozen = true;
	CHECK(state_unit_add_tensor(s, f) == 0);
	CHECK(state_unit_add_tensor(s, state_tensor_new("matrix", matrix, 2)) == 0);
	for (unsigned i = 0; i < 3; i++) {
		s->tensors[i]->init_kind = FILL_NORMAL;
		s->tensors[i]->init_b = 1;
	}
	return s;
}

/* Tensor after tensor, from wherever they are. */
static void read_packed(struct unit *u, float *ret)
{
	for (unsigned d = 0; d < u->spread; d++)
		for (uint32_t t = 0; t < u->rec->n_tensors; t++) {
			struct unit_run run;

			if (unit_part_run(u, &u->parts[d], t, &run))
				memcpy(ret + u->tensors[t].packed + run.first,
				       optim_at(&u->parts[d].params, run.at),
				       run.n * sizeof(float));
		}
}

static void setup(struct fixture *x, unsigned devices, uint64_t quota)
{
	*x = (struct fixture){ 0 };
	nodefix_begin(&x->n, &(struct nodefix_options){ .devices = devices });
	x->job = nodefix_job(&x->n, "job", RANKS, quota);
	for (unsigned i = 0; i < RANKS; i++)
		x->m[i] = nodefix_join(&x->n, x->job, i);
	x->u = nodefix_unit(&x->n, x->job, spec("u"), x->m, RANKS);
	read_packed(x->u, x->params);
}

static void submit(struct fixture *x, unsigned i, enum unit_layout_kind layout,
		   enum unit_strategy strategy)
{
	static uint32_t units[] = { 1 };
	static Shardd__V1__ConvertUnitsRequest r[RANKS];

	r[i] = (Shardd__V1__ConvertUnitsRequest)SHARDD__V1__CONVERT_UNITS_REQUEST__INIT;
	r[i].units = units;
	r[i].n_units = 1;
	r[i].layout = (Shardd__V1__Layout)layout;
	r[i].strategy = (Shardd__V1__Strategy)strategy;
	nodefix_submit(&x->n, x->m[i], "ConvertUnits", &r[i].base, &x->op[i]);
}

static void convert(struct fixture *x, enum unit_layout_kind layout, enum unit_strategy strategy)
{
	for (unsigned i = 0; i < RANKS; i++)
		submit(x, i, layout, strategy);
	for (unsigned i = 0; i < RANKS; i++)
		nodefix_wait(&x->op[i]);
}

static void expect_params(struct fixture *x)
{
	float now[64] = { 0 };

	read_packed(x->u, now);
	cr_expect_arr_eq(now, x->params, sizeof(now));
}

static void every_way(unsigned devices)
{
	static const struct {
		enum unit_layout_kind layout;
		enum unit_strategy strategy;
	} way[] = {
		{ LAYOUT_DIM0, STRATEGY_SHARD },     { LAYOUT_DIM0, STRATEGY_REPLICATE },
		{ LAYOUT_FLAT, STRATEGY_REPLICATE }, { LAYOUT_DIM0, STRATEGY_SHARD },
		{ LAYOUT_FLAT, STRATEGY_SHARD },
	};
	struct fault f = FAULT_NULL;
	struct fixture x;
	uint64_t used;

	setup(&x, devices, 0);
	used = x.job->quota.by_class[MEM_SHARD];
	for (size_t i = 0; i < ARRAY_SIZE(way); i++) {
		uint8_t *bytes = NULL;
		state_all *all = NULL;
		size_t n;

		convert(&x, way[i].layout, way[i].strategy);
		for (unsigned k = 0; k < RANKS; k++)
			nodefix_ok(&x.op[k], "ConvertUnits");
		expect_params(&x);
		cr_expect_eq(x.u->rec->layout, way[i].layout);
		cr_expect_eq(x.job->mem.n_slabs, x.job->rec->n_slabs);
		cr_expect_eq(x.job->mem.n_slabs, 2 * devices, "the old ones are gone");
		cr_assert_eq(state_encode(&x.job->rec, 1, x.n.node.devices[0].table->next, &bytes,
					  &n),
			     0);
		cr_expect_eq(state_decode(bytes, n, &all, &f), 0, "%s", f.text);
		state_free(all);
		free(bytes);
	}
	cr_expect_eq(x.job->quota.by_class[MEM_SHARD], used, "as at first");
	nodefix_end(&x.n);
}

Test(op_convert, every_layout_on_one_device)
{
	every_way(1);
}

Test(op_convert, every_layout_on_two_devices)
{
	every_way(2);
}

Test(op_convert, every_layout_on_three_devices)
{
	every_way(3);
}

/* -- replicas that have sets of devices */

#define MANY 6

static void read_copy(struct unit *u, unsigned copy, float *ret)
{
	for (unsigned d = copy * u->spread; d < (copy + 1) * u->spread; d++)
		for (uint32_t t = 0; t < u->rec->n_tensors; t++) {
			struct unit_run run;

			if (unit_part_run(u, &u->parts[d], t, &run))
				memcpy(ret + u->tensors[t].packed + run.first,
				       optim_at(&u->parts[d].params, run.at),
				       run.n * sizeof(float));
		}
}

static void expect_copies(struct unit *u, const float *want)
{
	for (unsigned copy = 0; copy < u->n_parts / u->spread; copy++) {
		float now[64] = { 0 };

		read_copy(u, copy, now);
		cr_expect_arr_eq(now, want, sizeof(now), "unit '%s', copy %u", u->rec->name, copy);
	}
}

/* Two units, whose replicas have sets of different sizes, in one op. */
static void convert_both(struct nodefix *n, struct member **m, enum unit_layout_kind layout,
			 enum unit_strategy strategy, uint32_t shard_ranks)
{
	static uint32_t units[] = { 1, 2 };
	static Shardd__V1__ConvertUnitsRequest r[MANY];
	struct nodefix_op op[MANY] = { 0 };

	for (unsigned i = 0; i < MANY; i++) {
		r[i] = (Shardd__V1__ConvertUnitsRequest)SHARDD__V1__CONVERT_UNITS_REQUEST__INIT;
		r[i].units = units;
		r[i].n_units = 2;
		r[i].layout = (Shardd__V1__Layout)layout;
		r[i].strategy = (Shardd__V1__Strategy)strategy;
		r[i].shard_ranks = shard_ranks;
		nodefix_submit(n, m[i], "ConvertUnits", &r[i].base, &op[i]);
	}
	for (unsigned i = 0; i < MANY; i++)
		nodefix_ok(&op[i], "ConvertUnits");
}

static struct unit *make_hybrid(struct nodefix *n, struct job *job, struct member **m,
				const char *name, uint32_t shard_ranks)
{
	state_unit *s = spec(name);

	s->strategy = STRATEGY_HYBRID;
	s->shard_ranks = shard_ranks;
	return nodefix_unit(n, job, s, m, MANY);
}

Test(op_convert, units_whose_replicas_have_sets_of_two_and_three_devices)
{
	struct member *m[MANY];
	float params[2][64] = { 0 };
	struct unit *u[2];
	struct nodefix n;
	struct job *job;

	nodefix_begin(&n, &(struct nodefix_options){ .devices = MANY });
	job = nodefix_job(&n, "job", MANY, 0);
	for (unsigned i = 0; i < MANY; i++)
		m[i] = nodefix_join(&n, job, i);
	u[0] = make_hybrid(&n, job, m, "two", 2);
	u[1] = make_hybrid(&n, job, m, "three", 3);
	for (unsigned i = 0; i < 2; i++) {
		cr_expect(u[i]->layout.sets && u[i]->rec->sets);
		cr_expect_eq(u[i]->spread, 2 + i);
		read_copy(u[i], 0, params[i]);
		expect_copies(u[i], params[i]);
	}
	convert_both(&n, m, LAYOUT_DIM0, 0, 0);
	for (unsigned i = 0; i < 2; i++)
		expect_copies(u[i], params[i]);
	convert_both(&n, m, LAYOUT_FLAT, STRATEGY_SHARD, 0);
	for (unsigned i = 0; i < 2; i++) {
		cr_expect(!u[i]->layout.sets && !u[i]->rec->sets && u[i]->spread == MANY);
		expect_copies(u[i], params[i]);
	}
	convert_both(&n, m, LAYOUT_DIM0, STRATEGY_HYBRID, 3);
	for (unsigned i = 0; i < 2; i++) {
		cr_expect(u[i]->rec->sets && u[i]->spread == 3);
		expect_copies(u[i], params[i]);
	}
	nodefix_end(&n);
}

/* There is room for one layout, not for two. */
Test(op_convert, without_memory_all_is_as_it_was)
{
	struct region params;
	struct fixture x;

	setup(&x, 1, 5 * 4096);
	params = x.u->parts[0].params;
	x.job->quota.limit = x.job->quota.used + 4096;
	convert(&x, LAYOUT_DIM0, 0);
	for (unsigned i = 0; i < RANKS; i++)
		cr_expect_eq(x.op[i].fault.code, FAULT_EXHAUSTED, "%s", x.op[i].fault.text);
	expect_params(&x);
	cr_expect_eq(x.u->rec->layout, LAYOUT_FLAT);
	cr_expect_eq(x.u->parts[0].params.slab, params.slab);
	cr_expect_eq(x.u->parts[0].params.offset, params.offset);
	x.job->quota.limit = 0;
	convert(&x, LAYOUT_DIM0, 0);
	nodefix_ok(&x.op[0], "ConvertUnits");
	expect_params(&x);
	nodefix_end(&x.n);
}

static void all_ok(struct fixture *x, const char *type)
{
	for (unsigned i = 0; i < RANKS; i++)
		nodefix_on_unit(&x->n, x->m[i], type, x->u, &x->op[i]);
	for (unsigned i = 0; i < RANKS; i++)
		nodefix_ok(&x->op[i], type);
}

/* To rows it is refused with @words, for all and with nothing changed. */
static void refused(struct fixture *x, const char *words)
{
	enum unit_layout_kind layout = (enum unit_layout_kind)x->u->rec->layout;

	convert(x, LAYOUT_DIM0, 0);
	for (unsigned i = 0; i < RANKS; i++) {
		cr_expect_eq(x->op[i].fault.code, FAULT_STATE);
		cr_expect(strstr(x->op[i].fault.text, words), "%s", x->op[i].fault.text);
	}
	cr_expect_eq(x->u->rec->layout, layout);
	expect_params(x);
}

static void allowed(struct fixture *x)
{
	convert(x, LAYOUT_DIM0, 0);
	for (unsigned i = 0; i < RANKS; i++)
		nodefix_ok(&x->op[i], "ConvertUnits");
}

/* What is accumulated is as long as a gradient buffer of the old layout. */
Test(op_convert, what_one_rank_has_accumulated_is_reduced_first)
{
	struct fixture x;

	for (unsigned devices = 1; devices <= 3; devices++) {
		setup(&x, devices, 0);
		nodefix_on_unit(&x.n, x.m[1], "GradientBuffer", x.u, &x.op[1]);
		nodefix_ok(&x.op[1], "GradientBuffer");
		refused(&x, "given a gradient buffer");
		nodefix_on_unit(&x.n, x.m[1], "Accumulate", x.u, &x.op[1]);
		nodefix_ok(&x.op[1], "Accumulate");
		refused(&x, "is accumulated");
		all_ok(&x, "GradientBuffer");
		all_ok(&x, "Reduce");
		allowed(&x);
		nodefix_end(&x.n);
	}
}

/* So are the sums of replicas. */
Test(op_convert, a_deferred_all_reduce_comes_first)
{
	struct fixture x;

	for (unsigned devices = 1; devices <= 3; devices++) {
		setup(&x, devices, 0);
		convert(&x, LAYOUT_FLAT, STRATEGY_REPLICATE);
		nodefix_ok(&x.op[0], "ConvertUnits");
		all_ok(&x, "GradientBuffer");
		for (unsigned i = 0; i < RANKS; i++)
			nodefix_defer(&x.n, x.m[i], x.u, &x.op[i]);
		for (unsigned i = 0; i < RANKS; i++)
			nodefix_ok(&x.op[i], "Reduce");
		refused(&x, "deferred");
		all_ok(&x, "GradientBuffer");
		all_ok(&x, "Reduce");
		allowed(&x);
		nodefix_end(&x.n);
	}
}

/* The blocks of a norm that the plan has taken are those of the old layout. */
Test(op_convert, a_planned_pass_is_ended_first)
{
	Shardd__V1__PlanBackwardRequest r = SHARDD__V1__PLAN_BACKWARD_REQUEST__INIT;
	Shardd__V1__PlanBackwardRequest__Clip clip = SHARDD__V1__PLAN_BACKWARD_REQUEST__CLIP__INIT;
	struct fixture x;

	for (unsigned devices = 1; devices <= 3; devices++) {
		setup(&x, devices, 0);
		r.clip = &clip;
		clip.max_norm = 1;
		for (unsigned i = 0; i < RANKS; i++)
			nodefix_submit(&x.n, x.m[i], "PlanBackward", &r.base, &x.op[i]);
		for (unsigned i = 0; i < RANKS; i++)
			nodefix_ok(&x.op[i], "PlanBackward");
		all_ok(&x, "GradientBuffer");
		all_ok(&x, "Reduce");
		refused(&x, "plan");
		for (unsigned i = 0; i < RANKS; i++)
			nodefix_step(&x.n, x.m[i], &x.op[i]);
		for (unsigned i = 0; i < RANKS; i++)
			nodefix_ok(&x.op[i], "Step");
		allowed(&x);
		nodefix_end(&x.n);
	}
}

Test(op_convert, all_ranks_must_want_the_same)
{
	struct fixture x;

	setup(&x, 1, 0);
	submit(&x, 0, LAYOUT_DIM0, 0);
	submit(&x, 1, LAYOUT_FLAT, 0);
	submit(&x, 2, LAYOUT_DIM0, 0);
	for (unsigned i = 0; i < RANKS; i++) {
		nodefix_wait(&x.op[i]);
		cr_expect_eq(x.op[i].fault.code, FAULT_STATE);
	}
	expect_params(&x);
	cr_expect_eq(x.u->rec->layout, LAYOUT_FLAT);
	nodefix_end(&x.n);
}

/* Its units were registered together, so their memory is: it stays until both have gone. */
Test(op_convert, a_unit_that_shares_its_memory)
{
	struct fixture x;
	state_unit *specs[] = { spec("v"), spec("w") };
	struct fault f = FAULT_NULL;
	uint64_t charged;
	uint32_t ids[2];

	setup(&x, 1, 0);
	cr_assert_eq(nodefix_try_register(x.job, specs, 2, ids, &charged, &f), 0, "%s", f.text);
	for (uint32_t unit = 2; unit <= 3; unit++) {
		Shardd__V1__ConvertUnitsRequest r = SHARDD__V1__CONVERT_UNITS_REQUEST__INIT;

		r.units = &unit;
		r.n_units = 1;
		r.layout = SHARDD__V1__LAYOUT__LAYOUT_DIM0;
		for (unsigned i = 0; i < RANKS; i++)
			nodefix_submit(&x.n, x.m[i], "ConvertUnits", &r.base, &x.op[i]);
		for (unsigned i = 0; i < RANKS; i++)
			nodefix_ok(&x.op[i], "ConvertUnits");
		cr_expect_eq(x.job->mem.n_slabs, 6); /* two more; then two more and two less */
	}
	nodefix_end(&x.n);
}

/* Summoned by all, one is lost: nobody has it any more, and it is as it was. */
static void reduce_kind(struct fixture *x, const char *type, bool defer)
{
	for (unsigned i = 0; i < RANKS; i++) {
		if (defer)
			nodefix_defer(&x->n, x->m[i], x->u, &x->op[i]);
		else
			nodefix_on_unit(&x->n, x->m[i], type, x->u, &x->op[i]);
	}
	for (unsigned i = 0; i < RANKS; i++)
		nodefix_ok(&x->op[i], type);
}

static void convert_is(struct fixture *x, enum unit_layout_kind layout, const char *refusal)
{
	for (unsigned i = 0; i < RANKS; i++)
		submit(x, i, layout, 0);
	nodefix_turns(&x->n);
	for (unsigned i = 0; i < RANKS; i++) {
		cr_expect_eq(!x->op[i].fault.code, !refusal, "%s", x->op[i].fault.text);
		cr_expect(!refusal || strstr(x->op[i].fault.text, refusal), "%s",
			  x->op[i].fault.text);
	}
}

/* Gradients that are neither in a buffer nor in a shard lie as the layout had them. A profile
 * without divide factors keeps having none. */
Test(op_convert, what_is_accumulated_or_deferred_stands_in_the_way)
{
	static struct fixture x;
	state_unit *fsdp2 = spec("v");

	fsdp2->reduce_profile = PROFILE_FSDP2;
	fsdp2->strategy = STRATEGY_REPLICATE;
	nodefix_begin(&x.n, &(struct nodefix_options){ .devices = 1 });
	x.job = nodefix_job(&x.n, "job", RANKS, 0);
	for (unsigned i = 0; i < RANKS; i++)
		x.m[i] = nodefix_join(&x.n, x.job, i);
	x.u = nodefix_unit(&x.n, x.job, fsdp2, x.m, RANKS);
	convert_is(&x, LAYOUT_DIM0, NULL);
	reduce_kind(&x, "GradientBuffer", false);
	reduce_kind(&x, "Accumulate", false);
	convert_is(&x, LAYOUT_FLAT, "is accumulated");
	reduce_kind(&x, "Reduce", true);
	convert_is(&x, LAYOUT_FLAT, "is deferred");
	reduce_kind(&x, "GradientBuffer", false);
	reduce_kind(&x, "Reduce", false);
	convert_is(&x, LAYOUT_FLAT, NULL);
	nodefix_end(&x.n);
}

Test(op_convert, a_summoned_unit_whose_rank_is_lost)
{
	struct fixture x;

	for (unsigned devices = 1; devices <= 3; devices++) {
		setup(&x, devices, 0);
		for (unsigned i = 0; i < RANKS; i++)
			nodefix_on_unit(&x.n, x.m[i], "SummonFull", x.u, &x.op[i]);
		for (unsigned i = 0; i < RANKS; i++) {
			nodefix_ok(&x.op[i], "SummonFull");
			cr_expect(x.op[i].result.writable);
			nodefix_write(&x.op[i].result.place, 7);
		}
		cr_expect_eq(x.u->summoned_ranks, RANKS);
		nodefix_drop(&x.n, x.m[1], "died");
		nodefix_turns(&x.n);
		for (unsigned i = 0; i < RANKS; i += 2) {
			struct fault f = FAULT_NULL;

			cr_assert_eq(nodefix_try_join(&x.n, x.job, i, NULL, x.m[i], &x.m[i], &f), 0,
				     "%s", f.text);
		}
		cr_expect_eq(x.u->summoned_ranks, 0);
		expect_params(&x);
		NODEFIX_OK(nodefix_on_unit(&x.n, x.m[0], "Gather", x.u, &x.op[0]), &x.op[0]);
		nodefix_end(&x.n);
	}
}

/* Put (@to) or take state array 2 of the unit tensor after tensor, on all devices. */
static void state_packed(struct unit *u, float *packed, bool to)
{
	for (unsigned d = 0; d < u->n_parts; d++)
		for (uint32_t t = 0; t < u->rec->n_tensors; t++) {
			float *at, *here = packed + u->tensors[t].packed;
			struct unit_run run;

			if (u->tensors[t].frozen || !unit_part_run(u, &u->parts[d], t, &run))
				continue;
			at = optim_at(&u->parts[d].state2, run.at);
			memcpy(to ? at : here + run.first, to ? here + run.first : at,
			       run.n * sizeof(float));
		}
}

static void summon_state(struct fixture *x, const float *want)
{
	Shardd__V1__SummonFullRequest r = SHARDD__V1__SUMMON_FULL_REQUEST__INIT;

	r.unit = x->u->id;
	r.state = 2;
	for (unsigned i = 0; i < RANKS; i++)
		nodefix_submit(&x->n, x->m[i], "SummonFull", &r.base, &x->op[i]);
	for (unsigned i = 0; i < RANKS; i++) {
		const struct region *place = &x->op[i].result.place;

		nodefix_ok(&x->op[i], "SummonFull");
		cr_assert_eq(place->bytes, unit_full_elements(x->u) * sizeof(float));
		for (uint32_t t = 0; t < x->u->rec->n_tensors; t++)
			for (uint64_t k = 0; k < x->u->tensors[t].elements; k++)
				cr_assert_eq(
					optim_at(place,
						 unit_tensor_full(x->u, &x->u->tensors[t]) + k)[0],
					want[x->u->tensors[t].packed + k]);
		nodefix_write(place, 100 + (float)i);
	}
}

static void return_state(struct fixture *x, uint64_t steps)
{
	Shardd__V1__ReturnFullRequest r = SHARDD__V1__RETURN_FULL_REQUEST__INIT;

	r.unit = x->u->id;
	r.write = 1;
	r.optional_optimizer_steps_case =
		SHARDD__V1__RETURN_FULL_REQUEST__OPTIONAL_OPTIMIZER_STEPS_OPTIMIZER_STEPS;
	r.optimizer_steps = steps;
	for (unsigned i = 0; i < RANKS; i++)
		nodefix_submit(&x->n, x->m[i], "ReturnFull", &r.base, &x->op[i]);
	for (unsigned i = 0; i < RANKS; i++)
		nodefix_ok(&x->op[i], "ReturnFull");
	cr_expect_eq(x->u->rec->optimizer->steps, steps);
}

/* Each rank's own rows are what it wrote, on every device that has them. */
static void expect_owners(struct fixture *x, float *state)
{
	struct unit_run run;

	state_packed(x->u, state, false);
	for (uint32_t i = 0; i < x->u->layout.ranks; i++)
		for (uint32_t t = 0; t < x->u->rec->n_tensors; t++)
			for (uint64_t k = 0; !x->u->tensors[t].frozen &&
					     unit_rank_run(x->u, i, t, &run) && k < run.n;
			     k++)
				cr_assert_eq(state[x->u->tensors[t].packed + run.first + k],
					     100 + (float)i);
}

static void state_goes_and_comes(unsigned devices, enum unit_layout_kind layout,
				 enum unit_strategy strategy)
{
	float state[64] = { 0 };
	struct fixture x;

	setup(&x, devices, 0);
	convert(&x, layout, strategy);
	for (uint32_t t = 0; t < x.u->rec->n_tensors; t++)
		for (uint64_t k = 0; k < x.u->tensors[t].elements; k++)
			state[x.u->tensors[t].packed + k] =
				x.u->tensors[t].frozen ? 0
						       : 1 + (float)(x.u->tensors[t].packed + k);
	state_packed(x.u, state, true);
	summon_state(&x, state);
	return_state(&x, 5);
	expect_owners(&x, state);
	expect_params(&x);
	nodefix_end(&x.n);
}

Test(op_convert, the_state_of_an_optimizer_is_summoned_and_written_back)
{
	for (unsigned devices = 1; devices <= 3; devices++) {
		state_goes_and_comes(devices, LAYOUT_FLAT, STRATEGY_SHARD);
		state_goes_and_comes(devices, LAYOUT_DIM0, STRATEGY_SHARD);
		state_goes_and_comes(devices, LAYOUT_DIM0, STRATEGY_REPLICATE);
	}
}

/* ------------------------------------------------------------ frozen tensors that are trained */

static void unfreeze(struct fixture *x, uint32_t id, uint32_t tensor, uint32_t like)
{
	static uint32_t units[RANKS], tensors[RANKS];
	static Shardd__V1__ConvertUnitsRequest r[RANKS];

	for (unsigned i = 0; i < RANKS; i++) {
		units[i] = id;
		tensors[i] = tensor;
		r[i] = (Shardd__V1__ConvertUnitsRequest)SHARDD__V1__CONVERT_UNITS_REQUEST__INIT;
		r[i].units = &units[i];
		r[i].n_units = 1;
		r[i].layout = (Shardd__V1__Layout)x->job->units[id - 1]->rec->layout;
		r[i].unfreeze = &tensors[i];
		r[i].n_unfreeze = 1;
		r[i].optimizer_like = like;
		nodefix_submit(&x->n, x->m[i], "ConvertUnits", &r[i].base, &x->op[i]);
	}
	for (unsigned i = 0; i < RANKS; i++)
		nodefix_wait(&x->op[i]);
}

/* Every rank's gradient is @value everywhere. */
static void reduce_all(struct fixture *x, float value)
{
	for (unsigned i = 0; i < RANKS; i++)
		nodefix_on_unit(&x->n, x->m[i], "GradientBuffer", x->u, &x->op[i]);
	for (unsigned i = 0; i < RANKS; i++) {
		nodefix_ok(&x->op[i], "GradientBuffer");
		nodefix_write(&x->op[i].result.place, value);
	}
	all_ok(x, "Reduce");
}

static void step_all(struct fixture *x)
{
	for (unsigned i = 0; i < RANKS; i++)
		nodefix_step(&x->n, x->m[i], &x->op[i]);
	for (unsigned i = 0; i < RANKS; i++)
		nodefix_ok(&x->op[i], "Step");
	for (unsigned i = 0; i < RANKS; i++)
		nodefix_commit(&x->n, x->m[i], x->job->rec->step + 1, 0, &x->op[i]);
	for (unsigned i = 0; i < RANKS; i++)
		nodefix_ok(&x->op[i], "Commit");
}

/* How many elements of tensor @t differ from x->params. */
static uint64_t changed(struct fixture *x, uint32_t t)
{
	uint64_t n = 0;
	float now[64] = { 0 };

	read_packed(x->u, now);
	for (uint64_t k = x->u->tensors[t].packed;
	     k < x->u->tensors[t].packed + x->u->tensors[t].elements; k++)
		n += now[k] != x->params[k];
	return n;
}

/* Values and state stay; the tensor has its own count of steps, and is stepped from there on. */
static void frozen_is_trained(unsigned devices, enum unit_layout_kind layout,
			      enum unit_strategy strategy)
{
	float before[64] = { 0 }, after[64] = { 0 };
	struct fixture x;

	setup(&x, devices, 0);
	convert(&x, layout, strategy);
	nodefix_ok(&x.op[0], "ConvertUnits");
	reduce_all(&x, 1);
	step_all(&x);
	cr_expect_eq(changed(&x, 0), 4);
	cr_expect_eq(changed(&x, 1), 0);
	read_packed(x.u, x.params);
	state_packed(x.u, before, false);
	unfreeze(&x, 1, 1, 0);
	nodefix_ok(&x.op[0], "ConvertUnits");
	expect_params(&x);
	state_packed(x.u, after, false);
	cr_expect_arr_eq(after, before, sizeof(before)); /* where it was frozen: 0 */
	cr_expect_eq(unit_frozen_numel(x.u), 0);
	cr_expect_eq(unit_steps(x.u, 0), 1);
	cr_expect_eq(unit_steps(x.u, 1), 0);
	reduce_all(&x, 1);
	step_all(&x);
	for (uint32_t t = 0; t < 3; t++)
		cr_expect_eq(changed(&x, t), x.u->tensors[t].elements, "tensor %u", t);
	cr_expect_eq(unit_steps(x.u, 0), 2);
	cr_expect_eq(unit_steps(x.u, 1), 1);
	nodefix_end(&x.n);
}

Test(op_convert, a_frozen_tensor_is_trained_from_there_on)
{
	for (unsigned devices = 1; devices <= 3; devices++) {
		frozen_is_trained(devices, LAYOUT_FLAT, STRATEGY_SHARD);
		frozen_is_trained(devices, LAYOUT_DIM0, STRATEGY_SHARD);
		frozen_is_trained(devices, LAYOUT_DIM0, STRATEGY_REPLICATE);
	}
}

/* The unit has a gradient; the tensor has none, so a step skips it. */
Test(op_convert, a_tensor_that_was_frozen_has_no_gradient_yet)
{
	for (unsigned devices = 1; devices <= 3; devices++) {
		struct fixture x;

		setup(&x, devices, 0);
		reduce_all(&x, 1);
		unfreeze(&x, 1, 1, 0);
		nodefix_ok(&x.op[0], "ConvertUnits");
		cr_expect(unit_lacks_gradient(x.u, 1));
		cr_expect_not(unit_lacks_gradient(x.u, 2));
		step_all(&x);
		cr_expect_eq(changed(&x, 0), 4);
		cr_expect_eq(changed(&x, 1), 0);
		cr_expect_eq(unit_steps(x.u, 1), 0);
		nodefix_end(&x.n);
	}
}

/* All of it is frozen: it has no arrays but the parameters, and no optimizer. */
static struct unit *frozen_unit(struct fixture *x, const char *name)
{
	state_unit *frozen = nodefix_spec(name, 5);

	frozen->tensors[0]->frozen = true;
	*frozen->optimizer = (state_optimizer)SHARDD__STATE__V1__OPTIMIZER__INIT;
	return nodefix_unit(&x->n, x->job, frozen, x->m, RANKS);
}

Test(op_convert, a_unit_of_frozen_tensors_gets_an_optimizer)
{
	for (unsigned devices = 1; devices <= 3; devices++) {
		struct fixture x;
		struct unit *v;

		setup(&x, devices, 0);
		v = frozen_unit(&x, "v");
		cr_expect_null(v->parts[0].state1.slab);
		unfreeze(&x, v->id, 0, 1);
		nodefix_ok(&x.op[0], "ConvertUnits");
		cr_expect_eq(v->rec->optimizer->kind, OPTIM_ADAMW);
		cr_expect(v->parts[0].grads.slab && v->parts[0].state1.slab &&
			  v->parts[0].state2.slab);
		x.u = v;
		read_packed(v, x.params);
		reduce_all(&x, 1);
		step_all(&x);
		cr_expect_eq(changed(&x, 0), 5);
		nodefix_end(&x.n);
	}
}

Test(op_convert, an_optimizer_that_cannot_be_taken)
{
	static const struct {
		uint32_t unit, tensor, like;
		enum fault_code code;
		const char *words;
	} bad[] = {
		{ 1, 1, 1, FAULT_INVALID, "has an optimizer already" },
		{ 2, 0, 2, FAULT_INVALID, "'v' has no optimizer" },
		{ 2, 0, 9, FAULT_NOT_FOUND, "no unit 9" },
		{ 3, 0, 1, FAULT_INVALID, "is stored in" },
	};
	state_unit *half = nodefix_spec("h", 5);
	struct fixture x;

	setup(&x, 1, 0);
	frozen_unit(&x, "v");
	half->tensors[0]->frozen = true;
	half->storage_dtype = half->compute_dtype = half->gradient_dtype = DTYPE_BF16;
	*half->optimizer = (state_optimizer)SHARDD__STATE__V1__OPTIMIZER__INIT;
	nodefix_unit(&x.n, x.job, half, x.m, RANKS);
	for (size_t k = 0; k < ARRAY_SIZE(bad); k++) {
		unfreeze(&x, bad[k].unit, bad[k].tensor, bad[k].like);
		cr_expect_eq(x.op[0].fault.code, bad[k].code, "%zu: %s", k, x.op[0].fault.text);
		cr_expect(strstr(x.op[0].fault.text, bad[k].words), "%s", x.op[0].fault.text);
		cr_expect(x.job->units[bad[k].unit - 1]->rec->tensors[bad[k].tensor]->frozen);
	}
	nodefix_end(&x.n);
}

/* One rank wants it, the others do not: all are told, and nothing changes. */
Test(op_convert, all_ranks_must_unfreeze_the_same)
{
	struct fixture x;

	setup(&x, 1, 0);
	convert(&x, LAYOUT_DIM0, 0);
	for (unsigned i = 1; i < RANKS; i++)
		submit(&x, i, LAYOUT_DIM0, 0);
	{
		uint32_t unit = 1, tensor = 1;
		Shardd__V1__ConvertUnitsRequest r = SHARDD__V1__CONVERT_UNITS_REQUEST__INIT;

		r.units = &unit;
		r.n_units = r.n_unfreeze = 1;
		r.layout = SHARDD__V1__LAYOUT__LAYOUT_DIM0;
		r.unfreeze = &tensor;
		nodefix_submit(&x.n, x.m[0], "ConvertUnits", &r.base, &x.op[0]);
		for (unsigned i = 0; i < RANKS; i++) {
			nodefix_wait(&x.op[i]);
			cr_expect_eq(x.op[i].fault.code, FAULT_STATE, "%s", x.op[i].fault.text);
		}
	}
	cr_expect(x.u->rec->tensors[1]->frozen);
	nodefix_end(&x.n);
}

/* The second one was taken in before the first one was done. */
Test(op_convert, a_tensor_is_unfrozen_once)
{
	Shardd__V1__ConvertUnitsRequest r = SHARDD__V1__CONVERT_UNITS_REQUEST__INIT;
	uint32_t unit = 1, tensor = 1;
	struct nodefix_op second[RANKS] = { 0 };
	struct fixture x;

	setup(&x, 1, 0);
	r.units = &unit;
	r.n_units = r.n_unfreeze = 1;
	r.layout = SHARDD__V1__LAYOUT__LAYOUT_FLAT;
	r.unfreeze = &tensor;
	for (unsigned i = 0; i < RANKS; i++) { /* all are taken in before the first begins */
		second[i].seq = 2;
		nodefix_submit(&x.n, x.m[i], "ConvertUnits", &r.base, &second[i]);
	}
	for (unsigned i = 0; i < RANKS; i++) {
		x.op[i].seq = 1;
		nodefix_submit(&x.n, x.m[i], "ConvertUnits", &r.base, &x.op[i]);
	}
	for (unsigned i = 0; i < RANKS; i++) {
		nodefix_ok(&x.op[i], "ConvertUnits");
		nodefix_wait(&second[i]);
		cr_expect(strstr(second[i].fault.text, "is trained already"), "%s",
			  second[i].fault.text);
	}
	nodefix_end(&x.n);
}
