#include "ref/ref.h"

static const struct kernels ref = {
	.name = "ref",
	.cast = ref_cast,
	.reduce = ref_reduce,
	.all_reduce = ref_all_reduce,
	.adamw = ref_adamw,
	.adam = ref_adam,
	.sgd = ref_sgd,
	.norm = ref_norm,
	.scale = ref_scale,
	.fill = ref_fill,
	.found_inf = ref_found_inf,
	.pack = ref_pack,
	.clamp = ref_clamp,
	.unscale = ref_unscale,
	.add_rows = ref_add_rows,
	.copy = ref_copy,
	.reduce_step = ref_reduce_step,
	.assemble = ref_assemble,
};

const struct kernels *kernels_ref(void)
{
	return &ref;
}
