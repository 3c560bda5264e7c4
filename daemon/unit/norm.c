#include "unit/norm.h"

#include <math.h>

#include "kernels.h"
#include "unit/optim.h"

bool norm_counts(const struct unit *u, unsigned d)
{
	return u->first_part + d < u->spread && u->parts[d].n > 0; /* of the first replica */
}

static size_t norm_blocks_in(uint64_t elements)
{
	return (elements + KERNEL_NORM_BLOCK - 1) / KERNEL_NORM_BLOCK;
}

size_t norm_blocks(const struct unit_part *p)
{
	return norm_blocks_in(p->n);
}

size_t norm_blocks_of(const struct unit *u, unsigned number)
{
	return number < u->spread ? norm_blocks_in(unit_end_at(u, number)) : 0;
}

size_t norm_partials(const struct unit *u)
{
	size_t blocks = 0;

	for (unsigned i = 0; i < u->spread; i++)
		blocks += norm_blocks_of(u, i);
	return blocks;
}

void norm_launch(struct launch *launch, const struct unit_part *p, double type, double *partial)
{
	*launch = (struct launch){ .kind = LAUNCH_NORM, .n = p->n };
	launch->norm = (struct k_norm){ optim_at(&p->grads, 0), partial, type };
}

double norm_add(double sum, double block, double type)
{
	if (isinf(type))
		return isnan(block) || block > sum ? block : sum;
	return sum + block;
}

double norm_of(double sum, double type)
{
	if (isinf(type) || type == 1)
		return sum;
	return type == 2 ? sqrt(sum) : pow(sum, 1 / type);
}

int norm_clip_check(const struct clip *clip, double total, struct fault *f)
{
	if (!clip->error_if_nonfinite || isfinite((float)total))
		return 0;
	return fault_set(f, FAULT_STATE, NULL,
			 "the total norm of order %g of the gradients is %g, so they cannot be "
			 "clipped: nothing was changed (error_if_nonfinite)",
			 clip->type, total);
}

/* fairscale divides a tensor by a tensor; torch and XLA a number by a tensor, which is the
 * number times the inverse. clamp keeps a NaN. */
bool norm_clip_factor(const struct clip *clip, double total, float *ret)
{
	float sum = (float)total + 1e-6f, most = (float)clip->max_norm, coef;

	if (clip->profile == CLIP_FAIRSCALE) {
		*ret = most / sum;
		return *ret < 1;
	}
	coef = (1.0f / sum) * most;
	if (coef > 1)
		coef = 1;
	if (clip->profile == CLIP_XLA && coef < 0)
		coef = 0;
	*ret = coef;
	return true;
}
