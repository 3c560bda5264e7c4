/*
 * What a job's memory comes to, against the formulas of docs/semantics.md, which are
 * written here once more: what is in use to the byte, what is taken to the page.
 */
#include <criterion/criterion.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "core/check.h"
#include "trainfix.h"

TestSuite(memory, .timeout = 300);

enum { MAX_RANKS = 4, MAX_UNITS = 3, MAX_SLABS = 16 };
enum phase { REGISTERED, GATHERED, BUFFERS, ACCUMULATED, REDUCED, STEPPED, _PHASE_N };

/* One tensor that is trained and one that is frozen, [rows, columns] each. */
struct unit_case {
	uint64_t rows, columns;
	uint64_t frozen; /* rows; 0: none */
};

struct scene {
	const char *name;
	uint32_t world;
	struct unit_case units[MAX_UNITS];
	unsigned n_units;
	struct shardd_unit_spec like; /* all but names and tensors */
	unsigned states;              /* arrays of optimizer state */
	bool clips;
	uint64_t buffer; /* numbers in a buffer of every unit */
	uint64_t stays;  /* bytes of parameters, gradients and state after a step; 0: any */
	enum shardd_resume resume;

	atomic_int reached; /* phases that the trainers are through with */
	atomic_int seen;    /* and that were looked at */
};

/* --------------------------------------------------------------- arithmetic */

static uint64_t up(uint64_t n, uint64_t to)
{
	return (n + to - 1) / to * to;
}

static uint64_t page(uint64_t bytes)
{
	return up(bytes, train_on_host() ? (uint64_t)sysconf(_SC_PAGESIZE) : 2u << 20);
}

static uint64_t size_of(enum shardd_dtype t)
{
	return t == SHARDD_BF16 || t == SHARDD_FP16 ? 2 : 4;
}

/* Every array begins at a multiple of 256 bytes. */
static uint64_t array(uint64_t elements, uint64_t size)
{
	return up(elements * size, 256);
}

/* Elements of all shards of so many rows: of one replica. */
static uint64_t padded(const struct scene *s, uint64_t rows, uint64_t columns)
{
	uint64_t w = s->like.strategy == SHARDD_REPLICATE ? 1 : s->world;
	uint64_t m = s->like.shard_multiple ? s->like.shard_multiple : 1;

	if (s->like.strategy == SHARDD_HYBRID)
		w = s->like.shard_ranks;
	if (s->like.layout == SHARDD_LAYOUT_DIM0)
		return up(rows, w) * columns;
	return rows ? up((rows * columns + w - 1) / w, m) * w : 0;
}

static uint64_t trained(const struct scene *s, unsigned u)
{
	return padded(s, s->units[u].rows, s->units[u].columns);
}

static uint64_t frozen(const struct scene *s, unsigned u)
{
	return padded(s, s->units[u].frozen, s->units[u].columns);
}

/* What gather hands out of it: without padding at the end, if nothing is frozen. */
static uint64_t gradient_elements(const struct scene *s, unsigned u)
{
	return s->like.layout == SHARDD_LAYOUT_DIM0 ? trained(s, u)
						    : s->units[u].rows * s->units[u].columns;
}

static bool in_backward(const struct scene *s)
{
	return s->like.optimizer.when == SHARDD_OPTIM_IN_BACKWARD;
}

/* A pool as it grows: slabs of 1 MiB at least, filled from their begin, first fit. */
struct slabs {
	uint64_t bytes[MAX_SLABS], used[MAX_SLABS];
	unsigned n;
};

static void take(struct slabs *p, uint64_t bytes)
{
	unsigned i = 0;

	while (i < p->n && p->bytes[i] - p->used[i] < bytes)
		i++;
	cr_assert_lt(i, (unsigned)MAX_SLABS);
	if (i == p->n) {
		p->bytes[i] = page(bytes > 1u << 20 ? bytes : 1u << 20);
		p->used[i] = 0;
		p->n++;
	}
	p->used[i] += bytes;
}

static uint64_t taken(const struct slabs *p)
{
	uint64_t sum = 0;

	for (unsigned i = 0; i < p->n; i++)
		sum += p->bytes[i];
	return sum;
}

/* ------------------------------------------------------------- the formulas */

struct expected {
	uint64_t used, taken, peak;
};

/* Parameters; gradients, unless the optimizer runs in backward; optimizer state; then copies of them, to
 * which half a step is rolled back; buffers. */
static struct expected shards(const struct scene *s)
{
	bool copied = in_backward(s) && s->resume != SHARDD_RESUME_NO_COPY;
	uint64_t params = 0, other = 0, buffers = 0, copies = 0, taken;

	for (unsigned u = 0; u < s->n_units; u++) {
		params += array(trained(s, u) + frozen(s, u), 4);
		other += array(trained(s, u), 4) * (!in_backward(s) + s->states);
		buffers += array(s->buffer, 8);
	}
	copies = copied ? params + other : 0;
	taken = page(params) + page(other) + page(copies) + s->world * page(buffers);
	return (struct expected){ params + other + copies + s->world * buffers, taken, taken };
}

/* Where the compute dtype is not that of the storage; until the parameters change. */
static struct expected copies(const struct scene *s, enum phase phase)
{
	bool changed = phase == STEPPED || (phase == REDUCED && in_backward(s) && !s->clips);
	uint64_t size = size_of(s->like.compute_dtype);
	struct slabs pool = { 0 };
	uint64_t used = 0;

	for (unsigned u = 0; size < 4 && phase >= GATHERED && u < s->n_units; u++) {
		uint64_t bytes = array(trained(s, u) + frozen(s, u), size);

		take(&pool, bytes);
		used += bytes;
	}
	return (struct expected){ changed ? 0 : used, taken(&pool), taken(&pool) };
}

/* Each rank's gradient buffers, and as many again that it has accumulated. */
static struct expected buffers(const struct scene *s, enum phase phase)
{
	uint64_t size =
		size_of(s->like.gradient_dtype ? s->like.gradient_dtype : s->like.compute_dtype);
	struct slabs pool = { 0 };
	uint64_t used = 0;

	for (int times = (phase >= BUFFERS) + (phase >= ACCUMULATED); times > 0; times--)
		for (unsigned u = 0; u < s->n_units; u++) {
			take(&pool, array(gradient_elements(s, u), size));
			used += array(gradient_elements(s, u), size);
		}
	return (struct expected){ phase >= REDUCED ? 0 : s->world * used, s->world * taken(&pool),
				  s->world * taken(&pool) };
}

/* Gradient shards of an optimizer in backward: none, since its reduce steps the unit; all of
 * them where they wait for their norm, and then kept for the next step. */
static struct expected late_gradients(const struct scene *s, enum phase phase)
{
	struct slabs pool = { 0 };
	uint64_t used = 0;

	for (unsigned u = 0; s->clips && in_backward(s) && phase >= REDUCED && u < s->n_units;
	     u++) {
		take(&pool, array(trained(s, u), 4));
		used += array(trained(s, u), 4);
	}
	if (s->clips && phase == STEPPED)
		return (struct expected){ 0, taken(&pool), taken(&pool) };
	return (struct expected){ s->clips ? used : 0, taken(&pool), taken(&pool) };
}

/* ---------------------------------------------------------------- comparing */

static uint64_t number(const json_t *of, const char *key)
{
	const json_t *value = json_object_get(of, key);

	cr_assert(json_is_integer(value), "no %s", key);
	return (uint64_t)json_integer_value(value);
}

static const json_t *class_of(const json_t *all, const char *name)
{
	const json_t *job = json_array_get(json_object_get(all, "jobs"), 0);
	json_t *c;
	size_t i;

	cr_assert(job);
	json_array_foreach(json_object_get(job, "memory"), i,
			   c) if (strcmp(json_string_value(json_object_get(c, "name")), name) ==
				  0) return c;
	cr_assert_fail("no class %s", name);
	return NULL;
}

static void check_class(const struct scene *s, enum phase phase, const json_t *all,
			const char *name, struct expected want)
{
	const json_t *c = class_of(all, name);

	cr_assert_eq(number(c, "formula_bytes"), want.used, "%s, phase %d, %s: formula %llu: %llu",
		     s->name, (int)phase, name, (unsigned long long)number(c, "formula_bytes"),
		     (unsigned long long)want.used);
	cr_assert_eq(number(c, "used_bytes"), want.used, "%s, phase %d, %s: used %llu: %llu",
		     s->name, (int)phase, name, (unsigned long long)number(c, "used_bytes"),
		     (unsigned long long)want.used);
	cr_assert_eq(number(c, "taken_bytes"), want.taken, "%s, phase %d, %s: taken %llu: %llu",
		     s->name, (int)phase, name, (unsigned long long)number(c, "taken_bytes"),
		     (unsigned long long)want.taken);
	cr_assert_eq(number(c, "peak_bytes"), want.peak, "%s, phase %d, %s: peak %llu: %llu",
		     s->name, (int)phase, name, (unsigned long long)number(c, "peak_bytes"),
		     (unsigned long long)want.peak);
}

static void look(const struct scene *s, enum phase phase)
{
	static const char *const args[] = { "memory", NULL };
	struct expected own = buffers(s, phase), late = late_gradients(s, phase);
	json_t *all = daemonfix_ctl(&trainfix, args);

	check_class(s, phase, all, "shard", shards(s));
	check_class(s, phase, all, "full", copies(s, phase));
	check_class(s, phase, all, "grad",
		    (struct expected){ own.used + late.used, own.taken + late.taken,
				       own.peak + late.peak });
	if (phase == STEPPED && s->stays)
		cr_assert_eq(number(class_of(all, "shard"), "taken_bytes") +
				     number(class_of(all, "grad"), "used_bytes"),
			     s->stays, "%s", s->name);
	json_decref(all);
}

/* ------------------------------------------------- the trainers, one process */

struct crew {
	struct scene *s;
	shardd_client *c[MAX_RANKS];
	struct shardd_unit_info info[MAX_UNITS];
};

static void pass(struct crew *w, enum phase phase)
{
	atomic_store(&w->s->reached, (int)phase + 1);
	while (atomic_load(&w->s->seen) <= (int)phase)
		sched_yield();
}

static void register_all(struct crew *w)
{
	const struct scene *s = w->s;
	struct shardd_unit_spec specs[MAX_UNITS];
	struct shardd_tensor tensors[MAX_UNITS][2];
	uint64_t shapes[MAX_UNITS][2][2];
	struct shardd_buffer buffer = {
		.name = "counts", .shape = &s->buffer, .dims = 1, .dtype = SHARDD_BUFFER_INT64
	};
	static const char *const names[] = { "first", "second", "third" };

	for (unsigned u = 0; u < s->n_units; u++) {
		for (unsigned t = 0; t < 2; t++) {
			shapes[u][t][0] = t ? s->units[u].frozen : s->units[u].rows;
			shapes[u][t][1] = s->units[u].columns;
			tensors[u][t] = (struct shardd_tensor){ .name = t ? "frozen" : "weight",
								.shape = shapes[u][t],
								.dims = 2,
								.frozen = t };
		}
		specs[u] = s->like;
		specs[u].size = sizeof(specs[u]);
		specs[u].name = names[u];
		specs[u].tensors = tensors[u];
		specs[u].n_tensors = s->units[u].frozen ? 2 : 1;
		specs[u].buffers = &buffer;
		specs[u].n_buffers = s->buffer > 0;
	}
	for (uint32_t r = 0; r < s->world; r++)
		TRAIN_OK(shardd_register(w->c[r], specs, s->n_units, w->info, &train_err));
}

#define EVERY(w, name, ...)                                                                 \
	do {                                                                                \
		shardd_ticket tickets[MAX_RANKS];                                           \
		for (uint32_t r = 0; r < (w)->s->world; r++)                                \
			TRAIN_OK(shardd_submit_##name((w)->c[r],                            \
						      SHARDD_OPTIONS(name, __VA_ARGS__),    \
						      &tickets[r], &train_err));            \
		for (uint32_t r = 0; r < (w)->s->world; r++)                                \
			TRAIN_OK(shardd_wait((w)->c[r], tickets[r], -1, NULL, &train_err)); \
	} while (0)

static void gather_all(struct crew *w)
{
	const void *data;

	for (unsigned u = 0; u < w->s->n_units; u++)
		TRAIN_OK(shardd_gather(w->c[0], w->info[u].unit, &data, &train_err));
	pass(w, GATHERED);
	for (unsigned u = 0; u < w->s->n_units; u++)
		TRAIN_OK(shardd_release(w->c[0], w->info[u].unit, &train_err));
}

static void ask_buffers(struct crew *w)
{
	for (unsigned u = 0; u < w->s->n_units; u++)
		for (uint32_t r = 0; r < w->s->world; r++) {
			void *data;
			size_t bytes =
				w->info[u].gradient_elements *
				size_of(w->s->like.gradient_dtype ? w->s->like.gradient_dtype
								  : w->s->like.compute_dtype);

			TRAIN_OK(shardd_gradient(w->c[r], w->info[u].unit, &data, &train_err));
			train_set(w->c[r], data, 0, bytes);
		}
}

static void accumulate_all(struct crew *w)
{
	for (unsigned u = 0; u < w->s->n_units; u++)
		for (uint32_t r = 0; r < w->s->world; r++)
			TRAIN_OK(shardd_accumulate(w->c[r], w->info[u].unit, &train_err));
}

static int crew(const struct trainer *t)
{
	struct crew w = { .s = t->arg };
	struct shardd_clip_options clip = { .size = sizeof(clip), .max_norm = 1 };
	struct shardd_plan_backward_options plan = { .size = sizeof(plan), .clip = &clip };

	for (uint32_t r = 0; r < w.s->world; r++) {
		const struct trainer one = {
			.socket = t->socket, .job = "measured", .rank = r, .world = w.s->world
		};

		w.c[r] = train_connect(&one);
		train_join_resuming(w.c[r], &one, SHARDD_EPHEMERAL, w.s->resume);
	}
	register_all(&w);
	for (unsigned u = 0; u < w.s->n_units; u++)
		EVERY(&w, init, .unit = w.info[u].unit, .seed = 1, .from = SHARDD_FROM_SEED);
	pass(&w, REGISTERED);
	gather_all(&w);
	ask_buffers(&w);
	pass(&w, BUFFERS);
	accumulate_all(&w);
	ask_buffers(&w);
	pass(&w, ACCUMULATED);
	if (w.s->clips)
		EVERY(&w, plan_backward, .clip = plan.clip);
	for (unsigned u = 0; u < w.s->n_units; u++)
		EVERY(&w, reduce, .unit = w.info[u].unit);
	pass(&w, REDUCED);
	EVERY(&w, step, .group = SHARDD_WORLD, .lr = NULL);
	EVERY(&w, commit, .step = 1, .blob = NULL, .bytes = 0);
	pass(&w, STEPPED);
	for (uint32_t r = 0; r < w.s->world; r++)
		train_leave(w.c[r]);
	return 0;
}

static void run_scene(const struct scene *like)
{
	struct scene *s = trainer_shared(sizeof(*s));
	pid_t pid;

	*s = *like;
	pid = trainer_start(&trainfix, "measured", 0, 1, crew, s);
	for (int phase = 0; phase < _PHASE_N; phase++) {
		while (atomic_load(&s->reached) <= phase) {
			cr_assert_eq(kill(pid, 0), 0);
			sched_yield();
		}
		look(s, (enum phase)phase);
		atomic_store(&s->seen, phase + 1);
	}
	cr_assert_eq(trainer_wait(pid, 60), 0, "%s", s->name);
}

/* --------------------------------------------------------------------- scenes */

#define ADAMW_                                  \
	{                                       \
		.kind = SHARDD_ADAMW, .lr = 0.1 \
	}
#define BACK(k)                                                          \
	{                                                                \
		.kind = (k), .lr = 0.1, .when = SHARDD_OPTIM_IN_BACKWARD \
	}

static const struct scene scenes[] = {
	{ .name = "fp32, AdamW, 2 ranks",
	  .world = 2,
	  .units = { { 1000, 1000, 0 }, { 3, 5, 0 } },
	  .n_units = 2,
	  .like = { .optimizer = ADAMW_, .compute_dtype = SHARDD_FP32 },
	  .states = 2 },
	{ .name = "bf16, frozen tensors, 3 ranks",
	  .world = 3,
	  .units = { { 700, 1001, 300 }, { 101, 7, 2 }, { 601, 1024, 0 } },
	  .n_units = 3,
	  .like = { .optimizer = ADAMW_, .compute_dtype = SHARDD_BF16, .shard_multiple = 128 },
	  .states = 2 },
	{ .name = "by rows, amsgrad, 4 ranks, a buffer",
	  .world = 4,
	  .units = { { 1001, 513, 3 }, { 2, 1000, 0 } },
	  .n_units = 2,
	  .like = { .optimizer = { .kind = SHARDD_ADAM, .lr = 0.1, .amsgrad = true },
		    .compute_dtype = SHARDD_FP16,
		    .gradient_dtype = SHARDD_FP32,
		    .layout = SHARDD_LAYOUT_DIM0 },
	  .states = 3,
	  .buffer = 1000 },
	{ .name = "SGD with momentum, 1 rank",
	  .world = 1,
	  .units = { { 333, 777, 1 } },
	  .n_units = 1,
	  .like = { .optimizer = { .kind = SHARDD_SGD, .lr = 0.1, .momentum = 0.9 },
		    .compute_dtype = SHARDD_FP32 },
	  .states = 1 },
	{ .name = "replicas, 2 ranks",
	  .world = 2,
	  .units = { { 512, 1024, 0 } },
	  .n_units = 1,
	  .like = { .optimizer = ADAMW_,
		    .compute_dtype = SHARDD_FP32,
		    .strategy = SHARDD_REPLICATE,
		    .reduce_profile = SHARDD_PROFILE_DDP },
	  .states = 2 },
	{ .name = "in backward, 2 ranks",
	  .world = 2,
	  .units = { { 512, 1024, 0 }, { 700, 1024, 0 }, { 100, 100, 0 } },
	  .n_units = 3,
	  .like = { .optimizer = BACK(SHARDD_ADAMW), .compute_dtype = SHARDD_FP32 },
	  .states = 2 },
	{ .name = "in backward, clipped, 4 ranks",
	  .world = 4,
	  .units = { { 512, 1024, 0 }, { 700, 1024, 0 }, { 100, 100, 0 } },
	  .n_units = 3,
	  .like = { .optimizer = BACK(SHARDD_ADAMW),
		    .compute_dtype = SHARDD_BF16,
		    .layout = SHARDD_LAYOUT_DIM0 },
	  .states = 2,
	  .clips = true },
	{ .name = "in backward, SGD, 2 ranks",
	  .world = 2,
	  .units = { { 1024, 512, 5 } },
	  .n_units = 1,
	  .like = { .optimizer = BACK(SHARDD_SGD), .compute_dtype = SHARDD_FP16 },
	  .states = 0 },
	{ .name = "in backward, without copies, 2 ranks",
	  .world = 2,
	  .units = { { 512, 1024, 0 }, { 700, 1024, 0 }, { 100, 100, 0 } },
	  .n_units = 3,
	  .like = { .optimizer = BACK(SHARDD_ADAMW), .compute_dtype = SHARDD_FP32 },
	  .states = 2,
	  .resume = SHARDD_RESUME_NO_COPY },
};

Test(memory, formulas_to_the_page, .init = trainfix_begin, .fini = trainfix_end)
{
	for (size_t i = 0; i < ARRAY_SIZE(scenes); i++)
		run_scene(&scenes[i]);
}

/* 16 bytes a parameter stay between steps, 12 with the optimizer in backward and as many for the copy of
 * them, which a job may do without; clipping or not: the tutorial's numbers, for a model that pages
 * divide. */
Test(memory, twelve_bytes_instead_of_sixteen, .init = trainfix_begin, .fini = trainfix_end)
{
	enum { N = 3 << 20 };
	static const char *const names[] = { "at the step", "in backward, no copy",
					     "in backward, clipped, no copy", "in backward" };
	static const unsigned bytes[] = { 16, 12, 12, 24 };

	for (unsigned kind = 0; kind < ARRAY_SIZE(names); kind++) {
		struct scene s = { .name = names[kind],
				   .world = 4,
				   .units = { { 1024, 1024, 0 }, { 2048, 1024, 0 } },
				   .n_units = 2,
				   .like = { .optimizer = ADAMW_, .compute_dtype = SHARDD_FP32 },
				   .states = 2,
				   .clips = kind == 2,
				   .resume = kind % 3 ? SHARDD_RESUME_NO_COPY : 0,
				   .stays = bytes[kind] * N };

		if (kind)
			s.like.optimizer.when = SHARDD_OPTIM_IN_BACKWARD;
		run_scene(&s);
	}
}
