/* The settings of a step as they are sent. */
#ifndef SHARDD_CLIENT_SETTINGS_H
#define SHARDD_CLIENT_SETTINGS_H

#include "shardd.pb-c.h"
#include "shardd/shardd.h"

/* @n of them as messages, which point into @from. @ret: one block, the caller's to free; NULL of
 * none. Any thread. Return: 0 or a negative shardd_code. */
int settings_out(const struct shardd_step_settings *from, size_t n, Shardd__V1__StepSettings ***ret,
		 struct shardd_error *err);

#endif
