/* Jobs with their ranks and units. */
#include <string.h>

#include "core/check.h"
#include "cluster/cluster.h"
#include "core/clock.h"
#include "job/admission.h"
#include "job/base.h"
#include "job/elastic.h"
#include "job/kept.h"
#include "job/launched.h"
#include "job/position.h"
#include "job/loading.h"
#include "job/replica.h"
#include "job/saving.h"
#include "job/span.h"
#include "rpc/status_memory.h"
#include "op/op.h"
#include "rpc/status_fill.h"
#include "rpc/status_stall.h"

static void status_jobs_fill_memory(struct arena *a, const struct job *job,
				    Shardd__V1__JobStatus *j)
{
	struct status_memory m;

	j->memory = STATUS_MESSAGES(a, _MEM_N, ClassMemory, class_memory);
	j->n_memory = j->memory ? _MEM_N : 0;
	status_memory(job, &m);
	for (size_t i = 0; i < j->n_memory; i++) {
		Shardd__V1__ClassMemory *c = j->memory[i];

		c->name = (char *)mem_class_name((enum mem_class)i);
		c->formula_bytes = m.formula[i];
		c->used_bytes = m.used[i];
		c->taken_bytes = job->quota.by_class[i];
		c->peak_bytes = quota_peak(&job->quota, (enum mem_class)i);
	}
}

static void status_jobs_fill_prefetch(const struct member_ahead *ahead, Shardd__V1__RankStatus *r)
{
	r->prefetch =
		STATUS_STATE(PrefetchState, prefetch_state,
			     ahead->lists ? "LISTS" : prefetch_mode_name(ahead->learned.mode));
	r->prefetch_started = ahead->started;
	r->prefetch_skipped = ahead->skipped;
	r->prefetch_hits = ahead->hits;
	r->prefetch_misses = ahead->misses;
	r->prefetch_deviations = ahead->learned.deviations;
}

/* NULL: all ranks are on this node. */
static const struct span *status_jobs_span(const struct job *job)
{
	const struct span *span = job->across.span;

	return span && span->n_nodes > 1 && span->world == job->rec->world_size ? span : NULL;
}

/* What every rank has, wherever it is. Return: it is on another node. */
static bool status_jobs_fill_place(struct arena *a, const struct job *job, uint32_t rank,
				   Shardd__V1__RankStatus *r)
{
	const struct span *span = status_jobs_span(job);

	r->rank = rank;
	r->number = launched_number(job, rank);
	r->last_op = (char *)"";
	if (span)
		r->node = status_text(a, span->nodes[span_node_of(span, rank)].name);
	if (span_is_here(span, rank))
		return false;
	r->state = SHARDD__V1__RANK_STATE__RANK_STATE_ELSEWHERE;
	return true;
}

static void status_jobs_fill_rank(struct arena *a, const struct job *job, uint32_t rank,
				  Shardd__V1__RankStatus *r)
{
	const struct member *m = job->ranks[rank];
	const struct group *world = job->groups[0];
	uint32_t index;
	char last[128];

	if (status_jobs_fill_place(a, job, rank, r))
		return;
	r->state = STATUS_STATE(RankState, rank_state, m ? member_state_name(m->state) : "EMPTY");
	r->device = status_text(a, job->placed[rank] ? backend_info(job->placed[rank]->backend)->id
						     : "");
	r->next_number = group_is_here(world, rank, &index) ? world->match.next[index] + 1 : 0;
	if (!m)
		return;
	snprintf(last, sizeof(last), "%s%s%s", m->last.op, m->last.unit[0] ? " " : "",
		 m->last.unit);
	r->pid = member_pid(m);
	r->session = m->session;
	r->last_op = status_text(a, last);
	r->pending_ops = m->pending;
	r->gathered_units = member_gathered_units(m);
	r->waited_us = m->waits.us;
	r->late_us = m->waits.late_us;
	r->waits_since_unix_us = m->waits.since_unix_us;
	status_jobs_fill_prefetch(&m->ahead, r);
}

static uint32_t *status_jobs_gathered_by(struct arena *a, const struct job *job,
					 const struct unit *u, size_t *ret_n)
{
	uint32_t *ranks =
		u->gathered_ranks ? arena_take(a, u->gathered_ranks * sizeof(*ranks)) : NULL;

	*ret_n = 0;
	for (uint32_t r = 0; ranks && r < job->rec->world_size; r++) {
		const struct member *m = job->ranks[r];

		if (m && u->id <= m->n_units && m->units[u->id - 1].gathers &&
		    *ret_n < u->gathered_ranks)
			ranks[(*ret_n)++] = r;
	}
	return ranks;
}

static const struct member_unit *status_jobs_unit_of(const struct job *job, uint32_t rank,
						     const struct unit *u)
{
	const struct member *m = job->ranks[rank];
	const struct member_unit *mu = m && u->id <= m->n_units ? &m->units[u->id - 1] : NULL;

	return mu && (mu->pass != PASS_IDLE || mu->held) ? mu : NULL;
}

static void status_jobs_fill_passes(struct arena *a, const struct job *job, const struct unit *u,
				    Shardd__V1__UnitStatus *s)
{
	size_t n = 0;

	for (uint32_t r = 0; u->rec->guarded && r < job->rec->world_size; r++)
		n += status_jobs_unit_of(job, r, u) != NULL;
	s->passes = n ? STATUS_MESSAGES(a, n, UnitRank, unit_rank) : NULL;
	for (uint32_t r = 0; s->passes && r < job->rec->world_size; r++) {
		const struct member_unit *mu = status_jobs_unit_of(job, r, u);
		Shardd__V1__UnitRank *p;

		if (!mu)
			continue;
		p = s->passes[s->n_passes++];
		p->rank = r;
		p->state = STATUS_STATE(PassState, pass_state,
					pass_state_name((enum pass_state)mu->pass));
		p->holds = mu->held;
	}
}

static const char *status_jobs_reshard_name(uint32_t reshard)
{
	static const char *const names[_RESHARD_N] = { "", "AFTER_FORWARD", "AFTER_BACKWARD",
						       "NEVER", "AFTER_FORWARD_ONLY" };

	return reshard < _RESHARD_N ? names[reshard] : "?";
}

static void status_jobs_fill_unit(struct arena *a, const struct job *job, const struct unit *u,
				  Shardd__V1__UnitStatus *s)
{
	s->unit = u->id;
	s->name = status_text(a, u->rec->name);
	s->elements = unit_full_elements(u);
	s->shard_elements = u->layout.shard_elements;
	s->storage_dtype = (char *)dtype_name((enum dtype)u->rec->storage_dtype);
	s->compute_dtype = (char *)dtype_name((enum dtype)u->rec->compute_dtype);
	s->gradient_dtype = (char *)dtype_name((enum dtype)u->rec->gradient_dtype);
	s->initialised = u->rec->initialised;
	s->shard_bytes = unit_shard_bytes(u);
	s->layout = (char *)unit_layout_name(u->rec->layout);
	s->strategy = (char *)unit_strategy_name(u->rec->strategy);
	s->shard_ranks = u->rec->shard_ranks;
	s->copies = u->all_parts / u->spread;
	s->copy_devices = u->spread;
	s->frozen_elements = unit_frozen_numel(u);
	s->buffer_bytes = unit_buffers_bytes(u->rec) * u->rec->n_buffer_regions;
	s->summoned_ranks = u->summoned_ranks;
	for (unsigned d = 0; unit_has_copy(u) && d < u->n_parts; d++)
		s->full_bytes += u->parts[d].full.bytes;
	s->gathered_by = status_jobs_gathered_by(a, job, u, &s->n_gathered_by);
	s->has_gradient = u->has_gradient;
	s->optimizer_steps = u->rec->optimizer->steps;
	s->guarded = u->rec->guarded;
	s->reshard = (char *)(u->rec->guarded ? status_jobs_reshard_name(u->rec->reshard) : "");
	status_jobs_fill_passes(a, job, u, s);
}

static uint64_t status_jobs_quarantined_of(const struct job *job)
{
	struct slab *s, *tmp;
	uint64_t sum = 0;

	list_for_each (s, tmp, &job->node->devices[0].table->slabs, link)
		if (s->payer == &job->quota)
			sum += s->quarantined;
	return sum;
}

static void status_jobs_fill_readers(struct arena *a, const struct job *job,
				     Shardd__V1__JobStatus *j)
{
	char waits[320];

	readers_holding(job, waits, sizeof(waits));
	j->waits_for_reader = status_text(a, condition_is_idle(&job->readers.writers) ? "" : waits);
}

static void status_jobs_fill_base(struct arena *a, const struct job *job, Shardd__V1__JobStatus *j)
{
	struct list *all = (struct list *)(uintptr_t)&job->readers.of_base;
	const struct base_reader *r, *tmp;
	size_t n = 0;

	list_for_each (r, tmp, all, link)
		n++;
	j->readers = n ? STATUS_MESSAGES(a, n, BaseReaderStatus, base_reader_status) : NULL;
	if (!j->readers)
		return;
	list_for_each (r, tmp, all, link) {
		Shardd__V1__BaseReaderStatus *m = j->readers[j->n_readers++];

		m->session = r->session;
		m->pid = r->pid;
	}
}

static void status_jobs_fill_checkpoint(struct arena *a, const struct job *job,
					Shardd__V1__JobStatus *j)
{
	struct saving_report r;
	Shardd__V1__CheckpointStatus **c;
	char waits[512];

	if (!saving_report(job, &r))
		return;
	c = STATUS_MESSAGES(a, 1, CheckpointStatus, checkpoint_status);
	if (!c)
		return;
	j->checkpoint = c[0];
	j->checkpoint->state =
		STATUS_STATE(CheckpointState, checkpoint_state, saving_state_name(r.state));
	j->checkpoint->path = status_text(a, r.path);
	j->checkpoint->step = r.step;
	j->checkpoint->bytes = r.bytes;
	j->checkpoint->written = r.written;
	j->checkpoint->copied = r.copied;
	j->checkpoint->error = status_text(a, r.why);
	j->checkpoint->buffers_as_left = r.as_left;
	cluster_checkpoint_waits(job, false, waits, sizeof(waits));
	j->checkpoint->waits_for = status_text(a, waits);
}

static void status_jobs_fill_loading(struct arena *a, const struct job *job,
				     Shardd__V1__JobStatus *j)
{
	struct loading_progress p;
	Shardd__V1__LoadingStatus **l;
	char waits[512];

	if (!loading_progress(job, &p))
		return;
	l = STATUS_MESSAGES(a, 1, LoadingStatus, loading_status);
	if (!l)
		return;
	j->loading = l[0];
	l[0]->path = status_text(a, p.path);
	l[0]->reads = p.reads;
	l[0]->step = p.step;
	l[0]->bytes = p.bytes;
	l[0]->read = p.done;
	cluster_checkpoint_waits(job, true, waits, sizeof(waits));
	l[0]->waits_for = status_text(a, waits);
}

static void status_jobs_fill_replica(struct arena *a, const struct job *job,
				     Shardd__V1__JobStatus *j)
{
	Shardd__V1__ReplicaStatus **r;
	uint64_t step, bytes;
	bool has_step = replica_report(job, &step, &bytes);

	if (!has_step && !bytes && !*job->across.replica_why)
		return;
	r = STATUS_MESSAGES(a, 1, ReplicaStatus, replica_status);
	if (!r)
		return;
	j->replica = r[0];
	r[0]->has_step = has_step;
	r[0]->step = step;
	r[0]->bytes = bytes;
	r[0]->busy = saving_is_replicating(job);
	r[0]->error = status_text(a, job->across.replica_why);
}

static void status_jobs_fill_policy(struct arena *a, const state_checkpoints *c,
				    Shardd__V1__JobStatus *j)
{
	Shardd__V1__CheckpointPolicyStatus **p;

	if (!c)
		return;
	p = STATUS_MESSAGES(a, 1, CheckpointPolicyStatus, checkpoint_policy_status);
	if (!p)
		return;
	j->checkpoints = p[0];
	p[0]->path = status_text(a, c->path);
	p[0]->every_steps = c->every_steps;
	p[0]->every_s = c->every_s;
	p[0]->keep = c->keep;
	p[0]->bytes_per_s = c->bytes_per_s;
}

/* The parts for every caller that may know of the job. */
static void status_jobs_fill_outside(struct arena *a, const struct job *job,
				     Shardd__V1__JobStatus *j)
{
	j->name = status_text(a, job->rec->name);
	j->number = job->number;
	j->uid = job->rec->uid;
	j->state = STATUS_STATE(JobState, job_state, job_state_name(job));
	j->is_private = job->rec->is_private;
	j->quota_bytes = job->quota.limit;
	j->used_bytes = job->quota.used;
	j->quarantined_bytes = status_jobs_quarantined_of(job);
	j->peak_bytes = quota_peak_used(&job->quota);
	j->classes = status_classes(a, &job->quota, &j->n_classes);
}

static void status_jobs_fill_position(const state_job *rec, Shardd__V1__JobStatus *j)
{
	j->step = rec->step;
	j->has_commit = rec->has_commit;
	j->uncommitted = rec->uncommitted_steps;
	if (position_of(rec, &j->applied_step) && !rec->torn)
		j->optional_applied_step_case =
			SHARDD__V1__JOB_STATUS__OPTIONAL_APPLIED_STEP_APPLIED_STEP;
}

static void status_jobs_fill_nodes(struct arena *a, const struct job *job, Shardd__V1__JobStatus *j)
{
	const struct span *span = status_jobs_span(job);
	const char *leader = cluster_job_leader(job);
	char waits[400];

	cluster_job_waits(job, waits, sizeof(waits));
	j->waits = status_text(a, waits);
	if (*waits && j->state == SHARDD__V1__JOB_STATE__JOB_STATE_IDLE)
		j->state = SHARDD__V1__JOB_STATE__JOB_STATE_FORMING; /* its ranks wait outside */
	if (!span)
		return;
	j->nodes = STATUS_MESSAGES(a, span->n_nodes, JobNodeStatus, job_node_status);
	j->n_nodes = j->nodes ? span->n_nodes : 0;
	for (unsigned i = 0; i < j->n_nodes; i++) {
		const struct span_node *from = &span->nodes[i];
		Shardd__V1__JobNodeStatus *n = j->nodes[i];

		n->name = status_text(a, from->name);
		n->first = from->first;
		n->ranks = from->n;
		n->leads = strcmp(from->name, leader) == 0;
		n->here = i == span->self;
	}
}

/* A stall that goes on is counted until now, so that the number only grows when it ends. Nobody looks for the end of
 * one in a deleted job. */
static uint64_t status_jobs_stalled_us(const struct job *job)
{
	const uint64_t now = clock_now_us();
	const uint64_t since = job->life.deleted ? 0 : job->ops.stalled_us;

	return job->ops.counts.stalled_us + (since && now > since ? now - since : 0);
}

static void status_jobs_fill_counts(struct arena *a, const struct job *job,
				    Shardd__V1__JobStatus *j)
{
	const struct job_counts *from = &job->ops.counts;
	Shardd__V1__JobCounts **c = STATUS_MESSAGES(a, 1, JobCounts, job_counts);

	if (!c)
		return;
	j->counts = c[0];
	c[0]->commits = from->commits;
	c[0]->epochs_ended = from->epochs_ended;
	c[0]->deaths = from->deaths;
	c[0]->checkpoints = from->checkpoints;
	c[0]->checkpoints_failed = from->checkpoints_failed;
	c[0]->stalls = from->stalls;
	c[0]->stalled_us = status_jobs_stalled_us(job);
	c[0]->since_unix_us = from->since_unix_us;
}

static void status_jobs_fill_line(struct arena *a, const struct job *job, Shardd__V1__JobStatus *j)
{
	struct admission_place place;
	Shardd__V1__MemoryWait **w;
	uint64_t now = clock_now_us();
	char why[200];

	j->priority = job->rec->priority;
	j->wait_for_memory_ms = job->rec->wait_for_memory_ms;
	if (!admission_place(job, &place))
		return;
	w = STATUS_MESSAGES(a, 1, MemoryWait, memory_wait);
	if (!w)
		return;
	admission_why(job, why, sizeof(why));
	j->memory_wait = w[0];
	w[0]->position = place.position;
	w[0]->ranks = place.calls;
	w[0]->bytes = place.bytes;
	w[0]->waited_ms = (now - place.since_us) / 1000;
	w[0]->left_ms = place.until_us > now ? (place.until_us - now) / 1000 : 0;
	w[0]->why = status_text(a, why);
}

static void status_jobs_fill_elastic(struct arena *a, const struct job *job,
				     Shardd__V1__JobStatus *j)
{
	char waits[400];

	elastic_describe(job, waits, sizeof(waits), &j->elastic_left_ms);
	j->elastic_wait = status_text(a, waits);
	j->join_grace_ms = job->rec->join_grace_ms;
	j->launched = job->rec->launched;
}

static void status_jobs_fill_job(struct arena *a, const struct job *job, bool with_units,
				 Shardd__V1__JobStatus *j)
{
	j->world_size = job->rec->world_size;
	status_jobs_fill_position(job->rec, j);
	j->epoch = job->rec->epoch;
	j->lifetime = (char *)(uintptr_t)job_lifetime_word(job->rec->lifetime);
	j->resume = (char *)job_resume_word(job->rec);
	j->min_ranks = job->rec->min_ranks;
	j->max_ranks = job->rec->max_ranks;
	status_jobs_fill_elastic(a, job, j);
	status_jobs_fill_line(a, job, j);
	status_jobs_fill_nodes(a, job, j);
	status_jobs_fill_memory(a, job, j);
	j->unit_count = job_units_alive(job);
	j->ops_total = job->ops.total;
	j->ops_failed = job->ops.failed;
	j->last_error = status_text(a, job->ops.last_error);
	if (job->ops.failed)
		j->last_error_us = clock_now_us() - job->ops.last_error_us;
	status_jobs_fill_counts(a, job, j);
	j->ranks = STATUS_MESSAGES(a, job->rec->world_size, RankStatus, rank_status);
	j->n_ranks = j->ranks ? job->rec->world_size : 0;
	for (uint32_t r = 0; r < j->n_ranks; r++)
		status_jobs_fill_rank(a, job, r, j->ranks[r]);
	status_jobs_fill_readers(a, job, j);
	status_jobs_fill_base(a, job, j);
	status_fill_publications(a, job, j);
	status_jobs_fill_checkpoint(a, job, j);
	status_jobs_fill_loading(a, job, j);
	status_jobs_fill_replica(a, job, j);
	status_jobs_fill_policy(a, job->rec->checkpoints, j);
	if (!with_units)
		return;
	j->units = STATUS_MESSAGES(a, j->unit_count, UnitStatus, unit_status);
	for (uint32_t i = 0; j->units && i < job->n_units; i++)
		if (!job->units[i]->rec->dropped)
			status_jobs_fill_unit(a, job, job->units[i], j->units[j->n_units++]);
}

static void status_jobs_fill_visible(struct arena *a, const struct job *job,
				     const struct status_scope *scope, bool with_units,
				     Shardd__V1__JobStatus *j)
{
	status_jobs_fill_outside(a, job, j);
	if (status_may_look_at(scope, job))
		status_jobs_fill_job(a, job, with_units, j);
	if (status_may_look_at(scope, job) && scope->with_nodes && !job->life.deleted)
		status_fill_told(a, job, j);
	if (status_may_look_at(scope, job) && !job->life.deleted)
		status_fill_stall(a, job, j);
}

void status_fill_job(struct arena *a, const struct job *job, Shardd__V1__JobStatus *j)
{
	status_jobs_fill_job(a, job, false, j);
}

void status_fill_jobs(struct arena *a, struct jobs *jobs, const struct status_scope *scope,
		      bool with_units, Shardd__V1__GetStatusResponse *reply)
{
	struct list *lists[] = { &jobs->all, &jobs->zombies };
	struct job *job, *tmp;
	size_t n = 0;

	for (size_t i = 0; i < ARRAY_SIZE(lists); i++)
		list_for_each (job, tmp, lists[i], link)
			n += status_visible(scope, job);
	reply->jobs = STATUS_MESSAGES(a, n, JobStatus, job_status);
	for (size_t i = 0; reply->jobs && i < ARRAY_SIZE(lists); i++)
		list_for_each (job, tmp, lists[i], link)
			if (status_visible(scope, job))
				status_jobs_fill_visible(a, job, scope, with_units,
							 reply->jobs[reply->n_jobs++]);
}
