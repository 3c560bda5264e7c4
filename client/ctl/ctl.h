/*
 * shardctl: what its verbs have in common.
 *
 * A verb is a function in a separate file. It reads its arguments, makes its
 * calls, prints, and returns the exit code. One thread.
 */
#ifndef SHARDD_CTL_CTL_H
#define SHARDD_CTL_CTL_H

#include <jansson.h>
#include <stdbool.h>
#include <stdint.h>

#include "json/json.h"
#include "ctl/table.h"
#include "rpc_client.h"
#include "status.pb-c.h"

#define CTL_USER_MAX     33
#define CTL_PRIORITY_MAX 100
#define CTL_JOB_MAX      128

enum ctl_exit {
	CTL_OK = 0,
	CTL_FAILED = 1, /* the daemon answered with an error */
	CTL_USAGE = 2,
	CTL_UNREACHABLE = 3,
};

struct ctl {
	const char *socket; /* of the daemon; borrowed */
	bool json;
	bool color;
	size_t width;           /* columns of a line of a table; 0: no limit */
	struct rpc_client *rpc; /* NULL until the first call */
	unsigned printed;       /* sections so far: a blank line goes between them */
};

struct ctl_verb {
	const char *name;
	const char *arguments; /* for the usage text */
	const char *help;
	int (*run)(struct ctl *ctl, int argc, char **argv); /* argv[0]: the verb */
	const char *usage; /* its forms, a line each; NULL: name and arguments are the only one */
};

int ctl_status(struct ctl *ctl, int argc, char **argv);
int ctl_top(struct ctl *ctl, int argc, char **argv);
int ctl_blame(struct ctl *ctl, int argc, char **argv);
int ctl_slow(struct ctl *ctl, int argc, char **argv);
int ctl_memory(struct ctl *ctl, int argc, char **argv);
int ctl_plan(struct ctl *ctl, int argc, char **argv);
int ctl_jobs(struct ctl *ctl, int argc, char **argv);
int ctl_publications(struct ctl *ctl, int argc, char **argv);
int ctl_units(struct ctl *ctl, int argc, char **argv);
int ctl_history(struct ctl *ctl, int argc, char **argv);
int ctl_events(struct ctl *ctl, int argc, char **argv);
int ctl_sessions(struct ctl *ctl, int argc, char **argv);
int ctl_users(struct ctl *ctl, int argc, char **argv);
int ctl_ops(struct ctl *ctl, int argc, char **argv);
int ctl_trace(struct ctl *ctl, int argc, char **argv);
int ctl_health(struct ctl *ctl, int argc, char **argv);
int ctl_job(struct ctl *ctl, int argc, char **argv);
int ctl_cordon(struct ctl *ctl, int argc, char **argv);
int ctl_uncordon(struct ctl *ctl, int argc, char **argv);
int ctl_drain(struct ctl *ctl, int argc, char **argv);
int ctl_handover(struct ctl *ctl, int argc, char **argv);
int ctl_shutdown(struct ctl *ctl, int argc, char **argv);
int ctl_run(struct ctl *ctl, int argc, char **argv);
int ctl_checkpoint(struct ctl *ctl, int argc, char **argv);

/* "shardctl: INVALID_ARGUMENT: <sentence>" on stderr. Return: CTL_USAGE. */
int ctl_usage(const char *fmt, ...) __attribute__((format(printf, 1, 2)));

struct option;
/* getopt_long, whose sentences are those of ctl_usage. */
int ctl_getopt(int argc, char **argv, const char *letters, const struct option *options,
	       int *which);

/* Refuse arguments after the verb. Return: CTL_OK or CTL_USAGE. */
int ctl_no_arguments(int argc, char **argv);

/* Print a sentence on stderr as the error @code, without what a terminal would obey: it may have been
 * made from what another user or a file says. */
void ctl_print_error(const char *code, const char *fmt, ...) __attribute__((format(printf, 2, 3)));

/* Print @err on stderr. Return: CTL_UNREACHABLE or CTL_FAILED. */
int ctl_error(const struct shardd_error *err);

/* Report that memory is exhausted or stdout cannot be written. Return: CTL_FAILED. */
int ctl_broken(void);

/* The same with a short time, for a call that something else must not wait for. */
int ctl_call_soon(struct ctl *ctl, const char *method, const ProtobufCMessage *request,
		  const ProtobufCMessageDescriptor *reply, ProtobufCMessage **ret);

/* Make a call; connect first if not done yet. Errors are printed. @ret: belongs to the
 * caller (protobuf_c_message_free_unpacked). Return: an exit code. */
int ctl_call(struct ctl *ctl, const char *method, const ProtobufCMessage *request,
	     const ProtobufCMessageDescriptor *reply, ProtobufCMessage **ret);
/* The same for a call that may take hours. */
int ctl_call_long(struct ctl *ctl, const char *method, const ProtobufCMessage *request,
		  const ProtobufCMessageDescriptor *reply, ProtobufCMessage **ret);

/* StatusService.GetStatus. @ret: shardd__v1__get_status_response__free_unpacked. */
int ctl_get_status(struct ctl *ctl, const Shardd__V1__GetStatusRequest *request,
		   Shardd__V1__GetStatusResponse **ret);
/* The same; @ret_missing: there is no such job, which is not printed. */
int ctl_try_status(struct ctl *ctl, const Shardd__V1__GetStatusRequest *request,
		   Shardd__V1__GetStatusResponse **ret, bool *ret_missing);

/* An answer has nothing of @job, a name as the daemon gets it: is there such a job? @none: what else there is not.
 * Return: CTL_OK, or an exit code, told. */
int ctl_must_exist(struct ctl *ctl, const char *job, const char *none);

/* Print @j (consumed; NULL: no memory). Return: an exit code. */
int ctl_print_json(json_t *j);

/* Print @t under a title (NULL: none). Return: an exit code. */
int ctl_print_table(struct ctl *ctl, const char *title, const struct table *t);

/* Print a sentence, which may be several lines then: @indent blanks before the first one, and two
 * more before the others. Control characters are replaced. Return: an exit code. */
int ctl_print_sentence(struct ctl *ctl, unsigned indent, const char *fmt, ...)
	__attribute__((format(printf, 3, 4)));

/* Translate a job's name as given by the caller: NAME for its own user, else UID/NAME or USER/NAME.
 * The daemon knows no user names. @buf: receives the name. Return: CTL_OK, or CTL_USAGE
 * (printed). */
int ctl_job_name(const char *given, char buf[CTL_JOB_MAX], char **ret);
/* The argument of --priority. Return: CTL_OK or CTL_USAGE, told. */
int ctl_priority(const char *text, int32_t *ret);
/* The arguments of a verb that takes no option, and one job or none: as above. */
int ctl_optional_job(int argc, char **argv, char buf[CTL_JOB_MAX], char **ret);

/* @path as a process with another working directory finds it, without links. What does not exist here
 * may exist there, and has its name. Return: the caller's to free; NULL without memory. */
char *ctl_absolute(const char *path);

/* A user's name, or its number. Return: @buf. */
const char *ctl_user(uint32_t uid, char buf[CTL_USER_MAX]);

/* A job in a table: NAME, or USER/NAME of another user's; - for none. */
void ctl_job_cell(struct table *t, uint32_t uid, const char *name);
/* The last commit of a job, and how far its parameters are past it: "10", "10+3", "10+?" if nobody
 * knows; without a commit the step of the parameters, or "-". */
void ctl_step_cell(struct table *t, const Shardd__V1__JobStatus *j);
/* A job's name as the daemon gets it, NAME or UID/NAME, as people read it. Return: @buf. */
const char *ctl_said_job(const char *job, char buf[CTL_JOB_MAX]);
void ctl_job_text(uint32_t uid, const char *name, char buf[CTL_JOB_MAX]);

/* Bytes of the class @name; 0 if there is none. */
uint64_t ctl_class(Shardd__V1__ClassBytes *const *classes, size_t n, const char *name);

/* Colours for the states of jobs, ranks and ops. */
enum table_color ctl_state_color(const char *state);
/* The job's state; STALLED while it does. */
void ctl_job_state_cell(struct table *t, const Shardd__V1__JobStatus *j);

static inline void ctl_status_freep(Shardd__V1__GetStatusResponse **r)
{
	if (*r)
		shardd__v1__get_status_response__free_unpacked(*r, NULL);
	*r = NULL;
}

static inline void ctl_messagep(ProtobufCMessage **m)
{
	if (*m)
		protobuf_c_message_free_unpacked(*m, NULL);
	*m = NULL;
}

#endif
