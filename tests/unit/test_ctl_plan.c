/* What a job takes, against numbers that were computed by hand from docs/semantics.md. */
#include <criterion/criterion.h>

#include "core/check.h"
#include "ctl/plan_bytes.h"
#include "fdcheck.h"

TestSuite(ctl_plan, .timeout = 30, .init = fdcheck_begin, .fini = fdcheck_end);

#define MI(n) ((uint64_t)(n) << 20)

static const struct plan_model adamw = { .trained = MI(8),
					 .units = 8,
					 .storage_bytes = 4,
					 .compute_bytes = 4,
					 .gradient_bytes = 4,
					 .states = 2 };
static const struct plan_place one_node = { .ranks = 4, .nodes = 1, .replicas = 1, .devices = 1 };

static void check_item(const struct plan *plan, enum plan_item i, uint64_t least, uint64_t most)
{
	cr_expect_eq(plan->items[i].least, least, "%s: least %zu", plan_bytes_name(i),
		     plan->items[i].least);
	cr_expect_eq(plan->items[i].most, most, "%s: most %zu", plan_bytes_name(i),
		     plan->items[i].most);
}

Test(ctl_plan, sixteen_bytes_of_a_parameter)
{
	struct plan plan;

	plan_bytes(&adamw, &one_node, &plan);
	check_item(&plan, PLAN_PARAMS, MI(32), MI(32));
	check_item(&plan, PLAN_GRADIENTS, MI(32), MI(32));
	check_item(&plan, PLAN_STATES, MI(64), MI(64));
	check_item(&plan, PLAN_COPY, 0, 0);
	check_item(&plan, PLAN_GATHERED, 0, 0); /* gather hands out the shards */
	check_item(&plan, PLAN_BUFFERS, 4 * MI(4), 4 * MI(32));
	check_item(&plan, PLAN_BLOBS, 0, 4 << 16);
	check_item(&plan, PLAN_CHECKPOINT, 0, MI(96));
	cr_expect_eq(plan.all.least, MI(128 + 16));
	cr_expect_eq(plan.all.most, MI(128 + 128 + 96) + (4 << 16));
}

Test(ctl_plan, casts_and_large_arrays_take_more)
{
	struct plan_model m = adamw;
	struct plan_place p = one_node;
	struct plan plan;

	m.casts = true;
	m.compute_bytes = m.gradient_bytes = 2;
	m.units = 1;
	p.is_staggered = true;
	plan_bytes(&m, &p, &plan);
	check_item(&plan, PLAN_PARAMS, MI(32) + 65536, MI(32) + 65536);
	check_item(&plan, PLAN_GATHERED, MI(16), MI(16));
	check_item(&plan, PLAN_BUFFERS, 4 * MI(16), 4 * MI(16));
}

/* Two nodes: each has half, and a copy of all. */
Test(ctl_plan, nodes_share_a_replica)
{
	struct plan_place p = { .ranks = 4, .nodes = 2, .replicas = 1, .devices = 1 };
	struct plan plan;

	plan_bytes(&adamw, &p, &plan);
	check_item(&plan, PLAN_PARAMS, MI(16), MI(16));
	check_item(&plan, PLAN_GATHERED, MI(4), MI(32));
	check_item(&plan, PLAN_SCRATCH, MI(4), MI(4));
	check_item(&plan, PLAN_BUFFERS, 2 * MI(4), 2 * MI(32));
	p.replicas = 2; /* each node has one */
	plan_bytes(&adamw, &p, &plan);
	check_item(&plan, PLAN_PARAMS, MI(32), MI(32));
	check_item(&plan, PLAN_GATHERED, 0, 0);
	check_item(&plan, PLAN_SCRATCH, MI(4), MI(4));
}

/* The sums that a reduction needs were not planned where a device has all of a replica. */
Test(ctl_plan, replicas_of_a_device_have_a_sum_each)
{
	struct plan_place p = { .ranks = 4, .nodes = 1, .replicas = 2, .devices = 1 };
	struct plan plan;

	plan_bytes(&adamw, &p, &plan);
	check_item(&plan, PLAN_SCRATCH, 2 * MI(4), 2 * MI(4));
	p.replicas = 4; /* of one rank each: their gradients are added at once */
	plan_bytes(&adamw, &p, &plan);
	check_item(&plan, PLAN_SCRATCH, 0, 0);
	p.nodes = 2;
	plan_bytes(&adamw, &p, &plan);
	check_item(&plan, PLAN_SCRATCH, MI(4), MI(4));
	p.ranks = 8;
	plan_bytes(&adamw, &p, &plan);
	check_item(&plan, PLAN_SCRATCH, MI(4) + 2 * MI(4), MI(4) + 2 * MI(4));
}

Test(ctl_plan, in_backward_twelve_and_a_copy)
{
	struct plan_model m = adamw;
	struct plan plan;

	m.early = true;
	plan_bytes(&m, &one_node, &plan);
	check_item(&plan, PLAN_GRADIENTS, 0, 0);
	check_item(&plan, PLAN_COPY, MI(96), MI(96));
	check_item(&plan, PLAN_POOLED, MI(4), MI(4));
	m.clips = true;
	m.resume = PLAN_RESUME_NO_COPY;
	plan_bytes(&m, &one_node, &plan);
	check_item(&plan, PLAN_COPY, 0, 0);
	check_item(&plan, PLAN_POOLED, MI(4), MI(32));
}

Test(ctl_plan, frozen_parameters_have_no_state)
{
	struct plan_model m = adamw;
	struct plan plan;

	m.trained = MI(1);
	m.frozen = MI(7);
	plan_bytes(&m, &one_node, &plan);
	check_item(&plan, PLAN_PARAMS, MI(32), MI(32));
	check_item(&plan, PLAN_GRADIENTS, MI(4), MI(4));
	check_item(&plan, PLAN_STATES, MI(8), MI(8));
	check_item(&plan, PLAN_BUFFERS, 4 * MI(1) / 2, 4 * MI(4));
}

/* No sum exceeds 64 bits. */
Test(ctl_plan, the_largest_is_a_number)
{
	const struct plan_model m = { .trained = PLAN_MAX_PARAMS,
				      .units = 1,
				      .storage_bytes = 4,
				      .compute_bytes = 4,
				      .gradient_bytes = 4,
				      .casts = true,
				      .states = 3,
				      .early = true,
				      .external = true,
				      .clips = true };
	const struct plan_place p = { .ranks = PLAN_MAX_HERE,
				      .nodes = 1,
				      .replicas = PLAN_MAX_HERE,
				      .devices = PLAN_MAX_HERE };
	double all = 0;
	struct plan plan;

	plan_bytes(&m, &p, &plan);
	for (unsigned i = 0; i < _PLAN_ITEMS; i++)
		all += (double)plan.items[i].most;
	cr_expect_geq((double)plan.all.most, 0.999 * all);
	cr_expect_leq((double)plan.all.most, 1.001 * all);
	cr_expect_geq(plan.all.most, (uint64_t)PLAN_MAX_HERE * PLAN_MAX_PARAMS * 32);
	cr_expect_leq(plan.all.most, INT64_MAX, "JSON has no larger number");
}

struct parse_row {
	const char *text;
	uint64_t value; /* 0: refused */
};

Test(ctl_plan, numbers_as_people_write_them)
{
	static const struct parse_row rows[] = {
		{ "7e9", UINT64_C(7000000000) },
		{ "7B", UINT64_C(7000000000) },
		{ "7G", UINT64_C(7000000000) },
		{ "1.3B", 1300000000 },
		{ "350M", 350000000 },
		{ "350m", 350000000 },
		{ "12k", 12000 },
		{ "1T", UINT64_C(1000000000000) },
		{ "4097", 4097 },
		{ "1.5K", 1500 },
		{ "0", 0 },
		{ "", 0 },
		{ "B", 0 },
		{ "1.5", 0 },
		{ "-3", 0 },
		{ "+3", 0 },
		{ " 3", 0 },
		{ "3 ", 0 },
		{ "7BB", 0 },
		{ "7Bx", 0 },
		{ "0x10", 0 },
		{ "nan", 0 },
		{ "inf", 0 },
		{ "1e999", 0 },
		{ "1e", 0 },
		{ "11T", 0 },
		{ "..", 0 },
		{ "10T", UINT64_C(10000000000000) },
		{ "1e13", UINT64_C(10000000000000) },
		{ "10000000000001", 0 },
		{ "7.000B", UINT64_C(7000000000) },
		{ "7000e-3", 7 },
		{ "1e-1K", 100 },
		/* these were rounded */
		{ "1.0000001e6", 0 },
		{ "350.0000001M", 0 },
		{ "9999999999999.5", 0 },
		{ "1e 3", 0 },
		{ "99999999999999999999999", 0 },
		{ "1.2.3", 0 },
	};

	for (size_t i = 0; i < ARRAY_SIZE(rows); i++) {
		uint64_t got = 0;
		bool ok = plan_bytes_parse(rows[i].text, PLAN_MAX_PARAMS, &got);

		cr_expect_eq(ok, rows[i].value > 0, "'%s'", rows[i].text);
		cr_expect_eq(got, rows[i].value, "'%s': %zu", rows[i].text, got);
	}
}
