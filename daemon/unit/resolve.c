/*
 * What a unit's settings stand for where they were left open: after this nothing in the
 * record is, so that two records can be compared and a successor needs no defaults.
 */
#include "unit/unit.h"

static void choose(uint32_t *field, uint32_t absent)
{
	if (!*field)
		*field = absent;
}

/* As in the systems whose name the profile has, where they are not told otherwise. */
static uint32_t usual_reduce_dtype(const state_unit *rec)
{
	return rec->reduce_profile == PROFILE_FAIRSCALE ? DTYPE_FP32 : rec->gradient_dtype;
}

static int resolve_strategy(state_unit *rec, uint32_t ranks, struct fault *f)
{
	uint32_t *shard = &rec->shard_ranks;

	choose(&rec->strategy, STRATEGY_SHARD);
	if (rec->strategy == STRATEGY_HYBRID) {
		if (*shard && ranks % *shard == 0)
			return 0;
		return fault_set(f, FAULT_INVALID, "units.shard_ranks",
				 "unit '%.100s': shard_ranks is %u: a divisor of the group's %u "
				 "ranks is allowed",
				 rec->name, *shard, ranks);
	}
	if (*shard && *shard != (rec->strategy == STRATEGY_SHARD ? ranks : 1))
		return fault_set(f, FAULT_INVALID, "units.shard_ranks",
				 "unit '%.100s': shard_ranks is %u: it is for strategy HYBRID",
				 rec->name, *shard);
	*shard = rec->strategy == STRATEGY_SHARD ? ranks : 1;
	return 0;
}

/* Of all ranks that reduce together, replicas too. */
static void resolve_factors(state_unit *rec, uint32_t ranks)
{
	if (rec->pre_divide == 0 && rec->post_divide == 0)
		layout_divide_factors(ranks, &rec->pre_divide, &rec->post_divide);
	if (rec->pre_divide == 0)
		rec->pre_divide = 1;
	if (rec->post_divide == 0)
		rec->post_divide = 1;
}

int unit_resolve(state_unit *rec, uint32_t ranks, struct fault *f)
{
	choose(&rec->layout, LAYOUT_FLAT);
	choose(&rec->reduce_profile, PROFILE_FAIRSCALE);
	choose(&rec->reduce_dtype, usual_reduce_dtype(rec));
	choose(&rec->reshard, RESHARD_AFTER_FORWARD);
	choose(&rec->optimizer->profile, OPTIM_EAGER_SINGLE);
	choose(&rec->optimizer->when, OPTIM_AT_STEP);
	resolve_factors(rec, ranks);
	return resolve_strategy(rec, ranks, f);
}
