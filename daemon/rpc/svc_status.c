/* Status.Get and Status.Ops: walks the objects, fills messages from an arena. */
#include "rpc/svc_status.h"

#include <dirent.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "core/check.h"
#include "core/clock.h"
#include "core/log.h"
#include "job/job_memory.h"
#include "op/op.h"
#include "rpc/arena.h"
#include "rpc/codec.h"
#include "rpc/unit_spec.h"
#include "status.pb-c.h"

/* An empty string for what could not be copied: fields must not be NULL. A name that was
 * cut may end inside a character. */
static char *text(struct arena *a, const char *s)
{
	char *copy = arena_string(a, s);

	if (!copy)
		return (char *)"";
	codec_clean_text(copy);
	return copy;
}

/* @n messages of @type and pointers to them. Return: the pointers, NULL without memory. */
static void *messages(struct arena *a, size_t n, const ProtobufCMessageDescriptor *type)
{
	size_t size = type->sizeof_message;
	char *items = arena_take(a, n * size);
	void **pointers = arena_take(a, n * sizeof(void *));

	if (!items || !pointers)
		return NULL;
	for (size_t i = 0; i < n; i++) {
		pointers[i] = items + i * size;
		protobuf_c_message_init(type, pointers[i]);
	}
	return pointers;
}

#define MESSAGES(a, n, type, name) \
	((Shardd__V1__##type **)messages((a), (n), &shardd__v1__##name##__descriptor))

static Shardd__V1__ClassBytes **classes(struct arena *a, const struct quota *q, size_t *ret_n)
{
	Shardd__V1__ClassBytes **c = MESSAGES(a, _MEM_N, ClassBytes, class_bytes);

	*ret_n = c ? _MEM_N : 0;
	for (size_t i = 0; i < *ret_n; i++) {
		c[i]->name = (char *)mem_class_name((enum mem_class)i);
		c[i]->bytes = q->by_class[i];
	}
	return c;
}

static void fill_memory(struct arena *a, const struct job *job, Shardd__V1__JobStatus *j)
{
	struct job_memory m;

	j->memory = MESSAGES(a, _MEM_N, ClassMemory, class_memory);
	j->n_memory = j->memory ? _MEM_N : 0;
	job_memory(job, &m);
	for (size_t i = 0; i < j->n_memory; i++) {
		Shardd__V1__ClassMemory *c = j->memory[i];

		c->name = (char *)mem_class_name((enum mem_class)i);
		c->formula_bytes = m.formula[i];
		c->used_bytes = m.used[i];
		c->taken_bytes = job->quota.by_class[i];
		c->peak_bytes = quota_peak(&job->quota, (enum mem_class)i);
	}
}

static const char *order_name(enum backend_order order)
{
	static const char *const names[] = { "none", "timeline", "events" };

	return names[order];
}

static void fill_device(struct arena *a, const struct device *dev, Shardd__V1__DeviceStatus *d)
{
	const struct backend_info *info = backend_info(dev->backend);

	d->id = text(a, info->id);
	d->backend = text(a, info->name);
	d->capacity_bytes = dev->quota.limit;
	d->used_bytes = dev->quota.used;
	d->quarantined_bytes = dev->quarantined;
	d->classes = classes(a, &dev->quota, &d->n_classes);
	d->uuid = text(a, info->uuid);
	d->kernels = text(a, info->kernels);
	d->detail = text(a, info->detail);
	d->order = (char *)order_name(info->order);
	d->mode = text(a, info->mode);
	d->lost = text(a, info->lost);
	d->overhead_bytes = info->overhead_bytes;
}

static void fill_devices(struct arena *a, const struct node *node, Shardd__V1__StatusReply *reply)
{
	reply->devices = MESSAGES(a, node->n_devices, DeviceStatus, device_status);
	reply->n_devices = reply->devices ? node->n_devices : 0;
	for (unsigned i = 0; i < reply->n_devices; i++)
		fill_device(a, &node->devices[i], reply->devices[i]);
}

static void fill_comm(struct arena *a, const struct node_comm *nc, unsigned q,
		      Shardd__V1__CommStatus *c)
{
	static const char *const states[] = { "MAKING", "READY", "BROKEN" };
	struct comm_info info = { .name = "", .engine = "", .gather = "", .detail = "" };

	c->devices = arena_take(a, nc->n * sizeof(*c->devices));
	for (unsigned i = 0; c->devices && i < nc->n; i++)
		c->devices[c->n_devices++] = text(a, backend_info(nc->devices[i]->backend)->id);
	c->state = (char *)states[nc->state];
	if (nc->comm[q])
		comm_info(nc->comm[q], &info);
	c->name = text(a, info.name);
	c->engine = text(a, info.engine);
	c->gather = text(a, info.gather);
	c->detail = text(a, nc->state == COMM_BROKEN ? nc->why : info.detail);
	c->memory_bytes = info.memory_bytes;
	c->ops = info.ops;
}

static void fill_comms(struct arena *a, const struct node *node, Shardd__V1__StatusReply *reply)
{
	struct node_comm *nc, *tmp;
	size_t n = 0;

	list_for_each (nc, tmp, (struct list *)&node->comms, link)
		n += _BACKEND_Q_N;
	reply->comms = MESSAGES(a, n, CommStatus, comm_status);
	if (!reply->comms)
		return;
	list_for_each (nc, tmp, (struct list *)&node->comms, link)
		for (unsigned q = 0; q < _BACKEND_Q_N; q++)
			fill_comm(a, nc, q, reply->comms[reply->n_comms++]);
}

/* -------------------------------------------------------------------- jobs */

static void fill_prefetch(const struct member_ahead *ahead, Shardd__V1__RankStatus *r)
{
	r->prefetch = (char *)(ahead->lists ? "LISTS" : prefetch_mode_name(ahead->learned.mode));
	r->prefetch_started = ahead->started;
	r->prefetch_skipped = ahead->skipped;
	r->prefetch_hits = ahead->hits;
	r->prefetch_misses = ahead->misses;
	r->prefetch_deviations = ahead->learned.deviations;
}

static void fill_rank(struct arena *a, const struct job *job, uint32_t rank,
		      Shardd__V1__RankStatus *r)
{
	const struct member *m = job->ranks[rank];
	char last[128];

	r->rank = rank;
	r->state = (char *)(m ? member_state_name(m->state) : "EMPTY");
	r->last_op = (char *)"";
	r->prefetch = (char *)"";
	r->device = text(a, job->placed[rank] ? backend_info(job->placed[rank]->backend)->id : "");
	r->next_number = job->groups[0]->match.next[rank] + 1;
	if (!m)
		return;
	snprintf(last, sizeof(last), "%s%s%s", m->last_op, m->last_unit[0] ? " " : "",
		 m->last_unit);
	r->pid = member_pid(m);
	r->session = m->session;
	r->last_op = text(a, last);
	r->pending_ops = m->pending;
	r->gathered_units = member_gathered_units(m);
	fill_prefetch(&m->ahead, r);
}

static uint32_t *gathered_by(struct arena *a, const struct job *job, const struct unit *u,
			     size_t *ret_n)
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

static const struct member_unit *unit_of(const struct job *job, uint32_t rank, const struct unit *u)
{
	const struct member *m = job->ranks[rank];
	const struct member_unit *mu = m && u->id <= m->n_units ? &m->units[u->id - 1] : NULL;

	return mu && (mu->pass != PASS_IDLE || mu->held) ? mu : NULL;
}

static void fill_passes(struct arena *a, const struct job *job, const struct unit *u,
			Shardd__V1__UnitStatus *s)
{
	size_t n = 0;

	for (uint32_t r = 0; u->rec->guarded && r < job->rec->world_size; r++)
		n += unit_of(job, r, u) != NULL;
	s->passes = n ? MESSAGES(a, n, UnitRank, unit_rank) : NULL;
	for (uint32_t r = 0; s->passes && r < job->rec->world_size; r++) {
		const struct member_unit *mu = unit_of(job, r, u);
		Shardd__V1__UnitRank *p;

		if (!mu)
			continue;
		p = s->passes[s->n_passes++];
		p->rank = r;
		p->state = (char *)pass_state_name((enum pass_state)mu->pass);
		p->holds = mu->held;
	}
}

static const char *reshard_name(uint32_t reshard)
{
	static const char *const names[_RESHARD_N] = { "", "AFTER_FORWARD", "AFTER_BACKWARD",
						       "NEVER", "AFTER_FORWARD_ONLY" };

	return reshard < _RESHARD_N ? names[reshard] : "?";
}

static void fill_unit(struct arena *a, const struct job *job, const struct unit *u,
		      Shardd__V1__UnitStatus *s)
{
	s->unit = u->id;
	s->name = text(a, u->rec->name);
	s->elements = unit_full_elements(u);
	s->shard_elements = u->layout.shard_elements;
	s->compute_dtype = (char *)dtype_name((enum dtype)u->rec->compute_dtype);
	s->gradient_dtype = (char *)dtype_name((enum dtype)u->rec->gradient_dtype);
	s->initialised = u->rec->initialised;
	s->shard_bytes = unit_shard_bytes(u);
	s->layout = (char *)unit_layout_name(u->rec->layout);
	s->strategy = (char *)unit_strategy_name(u->rec->strategy);
	s->shard_ranks = u->rec->shard_ranks;
	s->frozen_elements = unit_frozen_numel(u);
	s->buffer_bytes = unit_buffers_bytes(u->rec) * u->rec->n_buffer_regions;
	s->summoned_ranks = u->summoned_ranks;
	for (unsigned d = 0; u->has_full && d < u->n_parts; d++)
		s->full_bytes += u->parts[d].full.bytes;
	s->gathered_by = gathered_by(a, job, u, &s->n_gathered_by);
	s->has_gradient = u->has_gradient;
	s->optimizer_steps = u->rec->optimizer->steps;
	s->guarded = u->rec->guarded;
	s->reshard = (char *)(u->rec->guarded ? reshard_name(u->rec->reshard) : "");
	fill_passes(a, job, u, s);
}

static uint64_t quarantined_of(const struct job *job)
{
	struct slab *s, *tmp;
	uint64_t sum = 0;

	list_for_each (s, tmp, &job->node->devices[0].table->slabs, link)
		if (s->payer == &job->quota)
			sum += s->quarantined;
	return sum;
}

static void fill_readers(struct arena *a, const struct job *job, Shardd__V1__JobStatus *j)
{
	uint64_t now = clock_now_us();
	const struct reader *r, *tmp;
	struct list *all = (struct list *)&job->readers.all;
	char waits[320];
	size_t n = 0;

	readers_holding(job, now, waits, sizeof(waits));
	j->waits_for_reader = text(a, list_empty(&job->readers.writers) ? "" : waits);
	j->overtaken_reads = job->readers.overtaken;
	list_for_each (r, tmp, all, link)
		n++;
	j->readers = n ? MESSAGES(a, n, ReaderStatus, reader_status) : NULL;
	if (!j->readers)
		return;
	list_for_each (r, tmp, all, link) {
		Shardd__V1__ReaderStatus *s = j->readers[j->n_readers++];
		bool timed = r->state == READER_WAITING || r->state == READER_HOLDS;

		s->session = r->session;
		s->pid = (int32_t)proc_pid(r->proc);
		s->state = (char *)reader_state_name(r->state);
		s->step = r->state == READER_HOLDS || r->state == READER_OVERTAKEN ? r->step : 0;
		s->state_ms = (now - r->since_us) / 1000;
		s->left_ms = timed && r->until_us > now ? (r->until_us - now) / 1000 : 0;
		waits[0] = '\0';
		if (r->state == READER_WAITING)
			readers_wait_for(job, waits, sizeof(waits));
		s->waits_for = text(a, waits);
	}
}

static void fill_job(struct arena *a, const struct job *job, bool with_units,
		     Shardd__V1__JobStatus *j)
{
	j->name = text(a, job->rec->name);
	j->uid = job->rec->uid;
	j->state = (char *)job_state_name(job);
	j->world_size = job->rec->world_size;
	j->step = job->rec->step;
	j->epoch = job->rec->epoch;
	j->lifetime = (char *)(job->rec->lifetime == JOB_KEEP ? "KEEP" : "EPHEMERAL");
	j->quota_bytes = job->quota.limit;
	j->used_bytes = job->quota.used;
	j->quarantined_bytes = quarantined_of(job);
	j->peak_bytes = quota_peak_used(&job->quota);
	j->classes = classes(a, &job->quota, &j->n_classes);
	fill_memory(a, job, j);
	j->unit_count = job->n_units;
	j->ops_total = job->ops_total;
	j->ops_failed = job->ops_failed;
	j->last_error = text(a, job->last_error);
	j->ranks = MESSAGES(a, job->rec->world_size, RankStatus, rank_status);
	j->n_ranks = j->ranks ? job->rec->world_size : 0;
	for (uint32_t r = 0; r < j->n_ranks; r++)
		fill_rank(a, job, r, j->ranks[r]);
	fill_readers(a, job, j);
	if (!with_units)
		return;
	j->units = MESSAGES(a, job->n_units, UnitStatus, unit_status);
	j->n_units = j->units ? job->n_units : 0;
	for (uint32_t i = 0; i < j->n_units; i++)
		fill_unit(a, job, job->units[i], j->units[i]);
}

/* What a question is about, and what the asker may see. */
struct scope {
	uid_t uid;
	const char *job; /* "": all */
};

static bool visible(const struct scope *s, const struct job *job)
{
	return job_may_use(job, s->uid) && (!*s->job || strcmp(s->job, job->rec->name) == 0);
}

static void fill_jobs(struct arena *a, struct jobs *jobs, const struct scope *scope,
		      bool with_units, Shardd__V1__StatusReply *reply)
{
	struct list *lists[] = { &jobs->all, &jobs->zombies };
	struct job *job, *tmp;
	size_t n = 0;

	for (size_t i = 0; i < ARRAY_SIZE(lists); i++)
		list_for_each (job, tmp, lists[i], link)
			n += visible(scope, job);
	reply->jobs = MESSAGES(a, n, JobStatus, job_status);
	for (size_t i = 0; reply->jobs && i < ARRAY_SIZE(lists); i++)
		list_for_each (job, tmp, lists[i], link)
			if (visible(scope, job))
				fill_job(a, job, with_units, reply->jobs[reply->n_jobs++]);
}

/* ------------------------------------------------------ sessions and slabs */

/* Of which it is a rank, or which it reads. */
static const struct job *job_of(const struct session *s)
{
	return s->member ? s->member->job : s->reader ? s->reader->job : NULL;
}

static bool session_visible(const struct scope *scope, const struct session *s)
{
	uid_t uid = proc_uid(s->proc);

	if (scope->uid != 0 && scope->uid != geteuid() && scope->uid != uid)
		return false;
	return !*scope->job || (job_of(s) && strcmp(job_of(s)->rec->name, scope->job) == 0);
}

static void fill_ring(struct arena *a, const struct session *s, Shardd__V1__SessionStatus *r)
{
	struct session_ring_info info;
	Shardd__V1__RingStatus **ring = s->ring ? MESSAGES(a, 1, RingStatus, ring_status) : NULL;

	if (!ring)
		return;
	s->sessions->rings->info(s, &info);
	r->ring = ring[0];
	r->ring->bytes = info.bytes;
	r->ring->submissions = info.submissions;
	r->ring->completions = info.completions;
	r->ring->wakes = info.wakes;
	r->ring->woken = info.woken;
	r->ring->full = info.full;
}

static void fill_session(struct arena *a, const struct session *s, Shardd__V1__SessionStatus *r)
{
	const struct member *m = s->member;

	r->session = s->id;
	r->pid = (int32_t)proc_pid(s->proc);
	r->uid = proc_uid(s->proc);
	r->client_name = text(a, s->name);
	r->job = text(a, job_of(s) ? job_of(s)->rec->name : "");
	r->rank = m ? (int32_t)m->rank : -1;
	r->age_s = (clock_now_us() - s->created_us) / 1000000u;
	r->pending_ops = m ? m->pending : 0;
	r->ops_total = s->ops_total;
	r->held_bytes = m ? m->pool.used : 0;
	r->local_channel = !list_empty(&s->locals);
	fill_ring(a, s, r);
}

static void fill_sessions(struct arena *a, struct sessions *sessions, const struct scope *scope,
			  Shardd__V1__StatusReply *reply)
{
	struct session *s, *tmp;

	reply->sessions = MESSAGES(a, sessions->count, SessionStatus, session_status);
	if (!reply->sessions)
		return;
	list_for_each (s, tmp, &sessions->all, link)
		if (session_visible(scope, s))
			fill_session(a, s, reply->sessions[reply->n_sessions++]);
}

/* The job that pays for a slab, if the asker may know. */
static const struct job *payer_of(struct jobs *jobs, const struct scope *scope,
				  const struct slab *s)
{
	struct list *lists[] = { &jobs->all, &jobs->zombies };
	struct job *job, *tmp;

	for (size_t i = 0; i < ARRAY_SIZE(lists); i++)
		list_for_each (job, tmp, lists[i], link)
			if (&job->quota == s->payer)
				return visible(scope, job) ? job : NULL;
	return NULL;
}

static void fill_slabs(struct arena *a, struct jobs *jobs, const struct scope *scope,
		       Shardd__V1__StatusReply *reply)
{
	struct slab *s, *tmp;
	size_t n = 0;

	list_for_each (s, tmp, &jobs->node->devices[0].table->slabs, link)
		n++;
	reply->slabs = MESSAGES(a, n, SlabStatus, slab_status);
	if (!reply->slabs)
		return;
	list_for_each (s, tmp, &jobs->node->devices[0].table->slabs, link) {
		const struct job *job = payer_of(jobs, scope, s);
		Shardd__V1__SlabStatus *r;

		if (!job)
			continue;
		r = reply->slabs[reply->n_slabs++];
		r->slab = s->id;
		r->job = text(a, job->rec->name);
		r->class_ = (char *)mem_class_name(s->class);
		r->owner_rank = s->owner_rank;
		r->bytes = s->bytes;
		r->used_bytes = pool_slab_used(s);
		r->quarantined_bytes = s->quarantined;
		r->exported = s->exported;
	}
}

static uint32_t count_descriptors(void)
{
	DIR *dir = opendir("/proc/self/fd");
	uint32_t n = 0;

	if (!dir)
		return 0;
	while (readdir(dir))
		n++;
	closedir(dir);
	return n - 3; /* ., .., and the directory itself */
}

/* -------------------------------------------------------------- the methods */

static int scope_of(struct rpc_call *call, const char *job, struct scope *ret, struct fault *f)
{
	struct conn *c = rpc_call_conn(call);

	if (!c)
		return fault_set(f, FAULT_CANCELLED, NULL, "the connection is closed");
	if (*job && unit_spec_name(job, JOB_NAME_MAX, "job", f))
		return f->code;
	*ret = (struct scope){ proc_uid(conn_proc(c)), job };
	return 0;
}

static int check_job(struct jobs *jobs, const struct scope *scope, struct fault *f)
{
	struct job *job;

	return *scope->job ? job_find(jobs, scope->job, scope->uid, &job, f) : 0;
}

static void finish(struct rpc_call *call, struct arena *a, const ProtobufCMessage *reply)
{
	struct fault f = FAULT_NULL;

	if (a->failed) {
		fault_set(&f, FAULT_EXHAUSTED, NULL, "no memory for the answer");
		rpc_call_fail(call, &f);
	} else {
		rpc_call_reply(call, reply);
	}
	arena_free(a);
}

static void get(struct rpc_call *call, const ProtobufCMessage *request, void *userdata)
{
	const Shardd__V1__StatusRequest *r = (const Shardd__V1__StatusRequest *)request;
	struct svc_status *svc = userdata;
	Shardd__V1__StatusReply reply = SHARDD__V1__STATUS_REPLY__INIT;
	struct node *node = svc->jobs->node;
	struct arena a = ARENA_NULL;
	struct fault f = FAULT_NULL;
	struct scope scope;

	if (scope_of(call, r->job, &scope, &f) || check_job(svc->jobs, &scope, &f)) {
		rpc_call_fail(call, &f);
		return;
	}
	reply.version = (char *)SHARDD_VERSION;
	reply.pid = (int32_t)getpid();
	reply.uptime_s = (clock_now_us() - node->started_us) / 1000000u;
	fill_devices(&a, node, &reply);
	fill_comms(&a, node, &reply);
	fill_jobs(&a, svc->jobs, &scope, r->with_units, &reply);
	fill_sessions(&a, svc->sessions, &scope, &reply);
	if (r->with_slabs)
		fill_slabs(&a, svc->jobs, &scope, &reply);
	reply.ring_bytes = svc->sessions->rings ? svc->sessions->rings->bytes(svc->sessions) : 0;
	reply.connections = svc->connections(svc->userdata);
	reply.open_descriptors = count_descriptors();
	reply.log_dropped = log_dropped();
	reply.draining = svc->jobs->draining;
	finish(call, &a, &reply.base);
}

/* By whose job it was then: that may be gone, and the name be somebody else's by now. */
static bool record_visible(const struct scope *scope, const char *job, uid_t uid)
{
	if (*scope->job && strcmp(scope->job, job) != 0)
		return false;
	return scope->uid == uid || scope->uid == 0 || scope->uid == geteuid();
}

/* @us on the wire, where times begin with the daemon's and 0 is none. */
static uint64_t since(uint64_t start, uint64_t us)
{
	return us ? us - start : 0;
}

static const char *record_state(const struct record *r)
{
	if (r->op)
		return op_state_name(r->op->state);
	return r->error[0] ? "FAILED" : "DONE";
}

static void fill_record(struct arena *a, const struct record *r, uint64_t start,
			Shardd__V1__OpRecord *o)
{
	char waits[512] = "";

	if (r->op)
		op_waits_for(r->op, waits, sizeof(waits));
	o->id = r->id;
	o->job = text(a, r->job);
	o->rank = r->rank;
	o->pid = r->pid;
	o->op = (char *)r->name;
	o->unit = text(a, r->unit);
	o->group = text(a, r->group);
	o->number = r->op ? r->op->entry.number : r->number;
	o->seq = r->seq;
	o->epoch = r->epoch;
	o->state = (char *)record_state(r);
	o->announced_us = r->announced_us - start;
	o->active_us = since(start, r->op ? r->op->active_us : r->active_us);
	o->started_us = since(start, r->op ? r->op->started_us : r->started_us);
	o->finished_us = since(start, r->finished_us);
	o->bytes = r->bytes;
	o->error = text(a, r->error);
	o->waits_for = text(a, waits);
}

static void fill_ops(struct arena *a, const struct scope *scope, uint32_t limit, uint64_t start,
		     Shardd__V1__OpsReply *reply)
{
	const struct record *rec;
	size_t n = 0, skip;

	for (size_t i = 0; (rec = recorder_at(i)); i++)
		n += record_visible(scope, rec->job, rec->uid);
	skip = limit && n > limit ? n - limit : 0;
	reply->ops = MESSAGES(a, n - skip, OpRecord, op_record);
	for (size_t i = 0; reply->ops && (rec = recorder_at(i)); i++) {
		if (!record_visible(scope, rec->job, rec->uid))
			continue;
		if (skip)
			skip--;
		else
			fill_record(a, rec, start, reply->ops[reply->n_ops++]);
	}
}

static void fill_device_record(struct arena *a, const struct device_record *r, uint64_t start,
			       Shardd__V1__DeviceRecord *d)
{
	d->id = r->id;
	d->job = text(a, r->job);
	d->device = text(a, r->device);
	d->queue = (char *)r->queue;
	d->op = (char *)r->name;
	d->unit = text(a, r->unit);
	d->number = r->number;
	d->epoch = r->epoch;
	d->submitted_us = r->submitted_us - start;
	d->began_us = since(start, r->began_us);
	d->ended_us = r->pending ? 0 : since(start, r->ended_us);
	d->kernels = r->kernels;
	d->bytes = r->bytes;
	d->error = text(a, r->status ? strerror(-r->status) : "");
}

static void fill_device_records(struct arena *a, const struct scope *scope, uint32_t limit,
				uint64_t start, Shardd__V1__OpsReply *reply)
{
	const struct device_record *rec;
	size_t n = 0, skip;

	for (size_t i = 0; (rec = recorder_device_at(i)); i++)
		n += record_visible(scope, rec->job, rec->uid);
	skip = limit && n > limit ? n - limit : 0;
	reply->devices = MESSAGES(a, n - skip, DeviceRecord, device_record);
	for (size_t i = 0; reply->devices && (rec = recorder_device_at(i)); i++) {
		if (!record_visible(scope, rec->job, rec->uid))
			continue;
		if (skip)
			skip--;
		else
			fill_device_record(a, rec, start, reply->devices[reply->n_devices++]);
	}
}

static void ops(struct rpc_call *call, const ProtobufCMessage *request, void *userdata)
{
	const Shardd__V1__OpsRequest *r = (const Shardd__V1__OpsRequest *)request;
	struct svc_status *svc = userdata;
	Shardd__V1__OpsReply reply = SHARDD__V1__OPS_REPLY__INIT;
	uint64_t start = svc->jobs->node->started_us;
	struct arena a = ARENA_NULL;
	struct fault f = FAULT_NULL;
	struct scope scope;

	if (scope_of(call, r->job, &scope, &f) || check_job(svc->jobs, &scope, &f)) {
		rpc_call_fail(call, &f);
		return;
	}
	fill_ops(&a, &scope, r->limit, start, &reply);
	if (r->with_devices)
		fill_device_records(&a, &scope, r->limit, start, &reply);
	reply.now_us = clock_now_us() - start;
	finish(call, &a, &reply.base);
}

void svc_status_init(struct svc_status *svc, struct sessions *sessions, struct jobs *jobs,
		     unsigned (*connections)(void *userdata), void *userdata)
{
	static const struct rpc_method methods[] = {
		{ "Get", get, false, false },
		{ "Ops", ops, false, false },
		{ NULL, NULL, false, false },
	};

	*svc = (struct svc_status){ sessions,
				    jobs,
				    connections,
				    userdata,
				    { &shardd__v1__status__descriptor, methods, svc } };
}
