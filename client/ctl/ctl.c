#include "ctl/ctl.h"

#include "ctl/format.h"

#include <ctype.h>
#include <getopt.h>
#include <pwd.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "core/check.h"
#include "core/cleanup.h"
#include "ctl/width.h"

/* A daemon that listens and does not answer for so long hangs. */
#define SHORT_TIMEOUT_MS 1000u
#define CALL_TIMEOUT_MS  10000u
#define LONG_TIMEOUT_MS  (24u * 3600 * 1000)

int ctl_usage(const char *fmt, ...)
{
	va_list ap;

	fputs("shardctl: INVALID_ARGUMENT: ", stderr);
	va_start(ap, fmt);
	vfprintf(stderr, fmt, ap);
	va_end(ap);
	fputs("\nTry `shardctl --help`.\n", stderr);
	return CTL_USAGE;
}

int ctl_getopt(int argc, char **argv, const char *letters, const struct option *options, int *which)
{
	char who[80], *verb = argv[0];
	int o;

	if (strcmp(verb, "shardctl") == 0)
		snprintf(who, sizeof(who), "shardctl: INVALID_ARGUMENT");
	else
		snprintf(who, sizeof(who), "shardctl: INVALID_ARGUMENT: %.40s", verb);
	argv[0] = who; /* with which getopt begins its sentences */
	o = getopt_long(argc, argv, letters, options, which);
	argv[0] = verb;
	if (o == '?')
		fputs("Try `shardctl --help`.\n", stderr);
	return o;
}

int ctl_no_arguments(int argc, char **argv)
{
	return argc > 1 ? ctl_usage("%s takes no argument \"%s\"", argv[0], argv[1]) : CTL_OK;
}

void ctl_print_error(const char *code, const char *fmt, ...)
{
	_cleanup_(freep) char *text = NULL;
	va_list ap;
	int n;

	va_start(ap, fmt);
	n = vasprintf(&text, fmt, ap);
	va_end(ap);
	if (n < 0)
		text = NULL;
	else
		width_clean(text);
	fprintf(stderr, "shardctl: %s: %s\n", code, text ? text : "out of memory");
}

int ctl_error(const struct shardd_error *err)
{
	ctl_print_error(shardd_code_name(err->code), "%s%s", err->text,
			err->code == SHARDD_DEADLINE_EXCEEDED
				? "; the log of the daemon says whether it has started "
				  "(journalctl -u shardd)"
				: "");
	/* The daemon itself says neither of a call that it could answer. */
	if (err->code == SHARDD_UNAVAILABLE || err->code == SHARDD_DEADLINE_EXCEEDED)
		return CTL_UNREACHABLE;
	return CTL_FAILED;
}

int ctl_broken(void)
{
	static bool said;

	if (!said)
		fputs("shardctl: RESOURCE_EXHAUSTED: out of memory, or cannot write the output\n",
		      stderr);
	said = true; /* the end of main finds the same */
	return CTL_FAILED;
}

/* @err: why the call has failed, which is not printed. */
static int ctl_call_within(struct ctl *ctl, uint32_t timeout_ms, const char *method,
			   const ProtobufCMessage *request, const ProtobufCMessageDescriptor *reply,
			   ProtobufCMessage **ret, struct shardd_error *err)
{
	if (!ctl->rpc && rpc_client_connect(ctl->socket, 0, &ctl->rpc, err) < 0)
		return err->code == SHARDD_INVALID_ARGUMENT ? CTL_USAGE : CTL_UNREACHABLE;
	return rpc_client_call(ctl->rpc, method, request, reply, timeout_ms, ret, err) < 0
		       ? CTL_FAILED
		       : CTL_OK;
}

/* Print why a call ended with @r. Return: the exit code. */
static int ctl_tell(int r, const struct shardd_error *err)
{
	int code = ctl_error(err);

	return r == CTL_FAILED ? code : r;
}

static int ctl_call_told(struct ctl *ctl, uint32_t timeout_ms, const char *method,
			 const ProtobufCMessage *request, const ProtobufCMessageDescriptor *reply,
			 ProtobufCMessage **ret)
{
	struct shardd_error err = { 0 };
	int r = ctl_call_within(ctl, timeout_ms, method, request, reply, ret, &err);

	return r == CTL_OK ? r : ctl_tell(r, &err);
}

int ctl_call(struct ctl *ctl, const char *method, const ProtobufCMessage *request,
	     const ProtobufCMessageDescriptor *reply, ProtobufCMessage **ret)
{
	return ctl_call_told(ctl, CALL_TIMEOUT_MS, method, request, reply, ret);
}

int ctl_call_soon(struct ctl *ctl, const char *method, const ProtobufCMessage *request,
		  const ProtobufCMessageDescriptor *reply, ProtobufCMessage **ret)
{
	return ctl_call_told(ctl, SHORT_TIMEOUT_MS, method, request, reply, ret);
}

int ctl_call_long(struct ctl *ctl, const char *method, const ProtobufCMessage *request,
		  const ProtobufCMessageDescriptor *reply, ProtobufCMessage **ret)
{
	return ctl_call_told(ctl, LONG_TIMEOUT_MS, method, request, reply, ret);
}

int ctl_get_status(struct ctl *ctl, const Shardd__V1__GetStatusRequest *request,
		   Shardd__V1__GetStatusResponse **ret)
{
	ProtobufCMessage *reply;
	int r = ctl_call(ctl, "/shardd.v1.StatusService/GetStatus", &request->base,
			 &shardd__v1__get_status_response__descriptor, &reply);

	if (r == CTL_OK)
		*ret = (Shardd__V1__GetStatusResponse *)reply;
	return r;
}

int ctl_try_status(struct ctl *ctl, const Shardd__V1__GetStatusRequest *request,
		   Shardd__V1__GetStatusResponse **ret, bool *ret_missing)
{
	struct shardd_error err = { 0 };
	ProtobufCMessage *reply;
	int r = ctl_call_within(ctl, CALL_TIMEOUT_MS, "/shardd.v1.StatusService/GetStatus",
				&request->base, &shardd__v1__get_status_response__descriptor,
				&reply, &err);

	*ret_missing = r == CTL_FAILED && err.code == SHARDD_NOT_FOUND;
	if (r == CTL_OK)
		*ret = (Shardd__V1__GetStatusResponse *)reply;
	return r == CTL_OK || *ret_missing ? r : ctl_tell(r, &err);
}

int ctl_must_exist(struct ctl *ctl, const char *job, const char *none)
{
	Shardd__V1__GetStatusRequest request = SHARDD__V1__GET_STATUS_REQUEST__INIT;
	_cleanup_(ctl_messagep) ProtobufCMessage *reply = NULL;
	const char *slash = strchr(job, '/');
	char own[CTL_JOB_MAX], user[CTL_USER_MAX];
	struct shardd_error err = { 0 };
	uint32_t uid = slash ? (uint32_t)strtoul(job, NULL, 10) : geteuid();

	/* for root a name alone may be another user's job, too */
	snprintf(own, sizeof(own), "%u/%.100s", uid, slash ? slash + 1 : job);
	request.job = own;
	if (rpc_client_call(ctl->rpc, "/shardd.v1.StatusService/GetStatus", &request.base,
			    &shardd__v1__get_status_response__descriptor, CALL_TIMEOUT_MS, &reply,
			    &err) == 0)
		return CTL_OK;
	if (err.code != SHARDD_NOT_FOUND)
		return ctl_error(&err);
	if (slash)
		ctl_print_error(shardd_code_name(err.code),
				"you see no job \"%.100s\" of user %s, and %s", slash + 1,
				ctl_user(uid, user), none);
	else
		ctl_print_error(shardd_code_name(err.code),
				"you have no job \"%.100s\", and %s (another user's is USER/NAME)",
				job, none);
	return CTL_FAILED;
}

int ctl_print_json(json_t *j)
{
	int r = j ? json_print(j, stdout) : -1;

	json_decref(j);
	return r < 0 ? ctl_broken() : CTL_OK;
}

int ctl_print_table(struct ctl *ctl, const char *title, const struct table *t)
{
	if (!t)
		return ctl_broken();
	if (title)
		printf("%s%s%s%s\n", ctl->printed ? "\n" : "", ctl->color ? "\033[1;36m" : "",
		       title, ctl->color ? "\033[0m" : "");
	ctl->printed++;
	if (table_rows(t) == 0) {
		printf("%snone\n", title ? "  " : "");
		return CTL_OK;
	}
	return table_print(t, stdout, title ? 2 : 0, ctl->color, ctl->width) < 0 ? ctl_broken()
										 : CTL_OK;
}

int ctl_print_sentence(struct ctl *ctl, unsigned indent, const char *fmt, ...)
{
	_cleanup_(freep) char *text = NULL;
	const char *at, *rest;
	va_list ap;
	int n;

	va_start(ap, fmt);
	n = vasprintf(&text, fmt, ap);
	va_end(ap);
	if (n < 0)
		return text = NULL, ctl_broken();
	width_clean(text);
	at = text;
	do {
		size_t room = ctl->width > indent ? ctl->width - indent : 0;
		size_t bytes = room ? width_line(at, room, &rest) : strlen(at);

		printf("%*s%.*s\n", (int)indent, "", (int)bytes, at);
		indent += at == text ? 2 : 0;
		at = room ? rest : at + bytes;
	} while (*at);
	return CTL_OK;
}

uint64_t ctl_class(Shardd__V1__ClassBytes *const *classes, size_t n, const char *name)
{
	for (size_t i = 0; i < n; i++)
		if (strcmp(classes[i]->name, name) == 0)
			return classes[i]->bytes;
	return 0;
}

enum table_color ctl_state_color(const char *state)
{
	static const struct {
		const char *state;
		enum table_color color;
	} colors[] = {
		{ "RUNNING", TABLE_GOOD }, { "JOINED", TABLE_GOOD },   { "FORMING", TABLE_WARN },
		{ "STALE", TABLE_WARN },   { "DRAINING", TABLE_WARN }, { "RESIZING", TABLE_WARN },
		{ "WAIT", TABLE_WARN },    { "TORN", TABLE_BAD },      { "DEAD", TABLE_BAD },
		{ "FAILED", TABLE_BAD },   { "IN", TABLE_GOOD },       { "OUT", TABLE_BAD },
		{ "JOINING", TABLE_WARN }, { "STALLED", TABLE_BAD },
	};

	for (size_t i = 0; i < ARRAY_SIZE(colors); i++)
		if (strcmp(colors[i].state, state) == 0)
			return colors[i].color;
	return TABLE_PLAIN;
}

void ctl_job_state_cell(struct table *t, const Shardd__V1__JobStatus *j)
{
	const char *state =
		j->stall ? "STALLED" : json_state(&shardd__v1__job_state__descriptor, j->state);

	table_color_cell(t, ctl_state_color(state), "%s", state);
}

int ctl_job_name(const char *given, char buf[CTL_JOB_MAX], char **ret)
{
	const char *slash = strchr(given, '/');
	char user[CTL_USER_MAX];
	const struct passwd *p;

	*ret = (char *)given;
	if (!slash || isdigit((unsigned char)given[0]))
		return CTL_OK;
	if (slash - given >= CTL_USER_MAX)
		return ctl_usage("job \"%s\": there is no such user", given);
	snprintf(user, sizeof(user), "%.*s", (int)(slash - given), given);
	p = getpwnam(user);
	if (!p)
		return ctl_usage("job \"%s\": there is no user \"%s\"", given, user);
	snprintf(buf, CTL_JOB_MAX, "%u/%.100s", (unsigned)p->pw_uid, slash + 1);
	*ret = buf;
	return CTL_OK;
}

int ctl_priority(const char *text, int32_t *ret)
{
	uint64_t number;
	bool minus = *text == '-';

	if (!format_parse_number(text + minus, CTL_PRIORITY_MAX, &number))
		return ctl_usage("--priority \"%s\" is not a whole number from -%d to %d", text,
				 CTL_PRIORITY_MAX, CTL_PRIORITY_MAX);
	*ret = minus ? -(int32_t)number : (int32_t)number;
	return CTL_OK;
}

int ctl_optional_job(int argc, char **argv, char buf[CTL_JOB_MAX], char **ret)
{
	static const struct option none[] = { { 0 } };

	if (ctl_getopt(argc, argv, "", none, NULL) != -1)
		return CTL_USAGE;
	if (argc - optind > 1)
		return ctl_usage("%s takes the name of one job", argv[0]);
	return argc - optind == 1 ? ctl_job_name(argv[optind], buf, ret) : CTL_OK;
}

/* The last one that was asked for: a table has the same user in many rows, and the answer may come
 * over the network. */
const char *ctl_user(uint32_t uid, char buf[CTL_USER_MAX])
{
	static char last[CTL_USER_MAX];
	static uint32_t last_uid;
	const struct passwd *p;

	if (*last && last_uid == uid)
		return strcpy(buf, last);
	p = getpwuid(uid);
	if (p && strlen(p->pw_name) < CTL_USER_MAX)
		snprintf(buf, CTL_USER_MAX, "%s", p->pw_name);
	else
		snprintf(buf, CTL_USER_MAX, "%u", uid);
	last_uid = uid;
	return strcpy(last, buf), buf;
}

void ctl_job_text(uint32_t uid, const char *name, char buf[CTL_JOB_MAX])
{
	char user[CTL_USER_MAX];

	if (!*name || uid == geteuid())
		snprintf(buf, CTL_JOB_MAX, "%.90s", *name ? name : "-");
	else
		snprintf(buf, CTL_JOB_MAX, "%s/%.90s", ctl_user(uid, user), name);
}

const char *ctl_said_job(const char *job, char buf[CTL_JOB_MAX])
{
	const char *slash = strchr(job, '/');

	if (slash)
		ctl_job_text((uint32_t)strtoul(job, NULL, 10), slash + 1, buf);
	else
		snprintf(buf, CTL_JOB_MAX, "%.100s", job);
	return buf;
}

void ctl_job_cell(struct table *t, uint32_t uid, const char *name)
{
	char text[CTL_JOB_MAX];

	ctl_job_text(uid, name, text);
	table_cell(t, "%s", text);
}

char *ctl_absolute(const char *path)
{
	char *real = realpath(path, NULL), *here = NULL, *all = NULL;

	if (real)
		return real;
	if (*path == '/' || !(here = getcwd(NULL, 0)))
		return strdup(path);
	if (asprintf(&all, "%s/%s", here, path) < 0)
		all = NULL;
	free(here);
	return all;
}

void ctl_step_cell(struct table *t, const Shardd__V1__JobStatus *j)
{
	unsigned long long step = j->step, applied = j->applied_step;

	if (!j->has_commit && j->optional_applied_step_case)
		table_cell(t, "%llu", applied);
	else if (!j->has_commit)
		table_cell(t, "-");
	else if (!j->optional_applied_step_case)
		table_cell(t, "%llu+?", step);
	else if (applied > step)
		table_cell(t, "%llu+%llu", step, applied - step);
	else
		table_cell(t, "%llu", step);
}
