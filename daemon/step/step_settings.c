/*
 * The settings of a Step and of a PlanBackward: what they say of tensors, and of all that they do
 * not name. All is checked before anything is kept. What is kept is bounded by the job's tensors:
 * each can be named once, and all settings but one must name some.
 */
#include "step/step_settings.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>

#include "core/check.h"
#include "core/cleanup.h"
#include "op/op.h"
#include "unit/settings.h"
#include "shardd.pb-c.h"

typedef Shardd__V1__StepSettings message;

static void step_settings_unrefp(struct settings **s)
{
	*s = settings_unref(*s);
}

int step_settings_check_lr(const struct step_rates *rates, struct fault *f)
{
	if (!rates->has_lr || (isfinite(rates->lr) && rates->lr >= 0))
		return 0;
	return fault_set(f, FAULT_INVALID, "lr", "lr is %g; it must be 0 or a positive number",
			 rates->lr);
}

/* ----------------------------------------------------------------- the numbers */

static int step_settings_check_number(double x, double most, const char *field, struct fault *f)
{
	if (isfinite(x) && x >= 0 && x <= most)
		return 0;
	return fault_set(f, FAULT_INVALID, field, "%s is %g; it must be 0 to %.9g", field, x, most);
}

static int step_settings_check_numbers(const message *m, struct fault *f)
{
	const struct {
		double x, most;
		const char *field;
	} all[] = {
		{ m->lr, SETTING_MAX_LR, "settings.lr" },
		{ m->weight_decay, SETTING_MAX_DECAY, "settings.weight_decay" },
		{ m->momentum, SETTING_MAX_MOMENTUM, "settings.momentum" },
		{ m->dampening, SETTING_MAX_MOMENTUM, "settings.dampening" },
		{ m->beta1, SETTING_MAX_BETA1, "settings.beta1" },
		{ m->beta2, SETTING_MAX_BETA2, "settings.beta2" },
		{ m->eps, SETTING_MAX_EPS, "settings.eps" },
	};

	for (size_t i = 0; i < ARRAY_SIZE(all); i++)
		if (step_settings_check_number(all[i].x, all[i].most, all[i].field, f))
			return f->code;
	if (m->nesterov && (m->momentum == 0 || m->dampening != 0))
		return fault_set(f, FAULT_INVALID, "settings.nesterov",
				 "settings.nesterov needs a momentum above 0 and no dampening");
	return 0;
}

static struct setting step_settings_setting_from(const message *m)
{
	return (struct setting){ .lr = m->lr,
				 .lr_fp32 = m->lr_fp32,
				 .weight_decay = m->weight_decay,
				 .momentum = m->momentum,
				 .dampening = m->dampening,
				 .beta1 = m->beta1,
				 .beta2 = m->beta2,
				 .eps = m->eps,
				 .nesterov = m->nesterov,
				 .maximize = m->maximize };
}

/* --------------------------------------------------------------- whose they are */

/* How many tensors are named, at most each of the job once: before memory is taken for them. */
static int step_settings_count_named(const struct op *op, message *const *list, size_t n,
				     uint32_t *ret, struct fault *f)
{
	const struct job *job = op->m->job;
	size_t there = 0, named = 0, without = 0;

	for (uint32_t i = 0; i < job->n_units; i++)
		there += job->units[i]->rec->n_tensors;
	for (size_t i = 0; i < n; i++) {
		if (list[i]->n_units != list[i]->n_tensors)
			return fault_set(f, FAULT_INVALID, "settings.tensors",
					 "settings.tensors has %zu entries and settings.units %zu; "
					 "both must have as many",
					 list[i]->n_tensors, list[i]->n_units);
		named += list[i]->n_units;
		without += !list[i]->n_units;
	}
	if (named > there)
		return fault_set(f, FAULT_INVALID, "settings.tensors",
				 "settings name %zu tensors; job '%s' has %zu", named,
				 job->rec->name, there);
	if (without > 1)
		return fault_set(f, FAULT_INVALID, "settings.units",
				 "%zu settings name no tensors; the maximum is one, for all others",
				 without);
	*ret = (uint32_t)named;
	return 0;
}

static int step_settings_no_memory_for(const struct unit *u, struct fault *f)
{
	return fault_set(f, FAULT_INVALID, "settings.momentum",
			 "unit '%.100s' was registered with momentum 0 and has no memory for it: "
			 "give 0",
			 u->rec->name);
}

static bool step_settings_lacks_memory(const struct unit *u, const struct setting *s)
{
	return u->rec->optimizer->kind == OPTIM_SGD && s->momentum != 0 &&
	       u->rec->optimizer->momentum == 0;
}

static int step_settings_check_unit(const struct op *op, const struct unit *u, uint32_t id,
				    struct fault *f)
{
	if (!u)
		return fault_set(f, FAULT_NOT_FOUND, "settings.units",
				 "there is no unit %u in job '%s': its units are 1 to %u", id,
				 op->m->job->rec->name, op->m->job->n_units);
	if (u->rec->group != op->group->id)
		return fault_set(f, FAULT_INVALID, "settings.units",
				 "unit %u ('%.100s') is of another group than '%.64s'", id,
				 u->rec->name, op->group->rec->name);
	if (u->rec->optimizer->kind == OPTIM_NONE)
		return fault_set(f, FAULT_INVALID, "settings.units",
				 "unit %u ('%.100s') has no optimizer", id, u->rec->name);
	return 0;
}

static int step_settings_check_named(const struct op *op, const struct setting_of *of,
				     const struct setting *s, struct fault *f)
{
	const struct unit *u = job_unit_by_id(op->m->job, of->unit);

	if (step_settings_check_unit(op, u, of->unit, f))
		return f->code;
	if (of->tensor >= u->rec->n_tensors)
		return fault_set(f, FAULT_INVALID, "settings.tensors",
				 "there is no tensor %u in unit '%.100s': it has %zu", of->tensor,
				 u->rec->name, u->rec->n_tensors);
	if (u->tensors[of->tensor].frozen || u->tensors[of->tensor].alias)
		return fault_set(f, FAULT_INVALID, "settings.tensors",
				 "tensor '%.100s' of unit '%.100s' is frozen or another's name: it "
				 "is not stepped",
				 u->rec->tensors[of->tensor]->name, u->rec->name);
	return step_settings_lacks_memory(u, s) ? step_settings_no_memory_for(u, f) : 0;
}

/* Would @u be stepped by those that name nothing? */
static bool step_settings_gets_rest(const struct settings *s, const struct unit *u)
{
	for (uint32_t i = 0; i < u->rec->n_tensors; i++)
		if (!u->tensors[i].frozen && !u->tensors[i].alias &&
		    !settings_names_tensor(s, u->id, i))
			return true;
	return false;
}

static int step_settings_check_rest(const struct op *op, const struct settings *s, struct fault *f)
{
	const struct job *job = op->m->job;

	for (uint32_t i = 0; s->rest != UINT32_MAX && i < job->n_units; i++) {
		const struct unit *u = job->units[i];

		if (!u->rec->dropped && u->rec->group == op->group->id &&
		    step_settings_lacks_memory(u, &s->all[s->rest]) &&
		    step_settings_gets_rest(s, u))
			return step_settings_no_memory_for(u, f);
	}
	return 0;
}

static int step_settings_check_all(const struct op *op, struct settings *s, struct fault *f)
{
	const struct setting_of *twice = settings_sort(s);

	for (uint32_t i = 0; i < s->n_named; i++)
		if (step_settings_check_named(op, &s->named[i], &s->all[s->named[i].index], f))
			return f->code;
	if (twice)
		return fault_set(f, FAULT_INVALID, "settings.tensors",
				 "tensor %u of unit %u is named twice", twice->tensor, twice->unit);
	return step_settings_check_rest(op, s, f);
}

/* ------------------------------------------------------------------- all of it */

static int step_settings_fill(struct settings *s, message *const *list, struct fault *f)
{
	uint32_t at = 0;

	for (uint32_t i = 0; i < s->n; i++) {
		if (step_settings_check_numbers(list[i], f))
			return f->code;
		s->all[i] = step_settings_setting_from(list[i]);
		if (!list[i]->n_units)
			s->rest = i;
		for (size_t k = 0; k < list[i]->n_units; k++)
			s->named[at++] =
				(struct setting_of){ list[i]->units[k], list[i]->tensors[k], i };
	}
	CHECK(at == s->n_named);
	return 0;
}

int step_settings_take(const struct op *op, message *const *list, size_t n,
		       struct step_rates *rates, struct fault *f)
{
	_cleanup_(step_settings_unrefp) struct settings *s = NULL;
	uint32_t named = 0;

	if (!n)
		return 0;
	if (step_settings_count_named(op, list, n, &named, f))
		return f->code;
	s = settings_new((uint32_t)n, named); /* no more than what is named, and one */
	if (!s)
		return fault_errno(f, -ENOMEM, "taking the settings of a step");
	if (user_charge(&s->charge, op->m->user, USER_MEMORY, settings_bytes(s->n, named), f))
		return f->code;
	if (step_settings_fill(s, list, f) || step_settings_check_all(op, s, f))
		return f->code;
	rates->settings = settings_ref(s);
	return 0;
}

const char *step_settings_text(const struct step_rates *rates, char *buf)
{
	const struct settings *s = rates->settings;
	int n = 0;

	buf[0] = '\0';
	if (rates->has_lr)
		n = snprintf(buf, STEP_SETTINGS_TEXT, " with lr %.17g", rates->lr);
	if (s)
		snprintf(buf + n, STEP_SETTINGS_TEXT - (size_t)n,
			 " with %u settings (first lr %.9g, weight_decay %.9g; word %08x)", s->n,
			 s->all[0].lr, s->all[0].weight_decay, (unsigned)settings_word(s));
	return buf;
}
