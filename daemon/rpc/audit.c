#include "rpc/audit.h"

#include <stdarg.h>
#include <stdio.h>

#include "core/clock.h"
#include "core/log.h"
#include "core/pace.h"

/* The daemon's one. */
static struct pace audit_pace;

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

void audit_refused(const struct proc *who, const char *event, const char *job,
		   const struct fault *why)
{
	char skipped[48];

	if (!audit_may(who, skipped, sizeof(skipped)))
		return;
	log_warn("rpc", "refused what=%s uid=%u pid=%d job=\"%.75s\" code=%s why=\"%.300s\"%s",
		 event, (unsigned)proc_uid(who), (int)proc_pid(who), job,
		 fault_code_name(why->code), why->text, skipped);
}
