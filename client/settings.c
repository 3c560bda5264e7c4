#include "settings.h"

#include <stdlib.h>

#include "client_error.h"

static void settings_setting_out(const struct shardd_step_settings *from,
				 Shardd__V1__StepSettings *to)
{
	*to = (Shardd__V1__StepSettings)SHARDD__V1__STEP_SETTINGS__INIT;
	to->lr = from->lr;
	to->lr_fp32 = from->lr_fp32;
	to->weight_decay = from->weight_decay;
	to->momentum = from->momentum;
	to->dampening = from->dampening;
	to->nesterov = from->nesterov;
	to->beta1 = from->beta1;
	to->beta2 = from->beta2;
	to->eps = from->eps;
	to->maximize = from->maximize;
	to->units = (uint32_t *)from->units;
	to->tensors = (uint32_t *)from->tensors;
	to->n_units = to->n_tensors = from->n;
}

static int settings_check_settings(const struct shardd_step_settings *s, size_t n,
				   struct shardd_error *err)
{
	if (n && !s)
		return error_set(err, SHARDD_INVALID_ARGUMENT, "settings",
				 "settings is NULL, but n_settings is %zu", n);
	for (size_t i = 0; i < n; i++)
		if (s[i].n && (!s[i].units || !s[i].tensors))
			return error_set(err, SHARDD_INVALID_ARGUMENT, "settings.units",
					 "settings[%zu].units or tensors is NULL, but n is %zu", i,
					 s[i].n);
	return 0;
}

int settings_out(const struct shardd_step_settings *from, size_t n, Shardd__V1__StepSettings ***ret,
		 struct shardd_error *err)
{
	Shardd__V1__StepSettings **list, *all;
	int r = settings_check_settings(from, n, err);

	*ret = NULL;
	if (r < 0 || !n)
		return r;
	list = calloc(n, sizeof(*list) + sizeof(*all));
	if (!list)
		return error_memory(err);
	all = (Shardd__V1__StepSettings *)(list + n);
	for (size_t i = 0; i < n; i++) {
		list[i] = &all[i];
		settings_setting_out(&from[i], list[i]);
	}
	*ret = list;
	return 0;
}
