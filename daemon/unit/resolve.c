/*
 * What a unit's settings stand for where they were left open: after this nothing in the
 * record is, so that two records can be compared and a successor needs no defaults.
 */
#include "unit/reduce_plan.h"
#include "unit/unit.h"

static void choose(uint32_t *field, uint32_t absent)
{
	if (!*field)
		*field = absent;
}

int unit_resolve(state_unit *rec, uint32_t ranks, struct fault *f)
{
	choose(&rec->layout, LAYOUT_FLAT);
	choose(&rec->reshard, RESHARD_AFTER_FORWARD);
	choose(&rec->optimizer->profile, OPTIM_EAGER_SINGLE);
	choose(&rec->optimizer->when, OPTIM_AT_STEP);
	return reduce_resolve(rec, ranks, f);
}
