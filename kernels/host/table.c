#include "host/host.h"

#define NAME_(variant) #variant
#define NAME(variant)  NAME_(variant)

const struct kernels HOST(table) = {
	.name = NAME(KERNELS_VARIANT),
	.cast = HOST(cast),
	.reduce = HOST(reduce),
	.all_reduce = HOST(all_reduce),
	.adamw = HOST(adamw),
	.sgd = HOST(sgd),
	.norm = HOST(norm),
	.scale = HOST(scale),
	.fill = HOST(fill),
	.copy = HOST(copy),
};
