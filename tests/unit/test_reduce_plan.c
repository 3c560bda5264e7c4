/* What a reduction does, by profile: the rows of the systems' own code, worked out by hand. */
#include <criterion/criterion.h>
#include <stdio.h>
#include <string.h>

#include "core/check.h"
#include "fdcheck.h"
#include "nodefix.h"
#include "unit/reduce_plan.h"

TestSuite(reduce_plan, .init = fdcheck_begin, .fini = fdcheck_end, .timeout = 60);

/* "/2 bf16", "*0.5 fp32", "" */
static void factor_text(const struct k_factor *f, char *buf, size_t bytes)
{
	if (f->how == K_FACTOR_NONE)
		snprintf(buf, bytes, "%s", "");
	else
		snprintf(buf, bytes, "%s%.9g %s", f->how == K_FACTOR_DIV ? "/" : "*",
			 (double)f->value, dtype_name(f->dtype));
}

static void expect_factor(const struct k_factor *f, const char *want, const char *what, size_t i)
{
	char got[64];

	factor_text(f, got, sizeof(got));
	cr_expect_str_eq(got, want, "case %zu: %s is \"%s\", not \"%s\"", i, what, got, want);
}

/* A resolved record of these settings; the caller frees it. */
static state_unit *record(enum reduce_profile profile, enum dtype gradient, enum dtype reduce)
{
	state_unit *u = nodefix_spec("u", 100);

	u->reduce_profile = profile;
	u->gradient_dtype = gradient;
	u->reduce_dtype = reduce;
	return u;
}

static struct reduce_plan plan_of(state_unit *u, uint32_t ranks, enum reduce_device device)
{
	struct fault f = FAULT_NULL;
	struct reduce_setting s;
	struct reduce_plan p;

	cr_assert_eq(unit_resolve(u, ranks, &f), 0, "%s", f.text);
	s = reduce_setting_of(u, ranks, device);
	reduce_plan_make(&s, &p);
	return p;
}

/* The smallest power of two that is no divisor of W or whose square reaches it. */
Test(reduce_plan, default_factors_of_1_to_4096_ranks)
{
	for (uint32_t w = 1; w <= 4096; w++) {
		state_unit *u = record(PROFILE_FSDP1_HOOK, DTYPE_FP32, 0);
		struct reduce_plan p = plan_of(u, w, REDUCE_AS_ON_CPU);
		uint32_t pre = p.pre.how ? (uint32_t)p.pre.value : 1;
		float post = p.post.how ? p.post.value : 1;

		cr_assert_eq(pre & (pre - 1), 0, "W=%u: %u", w, pre);
		cr_assert(w % pre || w <= pre * pre, "W=%u: %u is too small", w, pre);
		if (pre > 1)
			cr_assert(w % (pre / 2) == 0 && w > pre / 2 * (pre / 2),
				  "W=%u: %u is too large", w, pre);
		/* ÷0.5 and the like are not executed */
		cr_assert_eq(post, w > pre ? (float)w / (float)pre : 1, "W=%u: %g", w,
			     (double)post);
		state_unit_free(u);
	}
}

struct row {
	enum reduce_profile profile;
	enum dtype gradient, reduce;
	uint32_t ranks, replicas;
	double pre_divide, post_divide, factor;
	bool force, nccl;
	/* expected */
	const char *pre, *partial, *replica, *post;
};

#define F32 DTYPE_FP32
#define B16 DTYPE_BF16
#define F16 DTYPE_FP16

static const struct row rows[] = {
	/* fairscale: ÷pre, SUM, ÷post in the reduce dtype */
	{ PROFILE_FAIRSCALE, B16, 0, 6, 1, 0, 0, 0, 0, 0, "/4 fp32", "", "", "/1.5 fp32" },
	{ PROFILE_FAIRSCALE, B16, B16, 6, 1, 0, 0, 0, 0, 0, "/4 bf16", "", "", "/1.5 bf16" },
	{ PROFILE_FAIRSCALE, F32, F16, 8, 1, 0, 0, 0, 0, 0, "/4 fp16", "", "", "/2 fp16" },
	{ PROFILE_FAIRSCALE, F32, 0, 1, 1, 0, 0, 0, 0, 0, "", "", "", "" },
	{ PROFILE_FAIRSCALE, F32, 0, 4, 1, 1, 3, 0, 0, 0, "", "", "", "/3 fp32" },
	{ PROFILE_FAIRSCALE, F32, 0, 4, 1, 1, 1, 0, 0, 0, "", "", "", "" },
	{ PROFILE_FAIRSCALE, F32, 0, 6, 1, 2, 0, 0, 0, 0, "/2 fp32", "", "", "/3 fp32" },
	{ PROFILE_FAIRSCALE, F32, 0, 2, 1, 8, 0, 0, 0, 0, "/8 fp32", "", "", "" },
	{ PROFILE_FAIRSCALE, F32, B16, 6, 1, 0, 0, 0, 0, 1, "*0.25 bf16", "", "",
	  "*0.666666687 bf16" },
	/* XLA: ÷pre in the gradient's dtype, ÷post in fp32 */
	{ PROFILE_XLA, B16, 0, 6, 1, 0, 0, 0, 0, 0, "/4 bf16", "", "", "/1.5 fp32" },
	{ PROFILE_XLA, B16, F32, 6, 1, 0, 0, 0, 0, 0, "/4 bf16", "", "", "/1.5 fp32" },
	{ PROFILE_XLA, F16, 0, 3, 1, 1, 1, 0, 0, 0, "", "", "", "*0.333251953 fp16" },
	{ PROFILE_XLA, F16, F32, 3, 1, 1, 1, 0, 0, 0, "", "", "", "*0.333333343 fp32" },
	{ PROFILE_XLA, B16, 0, 6, 1, 0, 0, 0, 0, 1, "/4 bf16", "", "", "/1.5 fp32" },
	{ PROFILE_XLA, F32, 0, 1, 1, 1, 1, 0, 0, 0, "", "", "", "" },
	/* FSDP1: as fairscale, in the gradient's dtype or that of the hook */
	{ PROFILE_FSDP1_HOOK, B16, 0, 6, 1, 0, 0, 0, 0, 0, "/4 bf16", "", "", "/1.5 bf16" },
	{ PROFILE_FSDP1_HOOK, F32, F16, 6, 1, 0, 0, 0, 0, 0, "/4 fp16", "", "", "/1.5 fp16" },
	{ PROFILE_FSDP1_HOOK, F32, B16, 6, 2, 0, 0, 0, 0, 0, "/4 bf16", "", "", "/1.5 bf16" },
	/* FSDP2: AVG */
	{ PROFILE_FSDP2, F32, 0, 1, 1, 0, 0, 0, 0, 1, "", "", "", "" },
	{ PROFILE_FSDP2, F32, 0, 3, 1, 0, 0, 0, 0, 1, "*0.333333343 fp32", "", "", "" },
	{ PROFILE_FSDP2, F32, 0, 3, 1, 0, 0, 0, 0, 0, "", "/3 fp32", "", "" },
	{ PROFILE_FSDP2, F32, B16, 3, 1, 0, 0, 0, 0, 1, "*0.333984375 bf16", "", "", "" },
	{ PROFILE_FSDP2, B16, F32, 4, 1, 0, 0, 0, 0, 1, "*0.25 fp32", "", "", "" },
	{ PROFILE_FSDP2, F32, 0, 6, 2, 0, 0, 0, 0, 1, "*0.333333343 fp32", "", "*0.5 fp32", "" },
	{ PROFILE_FSDP2, F32, 0, 6, 2, 0, 0, 0, 0, 0, "", "/3 fp32", "", "/2 fp32" },
	{ PROFILE_FSDP2, F32, 0, 4, 4, 0, 0, 0, 0, 1, "", "", "*0.25 fp32", "" },
	/* the user's factor: AVG if it is the number of shards, else PREMUL_SUM */
	{ PROFILE_FSDP2, B16, 0, 6, 2, 0, 0, 3, 0, 1, "*0.333984375 bf16", "", "", "" },
	{ PROFILE_FSDP2, B16, 0, 6, 2, 0, 0, 3, 0, 0, "", "/3 bf16", "", "" },
	{ PROFILE_FSDP2, B16, 0, 6, 2, 0, 0, 6, 0, 0, "*0.166992188 bf16", "", "", "" },
	{ PROFILE_FSDP2, F32, 0, 1, 1, 0, 0, 4, 0, 0, "", "/4 fp32", "", "" },
	/* forced SUM, and fp16, which is divided in two halves */
	{ PROFILE_FSDP2, F32, 0, 3, 1, 0, 0, 0, 1, 1, "", "", "", "*0.333333343 fp32" },
	{ PROFILE_FSDP2, B16, 0, 3, 1, 0, 0, 5, 1, 0, "", "", "", "/5 bf16" },
	{ PROFILE_FSDP2, F32, F16, 6, 1, 0, 0, 0, 0, 1, "*0.25 fp16", "", "", "*0.666666687 fp16" },
	{ PROFILE_FSDP2, F32, F16, 6, 2, 0, 0, 0, 1, 1, "*0.25 fp16", "", "", "*0.666666687 fp16" },
	{ PROFILE_FSDP2, F32, F16, 3, 1, 0, 0, 12, 0, 1, "*0.25 fp16", "", "",
	  "*0.333333343 fp16" },
	{ PROFILE_FSDP2, F32, F16, 3, 1, 0, 0, 2.5, 0, 1, "", "", "", "*0.400000006 fp16" },
	{ PROFILE_FSDP2, F32, F16, 1, 1, 0, 0, 3, 0, 1, "*0.5 fp16", "*0.333333343 fp16", "",
	  "*0.666666687 fp16" },
	/* FSDP2 divides by less than 1 too */
	{ PROFILE_FSDP2, F32, 0, 2, 1, 0, 0, 0.5, 1, 0, "", "", "", "/0.5 fp32" },
	/* DDP */
	{ PROFILE_DDP, F32, 0, 3, 3, 0, 0, 0, 0, 0, "*0.333333343 fp32", "", "", "" },
	{ PROFILE_DDP, B16, 0, 3, 3, 0, 0, 0, 0, 0, "*0.333333343 bf16", "", "", "" },
	{ PROFILE_DDP, F32, 0, 1, 1, 0, 0, 0, 0, 0, "", "", "", "" },
	{ PROFILE_DDP_BUCKET_VIEW, B16, 0, 3, 3, 0, 0, 0, 0, 0, "/3 bf16", "", "", "" },
	{ PROFILE_DDP_BUCKET_VIEW, B16, 0, 3, 3, 0, 0, 0, 0, 1, "*0.333333343 bf16", "", "", "" },
	{ PROFILE_DDP_HOOK, F32, F16, 3, 3, 0, 0, 0, 0, 1, "*0.333333343 fp16", "", "", "" },
	{ PROFILE_DDP_HOOK, F32, F16, 3, 3, 0, 0, 0, 0, 0, "/3 fp16", "", "", "" },
	{ PROFILE_DDP_HOOK, B16, F16, 3, 3, 0, 0, 0, 0, 0, "/3 fp16", "", "", "*1 bf16" },
	{ PROFILE_DDP_HOOK, F32, 0, 3, 3, 0, 0, 0, 0, 0, "/3 fp32", "", "", "" },
};

static state_unit *row_record(const struct row *r)
{
	state_unit *u = record(r->profile, r->gradient, r->reduce);

	u->pre_divide = r->pre_divide;
	u->post_divide = r->post_divide;
	u->divide_factor = r->factor;
	u->force_sum = r->force;
	u->shard_ranks = r->ranks / r->replicas;
	u->strategy = r->replicas == 1          ? STRATEGY_SHARD
		      : r->replicas == r->ranks ? STRATEGY_REPLICATE
						: STRATEGY_HYBRID;
	if (r->profile >= PROFILE_DDP)
		u->strategy = 0; /* its own */
	return u;
}

Test(reduce_plan, every_profile_divides_where_its_system_does)
{
	for (size_t i = 0; i < ARRAY_SIZE(rows); i++) {
		const struct row *r = &rows[i];
		state_unit *u = row_record(r);
		struct reduce_plan p =
			plan_of(u, r->ranks, r->nccl ? REDUCE_AS_ON_GPU : REDUCE_AS_ON_CPU);

		expect_factor(&p.pre, r->pre, "pre", i);
		expect_factor(&p.partial, r->partial, "partial", i);
		expect_factor(&p.replica, r->replica, "replica", i);
		expect_factor(&p.post, r->post, "post", i);
		cr_expect_eq(p.sum_dtype, u->reduce_dtype, "case %zu", i);
		cr_expect_eq(p.adds_before,
			     r->profile >= PROFILE_DDP ||
				     (r->gradient == F32 && r->ranks == r->replicas &&
				      (r->profile == PROFILE_FSDP1_HOOK ||
				       (r->profile == PROFILE_FAIRSCALE && r->ranks == 1))),
			     "case %zu", i);
		cr_expect_eq(p.accumulate_dtype,
			     r->profile == PROFILE_FSDP2 ? u->reduce_dtype : u->gradient_dtype,
			     "case %zu", i);
		state_unit_free(u);
	}
}

/* Asked for, it is the same wherever the unit is. */
Test(reduce_plan, division_is_as_the_unit_asks_on_every_device)
{
	static const char *const by[_DIV_MODE_N][2] = {
		[DIV_MODE_TRUE] = { "/1.5 fp32", "/3 fp32" },
		[DIV_MODE_RECIPROCAL] = { "*0.666666687 fp32", "*0.333333343 fp32" },
	};

	for (unsigned i = 0; i < 4 * (_PROFILE_N - 1); i++) {
		enum reduce_profile profile = (enum reduce_profile)(1 + i / 4);
		state_unit *u = record(profile, F32, 0);
		struct reduce_plan p;

		u->force_sum = profile == PROFILE_FSDP2;
		u->div_mode = 1 + i % 2;
		p = plan_of(u, 3, (enum reduce_device)(i / 2 % 2));
		if (profile >= PROFILE_DDP_HOOK)
			expect_factor(&p.pre, by[u->div_mode][1], "pre", i);
		else if (profile != PROFILE_DDP) /* it multiplies everywhere */
			expect_factor(&p.post, by[u->div_mode][profile == PROFILE_FSDP2], "post",
				      i);
		state_unit_free(u);
	}
}

Test(reduce_plan, open_dtypes_and_strategies_are_the_systems)
{
	static const struct {
		enum reduce_profile profile, is;
		enum dtype dtype;
		enum unit_strategy strategy;
	} cases[] = {
		{ 0, PROFILE_FAIRSCALE, F32, STRATEGY_SHARD },
		{ PROFILE_XLA, PROFILE_XLA, B16, STRATEGY_SHARD },
		{ PROFILE_FSDP1_HOOK, PROFILE_FSDP1_HOOK, B16, STRATEGY_SHARD },
		{ PROFILE_FSDP2, PROFILE_FSDP2, B16, STRATEGY_SHARD },
		{ PROFILE_DDP, PROFILE_DDP, B16, STRATEGY_REPLICATE },
		{ PROFILE_DDP_HOOK, PROFILE_DDP_HOOK, B16, STRATEGY_REPLICATE },
		{ PROFILE_DDP_BUCKET_VIEW, PROFILE_DDP_BUCKET_VIEW, B16, STRATEGY_REPLICATE },
	};

	for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
		state_unit *u = record(cases[i].profile, B16, 0);

		(void)plan_of(u, 4, REDUCE_AS_ON_CPU);
		cr_expect_eq(u->reduce_profile, (uint32_t)cases[i].is);
		cr_expect_eq(u->reduce_dtype, (uint32_t)cases[i].dtype, "case %zu", i);
		cr_expect_eq(u->strategy, (uint32_t)cases[i].strategy, "case %zu", i);
		cr_expect_eq(u->shard_ranks, cases[i].strategy == STRATEGY_SHARD ? 4 : 1);
		state_unit_free(u);
	}
}

/* What would be ignored is refused, by its name. */
/* PyTorch/XLA's shards are multiples of 128 unless it is told otherwise. */
Test(reduce_plan, an_open_shard_multiple_is_the_systems)
{
	static const struct {
		enum reduce_profile profile;
		enum unit_layout_kind layout;
		uint32_t given, want;
	} cases[] = {
		{ PROFILE_XLA, LAYOUT_FLAT, 0, 128 }, { PROFILE_XLA, LAYOUT_FLAT, 1, 1 },
		{ PROFILE_XLA, LAYOUT_DIM0, 0, 1 },   { PROFILE_FAIRSCALE, LAYOUT_FLAT, 0, 1 },
		{ PROFILE_FSDP2, LAYOUT_FLAT, 7, 7 },
	};

	for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
		state_unit *rec = nodefix_spec("unit", 100);
		struct fault f = FAULT_NULL;

		rec->reduce_profile = cases[i].profile;
		rec->layout = cases[i].layout;
		rec->shard_multiple = cases[i].given;
		cr_assert_eq(unit_resolve(rec, 4, &f), 0, "%s", f.text);
		cr_expect_eq(rec->shard_multiple, cases[i].want, "case %zu: %u", i,
			     rec->shard_multiple);
		state_unit_free(rec);
	}
}

Test(reduce_plan, settings_that_a_profile_does_not_have_are_refused)
{
	static const struct {
		enum reduce_profile profile;
		enum unit_strategy strategy;
		uint32_t shard_ranks;
		enum dtype reduce;
		double pre, post, factor;
		bool force;
		const char *field, *text;
	} cases[] = {
		{ PROFILE_DDP, 0, 0, 0, 2, 0, 0, 0, "units.pre_divide", "DDP" },
		{ PROFILE_DDP, 0, 0, 0, 0, 1, 0, 0, "units.post_divide", "DDP" },
		{ PROFILE_DDP_HOOK, 0, 0, 0, 2, 0, 0, 0, "units.pre_divide", "DDP_HOOK" },
		{ PROFILE_FSDP2, 0, 0, 0, 0, 2, 0, 0, "units.post_divide", "FSDP2" },
		{ PROFILE_FAIRSCALE, 0, 0, 0, 0.5, 0, 0, 0, "units.pre_divide", "1 or more" },
		{ PROFILE_XLA, 0, 0, 0, 2, 0.5, 0, 0, "units.post_divide", "1 or more" },
		{ PROFILE_XLA, 0, 0, 0, 0, 0, 2, 0, "units.divide_factor", "FSDP2" },
		{ PROFILE_DDP, 0, 0, 0, 0, 0, 2, 0, "units.divide_factor", "FSDP2" },
		{ PROFILE_FAIRSCALE, 0, 0, 0, 0, 0, 0, 1, "units.force_sum", "FSDP2" },
		{ PROFILE_DDP, 0, 0, B16, 0, 0, 0, 0, "units.reduce_dtype", "DDP_HOOK" },
		{ PROFILE_DDP, STRATEGY_SHARD, 0, 0, 0, 0, 0, 0, "units.strategy", "REPLICATE" },
		{ PROFILE_DDP_HOOK, STRATEGY_HYBRID, 2, 0, 0, 0, 0, 0, "units.strategy", "DDP" },
		{ PROFILE_FSDP2, STRATEGY_HYBRID, 3, 0, 0, 0, 0, 0, "units.shard_ranks", "4" },
		{ PROFILE_FSDP2, STRATEGY_HYBRID, 0, 0, 0, 0, 0, 0, "units.shard_ranks", "4" },
		{ PROFILE_FSDP2, STRATEGY_SHARD, 2, 0, 0, 0, 0, 0, "units.shard_ranks", "HYBRID" },
		{ 0, STRATEGY_REPLICATE, 4, 0, 0, 0, 0, 0, "units.shard_ranks", "HYBRID" },
	};

	for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
		state_unit *u = record(cases[i].profile, F32, cases[i].reduce);
		struct fault f = FAULT_NULL;

		u->strategy = cases[i].strategy;
		u->shard_ranks = cases[i].shard_ranks;
		u->pre_divide = cases[i].pre;
		u->post_divide = cases[i].post;
		u->divide_factor = cases[i].factor;
		u->force_sum = cases[i].force;
		cr_expect_eq(unit_resolve(u, 4, &f), FAULT_INVALID, "case %zu", i);
		cr_expect_str_eq(f.field, cases[i].field, "case %zu", i);
		cr_expect(strstr(f.text, cases[i].text), "case %zu: %s", i, f.text);
		state_unit_free(u);
	}
}
