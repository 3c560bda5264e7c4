/*
 * The optimizer settings of a step: they replace the registered settings of units and tensors, for
 * the tensors that the step names, and optionally for all others.
 *
 * Created from a request (op/step_settings.c) and not changed afterwards. Each user holds a
 * reference: the ops that ask for them, the plan of a pass, the prepared step. Loop thread only.
 */
#ifndef SHARDD_UNIT_SETTINGS_H
#define SHARDD_UNIT_SETTINGS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "core/user.h"

/* Limits, for units and for steps. All ranges begin at 0. */
#define SETTING_MAX_LR       1e6
#define SETTING_MAX_DECAY    1e6
#define SETTING_MAX_MOMENTUM 1.0
#define SETTING_MAX_BETA1    0.9999999
#define SETTING_MAX_BETA2    0.99999999
#define SETTING_MAX_EPS      1.0

/* All settings for the step of one tensor, except its kind and profile. */
struct setting {
	double lr;
	double weight_decay;
	double momentum, dampening; /* SGD */
	double beta1, beta2, eps;   /* Adam, AdamW */
	bool lr_fp32;               /* Adam, AdamW: lr, and values computed from it, in fp32 */
	bool nesterov;
	bool maximize;
};

/* The tensor that they belong to. */
struct setting_of {
	uint32_t unit, tensor;
	uint32_t index; /* into settings.all */
};

struct settings {
	unsigned refs;
	struct user_charge charge; /* charged to the sender */
	uint32_t rest; /* index of the settings for tensors that are not named; UINT32_MAX: none */
	uint32_t n_named, n;
	struct setting_of *named; /* by unit, then tensor; each once */
	struct setting *all;
};

/* Bytes of that. */
uint64_t settings_bytes(uint32_t n, uint32_t n_named);
/* Make settings with room for @n of them, for @n_named tensors, all zero; rest: none. Return: one
 * reference, or NULL without memory. */
struct settings *settings_new(uint32_t n, uint32_t n_named);
/* NULL is allowed. Return: @s. */
struct settings *settings_ref(struct settings *s);
/* NULL is allowed. Return: NULL. */
struct settings *settings_unref(struct settings *s);

/* Sort the names. Return: one that is there twice, or NULL. */
const struct setting_of *settings_sort(struct settings *s);
/* The settings of @tensor of @unit, borrowed. NULL: its registered settings apply. */
const struct setting *settings_find(const struct settings *s, uint32_t unit, uint32_t tensor);
/* Is any tensor of @unit named? */
bool settings_names(const struct settings *s, uint32_t unit);
/* Is @tensor of @unit? */
bool settings_names_tensor(const struct settings *s, uint32_t unit, uint32_t tensor);
/* For fingerprints: equal settings of the same tensors, in one order, equal words. 0: NULL. */
uint64_t settings_word(const struct settings *s);
/* Do both result in the same step? */
bool setting_same(const struct setting *a, const struct setting *b);

/* The rates and settings of a step. */
struct step_rates {
	bool has_lr; /* for tensors without a setting: replaces the units' own */
	double lr;
	struct settings *settings; /* NULL, or a reference that belongs to this struct */
};

/* Does it set anything? */
static inline bool step_rates_given(const struct step_rates *r)
{
	return r->has_lr || r->settings;
}

/* Make @to equal to @from, with its own reference; the old settings are released. */
void step_rates_copy(struct step_rates *to, const struct step_rates *from);
/* Reset it to set nothing. */
void step_rates_clear(struct step_rates *r);

#endif
