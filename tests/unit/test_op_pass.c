/* Passes: what is allowed when, and when the gathered units come and go. */
#include <criterion/criterion.h>
#include <string.h>

#include "core/check.h"
#include "fdcheck.h"
#include "nodefix.h"

TestSuite(op_pass, .timeout = 60);

static struct nodefix n;
static struct job *job;
static struct member *m[2];
static struct nodefix_op op[4];
static struct unit *u;

enum { F = PASS_KIND_FORWARD, B = PASS_KIND_BACKWARD };

static struct unit *guarded(const char *name, enum unit_reshard reshard, enum dtype compute,
			    uint32_t ranks)
{
	state_unit *spec = nodefix_spec(name, 1000);

	spec->guarded = true;
	spec->reshard = reshard;
	spec->compute_dtype = compute;
	return nodefix_unit(&n, job, spec, m, ranks);
}

static void test_op_pass_begin(uint32_t world)
{
	fdcheck_begin();
	nodefix_begin(&n, NULL);
	job = nodefix_job(&n, "job", world, 0);
	for (uint32_t i = 0; i < world; i++)
		m[i] = nodefix_join(&n, job, i);
}

static void begin_one(void)
{
	test_op_pass_begin(1);
}

static void begin_two(void)
{
	test_op_pass_begin(2);
}

static void test_op_pass_end(void)
{
	nodefix_end(&n);
	fdcheck_end();
}

#define ONE_RANK(name)  Test(op_pass, name, .init = begin_one, .fini = test_op_pass_end)
#define TWO_RANKS(name) Test(op_pass, name, .init = begin_two, .fini = test_op_pass_end)

static void begin_pass(struct member *who, struct unit *of, int pass, struct nodefix_op *o)
{
	Shardd__V1__BeginPassRequest r = SHARDD__V1__BEGIN_PASS_REQUEST__INIT;

	r.unit = of->id;
	r.pass = (Shardd__V1__Pass)pass;
	nodefix_submit(&n, who, "BeginPass", &r.base, o);
}

static void end_pass(struct member *who, struct unit *of, int pass, bool sync, struct nodefix_op *o)
{
	Shardd__V1__EndPassRequest r = SHARDD__V1__END_PASS_REQUEST__INIT;

	r.unit = of->id;
	r.pass = (Shardd__V1__Pass)pass;
	r.sync = sync;
	nodefix_submit(&n, who, "EndPass", &r.base, o);
}

static void set_reshard(struct member *who, struct unit *of, int reshard, struct nodefix_op *o)
{
	Shardd__V1__SetReshardRequest r = SHARDD__V1__SET_RESHARD_REQUEST__INIT;

	r.units = &of->id;
	r.n_units = 1;
	r.reshard = (Shardd__V1__Reshard)reshard;
	nodefix_submit(&n, who, "SetReshard", &r.base, o);
}

static void did_begin(struct member *who, struct unit *of, int pass)
{
	NODEFIX_OK(begin_pass(who, of, pass, &op[3]), &op[3]);
}

/* Return: whether the unit was kept. */
static bool did_end(struct member *who, struct unit *of, int pass, bool sync)
{
	NODEFIX_OK(end_pass(who, of, pass, sync, &op[3]), &op[3]);
	return op[3].result.kept;
}

static void gradients(struct unit *of, unsigned ranks)
{
	for (unsigned i = 0; i < ranks; i++)
		NODEFIX_OK(nodefix_on_unit(&n, m[i], "GradientBuffer", of, &op[i]), &op[i]);
}

static void reduced(struct unit *of, unsigned ranks)
{
	gradients(of, ranks);
	for (unsigned i = 0; i < ranks; i++)
		nodefix_on_unit(&n, m[i], "Reduce", of, &op[i]);
	for (unsigned i = 0; i < ranks; i++)
		nodefix_ok(&op[i], "Reduce");
}

static void stepped(unsigned ranks, uint64_t number)
{
	for (unsigned i = 0; i < ranks; i++)
		nodefix_step(&n, m[i], &op[i]);
	for (unsigned i = 0; i < ranks; i++)
		nodefix_ok(&op[i], "Step");
	for (unsigned i = 0; i < ranks; i++)
		nodefix_commit(&n, m[i], number, 0, &op[i]);
	for (unsigned i = 0; i < ranks; i++)
		nodefix_ok(&op[i], "Commit");
}

static void expect_fault(const struct fault *f, enum fault_code code, const char *words)
{
	cr_expect_eq(f->code, code, "%s: %s: %s", words, fault_code_name(f->code), f->text);
	cr_expect(strstr(f->text, words), "%s: %s", words, f->text);
}

static enum pass_state state_of(unsigned rank, struct unit *of)
{
	const struct member_unit *mu = member_unit_find(m[rank], of);

	return mu ? (enum pass_state)mu->pass : PASS_IDLE;
}

/* --------------------------------------------------------------- the states */

ONE_RANK(a_step_of_training)
{
	u = guarded("u", RESHARD_AFTER_FORWARD, DTYPE_BF16, 1);
	for (uint64_t step = 1; step < 4; step++) {
		did_begin(m[0], u, F);
		cr_expect(op[3].result.copied);
		cr_expect_eq(op[3].result.place.bytes, 2000);
		cr_expect_eq(state_of(0, u), PASS_FORWARD);
		cr_expect_eq(u->gathered_ranks, 1);
		cr_expect_not(did_end(m[0], u, F, false));
		cr_expect_eq(state_of(0, u), PASS_IDLE);
		cr_expect_eq(u->gathered_ranks, 0);
		/* once the order is learned it stays for the backward that is to come */
		cr_expect_eq(unit_has_copy(u), step > 1, "its memory is back in the pool");
		did_begin(m[0], u, B);
		cr_expect_eq(state_of(0, u), PASS_BACKWARD_PRE);
		cr_expect(unit_has_copy(u));
		reduced(u, 1);
		cr_expect_eq(state_of(0, u), PASS_BACKWARD_POST);
		cr_expect_not(unit_has_copy(u), "what is reduced is read no more");
		cr_expect_not(did_end(m[0], u, B, true));
		cr_expect_eq(state_of(0, u), PASS_IDLE);
		cr_expect_eq(m[0]->now.in_pass, 0);
		cr_expect_eq(job->mem.full[0].used, 0);
		stepped(1, step);
	}
}

enum action {
	BEGIN_F,
	BEGIN_B,
	END_F,
	END_F_SYNC,
	END_B,
	END_B_SYNC,
	REDUCE,
	ACCUMULATE,
	STEP,
	CLIP,
	COMMIT,
	INIT,
	SUMMON,
	RETURN,
	CONVERT,
	GATHER,
	RELEASE,
	GRADIENT,
	BARRIER,
	RESHARD,
	UNSCALE,
	CLIP_VALUE,
	PLAN,
	FACTORS,
	_ACTION_N,
};

static const char *const action_names[_ACTION_N] = {
	"BeginPass(FORWARD)",
	"BeginPass(BACKWARD)",
	"EndPass(FORWARD)",
	"EndPass(FORWARD)",
	"EndPass(BACKWARD)",
	"EndPass(BACKWARD)",
	"Reduce",
	"Accumulate",
	"Step",
	"ClipGradNorm",
	"Commit",
	"Initialise",
	"SummonFull",
	"ReturnFull",
	"ConvertUnits",
	"Gather",
	"Release",
	"GradientBuffer",
	"Barrier",
	"SetReshard",
	"Unscale",
	"ClipGradValue",
	"PlanBackward",
	"SetFactors",
};

static void submit_of_all(enum action a, struct nodefix_op *o)
{
	Shardd__V1__UnscaleRequest unscale = SHARDD__V1__UNSCALE_REQUEST__INIT;
	Shardd__V1__ClipGradValueRequest clip = SHARDD__V1__CLIP_GRAD_VALUE_REQUEST__INIT;
	Shardd__V1__PlanBackwardRequest plan = SHARDD__V1__PLAN_BACKWARD_REQUEST__INIT;
	Shardd__V1__SetFactorsRequest factors = SHARDD__V1__SET_FACTORS_REQUEST__INIT;

	unscale.inv_scale = plan.inv_scale = 0.5;
	clip.value = 1;
	factors.unit = u->id;
	nodefix_submit(&n, m[0], action_names[a],
		       a == UNSCALE      ? &unscale.base
		       : a == CLIP_VALUE ? &clip.base
		       : a == PLAN       ? &plan.base
					 : &factors.base,
		       o);
}

static void submit_other(enum action a, struct nodefix_op *o)
{
	Shardd__V1__AccumulateRequest accumulate = SHARDD__V1__ACCUMULATE_REQUEST__INIT;
	Shardd__V1__SummonFullRequest summon = SHARDD__V1__SUMMON_FULL_REQUEST__INIT;
	Shardd__V1__ReturnFullRequest back = SHARDD__V1__RETURN_FULL_REQUEST__INIT;
	Shardd__V1__ConvertUnitsRequest convert = SHARDD__V1__CONVERT_UNITS_REQUEST__INIT;

	accumulate.unit = summon.unit = back.unit = u->id;
	convert.units = &u->id;
	convert.n_units = 1;
	convert.layout = SHARDD__V1__LAYOUT__LAYOUT_FLAT;
	nodefix_submit(&n, m[0], action_names[a],
		       a == ACCUMULATE ? &accumulate.base
		       : a == SUMMON   ? &summon.base
		       : a == RETURN   ? &back.base
				       : &convert.base,
		       o);
}

static void act(enum action a, struct nodefix_op *o)
{
	static uint64_t number;

	switch (a) {
	case BEGIN_F:
		begin_pass(m[0], u, F, o);
		break;
	case BEGIN_B:
		begin_pass(m[0], u, B, o);
		break;
	case END_F:
		end_pass(m[0], u, F, false, o);
		break;
	case END_F_SYNC:
		end_pass(m[0], u, F, true, o);
		break;
	case END_B:
		end_pass(m[0], u, B, false, o);
		break;
	case END_B_SYNC:
		end_pass(m[0], u, B, true, o);
		break;
	case REDUCE:
		nodefix_on_unit(&n, m[0], "Reduce", u, o);
		break;
	case STEP:
		nodefix_step(&n, m[0], o);
		break;
	case CLIP:
		nodefix_clip(&n, m[0], 1, o);
		break;
	case COMMIT:
		nodefix_commit(&n, m[0], ++number, 0, o);
		break;
	case INIT:
		nodefix_seed(&n, m[0], u, 1, o);
		break;
	case GATHER:
		nodefix_on_unit(&n, m[0], "Gather", u, o);
		break;
	case RELEASE:
		nodefix_on_unit(&n, m[0], "Release", u, o);
		break;
	case GRADIENT:
		nodefix_on_unit(&n, m[0], "GradientBuffer", u, o);
		break;
	case BARRIER:
		nodefix_barrier(&n, m[0], 0, o);
		break;
	case RESHARD:
		set_reshard(m[0], u, RESHARD_AFTER_FORWARD, o);
		break;
	case UNSCALE:
	case CLIP_VALUE:
	case PLAN:
	case FACTORS:
		submit_of_all(a, o);
		break;
	default:
		submit_other(a, o);
	}
	nodefix_wait(o);
}

/* From IDLE to each state, and back. */
static const struct {
	const char *name;
	unsigned n;
	enum action to[4];
	unsigned n_back;
	enum action back[4];
} ways[] = {
	{ "IDLE", 0, { 0 }, 0, { 0 } },
	{ "FORWARD", 1, { BEGIN_F }, 1, { END_F } },
	{ "BACKWARD_PRE", 1, { BEGIN_B }, 1, { END_B } },
	{ "BACKWARD_POST", 3, { BEGIN_B, GRADIENT, REDUCE }, 1, { END_B_SYNC } },
	{ "FORWARD_IN_PRE", 2, { BEGIN_B, BEGIN_F }, 2, { END_F, END_B } },
	{ "FORWARD_IN_POST", 4, { BEGIN_B, GRADIENT, REDUCE, BEGIN_F }, 2, { END_F, END_B_SYNC } },
	{ "SUMMON", 1, { SUMMON }, 1, { RETURN } },
};

/* Which actions are allowed in which of the states above: by hand, apart from the code. */
static const bool allowed[][_ACTION_N] = {
	/* begin F  B, end F  Fs  B  Bs, reduce accumulate step clip commit init summon return
	 * convert, gather release gradient barrier reshard, unscale clip by value plan factors */
	{ 1, 1, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 0, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1 },
	{ 0, 0, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 0, 0, 0, 0 },
	{ 1, 0, 0, 0, 1, 0, 1, 1, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 0, 0, 0, 0 },
	{ 1, 0, 0, 0, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 0, 0, 0, 0 },
	{ 0, 0, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 0, 0, 0, 0 },
	{ 0, 0, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 0, 0, 0, 0 },
	{ 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 1, 1, 1, 1, 0, 0, 0, 0 },
};

static void check_refused(size_t w, enum action a, const struct nodefix_op *o)
{
	char words[96];

	snprintf(words, sizeof(words), "%s: unit 'u' is in state %s on rank 0; ", action_names[a],
		 ways[w].name);
	if (a == GATHER)
		snprintf(words, sizeof(words), "Gather: unit 'u' is summoned");
	expect_fault(&o->fault, FAULT_STATE, words);
	cr_expect_not(o->started && a < REDUCE, "%s began", words);
}

static void try_cell(size_t w, enum action a)
{
	struct nodefix_op o = { 0 };
	struct member_unit before;
	uint64_t used, submitted;

	if (a == REDUCE || a == ACCUMULATE)
		NODEFIX_OK(nodefix_on_unit(&n, m[0], "GradientBuffer", u, &o), &o);
	for (unsigned i = 0; i < ways[w].n; i++) {
		act(ways[w].to[i], &o);
		cr_assert_not(o.fault.code, "%s: %s", ways[w].name, o.fault.text);
	}
	if ((a == REDUCE || a == ACCUMULATE) && w) /* the way may have used it up */
		NODEFIX_OK(nodefix_on_unit(&n, m[0], "GradientBuffer", u, &o), &o);
	cr_assert_str_eq(pass_state_name(state_of(0, u)), ways[w].name);
	before = *member_unit_find(m[0], u);
	used = job->quota.used;
	submitted = n.node.devices[0].backend->submitted;
	act(a, &o);
	cr_expect_eq(!o.fault.code, allowed[w][a], "%s in %s: %s", action_names[a], ways[w].name,
		     o.fault.text);
	if (!o.fault.code)
		return;
	check_refused(w, a, &o);
	cr_expect(memcmp(&before, member_unit_find(m[0], u), sizeof(before)) == 0,
		  "%s in %s changed something", action_names[a], ways[w].name);
	cr_expect_eq(job->quota.used, used);
	cr_expect_eq(n.node.devices[0].backend->submitted, submitted);
	for (unsigned i = 0; i < ways[w].n_back; i++) {
		act(ways[w].back[i], &o);
		cr_expect_not(o.fault.code, "%s: back: %s", ways[w].name, o.fault.text);
	}
}

ONE_RANK(every_op_in_every_state)
{
	char name[40];

	for (size_t w = 0; w < ARRAY_SIZE(ways); w++)
		for (int a = 0; a < _ACTION_N; a++) {
			struct fault f = FAULT_NULL;

			u = guarded("u", RESHARD_AFTER_FORWARD, DTYPE_BF16, 1);
			try_cell(w, (enum action)a);
			/* as new: a job of its own for each cell */
			snprintf(name, sizeof(name), "job%zu.%d", w, a);
			nodefix_drop(&n, m[0], "is done");
			cr_assert_eq(job_delete(job, true, NULL, &f), 0);
			job = nodefix_job(&n, name, 1, 0);
			m[0] = nodefix_join(&n, job, 0);
		}
}

ONE_RANK(all_units_count_for_what_concerns_all)
{
	struct unit *other;

	u = guarded("u", RESHARD_AFTER_FORWARD, DTYPE_FP32, 1);
	other = guarded("other", RESHARD_AFTER_FORWARD, DTYPE_FP32, 1);
	did_begin(m[0], other, F);
	nodefix_step(&n, m[0], &op[0]);
	expect_fault(&op[0].fault, FAULT_STATE, "Step: unit 'other' is in state FORWARD on rank 0");
	NODEFIX_OK(nodefix_seed(&n, m[0], u, 1, &op[0]), &op[0]); /* its own unit is idle */
	did_end(m[0], other, F, false);
	NODEFIX_OK(nodefix_step(&n, m[0], &op[0]), &op[0]);
}

/* A peer is told, as of every collective that a rank was refused. */
TWO_RANKS(a_refused_collective_ends_for_all)
{
	u = guarded("u", RESHARD_AFTER_FORWARD, DTYPE_FP32, 2);
	for (unsigned i = 0; i < 2; i++)
		did_begin(m[i], u, B);
	gradients(u, 2);
	did_end(m[0], u, B, false);
	nodefix_on_unit(&n, m[1], "Reduce", u, &op[1]);
	nodefix_on_unit(&n, m[0], "Reduce", u, &op[0]);
	expect_fault(&op[0].fault, FAULT_STATE,
		     "Reduce: unit 'u' is in state IDLE on rank 0; "
		     "it must be BACKWARD_PRE or BACKWARD_POST");
	expect_fault(&op[1].fault, FAULT_STATE, "rank 0 (pid");
	cr_expect_eq(state_of(1, u), PASS_BACKWARD_PRE, "it has not moved either");
}

ONE_RANK(a_unit_without_a_guard_has_no_passes)
{
	u = nodefix_unit(&n, job, nodefix_spec("u", 10), m, 1);
	begin_pass(m[0], u, F, &op[0]);
	expect_fault(&op[0].fault, FAULT_STATE, "unit 'u' is not guarded");
	end_pass(m[0], u, B, true, &op[0]);
	expect_fault(&op[0].fault, FAULT_STATE, "unit 'u' is not guarded");
	set_reshard(m[0], u, RESHARD_NEVER, &op[0]);
	expect_fault(&op[0].fault, FAULT_INVALID, "unit 'u' is not guarded");
	reduced(u, 1); /* at any time */
	NODEFIX_OK(nodefix_step(&n, m[0], &op[0]), &op[0]);
}

/* A unit that has no gradients, and replicas, whose gradients go by buckets. */
ONE_RANK(a_backward_without_a_reduce_ends_where_there_is_none)
{
	state_unit *spec = nodefix_spec("frozen", 10);

	spec->guarded = true;
	spec->tensors[0]->frozen = true;
	u = nodefix_unit(&n, job, spec, m, 1);
	did_begin(m[0], u, B);
	did_end(m[0], u, B, true);
	u = guarded("u", RESHARD_AFTER_FORWARD, DTYPE_FP32, 1);
	did_begin(m[0], u, B);
	end_pass(m[0], u, B, true, &op[0]);
	expect_fault(&op[0].fault, FAULT_STATE, "it must be BACKWARD_POST");
	did_end(m[0], u, B, false);
}

/* ---------------------------------------------------------------- references */

ONE_RANK(gathers_by_hand_are_counted_apart)
{
	u = guarded("u", RESHARD_AFTER_FORWARD, DTYPE_BF16, 1);
	NODEFIX_OK(nodefix_on_unit(&n, m[0], "Gather", u, &op[0]), &op[0]);
	did_begin(m[0], u, F);
	cr_expect_not(op[3].result.copied, "it was there");
	NODEFIX_OK(nodefix_on_unit(&n, m[0], "Release", u, &op[0]), &op[0]);
	cr_expect_eq(op[0].result.references, 0);
	NODEFIX_OK(nodefix_on_unit(&n, m[0], "Release", u, &op[0]), &op[0]);
	cr_expect_eq(u->gathered_ranks, 1, "the pass has it still");
	NODEFIX_OK(nodefix_on_unit(&n, m[0], "Gather", u, &op[0]), &op[0]);
	cr_expect_eq(op[0].result.references, 1);
	did_end(m[0], u, F, false);
	cr_expect_eq(u->gathered_ranks, 1, "the hand has it still");
	nodefix_step(&n, m[0], &op[0]);
	expect_fault(&op[0].fault, FAULT_STATE, "still gathered by rank 0");
	NODEFIX_OK(nodefix_on_unit(&n, m[0], "Release", u, &op[0]), &op[0]);
	cr_expect_eq(u->gathered_ranks, 0);
}

/* Which passes keep the copy: forward, forward again, backward without and with a reduce. */
static void try_policy(const char *name, enum unit_reshard reshard, enum reduce_profile profile,
		       bool forward, bool no_sync, bool sync)
{
	state_unit *spec = nodefix_spec(name, 1000);

	spec->guarded = true;
	spec->reshard = reshard;
	spec->compute_dtype = DTYPE_BF16;
	spec->reduce_profile = profile;
	spec->gradient_dtype = DTYPE_BF16;
	u = nodefix_unit(&n, job, spec, m, 1);
	did_begin(m[0], u, F);
	cr_expect_eq(did_end(m[0], u, F, false), forward, "%s: forward", name);
	cr_expect_eq(unit_has_copy(u), forward, "%s: forward", name);
	did_begin(m[0], u, B);
	cr_expect_eq(op[3].result.copied, !forward, "%s", name);
	cr_expect_eq(did_end(m[0], u, B, false), no_sync, "%s: no_sync", name);
	did_begin(m[0], u, F);
	cr_expect_eq(op[3].result.copied, !no_sync, "%s: it cannot have changed", name);
	cr_expect_eq(did_end(m[0], u, F, false), forward, "%s: forward again", name);
	did_begin(m[0], u, B);
	reduced(u, 1);
	cr_expect_eq(did_end(m[0], u, B, true), sync, "%s: sync", name);
	cr_expect_eq(unit_has_copy(u), sync, "%s: sync", name);
	NODEFIX_OK(nodefix_step(&n, m[0], &op[0]), &op[0]);
	cr_expect_eq(u->gathered_ranks, 0, "%s: nothing stale is held after a step", name);
	did_begin(m[0], u, F);
	cr_expect(op[3].result.copied, "%s: of the new parameters", name);
	cr_expect_eq(u->full_version, u->version);
	did_end(m[0], u, F, false);
}

ONE_RANK(policies)
{
	try_policy("f", RESHARD_AFTER_FORWARD, PROFILE_FAIRSCALE, false, false, false);
	try_policy("b", RESHARD_AFTER_BACKWARD, PROFILE_FAIRSCALE, true, true, false);
	try_policy("n", RESHARD_NEVER, PROFILE_FAIRSCALE, true, true, true);
	try_policy("o", RESHARD_AFTER_FORWARD_ONLY, PROFILE_FAIRSCALE, false, true, true);
}

/* set_reshard_after_forward and set_reshard_after_backward in their four combinations. */
ONE_RANK(policies_of_fsdp2)
{
	try_policy("tt", RESHARD_AFTER_FORWARD, PROFILE_FSDP2, false, false, false);
	try_policy("ft", RESHARD_AFTER_BACKWARD, PROFILE_FSDP2, true, false, false);
	try_policy("ff", RESHARD_NEVER, PROFILE_FSDP2, true, true, true);
	try_policy("tf", RESHARD_AFTER_FORWARD_ONLY, PROFILE_FSDP2, false, true, true);
}

ONE_RANK(a_policy_changes_at_run_time_and_back)
{
	u = guarded("u", RESHARD_AFTER_FORWARD, DTYPE_BF16, 1);
	did_begin(m[0], u, F);
	NODEFIX_OK(set_reshard(m[0], u, RESHARD_AFTER_BACKWARD, &op[0]), &op[0]);
	cr_expect(did_end(m[0], u, F, false), "in the middle of a pass");
	did_begin(m[0], u, F);
	NODEFIX_OK(set_reshard(m[0], u, 0, &op[0]), &op[0]);
	cr_expect_not(did_end(m[0], u, F, false), "as registered");
	NODEFIX_OK(set_reshard(m[0], u, RESHARD_AFTER_FORWARD_ONLY, &op[0]), &op[0]);
	did_begin(m[0], u, B);
	cr_expect(did_end(m[0], u, B, false), "the next backward keeps it");
}

/* Kept by its policy it is nobody's: it does not keep others from changing it. */
ONE_RANK(what_is_kept_is_let_go_of_when_it_is_initialised)
{
	u = guarded("u", RESHARD_NEVER, DTYPE_BF16, 1);
	did_begin(m[0], u, F);
	cr_expect(did_end(m[0], u, F, false));
	cr_expect_eq(u->gathered_ranks, 1);
	NODEFIX_OK(nodefix_seed(&n, m[0], u, 2, &op[0]), &op[0]);
	cr_expect_eq(u->gathered_ranks, 0);
	did_begin(m[0], u, F);
	cr_expect(op[3].result.copied);
}

/* Forward again inside backward: the parameters stay for what follows. */
ONE_RANK(activation_checkpointing)
{
	u = guarded("u", RESHARD_AFTER_FORWARD, DTYPE_BF16, 1);
	did_begin(m[0], u, B);
	did_begin(m[0], u, F);
	cr_expect_eq(state_of(0, u), PASS_FORWARD_IN_PRE);
	cr_expect(did_end(m[0], u, F, false), "backward goes on with it");
	cr_expect_eq(state_of(0, u), PASS_BACKWARD_PRE);
	reduced(u, 1);
	did_begin(m[0], u, F);
	cr_expect(op[3].result.copied, "the reduce has let go of it");
	cr_expect_eq(state_of(0, u), PASS_FORWARD_IN_POST);
	cr_expect_not(did_end(m[0], u, F, false));
	cr_expect_eq(state_of(0, u), PASS_BACKWARD_POST);
	cr_expect_not(did_end(m[0], u, B, true));
}

/* The copy is one for both ranks: it goes when the second has been there, too. */
TWO_RANKS(a_copy_waits_for_the_rank_that_is_behind)
{
	u = guarded("u", RESHARD_AFTER_FORWARD, DTYPE_BF16, 2);
	did_begin(m[0], u, F);
	did_end(m[0], u, F, false);
	cr_expect(unit_has_copy(u), "rank 1 is to come");
	cr_expect_not(list_empty(&job->copies.idle), "but it would make room");
	did_begin(m[1], u, F);
	cr_expect_not(op[3].result.copied);
	did_end(m[1], u, F, false);
	cr_expect_not(unit_has_copy(u));
}

/* ------------------------------------------------------------------- failures */

TWO_RANKS(a_gather_that_fails_leaves_the_state)
{
	u = guarded("u", RESHARD_AFTER_FORWARD, DTYPE_BF16, 2);
	job->quota.limit = job->quota.used;
	begin_pass(m[0], u, F, &op[0]);
	expect_fault(&op[0].fault, FAULT_EXHAUSTED, "a gathered unit");
	cr_expect_eq(state_of(0, u), PASS_IDLE);
	job->quota.limit = 0;
	did_begin(m[0], u, F);
	cr_expect_eq(state_of(0, u), PASS_FORWARD);
}

TWO_RANKS(a_death_in_any_state_and_the_epoch_that_follows)
{
	u = guarded("u", RESHARD_AFTER_BACKWARD, DTYPE_BF16, 2);
	for (unsigned s = 0; s < 5; s++) {
		struct fault f = FAULT_NULL;
		struct member *again = NULL;

		for (unsigned i = 0; i < 2; i++) {
			did_begin(m[i], u, s == 0 ? F : B);
			if (s == 4)
				did_begin(m[i], u, F);
		}
		if (s == 1)
			gradients(u, 2);
		if (s == 2)
			reduced(u, 2);
		if (s == 3) { /* waits for its peer */
			gradients(u, 2);
			nodefix_on_unit(&n, m[0], "Reduce", u, &op[0]);
		}
		nodefix_drop(&n, m[1], "died");
		nodefix_turns(&n);
		if (s == 3)
			expect_fault(&op[0].fault, FAULT_ABORTED, "died");
		m[1] = nodefix_join(&n, job, 1);
		cr_assert_eq(nodefix_try_join(&n, job, 0, NULL, m[0], &again, &f), 0, "%s", f.text);
		for (unsigned i = 0; i < 2; i++) {
			cr_expect_eq(state_of(i, u), PASS_IDLE);
			cr_expect_eq(m[i]->now.in_pass, 0);
		}
		cr_expect_eq(u->gathered_ranks, 0, "after a death in case %u", s);
	}
}

ONE_RANK(numbers_that_mean_nothing)
{
	Shardd__V1__SetReshardRequest r = SHARDD__V1__SET_RESHARD_REQUEST__INIT;
	uint32_t units[2] = { 1, 7 };

	u = guarded("u", RESHARD_AFTER_FORWARD, DTYPE_FP32, 1);
	begin_pass(m[0], u, 0, &op[0]);
	expect_fault(&op[0].fault, FAULT_INVALID, "pass is 0; it must be FORWARD or BACKWARD");
	end_pass(m[0], u, 3, false, &op[0]);
	expect_fault(&op[0].fault, FAULT_INVALID, "pass is 3");
	nodefix_submit(&n, m[0], "SetReshard", &r.base, &op[0]);
	expect_fault(&op[0].fault, FAULT_INVALID, "units has 0 entries");
	r.units = units;
	r.n_units = 2;
	nodefix_submit(&n, m[0], "SetReshard", &r.base, &op[0]);
	expect_fault(&op[0].fault, FAULT_INVALID, "units has 2 entries");
	r.units = &units[1];
	r.n_units = 1;
	nodefix_submit(&n, m[0], "SetReshard", &r.base, &op[0]);
	expect_fault(&op[0].fault, FAULT_NOT_FOUND, "there is no unit 7");
	set_reshard(m[0], u, _RESHARD_N, &op[0]);
	expect_fault(&op[0].fault, FAULT_INVALID, "reshard is 5");
}
