/* shardctl ops: the flight recorder. */
#include <getopt.h>
#include <stdio.h>
#include <string.h>

#include "core/check.h"
#include "core/cleanup.h"
#include "ctl/ctl.h"
#include "ctl/format.h"
#include "json/json.h"

#define DEFAULT_LIMIT 50u

static uint64_t ops_since(uint64_t from, uint64_t to)
{
	return to > from ? to - from : 0;
}

/* How long it waited, and ran, up to now for an op that still does. */
static void ops_time_cells(struct table *t, const Shardd__V1__OpRecord *o, uint64_t now)
{
	uint64_t end = o->finished_us ? o->finished_us : now;
	uint64_t start = o->started_us ? o->started_us : end;

	table_cell(t, "%s ago", format_us(ops_since(o->announced_us, now)).text);
	table_cell(t, "%s", format_us(ops_since(o->announced_us, start)).text);
	if (o->started_us)
		table_cell(t, "%s", format_us(ops_since(o->started_us, end)).text);
	else
		table_cell(t, "-");
	if (o->finished_us)
		table_cell(t, "%s ago", format_us(ops_since(o->finished_us, now)).text);
	else
		table_cell(t, "-");
}

static void ops_op_row(struct table *t, const Shardd__V1__OpRecord *o, uint64_t now)
{
	table_cell(t, "%llu", (unsigned long long)o->id);
	ctl_job_cell(t, o->uid, o->job);
	table_cell(t, "%u", o->rank);
	table_cell(t, "%d", o->pid);
	table_cell(t, "%s", o->op);
	table_cell(t, "%s", *o->unit ? o->unit : *o->group ? o->group : "-");
	if (o->number)
		table_cell(t, "%llu", (unsigned long long)o->number);
	else
		table_cell(t, "-");
	table_color_cell(t,
			 ctl_state_color(json_state(&shardd__v1__op_state__descriptor, o->state)),
			 "%s", json_state(&shardd__v1__op_state__descriptor, o->state));
	ops_time_cells(t, o, now);
	table_cell(t, "%s", *o->error ? o->error : *o->waits_for ? o->waits_for : "-");
}

static int ops_print_ops(struct ctl *ctl, const Shardd__V1__OpsResponse *reply, uint32_t limit)
{
	static const struct table_column columns[] = {
		{ "ID", TABLE_KEY | TABLE_NUMBER },
		{ "JOB", TABLE_KEY | TABLE_TEXT },
		{ "RANK", TABLE_KEY | TABLE_NUMBER },
		{ "PID", TABLE_NUMBER },
		{ "OP", TABLE_TEXT },
		{ "ON", TABLE_TEXT },
		{ "NUMBER", TABLE_NUMBER },
		{ "STATE", TABLE_TEXT },
		{ "ANNOUNCED", TABLE_NUMBER },
		{ "WAITED", TABLE_NUMBER },
		{ "RAN", TABLE_NUMBER },
		{ "FINISHED", TABLE_NUMBER },
		{ "ERROR, OR WAITS FOR", TABLE_SENTENCE },
	};
	_cleanup_(table_freep) struct table *t = table_new(columns, ARRAY_SIZE(columns));
	size_t pending = 0, hidden = reply->pending_left_out;
	int r;

	for (size_t i = 0; t && i < reply->n_ops; i++) {
		pending += !reply->ops[i]->finished_us;
		if (limit && !reply->ops[i]->finished_us && pending > limit)
			hidden++;
		else
			ops_op_row(t, reply->ops[i], reply->now_us);
	}
	r = ctl_print_table(ctl, NULL, t);
	if (r == CTL_OK && hidden)
		printf("%zu more pending ops%s\n", hidden, limit ? " (-n 0 shows them)" : "");
	return r;
}

static int ops_parse(Shardd__V1__OpsRequest *request, char name[CTL_JOB_MAX], int argc, char **argv)
{
	static const struct option options[] = {
		{ "number", required_argument, NULL, 'n' },
		{ 0 },
	};
	uint64_t number;
	int o;

	request->limit = DEFAULT_LIMIT;
	while ((o = ctl_getopt(argc, argv, "n:", options, NULL)) != -1) {
		if (o != 'n')
			return CTL_USAGE;
		if (!format_parse_number(optarg, UINT32_MAX, &number))
			return ctl_usage("-n \"%s\" is not a whole number from 0 to %u", optarg,
					 UINT32_MAX);
		request->limit = (uint32_t)number;
	}
	if (argc - optind > 1)
		return ctl_usage("ops takes the name of one job");
	if (argc - optind == 1)
		return ctl_job_name(argv[optind], name, &request->job);
	return CTL_OK;
}

int ctl_ops(struct ctl *ctl, int argc, char **argv)
{
	Shardd__V1__OpsRequest request = SHARDD__V1__OPS_REQUEST__INIT;
	_cleanup_(ctl_messagep) ProtobufCMessage *reply = NULL;
	char name[CTL_JOB_MAX];
	int r = ops_parse(&request, name, argc, argv);

	if (r == CTL_OK)
		r = ctl_call(ctl, "/shardd.v1.StatusService/Ops", &request.base,
			     &shardd__v1__ops_response__descriptor, &reply);
	if (r != CTL_OK)
		return r;
	if (ctl->json)
		return ctl_print_json(json_from_message(reply));
	return ops_print_ops(ctl, (const Shardd__V1__OpsResponse *)reply, request.limit);
}
