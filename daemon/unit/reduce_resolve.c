/*
 * Resolves the reduction settings of a unit that were left open, and refuses those that its profile
 * does not have, since they would have no effect.
 */
#include <stdio.h>

#include "unit/reduce_plan.h"

static bool reduce_resolve_is_ddp(uint32_t profile)
{
	return profile == PROFILE_DDP || profile == PROFILE_DDP_HOOK ||
	       profile == PROFILE_DDP_BUCKET_VIEW;
}

static const char *reduce_resolve_profile_name(uint32_t profile)
{
	static const char *const names[] = {
		[PROFILE_FAIRSCALE] = "FAIRSCALE",
		[PROFILE_XLA] = "XLA",
		[PROFILE_FSDP1_HOOK] = "FSDP1_HOOK",
		[PROFILE_FSDP2] = "FSDP2",
		[PROFILE_DDP] = "DDP",
		[PROFILE_DDP_HOOK] = "DDP_HOOK",
		[PROFILE_DDP_BUCKET_VIEW] = "DDP_BUCKET_VIEW",
	};

	return profile < _PROFILE_N && names[profile] ? names[profile] : "?";
}

static int reduce_resolve_strategy(state_unit *rec, uint32_t ranks, struct fault *f)
{
	uint32_t *shard = &rec->shard_ranks;

	if (!rec->strategy)
		rec->strategy = reduce_resolve_is_ddp(rec->reduce_profile) ? STRATEGY_REPLICATE
									   : STRATEGY_SHARD;
	if (reduce_resolve_is_ddp(rec->reduce_profile) && rec->strategy != STRATEGY_REPLICATE)
		return fault_set(f, FAULT_INVALID, "units.strategy",
				 "unit '%.100s': reduce_profile %s needs strategy REPLICATE",
				 rec->name, reduce_resolve_profile_name(rec->reduce_profile));
	if (rec->strategy == STRATEGY_HYBRID) {
		if (*shard && ranks % *shard == 0)
			return 0;
		return fault_set(f, FAULT_INVALID, "units.shard_ranks",
				 "unit '%.100s': shard_ranks is %u; it must be a divisor of the "
				 "group's %u ranks",
				 rec->name, *shard, ranks);
	}
	if (*shard && *shard != (rec->strategy == STRATEGY_SHARD ? ranks : 1))
		return fault_set(f, FAULT_INVALID, "units.shard_ranks",
				 "unit '%.100s': shard_ranks is %u; set it only with strategy "
				 "HYBRID, not with %s",
				 rec->name, *shard,
				 rec->strategy == STRATEGY_SHARD ? "SHARD" : "REPLICATE");
	*shard = rec->strategy == STRATEGY_SHARD ? ranks : 1;
	return 0;
}

/* The copying form and the view divide in the gradient's own dtype; a hook narrows. */
static int reduce_resolve_dtype(state_unit *rec, struct fault *f)
{
	bool own = rec->reduce_profile == PROFILE_DDP ||
		   rec->reduce_profile == PROFILE_DDP_BUCKET_VIEW;

	if (!rec->reduce_dtype)
		rec->reduce_dtype =
			rec->reduce_profile == PROFILE_FAIRSCALE ? DTYPE_FP32 : rec->gradient_dtype;
	if (own && rec->reduce_dtype != rec->gradient_dtype)
		return fault_set(f, FAULT_INVALID, "units.reduce_dtype",
				 "unit '%.100s': reduce_dtype %s with gradient_dtype %s needs "
				 "reduce_profile DDP_HOOK, not %s",
				 rec->name, dtype_name((enum dtype)rec->reduce_dtype),
				 dtype_name((enum dtype)rec->gradient_dtype),
				 reduce_resolve_profile_name(rec->reduce_profile));
	return 0;
}

static int reduce_resolve_refuse_factor(const state_unit *rec, const char *within,
					const char *field, const char *allowed, struct fault *f)
{
	char path[64];

	snprintf(path, sizeof(path), "%s%s", within, field);
	return fault_set(f, FAULT_INVALID, path, "unit '%.100s': %s with reduce_profile %s: %s",
			 rec->name, field, reduce_resolve_profile_name(rec->reduce_profile),
			 allowed);
}

static bool reduce_resolve_below_one(double factor)
{
	return factor != 0 && factor < 1;
}

static bool reduce_resolve_has_two_factors(const state_unit *rec)
{
	return rec->reduce_profile != PROFILE_FSDP2 && !reduce_resolve_is_ddp(rec->reduce_profile);
}

/* @within: prefix of the names of their fields. */
static int reduce_resolve_check_factors(const state_unit *rec, const char *within, struct fault *f)
{
	bool fsdp2 = rec->reduce_profile == PROFILE_FSDP2;
	bool two = reduce_resolve_has_two_factors(rec);

	if (rec->pre_divide != 0 && !two)
		return reduce_resolve_refuse_factor(rec, within, "pre_divide",
						    "this profile uses only its own factors", f);
	if (rec->post_divide != 0 && !two)
		return reduce_resolve_refuse_factor(rec, within, "post_divide",
						    "this profile uses only its own factors", f);
	if (reduce_resolve_below_one(rec->pre_divide))
		return reduce_resolve_refuse_factor(rec, within, "pre_divide",
						    "the factor must be 1 or more", f);
	if (reduce_resolve_below_one(rec->post_divide))
		return reduce_resolve_refuse_factor(rec, within, "post_divide",
						    "the factor must be 1 or more", f);
	if (rec->divide_factor != 0 && !fsdp2)
		return reduce_resolve_refuse_factor(rec, within, "divide_factor",
						    "only FSDP2 has it", f);
	if (rec->force_sum && !fsdp2)
		return reduce_resolve_refuse_factor(rec, within, "force_sum", "only FSDP2 has it",
						    f);
	return 0;
}

/* @ranks: all ranks that reduce together, including replicas. If only pre_divide is given,
 * post_divide is the rest, as in fairscale's constructor. */
static void reduce_resolve_set_factors(state_unit *rec, uint32_t ranks)
{
	if (!reduce_resolve_has_two_factors(rec))
		rec->pre_divide = rec->post_divide = 1;
	else if (rec->pre_divide == 0 && rec->post_divide == 0)
		layout_divide_factors(ranks, &rec->pre_divide, &rec->post_divide);
	else if (rec->pre_divide == 0)
		rec->pre_divide = 1;
	else if (rec->post_divide == 0)
		rec->post_divide = ranks > rec->pre_divide ? ranks / rec->pre_divide : 1;
}

int reduce_resolve(state_unit *rec, uint32_t ranks, struct fault *f)
{
	if (!rec->reduce_profile)
		rec->reduce_profile = PROFILE_FAIRSCALE;
	if (reduce_resolve_strategy(rec, ranks, f) || reduce_resolve_dtype(rec, f) ||
	    reduce_resolve_check_factors(rec, "units.", f))
		return f->code;
	reduce_resolve_set_factors(rec, ranks);
	return 0;
}

int reduce_resolve_factors(const state_unit *rec, uint32_t ranks, struct unit_factors *factors,
			   struct fault *f)
{
	state_unit like = *rec;

	like.pre_divide = factors->pre_divide;
	like.post_divide = factors->post_divide;
	like.divide_factor = factors->divide_factor;
	like.force_sum = factors->force_sum;
	if (reduce_resolve_check_factors(&like, "", f))
		return f->code;
	reduce_resolve_set_factors(&like, ranks);
	factors->pre_divide = like.pre_divide;
	factors->post_divide = like.post_divide;
	return 0;
}

void reduce_reopen(state_unit *rec)
{
	if (!reduce_resolve_has_two_factors(rec))
		rec->pre_divide = rec->post_divide = 0;
}

void reduce_reopen_factors(state_unit *rec, uint32_t ranks)
{
	double pre, post;

	reduce_reopen(rec);
	layout_divide_factors(ranks, &pre, &post);
	if (rec->pre_divide == pre && rec->post_divide == post)
		rec->pre_divide = rec->post_divide = 0;
	else if (rec->pre_divide * rec->post_divide == ranks)
		rec->post_divide = 0;
}
