/* shardctl status: the daemon, its devices, jobs and ranks. */
#include <stdio.h>
#include <string.h>

#include "core/check.h"
#include "core/cleanup.h"
#include "ctl/ctl.h"
#include "ctl/format.h"

static void print_daemon(struct ctl *ctl, const Shardd__V1__StatusReply *s)
{
	printf("shardd %s%s, pid %d, up %s, %u connections, %u descriptors", s->version,
	       s->draining ? " (draining)" : "", s->pid, format_seconds(s->uptime_s).text,
	       s->connections, s->open_descriptors);
	if (s->log_dropped)
		printf(", %llu log lines dropped", (unsigned long long)s->log_dropped);
	printf("\n  socket %s\n", ctl->socket);
	ctl->printed++;
}

static int print_devices(struct ctl *ctl, const Shardd__V1__StatusReply *s)
{
	static const struct table_column columns[] = {
		{ "DEVICE", false }, { "BACKEND", false }, { "CAPACITY", true },
		{ "USED", true },    { "OF IT", true },
	};
	_cleanup_(table_freep) struct table *t = table_new(columns, ARRAY_SIZE(columns));

	for (size_t i = 0; t && i < s->n_devices; i++) {
		const Shardd__V1__DeviceStatus *d = s->devices[i];

		table_cell(t, "%s", d->id);
		table_cell(t, "%s", d->backend);
		table_cell(t, "%s", format_bytes(d->capacity_bytes).text);
		table_cell(t, "%s", format_bytes(d->used_bytes).text);
		table_cell(t, "%s", format_percent(d->used_bytes, d->capacity_bytes).text);
	}
	return ctl_print_table(ctl, "Devices", t);
}

static unsigned joined_ranks(const Shardd__V1__JobStatus *j)
{
	unsigned n = 0;

	for (size_t i = 0; i < j->n_ranks; i++)
		n += strcmp(j->ranks[i]->state, "JOINED") == 0;
	return n;
}

static int print_jobs(struct ctl *ctl, const Shardd__V1__StatusReply *s)
{
	static const struct table_column columns[] = {
		{ "JOB", false },   { "STATE", false },      { "RANKS", true }, { "STEP", true },
		{ "EPOCH", true },  { "UNITS", true },       { "USED", true },  { "OPS", true },
		{ "FAILED", true }, { "LAST ERROR", false },
	};
	_cleanup_(table_freep) struct table *t = table_new(columns, ARRAY_SIZE(columns));

	for (size_t i = 0; t && i < s->n_jobs; i++) {
		const Shardd__V1__JobStatus *j = s->jobs[i];

		table_cell(t, "%s", j->name);
		table_color_cell(t, ctl_state_color(j->state), "%s", j->state);
		table_cell(t, "%u/%u", joined_ranks(j), j->world_size);
		table_cell(t, "%llu", (unsigned long long)j->step);
		table_cell(t, "%llu", (unsigned long long)j->epoch);
		table_cell(t, "%u", j->unit_count);
		table_cell(t, "%s", format_bytes(j->used_bytes).text);
		table_cell(t, "%llu", (unsigned long long)j->ops_total);
		table_cell(t, "%llu", (unsigned long long)j->ops_failed);
		table_cell(t, "%.60s%s", *j->last_error ? j->last_error : "-",
			   strlen(j->last_error) > 60 ? "..." : "");
	}
	return ctl_print_table(ctl, "Jobs", t);
}

static void rank_row(struct table *t, const Shardd__V1__JobStatus *j,
		     const Shardd__V1__RankStatus *r)
{
	table_cell(t, "%s", j->name);
	table_cell(t, "%u", r->rank);
	table_color_cell(t, ctl_state_color(r->state), "%s", r->state);
	if (r->pid > 0)
		table_cell(t, "%d", r->pid);
	else
		table_cell(t, "-");
	table_cell(t, "%llu", (unsigned long long)r->next_number);
	table_cell(t, "%u", r->pending_ops);
	table_cell(t, "%llu", (unsigned long long)r->gathered_units);
	table_cell(t, "%s", *r->last_op ? r->last_op : "-");
}

static int print_ranks(struct ctl *ctl, const Shardd__V1__StatusReply *s)
{
	static const struct table_column columns[] = {
		{ "JOB", false },     { "RANK", true },     { "STATE", false },
		{ "PID", true },      { "NEXT OP", true },  { "PENDING", true },
		{ "GATHERED", true }, { "LAST OP", false },
	};
	_cleanup_(table_freep) struct table *t = table_new(columns, ARRAY_SIZE(columns));

	for (size_t i = 0; t && i < s->n_jobs; i++)
		for (size_t k = 0; k < s->jobs[i]->n_ranks; k++)
			rank_row(t, s->jobs[i], s->jobs[i]->ranks[k]);
	return ctl_print_table(ctl, "Ranks", t);
}

static int print_status(struct ctl *ctl, const Shardd__V1__StatusReply *s)
{
	int r;

	print_daemon(ctl, s);
	r = print_devices(ctl, s);
	if (r == CTL_OK)
		r = print_jobs(ctl, s);
	if (r == CTL_OK)
		r = print_ranks(ctl, s);
	return r;
}

int ctl_status(struct ctl *ctl, int argc, char **argv)
{
	Shardd__V1__StatusRequest request = SHARDD__V1__STATUS_REQUEST__INIT;
	_cleanup_(ctl_status_freep) Shardd__V1__StatusReply *s = NULL;
	json_t *j;
	int r = ctl_no_arguments(argc, argv);

	if (r != CTL_OK)
		return r;
	request.with_units = ctl->json;
	r = ctl_get_status(ctl, &request, &s);
	if (r != CTL_OK || !ctl->json)
		return r != CTL_OK ? r : print_status(ctl, s);
	j = json_from_message(&s->base);
	/* They were not asked for: an empty list would say that there are none. */
	if (j)
		json_object_del(j, "slabs");
	return ctl_print_json(j);
}
