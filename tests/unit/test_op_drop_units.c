/* Units that are dropped: memory, names and registrations go, numbers stay, and what is refused leaves
 * everything as it was. */
#include <criterion/criterion.h>
#include <stdlib.h>
#include <string.h>

#include "backend/backend_impl.h"
#include "core/check.h"
#include "fdcheck.h"
#include "job/registration.h"
#include "nodefix.h"
#include "store/state.h"

TestSuite(op_drop_units, .init = fdcheck_begin, .fini = fdcheck_end, .timeout = 120);

#define RANKS 3

struct fixture {
	struct nodefix n;
	struct job *job;
	struct member *m[RANKS];
	struct unit *u, *v;
	struct nodefix_op op[RANKS];
};

static state_unit *with_buffer(const char *name)
{
	static const uint64_t shape[] = { 3 };
	state_unit *s = nodefix_spec(name, 11);
	state_buffer *b = state_buffer_new("mean", shape, 1);

	b->dtype = BUFFER_FP32;
	CHECK(state_unit_add_buffer(s, b) == 0);
	return s;
}

static void setup(struct fixture *x, unsigned devices)
{
	*x = (struct fixture){ 0 };
	nodefix_begin(&x->n, &(struct nodefix_options){ .devices = devices });
	x->job = nodefix_job(&x->n, "job", RANKS, 0);
	for (unsigned i = 0; i < RANKS; i++)
		x->m[i] = nodefix_join(&x->n, x->job, i);
	x->u = nodefix_unit(&x->n, x->job, with_buffer("u"), x->m, RANKS);
	x->v = nodefix_unit(&x->n, x->job, with_buffer("v"), x->m, RANKS);
}

static void drop(struct fixture *x, const uint32_t *units, size_t n)
{
	static Shardd__V1__DropUnitsRequest r[RANKS];
	static uint32_t ids[RANKS][4];

	for (unsigned i = 0; i < RANKS; i++) {
		memcpy(ids[i], units, n * sizeof(*units));
		r[i] = (Shardd__V1__DropUnitsRequest)SHARDD__V1__DROP_UNITS_REQUEST__INIT;
		r[i].units = ids[i];
		r[i].n_units = n;
		nodefix_submit(&x->n, x->m[i], "DropUnits", &r[i].base, &x->op[i]);
	}
	for (unsigned i = 0; i < RANKS; i++)
		nodefix_wait(&x->op[i]);
}

static void drop_ok(struct fixture *x, const uint32_t *units, size_t n)
{
	drop(x, units, n);
	for (unsigned i = 0; i < RANKS; i++)
		nodefix_ok(&x->op[i], "DropUnits");
}

static void refused(struct fixture *x, uint32_t unit, const char *words)
{
	uint64_t used = x->job->quota.used;

	drop(x, &unit, 1);
	for (unsigned i = 0; i < RANKS; i++) {
		cr_expect_eq(x->op[i].fault.code, FAULT_STATE);
		cr_expect(strstr(x->op[i].fault.text, words), "%s", x->op[i].fault.text);
	}
	cr_expect_eq(x->job->quota.used, used);
	cr_expect_not(x->job->units[unit - 1]->rec->dropped);
}

static void all_ok(struct fixture *x, const char *type, struct unit *u)
{
	for (unsigned i = 0; i < RANKS; i++)
		nodefix_on_unit(&x->n, x->m[i], type, u, &x->op[i]);
	for (unsigned i = 0; i < RANKS; i++)
		nodefix_ok(&x->op[i], type);
}

static void return_all(struct fixture *x)
{
	static Shardd__V1__ReturnFullRequest r[RANKS];

	for (unsigned i = 0; i < RANKS; i++) {
		r[i] = (Shardd__V1__ReturnFullRequest)SHARDD__V1__RETURN_FULL_REQUEST__INIT;
		r[i].unit = x->u->id;
		nodefix_submit(&x->n, x->m[i], "ReturnFull", &r[i].base, &x->op[i]);
	}
	for (unsigned i = 0; i < RANKS; i++)
		nodefix_ok(&x->op[i], "ReturnFull");
}

static void step(struct fixture *x)
{
	for (unsigned i = 0; i < RANKS; i++)
		nodefix_step(&x->n, x->m[i], &x->op[i]);
	for (unsigned i = 0; i < RANKS; i++)
		nodefix_ok(&x->op[i], "Step");
}

Test(op_drop_units, memory_goes_and_the_other_unit_trains_on)
{
	for (unsigned devices = 1; devices <= 3; devices++) {
		const uint32_t first = 1, second = 2;
		struct fixture x;
		uint64_t before;

		setup(&x, devices);
		before = x.job->quota.by_class[MEM_SHARD];
		all_ok(&x, "GradientBuffer", x.u);
		all_ok(&x, "Reduce", x.u);
		step(&x); /* prepared, and applied by the drop */
		drop_ok(&x, &first, 1);
		cr_expect_eq(x.job->quota.by_class[MEM_SHARD], before / 2);
		cr_expect_null(job_unit_by_id(x.job, 1));
		cr_expect_eq(job_units_alive(x.job), 1);
		all_ok(&x, "GradientBuffer", x.v);
		all_ok(&x, "Reduce", x.v);
		step(&x);
		all_ok(&x, "Gather", x.v);
		all_ok(&x, "Release", x.v);
		drop_ok(&x, &second, 1);
		cr_expect_eq(x.job->quota.by_class[MEM_SHARD], 0);
		cr_expect_eq(x.job->mem.n_slabs, 0);
		cr_expect_eq(x.job->rec->n_slabs, 0);
		nodefix_end(&x.n);
	}
}

/* Units of one registration share their slabs. */
Test(op_drop_units, a_slab_goes_with_the_last_unit_in_it)
{
	state_unit *specs[] = { with_buffer("a"), with_buffer("b") };
	const uint32_t both[] = { 1, 2 }, third = 3, fourth = 4;
	struct fault f = FAULT_NULL;
	struct fixture x;
	uint64_t charged;
	uint32_t ids[2];
	size_t slabs;

	setup(&x, 1);
	drop_ok(&x, both, 2);
	cr_assert_eq(nodefix_try_register(x.job, specs, 2, ids, &charged, &f), 0, "%s", f.text);
	cr_expect_eq(ids[0], 3); /* numbers are not used again */
	slabs = x.job->mem.n_slabs;
	drop_ok(&x, &third, 1);
	cr_expect_eq(x.job->mem.n_slabs, slabs);
	drop_ok(&x, &fourth, 1);
	cr_expect_eq(x.job->mem.n_slabs, 0);
	nodefix_end(&x.n);
}

Test(op_drop_units, a_name_is_free_again)
{
	const uint32_t first = 1;
	struct fixture x;
	struct unit *again;

	setup(&x, 1);
	drop_ok(&x, &first, 1);
	again = nodefix_unit(&x.n, x.job, nodefix_spec("u", 5), x.m, RANKS);
	cr_expect_eq(again->id, 3);
	nodefix_on_unit(&x.n, x.m[0], "Gather", x.u, &x.op[0]);
	nodefix_wait(&x.op[0]);
	cr_expect_eq(x.op[0].fault.code, FAULT_NOT_FOUND);
	all_ok(&x, "Gather", again);
	nodefix_end(&x.n);
}

Test(op_drop_units, what_somebody_has_is_refused)
{
	for (unsigned devices = 1; devices <= 3; devices++) {
		struct fixture x;

		setup(&x, devices);
		nodefix_on_unit(&x.n, x.m[1], "Gather", x.u, &x.op[1]);
		nodefix_ok(&x.op[1], "Gather");
		refused(&x, 1, "is gathered");
		nodefix_on_unit(&x.n, x.m[1], "Release", x.u, &x.op[1]);
		nodefix_ok(&x.op[1], "Release");
		nodefix_on_unit(&x.n, x.m[2], "GradientBuffer", x.u, &x.op[2]);
		nodefix_ok(&x.op[2], "GradientBuffer");
		refused(&x, 1, "given a gradient buffer");
		nodefix_on_unit(&x.n, x.m[2], "Accumulate", x.u, &x.op[2]);
		nodefix_ok(&x.op[2], "Accumulate");
		refused(&x, 1, "is accumulated");
		all_ok(&x, "GradientBuffer", x.u);
		all_ok(&x, "Reduce", x.u);
		all_ok(&x, "SummonFull", x.u);
		refused(&x, 1, "is summoned");
		return_all(&x);
		drop_ok(&x, &(uint32_t){ 1 }, 1);
		nodefix_end(&x.n);
	}
}

/* Its tensor has another name in a unit that stays. */
Test(op_drop_units, tied_units_go_together)
{
	state_unit *tied = nodefix_spec("w", 4);
	const uint32_t both[] = { 1, 3 };
	struct fixture x;

	setup(&x, 1);
	CHECK(state_unit_add_tensor(tied, state_tensor_new("other", (uint64_t[]){ 11 }, 1)) == 0);
	tied->tensors[1]->alias_of = strdup("weight");
	tied->tensors[1]->alias_unit = strdup("u");
	nodefix_unit(&x.n, x.job, tied, x.m, RANKS);
	refused(&x, 1, "unit 'w' has an alias of a tensor of unit 'u'");
	drop_ok(&x, both, 2);
	nodefix_end(&x.n);
}

/* A restarted job has the units under their numbers. */
Test(op_drop_units, the_record_keeps_the_place)
{
	const uint32_t first = 1;
	struct fixture x;

	setup(&x, 2);
	drop_ok(&x, &first, 1);
	cr_expect_eq(x.job->rec->n_units, 2);
	cr_expect(x.job->rec->units[0]->dropped);
	cr_expect_eq(x.job->rec->units[0]->n_parts, 0);
	cr_expect_eq(x.job->rec->units[0]->n_buffer_regions, 0);
	cr_expect_not(x.job->rec->units[1]->dropped);
	nodefix_end(&x.n);
}

/* A rank whose members know of the unit joins again. */
Test(op_drop_units, an_epoch_ends_afterwards)
{
	const uint32_t first = 1;
	struct fixture x;
	struct fault f = FAULT_NULL;

	setup(&x, 1);
	drop_ok(&x, &first, 1);
	nodefix_drop(&x.n, x.m[1], "died");
	nodefix_turns(&x.n);
	for (unsigned i = 0; i < RANKS; i += 2)
		cr_assert_eq(nodefix_try_join(&x.n, x.job, i, NULL, x.m[i], &x.m[i], &f), 0, "%s",
			     f.text);
	nodefix_end(&x.n);
}

/* What can never be initialised again does not keep the job TORN. */
Test(op_drop_units, a_torn_job_heals)
{
	const uint32_t first = 1;
	struct fixture x;
	struct fault f = FAULT_NULL;

	setup(&x, 1);
	drop_ok(&x, &first, 1);
	for (unsigned i = 0; i < RANKS; i++)
		nodefix_commit(&x.n, x.m[i], 1, 0, &x.op[i]);
	for (unsigned i = 0; i < RANKS; i++)
		nodefix_ok(&x.op[i], "Commit");
	all_ok(&x, "GradientBuffer", x.v);
	all_ok(&x, "Reduce", x.v);
	step(&x);
	all_ok(&x, "Gather", x.v); /* it is applied */
	nodefix_drop(&x.n, x.m[1], "died");
	nodefix_turns(&x.n);
	cr_assert(x.job->life.torn);
	for (unsigned i = 0; i < RANKS; i++)
		cr_assert_eq(nodefix_try_join(&x.n, x.job, i, NULL, i == 1 ? NULL : x.m[i], &x.m[i],
					      &f),
			     0, "%s", f.text);
	for (unsigned i = 0; i < RANKS; i++)
		nodefix_seed(&x.n, x.m[i], x.v, 1, &x.op[i]);
	for (unsigned i = 0; i < RANKS; i++)
		nodefix_ok(&x.op[i], "Initialise");
	cr_expect_not(x.job->life.torn);
	nodefix_end(&x.n);
}

static state_unit *with_sgd(const char *name, double momentum)
{
	state_unit *s = nodefix_spec(name, 5);

	s->optimizer->kind = OPTIM_SGD;
	s->optimizer->momentum = momentum;
	return s;
}

/* Settings for "all others" are not for what is no more. */
Test(op_drop_units, settings_of_a_step_are_for_the_units_that_are_there)
{
	Shardd__V1__StepSettings s = SHARDD__V1__STEP_SETTINGS__INIT, *settings[] = { &s };
	Shardd__V1__StepRequest r[RANKS];
	const uint32_t plain = 3;
	struct fixture x;

	setup(&x, 1);
	nodefix_unit(&x.n, x.job, with_sgd("plain", 0), x.m, RANKS);
	nodefix_unit(&x.n, x.job, with_sgd("heavy", 0.9), x.m, RANKS);
	drop_ok(&x, &plain, 1);
	s.lr = 0.1;
	s.momentum = 0.9;
	s.beta1 = s.beta2 = 0.9;
	s.eps = 1e-8;
	for (unsigned i = 0; i < RANKS; i++) {
		r[i] = (Shardd__V1__StepRequest)SHARDD__V1__STEP_REQUEST__INIT;
		r[i].settings = settings;
		r[i].n_settings = 1;
		nodefix_submit(&x.n, x.m[i], "Step", &r[i].base, &x.op[i]);
	}
	for (unsigned i = 0; i < RANKS; i++)
		nodefix_ok(&x.op[i], "Step");
	nodefix_end(&x.n);
}

static state_unit *with_alias(const char *name, const char *of_unit, const char *of)
{
	state_unit *s = nodefix_spec(name, 4);

	CHECK(state_unit_add_tensor(s, state_tensor_new("other", (uint64_t[]){ 11 }, 1)) == 0);
	s->tensors[1]->alias_of = strdup(of);
	s->tensors[1]->alias_unit = strdup(of_unit);
	return s;
}

/* A restarted daemon follows the names: u <- a <- b. */
Test(op_drop_units, a_link_of_a_chain_of_aliases_is_needed)
{
	const uint32_t ends[] = { 3, 4 };
	struct fixture x;

	setup(&x, 1);
	nodefix_unit(&x.n, x.job, with_alias("a", "u", "weight"), x.m, RANKS);
	nodefix_unit(&x.n, x.job, with_alias("b", "a", "other"), x.m, RANKS);
	refused(&x, 3, "unit 'b' has an alias of a tensor of unit 'a'");
	drop_ok(&x, ends, 2);
	drop_ok(&x, &(uint32_t){ 1 }, 1);
	nodefix_end(&x.n);
}

/* Nobody has the shard yet, and a device reads the unit for it. */
Test(op_drop_units, while_a_shard_is_on_its_way_to_a_trainer)
{
	Shardd__V1__NextShardRequest r = SHARDD__V1__NEXT_SHARD_REQUEST__INIT;
	Shardd__V1__DropUnitsRequest d = SHARDD__V1__DROP_UNITS_REQUEST__INIT;
	state_unit *own = nodefix_spec("own", 11);
	struct nodefix_op next = { 0 };
	struct fixture x;
	uint32_t third = 3;
	struct unit *u;

	setup(&x, 1);
	own->optimizer->kind = OPTIM_NONE;
	own->optimizer->when = OPTIM_BY_TRAINER;
	u = nodefix_unit(&x.n, x.job, own, x.m, RANKS);
	all_ok(&x, "GradientBuffer", u);
	all_ok(&x, "Reduce", u);
	d.units = &third;
	d.n_units = 1;
	backend_fake_hold(x.n.node.devices[0].backend, true);
	nodefix_submit(&x.n, x.m[0], "NextShard", &r.base, &next);
	for (unsigned i = 0; i < RANKS; i++)
		nodefix_submit(&x.n, x.m[i], "DropUnits", &d.base, &x.op[i]);
	nodefix_turns(&x.n);
	cr_expect_not(u->rec->dropped);
	backend_fake_hold(x.n.node.devices[0].backend, false);
	nodefix_ok(&next, "NextShard");
	for (unsigned i = 0; i < RANKS; i++) {
		nodefix_wait(&x.op[i]);
		cr_expect_eq(x.op[i].fault.code, FAULT_STATE);
	}
	nodefix_on_unit(&x.n, x.m[0], "ShardDone", u, &x.op[0]);
	nodefix_ok(&x.op[0], "ShardDone");
	nodefix_end(&x.n);
}

/* Buffers are not parameters: what broadcasts them comes first all the same. */
Test(op_drop_units, while_buffers_are_broadcast)
{
	Shardd__V1__BroadcastBuffersRequest b = SHARDD__V1__BROADCAST_BUFFERS_REQUEST__INIT;
	Shardd__V1__DropUnitsRequest d = SHARDD__V1__DROP_UNITS_REQUEST__INIT;

	for (unsigned devices = 1; devices <= 3; devices++) {
		struct nodefix_op sent[RANKS] = { 0 };
		uint32_t first = 1;
		struct fixture x;

		setup(&x, devices);
		d.units = &first;
		d.n_units = 1;
		for (unsigned i = 0; i < devices; i++)
			backend_fake_hold(x.n.node.devices[i].backend, true);
		for (unsigned i = 0; i < RANKS; i++)
			nodefix_submit(&x.n, x.m[i], "BroadcastBuffers", &b.base, &sent[i]);
		for (unsigned i = 0; i < RANKS; i++)
			nodefix_submit(&x.n, x.m[i], "DropUnits", &d.base, &x.op[i]);
		nodefix_turns(&x.n);
		cr_expect_not(x.u->rec->dropped);
		for (unsigned i = 0; i < devices; i++)
			backend_fake_hold(x.n.node.devices[i].backend, false);
		for (unsigned i = 0; i < RANKS; i++) {
			nodefix_ok(&sent[i], "BroadcastBuffers");
			nodefix_ok(&x.op[i], "DropUnits");
		}
		nodefix_end(&x.n);
	}
}

/* What was not in the way when the drop began. */
Test(op_drop_units, an_alias_that_comes_while_devices_are_waited_for)
{
	Shardd__V1__DropUnitsRequest d = SHARDD__V1__DROP_UNITS_REQUEST__INIT;
	uint32_t first = 1;
	struct fixture x = { 0 };

	nodefix_begin(&x.n, &(struct nodefix_options){ .devices = 1, .queues = true });
	x.job = nodefix_job(&x.n, "job", RANKS, 0);
	for (unsigned i = 0; i < RANKS; i++)
		x.m[i] = nodefix_join(&x.n, x.job, i);
	x.u = nodefix_unit(&x.n, x.job, with_buffer("u"), x.m, RANKS);
	nodefix_turns(&x.n);
	d.units = &first;
	d.n_units = 1;
	backend_fake_hold(x.n.node.devices[0].backend, true);
	for (unsigned i = 0; i < RANKS; i++)
		nodefix_submit(&x.n, x.m[i], "DropUnits", &d.base, &x.op[i]);
	nodefix_turns(&x.n);
	cr_assert_not(x.u->rec->dropped);
	nodefix_register(x.job, with_alias("a", "u", "weight"));
	backend_fake_hold(x.n.node.devices[0].backend, false);
	for (unsigned i = 0; i < RANKS; i++) {
		nodefix_wait(&x.op[i]);
		cr_expect_eq(x.op[i].fault.code, FAULT_STATE);
	}
	cr_expect_not(x.u->rec->dropped);
	nodefix_end(&x.n);
}

/* The daemon checks a registration and builds it in slices. */
Test(op_drop_units, while_its_name_is_registered)
{
	state_unit *spec = with_buffer("u");
	struct registration *r = NULL;
	struct fault f = FAULT_NULL;
	struct fixture x;
	uint64_t charged;
	uint32_t id;

	setup(&x, 1);
	cr_assert_eq(registration_new(x.job, &spec, 1, &id, &r), 0);
	cr_assert_eq(registration_check(r, SIZE_MAX, &f), 0);
	drop_ok(&x, &(uint32_t){ 1 }, 1);
	cr_expect_eq(registration_build(r, &charged, &f), RES_FAILED);
	cr_expect_eq(f.code, FAULT_STATE);
	cr_expect(strstr(f.text, "unit 'u' was dropped"), "%s", f.text);
	registration_free(r);
	state_unit_free(spec);
	nodefix_end(&x.n);
}

/* A trainer that makes models all day: the table of units does not grow with it, and what an op names
 * does not become another unit. */
Test(op_drop_units, old_numbers_are_used_again)
{
	struct nodefix_op held = { .seq = 1000000 };
	const uint32_t both[] = { 1, 2 };
	uint64_t own = 0;
	uint32_t last = 0;
	struct fixture x;

	setup(&x, 2);
	nodefix_on_unit(&x.n, x.m[1], "Gather", x.u, &held); /* its turn does not come */
	drop_ok(&x, both, 2);
	for (unsigned k = 0; k < 2 * JOB_DROPPED_KEPT; k += 2) {
		state_unit *specs[] = { with_buffer("a"), with_alias("b", "a", "weight") };
		struct fault f = FAULT_NULL;
		uint64_t charged;
		uint32_t ids[2];

		cr_assert_eq(nodefix_try_register(x.job, specs, 2, ids, &charged, &f), 0, "%s",
			     f.text);
		cr_assert_lt(ids[0], ids[1]);
		cr_assert(ids[0] != 1 && !x.job->units[0]->rec->initialised, "it is named still");
		cr_assert_neq(ids[0], last);
		cr_assert_eq(x.job->units[ids[1] - 1]->tensors[1].of_unit, ids[0]);
		cr_assert_eq(job_unit_by_id(x.job, ids[0])->rec, x.job->rec->units[ids[0] - 1]);
		last = ids[1];
		if (k == JOB_DROPPED_KEPT + 100)
			own = x.job->memory.n;
		drop_ok(&x, ids, 2);
	}
	cr_expect_leq(x.job->n_units, JOB_DROPPED_KEPT + 4);
	cr_expect_eq(x.job->rec->n_units, x.job->n_units);
	cr_expect_eq(x.job->memory.n, own);
	cr_expect_not(held.over);
	nodefix_end(&x.n);
}

/* The limit is of units that are there. */
Test(op_drop_units, dropped_units_do_not_count)
{
	struct fixture x;

	setup(&x, 1);
	x.n.node.limits.max_units_per_job = 3;
	for (unsigned k = 0; k < 5; k++) {
		struct unit *u = nodefix_unit(&x.n, x.job, nodefix_spec("w", 5), x.m, RANKS);

		drop_ok(&x, &u->id, 1);
	}
	nodefix_end(&x.n);
}
