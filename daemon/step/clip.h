/*
 * What a request says of clipping. Loop thread only.
 */
#ifndef SHARDD_STEP_CLIP_H
#define SHARDD_STEP_CLIP_H

#include "op/op.h"

/* How a request says what to clip by, with the names of its fields for texts. */
struct clip_fields {
	double max_norm, norm_type;
	uint32_t profile;
	bool error_if_nonfinite;
	const char *field_max_norm, *field_norm_type, *field_profile;
};
/* Check them (op_clip.c). Return: 0 or a fault code. */
int clip_decode(const struct clip_fields *r, struct clip *ret, struct fault *f);

#endif
