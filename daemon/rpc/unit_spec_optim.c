/* The optimizer of a UnitSpec. */
#include "rpc/unit_spec_impl.h"
#include "unit/settings.h"
#include "unit/unit.h"

static int unit_spec_optim_decode_sgd(state_unit *u, const Shardd__V1__Optimizer *o,
				      struct fault *f)
{
	state_optimizer *rec = u->optimizer;

	rec->momentum = o->momentum;
	rec->nesterov = o->nesterov;
	rec->dampening = o->dampening;
	if (o->nesterov && (o->momentum == 0 || o->dampening != 0))
		return fault_set(f, FAULT_INVALID, "units.optimizer.nesterov",
				 "unit '%.64s': nesterov needs a momentum above 0 and no dampening",
				 u->name);
	if (rec->profile == OPTIM_REFERENCE_F64)
		return fault_set(f, FAULT_INVALID, "units.optimizer.profile",
				 "unit '%.64s': optimizer.profile is REFERENCE_F64, which only "
				 "ADAM and ADAMW have; it must be EAGER_SINGLE, FOREACH or FUSED",
				 u->name);
	if (o->amsgrad)
		return fault_set(f, FAULT_INVALID, "units.optimizer.amsgrad",
				 "unit '%.64s': only ADAM and ADAMW have amsgrad", u->name);
	if (unit_spec_number(o->dampening, 0, SETTING_MAX_MOMENTUM, u->name,
			     "units.optimizer.dampening", f))
		return f->code;
	return unit_spec_number(o->momentum, 0, SETTING_MAX_MOMENTUM, u->name,
				"units.optimizer.momentum", f);
}

static int unit_spec_optim_decode_adam(state_unit *u, const Shardd__V1__Optimizer *o,
				       struct fault *f)
{
	state_optimizer *rec = u->optimizer;

	rec->beta1 = o->beta1;
	rec->beta2 = o->beta2;
	rec->eps = o->eps;
	rec->amsgrad = o->amsgrad;
	if (unit_spec_number(o->beta1, 0, SETTING_MAX_BETA1, u->name, "units.optimizer.beta1", f) ||
	    unit_spec_number(o->beta2, 0, SETTING_MAX_BETA2, u->name, "units.optimizer.beta2", f))
		return f->code;
	return unit_spec_number(o->eps, 0, SETTING_MAX_EPS, u->name, "units.optimizer.eps", f);
}

static int unit_spec_optim_decode_choices(state_unit *u, const Shardd__V1__Optimizer *o,
					  struct fault *f)
{
	if ((unsigned)o->profile >= _OPTIM_PROFILE_N)
		return fault_set(f, FAULT_INVALID, "units.optimizer.profile",
				 "unit '%.64s': optimizer.profile is %d; it must be EAGER_SINGLE, "
				 "FOREACH, FUSED or REFERENCE_F64",
				 u->name, o->profile);
	if ((unsigned)o->when >= _OPTIM_WHEN_N)
		return fault_set(f, FAULT_INVALID, "units.optimizer.when",
				 "unit '%.64s': optimizer.when is %d; it must be AT_STEP, "
				 "IN_BACKWARD or BY_TRAINER",
				 u->name, o->when);
	u->optimizer->profile = (uint32_t)o->profile;
	u->optimizer->when = (uint32_t)o->when;
	u->optimizer->maximize = o->maximize;
	return 0;
}

int unit_spec_optimizer(state_unit *u, const Shardd__V1__Optimizer *o, struct fault *f)
{
	state_optimizer *rec = u->optimizer;

	if (!o || (o->kind == SHARDD__V1__OPTIMIZER__KIND__KIND_UNSPECIFIED &&
		   o->when != SHARDD__V1__OPTIMIZER__WHEN__WHEN_BY_TRAINER))
		return 0;
	if ((unsigned)o->kind >= _OPTIM_N)
		return fault_set(
			f, FAULT_INVALID, "units.optimizer.kind",
			"unit '%.64s': optimizer.kind is %d; it must be SGD, ADAMW or ADAM",
			u->name, o->kind);
	if (unit_spec_optim_decode_choices(u, o, f))
		return f->code;
	if (rec->when == OPTIM_BY_TRAINER) {
		if (o->kind == SHARDD__V1__OPTIMIZER__KIND__KIND_UNSPECIFIED)
			return 0;
		return fault_set(
			f, FAULT_INVALID, "units.optimizer.kind",
			"unit '%.64s': optimizer.kind is %d; with BY_TRAINER it must be none",
			u->name, o->kind);
	}
	if (u->storage_dtype != DTYPE_FP32)
		return fault_set(
			f, FAULT_UNIMPLEMENTED, "units.optimizer.kind",
			"unit '%.64s': the daemon's optimizers step parameters in FP32, and "
			"its storage_dtype is %s: give it no optimizer, or one BY_TRAINER, "
			"or store it in FP32",
			u->name, dtype_name((enum dtype)u->storage_dtype));
	if (unit_spec_number(o->lr, 0, SETTING_MAX_LR, u->name, "units.optimizer.lr", f) ||
	    unit_spec_number(o->weight_decay, 0, SETTING_MAX_DECAY, u->name,
			     "units.optimizer.weight_decay", f))
		return f->code;
	rec->kind = (uint32_t)o->kind;
	rec->lr = o->lr;
	rec->weight_decay = o->weight_decay;
	return rec->kind == OPTIM_SGD ? unit_spec_optim_decode_sgd(u, o, f)
				      : unit_spec_optim_decode_adam(u, o, f);
}
