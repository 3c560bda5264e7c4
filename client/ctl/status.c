/* shardctl status: the daemon, its devices, jobs and ranks. */
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "core/check.h"
#include "core/cleanup.h"
#include "ctl/ctl.h"
#include "ctl/format.h"
#include "json/json.h"
#include "json/status_json.h"

static void status_print_cordon(struct ctl *ctl, const Shardd__V1__GetStatusResponse *s)
{
	time_t since = s->cordon ? (time_t)s->cordon->unix_s : 0;
	char user[CTL_USER_MAX], when[32] = "?";
	struct tm tm;

	if (!s->cordon)
		return;
	if (gmtime_r(&since, &tm))
		strftime(when, sizeof(when), "%Y-%m-%d %H:%M:%S UTC", &tm);
	ctl_print_sentence(ctl, 2, "cordoned by %s at %s: no new jobs",
			   ctl_user(s->cordon->uid, user), when);
}

/* "cluster NAME, node NAME: IN", or what is in the way. */
static void status_print_cluster(struct ctl *ctl, const Shardd__V1__ClusterStatus *c)
{
	if (c)
		ctl_print_sentence(ctl, 2, "cluster %s, node %s: %s%s%s", c->name, c->node,
				   json_state(&shardd__v1__cluster_state__descriptor, c->state),
				   *c->why ? ": " : "", c->why);
}

static void status_print_store(struct ctl *ctl, const Shardd__V1__GetStatusResponse *s)
{
	if (s->store_left_out)
		ctl_print_sentence(
			ctl, 2,
			"jobs outlive the daemon: %u of %u descriptors are in its store, which is "
			"nearly full: %u slabs of gradients and copies end with it",
			s->store_used, s->store_max, s->store_left_out);
	else if (s->store_max)
		ctl_print_sentence(ctl, 2,
				   "jobs outlive the daemon: %u of %u descriptors are in its store",
				   s->store_used, s->store_max);
	else
		ctl_print_sentence(ctl, 2,
				   "jobs end with the daemon: it has no descriptor store, or that "
				   "has ended");
}

static void status_print_http(struct ctl *ctl, const Shardd__V1__HttpStatus *h)
{
	if (!h)
		return;
	if (*h->error)
		ctl_print_sentence(ctl, 2, "HTTP is not served: %s", h->error);
	else
		ctl_print_sentence(ctl, 2, "metrics and status by HTTP: %s", h->address);
}

static void status_print_lost(struct ctl *ctl, const char *what, uint64_t dropped,
			      uint64_t rejected)
{
	if (dropped || rejected)
		ctl_print_sentence(ctl, 4, "%llu %s dropped, %llu not taken by the collector",
				   (unsigned long long)dropped, what, (unsigned long long)rejected);
}

static void status_print_otlp(struct ctl *ctl, const Shardd__V1__OtlpStatus *o)
{
	if (!o)
		return;
	ctl_print_sentence(ctl, 2, "OpenTelemetry: %s: %llu spans and %llu data points sent%s",
			   o->endpoint, (unsigned long long)o->spans_sent,
			   (unsigned long long)o->points_sent,
			   o->trace_every ? "" : "; no steps are traced");
	status_print_lost(ctl, "spans", o->spans_dropped, o->spans_rejected);
	status_print_lost(ctl, "data points", o->points_dropped, o->points_rejected);
	if (*o->error)
		ctl_print_sentence(ctl, 4, "%llu of %llu requests failed; the last one of %s",
				   (unsigned long long)o->requests_failed,
				   (unsigned long long)o->requests, o->error);
}

static void status_print_daemon(struct ctl *ctl, const Shardd__V1__GetStatusResponse *s)
{
	char dropped[64] = "";

	if (s->log_dropped)
		snprintf(dropped, sizeof(dropped), ", %llu log lines dropped",
			 (unsigned long long)s->log_dropped);
	ctl_print_sentence(ctl, 0, "shardd %s%s, pid %d, up %s, %u connection%s, %u descriptors%s",
			   s->version, s->draining ? " (draining)" : "", s->pid,
			   format_seconds(s->uptime_s).text, s->connections,
			   s->connections == 1 ? "" : "s", s->open_descriptors, dropped);
	status_print_cordon(ctl, s);
	ctl_print_sentence(ctl, 2, "socket %s, instance %s", ctl->socket, s->instance);
	status_print_cluster(ctl, s->cluster);
	status_print_http(ctl, s->http);
	status_print_otlp(ctl, s->otlp);
	status_print_store(ctl, s);
	ctl->printed++;
}

static int status_print_devices(struct ctl *ctl, const Shardd__V1__GetStatusResponse *s)
{
	static const struct table_column columns[] = {
		{ "DEVICE", TABLE_KEY | TABLE_TEXT },
		{ "BACKEND", TABLE_TEXT },
		{ "CAPACITY", TABLE_NUMBER },
		{ "USED", TABLE_NUMBER },
		{ "USED%", TABLE_NUMBER },
		{ "KERNELS", TABLE_TEXT },
		{ "STATE", TABLE_TEXT },
	};
	_cleanup_(table_freep) struct table *t = table_new(columns, ARRAY_SIZE(columns));

	for (size_t i = 0; t && i < s->n_devices; i++) {
		const Shardd__V1__DeviceStatus *d = s->devices[i];

		table_cell(t, "%s", d->id);
		table_cell(t, "%s", d->backend);
		table_cell(t, "%s", format_bytes(d->capacity_bytes).text);
		table_cell(t, "%s", format_bytes(d->used_bytes).text);
		table_cell(t, "%s", format_percent(d->used_bytes, d->capacity_bytes).text);
		table_cell(t, "%s", *d->kernels ? d->kernels : "-");
		table_color_cell(t, *d->lost ? TABLE_BAD : TABLE_GOOD, "%s",
				 *d->lost ? "LOST" : "OK");
	}
	return ctl_print_table(ctl, "Devices", t);
}

static bool status_has_gpu(const Shardd__V1__GetStatusResponse *s)
{
	for (size_t i = 0; i < s->n_devices; i++)
		if (*s->devices[i]->uuid)
			return true;
	return false;
}

/* What only GPUs have. */
static int status_print_gpus(struct ctl *ctl, const Shardd__V1__GetStatusResponse *s)
{
	static const struct table_column columns[] = {
		{ "GPU", TABLE_KEY | TABLE_TEXT }, { "UUID", TABLE_TEXT },
		{ "STREAMS", TABLE_TEXT },         { "OVERHEAD", TABLE_NUMBER },
		{ "DETAIL", TABLE_SENTENCE },
	};
	_cleanup_(table_freep) struct table *t = NULL;

	if (!status_has_gpu(s))
		return CTL_OK;
	t = table_new(columns, ARRAY_SIZE(columns));
	for (size_t i = 0; t && i < s->n_devices; i++) {
		const Shardd__V1__DeviceStatus *d = s->devices[i];

		if (!*d->uuid)
			continue;
		table_cell(t, "%s", d->id);
		table_cell(t, "%s", d->uuid);
		table_cell(t, "%s", *d->order ? d->order : "-");
		table_cell(t, "%s", format_bytes(d->overhead_bytes).text);
		table_cell(t, "%s", *d->detail ? d->detail : "-");
	}
	return ctl_print_table(ctl, "GPUs", t);
}

/* Whole sentences, which would make the other tables too wide. */
static int status_print_notes(struct ctl *ctl, const Shardd__V1__GetStatusResponse *s)
{
	static const struct table_column columns[] = { { "DEVICE", TABLE_KEY | TABLE_TEXT },
						       { "NOTE", TABLE_SENTENCE } };
	_cleanup_(table_freep) struct table *t = table_new(columns, ARRAY_SIZE(columns));

	for (size_t i = 0; t && i < s->n_devices; i++) {
		const Shardd__V1__DeviceStatus *d = s->devices[i];

		if (*d->lost) {
			table_cell(t, "%s", d->id);
			table_color_cell(t, TABLE_BAD, "lost: %s", d->lost);
		}
		if (*d->mode) {
			table_cell(t, "%s", d->id);
			table_cell(t, "%s", d->mode);
		}
	}
	if (t && !table_rows(t))
		return CTL_OK;
	return ctl_print_table(ctl, "Notes on devices", t);
}

/* "cuda:0 cuda:1", "-" for none. */
static void status_devices_cell(struct table *t, char *const *devices, size_t n)
{
	_cleanup_(freep) char *text = NULL;
	size_t bytes = 0;
	FILE *f = open_memstream(&text, &bytes);

	for (size_t i = 0; f && i < n; i++)
		fprintf(f, "%s%s", i ? " " : "", devices[i]);
	if (f)
		fclose(f);
	table_cell(t, "%s", text && *text ? text : "-");
}

static enum table_color status_comm_color(Shardd__V1__CommState state)
{
	if (state == SHARDD__V1__COMM_STATE__COMM_STATE_READY)
		return TABLE_GOOD;
	return state == SHARDD__V1__COMM_STATE__COMM_STATE_BROKEN ? TABLE_BAD : TABLE_WARN;
}

static int status_print_comms(struct ctl *ctl, const Shardd__V1__GetStatusResponse *s)
{
	static const struct table_column columns[] = {
		{ "COMMUNICATOR", TABLE_KEY | TABLE_TEXT },
		{ "ENGINE", TABLE_TEXT },
		{ "STATE", TABLE_TEXT },
		{ "GATHER", TABLE_TEXT },
		{ "MEMORY", TABLE_NUMBER },
		{ "OPS", TABLE_NUMBER },
		{ "DEVICES", TABLE_SENTENCE },
		{ "DETAIL", TABLE_SENTENCE },
	};
	_cleanup_(table_freep) struct table *t = NULL;

	if (!s->n_comms)
		return CTL_OK;
	t = table_new(columns, ARRAY_SIZE(columns));
	for (size_t i = 0; t && i < s->n_comms; i++) {
		const Shardd__V1__CommStatus *c = s->comms[i];

		table_cell(t, "%s", c->name);
		table_cell(t, "%s", c->engine);
		table_color_cell(t, status_comm_color(c->state), "%s",
				 json_state(&shardd__v1__comm_state__descriptor, c->state));
		table_cell(t, "%s", *c->gather ? c->gather : "-");
		table_cell(t, "%s", format_bytes(c->memory_bytes).text);
		table_cell(t, "%llu", (unsigned long long)c->ops);
		status_devices_cell(t, c->devices, c->n_devices);
		table_cell(t, "%s", *c->detail ? c->detail : "-");
	}
	return ctl_print_table(ctl, "Communicators", t);
}

static unsigned status_joined_ranks(const Shardd__V1__JobStatus *j)
{
	unsigned n = 0;

	for (size_t i = 0; i < j->n_ranks; i++)
		n += j->ranks[i]->state == SHARDD__V1__RANK_STATE__RANK_STATE_JOINED;
	return n;
}

static int status_print_jobs(struct ctl *ctl, const Shardd__V1__GetStatusResponse *s)
{
	static const struct table_column columns[] = {
		{ "JOB", TABLE_KEY | TABLE_TEXT }, { "OWNER", TABLE_TEXT },
		{ "STATE", TABLE_TEXT },           { "RANKS", TABLE_NUMBER },
		{ "STEP", TABLE_NUMBER },          { "EPOCH", TABLE_NUMBER },
		{ "UNITS", TABLE_NUMBER },         { "USED", TABLE_NUMBER },
		{ "OPS", TABLE_NUMBER },           { "FAILED", TABLE_NUMBER },
		{ "LAST ERROR", TABLE_SENTENCE },
	};
	_cleanup_(table_freep) struct table *t = table_new(columns, ARRAY_SIZE(columns));
	char user[CTL_USER_MAX];

	for (size_t i = 0; t && i < s->n_jobs; i++) {
		const Shardd__V1__JobStatus *j = s->jobs[i];

		table_cell(t, "%s", j->name);
		table_cell(t, "%s", ctl_user(j->uid, user));
		ctl_job_state_cell(t, j);
		table_cell(t, "%u/%u", status_joined_ranks(j), j->world_size);
		ctl_step_cell(t, j);
		table_cell(t, "%llu", (unsigned long long)j->epoch);
		table_cell(t, "%u", j->unit_count);
		table_cell(t, "%s", format_bytes(j->used_bytes).text);
		table_cell(t, "%llu", (unsigned long long)j->ops_total);
		table_cell(t, "%llu", (unsigned long long)j->ops_failed);
		table_cell(t, "%s", *j->last_error ? j->last_error : "-");
	}
	return ctl_print_table(ctl, "Jobs", t);
}

static void status_node_row(struct table *t, const Shardd__V1__JobStatus *j,
			    const Shardd__V1__JobNodeStatus *n)
{
	ctl_job_cell(t, j->uid, j->name);
	table_cell(t, "%s%s", n->name, n->here ? " (this one)" : "");
	if (n->ranks > 1)
		table_cell(t, "%u to %u", n->first, n->first + n->ranks - 1);
	else
		table_cell(t, "%u", n->first);
	table_cell(t, "%s", n->leads ? "yes" : "-");
	table_color_cell(t, *n->error ? TABLE_BAD : TABLE_GOOD, "%s", *n->error ? n->error : "OK");
}

/* Of the jobs with ranks on several of them. */
static int status_print_nodes(struct ctl *ctl, const Shardd__V1__GetStatusResponse *s)
{
	static const struct table_column columns[] = {
		{ "JOB", TABLE_KEY | TABLE_TEXT }, { "NODE", TABLE_TEXT },  { "RANKS", TABLE_TEXT },
		{ "LEADS", TABLE_TEXT },           { "STATE", TABLE_TEXT },
	};
	_cleanup_(table_freep) struct table *t = table_new(columns, ARRAY_SIZE(columns));

	for (size_t i = 0; t && i < s->n_jobs; i++)
		for (size_t k = 0; k < s->jobs[i]->n_nodes; k++)
			status_node_row(t, s->jobs[i], s->jobs[i]->nodes[k]);
	if (t && !table_rows(t))
		return CTL_OK;
	return ctl_print_table(ctl, "Nodes", t);
}

/* What holds up jobs that stall: whole sentences. */
static int status_print_stalls(struct ctl *ctl, const Shardd__V1__GetStatusResponse *s)
{
	static const struct table_column columns[] = { { "JOB", TABLE_KEY | TABLE_TEXT },
						       { "FOR", TABLE_NUMBER },
						       { "HELD UP BY", TABLE_SENTENCE } };
	_cleanup_(table_freep) struct table *t = table_new(columns, ARRAY_SIZE(columns));

	for (size_t i = 0; t && i < s->n_jobs; i++) {
		const Shardd__V1__StallStatus *stall = s->jobs[i]->stall;

		if (!stall)
			continue;
		ctl_job_cell(t, s->jobs[i]->uid, s->jobs[i]->name);
		table_cell(t, "%s", format_us(stall->wait_us).text);
		table_color_cell(t, TABLE_BAD, "%s", stall->text);
	}
	if (t && !table_rows(t))
		return CTL_OK;
	return ctl_print_table(ctl, "Stalls", t);
}

/* What joins wait for: whole sentences. */
static int status_print_waits(struct ctl *ctl, const Shardd__V1__GetStatusResponse *s)
{
	static const struct table_column columns[] = { { "JOB", TABLE_KEY | TABLE_TEXT },
						       { "WAITS FOR", TABLE_SENTENCE } };
	_cleanup_(table_freep) struct table *t = table_new(columns, ARRAY_SIZE(columns));

	for (size_t i = 0; t && i < s->n_jobs; i++) {
		if (!*s->jobs[i]->waits)
			continue;
		ctl_job_cell(t, s->jobs[i]->uid, s->jobs[i]->name);
		table_cell(t, "%s", s->jobs[i]->waits);
	}
	if (t && !table_rows(t))
		return CTL_OK;
	return ctl_print_table(ctl, "Joins that wait", t);
}

/* The line for memory: jobs in it, in their order. */
static int status_print_line(struct ctl *ctl, const Shardd__V1__GetStatusResponse *s)
{
	static const struct table_column columns[] = {
		{ "PLACE", TABLE_NUMBER },       { "JOB", TABLE_KEY | TABLE_TEXT },
		{ "PRIORITY", TABLE_NUMBER },    { "RANKS", TABLE_NUMBER },
		{ "ASKS FOR", TABLE_NUMBER },    { "WAITED", TABLE_NUMBER },
		{ "GIVES UP IN", TABLE_NUMBER }, { "BECAUSE", TABLE_SENTENCE },
	};
	_cleanup_(table_freep) struct table *t = NULL;
	uint32_t n = s->memory_line ? s->memory_line->jobs : 0;

	if (!n)
		return CTL_OK;
	t = table_new(columns, ARRAY_SIZE(columns));
	for (uint32_t place = 1; t && place <= n; place++)
		for (size_t i = 0; i < s->n_jobs; i++) {
			const Shardd__V1__JobStatus *j = s->jobs[i];
			const Shardd__V1__MemoryWait *w = j->memory_wait;

			if (!w || w->position != place)
				continue;
			table_cell(t, "%u", w->position);
			ctl_job_cell(t, j->uid, j->name);
			table_cell(t, "%d", j->priority);
			table_cell(t, "%u", w->ranks);
			table_cell(t, "%s", format_bytes(w->bytes).text);
			table_cell(t, "%s", format_us(w->waited_ms * 1000).text);
			table_cell(t, "%s", format_us(w->left_ms * 1000).text);
			table_cell(t, "%s", w->why);
		}
	if (t && !table_rows(t))
		return CTL_OK; /* all of other users */
	return ctl_print_table(ctl, "Jobs that wait for memory", t);
}

/* Of the uses for which a gather could be begun ahead: how many found it so. */
static void status_ahead_cell(struct table *t, const Shardd__V1__RankStatus *r)
{
	uint64_t uses = r->prefetch_hits + r->prefetch_misses;

	if (uses)
		table_cell(t, "%llu/%llu", (unsigned long long)r->prefetch_hits,
			   (unsigned long long)uses);
	else
		table_cell(t, "-");
}

/* Of a rank that another daemon has, which does not answer. */
static void status_far_cells(struct table *t)
{
	for (unsigned i = 0; i < 7; i++)
		table_cell(t, "-");
}

static void status_rank_row(struct table *t, const Shardd__V1__JobStatus *j,
			    const Shardd__V1__RankStatus *r, bool with_node)
{
	const char *state = json_state(&shardd__v1__rank_state__descriptor, r->state);

	ctl_job_cell(t, j->uid, j->name);
	table_cell(t, "%u", r->rank);
	if (with_node)
		table_cell(t, "%s", *r->node ? r->node : "-");
	table_color_cell(t, ctl_state_color(state), "%s", state);
	if (r->state == SHARDD__V1__RANK_STATE__RANK_STATE_ELSEWHERE) {
		status_far_cells(t);
		return;
	}
	if (r->pid > 0)
		table_cell(t, "%d", r->pid);
	else
		table_cell(t, "-");
	table_cell(t, "%s", *r->device ? r->device : "-");
	table_cell(t, "%llu", (unsigned long long)r->next_number);
	table_cell(t, "%u", r->pending_ops);
	table_cell(t, "%llu", (unsigned long long)r->gathered_units);
	status_ahead_cell(t, r);
	table_cell(t, "%s", *r->last_op ? r->last_op : "-");
}

static bool status_has_nodes(const Shardd__V1__GetStatusResponse *s)
{
	for (size_t i = 0; i < s->n_jobs; i++)
		if (s->jobs[i]->n_nodes)
			return true;
	return false;
}

static int status_print_ranks(struct ctl *ctl, const Shardd__V1__GetStatusResponse *s)
{
	static const struct table_column all[] = {
		{ "JOB", TABLE_KEY | TABLE_TEXT }, { "RANK", TABLE_KEY | TABLE_NUMBER },
		{ "STATE", TABLE_TEXT },           { "PID", TABLE_NUMBER },
		{ "DEVICE", TABLE_TEXT },          { "NEXT OP", TABLE_NUMBER },
		{ "PENDING", TABLE_NUMBER },       { "GATHERED", TABLE_NUMBER },
		{ "AHEAD", TABLE_NUMBER },         { "LAST OP", TABLE_TEXT },
	};
	struct table_column columns[ARRAY_SIZE(all) + 1];
	bool nodes = status_has_nodes(s);
	_cleanup_(table_freep) struct table *t = NULL;

	memcpy(columns, all, 2 * sizeof(*all));
	columns[2] = (struct table_column){ "NODE", TABLE_TEXT };
	memcpy(columns + 2 + nodes, all + 2, (ARRAY_SIZE(all) - 2) * sizeof(*all));
	t = table_new(columns, ARRAY_SIZE(all) + nodes);
	for (size_t i = 0; t && i < s->n_jobs; i++)
		for (size_t k = 0; k < s->jobs[i]->n_ranks; k++)
			status_rank_row(t, s->jobs[i], s->jobs[i]->ranks[k], nodes);
	return ctl_print_table(ctl, "Ranks", t);
}

/* Jobs that change their number of ranks by themselves: what they wait for. */
static int status_print_elastic(struct ctl *ctl, const Shardd__V1__GetStatusResponse *s)
{
	static const struct table_column columns[] = { { "JOB", TABLE_KEY | TABLE_TEXT },
						       { "RANKS", TABLE_NUMBER },
						       { "OF", TABLE_TEXT },
						       { "WAITS FOR", TABLE_SENTENCE } };
	_cleanup_(table_freep) struct table *t = NULL;
	size_t n = 0;

	for (size_t i = 0; i < s->n_jobs; i++)
		n += *s->jobs[i]->elastic_wait != '\0';
	if (!n)
		return CTL_OK;
	t = table_new(columns, ARRAY_SIZE(columns));
	for (size_t i = 0; t && i < s->n_jobs; i++) {
		const Shardd__V1__JobStatus *j = s->jobs[i];

		if (!*j->elastic_wait)
			continue;
		ctl_job_cell(t, j->uid, j->name);
		table_cell(t, "%u", j->world_size);
		table_cell(t, "%u to %u", j->min_ranks, j->max_ranks);
		table_cell(t, "%s", j->elastic_wait);
	}
	return ctl_print_table(ctl, "Elastic jobs", t);
}

/* The processes that have bases mapped. */
static int status_print_readers(struct ctl *ctl, const Shardd__V1__GetStatusResponse *s)
{
	static const struct table_column columns[] = { { "BASE", TABLE_KEY | TABLE_TEXT },
						       { "PID", TABLE_NUMBER },
						       { "SESSION", TABLE_NUMBER } };
	_cleanup_(table_freep) struct table *t = NULL;
	size_t n = 0;

	for (size_t i = 0; i < s->n_jobs; i++)
		n += s->jobs[i]->n_readers;
	if (!n)
		return CTL_OK;
	t = table_new(columns, ARRAY_SIZE(columns));
	for (size_t i = 0; t && i < s->n_jobs; i++)
		for (size_t k = 0; k < s->jobs[i]->n_readers; k++) {
			ctl_job_cell(t, s->jobs[i]->uid, s->jobs[i]->name);
			table_cell(t, "%d", s->jobs[i]->readers[k]->pid);
			table_cell(t, "%llu", (unsigned long long)s->jobs[i]->readers[k]->session);
		}
	return ctl_print_table(ctl, "Readers of bases", t);
}

/* Why it has failed, or what it waits for. */
static void status_why_cell(struct table *t, const char *error, const char *waits)
{
	if (*waits)
		table_cell(t, "waits for %s", waits);
	else
		table_cell(t, "%s", *error ? error : "-");
}

/* How much of it there is on the disk, or has been read. */
static void status_checkpoint_row(struct table *t, const Shardd__V1__JobStatus *j,
				  const Shardd__V1__CheckpointStatus *c)
{
	bool begun = c->state != SHARDD__V1__CHECKPOINT_STATE__CHECKPOINT_STATE_WAITING;

	ctl_job_cell(t, j->uid, j->name);
	table_cell(t, "SAVE");
	table_cell(t, "%s", json_state(&shardd__v1__checkpoint_state__descriptor, c->state));
	if (begun)
		table_cell(t, "%llu", (unsigned long long)c->step);
	else
		table_cell(t, "-");
	table_cell(t, "%s", begun ? format_bytes(c->written).text : "-");
	table_cell(t, "%s", begun ? format_bytes(c->bytes).text : "-");
	table_cell(t, "%s", c->path);
	status_why_cell(t, c->error, c->waits_for);
}

/* The job's state in memory, for when a node is gone. */
static void status_replica_row(struct table *t, const Shardd__V1__JobStatus *j,
			       const Shardd__V1__ReplicaStatus *r)
{
	ctl_job_cell(t, j->uid, j->name);
	table_cell(t, "REPLICA");
	table_cell(t, "%s",
		   *r->error     ? "FAILED"
		   : r->busy     ? "WRITING"
		   : r->has_step ? "DONE"
				 : "-");
	if (r->has_step)
		table_cell(t, "%llu", (unsigned long long)r->step);
	else
		table_cell(t, "-");
	table_cell(t, "%s", format_bytes(r->bytes).text);
	table_cell(t, "-");
	table_cell(t, "memory");
	status_why_cell(t, r->error, "");
}

static void status_loading_row(struct table *t, const Shardd__V1__JobStatus *j,
			       const Shardd__V1__LoadingStatus *l)
{
	ctl_job_cell(t, j->uid, j->name);
	table_cell(t, "LOAD");
	table_cell(t, "%s", l->reads ? "READING" : "OPENING");
	if (l->reads)
		table_cell(t, "%llu", (unsigned long long)l->step);
	else
		table_cell(t, "-");
	table_cell(t, "%s", l->reads ? format_bytes(l->read).text : "-");
	table_cell(t, "%s", l->reads ? format_bytes(l->bytes).text : "-");
	table_cell(t, "%s", l->path);
	status_why_cell(t, "", l->waits_for);
}

static int status_print_checkpoints(struct ctl *ctl, const Shardd__V1__GetStatusResponse *s)
{
	static const struct table_column columns[] = {
		{ "JOB", TABLE_KEY | TABLE_TEXT }, { "WHAT", TABLE_KEY | TABLE_TEXT },
		{ "STATE", TABLE_TEXT },           { "STEP", TABLE_NUMBER },
		{ "DONE", TABLE_NUMBER },          { "OF", TABLE_NUMBER },
		{ "FOLDER", TABLE_TEXT },          { "WHY", TABLE_SENTENCE },
	};
	_cleanup_(table_freep) struct table *t = table_new(columns, ARRAY_SIZE(columns));

	for (size_t i = 0; t && i < s->n_jobs; i++) {
		if (s->jobs[i]->checkpoint)
			status_checkpoint_row(t, s->jobs[i], s->jobs[i]->checkpoint);
		if (s->jobs[i]->replica)
			status_replica_row(t, s->jobs[i], s->jobs[i]->replica);
		if (s->jobs[i]->loading)
			status_loading_row(t, s->jobs[i], s->jobs[i]->loading);
	}
	if (t && !table_rows(t))
		return CTL_OK;
	return ctl_print_table(ctl, "Checkpoints", t);
}

static int status_print_status(struct ctl *ctl, const Shardd__V1__GetStatusResponse *s)
{
	int r;

	status_print_daemon(ctl, s);
	r = status_print_devices(ctl, s);
	if (r == CTL_OK)
		r = status_print_gpus(ctl, s);
	if (r == CTL_OK)
		r = status_print_notes(ctl, s);
	if (r == CTL_OK)
		r = status_print_comms(ctl, s);
	if (r == CTL_OK)
		r = status_print_jobs(ctl, s);
	if (r == CTL_OK)
		r = status_print_nodes(ctl, s);
	if (r == CTL_OK)
		r = status_print_stalls(ctl, s);
	if (r == CTL_OK)
		r = status_print_waits(ctl, s);
	if (r == CTL_OK)
		r = status_print_line(ctl, s);
	if (r == CTL_OK)
		r = status_print_ranks(ctl, s);
	if (r == CTL_OK)
		r = status_print_elastic(ctl, s);
	if (r == CTL_OK)
		r = status_print_readers(ctl, s);
	if (r == CTL_OK)
		r = status_print_checkpoints(ctl, s);
	return r;
}

int ctl_status(struct ctl *ctl, int argc, char **argv)
{
	Shardd__V1__GetStatusRequest request = SHARDD__V1__GET_STATUS_REQUEST__INIT;
	_cleanup_(ctl_status_freep) Shardd__V1__GetStatusResponse *s = NULL;
	char name[CTL_JOB_MAX];
	int r = ctl_optional_job(argc, argv, name, &request.job);

	if (r != CTL_OK)
		return r;
	request.with_units = ctl->json;
	request.with_nodes = true;
	r = ctl_get_status(ctl, &request, &s);
	if (r != CTL_OK || !ctl->json)
		return r != CTL_OK ? r : status_print_status(ctl, s);
	return ctl_print_json(status_json_status(s));
}
