/*
 * Reductions through a daemon against FSDP2, FSDP1, DDP, fairscale and XLA: every case of
 * tests/golden/reduce.safetensors (make_reduce.py) as a unit, in every layout. The gradients
 * that the systems' ranks had are handed in, and what then is in the gradient shards is
 * what they had, bit for bit, the sign of a zero too: SGD with lr 1 makes -g of parameters
 * that are -0. The cases of DDP go through buckets, too. test_golden_reduce compares the plans alone, and with bounds what gloo itself
 * gives on more than two ranks; here the order is ours, which "rank" recorded.
 */
#include <criterion/criterion.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "convert.h"
#include "core/check.h"
#include "core/cleanup.h"
#include "golden.h"
#include "trainfix.h"

TestSuite(golden_shards, .init = trainfix_begin, .fini = trainfix_end, .timeout = 240);

enum { TENSORS = 5, N = 180, MAX_CASES = 512, PASSES = 3, AT_ONCE = 32 };

/* Of make_reduce.py: few have as many rows as there are ranks. */
static const uint64_t shapes[TENSORS][3] = { { 5, 3 }, { 7 }, { 1 }, { 2, 2, 3 }, { 29, 5 } };
static const uint32_t dims[TENSORS] = { 2, 1, 1, 3, 2 };

struct kase {
	char name[96]; /* the unit's; the case's without its number of ranks */
	char passes[PASSES + 1];
	struct shardd_unit_spec spec;
	enum dtype grad, out;
	bool zeroed; /* the gradient was zero and has been added to: -0 is then +0 */
	const void *in, *want;
};

/* A number of ranks, and what has been recorded for it. */
struct scene {
	unsigned world, n;
	bool nccl;
	bool buckets; /* of DDP alone, by buckets */
	enum shardd_layout layout;
	uint32_t multiple;
	struct kase cases[MAX_CASES];
};

/* ----------------------------------------------------------- what a user asks for */

static void fairscale_spec(const char *about, struct shardd_unit_spec *s)
{
	bool wide = golden_number(about, "fp32_reduce_scatter") != 0;

	s->reduce_profile =
		golden_is(about, "system", "xla") ? SHARDD_PROFILE_XLA : SHARDD_PROFILE_FAIRSCALE;
	s->reduce_dtype = wide ? SHARDD_FP32 : s->gradient_dtype;
	s->pre_divide = golden_number(about, "pre");
	s->post_divide = golden_number(about, "post");
}

static void hybrid_spec(const char *about, struct shardd_unit_spec *s)
{
	if (golden_number(about, "replicas") == 1)
		return;
	s->strategy = SHARDD_HYBRID;
	s->shard_ranks = (uint32_t)golden_number(about, "ranks");
}

static void fsdp1_spec(const char *about, struct shardd_unit_spec *s)
{
	enum dtype hook = golden_dtype(about, "hook"), reduce = golden_dtype(about, "reduce");

	s->reduce_profile = SHARDD_PROFILE_FSDP1_HOOK;
	s->reduce_dtype = (enum shardd_dtype)(hook ? hook : reduce);
	if (golden_is(about, "form", "all-reduce"))
		s->strategy = SHARDD_REPLICATE;
	else
		hybrid_spec(about, s);
}

static void ddp_spec(const char *about, struct shardd_unit_spec *s)
{
	bool plain = golden_is(about, "hook", "none");
	bool whole = golden_is(about, "view", "alias") || golden_is(about, "view", "batched");

	s->strategy = SHARDD_REPLICATE;
	s->reduce_profile = !plain  ? SHARDD_PROFILE_DDP_HOOK
			    : whole ? SHARDD_PROFILE_DDP_BUCKET_VIEW
				    : SHARDD_PROFILE_DDP;
	if (!plain && !golden_is(about, "hook", "allreduce"))
		s->reduce_dtype = (enum shardd_dtype)golden_dtype(about, "hook");
}

static void fsdp2_spec(const char *about, struct shardd_unit_spec *s)
{
	s->reduce_profile = SHARDD_PROFILE_FSDP2;
	s->reduce_dtype = (enum shardd_dtype)golden_dtype(about, "reduce");
	s->divide_factor = golden_number(about, "factor");
	s->force_sum = golden_number(about, "force_sum") != 0;
	hybrid_spec(about, s);
}

static void read_spec(const char *about, struct shardd_unit_spec *s)
{
	static const struct {
		const char *system;
		void (*read)(const char *about, struct shardd_unit_spec *s);
	} systems[] = { { "fairscale", fairscale_spec },
			{ "xla", fairscale_spec },
			{ "fsdp1", fsdp1_spec },
			{ "ddp", ddp_spec },
			{ "fsdp2", fsdp2_spec } };

	*s = (struct shardd_unit_spec){
		.size = sizeof(*s),
		.gradient_dtype = (enum shardd_dtype)golden_dtype(about, "grad"),
		.div_mode = SHARDD_DIV_TRUE, /* the vectors' tensors are a CPU's */
		.optimizer = { .kind = SHARDD_SGD, .lr = 1 },
	};
	for (size_t i = 0; i < ARRAY_SIZE(systems); i++)
		if (golden_is(about, "system", systems[i].system))
			systems[i].read(about, s);
	cr_assert_neq(s->reduce_profile, 0, "%s", about);
}

/* ------------------------------------------------------------------- which cases */

/* Is there an AVG in it? That is gloo's on the host, NCCL's on GPUs. */
static bool averages(const char *about)
{
	double factor;

	if (!golden_is(about, "system", "fsdp2") || golden_number(about, "force_sum") != 0)
		return false;
	if (golden_is(about, "reduce", "fp16") ||
	    (golden_is(about, "reduce", "none") && golden_is(about, "grad", "fp16")))
		return false;
	factor = golden_number(about, "factor");
	return factor == 0 || factor == golden_number(about, "ranks");
}

/* More than two ranks in one collective: gloo adds in an order of its own. */
static bool has_own_order(const char *about)
{
	unsigned replicas =
		golden_is(about, "system", "fsdp2") || golden_is(about, "system", "fsdp1")
			? (unsigned)golden_number(about, "replicas")
			: 1;

	return golden_is(about, "comm", "gloo") &&
	       (golden_number(about, "ranks") > 2 || replicas > 2);
}

/* With gradient_as_bucket_view a gradient becomes the bucket in its second pass, and its
 * arithmetic changes with that; a unit's profile does not. */
static bool changes_profile(const char *about)
{
	char passes[8];

	return golden_is(about, "system", "ddp") && golden_is(about, "view", "view") &&
	       strlen(golden_text(about, "passes", passes, sizeof(passes))) > 1;
}

/* FSDP1 and fairscale where they do not shard: what the first reduction left is added to before
 * the next, here with 16-bit gradients after it. test_golden_reduce bounds that. */
static bool rounds_elsewhere(const char *about)
{
	bool whole = golden_is(about, "system", "fsdp1")
			     ? golden_is(about, "form", "all-reduce") ||
				       golden_number(about, "world") == 1
			     : golden_is(about, "system", "fairscale") &&
				       golden_number(about, "world") == 1;
	char passes[8];

	golden_text(about, "passes", passes, sizeof(passes));
	return whole && !golden_is(about, "grad", "fp32") &&
	       strchr(passes, 's') != strrchr(passes, 's');
}

static bool is_for(const char *about, const struct scene *s)
{
	if (golden_number(about, "world") != s->world || has_own_order(about) ||
	    changes_profile(about) || rounds_elsewhere(about))
		return false;
	if (s->buckets && !golden_is(about, "system", "ddp"))
		return false;
	return !averages(about) || s->world == 1 || golden_is(about, "comm", "nccl") == s->nccl;
}

static void read_case(const struct safetensors *f, const char *name, const char *about,
		      struct kase *k)
{
	struct safetensors_tensor want = golden_tensor(f, name), in;
	char input[64];

	read_spec(about, &k->spec);
	cr_assert_lt(snprintf(k->name, sizeof(k->name), "%s", name), (int)sizeof(k->name));
	golden_text(about, "passes", k->passes, sizeof(k->passes));
	k->grad = golden_dtype(about, "grad");
	k->out = golden_dtype(about, "out");
	k->zeroed = golden_is(about, "system", "ddp") && golden_is(about, "view", "alias");
	in = golden_tensor(f, golden_text(about, "input", input, sizeof(input)));
	cr_assert(in.dtype == k->grad && in.dims == 3 && in.shape[2] == N);
	cr_assert(in.shape[0] >= strlen(k->passes) && in.shape[1] == golden_number(about, "world"));
	cr_assert(want.dtype == k->out && want.elements == N);
	k->in = in.data;
	k->want = want.data;
}

static void read_scene(const struct safetensors *f, struct scene *s)
{
	const char *name, *about;
	void *iter = NULL;

	while (safetensors_next(f, &iter, &name, &about)) {
		if (!is_for(about, s))
			continue;
		cr_assert_lt(s->n, MAX_CASES);
		read_case(f, name, about, &s->cases[s->n++]);
	}
}

/* -------------------------------------------------------------------- a rank */

struct replayed {
	shardd_client *c;
	const struct trainer *t;
	const struct scene *s;
	struct shardd_unit_info info[MAX_CASES];
	struct shardd_tensor_place places[MAX_CASES][TENSORS];
};

static void register_units(struct replayed *r)
{
	static const char *const names[TENSORS] = { "a", "b", "c", "d", "e" };
	struct shardd_unit_spec *specs = train_alloc(r->s->n * sizeof(*specs));
	struct shardd_tensor tensors[TENSORS] = { 0 };

	for (unsigned i = 0; i < TENSORS; i++)
		tensors[i] = (struct shardd_tensor){ .name = names[i],
						     .shape = shapes[i],
						     .dims = dims[i] };
	for (unsigned k = 0; k < r->s->n; k++) {
		specs[k] = r->s->cases[k].spec;
		specs[k].name = r->s->cases[k].name;
		specs[k].tensors = tensors;
		specs[k].n_tensors = TENSORS;
		specs[k].layout = r->s->layout;
		specs[k].shard_multiple = r->s->multiple;
	}
	TRAIN_OK(shardd_register(r->c, specs, r->s->n, r->info, &train_err));
	for (unsigned k = 0; k < r->s->n; k++)
		TRAIN_OK(shardd_tensor_places(r->c, r->info[k].unit, r->places[k], TENSORS,
					      &train_err));
	free(specs);
}

static void make_negative_zero(struct replayed *r)
{
	uint64_t buffer = 0;
	float x[N];
	void *data;

	for (unsigned i = 0; i < N; i++)
		x[i] = -0.0F;
	if (r->t->rank == 0) {
		TRAIN_OK(shardd_alloc(r->c, sizeof(x), &buffer, &data, &train_err));
		train_write(r->c, data, x, sizeof(x));
	}
	for (unsigned k = 0; k < r->s->n; k++) {
		TRAINER_CHECK(r->info[k].packed_elements == N);
		TRAIN_OK(shardd_init_broadcast(r->c, r->info[k].unit, 0, buffer, &train_err));
	}
	if (r->t->rank == 0)
		TRAIN_OK(shardd_free(r->c, buffer, &train_err));
}

/* What this rank's backward pass @p gave, and 0 where the layout has padding. */
static void *gradient(const struct replayed *r, unsigned k, unsigned p)
{
	const struct kase *x = &r->s->cases[k];
	size_t size = dtype_size(x->grad), from = ((size_t)p * r->s->world + r->t->rank) * N;
	uint8_t *whole = train_alloc(r->info[k].gradient_elements * size);

	for (unsigned i = 0; i < TENSORS; i++) {
		const struct shardd_tensor_place *at = &r->places[k][i];

		TRAINER_CHECK(at->offset + at->elements <= r->info[k].gradient_elements);
		for (size_t e = 0; e < at->elements; e++, from++) {
			float g = golden_at(x->in, x->grad, from) + (x->zeroed ? 0.0F : -0.0F);
			const struct k_cast cast = { whole + (at->offset + e) * size, &g, x->grad,
						     DTYPE_FP32, false };

			kernels_ref()->cast(&cast, 0, 1);
		}
	}
	return whole;
}

static void hand_in(struct replayed *r, unsigned k, unsigned p, void *to)
{
	void *whole = gradient(r, k, p);

	train_write(r->c, to, whole,
		    r->info[k].gradient_elements * dtype_size(r->s->cases[k].grad));
	free(whole);
}

static void submit(struct replayed *r, unsigned k, unsigned p, shardd_ticket *t)
{
	shardd_unit u = r->info[k].unit;

	if (r->s->cases[k].passes[p] == 'n')
		TRAIN_OK(shardd_submit_accumulate(r->c, SHARDD_OPTIONS(accumulate, .unit = u), t,
						  &train_err));
	else if (r->s->cases[k].passes[p] == 'd')
		TRAIN_OK(shardd_submit_reduce(
			r->c, SHARDD_OPTIONS(reduce, .unit = u, .deferred = true), t, &train_err));
	else
		TRAIN_OK(shardd_submit_reduce(r->c, SHARDD_OPTIONS(reduce, .unit = u), t,
					      &train_err));
}

/* Pass @p of the units [@from, @to) that have one, all of them at once. */
static void run_pass(struct replayed *r, unsigned p, unsigned from, unsigned to)
{
	shardd_ticket tickets[AT_ONCE];
	unsigned which[AT_ONCE], n = 0;
	struct shardd_result got;

	for (unsigned k = from; k < to; k++) {
		if (strlen(r->s->cases[k].passes) <= p)
			continue;
		which[n] = k;
		TRAIN_OK(shardd_submit_gradient(r->c,
						SHARDD_OPTIONS(gradient, .unit = r->info[k].unit),
						&tickets[n++], &train_err));
	}
	for (unsigned i = 0; i < n; i++) {
		TRAIN_OK(shardd_wait(r->c, tickets[i], -1, &got, &train_err));
		hand_in(r, which[i], p, got.data);
	}
	for (unsigned i = 0; i < n; i++)
		submit(r, which[i], p, &tickets[i]);
	for (unsigned i = 0; i < n; i++)
		TRAIN_OK(shardd_wait(r->c, tickets[i], -1, NULL, &train_err));
}

/* ------------------------------------------------------------------- by buckets */

/* Of the cases @which with the same passes: one ddp, in buckets that are rebuilt after the
 * first. */
struct bucketed {
	shardd_ddp ddp;
	unsigned n, which[MAX_CASES];
	shardd_unit units[MAX_CASES];
	uint32_t all[MAX_CASES * TENSORS];
	struct shardd_ddp_view views[MAX_CASES * TENSORS];
};

/* The first case, from @first on, that is in no ddp yet, and those like it. */
static void make_bucketed(const struct replayed *r, unsigned first, struct bucketed *b)
{
	struct shardd_ddp_create_options spec = { .size = sizeof(spec),
						  .units = b->units,
						  .bucket_bytes = 2000,
						  .first_bucket_bytes = 500 };
	uint32_t tensors;

	b->n = 0;
	for (unsigned k = first; k < r->s->n; k++)
		if (strcmp(r->s->cases[k].passes, r->s->cases[first].passes) == 0) {
			b->units[b->n] = r->info[k].unit;
			b->which[b->n++] = k;
		}
	for (uint32_t i = 0; i < b->n * TENSORS; i++)
		b->all[i] = i;
	spec.n_units = b->n;
	TRAIN_OK(shardd_ddp_create(r->c, &spec, &b->ddp, &tensors, &train_err));
	TRAINER_CHECK(tensors == b->n * TENSORS);
}

/* As autograd does it: from the second pass on a gradient is there already. */
static void add_to_view(const struct replayed *r, const struct shardd_ddp_view *v, enum dtype t,
			const uint8_t *g, bool there)
{
	size_t bytes = v->elements * dtype_size(t);
	uint8_t *x = train_copy(r->c, v->data, bytes);

	for (size_t e = 0; e < v->elements; e++) {
		float sum = golden_at(x, t, e) + golden_at(g, t, e);
		const struct k_cast cast = { x + e * dtype_size(t), &sum, t, DTYPE_FP32, false };

		kernels_ref()->cast(&cast, 0, 1);
	}
	train_write(r->c, v->data, there ? x : g, bytes);
	free(x);
}

static void pass_by_buckets(const struct replayed *r, struct bucketed *b, unsigned p)
{
	for (unsigned i = 0; i < b->n; i++) {
		unsigned k = b->which[i];
		enum dtype t = r->s->cases[k].grad;
		uint8_t *whole = gradient(r, k, p);

		for (unsigned j = 0; j < TENSORS; j++)
			add_to_view(r, &b->views[i * TENSORS + j], t,
				    whole + r->places[k][j].offset * dtype_size(t), p > 0);
		free(whole);
	}
}

static void run_bucketed(const struct replayed *r, struct bucketed *b)
{
	const char *passes = r->s->cases[b->which[0]].passes;
	uint32_t n = b->n * TENSORS;

	for (unsigned p = 0; passes[p]; p++) {
		TRAIN_OK(shardd_ddp_forward(r->c, b->ddp, b->views, n, &train_err));
		if (passes[p] == 's')
			TRAIN_OK(shardd_ddp_backward(r->c, b->ddp, NULL, 0, NULL, 0, &train_err));
		pass_by_buckets(r, b, p);
		if (passes[p] != 's')
			continue;
		TRAIN_OK(shardd_ddp_ready(r->c, b->ddp, b->all, n, &train_err));
		TRAIN_OK(shardd_ddp_finish(r->c, b->ddp, NULL, 0, &train_err));
	}
}

static void run_all_bucketed(const struct replayed *r)
{
	struct bucketed *b = train_alloc(sizeof(*b));
	bool done[MAX_CASES] = { false };

	for (unsigned k = 0; k < r->s->n; k++) {
		if (done[k])
			continue;
		make_bucketed(r, k, b);
		run_bucketed(r, b);
		for (unsigned i = 0; i < b->n; i++)
			done[b->which[i]] = true;
	}
	free(b);
}

/* ----------------------------------------------------------------- comparing */

static bool same(float a, float b)
{
	return f32_bits(a) == f32_bits(b) || (isnan(a) && isnan(b));
}

static bool compare(const struct replayed *r, unsigned k, const float *whole)
{
	const struct kase *x = &r->s->cases[k];
	size_t n = 0;

	for (unsigned i = 0; i < TENSORS; i++)
		for (size_t e = 0; e < r->places[k][i].elements; e++, n++) {
			float got = -whole[r->places[k][i].offset + e];
			float want = golden_at(x->want, x->out, n);

			if (same(got, want))
				continue;
			fprintf(stderr, "%s, layout %d multiple %u: element %zu is %a, not %a\n",
				x->name, (int)r->s->layout, r->s->multiple, n, (double)got,
				(double)want);
			return false;
		}
	return n == N;
}

/* All that differ are told. */
static void compare_all(struct replayed *r)
{
	unsigned different = 0;

	for (unsigned k = 0; k < r->s->n; k++) {
		size_t bytes = r->info[k].elements * sizeof(float);
		float *whole = train_alloc(bytes);

		train_params(r->c, r->info[k].unit, whole, bytes);
		different += !compare(r, k, whole);
		free(whole);
	}
	TRAINER_CHECK(!different);
}

static int replay_trainer(const struct trainer *t)
{
	struct replayed *r = train_alloc(sizeof(*r));

	*r = (struct replayed){ .c = train_join(t), .t = t, .s = t->arg };
	register_units(r);
	make_negative_zero(r);
	if (r->s->buckets)
		run_all_bucketed(r);
	for (unsigned from = 0; !r->s->buckets && from < r->s->n; from += AT_ONCE)
		for (unsigned p = 0; p < PASSES; p++)
			run_pass(r, p, from, from + AT_ONCE < r->s->n ? from + AT_ONCE : r->s->n);
	TRAIN_OK(shardd_step(r->c, SHARDD_WORLD, NULL, &train_err));
	compare_all(r);
	train_leave(r->c);
	free(r);
	return 0;
}

/* ------------------------------------------------------------------- tests */

static const struct {
	enum shardd_layout layout;
	uint32_t multiple;
} layouts[] = { { SHARDD_LAYOUT_FLAT, 1 }, { SHARDD_LAYOUT_FLAT, 128 }, { SHARDD_LAYOUT_DIM0, 1 } };

/* At least @least cases, so that none is lost unseen. */
static void replay(unsigned world, bool buckets, unsigned least)
{
	_cleanup_(safetensors_freep) struct safetensors *f = golden_open("reduce.safetensors");
	_cleanup_(freep) struct scene *s = calloc(1, sizeof(*s));
	char job[32];

	cr_assert_not_null(s);
	s->world = world;
	s->nccl = !train_on_host();
	s->buckets = buckets;
	read_scene(f, s);

	cr_assert_geq(s->n, least, "%u cases of %u ranks", s->n, world);
	for (size_t i = 0; i < (buckets ? 1 : ARRAY_SIZE(layouts)); i++) {
		s->layout = layouts[i].layout;
		s->multiple = layouts[i].multiple;
		snprintf(job, sizeof(job), "w%u-%zu", world, i);
		trainers_run(&trainfix, job, world, replay_trainer, s, 120);
	}
}

#define GOLDEN_SHARDS(ranks, world, least)   \
	Test(golden_shards, ranks)           \
	{                                    \
		replay(world, false, least); \
	}
#define GOLDEN_BUCKETS(ranks, world, least)     \
	Test(golden_shards, ranks##_in_buckets) \
	{                                       \
		replay(world, true, least);     \
	}

GOLDEN_SHARDS(one_rank, 1, 225)
GOLDEN_SHARDS(two_ranks, 2, 250)
GOLDEN_SHARDS(three_ranks, 3, 240)
GOLDEN_SHARDS(four_ranks, 4, 340)
GOLDEN_SHARDS(six_ranks, 6, 370)
GOLDEN_SHARDS(eight_ranks, 8, 360)

GOLDEN_BUCKETS(one_rank, 1, 60)
GOLDEN_BUCKETS(two_ranks, 2, 60)
GOLDEN_BUCKETS(three_ranks, 3, 60)
GOLDEN_BUCKETS(four_ranks, 4, 60)
GOLDEN_BUCKETS(six_ranks, 6, 60)
GOLDEN_BUCKETS(eight_ranks, 8, 60)
