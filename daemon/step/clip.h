/*
 * What a request says of clipping. Loop thread only.
 */
#ifndef SHARDD_STEP_CLIP_H
#define SHARDD_STEP_CLIP_H

#include "op/op.h"

struct clip_args {
	struct clip clip;
	double value;   /* ClipGradValue: the bound; Unscale: the factor */
	size_t n_units; /* named in @owned, ascending; 0: all of the group */
	bool whole_job; /* ClipGradNorm: of every group */
};

static inline struct clip_args *clip_args(const struct op *op)
{
	_Static_assert(sizeof(struct clip_args) <= OP_ARGS_BYTES, "room in struct op");
	return op_args(op);
}

/* How a request says what to clip by, with the names of its fields for texts. */
struct clip_fields {
	double max_norm, norm_type;
	uint32_t profile;
	bool error_if_nonfinite;
	const char *field_max_norm, *field_norm_type, *field_profile;
};
/* Check them (op_clip.c). Return: 0 or a fault code. */
int op_clip_take(const struct clip_fields *r, struct clip *ret, struct fault *f);

#endif
