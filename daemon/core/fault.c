#include "core/fault.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "core/check.h"

int fault_set(struct fault *f, enum fault_code code, const char *field, const char *fmt, ...)
{
	va_list ap;

	CHECK(code > FAULT_NONE && code < _FAULT_N);
	if (f->code != FAULT_NONE)
		return f->code;
	*f = (struct fault){ .code = code };
	snprintf(f->field, sizeof(f->field), "%s", field ? field : "");
	va_start(ap, fmt);
	vsnprintf(f->text, sizeof(f->text), fmt, ap);
	va_end(ap);
	return code;
}

static bool fault_is_shortage(int e)
{
	return e == ENOMEM || e == ENOSPC || e == EMFILE || e == ENFILE || e == EDQUOT;
}

int fault_errno(struct fault *f, int negative_errno, const char *what)
{
	int e = -negative_errno;
	char buf[128];

	if (f->code != FAULT_NONE)
		return f->code;
	fault_set(f, fault_is_shortage(e) ? FAULT_EXHAUSTED : FAULT_INTERNAL, NULL, "%s: %s", what,
		  strerror_r(e, buf, sizeof(buf)));
	f->domain = FAULT_DOMAIN_OS;
	f->native = e;
	return f->code;
}

const char *fault_code_name(enum fault_code code)
{
	static const char *const names[_FAULT_N] = {
		[FAULT_NONE] = "OK",
		[FAULT_INVALID] = "INVALID_ARGUMENT",
		[FAULT_STATE] = "FAILED_PRECONDITION",
		[FAULT_NOT_FOUND] = "NOT_FOUND",
		[FAULT_DENIED] = "PERMISSION_DENIED",
		[FAULT_EXHAUSTED] = "RESOURCE_EXHAUSTED",
		[FAULT_ABORTED] = "ABORTED",
		[FAULT_DEADLINE] = "DEADLINE_EXCEEDED",
		[FAULT_CANCELLED] = "CANCELLED",
		[FAULT_UNAVAILABLE] = "UNAVAILABLE",
		[FAULT_UNIMPLEMENTED] = "UNIMPLEMENTED",
		[FAULT_LOST] = "DATA_LOSS",
		[FAULT_INTERNAL] = "INTERNAL",
	};

	return code < _FAULT_N ? names[code] : "?";
}

const char *fault_domain_name(enum fault_domain domain)
{
	static const char *const names[_FAULT_DOMAIN_N] = { "shardd", "os", "cuda", "nccl" };

	return domain < _FAULT_DOMAIN_N ? names[domain] : "?";
}
