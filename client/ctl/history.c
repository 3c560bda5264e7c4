/* shardctl history: the jobs that have ended. */
#include <getopt.h>
#include <stdio.h>
#include <time.h>

#include "core/check.h"
#include "core/cleanup.h"
#include "ctl/ctl.h"
#include "ctl/format.h"
#include "json/json.h"

#define HISTORY_LIMIT 50u

static void history_time_cell(struct table *t, uint64_t unix_s)
{
	time_t at = (time_t)unix_s;
	char text[32] = "-";
	struct tm tm;

	if (unix_s && localtime_r(&at, &tm))
		strftime(text, sizeof(text), "%Y-%m-%d %H:%M:%S", &tm);
	table_cell(t, "%s", text);
}

static void history_row(struct table *t, const Shardd__V1__EndedJob *j)
{
	const char *end = json_state(&shardd__v1__end_cause__descriptor, j->end);

	ctl_job_cell(t, j->uid, j->name);
	history_time_cell(t, j->began_unix_s);
	history_time_cell(t, j->ended_unix_s);
	if (j->began_unix_s && j->ended_unix_s >= j->began_unix_s)
		table_cell(t, "%s", format_seconds(j->ended_unix_s - j->began_unix_s).text);
	else
		table_cell(t, "-");
	if (j->world_size)
		table_cell(t, "%u", j->world_size);
	else
		table_cell(t, "-");
	if (j->has_commit)
		table_cell(t, "%llu", (unsigned long long)j->step);
	else
		table_cell(t, "-");
	table_cell(t, "%s", format_bytes(j->peak_bytes).text);
	table_color_cell(
		t, j->end == SHARDD__V1__END_CAUSE__END_CAUSE_CRASHED ? TABLE_BAD : TABLE_PLAIN,
		"%s%s", *end ? end : "?", j->torn ? ", TORN" : "");
	table_cell(t, "%s", *j->last_error ? j->last_error : "-");
}

static int history_print(struct ctl *ctl, const Shardd__V1__HistoryResponse *reply)
{
	static const struct table_column columns[] = {
		{ "JOB", false }, { "BEGAN", false }, { "ENDED", false },
		{ "TOOK", true }, { "RANKS", true },  { "STEP", true },
		{ "PEAK", true }, { "END", false },   { "LAST ERROR", false },
	};
	_cleanup_(table_freep) struct table *t = table_new(columns, ARRAY_SIZE(columns));
	int r;

	for (size_t i = 0; t && i < reply->n_jobs; i++)
		history_row(t, reply->jobs[i]);
	r = ctl_print_table(ctl, NULL, t);
	if (r == CTL_OK && reply->next)
		printf("there are older ones: --before %llu\n", (unsigned long long)reply->next);
	return r;
}

static int history_parse(Shardd__V1__HistoryRequest *request, char name[CTL_JOB_MAX], int argc,
			 char **argv)
{
	static const struct option options[] = {
		{ "number", required_argument, NULL, 'n' },
		{ "before", required_argument, NULL, 'b' },
		{ 0 },
	};
	uint64_t number;
	int o;

	request->limit = HISTORY_LIMIT;
	while ((o = ctl_getopt(argc, argv, "n:", options, NULL)) != -1) {
		if (o == 'n') {
			if (!format_parse_number(optarg, 1000, &number) || !number)
				return ctl_usage("-n \"%s\" is not a whole number from 1 to 1000",
						 optarg);
			request->limit = (uint32_t)number;
		} else if (o == 'b') {
			if (!format_parse_number(optarg, INT64_MAX, &request->before))
				return ctl_usage("--before \"%s\" is not a whole number", optarg);
		} else {
			return CTL_USAGE;
		}
	}
	if (argc - optind > 1)
		return ctl_usage("history takes the name of one job");
	return argc - optind == 1 ? ctl_job_name(argv[optind], name, &request->job) : CTL_OK;
}

int ctl_history(struct ctl *ctl, int argc, char **argv)
{
	Shardd__V1__HistoryRequest request = SHARDD__V1__HISTORY_REQUEST__INIT;
	_cleanup_(ctl_messagep) ProtobufCMessage *reply = NULL;
	const Shardd__V1__HistoryResponse *found;
	char name[CTL_JOB_MAX];
	int r = history_parse(&request, name, argc, argv);

	if (r == CTL_OK)
		r = ctl_call(ctl, "/shardd.v1.StatusService/History", &request.base,
			     &shardd__v1__history_response__descriptor, &reply);
	if (r != CTL_OK)
		return r;
	found = (const Shardd__V1__HistoryResponse *)reply;
	if (!found->n_jobs && *request.job && !request.before)
		r = ctl_must_exist(ctl, request.job, "the history has none of that name");
	if (r != CTL_OK)
		return r;
	return ctl->json ? ctl_print_json(json_from_message(reply)) : history_print(ctl, found);
}
