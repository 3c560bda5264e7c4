#include "rpc/audit.h"

#include <stdarg.h>
#include <stdio.h>

#include "core/clock.h"
#include "core/log.h"
#include "core/pace.h"
#include "core/text.h"

/* The daemon's one. */
static struct pace audit_pace = { .burst = 100, .a_second = 10 };

/* " skipped=N", or nothing. Return: may the line be written? */
static bool audit_may(const struct proc *who, char *buf, size_t bytes)
{
	uint64_t skipped = 0;

	if (!pace_take(&audit_pace, proc_uid(who), clock_now_us(), &skipped))
		return false;
	buf[0] = '\0';
	if (skipped)
		snprintf(buf, bytes, " skipped=%llu", (unsigned long long)skipped);
	return true;
}

void audit(const struct proc *who, const char *event, const char *job, const char *fmt, ...)
{
	char skipped[48], more[160];
	va_list ap;

	if (!audit_may(who, skipped, sizeof(skipped)))
		return;
	va_start(ap, fmt);
	vsnprintf(more, sizeof(more), fmt, ap);
	va_end(ap);
	log_info("rpc", "job %s uid=%u pid=%d job=%s%s%s%s", event, (unsigned)proc_uid(who),
		 (int)proc_pid(who), job, *more ? " " : "", more, skipped);
}

void audit_daemon(const struct proc *who, const char *event, const char *fmt, ...)
{
	char skipped[48], more[160];
	va_list ap;

	if (!audit_may(who, skipped, sizeof(skipped)))
		return;
	va_start(ap, fmt);
	vsnprintf(more, sizeof(more), fmt, ap);
	va_end(ap);
	log_info("rpc", "daemon %s uid=%u pid=%d %s%s", event, (unsigned)proc_uid(who),
		 (int)proc_pid(who), more, skipped);
}

/* Show text that a client has sent, so that it cannot look like further keys of the line. */
static void audit_quote(char *buf, size_t bytes, const char *text)
{
	text_copy(buf, bytes, text);
	for (char *c = buf; *c; c++)
		if (*c == '"' || *c == '\\')
			*c = '\'';
}

void audit_refused(const struct proc *who, const char *event, const char *job,
		   const struct fault *why)
{
	char skipped[48], name[76], text[301];

	if (!audit_may(who, skipped, sizeof(skipped)))
		return;
	audit_quote(name, sizeof(name), job);
	audit_quote(text, sizeof(text), why->text);
	log_warn("rpc", "refused what=%s uid=%u pid=%d job=\"%s\" code=%s why=\"%s\"%s", event,
		 (unsigned)proc_uid(who), (int)proc_pid(who), name, fault_code_name(why->code),
		 text, skipped);
}
