/*
 * shardctl trace: the flight recorder as a file for chrome://tracing and Perfetto: of all jobs, of one, or of several. Of
 * several, one answer about all jobs is cut down to them: so it is of one moment.
 */
#include <errno.h>
#include <getopt.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/check.h"
#include "core/cleanup.h"
#include "ctl/ctl.h"
#include "ctl/format.h"
#include "ctl/trace_events.h"

/* The name of a job as the daemon reads it. */
struct trace_job {
	char buf[CTL_JOB_MAX];
	char *name;    /* in @buf, or an argument */
	bool is_known; /* the daemon has said whose it is: */
	uint32_t owner;
};

struct arguments {
	const char *file; /* NULL: not said */
	bool all;         /* that was said */
	struct trace_job *jobs;
	size_t n_jobs;
	struct trace_limits limits;
};

static int trace_parse_number(const char *option, const char *text, uint64_t *ret)
{
	if (format_parse_number(text, UINT32_MAX, ret) && *ret)
		return CTL_OK;
	return ctl_usage("--%s \"%s\" is not a whole number from 1 to %u", option, text,
			 UINT32_MAX);
}

static int trace_parse_option(struct arguments *a, int o)
{
	switch (o) {
	case 'o':
		a->file = optarg;
		return CTL_OK;
	case 'a':
		a->all = true;
		return CTL_OK;
	case 's':
		return trace_parse_number("seconds", optarg, &a->limits.seconds);
	case 'l':
		return trace_parse_number("last", optarg, &a->limits.last);
	default:
		return CTL_USAGE;
	}
}

static int trace_parse_jobs(struct arguments *a, int n, char **names)
{
	int r = CTL_OK;

	if (n && a->all)
		return ctl_usage("trace takes names of jobs or --all, not both");
	a->jobs = calloc((size_t)n + 1, sizeof(*a->jobs));
	if (!a->jobs)
		return ctl_broken();
	for (int i = 0; r == CTL_OK && i < n; i++, a->n_jobs++)
		r = ctl_job_name(names[i], a->jobs[i].buf, &a->jobs[i].name);
	return r;
}

static int trace_parse(struct arguments *a, int argc, char **argv)
{
	static const struct option options[] = {
		{ "output", required_argument, NULL, 'o' },
		{ "all", no_argument, NULL, 'a' },
		{ "seconds", required_argument, NULL, 's' },
		{ "last", required_argument, NULL, 'l' },
		{ 0 },
	};
	int o, r = CTL_OK;

	while (r == CTL_OK && (o = ctl_getopt(argc, argv, "o:", options, NULL)) != -1)
		r = trace_parse_option(a, o);
	if (r != CTL_OK)
		return r;
	if (!a->file || !*a->file)
		return ctl_usage("trace needs -o FILE (- is standard output)");
	return trace_parse_jobs(a, argc - optind, argv + optind);
}

/* -------------------------------------------------------------------- several jobs */

/* Is this one of them? */
static bool trace_wants(const struct arguments *a, uint32_t uid, const char *job)
{
	for (size_t i = 0; i < a->n_jobs; i++) {
		const struct trace_job *j = &a->jobs[i];
		const char *slash;

		CHECK(j->name); /* parsed */
		slash = strchr(j->name, '/');
		if (j->is_known && j->owner == uid && strcmp(slash ? slash + 1 : j->name, job) == 0)
			return true;
	}
	return false;
}

/* Drop the records of other jobs. */
static void trace_choose(const struct arguments *a, Shardd__V1__OpsResponse *reply)
{
	size_t n = 0;

	for (size_t i = 0; i < reply->n_ops; i++)
		if (trace_wants(a, reply->ops[i]->uid, reply->ops[i]->job))
			reply->ops[n++] = reply->ops[i];
		else
			protobuf_c_message_free_unpacked(&reply->ops[i]->base, NULL);
	reply->n_ops = n;
	n = 0;
	for (size_t i = 0; i < reply->n_devices; i++)
		if (trace_wants(a, reply->devices[i]->uid, reply->devices[i]->job))
			reply->devices[n++] = reply->devices[i];
		else
			protobuf_c_message_free_unpacked(&reply->devices[i]->base, NULL);
	reply->n_devices = n;
	n = 0;
	for (size_t i = 0; i < reply->n_publications; i++)
		if (trace_wants(a, reply->publications[i]->uid, reply->publications[i]->job))
			reply->publications[n++] = reply->publications[i];
		else
			protobuf_c_message_free_unpacked(&reply->publications[i]->base, NULL);
	reply->n_publications = n;
}

static int trace_call(struct ctl *ctl, const Shardd__V1__OpsRequest *request,
		      ProtobufCMessage **ret)
{
	return ctl_call(ctl, "/shardd.v1.StatusService/Ops", &request->base,
			&shardd__v1__ops_response__descriptor, ret);
}

static void trace_learn(struct trace_job *j, const Shardd__V1__OpsResponse *reply)
{
	j->is_known = reply->n_ops > 0;
	j->owner = j->is_known ? reply->ops[0]->uid : 0;
}

/* Does the daemon know them all? It says what is wrong. A name without a user may be of another one's job: it says whose, if
 * it has ops. */
static int trace_check(struct ctl *ctl, const struct arguments *a)
{
	Shardd__V1__OpsRequest request = SHARDD__V1__OPS_REQUEST__INIT;
	int r = CTL_OK;

	request.limit = 1;
	for (size_t i = 0; r == CTL_OK && i < a->n_jobs; i++) {
		_cleanup_(ctl_messagep) ProtobufCMessage *reply = NULL;

		request.job = a->jobs[i].name;
		r = trace_call(ctl, &request, &reply);
		if (r == CTL_OK)
			trace_learn(&a->jobs[i], (const Shardd__V1__OpsResponse *)reply);
	}
	return r;
}

static int trace_ask(struct ctl *ctl, const struct arguments *a, ProtobufCMessage **ret)
{
	Shardd__V1__OpsRequest request = SHARDD__V1__OPS_REQUEST__INIT;
	int r = a->n_jobs > 1 ? trace_check(ctl, a) : CTL_OK;

	request.with_devices = true;
	request.with_publications = true;
	if (a->n_jobs == 1)
		request.job = a->jobs[0].name;
	if (r == CTL_OK)
		r = trace_call(ctl, &request, ret);
	if (r == CTL_OK && a->n_jobs > 1)
		trace_choose(a, (Shardd__V1__OpsResponse *)*ret);
	return r;
}

/* ------------------------------------------------------------------------ the file */

static int trace_refuse(const char *code, const char *file, int error, int exit_code)
{
	fprintf(stderr, "shardctl: %s: cannot write the file \"%s\": %s\n", code, file,
		strerror(error));
	return exit_code;
}

/* Programs read it: no blank more than it needs. */
static int trace_write_trace(FILE *out, const json_t *trace)
{
	return json_dumpf(trace, out, JSON_COMPACT) < 0 || fputc('\n', out) == EOF ? -1 : 0;
}

static int trace_write_file(const char *file, const json_t *trace)
{
	FILE *out = fopen(file, "we");
	int error = 0;

	if (!out)
		return trace_refuse("INVALID_ARGUMENT", file, errno, CTL_USAGE);
	errno = 0;
	if (trace_write_trace(out, trace) < 0)
		error = errno ? errno : EIO;
	if (fclose(out) != 0 && !error)
		error = errno;
	return error ? trace_refuse("RESOURCE_EXHAUSTED", file, error, CTL_FAILED) : CTL_OK;
}

static int trace_run(struct ctl *ctl, const struct arguments *a)
{
	_cleanup_(ctl_messagep) ProtobufCMessage *reply = NULL;
	_cleanup_(json_freep) json_t *trace = NULL;
	int r = trace_ask(ctl, a, &reply);

	if (r != CTL_OK)
		return r;
	trace = trace_events((const Shardd__V1__OpsResponse *)reply, &a->limits);
	if (!trace)
		return ctl_broken();
	CHECK(a->file); /* parsed: there is no other way here */
	if (strcmp(a->file, "-") == 0)
		return trace_write_trace(stdout, trace) < 0 ? ctl_broken() : CTL_OK;
	return trace_write_file(a->file, trace);
}

int ctl_trace(struct ctl *ctl, int argc, char **argv)
{
	struct arguments a = { 0 };
	int r = trace_parse(&a, argc, argv);

	if (r == CTL_OK)
		r = trace_run(ctl, &a);
	free(a.jobs);
	return r;
}
