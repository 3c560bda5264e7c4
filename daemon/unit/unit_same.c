/* Compares the unit that a rank registers with the existing one, and describes the first
 * difference. */
#include <string.h>

#include "unit/unit.h"

/* fault_set returns its code, so this is false. */
#define DIFFERS(f, what, fmt, have, want) \
	(!fault_set(f, FAULT_STATE, NULL, \
		    "unit '%s' is registered with " what " " fmt ", not " fmt, name, have, want))
#define OTHER(f, what, of)                                                                    \
	(!fault_set(f, FAULT_STATE, NULL, "unit '%s' is registered with other " what " '%s'", \
		    name, of))

static bool unit_same_optimizer(const char *name, const state_optimizer *a,
				const state_optimizer *b, struct fault *f)
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
	if (a->profile != b->profile)
		return DIFFERS(f, "optimizer.profile", "%u", a->profile, b->profile);
	if (a->when != b->when)
		return DIFFERS(f, "optimizer.when", "%u", a->when, b->when);
	if (a->amsgrad != b->amsgrad)
		return DIFFERS(f, "optimizer.amsgrad", "%d", a->amsgrad, b->amsgrad);
	if (a->maximize != b->maximize)
		return DIFFERS(f, "optimizer.maximize", "%d", a->maximize, b->maximize);
	if (a->dampening != b->dampening)
		return DIFFERS(f, "optimizer.dampening", "%.17g", a->dampening, b->dampening);
	return true;
}

static bool unit_same_settings(const state_tensor *a, const state_tensor *b)
{
	return a->frozen == b->frozen && a->has_weight_decay == b->has_weight_decay &&
	       a->weight_decay == b->weight_decay && a->has_lr_factor == b->has_lr_factor &&
	       a->lr_factor == b->lr_factor;
}

static bool unit_same_strides(const state_tensor *a, const state_tensor *b)
{
	return a->n_strides == b->n_strides &&
	       (!a->n_strides ||
		memcmp(a->strides, b->strides, a->n_strides * sizeof(*a->strides)) == 0);
}

static bool unit_same_tensor(const char *name, const state_tensor *a, const state_tensor *b,
			     struct fault *f)
{
	if (strcmp(a->name, b->name) != 0)
		return DIFFERS(f, "tensor", "'%s'", a->name, b->name);
	if (a->n_shape != b->n_shape)
		return DIFFERS(f, "tensor dimensions:", "%zu", a->n_shape, b->n_shape);
	for (size_t i = 0; i < a->n_shape; i++)
		if (a->shape[i] != b->shape[i])
			return fault_set(
				       f, FAULT_STATE, NULL,
				       "unit '%s' is registered with dimension %zu of tensor '%s' "
				       "being %llu, not %llu",
				       name, i, a->name, (unsigned long long)a->shape[i],
				       (unsigned long long)b->shape[i]),
			       false;
	if (!unit_same_strides(a, b))
		return OTHER(f, "strides of tensor", a->name);
	if (a->init_kind != b->init_kind || a->init_a != b->init_a || a->init_b != b->init_b)
		return OTHER(f, "initialiser settings of tensor", a->name);
	if (strcmp(a->alias_of, b->alias_of) != 0 || strcmp(a->alias_unit, b->alias_unit) != 0)
		return DIFFERS(f, "an alias of tensor", "'%s'", a->alias_of, b->alias_of);
	if (!unit_same_settings(a, b))
		return OTHER(f, "settings of tensor", a->name);
	return true;
}

static bool unit_same_buffer(const char *name, const state_buffer *a, const state_buffer *b,
			     struct fault *f)
{
	if (strcmp(a->name, b->name) != 0)
		return DIFFERS(f, "buffer", "'%s'", a->name, b->name);
	if (a->dtype != b->dtype || a->n_shape != b->n_shape ||
	    (a->n_shape && memcmp(a->shape, b->shape, a->n_shape * sizeof(*a->shape)) != 0))
		return OTHER(f, "shape or dtype of buffer", a->name);
	return true;
}

static bool unit_same_choices(const char *name, const state_unit *a, const state_unit *b,
			      struct fault *f)
{
	if (a->layout != b->layout)
		return DIFFERS(f, "layout", "%u", a->layout, b->layout);
	if (a->strategy != b->strategy)
		return DIFFERS(f, "strategy", "%u", a->strategy, b->strategy);
	if (a->shard_ranks != b->shard_ranks)
		return DIFFERS(f, "shard_ranks", "%u", a->shard_ranks, b->shard_ranks);
	if (a->reduce_profile != b->reduce_profile)
		return DIFFERS(f, "reduce_profile", "%u", a->reduce_profile, b->reduce_profile);
	if (a->reduce_dtype != b->reduce_dtype)
		return DIFFERS(f, "reduce_dtype", "%s", dtype_name(a->reduce_dtype),
			       dtype_name(b->reduce_dtype));
	if (a->divide_factor != b->divide_factor)
		return DIFFERS(f, "divide_factor", "%.17g", a->divide_factor, b->divide_factor);
	if (a->force_sum != b->force_sum)
		return DIFFERS(f, "force_sum", "%d", a->force_sum, b->force_sum);
	if (a->div_mode != b->div_mode)
		return DIFFERS(f, "div_mode", "%u", a->div_mode, b->div_mode);
	if (a->guarded != b->guarded)
		return DIFFERS(f, "guarded", "%d", a->guarded, b->guarded);
	if (a->n_buffers != b->n_buffers)
		return DIFFERS(f, "buffers:", "%zu", a->n_buffers, b->n_buffers);
	return true;
}

static bool unit_same_numbers(const char *name, const state_unit *a, const state_unit *b,
			      struct fault *f)
{
	if (a->group != b->group)
		return DIFFERS(f, "group", "%u", a->group, b->group);
	if (a->storage_dtype != b->storage_dtype)
		return DIFFERS(f, "storage_dtype", "%s", dtype_name(a->storage_dtype),
			       dtype_name(b->storage_dtype));
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

	if (!unit_same_numbers(name, have, want, f) || !unit_same_choices(name, have, want, f) ||
	    !unit_same_optimizer(name, have->optimizer, want->optimizer, f))
		return false;
	for (size_t i = 0; i < have->n_tensors; i++)
		if (!unit_same_tensor(name, have->tensors[i], want->tensors[i], f))
			return false;
	for (size_t i = 0; i < have->n_buffers; i++)
		if (!unit_same_buffer(name, have->buffers[i], want->buffers[i], f))
			return false;
	return true;
}
