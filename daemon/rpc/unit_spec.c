#include "rpc/unit_spec.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "core/cleanup.h"
#include "core/htab.h"
#include "kernels.h"
#include "rpc/codec.h"
#include "unit/unit.h"

#define MAX_DIMS    16u
#define MAX_TENSORS 65536u

/* Names appear in messages to all: there a text must be UTF-8. */
static int check_characters(const char *name, const char *field, struct fault *f)
{
	size_t length;

	for (const char *at = name; *at; at += length) {
		length = codec_utf8_length(at);
		if (length)
			continue;
		return fault_set(f, FAULT_INVALID, field,
				 "%s has %s 0x%02x at byte %zu: printable text is allowed", field,
				 (unsigned char)*at < 0x80 ? "the control character"
							   : "something else than UTF-8,",
				 (unsigned char)*at, (size_t)(at - name));
	}
	return 0;
}

int unit_spec_name(const char *name, size_t max, const char *field, struct fault *f)
{
	size_t n = name ? strnlen(name, max + 1) : 0;

	if (n == 0)
		return fault_set(f, FAULT_INVALID, field,
				 "%s is empty: 1 to %zu printable bytes are allowed", field, max);
	if (n > max)
		return fault_set(
			f, FAULT_INVALID, field,
			"%s is %zu bytes ('%.32s...'): 1 to %zu printable bytes are allowed", field,
			strlen(name), name, max);
	return check_characters(name, field, f);
}

/* A finite number in [lo, hi]. */
static int number(double x, double lo, double hi, const char *unit, const char *field,
		  struct fault *f)
{
	if (isfinite(x) && x >= lo && x <= hi)
		return 0;
	return fault_set(f, FAULT_INVALID, field, "unit '%.64s': %s is %g: %g to %g is allowed",
			 unit, field, x, lo, hi);
}

static int decode_init(state_tensor *t, const Shardd__V1__Init *init, const char *unit,
		       struct fault *f)
{
	if (!init)
		return 0;
	if ((unsigned)init->kind > 3)
		return fault_set(f, FAULT_INVALID, "units.tensors.init.kind",
				 "unit '%.64s': init.kind of tensor '%.64s' is %d: CONSTANT, "
				 "UNIFORM or NORMAL is allowed",
				 unit, t->name, init->kind);
	if (number(init->a, -1e30, 1e30, unit, "units.tensors.init.a", f) ||
	    number(init->b, -1e30, 1e30, unit, "units.tensors.init.b", f))
		return f->code;
	t->init_kind = (uint32_t)init->kind;
	t->init_a = init->a;
	t->init_b = init->b;
	return 0;
}

static int decode_tensor(state_unit *u, const Shardd__V1__TensorSpec *spec, struct fault *f)
{
	state_tensor *t;
	uint64_t n;

	if (unit_spec_name(spec->name, UNIT_NAME_MAX, "units.tensors.name", f))
		return f->code;
	if (spec->n_shape > MAX_DIMS)
		return fault_set(
			f, FAULT_INVALID, "units.tensors.shape",
			"unit '%.64s': tensor '%.64s' has %zu dimensions: up to %u are allowed",
			u->name, spec->name, spec->n_shape, MAX_DIMS);
	if (!layout_numel(spec->shape, (uint32_t)spec->n_shape, &n))
		return fault_set(f, FAULT_INVALID, "units.tensors.shape",
				 "unit '%.64s': the shape of tensor '%.64s' has a dimension 0 or "
				 "more than 2^48 elements",
				 u->name, spec->name);
	t = state_tensor_new(spec->name, spec->shape, spec->n_shape);
	if (!t || state_unit_add_tensor(u, t) < 0) {
		shardd__state__tensor__free_unpacked(t, NULL);
		return fault_errno(f, -ENOMEM, "registering units");
	}
	return decode_init(t, spec->init, u->name, f);
}

static int decode_tensors(state_unit *u, const Shardd__V1__UnitSpec *spec, struct fault *f)
{
	struct htab names = HTAB_NULL;

	if (!spec->n_tensors || spec->n_tensors > MAX_TENSORS)
		return fault_set(f, FAULT_INVALID, "units.tensors",
				 "unit '%.64s' has %zu tensors: 1 to %u are allowed", u->name,
				 spec->n_tensors, MAX_TENSORS);
	for (size_t i = 0; !f->code && i < spec->n_tensors; i++) {
		int r = decode_tensor(u, spec->tensors[i], f)
				? 0
				: htab_add(&names, u->tensors[i]->name, u);

		if (r == -EEXIST)
			fault_set(f, FAULT_INVALID, "units.tensors.name",
				  "unit '%.64s': tensor '%.64s' is there twice", u->name,
				  u->tensors[i]->name);
		else if (r)
			fault_errno(f, r, "registering units");
	}
	htab_deinit(&names);
	return f->code;
}

static int decode_optimizer(state_unit *u, const Shardd__V1__Optimizer *o, struct fault *f)
{
	state_optimizer *rec = u->optimizer;

	if (!o || o->kind == SHARDD__V1__OPTIMIZER__KIND__KIND_UNSPECIFIED)
		return 0;
	if ((unsigned)o->kind >= _OPTIM_N)
		return fault_set(f, FAULT_INVALID, "units.optimizer.kind",
				 "unit '%.64s': optimizer.kind is %d: SGD or ADAMW is allowed",
				 u->name, o->kind);
	if (number(o->lr, 0, 1e6, u->name, "units.optimizer.lr", f) ||
	    number(o->weight_decay, 0, 1e6, u->name, "units.optimizer.weight_decay", f))
		return f->code;
	rec->kind = (uint32_t)o->kind;
	rec->lr = o->lr;
	rec->weight_decay = o->weight_decay;
	if (rec->kind == OPTIM_SGD) {
		rec->momentum = o->momentum;
		rec->nesterov = o->nesterov;
		if (o->nesterov && o->momentum == 0)
			return fault_set(f, FAULT_INVALID, "units.optimizer.nesterov",
					 "unit '%.64s': nesterov needs a momentum above 0",
					 u->name);
		return number(o->momentum, 0, 1, u->name, "units.optimizer.momentum", f);
	}
	rec->beta1 = o->beta1;
	rec->beta2 = o->beta2;
	rec->eps = o->eps;
	if (number(o->beta1, 0, 0.9999999, u->name, "units.optimizer.beta1", f) ||
	    number(o->beta2, 0, 0.99999999, u->name, "units.optimizer.beta2", f))
		return f->code;
	return number(o->eps, 0, 1, u->name, "units.optimizer.eps", f);
}

static int dtype_field(int value, int absent, bool fp32_only, uint32_t *ret, const char *unit,
		       const char *field, struct fault *f)
{
	int v = value ? value : absent;

	if (!dtype_size((enum dtype)v) || (fp32_only && v != DTYPE_FP32))
		return fault_set(f, FAULT_INVALID, field, "unit '%.64s': %s is %d: %s is allowed",
				 unit, field, value, fp32_only ? "FP32" : "FP32, BF16 or FP16");
	*ret = (uint32_t)v;
	return 0;
}

static int decode_numbers(state_unit *u, const Shardd__V1__UnitSpec *s, struct fault *f)
{
	if (dtype_field((int)s->storage_dtype, DTYPE_FP32, true, &u->storage_dtype, u->name,
			"units.storage_dtype", f) ||
	    dtype_field((int)s->compute_dtype, DTYPE_FP32, false, &u->compute_dtype, u->name,
			"units.compute_dtype", f) ||
	    dtype_field((int)s->gradient_dtype, (int)u->compute_dtype, false, &u->gradient_dtype,
			u->name, "units.gradient_dtype", f))
		return f->code;
	u->group = s->group;
	u->shard_multiple = s->shard_multiple ? s->shard_multiple : 1;
	if (u->shard_multiple > (1u << 20))
		return fault_set(f, FAULT_INVALID, "units.shard_multiple",
				 "unit '%.64s': shard_multiple is %u: 0 to %u is allowed", u->name,
				 u->shard_multiple, 1u << 20);
	u->pre_divide = s->pre_divide;
	u->post_divide = s->post_divide;
	if (number(s->pre_divide, 0, 1e9, u->name, "units.pre_divide", f))
		return f->code;
	return number(s->post_divide, 0, 1e9, u->name, "units.post_divide", f);
}

int unit_spec_decode(const Shardd__V1__UnitSpec *spec, size_t index, state_unit **ret,
		     struct fault *f)
{
	state_unit *u;
	char field[48];

	snprintf(field, sizeof(field), "units[%zu].name", index);
	if (unit_spec_name(spec->name, UNIT_NAME_MAX, field, f))
		return f->code;
	u = state_unit_new(spec->name);
	if (!u)
		return fault_errno(f, -ENOMEM, "registering units");
	if (decode_numbers(u, spec, f) || decode_optimizer(u, spec->optimizer, f) ||
	    decode_tensors(u, spec, f)) {
		state_unit_free(u);
		return f->code;
	}
	*ret = u;
	return 0;
}
