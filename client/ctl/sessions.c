/* shardctl sessions: the connected processes. */
#include "core/check.h"
#include "core/cleanup.h"
#include "ctl/ctl.h"
#include "json/status_json.h"
#include "ctl/format.h"

static void sessions_session_row(struct table *t, const Shardd__V1__SessionStatus *s)
{
	char user[CTL_USER_MAX];

	table_cell(t, "%llu", (unsigned long long)s->session);
	table_cell(t, "%d", s->pid);
	table_cell(t, "%s", ctl_user(s->uid, user));
	table_cell(t, "%s", s->client_name);
	ctl_job_cell(t, s->job_uid, s->job);
	if (s->rank < 0)
		table_cell(t, "-");
	else
		table_cell(t, "%d", s->rank);
	table_cell(t, "%s", format_seconds(s->age_s).text);
	table_cell(t, "%u", s->pending_ops);
	table_cell(t, "%llu", (unsigned long long)s->ops_total);
	table_cell(t, "%s", format_bytes(s->held_bytes).text);
	table_cell(t, "%s", s->local_channel ? "yes" : "no");
}

static int sessions_print_rings(struct ctl *ctl, const Shardd__V1__GetStatusResponse *s)
{
	static const struct table_column columns[] = {
		{ "RING OF", TABLE_NUMBER },   { "SUBMITTED", TABLE_NUMBER },
		{ "COMPLETED", TABLE_NUMBER }, { "WAKES", TABLE_NUMBER },
		{ "SAVED", TABLE_NUMBER },     { "WOKEN", TABLE_NUMBER },
		{ "FULL", TABLE_NUMBER },      { "MEMORY", TABLE_NUMBER },
	};
	_cleanup_(table_freep) struct table *t = table_new(columns, ARRAY_SIZE(columns));

	for (size_t i = 0; t && i < s->n_sessions; i++) {
		const Shardd__V1__RingStatus *r = s->sessions[i]->ring;

		if (!r)
			continue;
		table_cell(t, "%llu", (unsigned long long)s->sessions[i]->session);
		table_cell(t, "%llu", (unsigned long long)r->submissions);
		table_cell(t, "%llu", (unsigned long long)r->completions);
		table_cell(t, "%llu", (unsigned long long)r->wakes);
		table_cell(t, "%llu", (unsigned long long)(r->completions - r->wakes));
		table_cell(t, "%llu", (unsigned long long)r->woken);
		table_cell(t, "%llu", (unsigned long long)r->full);
		table_cell(t, "%s", format_bytes(r->bytes).text);
	}
	if (t && !table_rows(t))
		return CTL_OK;
	return ctl_print_table(ctl, "Rings", t);
}

int ctl_sessions(struct ctl *ctl, int argc, char **argv)
{
	static const struct table_column columns[] = {
		{ "SESSION", TABLE_KEY | TABLE_NUMBER },
		{ "PID", TABLE_KEY | TABLE_NUMBER },
		{ "USER", TABLE_TEXT },
		{ "CLIENT", TABLE_TEXT },
		{ "JOB", TABLE_TEXT },
		{ "RANK", TABLE_NUMBER },
		{ "AGE", TABLE_NUMBER },
		{ "PENDING", TABLE_NUMBER },
		{ "OPS", TABLE_NUMBER },
		{ "HOLDS", TABLE_NUMBER },
		{ "LOCAL", TABLE_TEXT },
	};
	Shardd__V1__GetStatusRequest request = SHARDD__V1__GET_STATUS_REQUEST__INIT;
	_cleanup_(ctl_status_freep) Shardd__V1__GetStatusResponse *s = NULL;
	_cleanup_(table_freep) struct table *t = NULL;
	int r = ctl_no_arguments(argc, argv);

	if (r == CTL_OK)
		r = ctl_get_status(ctl, &request, &s);
	if (r != CTL_OK)
		return r;
	if (ctl->json)
		return ctl_print_json(status_json_list(s, "sessions"));
	t = table_new(columns, ARRAY_SIZE(columns));
	for (size_t i = 0; t && i < s->n_sessions; i++)
		sessions_session_row(t, s->sessions[i]);
	r = ctl_print_table(ctl, NULL, t);
	return r == CTL_OK ? sessions_print_rings(ctl, s) : r;
}
