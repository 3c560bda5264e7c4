/*
 * Resolves the settings of a unit that were left open. After this no setting in the record is open,
 * so that two records can be compared and a successor needs no defaults.
 */
#include "unit/reduce_plan.h"
#include "unit/unit.h"

/* PyTorch/XLA's, where a shard is cut from a flat parameter. */
#define XLA_MULTIPLE 128u

static void resolve_choose(uint32_t *field, uint32_t absent)
{
	if (!*field)
		*field = absent;
}

int unit_resolve(state_unit *rec, uint32_t ranks, struct fault *f)
{
	resolve_choose(&rec->layout, LAYOUT_FLAT);
	resolve_choose(&rec->reshard, RESHARD_AFTER_FORWARD);
	resolve_choose(&rec->optimizer->profile, OPTIM_EAGER_SINGLE);
	resolve_choose(&rec->optimizer->when, OPTIM_AT_STEP);
	if (reduce_resolve(rec, ranks, f))
		return f->code;
	resolve_choose(&rec->shard_multiple,
		       rec->reduce_profile == PROFILE_XLA && rec->layout == LAYOUT_FLAT
			       ? XLA_MULTIPLE
			       : 1);
	return 0;
}
