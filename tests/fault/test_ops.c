/*
 * Every op, registration, joining and group creation, with the N-th call of the
 * backend, of the engine, or of malloc failing, N = 1, 2, ... until nothing fails any
 * more: no crash, an error in words for every rank, accounts exact, the job usable
 * afterwards (initialised again if it is TORN), everything freed at the end.
 */
#include <criterion/criterion.h>
#include <errno.h>
#include <stdio.h>

#include "core/check.h"
#include "failmalloc.h"
#include "fdcheck.h"
#include "job/registration.h"
#include "ops.h"

TestSuite(fault_ops, .init = fdcheck_begin, .fini = fdcheck_end, .timeout = 300);

/* ------------------------------------------------------------------- the world */

/* A gathered copy is made, used, or can be given back. */
static void check_copies(const struct world *w)
{
	for (uint32_t i = 0; i < w->job->n_units; i++) {
		const struct unit *u = w->job->units[i];

		cr_assert(!unit_has_copy(u) || u->copy == UNIT_COPY_CASTING || u->gathered_ranks ||
			  !list_empty(&u->idle));
	}
}

/* Wait for both ranks. One that failed alone tries again, as a trainer would. */
static void settle(struct world *w, submit_fn submit)
{
	for (unsigned again = 0; again < 3; again++) {
		bool over = true;

		nodefix_turns(&w->n);
		check_copies(w);
		for (unsigned r = 0; r < RANKS; r++)
			over = over && (w->op[r].over || w->op[r].submitted);
		if (over && !w->op[0].submitted && !w->op[1].submitted)
			return;
		for (unsigned r = 0; r < RANKS; r++)
			if (w->op[r].fault.code)
				submit(w, r);
	}
	cr_assert_fail("a rank waits for ever");
}

int ops_on_both(struct world *w, submit_fn submit)
{
	for (unsigned r = 0; r < RANKS; r++)
		submit(w, r);
	settle(w, submit);
	for (unsigned r = 0; r < RANKS; r++) {
		cr_assert(w->op[r].over);
		if (w->op[r].fault.code)
			w->fault = w->op[r].fault;
	}
	return (int)w->fault.code;
}

void ops_must(struct world *w, submit_fn submit, const char *what)
{
	w->fault = FAULT_NULL;
	cr_assert_eq(ops_on_both(w, submit), 0, "%s: %s", what, w->fault.text);
}

UNIT_OP(gather_plain, "Gather", plain)
UNIT_OP(gather_cast, "Gather", cast)
UNIT_OP(release_plain, "Release", plain)
UNIT_OP(release_cast, "Release", cast)
UNIT_OP(gradient, "GradientBuffer", plain)
UNIT_OP(gradient_cast, "GradientBuffer", cast)
UNIT_OP(reduce, "Reduce", plain)
UNIT_OP(reduce_cast, "Reduce", cast)
UNIT_OP(accumulate, "Accumulate", plain)
UNIT_OP(gradient_twice, "GradientBuffer", twice)
UNIT_OP(accumulate_twice, "Accumulate", twice)
UNIT_OP(reduce_twice, "Reduce", twice)

static int defer_twice(struct world *w, unsigned r)
{
	return nodefix_defer(&w->n, w->m[r], w->twice, &w->op[r]);
}

UNIT_OP(gradient_rich, "GradientBuffer", rich)

static int leave_out(struct world *w, unsigned r)
{
	static const uint32_t weight = 0;

	return nodefix_leave_out(&w->n, w->m[r], w->rich, &weight, &w->op[r]);
}

static int seed_plain(struct world *w, unsigned r)
{
	return nodefix_seed(&w->n, w->m[r], w->plain, 1, &w->op[r]);
}

static int seed_cast(struct world *w, unsigned r)
{
	return nodefix_seed(&w->n, w->m[r], w->cast, 1, &w->op[r]);
}

static int seed_rich(struct world *w, unsigned r)
{
	return nodefix_seed(&w->n, w->m[r], w->rich, 1, &w->op[r]);
}

static int seed_twice(struct world *w, unsigned r)
{
	return nodefix_seed(&w->n, w->m[r], w->twice, 1, &w->op[r]);
}

static int own(struct world *w, unsigned r)
{
	return nodefix_own(&w->n, w->m[r], w->plain, w->buffer[r].result.buffer, &w->op[r]);
}

static int alloc(struct world *w, unsigned r)
{
	return nodefix_alloc(&w->n, w->m[r], 3 << 20, &w->op[r]);
}

static int free_buffer(struct world *w, unsigned r)
{
	return nodefix_free(&w->n, w->m[r], w->buffer[r].result.buffer, &w->op[r]);
}

static int all_reduce(struct world *w, unsigned r)
{
	return nodefix_all_reduce(&w->n, w->m[r], w->buffer[r].result.buffer, 1000, &w->op[r]);
}

static int broadcast(struct world *w, unsigned r)
{
	return nodefix_broadcast(&w->n, w->m[r], w->buffer[r].result.buffer, 1000, &w->op[r]);
}

static int barrier(struct world *w, unsigned r)
{
	return nodefix_barrier(&w->n, w->m[r], 0, &w->op[r]);
}

static int clip(struct world *w, unsigned r)
{
	return nodefix_clip(&w->n, w->m[r], 0.5, &w->op[r]);
}

static int step(struct world *w, unsigned r)
{
	return nodefix_step(&w->n, w->m[r], &w->op[r]);
}

static int commit(struct world *w, unsigned r)
{
	return nodefix_commit(&w->n, w->m[r], w->job->rec->step + 1, 100, &w->op[r]);
}

UNIT_OP(summon, "SummonFull", plain)
UNIT_OP(unit_buffers, "UnitBuffers", rich)

static int summon_state(struct world *w, unsigned r)
{
	Shardd__V1__SummonFullRequest m = SHARDD__V1__SUMMON_FULL_REQUEST__INIT;

	m.unit = w->plain->id;
	m.state = 2;
	return nodefix_submit(&w->n, w->m[r], "SummonFull", &m.base, &w->op[r]);
}

static int give_back(struct world *w, unsigned r, bool write)
{
	Shardd__V1__ReturnFullRequest m = SHARDD__V1__RETURN_FULL_REQUEST__INIT;

	m.unit = w->plain->id;
	m.write = write;
	return nodefix_submit(&w->n, w->m[r], "ReturnFull", &m.base, &w->op[r]);
}

static int return_it(struct world *w, unsigned r)
{
	return give_back(w, r, false);
}

static int return_written(struct world *w, unsigned r)
{
	return give_back(w, r, true);
}

static int broadcast_buffers(struct world *w, unsigned r)
{
	Shardd__V1__BroadcastBuffersRequest m = SHARDD__V1__BROADCAST_BUFFERS_REQUEST__INIT;

	return nodefix_submit(&w->n, w->m[r], "BroadcastBuffers", &m.base, &w->op[r]);
}

static int convert(struct world *w, unsigned r)
{
	static uint32_t units[] = { 1, 2 };
	static Shardd__V1__ConvertUnitsRequest m[RANKS];

	m[r] = (Shardd__V1__ConvertUnitsRequest)SHARDD__V1__CONVERT_UNITS_REQUEST__INIT;
	m[r].units = units;
	m[r].n_units = 2;
	m[r].layout = SHARDD__V1__LAYOUT__LAYOUT_DIM0;
	return nodefix_submit(&w->n, w->m[r], "ConvertUnits", &m[r].base, &w->op[r]);
}

static int plan(struct world *w, unsigned r)
{
	static Shardd__V1__PlanBackwardRequest__Clip norm;
	static Shardd__V1__PlanBackwardRequest m[RANKS];

	shardd__v1__plan_backward_request__clip__init(&norm);
	norm.max_norm = 1;
	m[r] = (Shardd__V1__PlanBackwardRequest)SHARDD__V1__PLAN_BACKWARD_REQUEST__INIT;
	m[r].clip = &norm;
	m[r].inv_scale = 0.5;
	return nodefix_submit(&w->n, w->m[r], "PlanBackward", &m[r].base, &w->op[r]);
}

/* It holds until the step. */
static void mend_plan(struct world *w)
{
	MUST(w, step);
}

static int clip_value(struct world *w, unsigned r)
{
	Shardd__V1__ClipGradValueRequest m = SHARDD__V1__CLIP_GRAD_VALUE_REQUEST__INIT;

	m.value = 0.5;
	return nodefix_submit(&w->n, w->m[r], "ClipGradValue", &m.base, &w->op[r]);
}

static int unscale(struct world *w, unsigned r)
{
	Shardd__V1__UnscaleRequest m = SHARDD__V1__UNSCALE_REQUEST__INIT;

	m.inv_scale = 0.5;
	return nodefix_submit(&w->n, w->m[r], "Unscale", &m.base, &w->op[r]);
}

/* Frozen and tied tensors, two that are trained, buffers. */
static state_unit *rich_spec(const char *name)
{
	static const uint64_t shape[] = { 3, 2 }, whole = 1000;
	state_unit *spec = nodefix_spec(name, 7);
	state_tensor *frozen = state_tensor_new("frozen", shape, 2);
	state_tensor *tied = state_tensor_new("tied", &whole, 1);
	state_tensor *bias = state_tensor_new("bias", shape, 2);
	state_buffer *buffer = state_buffer_new("mean", shape, 2);

	frozen->frozen = true;
	buffer->dtype = BUFFER_FP32;
	CHECK(state_tensor_set_alias(tied, "plain", "weight") == 0);
	CHECK(state_unit_add_tensor(spec, frozen) == 0 && state_unit_add_tensor(spec, tied) == 0);
	CHECK(state_unit_add_tensor(spec, bias) == 0 && state_unit_add_buffer(spec, buffer) == 0);
	spec->layout = LAYOUT_DIM0;
	return spec;
}

static struct unit *register_one(struct world *w, const char *name, enum dtype compute)
{
	state_unit *spec = nodefix_spec(name, 1000);

	spec->compute_dtype = compute;
	return nodefix_register(w->job, spec);
}

static struct unit *register_twice(struct world *w)
{
	state_unit *spec = nodefix_spec("twice", 1000);

	spec->gradient_dtype = DTYPE_FP32;
	spec->reduce_dtype = DTYPE_BF16;
	spec->reduce_profile = PROFILE_FSDP2;
	spec->strategy = STRATEGY_REPLICATE;
	return nodefix_register(w->job, spec);
}

static void test_ops_begin(struct world *w, bool fake_engine)
{
	const struct nodefix_options o = { .fake_engine = fake_engine,
					   .devices = fake_engine ? 2 : 1 };

	*w = (struct world){ 0 };
	nodefix_begin(&w->n, &o);
	w->job = nodefix_job(&w->n, "job", RANKS, 0);
	for (unsigned r = 0; r < RANKS; r++)
		w->m[r] = nodefix_join(&w->n, w->job, r);
	w->plain = register_one(w, "plain", DTYPE_FP32);
	w->cast = register_one(w, "cast", DTYPE_BF16);
	w->rich = nodefix_register(w->job, rich_spec("rich"));
	w->twice = register_twice(w);
	MUST(w, seed_plain);
	MUST(w, seed_cast);
	MUST(w, seed_twice);
	for (unsigned r = 0; r < RANKS; r++)
		NODEFIX_OK(nodefix_alloc(&w->n, w->m[r], 4000, &w->buffer[r]), &w->buffer[r]);
	MUST(w, commit);
}

/* Of all ddps, with the rows that their ranks have handed in, and of SetPrefetch. */
static uint64_t control_bytes(const struct world *w)
{
	uint64_t sum = 0;

	for (unsigned r = 0; r < RANKS; r++)
		sum += w->m[r]->ahead.lists * sizeof(struct member_list);

	for (unsigned i = 0; i < JOB_MAX_DDPS; i++) {
		const struct ddp *d = w->job->ddps[i];

		sum += d ? d->charged : 0;
		for (unsigned r = 0; d && r < RANKS; r++)
			for (uint32_t t = 0; d->ranks[r].rows && t < d->n; t++)
				sum += d->ranks[r].rows[t].n * sizeof(int64_t);
	}
	return sum;
}

/* Every byte that is charged is in a slab, a blob, a ddp or a list, and nothing is under way. */
static void check_exact(struct world *w)
{
	uint64_t slabs = 0, blobs = 0, classes = 0;
	struct slab *s, *tmp;

	list_for_each (s, tmp, &w->n.node.devices[0].table->slabs, link)
		slabs += s->payer == &w->job->quota ? s->bytes : 0;
	for (size_t i = 0; i < w->job->rec->n_blobs; i++)
		blobs += w->job->rec->blobs[i]->data.len;
	for (unsigned c = 0; c < _MEM_N; c++)
		classes += w->job->quota.by_class[c];
	cr_assert_eq(w->job->quota.used, slabs + blobs + control_bytes(w));
	cr_assert_eq(w->job->quota.used, classes);
	cr_assert_eq(w->job->rec->n_slabs, w->job->mem.n_slabs);
	cr_assert_eq(w->job->rec->n_units, w->job->n_units);
	cr_assert_eq(w->job->rec->n_groups, w->job->n_groups);
	check_copies(w);
	cr_assert_eq(w->job->running, 0);
	cr_assert_eq(w->job->copies.casts, 0);
	cr_assert_not(w->job->step.state == JOB_STEP_APPLYING || w->job->step.committing);
	for (unsigned r = 0; r < RANKS; r++) {
		cr_assert_eq(w->m[r]->pending, 0);
		cr_assert_eq(w->m[r]->state, MEMBER_JOINED);
	}
}

static void release_all(struct world *w)
{
	for (unsigned r = 0; r < RANKS; r++) {
		do
			nodefix_ok((release_plain(w, r), &w->op[r]), "Release");
		while (w->op[r].result.references);
		do
			nodefix_ok((release_cast(w, r), &w->op[r]), "Release");
		while (w->op[r].result.references);
	}
}

/* Some of it may be there already. */
static void with_accumulated(struct world *w)
{
	for (unsigned i = 0; i < 2; i++) {
		MUST(w, gradient_twice);
		MUST(w, accumulate_twice);
	}
}

static void with_deferred(struct world *w)
{
	with_accumulated(w);
	MUST(w, defer_twice);
	MUST(w, gradient_twice);
}

/* A training step from begin to end. */
static void check_usable(struct world *w)
{
	release_all(w);
	if (w->plain->summoned_ranks)
		MUST(w, return_it);
	MUST(w, seed_plain);
	MUST(w, seed_cast);
	MUST(w, seed_rich);
	MUST(w, seed_twice);
	ops_check_more(w);
	cr_assert_not(w->job->life.torn);
	MUST(w, gather_cast);
	MUST(w, gather_plain);
	release_all(w);
	MUST(w, gradient);
	MUST(w, gradient_cast);
	MUST(w, reduce);
	MUST(w, reduce_cast);
	with_accumulated(w);
	MUST(w, defer_twice);
	MUST(w, gradient_twice);
	MUST(w, reduce_twice);
	MUST(w, clip);
	MUST(w, step);
	MUST(w, commit);
	cr_assert_eq(w->plain->rec->optimizer->steps, 1);
}

/* ------------------------------------------------------------------- what is done */

static void with_gathers(struct world *w)
{
	MUST(w, gather_cast);
}

static void with_gradients(struct world *w)
{
	MUST(w, gradient);
}

static void with_rich_gradients(struct world *w)
{
	MUST(w, seed_rich);
	MUST(w, gradient_rich);
}

static void with_reduced(struct world *w)
{
	MUST(w, gradient);
	MUST(w, reduce);
}

static void with_step(struct world *w)
{
	with_reduced(w);
	MUST(w, gradient);
	MUST(w, step);
}

static void with_gradient_twice(struct world *w)
{
	MUST(w, gradient_twice);
}

static void with_more(struct world *w)
{
	with_accumulated(w);
	MUST(w, gradient_twice);
}

static void with_some(struct world *w)
{
	MUST(w, gradient_twice);
	nodefix_ok((accumulate_twice(w, 0), &w->op[0]), "Accumulate");
}

static int register_more(struct world *w)
{
	uint32_t ids[2], units = w->job->n_units;
	uint64_t charged = 0;
	enum res r = nodefix_try_register(w->job, w->specs, 2, ids, &charged, &w->fault);

	cr_assert_eq(w->job->n_units, units + (r == RES_DONE));
	cr_assert_eq(charged != 0, r == RES_DONE);
	cr_assert_eq(!w->specs[0], r == RES_DONE, "it is the job's, or still ours");
	cr_assert(w->specs[1]);
	cr_assert_neq(r, RES_WAIT);
	return (int)w->fault.code;
}

static int make_group(struct world *w)
{
	static const uint32_t ranks[] = { 1, 0 };
	struct group *g = NULL;
	int r = job_group(w->job, "turned", ranks, 2, &g, &w->fault);

	cr_assert_eq(w->job->n_groups, 1u + (r == 0));
	return r;
}

static int make_job(struct world *w)
{
	const struct job_spec spec = { .name = "other", .world_size = 3 };
	uint32_t jobs = w->n.jobs.count;
	struct job *job = NULL, *found = NULL;
	struct fault none = FAULT_NULL;
	int r = job_open(&w->n.jobs, &spec, 0, 0, &job, NULL, &w->fault);

	cr_assert_eq(w->n.jobs.count, jobs + (r == 0));
	cr_assert_eq(job_find(&w->n.jobs, "other", 0, &found, &none) == 0, r == 0);
	return r;
}

static int join(struct world *w)
{
	struct fault none = FAULT_NULL;
	struct job *job = NULL;
	struct member *m = NULL;
	int found = job_find(&w->n.jobs, "other", getuid(), &job, &none);
	enum res r = nodefix_try_join(&w->n, job, 1, NULL, NULL, &m, &w->fault);

	cr_assert_eq(found, 0);
	cr_assert_eq(job->present, r == RES_DONE);
	cr_assert_eq(job->members, r == RES_DONE);
	cr_assert_neq(r, RES_WAIT);
	return (int)w->fault.code;
}

static void with_other_job(struct world *w)
{
	nodefix_job(&w->n, "other", 3, 0);
}

static void with_stepped(struct world *w)
{
	with_reduced(w);
	MUST(w, step);
}

static void with_summoned(struct world *w)
{
	MUST(w, summon);
}

static void with_summoned_state(struct world *w)
{
	MUST(w, summon_state);
}

static void with_rich_specs(struct world *w)
{
	w->specs[0] = rich_spec("x");
	w->specs[1] = nodefix_spec("plain", 1000);
}

static void with_specs(struct world *w)
{
	w->specs[0] = nodefix_spec("x", 5000);
	w->specs[1] = nodefix_spec("plain", 1000);
}

static const struct act acts[] = {
	{ .name = "Initialise, seed", .submit = seed_plain },
	{ .name = "Initialise, own", .submit = own },
	{ .name = "Initialise after a step", .prepare = with_step, .submit = seed_plain },
	{ .name = "Gather", .submit = gather_plain },
	{ .name = "Gather with a cast", .submit = gather_cast },
	{ .name = "Gather after a step", .prepare = with_step, .submit = gather_cast },
	{ .name = "Release", .prepare = with_gathers, .submit = release_cast },
	{ .name = "GradientBuffer", .submit = gradient },
	{ .name = "AllocBuffer", .submit = alloc },
	{ .name = "FreeBuffer", .submit = free_buffer },
	{ .name = "Reduce", .prepare = with_gradients, .submit = reduce },
	{ .name = "Reduce of some tensors", .prepare = with_rich_gradients, .submit = leave_out },
	{ .name = "Reduce after a step", .prepare = with_step, .submit = reduce },
	{ .name = "Accumulate", .prepare = with_gradients, .submit = accumulate },
	{ .name = "Accumulate after a step", .prepare = with_step, .submit = accumulate },
	{ .name = "Accumulate in another dtype",
	  .prepare = with_gradient_twice,
	  .submit = accumulate_twice },
	{ .name = "Accumulate, more", .prepare = with_more, .submit = accumulate_twice },
	{ .name = "Reduce, accumulated", .prepare = with_more, .submit = reduce_twice },
	{ .name = "Reduce, some have accumulated", .prepare = with_some, .submit = reduce_twice },
	{ .name = "Reduce, deferred", .prepare = with_more, .submit = defer_twice },
	{ .name = "Reduce after a deferred one", .prepare = with_deferred, .submit = reduce_twice },
	{ .name = "AllReduce", .submit = all_reduce },
	{ .name = "Broadcast", .submit = broadcast },
	{ .name = "Barrier", .submit = barrier },
	{ .name = "ClipGradNorm", .prepare = with_reduced, .submit = clip },
	{ .name = "ClipGradNorm after a step", .prepare = with_step, .submit = clip },
	{ .name = "Step", .prepare = with_reduced, .submit = step },
	{ .name = "Step after a step", .prepare = with_step, .submit = step },
	{ .name = "Commit", .submit = commit },
	{ .name = "Commit after a step", .prepare = with_step, .submit = commit },
	{ .name = "registration", .prepare = with_specs, .call = register_more },
	{ .name = "registration of all there is",
	  .prepare = with_rich_specs,
	  .call = register_more },
	{ .name = "UnitBuffers", .submit = unit_buffers },
	{ .name = "BroadcastBuffers", .submit = broadcast_buffers },
	{ .name = "SummonFull", .submit = summon },
	{ .name = "SummonFull after a step", .prepare = with_stepped, .submit = summon },
	{ .name = "ReturnFull", .prepare = with_summoned, .submit = return_it },
	{ .name = "ReturnFull, written back", .prepare = with_summoned, .submit = return_written },
	{ .name = "SummonFull of state", .prepare = with_stepped, .submit = summon_state },
	{ .name = "ReturnFull of state, written back",
	  .prepare = with_summoned_state,
	  .submit = return_written },
	{ .name = "ConvertUnits", .prepare = with_reduced, .submit = convert },
	{ .name = "ConvertUnits after a step", .prepare = with_stepped, .submit = convert },
	{ .name = "PlanBackward", .submit = plan, .mend = mend_plan },
	{ .name = "ClipGradValue", .prepare = with_reduced, .submit = clip_value },
	{ .name = "Unscale", .prepare = with_reduced, .submit = unscale },
	{ .name = "a group", .call = make_group },
	{ .name = "a job", .call = make_job },
	{ .name = "joining", .prepare = with_other_job, .call = join },
};

/* -------------------------------------------------------------- what goes wrong */

struct trouble {
	bool fake_engine;
	int error;
	void (*in)(struct world *w, unsigned n, int error);
	bool (*hit)(struct world *w);
};

static unsigned calls_at; /* when it was armed */
static unsigned armed;

static void backend_in(struct world *w, unsigned n, int error)
{
	calls_at = backend_fake_calls(w->n.node.devices[0].backend);
	armed = n;
	backend_fake_fail(w->n.node.devices[0].backend, n, error);
}

static bool backend_hit(struct world *w)
{
	return backend_fake_calls(w->n.node.devices[0].backend) - calls_at >= armed;
}

static void engine_in(struct world *w, unsigned n, int error)
{
	calls_at = engine_fake_calls(w->n.node.engine);
	armed = n;
	engine_fake_fail(w->n.node.engine, n, error);
}

static bool engine_hit(struct world *w)
{
	return engine_fake_calls(w->n.node.engine) - calls_at >= armed;
}

static void malloc_in(struct world *w, unsigned n, int error)
{
	(void)w;
	(void)error;
	failmalloc_in(n);
}

static bool malloc_hit(struct world *w)
{
	(void)w;
	return failmalloc_hit();
}

static int do_act(struct world *w, const struct act *a)
{
	w->fault = FAULT_NULL;
	return a->call ? a->call(w) : ops_on_both(w, a->submit);
}

/* Return: whether something failed, so that there may be more. */
static bool try_one(const struct act *a, const struct trouble *t, unsigned n)
{
	static struct world w; /* ops are written to until the end */
	bool hit;
	int r;

	test_ops_begin(&w, t->fake_engine);
	if (a->prepare)
		a->prepare(&w);
	t->in(&w, n, t->error);
	r = do_act(&w, a);
	hit = t->hit(&w);
	t->in(&w, 0, 0);
	cr_assert(hit || !r, "%s: %s, but nothing was made to fail", a->name, w.fault.text);
	cr_assert(!r || w.fault.text[0], "%s failed without a word", a->name);
	cr_assert(!r || (w.fault.code != FAULT_INVALID && w.fault.code != FAULT_NOT_FOUND),
		  "%s: nobody's request was wrong: %s", a->name, w.fault.text);
	nodefix_turns(&w.n);
	if (a->mend)
		a->mend(&w);
	check_exact(&w);
	if (r && a->call)
		cr_assert_eq(do_act(&w, a), 0, "%s, again: %s", a->name, w.fault.text);
	check_usable(&w);
	check_exact(&w);
	for (unsigned i = 0; i < 2; i++)
		state_unit_free(w.specs[i]);
	nodefix_end(&w.n);
	return hit;
}

static unsigned try_all(const struct trouble *t)
{
	unsigned failures = 0;

	for (size_t i = 0; i < ARRAY_SIZE(acts) + ops_n_more; i++) {
		bool more = i >= ARRAY_SIZE(acts);
		unsigned n = 1;

		while (try_one(more ? &ops_more[i - ARRAY_SIZE(acts)] : &acts[i], t, n))
			n++;
		cr_assert_lt(n, 200);
		failures += n - 1;
	}
	return failures;
}

Test(fault_ops, any_call_of_the_backend_may_fail)
{
	struct trouble t = { false, -EIO, backend_in, backend_hit };

	cr_assert_geq(try_all(&t), 20);
	t.error = -ENOMEM;
	cr_assert_geq(try_all(&t), 20);
}

Test(fault_ops, any_operation_of_the_engine_may_fail)
{
	struct trouble t = { true, -EIO, engine_in, engine_hit };

	cr_assert_geq(try_all(&t), 6);
	t.error = ENGINE_E_ABORTED;
	cr_assert_geq(try_all(&t), 6);
}

Test(fault_ops, any_allocation_may_fail)
{
	struct trouble t = { false, 0, malloc_in, malloc_hit };

	cr_assert_geq(try_all(&t), 60);
}

/* Memory for the copy was there, for the cast's own record not: the copy used to be
 * nobody's, and could not be given back until the next gather. */
Test(fault_ops, a_gather_that_fails_strands_no_copy)
{
	static struct world w;
	unsigned failed = 0;
	bool hit = true;

	for (unsigned n = 1; hit; n++) {
		test_ops_begin(&w, false);
		failmalloc_in(n);
		gather_cast(&w, 0);
		nodefix_turns(&w.n);
		hit = failmalloc_hit();
		failmalloc_in(0);
		check_copies(&w);
		cr_assert(hit || !w.op[0].fault.code);
		failed += w.op[0].fault.code != FAULT_NONE;
		nodefix_end(&w.n);
	}
	cr_assert_geq(failed, 2);
}

/* Each rank that is not in it joins. Return: did nothing fail? */
static bool join_again(struct world *w)
{
	w->fault = FAULT_NULL;
	for (unsigned r = 0; r < RANKS; r++)
		if (!w->op[r].op)
			ops_join_even(w, r);
	nodefix_turns(&w->n);
	for (unsigned r = 0; r < RANKS; r++) {
		cr_assert(!w->op[r].fault.code || w->op[r].fault.text[0]);
		if (w->op[r].fault.code)
			w->fault = w->op[r].fault;
	}
	return !w->fault.code;
}

/* Rank 0 has no more inputs, rank 1 goes on, and each allocation fails once on the way: they
 * are told, if by another reason, and the group goes on. */
Test(fault_ops, uneven_inputs_are_told_without_memory_too)
{
	static struct world w;
	bool hit = true;

	for (unsigned n = 1; hit; n++) {
		test_ops_begin(&w, false);
		failmalloc_in(n);
		ops_join_even(&w, 0);
		barrier(&w, 1);
		nodefix_turns(&w.n);
		hit = failmalloc_hit();
		failmalloc_in(0);
		for (unsigned r = 0; r < RANKS; r++)
			cr_assert(hit || w.op[r].fault.code == FAULT_STATE, "rank %u", r);
		cr_assert(join_again(&w) || join_again(&w) || join_again(&w), "%s", w.fault.text);
		MUST(&w, barrier);
		check_exact(&w);
		check_usable(&w);
		nodefix_end(&w.n);
		cr_assert_lt(n, 200);
	}
}
