#include "http/metrics.h"

#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "core/check.h"
#include "json/json.h"

/* The most labels that a sample has. */
#define METRICS_MAX_LABELS 4u

/* -------------------------------------------------------------------- to the writer */

static void metrics_family(struct metrics_writer *out, const char *name, enum metrics_kind kind,
			   const char *help)
{
	out->family(out, &(struct metrics_family){ name, kind, help });
}

/* @labels: names and texts in turn, ended by NULL. */
static void metrics_write(struct metrics_writer *out, uint64_t value, bool micros, va_list labels)
{
	struct metrics_label all[METRICS_MAX_LABELS];
	struct metrics_sample sample = {
		.labels = all, .value = value, .micros = micros, .since_unix_us = out->since_unix_us
	};
	const char *name;

	while ((name = va_arg(labels, const char *))) {
		CHECK(sample.n_labels < METRICS_MAX_LABELS);
		all[sample.n_labels++] =
			(struct metrics_label){ name, va_arg(labels, const char *) };
	}
	out->sample(out, &sample);
}

static void metrics_count(struct metrics_writer *out, uint64_t value, ...)
	__attribute__((sentinel));

static void metrics_count(struct metrics_writer *out, uint64_t value, ...)
{
	va_list labels;

	va_start(labels, value);
	metrics_write(out, value, false, labels);
	va_end(labels);
}

static void metrics_seconds(struct metrics_writer *out, uint64_t us, ...) __attribute__((sentinel));

static void metrics_seconds(struct metrics_writer *out, uint64_t us, ...)
{
	va_list labels;

	va_start(labels, us);
	metrics_write(out, us, true, labels);
	va_end(labels);
}

/* A family of one sample. */
static void metrics_one(struct metrics_writer *out, const char *name, enum metrics_kind kind,
			const char *help, uint64_t value)
{
	metrics_family(out, name, kind, help);
	metrics_count(out, value, NULL);
}

/* --------------------------------------------------------------------- OpenTelemetry */

static void metrics_otlp(struct metrics_writer *out, const Shardd__V1__OtlpStatus *o)
{
	metrics_one(out, "shardd_otlp_up", METRICS_GAUGE,
		    "1 while requests to the OpenTelemetry collector succeed.", !*o->error);
	metrics_one(out, "shardd_otlp_requests_total", METRICS_COUNTER,
		    "Requests to the collector that have ended.", o->requests);
	metrics_one(out, "shardd_otlp_requests_failed_total", METRICS_COUNTER,
		    "Of these, those that failed.", o->requests_failed);
	metrics_one(out, "shardd_otlp_spans_sent_total", METRICS_COUNTER,
		    "Spans that the collector took.", o->spans_sent);
	metrics_one(out, "shardd_otlp_spans_dropped_total", METRICS_COUNTER,
		    "Spans for which there was no room, or that the daemon gave up.",
		    o->spans_dropped);
	metrics_one(out, "shardd_otlp_spans_rejected_total", METRICS_COUNTER,
		    "Spans that the collector rejected while it took the rest of the request.",
		    o->spans_rejected);
	metrics_one(out, "shardd_otlp_points_sent_total", METRICS_COUNTER,
		    "Data points of metrics that the collector took.", o->points_sent);
	metrics_one(out, "shardd_otlp_points_dropped_total", METRICS_COUNTER,
		    "Data points of requests that failed.", o->points_dropped);
	metrics_one(
		out, "shardd_otlp_points_rejected_total", METRICS_COUNTER,
		"Data points that the collector rejected while it took the rest of the request.",
		o->points_rejected);
}

/* ---------------------------------------------------------------------- the daemon */

static void metrics_daemon(struct metrics_writer *out, const Shardd__V1__GetStatusResponse *s,
			   const struct metrics_counts *c)
{
	/* under the name that all programs give it; it is another number after each start */
	metrics_family(out, "process_start_time_seconds", METRICS_GAUGE,
		       "When this process started, since 1970.");
	metrics_seconds(out, c->started_unix_us, NULL);
	metrics_family(out, "shardd_build_info", METRICS_GAUGE,
		       "1, with the version of the daemon as label.");
	metrics_count(out, 1, "version", s->version, NULL);
	metrics_one(out, "shardd_start_time_seconds", METRICS_GAUGE,
		    "When the first of the daemons started that have had its jobs, since 1970.",
		    s->started_unix_s);
	metrics_one(out, "shardd_connections", METRICS_GAUGE, "Open connections to the socket.",
		    s->connections);
	metrics_one(out, "shardd_sessions", METRICS_GAUGE, "Attached processes.", s->n_sessions);
	metrics_one(out, "shardd_open_fds", METRICS_GAUGE, "Open descriptors of the daemon.",
		    s->open_descriptors);
	metrics_one(out, "shardd_log_dropped_lines_total", METRICS_COUNTER,
		    "Lines that the log could not take.", s->log_dropped);
	metrics_one(out, "shardd_draining", METRICS_GAUGE, "1 while the daemon is about to stop.",
		    s->draining);
	metrics_one(out, "shardd_cordoned", METRICS_GAUGE,
		    "1 while an administrator admits no new jobs.", s->cordon != NULL);
	metrics_one(out, "shardd_store_fds", METRICS_GAUGE,
		    "Descriptors in the store that outlives the daemon.", s->store_used);
	metrics_one(out, "shardd_store_max_fds", METRICS_GAUGE,
		    "Descriptors that fit in that store. 0: jobs end with the daemon.",
		    s->store_max);
	metrics_one(out, "shardd_store_left_out_slabs", METRICS_GAUGE,
		    "Slabs that end with the daemon because the store is nearly full.",
		    s->store_left_out);
	if (s->cluster)
		metrics_one(out, "shardd_cluster_member", METRICS_GAUGE,
			    "1 while the node is a member of its cluster.",
			    s->cluster->state == SHARDD__V1__CLUSTER_STATE__CLUSTER_STATE_IN);
	if (!s->http)
		return;
	metrics_one(out, "shardd_http_requests_total", METRICS_COUNTER, "Answered HTTP requests.",
		    s->http->requests);
	metrics_one(out, "shardd_http_refused_total", METRICS_COUNTER,
		    "HTTP requests answered with a status of 400 or higher, and connections that "
		    "were refused.",
		    s->http->refused);
}

static void metrics_rings(struct metrics_writer *out, const Shardd__V1__GetStatusResponse *s,
			  const struct metrics_counts *c)
{
	metrics_one(out, "shardd_ring_bytes", METRICS_GAUGE, "Memory of the rings of all sessions.",
		    s->ring_bytes);
	metrics_one(out, "shardd_ring_submissions_total", METRICS_COUNTER,
		    "Ops that came by a ring.", c->ring_submissions);
	metrics_one(out, "shardd_ring_completions_total", METRICS_COUNTER,
		    "Answers that went by a ring.", c->ring_completions);
	metrics_one(out, "shardd_ring_wakes_total", METRICS_COUNTER,
		    "System calls that woke a trainer for them.", c->ring_wakes);
}

static void metrics_methods(struct metrics_writer *out, const struct metrics_counts *c)
{
	metrics_family(out, "shardd_rpc_calls_total", METRICS_COUNTER, "gRPC calls by method.");
	for (size_t i = 0; i < c->n_methods; i++)
		if (c->methods[i].calls)
			metrics_count(out, c->methods[i].calls, "method", c->methods[i].path, NULL);
	metrics_family(out, "shardd_rpc_failed_total", METRICS_COUNTER,
		       "gRPC calls by method that were answered with an error.");
	for (size_t i = 0; i < c->n_methods; i++)
		if (c->methods[i].calls)
			metrics_count(out, c->methods[i].failed, "method", c->methods[i].path,
				      NULL);
}

/* --------------------------------------------------------------------------- ops */

static uint64_t metrics_total(const struct op_stats *s)
{
	uint64_t n = 0;

	for (size_t i = 0; i < OP_STATS_BUCKETS; i++)
		n += s->buckets[i];
	return n;
}

static void metrics_histogram(struct metrics_writer *out, const char *op,
			      const struct op_stats *stats)
{
	const struct metrics_label label = { "op", op };

	out->sample(out,
		    &(struct metrics_sample){ .labels = &label, .n_labels = 1, .stats = stats });
}

static void metrics_ops(struct metrics_writer *out, const struct metrics_counts *c)
{
	metrics_family(out, "shardd_op_duration_seconds", METRICS_HISTOGRAM,
		       "Time from the arrival of an op to its answer, waits among it.");
	for (size_t i = 0; i < c->n_ops; i++)
		if (metrics_total(&c->ops[i].stats))
			metrics_histogram(out, c->ops[i].name, &c->ops[i].stats);
	metrics_family(out, "shardd_op_failed_total", METRICS_COUNTER,
		       "Ops that ended with an error.");
	for (size_t i = 0; i < c->n_ops; i++)
		if (metrics_total(&c->ops[i].stats))
			metrics_count(out, c->ops[i].stats.failed, "op", c->ops[i].name, NULL);
	metrics_family(out, "shardd_op_waiting_seconds_total", METRICS_COUNTER,
		       "Parts of these times: turn: for earlier ops of the same rank; others: for "
		       "other ranks, "
		       "readers or memory.");
	for (size_t i = 0; i < c->n_ops; i++) {
		if (!metrics_total(&c->ops[i].stats))
			continue;
		metrics_seconds(out, c->ops[i].stats.deps_us, "op", c->ops[i].name, "for", "turn",
				NULL);
		metrics_seconds(out, c->ops[i].stats.wait_us, "op", c->ops[i].name, "for", "others",
				NULL);
	}
}

/* ----------------------------------------------------------------------- devices */

static void metrics_devices(struct metrics_writer *out, const Shardd__V1__GetStatusResponse *s)
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
		metrics_family(out, gauges[k].name, METRICS_GAUGE, gauges[k].help);
		for (size_t i = 0; i < s->n_devices; i++)
			metrics_count(
				out,
				*(const uint64_t *)(const void *)((const char *)s->devices[i] +
								  gauges[k].offset),
				"device", s->devices[i]->id, NULL);
	}
	metrics_family(out, "shardd_device_up", METRICS_GAUGE, "0: the device is lost.");
	for (size_t i = 0; i < s->n_devices; i++)
		metrics_count(out, !*s->devices[i]->lost, "device", s->devices[i]->id, NULL);
	metrics_family(out, "shardd_device_class_bytes", METRICS_GAUGE,
		       "Memory in slabs by class.");
	for (size_t i = 0; i < s->n_devices; i++)
		for (size_t k = 0; k < s->devices[i]->n_classes; k++)
			metrics_count(out, s->devices[i]->classes[k]->bytes, "device",
				      s->devices[i]->id, "class", s->devices[i]->classes[k]->name,
				      NULL);
}

/* Two may have the same name for people: so they have numbers. */
static void metrics_comms(struct metrics_writer *out, const Shardd__V1__GetStatusResponse *s)
{
	static const char *const names[] = { "shardd_comm_ops_total", "shardd_comm_memory_bytes",
					     "shardd_comm_ready" };
	static const char *const help[] = { "Operations of the communicator.",
					    "Device memory that it uses.", "1: it can be used." };
	char number[24];

	for (size_t k = 0; k < ARRAY_SIZE(names); k++) {
		if (s->n_comms)
			metrics_family(out, names[k], k == 0 ? METRICS_COUNTER : METRICS_GAUGE,
				       help[k]);
		for (size_t i = 0; i < s->n_comms; i++) {
			const Shardd__V1__CommStatus *c = s->comms[i];

			snprintf(number, sizeof(number), "%zu", i);
			metrics_count(out,
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
	const char *name;
	enum metrics_kind kind;
	const char *help;
	metrics_job_get get;
	bool seconds; /* it is in microseconds */
	bool outside; /* also of a private job of another user */
} metrics_job_table[] = {
	{ "shardd_job_used_bytes", METRICS_GAUGE, "Memory of the job.", .get = metrics_job_used,
	  .outside = true },
	{ "shardd_job_peak_bytes", METRICS_GAUGE, "Its peak.", .get = metrics_job_peak,
	  .outside = true },
	{ "shardd_job_quota_bytes", METRICS_GAUGE,
	  "The most that it may use; 0: no limit of its own.", .get = metrics_job_quota,
	  .outside = true },
	{ "shardd_job_quarantined_bytes", METRICS_GAUGE,
	  "Freed memory that a process may still hold.", .get = metrics_job_quarantined,
	  .outside = true },
	{ "shardd_job_world_size", METRICS_GAUGE, "Number of ranks, on all nodes.",
	  .get = metrics_job_world },
	{ "shardd_job_ranks", METRICS_GAUGE, "Ranks of this node.", .get = metrics_job_here },
	{ "shardd_job_ranks_joined", METRICS_GAUGE, "Of these, those in the epoch.",
	  .get = metrics_job_joined },
	{ "shardd_job_step", METRICS_GAUGE, "The last committed step.", .get = metrics_job_step },
	{ "shardd_job_uncommitted_steps", METRICS_GAUGE, "Changes of parameters after it.",
	  .get = metrics_job_uncommitted },
	{ "shardd_job_epoch", METRICS_GAUGE, "Number of the epoch.", .get = metrics_job_epoch },
	{ "shardd_job_units", METRICS_GAUGE, "Registered units.", .get = metrics_job_units },
	{ "shardd_job_stalled", METRICS_GAUGE,
	  "1 while one of its ops waits longer than stall_after_ms.", .get = metrics_job_stalled },
	{ "shardd_job_commits_total", METRICS_COUNTER, "Committed steps.",
	  .get = metrics_job_commits },
	{ "shardd_job_ops_total", METRICS_COUNTER, "Ops.", .get = metrics_job_ops },
	{ "shardd_job_ops_failed_total", METRICS_COUNTER, "Ops that failed.",
	  .get = metrics_job_failed },
	{ "shardd_job_epochs_ended_total", METRICS_COUNTER, "Epochs that ended with ranks in them.",
	  .get = metrics_job_epochs },
	{ "shardd_job_rank_deaths_total", METRICS_COUNTER, "Ranks that were gone without leaving.",
	  .get = metrics_job_deaths },
	{ "shardd_job_stalls_total", METRICS_COUNTER, "Stalls that have begun.",
	  .get = metrics_job_stalls },
	{ "shardd_job_stalled_seconds_total", METRICS_COUNTER, "Time in stalls.",
	  .get = metrics_job_stalled_us, .seconds = true },
	{ "shardd_job_checkpoints_total", METRICS_COUNTER, "Checkpoints that were written.",
	  .get = metrics_job_checkpoints },
	{ "shardd_job_checkpoints_failed_total", METRICS_COUNTER, "Checkpoints that were not.",
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

static void metrics_job_family(struct metrics_writer *out, const struct metrics_job *m,
			       const Shardd__V1__GetStatusResponse *s)
{
	char uid[16];

	metrics_family(out, m->name, m->kind, m->help);
	for (size_t i = 0; i < s->n_jobs; i++) {
		const Shardd__V1__JobStatus *j = s->jobs[i];

		if (!metrics_job_is_there(j) || (metrics_job_is_closed(j) && !m->outside))
			continue;
		metrics_uid(j->uid, uid);
		out->since_unix_us = j->counts ? j->counts->since_unix_us : 0;
		if (m->seconds)
			metrics_seconds(out, m->get(j), "job_name", j->name, "uid", uid, NULL);
		else
			metrics_count(out, m->get(j), "job_name", j->name, "uid", uid, NULL);
	}
	out->since_unix_us = 0;
}

static void metrics_jobs_state(struct metrics_writer *out, const Shardd__V1__GetStatusResponse *s)
{
	uint64_t n = 0, deleted = 0;
	char uid[16];

	metrics_family(out, "shardd_job_state", METRICS_GAUGE,
		       "1, with the state of the job as label.");
	for (size_t i = 0; i < s->n_jobs; i++) {
		const Shardd__V1__JobStatus *j = s->jobs[i];

		n += metrics_job_is_there(j);
		deleted += !metrics_job_is_there(j);
		if (metrics_job_is_there(j))
			metrics_count(out, 1, "job_name", j->name, "uid", metrics_uid(j->uid, uid),
				      "state",
				      json_state(&shardd__v1__job_state__descriptor, j->state),
				      NULL);
	}
	metrics_one(out, "shardd_jobs", METRICS_GAUGE, "Jobs.", n);
	metrics_one(out, "shardd_deleted_jobs", METRICS_GAUGE,
		    "Deleted jobs of which memory is still held.", deleted);
}

static void metrics_jobs_classes(struct metrics_writer *out, const Shardd__V1__GetStatusResponse *s,
				 const char *name, const char *help, bool formula)
{
	char uid[16];

	metrics_family(out, name, METRICS_GAUGE, help);
	for (size_t i = 0; i < s->n_jobs; i++) {
		const Shardd__V1__JobStatus *j = s->jobs[i];

		for (size_t k = 0; metrics_job_is_there(j) && k < j->n_memory; k++)
			metrics_count(out,
				      formula ? j->memory[k]->formula_bytes
					      : j->memory[k]->taken_bytes,
				      "job_name", j->name, "uid", metrics_uid(j->uid, uid), "class",
				      j->memory[k]->name, NULL);
	}
}

/* Only of jobs that have one. */
static void metrics_jobs_checkpoint(struct metrics_writer *out,
				    const Shardd__V1__GetStatusResponse *s)
{
	char uid[16];

	metrics_family(out, "shardd_job_checkpoint_step", METRICS_GAUGE,
		       "Step of the last checkpoint on the disk.");
	for (size_t i = 0; i < s->n_jobs; i++) {
		const Shardd__V1__JobStatus *j = s->jobs[i];

		if (metrics_job_is_there(j) && j->checkpoint &&
		    j->checkpoint->state == SHARDD__V1__CHECKPOINT_STATE__CHECKPOINT_STATE_DONE)
			metrics_count(out, j->checkpoint->step, "job_name", j->name, "uid",
				      metrics_uid(j->uid, uid), NULL);
	}
	metrics_family(out, "shardd_job_replica_step", METRICS_GAUGE,
		       "Step of the copies that other nodes have in memory.");
	for (size_t i = 0; i < s->n_jobs; i++) {
		const Shardd__V1__JobStatus *j = s->jobs[i];

		if (metrics_job_is_there(j) && j->replica && j->replica->has_step)
			metrics_count(out, j->replica->step, "job_name", j->name, "uid",
				      metrics_uid(j->uid, uid), NULL);
	}
}

/* ------------------------------------------------------------------ publications */

static uint64_t metrics_publication_count_leases(const Shardd__V1__PublicationStatus *p)
{
	uint64_t n = 0;

	for (size_t i = 0; i < p->n_generations; i++)
		n += p->generations[i]->n_leases;
	return n;
}

static uint64_t metrics_publication_count_readers(const Shardd__V1__PublicationStatus *p)
{
	return p->readers; /* 32 bits */
}

static uint64_t metrics_publication_count_streams(const Shardd__V1__PublicationStatus *p)
{
	return p->streams; /* 32 bits */
}

#define METRICS_PUBLICATION(field) offsetof(Shardd__V1__PublicationStatus, field)

/* Fields of 64 bits, and what is counted otherwise. */
static const struct {
	const char *name;
	enum metrics_kind kind;
	bool seconds;
	size_t field;                                            /* with @get NULL */
	uint64_t (*get)(const Shardd__V1__PublicationStatus *p); /* (optional) */
	const char *help;
} metrics_publication_table[] = {
	{ "shardd_publication_generations_total", METRICS_COUNTER, false, METRICS_PUBLICATION(made),
	  NULL, "Generations that were made." },
	{ "shardd_publication_bytes_total", METRICS_COUNTER, false, METRICS_PUBLICATION(made_bytes),
	  NULL, "Bytes of these generations." },
	{ "shardd_publication_seconds_total", METRICS_COUNTER, true, METRICS_PUBLICATION(made_us),
	  NULL, "Time from the begin of these generations to their end." },
	{ "shardd_publication_skipped_total", METRICS_COUNTER, false, METRICS_PUBLICATION(skipped),
	  NULL, "Generations that were not made because no buffer was free." },
	{ "shardd_publication_buffer_waits_total", METRICS_COUNTER, false,
	  METRICS_PUBLICATION(buffer_waits), NULL,
	  "Waits of generations that were due for a free buffer." },
	{ "shardd_publication_buffer_wait_seconds_total", METRICS_COUNTER, true,
	  METRICS_PUBLICATION(buffer_waited_us), NULL, "Time of these waits." },
	{ "shardd_publication_buffer_waits_expired_total", METRICS_COUNTER, false,
	  METRICS_PUBLICATION(buffer_waits_expired), NULL,
	  "Of these waits, those that ended after wait_ms without a buffer." },
	{ "shardd_publication_dropped_total", METRICS_COUNTER, false, METRICS_PUBLICATION(dropped),
	  NULL, "Generations that made room and that no reader had leased." },
	{ "shardd_publication_failed_total", METRICS_COUNTER, false, METRICS_PUBLICATION(failed),
	  NULL, "Generations that were not made for another reason." },
	{ "shardd_publication_deltas_total", METRICS_COUNTER, false, METRICS_PUBLICATION(deltas),
	  NULL, "Generations that have a delta from the one before." },
	{ "shardd_publication_delta_bytes_total", METRICS_COUNTER, false,
	  METRICS_PUBLICATION(delta_bytes), NULL, "Bytes of these deltas." },
	{ "shardd_publication_delta_seconds_total", METRICS_COUNTER, true,
	  METRICS_PUBLICATION(delta_us), NULL,
	  "Time from the begin to the end of the generations that have a delta." },
	{ "shardd_publication_changed_values_total", METRICS_COUNTER, false,
	  METRICS_PUBLICATION(changed), NULL,
	  "Values that have changed, in all generations that were compared with the one before." },
	{ "shardd_publication_compared_values_total", METRICS_COUNTER, false,
	  METRICS_PUBLICATION(compared), NULL,
	  "Values of all generations that were compared with the one before, also if there was too "
	  "much for a delta." },
	{ "shardd_publication_readers", METRICS_GAUGE, false, 0, metrics_publication_count_readers,
	  "Readers that take generations without a call." },
	{ "shardd_publication_leases", METRICS_GAUGE, false, 0, metrics_publication_count_leases,
	  "Leases of generations that readers have." },
	{ "shardd_publication_streams", METRICS_GAUGE, false, 0, metrics_publication_count_streams,
	  "Readers that a generation is being sent to." },
	{ "shardd_publication_streamed_bytes_total", METRICS_COUNTER, false,
	  METRICS_PUBLICATION(streamed_bytes), NULL,
	  "Bytes of generations that were sent to readers." },
};

static uint64_t metrics_publication_value(size_t family, const Shardd__V1__PublicationStatus *p)
{
	uint64_t value;

	if (metrics_publication_table[family].get)
		return metrics_publication_table[family].get(p);
	memcpy(&value, (const char *)p + metrics_publication_table[family].field, sizeof(value));
	return value;
}

static void metrics_publication_of(struct metrics_writer *out, const Shardd__V1__JobStatus *j,
				   size_t family)
{
	char uid[16];

	for (size_t k = 0; metrics_job_is_there(j) && k < j->n_publications; k++) {
		const Shardd__V1__PublicationStatus *p = j->publications[k];
		uint64_t value = metrics_publication_value(family, p);

		out->since_unix_us = p->since_unix_us;
		if (metrics_publication_table[family].seconds)
			metrics_seconds(out, value, "job_name", j->name, "uid",
					metrics_uid(j->uid, uid), "publication", p->name, NULL);
		else
			metrics_count(out, value, "job_name", j->name, "uid",
				      metrics_uid(j->uid, uid), "publication", p->name, NULL);
	}
	out->since_unix_us = 0;
}

/* What readers can have. Return: NULL: there is none. */
static const Shardd__V1__GenerationStatus *metrics_publication_newest(
	const Shardd__V1__PublicationStatus *p)
{
	for (size_t i = 0; i < p->n_generations; i++)
		if (p->generations[i]->state ==
		    SHARDD__V1__GENERATION_STATE__GENERATION_STATE_READY)
			return p->generations[i];
	return NULL;
}

static uint64_t metrics_publication_number(const Shardd__V1__JobStatus *j,
					   const Shardd__V1__GenerationStatus *g)
{
	(void)j;
	return g->number;
}

/* How many steps the job is ahead of it. */
static uint64_t metrics_publication_lag(const Shardd__V1__JobStatus *j,
					const Shardd__V1__GenerationStatus *g)
{
	return j->step > g->step ? j->step - g->step : 0;
}

/* Of the newest generation of each publication of @j that has one. */
static void metrics_publication_of_newest(struct metrics_writer *out,
					  const Shardd__V1__JobStatus *j,
					  uint64_t (*get)(const Shardd__V1__JobStatus *j,
							  const Shardd__V1__GenerationStatus *g))
{
	char uid[16];

	for (size_t k = 0; metrics_job_is_there(j) && k < j->n_publications; k++) {
		const Shardd__V1__PublicationStatus *p = j->publications[k];
		const Shardd__V1__GenerationStatus *g = metrics_publication_newest(p);

		if (g)
			metrics_count(out, get(j, g), "job_name", j->name, "uid",
				      metrics_uid(j->uid, uid), "publication", p->name, NULL);
	}
}

static void metrics_publications(struct metrics_writer *out, const Shardd__V1__GetStatusResponse *s)
{
	for (size_t f = 0; f < ARRAY_SIZE(metrics_publication_table); f++) {
		metrics_family(out, metrics_publication_table[f].name,
			       metrics_publication_table[f].kind,
			       metrics_publication_table[f].help);
		for (size_t i = 0; i < s->n_jobs; i++)
			metrics_publication_of(out, s->jobs[i], f);
	}
	metrics_family(out, "shardd_publication_newest_number", METRICS_GAUGE,
		       "Number of the newest generation.");
	for (size_t i = 0; i < s->n_jobs; i++)
		metrics_publication_of_newest(out, s->jobs[i], metrics_publication_number);
	metrics_family(out, "shardd_publication_lag_steps", METRICS_GAUGE,
		       "Steps that the job has committed since the newest generation.");
	for (size_t i = 0; i < s->n_jobs; i++)
		metrics_publication_of_newest(out, s->jobs[i], metrics_publication_lag);
}

/* ------------------------------------------------------------------------- ranks */

static const struct {
	const char *name;
	enum metrics_kind kind;
	const char *help;
} metrics_rank_table[] = {
	{ "shardd_rank_waiting_seconds_total", METRICS_COUNTER,
	  "Waits of the rank's ops for other ranks, readers or memory; a sum over ops, which may "
	  "overlap." },
	{ "shardd_rank_late_seconds_total", METRICS_COUNTER,
	  "Of each collective to which the rank came last: the time since the first rank came." },
	{ "shardd_rank_pending_ops", METRICS_GAUGE, "Ops of the rank that are not answered." },
	{ "shardd_rank_gathered_units", METRICS_GAUGE, "Units that the rank has gathered." },
};

static void metrics_rank(struct metrics_writer *out, size_t k, const Shardd__V1__JobStatus *j,
			 const Shardd__V1__RankStatus *r)
{
	char uid[16], rank[16];

	metrics_uid(j->uid, uid);
	metrics_uid(r->rank, rank);
	out->since_unix_us = r->waits_since_unix_us;
	if (k < 2)
		metrics_seconds(out, k == 0 ? r->waited_us : r->late_us, "job_name", j->name, "uid",
				uid, "rank", rank, NULL);
	else
		metrics_count(out, k == 2 ? r->pending_ops : r->gathered_units, "job_name", j->name,
			      "uid", uid, "rank", rank, NULL);
}

static void metrics_ranks(struct metrics_writer *out, const Shardd__V1__GetStatusResponse *s)
{
	for (size_t k = 0; k < ARRAY_SIZE(metrics_rank_table); k++) {
		metrics_family(out, metrics_rank_table[k].name, metrics_rank_table[k].kind,
			       metrics_rank_table[k].help);
		for (size_t i = 0; i < s->n_jobs; i++)
			for (size_t r = 0;
			     metrics_job_is_there(s->jobs[i]) && r < s->jobs[i]->n_ranks; r++)
				if (s->jobs[i]->ranks[r]->pid)
					metrics_rank(out, k, s->jobs[i], s->jobs[i]->ranks[r]);
	}
	out->since_unix_us = 0;
}

/* ------------------------------------------------------------------------- users */

/* The use, the limit or the refusals (@k 0 to 2) of a user or a group, which is @label @id. */
static void metrics_usage(struct metrics_writer *out, size_t k, const char *label, uint32_t id,
			  Shardd__V1__UserUsage *const *usage, size_t n)
{
	char text[16];

	for (size_t u = 0; u < n; u++)
		if (k != 1 || usage[u]->limit != UINT64_MAX)
			metrics_count(out,
				      k == 0   ? usage[u]->used
				      : k == 1 ? usage[u]->limit
					       : usage[u]->refused,
				      label, metrics_uid(id, text), "resource", usage[u]->name,
				      NULL);
}

/* The line for memory. */
static void metrics_memory_line(struct metrics_writer *out, const Shardd__V1__GetStatusResponse *s)
{
	const Shardd__V1__MemoryLineStatus *line = s->memory_line;

	if (!line)
		return;
	metrics_family(out, "shardd_memory_line_jobs", METRICS_GAUGE,
		       "Jobs that wait for memory, of all users.");
	metrics_count(out, line->jobs, NULL);
	metrics_family(out, "shardd_memory_line_bytes", METRICS_GAUGE, "Bytes that they ask for.");
	metrics_count(out, line->bytes, NULL);
	metrics_family(out, "shardd_memory_line_admitted_total", METRICS_COUNTER,
		       "Jobs that got memory after a wait.");
	metrics_count(out, line->admitted, NULL);
	metrics_family(out, "shardd_memory_line_given_up_total", METRICS_COUNTER,
		       "Registrations whose time was over without memory.");
	metrics_count(out, line->given_up, NULL);
	metrics_family(out, "shardd_memory_line_wait_seconds_total", METRICS_COUNTER,
		       "Time that admitted jobs waited.");
	metrics_seconds(out, line->waited_us, NULL);
}

static void metrics_users(struct metrics_writer *out, const Shardd__V1__GetStatusResponse *s)
{
	static const char *const names[] = { "shardd_user_used", "shardd_user_limit",
					     "shardd_user_refused_total" };
	static const char *const help[] = {
		"Usage of the user, by resource: numbers, and bytes where its name ends in _bytes.",
		"The limit of it; absent: there is none.", "Requests that this limit refused."
	};

	for (size_t k = 0; k < ARRAY_SIZE(names); k++) {
		metrics_family(out, names[k], k == 2 ? METRICS_COUNTER : METRICS_GAUGE, help[k]);
		for (size_t i = 0; i < s->n_users; i++)
			metrics_usage(out, k, "uid", s->users[i]->uid, s->users[i]->usage,
				      s->users[i]->n_usage);
	}
}

static void metrics_groups(struct metrics_writer *out, const Shardd__V1__GetStatusResponse *s)
{
	static const char *const names[] = { "shardd_group_used", "shardd_group_limit",
					     "shardd_group_refused_total" };
	static const char *const help[] = {
		"Usage of the members of a group that user_limits names together, by resource.",
		"The total that user_limits allows them; absent: there is none.",
		"Requests that this total refused."
	};

	for (size_t k = 0; k < ARRAY_SIZE(names); k++) {
		metrics_family(out, names[k], k == 2 ? METRICS_COUNTER : METRICS_GAUGE, help[k]);
		for (size_t i = 0; i < s->n_groups; i++)
			metrics_usage(out, k, "gid", s->groups[i]->gid, s->groups[i]->usage,
				      s->groups[i]->n_usage);
	}
}

void metrics_walk(const Shardd__V1__GetStatusResponse *s, const struct metrics_counts *counts,
		  struct metrics_writer *out)
{
	metrics_daemon(out, s, counts);
	if (s->otlp)
		metrics_otlp(out, s->otlp);
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
	metrics_publications(out, s);
	metrics_ranks(out, s);
	metrics_memory_line(out, s);
	metrics_users(out, s);
	metrics_groups(out, s);
}
