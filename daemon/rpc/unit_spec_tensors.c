/* The tensors and buffers of a UnitSpec. */
#include <errno.h>
#include <string.h>

#include "core/cleanup.h"
#include "core/htab.h"
#include "kernels.h"
#include "rpc/unit_spec_impl.h"
#include "unit/settings.h"
#include "unit/unit.h"

#define MAX_DIMS    16u
#define MAX_TENSORS 65536u

static int unit_spec_tensors_decode_init(state_tensor *t, const Shardd__V1__Init *init,
					 const char *unit, struct fault *f)
{
	if (!init)
		return 0;
	if ((unsigned)init->kind > 3)
		return fault_set(f, FAULT_INVALID, "units.tensors.init.kind",
				 "unit '%.64s': init.kind of tensor '%.64s' is %d; it must be "
				 "CONSTANT, UNIFORM or NORMAL",
				 unit, t->name, init->kind);
	if (unit_spec_number(init->a, -1e30, 1e30, unit, "units.tensors.init.a", f) ||
	    unit_spec_number(init->b, -1e30, 1e30, unit, "units.tensors.init.b", f))
		return f->code;
	t->init_kind = (uint32_t)init->kind;
	t->init_a = init->a;
	t->init_b = init->b;
	return 0;
}

static int unit_spec_tensors_check_shape(const char *unit, const char *name, const uint64_t *shape,
					 size_t dims, const char *field, struct fault *f)
{
	uint64_t n;

	if (dims > MAX_DIMS)
		return fault_set(
			f, FAULT_INVALID, field,
			"unit '%.64s': tensor '%.64s' has %zu dimensions; the maximum is %u", unit,
			name, dims, MAX_DIMS);
	if (!layout_numel(shape, (uint32_t)dims, &n))
		return fault_set(f, FAULT_INVALID, field,
				 "unit '%.64s': the shape of tensor '%.64s' has a dimension of 0, "
				 "or more than 2^48 elements",
				 unit, name);
	return 0;
}

static int unit_spec_tensors_decode_alias(state_tensor *t, const Shardd__V1__TensorSpec *spec,
					  const char *unit, struct fault *f)
{
	if (!*spec->alias_of && !*spec->alias_unit)
		return 0;
	if (unit_spec_name(spec->alias_of, UNIT_NAME_MAX, "units.tensors.alias_of", f))
		return f->code;
	if (*spec->alias_unit &&
	    unit_spec_name(spec->alias_unit, UNIT_NAME_MAX, "units.tensors.alias_unit", f))
		return f->code;
	if (state_tensor_set_alias(t, *spec->alias_unit ? spec->alias_unit : unit, spec->alias_of) <
	    0)
		return fault_errno(f, -ENOMEM, "registering units");
	return 0;
}

static int unit_spec_tensors_decode_settings(state_tensor *t, const Shardd__V1__TensorSpec *spec,
					     const char *unit, struct fault *f)
{
	const Shardd__V1__TensorOptimizer *o = spec->optimizer;

	t->frozen = spec->frozen;
	if (!o)
		return 0;
	t->has_weight_decay = o->optional_weight_decay_case;
	t->weight_decay = o->optional_weight_decay_case ? o->weight_decay : 0;
	t->has_lr_factor = o->optional_lr_factor_case;
	t->lr_factor = o->optional_lr_factor_case ? o->lr_factor : 0;
	if (unit_spec_number(t->weight_decay, 0, SETTING_MAX_DECAY, unit,
			     "units.tensors.optimizer.weight_decay", f))
		return f->code;
	return unit_spec_number(t->lr_factor, 0, 1e6, unit, "units.tensors.optimizer.lr_factor", f);
}

/* Row-major strides are not kept, so that a rank that gives them and one that does not agree. */
static int unit_spec_tensors_decode_strides(state_tensor *t, const state_unit *unit,
					    const Shardd__V1__TensorSpec *spec, struct fault *f)
{
	size_t dims = spec->n_shape;
	bool plain = true;

	if (!spec->n_strides)
		return 0;
	if (spec->n_strides != dims ||
	    !layout_dense(spec->shape, spec->strides, (uint32_t)dims, &plain))
		return fault_set(
			f, FAULT_INVALID, "units.tensors.strides",
			"unit '%.64s': the strides of tensor '%.64s' leave gaps, overlap, or are "
			"not one per dimension; they must be those of a permutation",
			unit->name, spec->name);
	for (size_t i = 1; !plain && unit->layout == LAYOUT_DIM0 && i < dims; i++)
		if (spec->shape[i] > 1 && spec->strides[i] > spec->strides[0])
			return fault_set(f, FAULT_INVALID, "units.tensors.strides",
					 "unit '%.64s': dimension 0 of tensor '%.64s' is not its "
					 "outermost; layout DIM0 cuts tensors along dimension 0",
					 unit->name, spec->name);
	if (!plain && state_tensor_set_strides(t, spec->strides, dims) < 0)
		return fault_errno(f, -ENOMEM, "registering units");
	return 0;
}

static int unit_spec_tensors_decode_tensor(state_unit *u, const Shardd__V1__TensorSpec *spec,
					   struct fault *f)
{
	state_tensor *t;

	if (unit_spec_name(spec->name, UNIT_NAME_MAX, "units.tensors.name", f) ||
	    unit_spec_tensors_check_shape(u->name, spec->name, spec->shape, spec->n_shape,
					  "units.tensors.shape", f))
		return f->code;
	t = state_tensor_new(spec->name, spec->shape, spec->n_shape);
	if (!t || state_unit_add_tensor(u, t) < 0) {
		shardd__state__v1__tensor__free_unpacked(t, NULL);
		return fault_errno(f, -ENOMEM, "registering units");
	}
	if (unit_spec_tensors_decode_strides(t, u, spec, f) ||
	    unit_spec_tensors_decode_alias(t, spec, u->name, f) ||
	    unit_spec_tensors_decode_settings(t, spec, u->name, f))
		return f->code;
	return unit_spec_tensors_decode_init(t, spec->init, u->name, f);
}

static int unit_spec_tensors_decode_buffer(state_unit *u, const Shardd__V1__BufferSpec *spec,
					   struct fault *f)
{
	state_buffer *b;

	if (unit_spec_name(spec->name, UNIT_NAME_MAX, "units.buffers.name", f) ||
	    unit_spec_tensors_check_shape(u->name, spec->name, spec->shape, spec->n_shape,
					  "units.buffers.shape", f))
		return f->code;
	if ((unsigned)spec->dtype >= _BUFFER_DTYPE_N)
		return fault_set(f, FAULT_INVALID, "units.buffers.dtype",
				 "unit '%.64s': dtype of buffer '%.64s' is %d; it must be one of "
				 "BufferDtype",
				 u->name, spec->name, spec->dtype);
	b = state_buffer_new(spec->name, spec->shape, spec->n_shape);
	if (!b || state_unit_add_buffer(u, b) < 0) {
		shardd__state__v1__buffer__free_unpacked(b, NULL);
		return fault_errno(f, -ENOMEM, "registering units");
	}
	b->dtype = spec->dtype ? (uint32_t)spec->dtype : BUFFER_FP32;
	return 0;
}

/* Tensors and buffers share one set of names. */
static int unit_spec_tensors_check_name(struct htab *names, const state_unit *u, const char *name,
					const char *field, struct fault *f)
{
	int r = htab_add(names, name, (void *)u);

	if (r == -EEXIST)
		return fault_set(f, FAULT_INVALID, field,
				 "unit '%.64s': tensor '%.64s' is listed twice", u->name, name);
	return r ? fault_errno(f, r, "registering units") : 0;
}

int unit_spec_tensors(state_unit *u, const Shardd__V1__UnitSpec *spec, struct fault *f)
{
	struct htab names = HTAB_NULL;

	if (!spec->n_tensors || spec->n_tensors > MAX_TENSORS)
		return fault_set(f, FAULT_INVALID, "units.tensors",
				 "unit '%.64s' has %zu tensors; it must have 1 to %u", u->name,
				 spec->n_tensors, MAX_TENSORS);
	if (spec->n_buffers > MAX_TENSORS)
		return fault_set(f, FAULT_INVALID, "units.buffers",
				 "unit '%.64s' has %zu buffers; the maximum is %u", u->name,
				 spec->n_buffers, MAX_TENSORS);
	for (size_t i = 0; !f->code && i < spec->n_tensors; i++)
		if (unit_spec_tensors_decode_tensor(u, spec->tensors[i], f) == 0)
			unit_spec_tensors_check_name(&names, u, u->tensors[i]->name,
						     "units.tensors.name", f);
	for (size_t i = 0; !f->code && i < spec->n_buffers; i++)
		if (unit_spec_tensors_decode_buffer(u, spec->buffers[i], f) == 0)
			unit_spec_tensors_check_name(&names, u, u->buffers[i]->name,
						     "units.buffers.name", f);
	htab_deinit(&names);
	return f->code;
}
