/* shardctl blame: who holds up the ranks of a job, on whichever node. */
#include <stdio.h>

#include "core/check.h"
#include "core/cleanup.h"
#include "ctl/ctl.h"
#include "ctl/format.h"
#include "json/json.h"
#include "json/status_json.h"

static void blame_rank_row(struct table *t, const Shardd__V1__JobStatus *j,
			   const Shardd__V1__RankStatus *r)
{
	const char *state = json_state(&shardd__v1__rank_state__descriptor, r->state);

	ctl_job_cell(t, j->uid, j->name);
	table_cell(t, "%u", r->rank);
	table_cell(t, "%s", *r->node ? r->node : "-");
	if (r->pid > 0)
		table_cell(t, "%d", r->pid);
	else
		table_cell(t, "-");
	table_cell(t, "%s", *r->process_state ? r->process_state : "-");
	table_color_cell(t, ctl_state_color(state), "%s", state);
	table_cell(t, "%s", *r->op ? r->op : "-");
	table_cell(t, "%s", *r->op_on ? r->op_on : "-");
	if (r->op_number)
		table_cell(t, "%llu", (unsigned long long)r->op_number);
	else
		table_cell(t, "-");
	if (*r->op || r->idle_us)
		table_cell(t, "%s", format_us(*r->op ? r->op_us : r->idle_us).text);
	else
		table_cell(t, "-");
	table_cell(t, "%s", *r->op_waits_for ? r->op_waits_for : "-");
}

static int blame_print_ranks(struct ctl *ctl, const Shardd__V1__GetStatusResponse *s)
{
	static const struct table_column columns[] = {
		{ "JOB", TABLE_KEY | TABLE_TEXT },
		{ "RANK", TABLE_KEY | TABLE_NUMBER },
		{ "NODE", TABLE_TEXT },
		{ "PID", TABLE_NUMBER },
		{ "PROC", TABLE_TEXT },
		{ "STATE", TABLE_TEXT },
		{ "OP", TABLE_TEXT },
		{ "ON", TABLE_TEXT },
		{ "NUMBER", TABLE_NUMBER },
		{ "FOR", TABLE_NUMBER },
		{ "WAITS FOR", TABLE_SENTENCE },
	};
	_cleanup_(table_freep) struct table *t = table_new(columns, ARRAY_SIZE(columns));

	for (size_t i = 0; t && i < s->n_jobs; i++)
		for (size_t k = 0; k < s->jobs[i]->n_ranks; k++)
			blame_rank_row(t, s->jobs[i], s->jobs[i]->ranks[k]);
	return ctl_print_table(ctl, "Ranks", t);
}

/* Sentences: what holds up a job. */
static void blame_job_rows(struct table *t, const Shardd__V1__JobStatus *j)
{
	size_t before = table_rows(t);

	for (size_t i = 0; i < j->n_nodes; i++) {
		if (!*j->nodes[i]->error)
			continue;
		ctl_job_cell(t, j->uid, j->name);
		table_color_cell(t, TABLE_BAD, "node %s: %s", j->nodes[i]->name,
				 j->nodes[i]->error);
	}
	if (*j->waits) {
		ctl_job_cell(t, j->uid, j->name);
		table_cell(t, "joins wait: %s", j->waits);
	}
	if (j->memory_wait) {
		ctl_job_cell(t, j->uid, j->name);
		table_cell(t, "memory: number %u in the line: %s", j->memory_wait->position,
			   j->memory_wait->why);
	}
	for (size_t i = 0; i < j->n_blame; i++) {
		ctl_job_cell(t, j->uid, j->name);
		table_cell(t, "%s", j->blame[i]->text);
	}
	if (table_rows(t) > before)
		return;
	ctl_job_cell(t, j->uid, j->name);
	table_color_cell(t, TABLE_GOOD, "no rank waits for another one");
}

static int blame_print(struct ctl *ctl, const Shardd__V1__GetStatusResponse *s)
{
	static const struct table_column columns[] = { { "JOB", TABLE_KEY | TABLE_TEXT },
						       { "HELD UP BY", TABLE_SENTENCE } };
	_cleanup_(table_freep) struct table *t = table_new(columns, ARRAY_SIZE(columns));
	int r;

	for (size_t i = 0; t && i < s->n_jobs; i++)
		blame_job_rows(t, s->jobs[i]);
	r = ctl_print_table(ctl, NULL, t);
	return r == CTL_OK ? blame_print_ranks(ctl, s) : r;
}

int ctl_blame(struct ctl *ctl, int argc, char **argv)
{
	Shardd__V1__GetStatusRequest request = SHARDD__V1__GET_STATUS_REQUEST__INIT;
	_cleanup_(ctl_status_freep) Shardd__V1__GetStatusResponse *s = NULL;
	char name[CTL_JOB_MAX];
	int r = ctl_optional_job(argc, argv, name, &request.job);

	request.with_nodes = true;
	if (r == CTL_OK)
		r = ctl_get_status(ctl, &request, &s);
	if (r != CTL_OK)
		return r;
	return ctl->json ? ctl_print_json(status_json_list(s, "jobs")) : blame_print(ctl, s);
}
