/* shardctl trace: the flight recorder as a file for chrome://tracing and Perfetto. */
#include <errno.h>
#include <getopt.h>
#include <stdio.h>
#include <string.h>

#include "core/check.h"
#include "core/cleanup.h"
#include "ctl/ctl.h"
#include "ctl/format.h"
#include "ctl/trace_events.h"

struct arguments {
	const char *file; /* NULL: not said */
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
	case 's':
		return trace_parse_number("seconds", optarg, &a->limits.seconds);
	case 'l':
		return trace_parse_number("last", optarg, &a->limits.last);
	default:
		return CTL_USAGE;
	}
}

static int trace_parse(struct arguments *a, Shardd__V1__OpsRequest *request, char name[CTL_JOB_MAX],
		       int argc, char **argv)
{
	static const struct option options[] = {
		{ "output", required_argument, NULL, 'o' },
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
	if (argc - optind > 1)
		return ctl_usage("trace takes the name of one job");
	if (argc - optind == 1)
		return ctl_job_name(argv[optind], name, &request->job);
	return CTL_OK;
}

static int trace_refuse(const char *file, int error)
{
	fprintf(stderr, "shardctl: INVALID_ARGUMENT: cannot write the file \"%s\": %s\n", file,
		strerror(error));
	return CTL_USAGE;
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
		return trace_refuse(file, errno);
	errno = 0;
	if (trace_write_trace(out, trace) < 0)
		error = errno ? errno : EIO;
	if (fclose(out) != 0 && !error)
		error = errno;
	return error ? trace_refuse(file, error) : CTL_OK;
}

int ctl_trace(struct ctl *ctl, int argc, char **argv)
{
	Shardd__V1__OpsRequest request = SHARDD__V1__OPS_REQUEST__INIT;
	_cleanup_(ctl_messagep) ProtobufCMessage *reply = NULL;
	_cleanup_(json_freep) json_t *trace = NULL;
	struct arguments a = { 0 };
	char name[CTL_JOB_MAX];
	int r = trace_parse(&a, &request, name, argc, argv);

	request.with_devices = true;
	if (r == CTL_OK)
		r = ctl_call(ctl, "/shardd.v1.StatusService/Ops", &request.base,
			     &shardd__v1__ops_response__descriptor, &reply);
	if (r != CTL_OK)
		return r;
	trace = trace_events((const Shardd__V1__OpsResponse *)reply, &a.limits);
	if (!trace)
		return ctl_broken();
	CHECK(a.file); /* parsed: there is no other way here */
	if (strcmp(a.file, "-") == 0)
		return trace_write_trace(stdout, trace) < 0 ? ctl_broken() : CTL_OK;
	return trace_write_file(a.file, trace);
}
