/* shardctl jobs: all jobs, one line each. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/check.h"
#include "core/cleanup.h"
#include "ctl/ctl.h"
#include "ctl/format.h"
#include "json/status_json.h"

/* The devices of its ranks, each once, in the order of the ranks. */
static void jobs_devices_cell(struct table *t, const Shardd__V1__JobStatus *j)
{
	_cleanup_(freep) char *text = NULL;
	size_t bytes = 0;
	FILE *f = open_memstream(&text, &bytes);

	for (size_t i = 0; f && i < j->n_ranks; i++) {
		const char *device = j->ranks[i]->device;
		bool seen = !*device;

		for (size_t k = 0; k < i && !seen; k++)
			seen = strcmp(j->ranks[k]->device, device) == 0;
		if (!seen)
			fprintf(f, " %s", device);
	}
	if (f)
		fclose(f);
	table_cell(t, "%s", text && *text ? text + 1 : "-");
}

static void jobs_job_row(struct table *t, const Shardd__V1__JobStatus *j)
{
	char user[CTL_USER_MAX];

	table_cell(t, "%s", j->name);
	table_cell(t, "%s", ctl_user(j->uid, user));
	ctl_job_state_cell(t, j);
	table_cell(t, "%u", j->world_size);
	ctl_step_cell(t, j);
	table_cell(t, "%llu", (unsigned long long)j->epoch);
	table_cell(t, "%s", j->lifetime);
	table_cell(t, "%u", j->unit_count);
	table_cell(t, "%s", format_bytes(j->used_bytes).text);
	jobs_devices_cell(t, j);
	table_cell(t, "%s", *j->last_error ? j->last_error : "-");
}

int ctl_jobs(struct ctl *ctl, int argc, char **argv)
{
	static const struct table_column columns[] = {
		{ "JOB", TABLE_KEY | TABLE_TEXT }, { "OWNER", TABLE_KEY | TABLE_TEXT },
		{ "STATE", TABLE_TEXT },           { "WORLD", TABLE_NUMBER },
		{ "STEP", TABLE_NUMBER },          { "EPOCH", TABLE_NUMBER },
		{ "LIFETIME", TABLE_TEXT },        { "UNITS", TABLE_NUMBER },
		{ "USED", TABLE_NUMBER },          { "DEVICES", TABLE_SENTENCE },
		{ "LAST ERROR", TABLE_SENTENCE },
	};
	Shardd__V1__GetStatusRequest request = SHARDD__V1__GET_STATUS_REQUEST__INIT;
	_cleanup_(ctl_status_freep) Shardd__V1__GetStatusResponse *s = NULL;
	_cleanup_(table_freep) struct table *t = NULL;
	int r = ctl_no_arguments(argc, argv);

	if (r != CTL_OK)
		return r;
	request.with_units = ctl->json;
	r = ctl_get_status(ctl, &request, &s);
	if (r != CTL_OK)
		return r;
	if (ctl->json)
		return ctl_print_json(status_json_list(s, "jobs"));
	t = table_new(columns, ARRAY_SIZE(columns));
	for (size_t i = 0; t && i < s->n_jobs; i++)
		jobs_job_row(t, s->jobs[i]);
	return ctl_print_table(ctl, NULL, t);
}
