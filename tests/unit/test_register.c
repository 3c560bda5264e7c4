/* Registration: a whole model at once, all units or none. */
#include <criterion/criterion.h>
#include <string.h>

#include "core/check.h"
#include "fdcheck.h"
#include "job/registration.h"
#include "mem/stagger.h"
#include "nodefix.h"

TestSuite(registration, .init = fdcheck_begin, .fini = fdcheck_end, .timeout = 60);

#define UNITS 4

struct fixture {
	struct nodefix n;
	struct job *job;
	state_unit *specs[UNITS];
	uint32_t ids[UNITS];
	uint64_t charged;
	struct fault f;
};

static void setup(struct fixture *x, uint64_t quota)
{
	*x = (struct fixture){ .charged = 77 };
	nodefix_begin(&x->n, NULL);
	x->job = nodefix_job(&x->n, "job", 4, quota);
}

static void fresh_specs(struct fixture *x)
{
	static const char *const names[UNITS] = { "a", "b", "c", "d" };

	for (unsigned i = 0; i < UNITS; i++) {
		state_unit_free(x->specs[i]);
		x->specs[i] = nodefix_spec(names[i], 1000 * (i + 1));
	}
	x->f = FAULT_NULL;
}

static void teardown(struct fixture *x)
{
	for (unsigned i = 0; i < UNITS; i++)
		state_unit_free(x->specs[i]);
	nodefix_end(&x->n);
}

static enum res reg(struct fixture *x)
{
	return nodefix_try_register(x->job, x->specs, UNITS, x->ids, &x->charged, &x->f);
}

/* A refused registration has left no trace. */
static void expect_nothing(struct fixture *x, enum fault_code code, const char *words)
{
	cr_expect_eq(x->f.code, code, "%s: %s", words, x->f.text);
	cr_expect(strstr(x->f.text, words), "%s: %s", words, x->f.text);
	cr_expect_eq(x->job->n_units, 0);
	cr_expect_eq(x->job->rec->n_units, 0);
	cr_expect_eq(x->job->rec->n_slabs, 0);
	cr_expect_eq(x->job->mem.n_slabs, 0);
	cr_expect_eq(x->job->quota.used, 0);
	cr_expect_eq(x->n.node.devices[0].quota.used, 0);
	cr_expect_eq(x->charged, 77);
	for (unsigned i = 0; i < UNITS; i++)
		cr_expect(x->specs[i], "spec %u was taken", i);
}

/* Of powers of two: but for the room of each they would all begin at the same place of it. */
Test(registration, large_arrays_begin_apart)
{
	struct fixture x;
	bool taken[STAGGER_STEPS] = { false };
	uint64_t bytes = STAGGER_FROM;

	setup(&x, 0);
	fresh_specs(&x);
	state_unit_free(x.specs[0]);
	x.specs[0] = nodefix_spec("a", bytes / sizeof(float));
	x.specs[0]->optimizer->kind = OPTIM_ADAMW;
	cr_assert_eq(reg(&x), 0, "%s", x.f.text);
	const struct unit_part *p = &job_unit_by_id(x.job, 1)->parts[0];
	const struct region *arrays[] = { &p->params, &p->grads, &p->state1, &p->state2 };

	for (size_t i = 0; i < ARRAY_SIZE(arrays); i++) {
		uint64_t step = arrays[i]->offset % STAGGER_ROOM / STAGGER_STEP;

		cr_expect_eq(arrays[i]->bytes, bytes);
		cr_expect(!taken[step], "array %zu begins as another", i);
		taken[step] = true;
		for (uint32_t rank = 0; rank < STAGGER_STEPS; rank++)
			cr_expect_neq(step, STAGGER_RANK(rank) % STAGGER_STEPS);
	}
	cr_expect_geq(p->state1.offset, p->grads.offset + bytes);
	cr_expect_geq(p->state2.offset, p->state1.offset + bytes);
	cr_expect_eq(x.charged, x.job->mem.slabs[0]->bytes + x.job->mem.slabs[1]->bytes);
	teardown(&x);
}

Test(registration, units_lie_side_by_side_and_are_charged_exactly)
{
	struct fixture x;
	uint64_t sum = 0;

	setup(&x, 0);
	fresh_specs(&x);
	cr_assert_eq(reg(&x), 0, "%s", x.f.text);
	cr_expect_eq(x.job->n_units, UNITS);
	cr_expect_eq(x.job->mem.n_slabs, 2);
	for (unsigned i = 0; i < UNITS; i++) {
		struct unit *u = job_unit_by_id(x.job, i + 1);

		cr_expect_eq(x.ids[i], i + 1);
		cr_expect_null(x.specs[i], "the job's now");
		cr_expect_eq(u->parts[0].params.slab, x.job->mem.slabs[0]);
		cr_expect_eq(u->parts[0].grads.slab, x.job->mem.slabs[1]);
		cr_expect_eq(u->parts[0].params.offset % POOL_ALIGN, 0);
		cr_expect_eq(u->rec->parts[0]->params->offset, u->parts[0].params.offset);
		cr_expect_eq(u->rec->parts[0]->params->slab, x.job->mem.slabs[0]->id);
		cr_expect_eq(u->rec->pre_divide, 2, "of 4 ranks");
		cr_expect_eq(u->rec->post_divide, 2);
		sum += unit_shard_bytes(u);
	}
	cr_expect_eq(x.charged, x.job->quota.used);
	cr_expect_eq(x.charged, x.job->mem.slabs[0]->bytes + x.job->mem.slabs[1]->bytes);
	cr_expect_geq(x.charged, sum);
	cr_expect_lt(x.charged, sum + 2 * 4096, "rounded up to pages, twice");
	cr_expect_null(job_unit_by_id(x.job, 0));
	cr_expect_null(job_unit_by_id(x.job, UNITS + 1));
	teardown(&x);
}

Test(registration, the_other_ranks_get_the_same_units_for_nothing)
{
	struct fixture x;
	uint64_t used;

	setup(&x, 0);
	fresh_specs(&x);
	cr_assert_eq(reg(&x), 0);
	used = x.job->quota.used;
	fresh_specs(&x);
	cr_assert_eq(reg(&x), 0, "%s", x.f.text);
	cr_expect_eq(x.charged, 0);
	cr_expect_eq(x.job->quota.used, used);
	for (unsigned i = 0; i < UNITS; i++) {
		cr_expect_eq(x.ids[i], i + 1);
		cr_expect(x.specs[i], "still the caller's");
	}
	teardown(&x);
}

Test(registration, new_units_may_come_along_with_old_ones)
{
	struct fixture x;
	struct unit *a;

	setup(&x, 0);
	a = nodefix_register(x.job, nodefix_spec("c", 3000));
	fresh_specs(&x);
	cr_assert_eq(reg(&x), 0, "%s", x.f.text);
	cr_expect_eq(x.ids[2], a->id);
	cr_expect(x.specs[2]);
	cr_expect_eq(x.ids[0], 2);
	cr_expect_eq(x.ids[3], 4);
	cr_expect_eq(x.job->mem.n_slabs, 4);
	teardown(&x);
}

Test(registration, one_bad_unit_and_none_is_made)
{
	struct fixture x;

	setup(&x, 0);
	fresh_specs(&x);
	x.specs[3]->group = 1;
	reg(&x);
	expect_nothing(&x, FAULT_INVALID, "'d': group 1 is out of range");
	fresh_specs(&x);
	x.specs[2]->tensors[0]->shape[0] = 0;
	reg(&x);
	expect_nothing(&x, FAULT_INVALID, "'c'");
	fresh_specs(&x);
	strcpy(x.specs[3]->name, "a");
	reg(&x);
	expect_nothing(&x, FAULT_INVALID, "'a' is listed twice");
	teardown(&x);
}

Test(registration, limits_are_kept)
{
	struct fixture x;

	setup(&x, 100000);
	fresh_specs(&x); /* 4 arrays of 10,000 elements and more */
	reg(&x);
	expect_nothing(&x, FAULT_EXHAUSTED, "job 'job' holds 0 bytes");
	x.n.node.limits.max_units_per_job = UNITS - 1;
	fresh_specs(&x);
	reg(&x);
	expect_nothing(&x, FAULT_EXHAUSTED, "max_units_per_job");
	teardown(&x);
}

/* The limit may be lowered while a job has more: what is left was counted below zero,
 * and any number of new units was taken. */
Test(registration, a_lowered_limit_refuses_new_units_only)
{
	struct fixture x;

	setup(&x, 0);
	fresh_specs(&x);
	cr_assert_eq(reg(&x), 0, "%s", x.f.text);
	x.n.node.limits.max_units_per_job = UNITS - 2;
	fresh_specs(&x);
	cr_expect_eq(reg(&x), 0, "those that are there: %s", x.f.text);
	strcpy(x.specs[3]->name, "e");
	cr_expect_eq(reg(&x), RES_FAILED, "%s", x.f.text);
	cr_expect_eq(x.f.code, FAULT_EXHAUSTED);
	cr_expect_eq(x.job->n_units, UNITS);
	teardown(&x);
}

/* Each unit's bytes fit, their sum does not. */
Test(registration, absurd_sums_are_refused)
{
	enum { MANY = 16384 };
	static state_unit *specs[MANY];
	static uint32_t ids[MANY];
	struct fixture x;

	setup(&x, 0);
	for (unsigned i = 0; i < MANY; i++) {
		char name[16];

		snprintf(name, sizeof(name), "u%u", i);
		specs[i] = nodefix_spec(name, LAYOUT_MAX_ELEMENTS);
	}
	cr_expect_eq(nodefix_try_register(x.job, specs, MANY, ids, &x.charged, &x.f), RES_FAILED);
	cr_expect_eq(x.f.code, FAULT_EXHAUSTED);
	for (unsigned i = 0; i < MANY; i++)
		state_unit_free(specs[i]);
	for (unsigned i = 0; i < UNITS; i++)
		x.specs[i] = nodefix_spec("any", 1);
	expect_nothing(&x, FAULT_EXHAUSTED, "cannot allocate");
	teardown(&x);
}

Test(registration, a_different_spec_is_refused_by_its_first_difference)
{
	struct fixture x;

	setup(&x, 0);
	fresh_specs(&x);
	cr_assert_eq(reg(&x), 0);
	fresh_specs(&x);
	x.specs[1]->optimizer->lr = 7;
	x.specs[2]->gradient_dtype = DTYPE_BF16;
	cr_expect_eq(reg(&x), RES_FAILED);
	cr_expect_eq(x.f.code, FAULT_STATE);
	cr_expect(strstr(x.f.text, "unit 'b' is registered with optimizer.lr"), "%s", x.f.text);
	cr_expect_eq(x.job->n_units, UNITS);
	teardown(&x);
}

Test(registration, parameters_are_for_all_ranks_gradients_for_none)
{
	struct fixture x;
	struct member *m;
	struct unit *u;

	setup(&x, 0);
	m = nodefix_join(&x.n, x.job, 0);
	u = nodefix_register(x.job, nodefix_spec("u", 10));
	cr_expect_eq(job_slab_for(m, u->parts[0].params.slab->id), u->parts[0].params.slab);
	cr_expect_null(job_slab_for(m, u->parts[0].grads.slab->id));
	cr_expect_null(job_slab_for(m, 12345));
	teardown(&x);
}

/* The second slab is being made: the first is kept for the next try, charged to the job. */
static void wait_for_memory(struct fixture *x)
{
	fresh_specs(x);
	backend_fake_fail(x->n.node.devices[0].backend, 2, BACKEND_E_LATER);
	cr_assert_eq(reg(x), RES_WAIT);
	cr_assert_eq(x->job->mem.n_spare, 1);
	cr_assert_gt(x->job->quota.used, 0);
}

Test(registration, what_was_made_for_one_that_waits_is_taken_by_the_next_try)
{
	struct fixture x;
	uint64_t spare;

	setup(&x, 0);
	wait_for_memory(&x);
	spare = x.job->quota.used;
	cr_assert_eq(reg(&x), 0, "%s", x.f.text);
	cr_expect_eq(x.job->mem.n_spare, 0);
	cr_expect_eq(x.charged, x.job->quota.used, "what was spare counts for this one");
	cr_expect_gt(x.charged, spare);
	teardown(&x);
}

Test(registration, what_was_made_for_one_that_waits_goes_back_with_its_epoch)
{
	struct fixture x;
	struct member *m;

	setup(&x, 0);
	m = nodefix_join(&x.n, x.job, 0);
	nodefix_join(&x.n, x.job, 1);
	wait_for_memory(&x);
	nodefix_drop(&x.n, m, "is gone");
	cr_expect_eq(x.job->mem.n_spare, 0);
	cr_expect_eq(x.job->quota.used, 0);
	cr_expect_eq(x.n.node.devices[0].quota.used, 0);
	teardown(&x);
}

Test(registration, what_was_made_for_one_that_waits_goes_back_when_it_is_refused)
{
	struct fixture x;

	setup(&x, 0);
	wait_for_memory(&x);
	fresh_specs(&x);
	x.specs[1]->group = 7;
	cr_expect_eq(reg(&x), RES_FAILED);
	cr_expect_eq(x.f.code, FAULT_INVALID);
	cr_expect_eq(x.job->mem.n_spare, 0);
	expect_nothing(&x, FAULT_INVALID, "group 7 is out of range");
	teardown(&x);
}

/* The daemon checks and builds in two slices of its loop. The last rank comes between them: nobody
 * tells of it again, so the registration must not wait for that. There was a hang. */
Test(registration, what_was_missing_comes_between_check_and_build)
{
	state_unit *spec = nodefix_spec("u", 100);
	struct registration *r = NULL;
	struct fault f = FAULT_NULL;
	uint64_t charged;
	struct nodefix n;
	struct job *job;
	uint32_t id;

	nodefix_begin(&n, &(struct nodefix_options){ .devices = 2 });
	job = nodefix_job(&n, "job", 2, 0);
	nodefix_join(&n, job, 0);
	cr_assert_eq(registration_new(job, &spec, 1, &id, &r), 0);
	cr_assert_eq(registration_check(r, SIZE_MAX, &f), 0, "%s", f.text);
	cr_expect_eq(registration_build(r, &charged, &f), RES_WAIT);
	cr_expect_eq(registration_build(r, &charged, &f), RES_WAIT, "rank 1 is still missing");
	nodefix_join(&n, job, 1);
	nodefix_turns(&n);
	cr_expect_eq(registration_build(r, &charged, &f), RES_DONE, "%s", f.text);
	cr_expect_eq(job->n_units, 1);
	registration_free(r);
	state_unit_free(spec);
	nodefix_end(&n);
}
