#include "nodefix.h"

#include "job/job_journal.h"
#include "job/registration.h"
#include "step/backward.h"
#include "step/doubt.h"

#include <criterion/criterion.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "core/check.h"
#include "core/clock.h"
#include "copies/full.h"
#include "journalfix.h"
#include "job/loading.h"
#include "job/registration.h"
#include "op/op_run.h"
#include "op/op_time.h"
#include "op/op_util.h"
#include "op/stall.h"
#include "work/drain.h"

unsigned nodefix_ended;

/* ------------------------------------------------------------------ the node */

static struct nodefix *the_node; /* job events carry no userdata */

static void on_event(struct member *m, enum job_event_kind kind, const char *text)
{
	the_node->events.n++;
	the_node->events.kind = kind;
	the_node->events.m = m;
	snprintf(the_node->events.text, sizeof(the_node->events.text), "%s", text);
}

static void on_stall(struct job *job, bool stalls)
{
	struct nodefix *n = CONTAINER_OF(job->node, struct nodefix, node);
	uint64_t since;

	n->events.n++;
	n->events.kind = stalls ? JOB_EVENT_STALL : JOB_EVENT_STALL_ENDED;
	n->events.job = job;
	n->events.m = NULL;
	if (stalls)
		op_describe(stall_op(job, &since), n->events.text, sizeof(n->events.text));
}

static struct nodefix *fixture_of(const struct job *job)
{
	return CONTAINER_OF(job->node, struct nodefix, node);
}

static void on_announce(struct group *g, uint64_t number, const struct match_entry *first)
{
	fixture_of(g->job)->announce(fixture_of(g->job), g, number, first);
}

static void on_refuse(struct group *g, uint64_t number, const struct fault *f)
{
	fixture_of(g->job)->refuse(fixture_of(g->job), g, number, f);
}

static void on_leave_out(struct job *job, struct unit *u)
{
	fixture_of(job)->leave_out(fixture_of(job), job, u);
}

static void on_joined(struct group *g, uint64_t number, uint64_t last_number, uint32_t last)
{
	fixture_of(g->job)->joined(fixture_of(g->job), g, number, last_number, last);
}

static void on_asks(struct group *g, const struct asked *a)
{
	fixture_of(g->job)->asks(fixture_of(g->job), g, a);
}

static void on_writes(struct job *job, const struct across_write *w)
{
	fixture_of(job)->writes(fixture_of(job), job, w);
}

static void on_write_allowed(struct job *job, const struct across_write *w)
{
	fixture_of(job)->write_allowed(fixture_of(job), job, w);
}

static void on_write_refused(struct job *job, const struct across_write *w, const struct fault *f)
{
	fixture_of(job)->write_refused(fixture_of(job), job, w, f);
}

static void on_made(struct job *job, uint64_t position)
{
	fixture_of(job)->made(fixture_of(job), job, position);
}

static void on_want(struct job *job, struct unit *u, uint64_t turn)
{
	fixture_of(job)->want(fixture_of(job), job, u, turn);
}

static void on_give(struct job *job, struct unit *u, uint64_t turn)
{
	fixture_of(job)->give(fixture_of(job), job, u, turn);
}

static void on_prepared(struct group *g, uint64_t number)
{
	fixture_of(g->job)->prepared(fixture_of(g->job), g, number);
}

static bool comm_there(void *arg)
{
	struct nodefix *n = arg;
	struct device *all[NODE_MAX_DEVICES];
	struct node_comm *nc;
	struct fault f = FAULT_NULL;
	enum res r;

	for (unsigned i = 0; i < n->node.n_devices; i++)
		all[i] = &n->node.devices[i];
	r = node_comm(&n->node, all, n->node.n_devices, &nc, &f);
	cr_assert(!f.code, "%s", f.text);
	if (r == RES_DONE)
		nc->users++; /* as the server does: they stay */
	return r == RES_DONE;
}

/* What the first registration would have to wait for. */
static void begin_engine(struct nodefix *n, bool fake)
{
	n->node.loopq = &n->run.queue;
	cr_assert_eq(engine_local_new(&n->run.queue, &n->node.local), 0);
	if (fake || n->node.n_devices > 1) {
		cr_assert_eq(engine_fake_new(&n->run.queue, &n->node.engine), 0);
		n->node.engine_for_one = true;
	}
	looprun_until(&n->run, comm_there, n, 5);
}

static void on_news(void *userdata, enum backend_news news)
{
	if (news == BACKEND_NEWS_MEMORY)
		node_wake(userdata);
}

static void begin_devices(struct nodefix *n, const struct nodefix_options *o)
{
	for (unsigned i = 0; i < (o->devices ? o->devices : 1); i++) {
		struct backend *b;

		cr_assert_eq(backend_fake_new(&n->run.queue, o->capacity, &b), 0);
		if (o->queues)
			cr_assert_eq(backend_fake_queues(b), 0);
		snprintf(b->info.id, sizeof(b->info.id), "fake:%u", i);
		backend_on_news(b, on_news, &n->node);
		slab_device_init(&n->node.devices[i], b, 0);
		if (i)
			slab_device_follow(&n->node.devices[i], &n->node.devices[0], i);
		n->node.n_devices++;
	}
}

void nodefix_begin(struct nodefix *n, const struct nodefix_options *o)
{
	static const struct nodefix_options none;
	const struct job_ops ops = { .abort_ops = op_abort_all,
				     .before_change = loading_let,
				     .drain = drain_wait,
				     .rolled_back = full_invalidate,
				     .unit_released = backward_released,
				     .complete = coll_complete,
				     .failed = op_failed,
				     .event = on_event,
				     .stall = on_stall,
				     .announce = on_announce,
				     .refuse = on_refuse,
				     .want = on_want,
				     .give = on_give,
				     .leave_out = on_leave_out,
				     .made = on_made,
				     .joined = on_joined,
				     .asks = on_asks,
				     .writes = on_writes,
				     .write_allowed = on_write_allowed,
				     .write_refused = on_write_refused,
				     .prepared = on_prepared,
				     .epoch_ends = doubt_epoch_ends,
				     .drop_doubt = doubt_drop_all,
				     .signals_gone = queue_tasks_forget };

	o = o ? o : &none;
	*n = (struct nodefix){ .beside = o->beside };
	the_node = n;
	nodefix_ended = 0;
	looprun_init(&n->run);
	if (!n->beside)
		cr_assert_eq(recorder_init(o->recorder ? o->recorder : 64), 0);
	node_init(&n->node, &n->run.loop);
	begin_devices(n, o);
	n->node.limits = (struct node_limits){ .job_ttl_s = 3600,
					       .max_jobs = 16,
					       .max_units_per_job = 10000000,
					       .max_world_size = 1024,
					       .reduce_batch_bytes = 1 << 20,
					       .stream_stall_ms = 30000,
					       .max_inflight_ops = 4096 };
	begin_engine(n, o->fake_engine);
	jobs_init(&n->jobs, &n->node, &ops);
	n->journal = journalfix_begin(&n->jobs);
	cr_assert_eq(proc_new_pid(&n->run.loop, getpid(), getuid(), getgid(), &n->proc), 0);
}

static bool no_job_left(void *arg)
{
	struct nodefix *n = arg;

	return jobs_gone(&n->jobs);
}

void nodefix_end(struct nodefix *n)
{
	for (unsigned i = 0; i < n->node.n_devices; i++) {
		backend_fake_fail(n->node.devices[i].backend, 0, 0);
		backend_fake_hold(n->node.devices[i].backend, false);
	}
	while (n->n_members)
		nodefix_drop(n, n->members[0], "is gone");
	nodefix_turns(n);
	journalfix_check(&n->jobs);
	jobs_end(&n->jobs);
	looprun_until(&n->run, no_job_left, n, 10); /* threads close parts of copies */
	jobs_deinit(&n->jobs);
	n->journal = journal_free(n->journal);
	if (!n->beside)
		recorder_deinit();
	node_deinit(&n->node);
	n->node.nodes_engine = engine_close(n->node.nodes_engine);
	n->node.engine = engine_close(n->node.engine);
	n->node.local = engine_close(n->node.local);
	for (unsigned i = 0; i < n->node.n_devices; i++) {
		struct backend *b = n->node.devices[i].backend;

		slab_device_deinit(&n->node.devices[i]);
		backend_close(b);
	}
	n->proc = proc_unref(n->proc);
	looprun_deinit(&n->run);
	clock_real();
}

void nodefix_wrote(struct nodefix *n)
{
	cr_assert_eq(jobs_journal_base(&n->jobs), 0);
}

/* ---------------------------------------------------------- jobs and members */

struct job *nodefix_job(struct nodefix *n, const char *name, uint32_t world, uint64_t quota)
{
	struct job_spec spec = {
		.name = name, .world_size = world, .lifetime = JOB_KEEP, .quota_bytes = quota
	};
	struct fault f = FAULT_NULL;
	struct job *job = NULL;

	cr_assert_eq(job_open(&n->jobs, &spec, getuid(), getgid(), &job, NULL, &f), 0, "%s",
		     f.text);
	return job;
}

static void keep(struct nodefix *n, struct member *m)
{
	for (unsigned i = 0; i < n->n_members; i++)
		if (n->members[i] == m)
			return;
	CHECK(n->n_members < NODEFIX_MEMBERS);
	n->members[n->n_members++] = m;
}

enum res nodefix_try_join(struct nodefix *n, struct job *job, uint32_t rank, struct proc *proc,
			  struct member *again, struct member **ret, struct fault *f)
{
	enum res r = job_join(job, &(struct job_joining){ .rank = rank, .device = "" },
			      proc ? proc : n->proc, rank + 1, again, ret, f);

	if (r == RES_DONE)
		keep(n, *ret);
	return r;
}

struct member *nodefix_join(struct nodefix *n, struct job *job, uint32_t rank)
{
	struct fault f = FAULT_NULL;
	struct member *m = NULL;

	cr_assert_eq(nodefix_try_join(n, job, rank, NULL, NULL, &m, &f), 0, "%s", f.text);
	return m;
}

void nodefix_drop(struct nodefix *n, struct member *m, const char *why)
{
	struct job *job = m->job;

	for (unsigned i = 0; i < n->n_members; i++)
		if (n->members[i] == m)
			n->members[i--] = n->members[--n->n_members];
	job_lost(m, why);
	member_unref(m);
	if (job->life.deleted)
		job_settle(job);
}

void nodefix_fork(struct nodefix *n, struct nodefix_child *c)
{
	c->pid = fork();
	cr_assert_geq(c->pid, 0);
	if (c->pid == 0) {
		prctl(PR_SET_PDEATHSIG, SIGKILL);
		for (;;)
			pause();
	}
	cr_assert_eq(proc_new_pid(&n->run.loop, c->pid, getuid(), getgid(), &c->proc), 0);
}

static bool is_gone(void *arg)
{
	return proc_gone(arg);
}

void nodefix_kill(struct nodefix *n, struct nodefix_child *c)
{
	kill(c->pid, SIGKILL);
	looprun_until(&n->run, is_gone, c->proc, 10);
	waitpid(c->pid, NULL, 0);
	nodefix_turns(n);
}

void nodefix_unref(struct nodefix_child *c)
{
	c->proc = proc_unref(c->proc);
}

/* -------------------------------------------------------------------- units */

state_unit *nodefix_spec(const char *name, uint64_t elements)
{
	state_unit *spec = state_unit_new(name);
	state_tensor *t = state_tensor_new("weight", &elements, 1);

	CHECK(spec && t && state_unit_add_tensor(spec, t) == 0);
	t->init_kind = FILL_UNIFORM;
	t->init_a = -1;
	t->init_b = 1;
	spec->storage_dtype = DTYPE_FP32;
	spec->compute_dtype = DTYPE_FP32;
	spec->gradient_dtype = DTYPE_FP32;
	spec->shard_multiple = 1;
	spec->optimizer->kind = OPTIM_ADAMW;
	spec->optimizer->lr = 0.1;
	spec->optimizer->beta1 = 0.9;
	spec->optimizer->beta2 = 0.999;
	spec->optimizer->eps = 1e-8;
	return spec;
}

enum res nodefix_try_register(struct job *job, state_unit **specs, size_t n, uint32_t *ids,
			      uint64_t *ret_charged, struct fault *f)
{
	struct registration *r = NULL;
	enum res res = RES_FAILED;

	if (registration_new(job, specs, n, ids, &r) < 0) {
		job_drop_spare(job);
		return res_of(fault_errno(f, -ENOMEM, "registering units"));
	}
	if (registration_check(r, SIZE_MAX, f) == 0)
		res = registration_build(r, ret_charged, f);
	else
		job_drop_spare(job);
	registration_free(r);
	return res;
}

struct unit *nodefix_register(struct job *job, state_unit *spec)
{
	struct fault f = FAULT_NULL;
	uint32_t id = 0;
	uint64_t charged;

	cr_assert_eq(nodefix_try_register(job, &spec, 1, &id, &charged, &f), RES_DONE, "%s",
		     f.text);
	state_unit_free(spec);
	return job_unit_by_id(job, id);
}

struct unit *nodefix_unit(struct nodefix *n, struct job *job, state_unit *spec,
			  struct member **members, uint32_t n_members)
{
	struct unit *u = nodefix_register(job, spec);
	struct nodefix_op *ops = calloc(n_members, sizeof(*ops));

	CHECK(ops);
	for (uint32_t i = 0; i < n_members; i++)
		nodefix_seed(n, members[i], u, 1, &ops[i]);
	for (uint32_t i = 0; i < n_members; i++)
		nodefix_ok(&ops[i], "Initialise");
	free(ops);
	return u;
}

/* ---------------------------------------------------------------------- ops */

static void note_reply(const ProtobufCMessage *reply, void *ctx)
{
	struct nodefix_op *op = ctx;

	op->reply_bytes = protobuf_c_message_get_packed_size(reply) + 1;
	if (op->reply_bytes <= sizeof(op->reply))
		(void)protobuf_c_message_pack(reply, op->reply);
}

static void on_done(struct op *op, void *userdata)
{
	struct nodefix_op *o = userdata;

	CHECK(!o->over); /* exactly once */
	o->over = true;
	o->op = NULL;
	o->fault = op->fault;
	o->result = op->result;
	memcpy(o->outcome, op->outcome, sizeof(o->outcome));
	o->number = op->entry.number;
	o->started = op->started_us;
	o->order = nodefix_ended++;
	memcpy(o->args, op->args, sizeof(o->args));
	if (!op->fault.code)
		op_encode(op, note_reply, o);
	protobuf_c_message_free_unpacked(o->request, NULL);
	o->request = NULL;
}

/* Of what lies on the caller's stack. Not with malloc, which tests let fail (failmalloc.h). */
static ProtobufCMessage *copy_of(const ProtobufCMessage *msg)
{
	size_t bytes = protobuf_c_message_get_packed_size(msg);
	void *packed = NULL;
	ProtobufCMessage *copy;

	CHECK(posix_memalign(&packed, 16, bytes + 1) == 0);
	(void)protobuf_c_message_pack(msg, packed);
	copy = protobuf_c_message_unpack(msg->descriptor, NULL, bytes, packed);
	CHECK(copy);
	free(packed);
	return copy;
}

int nodefix_submit(struct nodefix *n, struct member *m, const char *type, ProtobufCMessage *msg,
		   struct nodefix_op *o)
{
	const struct op_type *t = op_type_by_name(type);
	Shardd__V1__OpHeader h = SHARDD__V1__OP_HEADER__INIT;
	Shardd__V1__StreamPoint point = SHARDD__V1__STREAM_POINT__INIT, *points[] = { &point };
	struct op *op = NULL;

	CHECK(t && t->request == msg->descriptor);
	*o = (struct nodefix_op){ .seq = o->seq,
				  .epoch = o->epoch,
				  .timeout_ms = o->timeout_ms,
				  .stream = o->stream,
				  .after = o->after,
				  .n = n };
	point.value = o->after;
	h.stream = o->stream;
	h.n_after = o->after != 0;
	h.after = points;
	h.seq = o->seq;
	h.epoch = o->epoch;
	h.timeout_ms = o->timeout_ms;
	*(Shardd__V1__OpHeader **)((char *)msg + t->request->fields[0].offset) = &h;
	o->request = copy_of(msg);
	o->submitted = op_submit(m, t, o->request, 0, on_done, o, &op, &o->fault);
	if (o->submitted) {
		protobuf_c_message_free_unpacked(o->request, NULL);
		o->request = NULL;
	}
	if (o->submitted == 0 && !o->over)
		o->op = op;
	CHECK(o->submitted == 0 || !o->over);
	return o->submitted;
}

int nodefix_reduce(struct nodefix *n, struct member *m, const struct unit *u, bool more,
		   struct nodefix_op *op)
{
	Shardd__V1__ReduceRequest r = SHARDD__V1__REDUCE_REQUEST__INIT;

	r.unit = u->id;
	r.more = more;
	return nodefix_submit(n, m, "Reduce", &r.base, op);
}

int nodefix_on_unit(struct nodefix *n, struct member *m, const char *type, const struct unit *u,
		    struct nodefix_op *op)
{
	/* all of these messages begin with the same fields; the rest is 0 */
	const ProtobufCMessageDescriptor *d = op_type_by_name(type)->request;
	union {
		Shardd__V1__GatherRequest r;
		Shardd__V1__ReduceRequest reduce;
		Shardd__V1__ReturnFullRequest back;
	} any;

	CHECK(d->sizeof_message <= sizeof(any));
	protobuf_c_message_init(d, &any);
	any.r.unit = u->id;
	return nodefix_submit(n, m, type, &any.r.base, op);
}

int nodefix_defer(struct nodefix *n, struct member *m, const struct unit *u, struct nodefix_op *op)
{
	Shardd__V1__ReduceRequest r = SHARDD__V1__REDUCE_REQUEST__INIT;

	r.unit = u->id;
	r.defer_all_reduce = 1;
	return nodefix_submit(n, m, "Reduce", &r.base, op);
}

int nodefix_leave_out(struct nodefix *n, struct member *m, const struct unit *u,
		      const uint32_t *tensor, struct nodefix_op *op)
{
	Shardd__V1__ReduceRequest r = SHARDD__V1__REDUCE_REQUEST__INIT;

	r.unit = u->id;
	r.unused_tensors = (uint32_t *)tensor;
	r.n_unused_tensors = 1;
	return nodefix_submit(n, m, "Reduce", &r.base, op);
}

int nodefix_seed(struct nodefix *n, struct member *m, const struct unit *u, uint64_t seed,
		 struct nodefix_op *op)
{
	Shardd__V1__InitialiseRequest r = SHARDD__V1__INITIALISE_REQUEST__INIT;
	Shardd__V1__Seed s = SHARDD__V1__SEED__INIT;

	s.seed = seed;
	r.unit = u->id;
	r.how_case = SHARDD__V1__INITIALISE_REQUEST__HOW_SEED;
	r.seed = &s;
	return nodefix_submit(n, m, "Initialise", &r.base, op);
}

int nodefix_own(struct nodefix *n, struct member *m, const struct unit *u, uint64_t buffer,
		struct nodefix_op *op)
{
	Shardd__V1__InitialiseRequest r = SHARDD__V1__INITIALISE_REQUEST__INIT;
	Shardd__V1__Own own = SHARDD__V1__OWN__INIT;

	r.unit = u->id;
	r.how_case = SHARDD__V1__INITIALISE_REQUEST__HOW_OWN;
	r.own = &own;
	r.buffer = buffer;
	return nodefix_submit(n, m, "Initialise", &r.base, op);
}

int nodefix_alloc(struct nodefix *n, struct member *m, uint64_t bytes, struct nodefix_op *op)
{
	Shardd__V1__AllocBufferRequest r = SHARDD__V1__ALLOC_BUFFER_REQUEST__INIT;

	r.bytes = bytes;
	return nodefix_submit(n, m, "AllocBuffer", &r.base, op);
}

int nodefix_free(struct nodefix *n, struct member *m, uint64_t buffer, struct nodefix_op *op)
{
	Shardd__V1__FreeBufferRequest r = SHARDD__V1__FREE_BUFFER_REQUEST__INIT;

	r.buffer = buffer;
	return nodefix_submit(n, m, "FreeBuffer", &r.base, op);
}

int nodefix_all_reduce(struct nodefix *n, struct member *m, uint64_t buffer, uint64_t count,
		       struct nodefix_op *op)
{
	Shardd__V1__AllReduceRequest r = SHARDD__V1__ALL_REDUCE_REQUEST__INIT;

	r.buffer = buffer;
	r.count = count;
	r.dtype = SHARDD__V1__DTYPE__DTYPE_FP32;
	r.op = SHARDD__V1__REDUCE_OP__REDUCE_OP_SUM;
	return nodefix_submit(n, m, "AllReduce", &r.base, op);
}

int nodefix_broadcast(struct nodefix *n, struct member *m, uint64_t buffer, uint64_t bytes,
		      struct nodefix_op *op)
{
	Shardd__V1__BroadcastRequest r = SHARDD__V1__BROADCAST_REQUEST__INIT;

	r.buffer = buffer;
	r.bytes = bytes;
	return nodefix_submit(n, m, "Broadcast", &r.base, op);
}

int nodefix_barrier(struct nodefix *n, struct member *m, uint32_t group, struct nodefix_op *op)
{
	Shardd__V1__BarrierRequest r = SHARDD__V1__BARRIER_REQUEST__INIT;

	r.group = group;
	return nodefix_submit(n, m, "Barrier", &r.base, op);
}

int nodefix_clip(struct nodefix *n, struct member *m, double max_norm, struct nodefix_op *op)
{
	Shardd__V1__ClipGradNormRequest r = SHARDD__V1__CLIP_GRAD_NORM_REQUEST__INIT;

	r.max_norm = max_norm;
	return nodefix_submit(n, m, "ClipGradNorm", &r.base, op);
}

int nodefix_step(struct nodefix *n, struct member *m, struct nodefix_op *op)
{
	Shardd__V1__StepRequest r = SHARDD__V1__STEP_REQUEST__INIT;

	return nodefix_submit(n, m, "Step", &r.base, op);
}

int nodefix_commit(struct nodefix *n, struct member *m, uint64_t step, size_t blob_bytes,
		   struct nodefix_op *op)
{
	static uint8_t blob[JOB_MAX_BLOB + 1];
	Shardd__V1__CommitRequest r = SHARDD__V1__COMMIT_REQUEST__INIT;

	CHECK(blob_bytes <= sizeof(blob));
	r.step = step;
	r.blob = (ProtobufCBinaryData){ .len = blob_bytes, .data = blob };
	return nodefix_submit(n, m, "Commit", &r.base, op);
}

void nodefix_turn(struct nodefix *n)
{
	uv_run(&n->run.loop, UV_RUN_NOWAIT);
}

static bool op_over(void *arg)
{
	return ((struct nodefix_op *)arg)->over;
}

void nodefix_wait(struct nodefix_op *op)
{
	if (op->submitted == 0)
		looprun_until(&op->n->run, op_over, op, 10);
}

void nodefix_ok(struct nodefix_op *op, const char *what)
{
	nodefix_wait(op);
	cr_assert(!op->fault.code, "%s: %s", what, op->fault.text);
	cr_assert_gt(op->reply_bytes, 0);
}

static uint64_t moves(const struct nodefix *n)
{
	const struct node_comm *nc, *tmp;
	uint64_t sum = 0;

	for (unsigned i = 0; i < n->node.n_devices; i++) {
		const struct backend *b = n->node.devices[i].backend;

		sum += b->submitted + b->in_flight * 1000000u;
	}
	list_for_each (nc, tmp, &n->node.comms, link)
		for (unsigned q = 0; q < _BACKEND_Q_N; q++)
			sum += nc->comm[q] ? nc->comm[q]->in_flight * 1000u : 0;
	return sum;
}

/* Everything is on this one thread, so what three turns in a row do not change stays. */
void nodefix_turns(struct nodefix *n)
{
	uint64_t seen = UINT64_MAX;

	for (unsigned quiet = 0; quiet < 3;) {
		uint64_t now;

		uv_run(&n->run.loop, UV_RUN_NOWAIT);
		now = nodefix_ended + n->events.n + moves(n);
		quiet = now == seen ? quiet + 1 : 0;
		seen = now;
	}
}

void nodefix_write(const struct region *r, float value)
{
	float *p = region_addr(r);

	for (uint64_t i = 0; i < r->bytes / sizeof(*p); i++)
		p[i] = value;
}

const float *nodefix_params(const struct unit *u)
{
	return region_addr(&u->parts[0].params);
}
