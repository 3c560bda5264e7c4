/* Is what a rank registers the unit that is there? The first difference, in words. */
#include <string.h>

#include "unit/unit.h"

/* fault_set returns its code, so this is false. */
#define DIFFERS(f, what, fmt, have, want) \
	(!fault_set(f, FAULT_STATE, NULL, \
		    "unit '%s' is registered with " what " " fmt ", not " fmt, name, have, want))

static bool same_optimizer(const char *name, const state_optimizer *a, const state_optimizer *b,
			   struct fault *f)
{
	if (a->kind != b->kind)
		return DIFFERS(f, "optimizer kind", "%u", a->kind, b->kind);
	if (a->lr != b->lr)
		return DIFFERS(f, "optimizer.lr", "%.17g", a->lr, b->lr);
	if (a->weight_decay != b->weight_decay)
		return DIFFERS(f, "optimizer.weight_decay", "%.17g", a->weight_decay,
			       b->weight_decay);
	if (a->momentum != b->momentum)
		return DIFFERS(f, "optimizer.momentum", "%.17g", a->momentum, b->momentum);
	if (a->nesterov != b->nesterov)
		return DIFFERS(f, "optimizer.nesterov", "%d", a->nesterov, b->nesterov);
	if (a->beta1 != b->beta1)
		return DIFFERS(f, "optimizer.beta1", "%.17g", a->beta1, b->beta1);
	if (a->beta2 != b->beta2)
		return DIFFERS(f, "optimizer.beta2", "%.17g", a->beta2, b->beta2);
	if (a->eps != b->eps)
		return DIFFERS(f, "optimizer.eps", "%.17g", a->eps, b->eps);
	return true;
}

static bool same_tensor(const char *name, const state_tensor *a, const state_tensor *b,
			struct fault *f)
{
	if (strcmp(a->name, b->name) != 0)
		return DIFFERS(f, "tensor", "'%s'", a->name, b->name);
	if (a->n_shape != b->n_shape)
		return DIFFERS(f, "a tensor of dimensions", "%zu", a->n_shape, b->n_shape);
	for (size_t i = 0; i < a->n_shape; i++)
		if (a->shape[i] != b->shape[i])
			return fault_set(
				       f, FAULT_STATE, NULL,
				       "unit '%s' is registered with dimension %zu of tensor '%s' "
				       "being %llu, not %llu",
				       name, i, a->name, (unsigned long long)a->shape[i],
				       (unsigned long long)b->shape[i]),
			       false;
	if (a->init_kind != b->init_kind || a->init_a != b->init_a || a->init_b != b->init_b)
		return DIFFERS(f, "another initialiser of tensor", "'%s'", a->name, b->name);
	return true;
}

static bool same_numbers(const char *name, const state_unit *a, const state_unit *b,
			 struct fault *f)
{
	if (a->group != b->group)
		return DIFFERS(f, "group", "%u", a->group, b->group);
	if (a->compute_dtype != b->compute_dtype)
		return DIFFERS(f, "compute_dtype", "%s", dtype_name(a->compute_dtype),
			       dtype_name(b->compute_dtype));
	if (a->gradient_dtype != b->gradient_dtype)
		return DIFFERS(f, "gradient_dtype", "%s", dtype_name(a->gradient_dtype),
			       dtype_name(b->gradient_dtype));
	if (a->shard_multiple != b->shard_multiple)
		return DIFFERS(f, "shard_multiple", "%u", a->shard_multiple, b->shard_multiple);
	if (a->pre_divide != b->pre_divide)
		return DIFFERS(f, "pre_divide", "%.17g", a->pre_divide, b->pre_divide);
	if (a->post_divide != b->post_divide)
		return DIFFERS(f, "post_divide", "%.17g", a->post_divide, b->post_divide);
	if (a->n_tensors != b->n_tensors)
		return DIFFERS(f, "tensors:", "%zu", a->n_tensors, b->n_tensors);
	return true;
}

bool unit_same_spec(const state_unit *have, const state_unit *want, struct fault *f)
{
	const char *name = have->name;

	if (!same_numbers(name, have, want, f) ||
	    !same_optimizer(name, have->optimizer, want->optimizer, f))
		return false;
	for (size_t i = 0; i < have->n_tensors; i++)
		if (!same_tensor(name, have->tensors[i], want->tensors[i], f))
			return false;
	return true;
}
