/*
 * Audit log: one line for each create, join, leave, drain, delete and refusal, with uid, pid
 * and job. A user who does that in a loop gets 10 lines a second; the next line says how many
 * were skipped. Loop thread only.
 */
#ifndef SHARDD_RPC_AUDIT_H
#define SHARDD_RPC_AUDIT_H

#include "core/fault.h"
#include "core/proc.h"

/* "job EVENT uid= pid= job= ...". @job: its label. @fmt: further key=value pairs, or "". */
void audit(const struct proc *who, const char *event, const char *job, const char *fmt, ...)
	__attribute__((format(printf, 4, 5)));

/* "daemon EVENT uid= pid= ...": of the daemon itself. */
void audit_daemon(const struct proc *who, const char *event, const char *fmt, ...)
	__attribute__((format(printf, 3, 4)));

/* "refused what=EVENT uid= pid= job= code= why=". @job: the name that the client sent, any text. */
void audit_refused(const struct proc *who, const char *event, const char *job,
		   const struct fault *why);

#endif
