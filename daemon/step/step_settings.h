/*
 * What a request says of the settings of a step. Loop thread only.
 */
#ifndef SHARDD_STEP_STEP_SETTINGS_H
#define SHARDD_STEP_STEP_SETTINGS_H

#include "op/op.h"
#include "shardd.pb-c.h"

/* Take @n of them into @rates, after lr and the op's group: all is checked. Return: 0 or a fault
 * code. */
int step_settings_take(const struct op *op, Shardd__V1__StepSettings *const *list, size_t n,
		       struct step_rates *rates, struct fault *f);
int step_settings_check_lr(const struct step_rates *rates, struct fault *f);

/* Of the fingerprint: what to say of them, behind a text. @buf: room for STEP_SETTINGS_TEXT bytes. */
#define STEP_SETTINGS_TEXT 192
const char *step_settings_text(const struct step_rates *rates, char *buf);

#endif
