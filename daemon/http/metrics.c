#include "http/metrics.h"

#include <inttypes.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/check.h"
#include "json/json.h"

#define US_PER_S 1000000u

/* ---------------------------------------------------------------------- the format */

static void metrics_family(FILE *out, const char *name, const char *type, const char *help)
{
	fprintf(out, "# HELP %s %s\n# TYPE %s %s\n", name, help, name, type);
}

/* In a label, '\\', '"' and new lines are escaped; what is no ASCII may be half a character, and is not shown. */
static void metrics_write_escaped(FILE *out, const char *s)
{
	for (; *s; s++)
		if (*s == '\n')
			fputs("\\n", out);
		else if (*s == '"' || *s == '\\')
			fprintf(out, "\\%c", *s);
		else
			fputc((unsigned char)*s < 0x80 ? *s : '?', out);
}

/* @labels: names and texts in turn, ended by NULL. */
static void metrics_write_labels(FILE *out, va_list labels)
{
	const char *name = va_arg(labels, const char *);

	if (!name)
		return;
	for (const char *before = "{"; name; before = ",") {
		fprintf(out, "%s%s=\"", before, name);
		metrics_write_escaped(out, va_arg(labels, const char *));
		fputc('"', out);
		name = va_arg(labels, const char *);
	}
	fputc('}', out);
}

static void metrics_count(FILE *out, const char *name, uint64_t value, ...)
	__attribute__((sentinel));

static void metrics_count(FILE *out, const char *name, uint64_t value, ...)
{
	va_list labels;

	va_start(labels, value);
	fputs(name, out);
	metrics_write_labels(out, labels);
	fprintf(out, " %" PRIu64 "\n", value);
	va_end(labels);
}

static void metrics_seconds(FILE *out, const char *name, uint64_t us, ...)
	__attribute__((sentinel));

static void metrics_seconds(FILE *out, const char *name, uint64_t us, ...)
{
	va_list labels;

	va_start(labels, us);
	fputs(name, out);
	metrics_write_labels(out, labels);
	fprintf(out, " %" PRIu64 ".%06" PRIu64 "\n", us / US_PER_S, us % US_PER_S);
	va_end(labels);
}

/* A family of one sample. */
static void metrics_one(FILE *out, const char *name, const char *type, const char *help,
			uint64_t value)
{
	metrics_family(out, name, type, help);
	metrics_count(out, name, value, NULL);
}

/* ---------------------------------------------------------------------- the daemon */

static void metrics_daemon(FILE *out, const Shardd__V1__GetStatusResponse *s,
			   const struct metrics_counts *c)
{
	/* under the name that all programs give it; it is another number after each start */
	metrics_family(out, "process_start_time_seconds", "gauge",
		       "When this process started, since 1970.");
	metrics_seconds(out, "process_start_time_seconds", c->started_unix_us, NULL);
	metrics_family(out, "shardd_build_info", "gauge",
		       "1, with the version of the daemon as label.");
	metrics_count(out, "shardd_build_info", 1, "version", s->version, NULL);
	metrics_one(out, "shardd_start_time_seconds", "gauge",
		    "When the first of the daemons started that have had its jobs, since 1970.",
		    s->started_unix_s);
	metrics_one(out, "shardd_connections", "gauge", "Open connections to the socket.",
		    s->connections);
	metrics_one(out, "shardd_sessions", "gauge", "Attached processes.", s->n_sessions);
	metrics_one(out, "shardd_open_fds", "gauge", "Open descriptors of the daemon.",
		    s->open_descriptors);
	metrics_one(out, "shardd_log_dropped_lines_total", "counter",
		    "Lines that the log could not take.", s->log_dropped);
	metrics_one(out, "shardd_draining", "gauge", "1 while the daemon is about to stop.",
		    s->draining);
	metrics_one(out, "shardd_cordoned", "gauge", "1 while an administrator admits no new jobs.",
		    s->cordon != NULL);
	metrics_one(out, "shardd_store_fds", "gauge",
		    "Descriptors in the store that outlives the daemon.", s->store_used);
	metrics_one(out, "shardd_store_max_fds", "gauge",
		    "Descriptors that fit in that store. 0: jobs end with the daemon.",
		    s->store_max);
	metrics_one(out, "shardd_store_left_out_slabs", "gauge",
		    "Slabs that end with the daemon because the store is nearly full.",
		    s->store_left_out);
	if (s->cluster)
		metrics_one(out, "shardd_cluster_member", "gauge",
			    "1 while the node is a member of its cluster.",
			    s->cluster->state == SHARDD__V1__CLUSTER_STATE__CLUSTER_STATE_IN);
	if (!s->http)
		return;
	metrics_one(out, "shardd_http_requests_total", "counter", "Answered HTTP requests.",
		    s->http->requests);
	metrics_one(out, "shardd_http_refused_total", "counter",
		    "HTTP requests answered with a status of 400 or higher, and connections that "
		    "were refused.",
		    s->http->refused);
}

static void metrics_rings(FILE *out, const Shardd__V1__GetStatusResponse *s,
			  const struct metrics_counts *c)
{
	metrics_one(out, "shardd_ring_bytes", "gauge", "Memory of the rings of all sessions.",
		    s->ring_bytes);
	metrics_one(out, "shardd_ring_submissions_total", "counter", "Ops that came by a ring.",
		    c->ring_submissions);
	metrics_one(out, "shardd_ring_completions_total", "counter", "Answers that went by a ring.",
		    c->ring_completions);
	metrics_one(out, "shardd_ring_wakes_total", "counter",
		    "System calls that woke a trainer for them.", c->ring_wakes);
}

static void metrics_methods(FILE *out, const struct metrics_counts *c)
{
	metrics_family(out, "shardd_rpc_calls_total", "counter", "gRPC calls by method.");
	for (size_t i = 0; i < c->n_methods; i++)
		if (c->methods[i].calls)
			metrics_count(out, "shardd_rpc_calls_total", c->methods[i].calls, "method",
				      c->methods[i].path, NULL);
	metrics_family(out, "shardd_rpc_failed_total", "counter",
		       "gRPC calls by method that were answered with an error.");
	for (size_t i = 0; i < c->n_methods; i++)
		if (c->methods[i].calls)
			metrics_count(out, "shardd_rpc_failed_total", c->methods[i].failed,
				      "method", c->methods[i].path, NULL);
}

/* --------------------------------------------------------------------------- ops */

static uint64_t metrics_total(const struct op_stats *s)
{
	uint64_t n = 0;

	for (size_t i = 0; i < OP_STATS_BUCKETS; i++)
		n += s->buckets[i];
	return n;
}

static void metrics_histogram(FILE *out, const char *op, const struct op_stats *s)
{
	uint64_t n = 0;
	char le[32];

	for (size_t i = 0; i < OP_STATS_BUCKETS; i++) {
		n += s->buckets[i];
		if (i < OP_STATS_BUCKETS - 1)
			snprintf(le, sizeof(le), "%g", (double)op_stats_bounds[i] / US_PER_S);
		metrics_count(out, "shardd_op_duration_seconds_bucket", n, "op", op, "le",
			      i < OP_STATS_BUCKETS - 1 ? le : "+Inf", NULL);
	}
	metrics_seconds(out, "shardd_op_duration_seconds_sum", s->us, "op", op, NULL);
	metrics_count(out, "shardd_op_duration_seconds_count", n, "op", op, NULL);
}

static void metrics_ops(FILE *out, const struct metrics_counts *c)
{
	metrics_family(out, "shardd_op_duration_seconds", "histogram",
		       "Time from the arrival of an op to its answer, waits among it.");
	for (size_t i = 0; i < c->n_ops; i++)
		if (metrics_total(&c->ops[i].stats))
			metrics_histogram(out, c->ops[i].name, &c->ops[i].stats);
	metrics_family(out, "shardd_op_failed_total", "counter", "Ops that ended with an error.");
	for (size_t i = 0; i < c->n_ops; i++)
		if (metrics_total(&c->ops[i].stats))
			metrics_count(out, "shardd_op_failed_total", c->ops[i].stats.failed, "op",
				      c->ops[i].name, NULL);
	metrics_family(out, "shardd_op_waiting_seconds_total", "counter",
		       "Parts of these times: turn: for earlier ops of the same rank; others: for "
		       "other ranks, "
		       "readers or memory.");
	for (size_t i = 0; i < c->n_ops; i++) {
		if (!metrics_total(&c->ops[i].stats))
			continue;
		metrics_seconds(out, "shardd_op_waiting_seconds_total", c->ops[i].stats.deps_us,
				"op", c->ops[i].name, "for", "turn", NULL);
		metrics_seconds(out, "shardd_op_waiting_seconds_total", c->ops[i].stats.wait_us,
				"op", c->ops[i].name, "for", "others", NULL);
	}
}

/* ----------------------------------------------------------------------- devices */

static void metrics_devices(FILE *out, const Shardd__V1__GetStatusResponse *s)
{
	static const struct {
		const char *name, *help;
		size_t offset;
	} gauges[] = {
		{ "shardd_device_capacity_bytes", "Memory of the device that the daemon may use.",
		  offsetof(Shardd__V1__DeviceStatus, capacity_bytes) },
		{ "shardd_device_used_bytes", "Memory in slabs, those in quarantine among them.",
		  offsetof(Shardd__V1__DeviceStatus, used_bytes) },
		{ "shardd_device_quarantined_bytes", "Freed memory that a process may still hold.",
		  offsetof(Shardd__V1__DeviceStatus, quarantined_bytes) },
		{ "shardd_device_overhead_bytes",
		  "Device memory that the daemon uses beside slabs.",
		  offsetof(Shardd__V1__DeviceStatus, overhead_bytes) },
	};

	for (size_t k = 0; k < ARRAY_SIZE(gauges); k++) {
		metrics_family(out, gauges[k].name, "gauge", gauges[k].help);
		for (size_t i = 0; i < s->n_devices; i++)
			metrics_count(
				out, gauges[k].name,
				*(const uint64_t *)(const void *)((const char *)s->devices[i] +
								  gauges[k].offset),
				"device", s->devices[i]->id, NULL);
	}
	metrics_family(out, "shardd_device_up", "gauge", "0: the device is lost.");
	for (size_t i = 0; i < s->n_devices; i++)
		metrics_count(out, "shardd_device_up", !*s->devices[i]->lost, "device",
			      s->devices[i]->id, NULL);
	metrics_family(out, "shardd_device_class_bytes", "gauge", "Memory in slabs by class.");
	for (size_t i = 0; i < s->n_devices; i++)
		for (size_t k = 0; k < s->devices[i]->n_classes; k++)
			metrics_count(out, "shardd_device_class_bytes",
				      s->devices[i]->classes[k]->bytes, "device", s->devices[i]->id,
				      "class", s->devices[i]->classes[k]->name, NULL);
}

/* Two may have the same name for people: so they have numbers. */
static void metrics_comms(FILE *out, const Shardd__V1__GetStatusResponse *s)
{
	static const char *const names[] = { "shardd_comm_ops_total", "shardd_comm_memory_bytes",
					     "shardd_comm_ready" };
	static const char *const help[] = { "Operations of the communicator.",
					    "Device memory that it uses.", "1: it can be used." };
	char number[24];

	for (size_t k = 0; k < ARRAY_SIZE(names); k++) {
		if (s->n_comms)
			metrics_family(out, names[k], k == 0 ? "counter" : "gauge", help[k]);
		for (size_t i = 0; i < s->n_comms; i++) {
			const Shardd__V1__CommStatus *c = s->comms[i];

			snprintf(number, sizeof(number), "%zu", i);
			metrics_count(out, names[k],
				      k == 0   ? c->ops
				      : k == 1 ? c->memory_bytes
					       : c->state ==
							 SHARDD__V1__COMM_STATE__COMM_STATE_READY,
				      "comm", number, "name", c->name, "engine", c->engine, NULL);
		}
	}
}

/* -------------------------------------------------------------------------- jobs */

typedef uint64_t (*metrics_job_get)(const Shardd__V1__JobStatus *j);

static uint64_t metrics_job_joined(const Shardd__V1__JobStatus *j)
{
	uint64_t n = 0;

	for (size_t i = 0; i < j->n_ranks; i++)
		n += j->ranks[i]->state == SHARDD__V1__RANK_STATE__RANK_STATE_JOINED;
	return n;
}

/* Those that are on this node. */
static uint64_t metrics_job_here(const Shardd__V1__JobStatus *j)
{
	uint64_t n = 0;

	for (size_t i = 0; i < j->n_ranks; i++)
		n += j->ranks[i]->state != SHARDD__V1__RANK_STATE__RANK_STATE_ELSEWHERE;
	return n;
}

#define METRICS_GET(name, expression)                                      \
	static uint64_t metrics_job_##name(const Shardd__V1__JobStatus *j) \
	{                                                                  \
		return (uint64_t)(expression);                             \
	}
METRICS_GET(used, j->used_bytes)
METRICS_GET(peak, j->peak_bytes)
METRICS_GET(quota, j->quota_bytes == UINT64_MAX ? 0 : j->quota_bytes)
METRICS_GET(quarantined, j->quarantined_bytes)
METRICS_GET(world, j->world_size)
METRICS_GET(step, j->step)
METRICS_GET(uncommitted, j->uncommitted)
METRICS_GET(epoch, j->epoch)
METRICS_GET(units, j->unit_count)
METRICS_GET(readers, j->n_readers)
METRICS_GET(overtaken, j->overtaken_reads)
METRICS_GET(ops, j->ops_total)
METRICS_GET(failed, j->ops_failed)
METRICS_GET(stalled, j->stall != NULL)
METRICS_GET(commits, j->counts ? j->counts->commits : 0)
METRICS_GET(epochs, j->counts ? j->counts->epochs_ended : 0)
METRICS_GET(deaths, j->counts ? j->counts->deaths : 0)
METRICS_GET(stalls, j->counts ? j->counts->stalls : 0)
METRICS_GET(stalled_us, j->counts ? j->counts->stalled_us : 0)
METRICS_GET(checkpoints, j->counts ? j->counts->checkpoints : 0)
METRICS_GET(checkpoints_failed, j->counts ? j->counts->checkpoints_failed : 0)

static const struct metrics_job {
	const char *name, *type, *help;
	metrics_job_get get;
	bool seconds; /* it is in microseconds */
	bool outside; /* also of a private job of another user */
} metrics_job_table[] = {
	{ "shardd_job_used_bytes", "gauge", "Memory of the job.", .get = metrics_job_used,
	  .outside = true },
	{ "shardd_job_peak_bytes", "gauge", "Its peak.", .get = metrics_job_peak, .outside = true },
	{ "shardd_job_quota_bytes", "gauge", "The most that it may use; 0: no limit of its own.",
	  .get = metrics_job_quota, .outside = true },
	{ "shardd_job_quarantined_bytes", "gauge", "Freed memory that a process may still hold.",
	  .get = metrics_job_quarantined, .outside = true },
	{ "shardd_job_world_size", "gauge", "Number of ranks, on all nodes.",
	  .get = metrics_job_world },
	{ "shardd_job_ranks", "gauge", "Ranks of this node.", .get = metrics_job_here },
	{ "shardd_job_ranks_joined", "gauge", "Of these, those in the epoch.",
	  .get = metrics_job_joined },
	{ "shardd_job_step", "gauge", "The last committed step.", .get = metrics_job_step },
	{ "shardd_job_uncommitted_steps", "gauge", "Changes of parameters after it.",
	  .get = metrics_job_uncommitted },
	{ "shardd_job_epoch", "gauge", "Number of the epoch.", .get = metrics_job_epoch },
	{ "shardd_job_units", "gauge", "Registered units.", .get = metrics_job_units },
	{ "shardd_job_readers", "gauge", "Sessions that read its parameters.",
	  .get = metrics_job_readers },
	{ "shardd_job_stalled", "gauge", "1 while one of its ops waits longer than stall_after_ms.",
	  .get = metrics_job_stalled },
	{ "shardd_job_commits_total", "counter", "Committed steps.", .get = metrics_job_commits },
	{ "shardd_job_ops_total", "counter", "Ops.", .get = metrics_job_ops },
	{ "shardd_job_ops_failed_total", "counter", "Ops that failed.", .get = metrics_job_failed },
	{ "shardd_job_epochs_ended_total", "counter", "Epochs that ended with ranks in them.",
	  .get = metrics_job_epochs },
	{ "shardd_job_rank_deaths_total", "counter", "Ranks that were gone without leaving.",
	  .get = metrics_job_deaths },
	{ "shardd_job_stalls_total", "counter", "Stalls that have begun.",
	  .get = metrics_job_stalls },
	{ "shardd_job_stalled_seconds_total", "counter", "Time in stalls.",
	  .get = metrics_job_stalled_us, .seconds = true },
	{ "shardd_job_overtaken_reads_total", "counter",
	  "Holds of readers that ended before their release.", .get = metrics_job_overtaken },
	{ "shardd_job_checkpoints_total", "counter", "Checkpoints that were written.",
	  .get = metrics_job_checkpoints },
	{ "shardd_job_checkpoints_failed_total", "counter", "Checkpoints that were not.",
	  .get = metrics_job_checkpoints_failed },
};

/* Those that exist under their names: of a deleted one, another of its name may be there. */
static bool metrics_job_is_there(const Shardd__V1__JobStatus *j)
{
	return j->state != SHARDD__V1__JOB_STATE__JOB_STATE_DELETED;
}

static bool metrics_job_is_closed(const Shardd__V1__JobStatus *j)
{
	return !j->n_ranks;
}

static const char *metrics_uid(uint32_t uid, char buf[16])
{
	snprintf(buf, 16, "%" PRIu32, uid);
	return buf;
}

static void metrics_job_family(FILE *out, const struct metrics_job *m,
			       const Shardd__V1__GetStatusResponse *s)
{
	char uid[16];

	metrics_family(out, m->name, m->type, m->help);
	for (size_t i = 0; i < s->n_jobs; i++) {
		const Shardd__V1__JobStatus *j = s->jobs[i];

		if (!metrics_job_is_there(j) || (metrics_job_is_closed(j) && !m->outside))
			continue;
		metrics_uid(j->uid, uid);
		if (m->seconds)
			metrics_seconds(out, m->name, m->get(j), "job_name", j->name, "uid", uid,
					NULL);
		else
			metrics_count(out, m->name, m->get(j), "job_name", j->name, "uid", uid,
				      NULL);
	}
}

static void metrics_jobs_state(FILE *out, const Shardd__V1__GetStatusResponse *s)
{
	uint64_t n = 0, deleted = 0;
	char uid[16];

	metrics_family(out, "shardd_job_state", "gauge", "1, with the state of the job as label.");
	for (size_t i = 0; i < s->n_jobs; i++) {
		const Shardd__V1__JobStatus *j = s->jobs[i];

		n += metrics_job_is_there(j);
		deleted += !metrics_job_is_there(j);
		if (metrics_job_is_there(j))
			metrics_count(out, "shardd_job_state", 1, "job_name", j->name, "uid",
				      metrics_uid(j->uid, uid), "state",
				      json_state(&shardd__v1__job_state__descriptor, j->state),
				      NULL);
	}
	metrics_one(out, "shardd_jobs", "gauge", "Jobs.", n);
	metrics_one(out, "shardd_deleted_jobs", "gauge",
		    "Deleted jobs of which memory is still held.", deleted);
}

static void metrics_jobs_classes(FILE *out, const Shardd__V1__GetStatusResponse *s,
				 const char *name, const char *help, bool formula)
{
	char uid[16];

	metrics_family(out, name, "gauge", help);
	for (size_t i = 0; i < s->n_jobs; i++) {
		const Shardd__V1__JobStatus *j = s->jobs[i];

		for (size_t k = 0; metrics_job_is_there(j) && k < j->n_memory; k++)
			metrics_count(out, name,
				      formula ? j->memory[k]->formula_bytes
					      : j->memory[k]->taken_bytes,
				      "job_name", j->name, "uid", metrics_uid(j->uid, uid), "class",
				      j->memory[k]->name, NULL);
	}
}

/* Only of jobs that have one. */
static void metrics_jobs_checkpoint(FILE *out, const Shardd__V1__GetStatusResponse *s)
{
	char uid[16];

	metrics_family(out, "shardd_job_checkpoint_step", "gauge",
		       "Step of the last checkpoint on the disk.");
	for (size_t i = 0; i < s->n_jobs; i++) {
		const Shardd__V1__JobStatus *j = s->jobs[i];

		if (metrics_job_is_there(j) && j->checkpoint &&
		    j->checkpoint->state == SHARDD__V1__CHECKPOINT_STATE__CHECKPOINT_STATE_DONE)
			metrics_count(out, "shardd_job_checkpoint_step", j->checkpoint->step,
				      "job_name", j->name, "uid", metrics_uid(j->uid, uid), NULL);
	}
	metrics_family(out, "shardd_job_replica_step", "gauge",
		       "Step of the copies that other nodes have in memory.");
	for (size_t i = 0; i < s->n_jobs; i++) {
		const Shardd__V1__JobStatus *j = s->jobs[i];

		if (metrics_job_is_there(j) && j->replica && j->replica->has_step)
			metrics_count(out, "shardd_job_replica_step", j->replica->step, "job_name",
				      j->name, "uid", metrics_uid(j->uid, uid), NULL);
	}
}

/* ------------------------------------------------------------------------- ranks */

static const struct {
	const char *name, *type, *help;
} metrics_rank_table[] = {
	{ "shardd_rank_waiting_seconds_total", "counter",
	  "Waits of the rank's ops for other ranks, readers or memory; a sum over ops, which may "
	  "overlap." },
	{ "shardd_rank_late_seconds_total", "counter",
	  "Of each collective to which the rank came last: the time since the first rank came." },
	{ "shardd_rank_pending_ops", "gauge", "Ops of the rank that are not answered." },
	{ "shardd_rank_gathered_units", "gauge", "Units that the rank has gathered." },
};

static void metrics_rank(FILE *out, size_t k, const Shardd__V1__JobStatus *j,
			 const Shardd__V1__RankStatus *r)
{
	const char *name = metrics_rank_table[k].name;
	char uid[16], rank[16];

	metrics_uid(j->uid, uid);
	metrics_uid(r->rank, rank);
	if (k < 2)
		metrics_seconds(out, name, k == 0 ? r->waited_us : r->late_us, "job_name", j->name,
				"uid", uid, "rank", rank, NULL);
	else
		metrics_count(out, name, k == 2 ? r->pending_ops : r->gathered_units, "job_name",
			      j->name, "uid", uid, "rank", rank, NULL);
}

static void metrics_ranks(FILE *out, const Shardd__V1__GetStatusResponse *s)
{
	for (size_t k = 0; k < ARRAY_SIZE(metrics_rank_table); k++) {
		metrics_family(out, metrics_rank_table[k].name, metrics_rank_table[k].type,
			       metrics_rank_table[k].help);
		for (size_t i = 0; i < s->n_jobs; i++)
			for (size_t r = 0;
			     metrics_job_is_there(s->jobs[i]) && r < s->jobs[i]->n_ranks; r++)
				if (s->jobs[i]->ranks[r]->pid)
					metrics_rank(out, k, s->jobs[i], s->jobs[i]->ranks[r]);
	}
}

/* ------------------------------------------------------------------------- users */

static void metrics_users(FILE *out, const Shardd__V1__GetStatusResponse *s)
{
	static const char *const names[] = { "shardd_user_used", "shardd_user_limit",
					     "shardd_user_refused_total" };
	static const char *const help[] = {
		"Usage of the user, by resource: numbers, and bytes where its name ends in _bytes.",
		"The limit of it; absent: there is none.", "Requests that this limit refused."
	};
	char uid[16];

	for (size_t k = 0; k < ARRAY_SIZE(names); k++) {
		metrics_family(out, names[k], k == 2 ? "counter" : "gauge", help[k]);
		for (size_t i = 0; i < s->n_users; i++)
			for (size_t u = 0; u < s->users[i]->n_usage; u++) {
				const Shardd__V1__UserUsage *usage = s->users[i]->usage[u];

				if (k == 1 && usage->limit == UINT64_MAX)
					continue;
				metrics_count(out, names[k],
					      k == 0   ? usage->used
					      : k == 1 ? usage->limit
						       : usage->refused,
					      "uid", metrics_uid(s->users[i]->uid, uid), "resource",
					      usage->name, NULL);
			}
	}
}

char *metrics_format(const Shardd__V1__GetStatusResponse *s, const struct metrics_counts *counts,
		     size_t *ret_bytes)
{
	char *text = NULL;
	FILE *out = open_memstream(&text, ret_bytes);
	bool failed;

	if (!out)
		return NULL;
	metrics_daemon(out, s, counts);
	metrics_rings(out, s, counts);
	metrics_methods(out, counts);
	metrics_ops(out, counts);
	metrics_devices(out, s);
	metrics_comms(out, s);
	metrics_jobs_state(out, s);
	for (size_t i = 0; i < ARRAY_SIZE(metrics_job_table); i++)
		metrics_job_family(out, &metrics_job_table[i], s);
	metrics_jobs_classes(out, s, "shardd_job_class_bytes", "Memory of the job by class.",
			     false);
	metrics_jobs_classes(out, s, "shardd_job_class_formula_bytes",
			     "What should be in use by the formula of docs/semantics.md.", true);
	metrics_jobs_checkpoint(out, s);
	metrics_ranks(out, s);
	metrics_users(out, s);
	failed = ferror(out);
	if (fclose(out) != 0 || failed) {
		free(text);
		return NULL;
	}
	return text;
}
