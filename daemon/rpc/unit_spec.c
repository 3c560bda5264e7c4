#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "core/utf8.h"
#include "kernels.h"
#include "rpc/unit_spec_impl.h"
#include "unit/unit.h"

/* Names appear in messages to all clients, where text must be UTF-8. */
static int unit_spec_check_characters(const char *name, const char *field, struct fault *f)
{
	size_t length;

	for (const char *at = name; *at; at += length) {
		length = utf8_length(at);
		if (length)
			continue;
		return fault_set(
			f, FAULT_INVALID, field,
			"%s has %s 0x%02x at byte %zu; only printable text is allowed", field,
			(unsigned char)*at < 0x80 ? "the control character" : "invalid UTF-8,",
			(unsigned char)*at, (size_t)(at - name));
	}
	return 0;
}

int unit_spec_name(const char *name, size_t max, const char *field, struct fault *f)
{
	size_t n = name ? strnlen(name, max + 1) : 0;

	if (n == 0)
		return fault_set(f, FAULT_INVALID, field,
				 "%s is empty; it must have 1 to %zu printable bytes", field, max);
	if (n > max)
		return fault_set(
			f, FAULT_INVALID, field,
			"%s has %zu bytes ('%.32s...'); it must have 1 to %zu printable bytes",
			field, strlen(name), name, max);
	return unit_spec_check_characters(name, field, f);
}

int unit_spec_number(double x, double lo, double hi, const char *unit, const char *field,
		     struct fault *f)
{
	if (isfinite(x) && x >= lo && x <= hi)
		return 0;
	return fault_set(f, FAULT_INVALID, field, "unit '%.64s': %s %g is out of range (%g..%.9g)",
			 unit, field, x, lo, hi);
}

static int unit_spec_dtype_field(int value, int absent, uint32_t *ret, const char *unit,
				 const char *field, struct fault *f)
{
	int v = value ? value : absent;

	if (!dtype_is_stored((enum dtype)v))
		return fault_set(f, FAULT_INVALID, field,
				 "unit '%.64s': %s is %d; it must be FP32, BF16 or FP16", unit,
				 field, value);
	*ret = (uint32_t)v;
	return 0;
}

static int unit_spec_decode_numbers(state_unit *u, const Shardd__V1__UnitSpec *s, struct fault *f)
{
	if (unit_spec_dtype_field((int)s->storage_dtype, DTYPE_FP32, &u->storage_dtype, u->name,
				  "units.storage_dtype", f) ||
	    unit_spec_dtype_field((int)s->compute_dtype, (int)u->storage_dtype, &u->compute_dtype,
				  u->name, "units.compute_dtype", f) ||
	    unit_spec_dtype_field((int)s->gradient_dtype, (int)u->compute_dtype, &u->gradient_dtype,
				  u->name, "units.gradient_dtype", f))
		return f->code;
	u->group = s->group;
	u->shard_multiple = s->shard_multiple;
	if (u->shard_multiple > (1u << 20))
		return fault_set(f, FAULT_INVALID, "units.shard_multiple",
				 "unit '%.64s': shard_multiple %u is out of range (0..%u)", u->name,
				 u->shard_multiple, 1u << 20);
	u->pre_divide = s->pre_divide;
	u->post_divide = s->post_divide;
	if (unit_spec_number(s->pre_divide, 0, UNIT_MAX_FACTOR, u->name, "units.pre_divide", f))
		return f->code;
	return unit_spec_number(s->post_divide, 0, UNIT_MAX_FACTOR, u->name, "units.post_divide",
				f);
}

static int unit_spec_choice(int value, int end, uint32_t *ret, const char *unit, const char *field,
			    const char *allowed, struct fault *f)
{
	*ret = (uint32_t)value;
	if (value >= 0 && value < end)
		return 0;
	return fault_set(f, FAULT_INVALID, field, "unit '%.64s': %s is %d; it must be %s", unit,
			 field, value, allowed);
}

static int unit_spec_decode_reduce(state_unit *u, const Shardd__V1__UnitSpec *s, struct fault *f)
{
	u->force_sum = s->force_sum;
	u->divide_factor = s->divide_factor;
	if (s->reduce_dtype && unit_spec_dtype_field((int)s->reduce_dtype, 0, &u->reduce_dtype,
						     u->name, "units.reduce_dtype", f))
		return f->code;
	if (unit_spec_choice((int)s->reduce_profile, _PROFILE_N, &u->reduce_profile, u->name,
			     "units.reduce_profile", "a profile of ReduceProfile", f) ||
	    unit_spec_choice((int)s->div_mode, _DIV_MODE_N, &u->div_mode, u->name, "units.div_mode",
			     "a mode of DivMode", f))
		return f->code;
	return unit_spec_number(s->divide_factor, 0, UNIT_MAX_FACTOR, u->name,
				"units.divide_factor", f);
}

static int unit_spec_decode_choices(state_unit *u, const Shardd__V1__UnitSpec *s, struct fault *f)
{
	u->shard_ranks = s->shard_ranks;
	u->guarded = s->guarded;
	if (unit_spec_choice((int)s->layout, _LAYOUT_N, &u->layout, u->name, "units.layout",
			     "FLAT or DIM0", f) ||
	    unit_spec_choice((int)s->strategy, _STRATEGY_N, &u->strategy, u->name, "units.strategy",
			     "SHARD, REPLICATE or HYBRID", f) ||
	    unit_spec_choice((int)s->reshard, _RESHARD_N, &u->reshard, u->name, "units.reshard",
			     "AFTER_FORWARD, AFTER_BACKWARD, NEVER or AFTER_FORWARD_ONLY", f))
		return f->code;
	if (u->layout == LAYOUT_DIM0 && u->shard_multiple > 1)
		return fault_set(f, FAULT_INVALID, "units.shard_multiple",
				 "unit '%.64s': shard_multiple is %u; with layout DIM0 (whole "
				 "rows) it must be 0 or 1",
				 u->name, u->shard_multiple);
	return unit_spec_decode_reduce(u, s, f);
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
	if (unit_spec_decode_numbers(u, spec, f) || unit_spec_decode_choices(u, spec, f) ||
	    unit_spec_optimizer(u, spec->optimizer, f) || unit_spec_tensors(u, spec, f)) {
		state_unit_free(u);
		return f->code;
	}
	*ret = u;
	return 0;
}
