#include "client_error.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

const char *shardd_version(void)
{
	return SHARDD_VERSION;
}

int error_set(struct shardd_error *err, enum shardd_code code, const char *field, const char *fmt,
	      ...)
{
	va_list ap;

	if (!err)
		return -(int)code;
	*err = (struct shardd_error){ .code = (int)code, .domain = "shardd" };
	if (field)
		snprintf(err->field, sizeof(err->field), "%s", field);
	va_start(ap, fmt);
	vsnprintf(err->text, sizeof(err->text), fmt, ap);
	va_end(ap);
	return -(int)code;
}

int error_os(struct shardd_error *err, enum shardd_code code, int native, const char *fmt, ...)
{
	va_list ap;
	size_t n;

	if (!err)
		return -(int)code;
	*err = (struct shardd_error){ .code = (int)code, .native = native, .domain = "os" };
	va_start(ap, fmt);
	vsnprintf(err->text, sizeof(err->text), fmt, ap);
	va_end(ap);
	n = strlen(err->text);
	snprintf(err->text + n, sizeof(err->text) - n, ": %s", strerrordesc_np(native));
	return -(int)code;
}

bool error_is_again(int r, const struct shardd_error *err)
{
	return r == -SHARDD_DEADLINE_EXCEEDED && err && err->native == EAGAIN;
}

int error_lost(struct shardd_error *err, const char *fmt, ...)
{
	va_list ap;

	if (!err)
		return -SHARDD_UNAVAILABLE;
	*err = (struct shardd_error){ .code = SHARDD_UNAVAILABLE,
				      .native = ECONNRESET,
				      .domain = "os" };
	va_start(ap, fmt);
	vsnprintf(err->text, sizeof(err->text), fmt, ap);
	va_end(ap);
	return -SHARDD_UNAVAILABLE;
}

bool error_is_lost(int r, const struct shardd_error *err)
{
	return r == -SHARDD_UNAVAILABLE && err && err->native == ECONNRESET;
}

int error_memory(struct shardd_error *err)
{
	error_set(err, SHARDD_RESOURCE_EXHAUSTED, NULL, "this process is out of memory");
	if (err) {
		err->native = ENOMEM;
		snprintf(err->domain, sizeof(err->domain), "os");
	}
	return -SHARDD_RESOURCE_EXHAUSTED;
}
