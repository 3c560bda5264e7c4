#include "host/host.h"

#define NAME_(variant) #variant
#define NAME(variant)  NAME_(variant)

const struct kernels HOST(table) = {
	.name = NAME(KERNELS_VARIANT),
	.cast = HOST(cast),
	.reduce = HOST(reduce),
	.all_reduce = HOST(all_reduce),
	.adamw = HOST(adamw),
	.adam = HOST(adam),
	.sgd = HOST(sgd),
	.norm = HOST(norm),
	.scale = HOST(scale),
	.fill = HOST(fill),
	.found_inf = HOST(found_inf),
	.pack = HOST(pack),
	.clamp = HOST(clamp),
	.unscale = HOST(unscale),
	.add_rows = HOST(add_rows),
	.copy = HOST(copy),
	.reduce_step = HOST(reduce_step),
	.assemble = HOST(assemble),
};
