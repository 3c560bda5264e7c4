/*
 * What a job's memory comes to while everything that can be held is held, one thing after the
 * other: copies, summoned parameters, buffers, gradients, deferred sums, the shards of the
 * trainers' own optimizer, DDP's buckets; on one device and on several. One process is all
 * ranks and keeps the books by the formulas (lib/memory_model.h); the test compares them with
 * what shardctl says: formula and use to the byte, slabs and their peak to the page.
 */
#include <criterion/criterion.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/wait.h>

#include "core/check.h"
#include "gpufix.h"
#include "memory_model.h"
#include "trainfix.h"

/* Reductions between devices one by one: those that wait for each other share scratch. */
static void test_memory_held_begin(void)
{
	static const char *const args[] = { "--set", "reduce_batch_bytes=0", NULL };

	failfix_begin(args);
}

TestSuite(memory_held, .timeout = 300, .init = test_memory_held_begin, .fini = failfix_end);

enum { MAX_UNITS = 2, CLASSES = 3 };
enum class { SHARD, FULL, GRAD };

struct scene {
	const char *name;
	uint32_t world;
	struct memory_tensor tensors[MAX_UNITS][MEMORY_MAX_TENSORS];
	struct shardd_unit_spec like; /* all but names and tensors */
	unsigned states;              /* arrays of optimizer state */
	uint64_t buffer;              /* numbers in a buffer of every unit */
	bool defers, clips, buckets;
};

struct figures {
	uint64_t used, taken, peak;
};

/* Between the trainer and the test. */
struct board {
	const struct scene *scene;
	unsigned devices;
	struct figures want[CLASSES];
	char moment[64];
	atomic_uint written, read;
};

/* --------------------------------------------------------- what shardctl says */

static uint64_t number(const json_t *of, const char *key)
{
	const json_t *value = json_object_get(of, key);

	cr_assert(json_is_integer(value), "no %s", key);
	return (uint64_t)json_integer_value(value);
}

static const json_t *class_of(const json_t *all, const char *name)
{
	const json_t *classes =
		json_object_get(json_array_get(json_object_get(all, "jobs"), 0), "memory");

	for (size_t i = 0; i < json_array_size(classes); i++) {
		const json_t *c = json_array_get(classes, i);

		if (strcmp(json_string_value(json_object_get(c, "name")), name) == 0)
			return c;
	}
	cr_assert_fail("no class %s", name);
	return NULL;
}

static void check_number(const struct board *b, const json_t *c, const char *key, uint64_t want)
{
	cr_assert_eq(number(c, key), want, "%s, %s, %s, %s: %llu instead of %llu", b->scene->name,
		     b->moment, json_string_value(json_object_get(c, "name")), key,
		     (unsigned long long)number(c, key), (unsigned long long)want);
}

static void compare(struct board *b)
{
	static const char *const names[CLASSES] = { "shard", "full", "grad" };
	static const char *const args[] = { "memory", NULL };
	json_t *all = daemonfix_ctl(&trainfix, args);

	for (unsigned k = 0; k < CLASSES; k++) {
		const json_t *c = class_of(all, names[k]);

		check_number(b, c, "formula_bytes", b->want[k].used);
		check_number(b, c, "used_bytes", b->want[k].used);
		check_number(b, c, "taken_bytes", b->want[k].taken);
		check_number(b, c, "peak_bytes", b->want[k].peak);
	}
	json_decref(all);
}

/* ------------------------------------------------------------------ the books */

struct unit {
	struct memory_unit is;
	shardd_unit id;
	struct shardd_unit_info info;
	struct memory_piece copy[MEMORY_MAX_DEVICES];
	struct memory_piece grads[MEMORY_MAX_DEVICES];
	struct memory_piece partials[MEMORY_MAX_DEVICES];
	struct memory_piece gradient[MEMORY_MAX_RANKS], sum[MEMORY_MAX_RANKS];
	bool has_gradient;
};

struct crew {
	struct board *board;
	const struct scene *s;
	unsigned devices; /* D */
	shardd_client *c[MEMORY_MAX_RANKS];
	struct unit units[MAX_UNITS];
	unsigned n_units;
	struct memory_pool full[MEMORY_MAX_DEVICES], scratch[MEMORY_MAX_DEVICES];
	struct memory_pool grads[MEMORY_MAX_DEVICES], ranks[MEMORY_MAX_RANKS];
	struct figures shard;
	uint64_t peak[CLASSES];
	uint64_t steps;
};

static void add_pool(struct figures *f, const struct memory_pool *p)
{
	f->used += p->used;
	f->taken += p->taken;
}

static void note_peak(struct crew *w, enum class k, const struct memory_pool *a, unsigned n_a,
		      const struct memory_pool *b, unsigned n_b, struct figures *ret)
{
	*ret = (struct figures){ 0 };
	for (unsigned i = 0; i < n_a; i++)
		add_pool(ret, &a[i]);
	for (unsigned i = 0; i < n_b; i++)
		add_pool(ret, &b[i]);
	w->peak[k] = ret->taken > w->peak[k] ? ret->taken : w->peak[k];
	ret->peak = w->peak[k];
}

/* What the books come to now. */
static void add_up(struct crew *w, struct figures *ret)
{
	ret[SHARD] = w->shard;
	note_peak(w, FULL, w->full, w->devices, w->scratch, w->devices, &ret[FULL]);
	note_peak(w, GRAD, w->grads, w->devices, w->ranks, w->s->world, &ret[GRAD]);
}

/* Let the test look. */
static void look(struct crew *w, const char *moment)
{
	struct board *b = w->board;

	add_up(w, b->want);
	snprintf(b->moment, sizeof(b->moment), "%s", moment);
	atomic_fetch_add(&b->written, 1);
	while (atomic_load(&b->read) < atomic_load(&b->written))
		sched_yield();
}

/* On every device. */
static void take_each(struct crew *w, struct memory_pool *pools, struct memory_piece *pieces,
		      uint64_t bytes)
{
	for (unsigned d = 0; bytes && d < w->devices; d++)
		if (!pieces[d].there)
			pieces[d] = memory_take(&pools[d], bytes);
}

static void give_each(struct crew *w, struct memory_pool *pools, struct memory_piece *pieces)
{
	for (unsigned d = 0; d < w->devices; d++)
		memory_give(&pools[d], &pieces[d]);
}

/* Scratch of an op: so many bytes on each device, a piece each, while it runs. */
static void use_scratch(struct crew *w, struct memory_pool *pools, const uint64_t *bytes,
			unsigned n)
{
	struct memory_piece pieces[4][MEMORY_MAX_DEVICES] = { 0 };
	struct figures now[CLASSES];

	for (unsigned i = 0; i < n; i++)
		take_each(w, pools, pieces[i], bytes[i]);
	add_up(w, now); /* for the peak */
	for (unsigned i = 0; i < n; i++)
		give_each(w, pools, pieces[i]);
}

static bool is_packed(const struct crew *w, const struct unit *u)
{
	return w->s->like.layout == SHARDD_LAYOUT_DIM0 && memory_spread(&u->is) > 1;
}

/* P + P_frozen of all devices of a replica. */
static uint64_t room(const struct unit *u)
{
	return (memory_part(&u->is, false) + memory_part(&u->is, true)) * memory_spread(&u->is);
}

/* ------------------------------------------------------------------------ ops */

#define EVERY(w, name, ...)                                                                       \
	do {                                                                                      \
		shardd_ticket tickets[MEMORY_MAX_RANKS];                                          \
		for (uint32_t rank = 0; rank < (w)->s->world; rank++)                             \
			TRAIN_OK(shardd_submit_##name((w)->c[rank],                               \
						      SHARDD_OPTIONS(name, __VA_ARGS__),          \
						      &tickets[rank], &train_err));               \
		for (uint32_t rank = 0; rank < (w)->s->world; rank++)                             \
			TRAIN_OK(shardd_wait((w)->c[rank], tickets[rank], -1, NULL, &train_err)); \
	} while (0)

static enum shardd_dtype gradient_dtype(const struct crew *w)
{
	return w->s->like.gradient_dtype ? w->s->like.gradient_dtype : w->s->like.compute_dtype;
}

static enum shardd_dtype reduce_dtype(const struct crew *w)
{
	if (w->s->like.reduce_dtype)
		return w->s->like.reduce_dtype;
	return w->s->like.reduce_profile > SHARDD_PROFILE_FAIRSCALE ? gradient_dtype(w)
								    : SHARDD_FP32;
}

/* Of what is accumulated: FSDP2 adds in the dtype that it reduces in. */
static enum shardd_dtype sum_dtype(const struct crew *w)
{
	return w->s->like.reduce_profile == SHARDD_PROFILE_FSDP2 ? reduce_dtype(w)
								 : gradient_dtype(w);
}

static void gather(struct crew *w, struct unit *u)
{
	uint64_t bytes = memory_array(room(u), memory_size(w->s->like.compute_dtype));
	const void *data;

	TRAIN_OK(shardd_gather(w->c[0], u->id, &data, &train_err));
	if (memory_spread(&u->is) == 1 && w->s->like.compute_dtype == SHARDD_FP32)
		return; /* the shards themselves */
	take_each(w, w->full, u->copy, bytes);
	if (is_packed(w, u)) /* where the parts are brought together */
		use_scratch(w, w->full, &bytes, 1);
}

static void gather_all(struct crew *w)
{
	for (unsigned u = 0; u < w->n_units; u++)
		gather(w, &w->units[u]);
	look(w, "gathered");
	for (unsigned u = 0; u < w->n_units; u++)
		TRAIN_OK(shardd_release(w->c[0], w->units[u].id, &train_err));
	look(w, "released");
}

static void summon(struct crew *w, struct unit *u, bool write)
{
	uint64_t all = memory_array(room(u), 4), mine = memory_array(memory_summoned(&u->is), 4);
	uint64_t one = memory_array(memory_shard(&u->is, false) + memory_shard(&u->is, true), 4);
	uint64_t beside[2] = { memory_spread(&u->is) > 1 ? all : 0, is_packed(w, u) ? all : 0 };
	struct memory_piece pieces[MEMORY_MAX_RANKS] = { 0 };

	EVERY(w, summon, .unit = u->id);
	use_scratch(w, w->scratch, beside, 2);
	for (uint32_t r = 0; r < w->s->world; r++)
		pieces[r] = memory_take(&w->ranks[r], mine);
	look(w, "summoned");
	EVERY(w, return, .unit = u->id, .write = write);
	if (write && w->devices > 1)
		use_scratch(w, w->scratch, &one, 1);
	if (write)
		give_each(w, w->full, u->copy);
	for (uint32_t r = 0; r < w->s->world; r++)
		memory_give(&w->ranks[r], &pieces[r]);
	look(w, write ? "returned, written" : "returned");
}

/* A buffer of each rank's own, of another size on each. */
static void use_buffers(struct crew *w)
{
	struct memory_piece pieces[MEMORY_MAX_RANKS] = { 0 };
	uint64_t buffers[MEMORY_MAX_RANKS];

	for (uint32_t r = 0; r < w->s->world; r++) {
		uint64_t bytes = 1000 + 700001 * r;
		void *data;

		TRAIN_OK(shardd_alloc(w->c[r], bytes, &buffers[r], &data, &train_err));
		pieces[r] = memory_take(&w->ranks[r], bytes);
	}
	look(w, "buffers");
	for (uint32_t r = 0; r < w->s->world; r++) {
		TRAIN_OK(shardd_free(w->c[r], buffers[r], &train_err));
		memory_give(&w->ranks[r], &pieces[r]);
	}
	look(w, "buffers freed");
}

static void ask_gradients(struct crew *w)
{
	for (unsigned i = 0; i < w->n_units; i++)
		for (uint32_t r = 0; r < w->s->world; r++) {
			uint64_t n = memory_gradient(&w->units[i].is);
			uint64_t size = memory_size(gradient_dtype(w));
			void *data;

			TRAIN_OK(shardd_gradient(w->c[r], w->units[i].id, &data, &train_err));
			train_set(w->c[r], data, 0, n * size);
			w->units[i].gradient[r] = memory_take(&w->ranks[r], memory_array(n, size));
		}
	look(w, "gradient buffers");
}

static void accumulate(struct crew *w, struct unit *u, uint32_t r)
{
	uint64_t n = memory_gradient(&u->is), size = memory_size(sum_dtype(w));

	TRAIN_OK(shardd_accumulate(w->c[r], u->id, &train_err));
	if (!u->sum[r].there && sum_dtype(w) == gradient_dtype(w)) {
		u->sum[r] = u->gradient[r]; /* it becomes the sum */
		u->gradient[r].there = false;
		return;
	}
	if (!u->sum[r].there)
		u->sum[r] = memory_take(&w->ranks[r], memory_array(n, size));
	memory_give(&w->ranks[r], &u->gradient[r]);
}

static void accumulate_all(struct crew *w)
{
	for (unsigned i = 0; i < w->n_units; i++)
		for (uint32_t r = 0; r < w->s->world; r++)
			accumulate(w, &w->units[i], r);
	look(w, "accumulated");
}

static bool has_split_replicas(const struct unit *u)
{
	for (uint32_t r = 0; r < u->is.world; r++)
		if (memory_device_of(&u->is, r) !=
		    memory_device_of(&u->is, r - r % memory_shard_ranks(&u->is)))
			return true;
	return false;
}

/* FSDP2 alone averages inside of a replica, and then between them. */
static bool has_factor(const struct crew *w)
{
	return w->s->like.reduce_profile == SHARDD_PROFILE_FSDP2;
}

static bool is_crossed(const struct crew *w, const struct unit *u)
{
	return memory_replicas(&u->is) > 1 && has_split_replicas(u) && has_factor(w) &&
	       !memory_has_sets(&u->is);
}

static uint64_t partials_bytes(const struct crew *w, const struct unit *u)
{
	uint64_t n = memory_gradient(&u->is), sums = 0;

	if (memory_has_sets(&u->is))
		return memory_array(memory_part(&u->is, false), memory_size(reduce_dtype(w)));
	if (is_crossed(w, u)) {
		n = memory_spread(&u->is) == 1 ? n : memory_part(&u->is, false);
		return memory_replicas(&u->is) * memory_array(n, memory_size(reduce_dtype(w)));
	}
	for (unsigned d = 0; d < w->devices; d++) {
		uint64_t here = 0;

		for (uint32_t r = 0; r < u->is.world; r++)
			here += memory_device_of(&u->is, r) == d;
		here /= memory_shard_ranks(&u->is);
		sums = here > sums ? here : sums;
	}
	return (has_split_replicas(u) ? 1 : sums) * memory_array(n, memory_size(reduce_dtype(w)));
}

/* Are sums of replicas made before anything else? */
static bool is_apart(const struct crew *w, const struct unit *u, bool defer)
{
	if (defer || u->partials[0].there || is_crossed(w, u))
		return true;
	if (memory_replicas(&u->is) == 1 || memory_shard_ranks(&u->is) == 1)
		return false;
	if (memory_has_sets(&u->is))
		return has_factor(w);
	return w->devices == 1 || has_factor(w) ||
	       partials_bytes(w, u) >
		       memory_array(memory_gradient(&u->is), memory_size(reduce_dtype(w)));
}

/* Nobody has the units gathered, and no norm is waited for: the reduction steps them. */
static bool steps_itself(const struct crew *w)
{
	return w->s->like.optimizer.when == SHARDD_OPTIM_IN_BACKWARD && !w->s->clips;
}

static void reduce(struct crew *w, struct unit *u, bool defer)
{
	uint64_t part = memory_part(&u->is, false), size = memory_size(reduce_dtype(w));
	bool between = w->devices > 1 && (!defer || is_crossed(w, u) || memory_has_sets(&u->is));
	uint64_t sums = between ? part * memory_spread(&u->is) * size : 0;
	struct memory_piece beside[3][MEMORY_MAX_DEVICES] = { 0 };
	struct figures now[CLASSES];

	if (defer)
		EVERY(w, reduce, .unit = u->id, .deferred = true);
	else
		EVERY(w, reduce, .unit = u->id);
	if (w->s->like.optimizer.when > SHARDD_OPTIM_AT_STEP && !steps_itself(w))
		take_each(w, w->grads, u->grads, memory_array(part, 4));
	take_each(w, w->scratch, beside[0], sums);
	if (is_apart(w, u, defer) && !u->partials[0].there)
		take_each(w, w->scratch, defer ? u->partials : beside[1], partials_bytes(w, u));
	if (is_packed(w, u))
		take_each(w, w->scratch, beside[2], sums);
	add_up(w, now);
	for (uint32_t r = 0; r < w->s->world; r++) {
		memory_give(&w->ranks[r], &u->gradient[r]);
		memory_give(&w->ranks[r], &u->sum[r]);
	}
	if (!defer)
		give_each(w, w->scratch, u->partials);
	for (unsigned i = 0; i < 3; i++)
		give_each(w, w->scratch, beside[i]);
	u->has_gradient = !defer || u->has_gradient;
}

static void reduce_all(struct crew *w, bool defer, const char *moment)
{
	for (unsigned i = 0; i < w->n_units; i++) {
		reduce(w, &w->units[i], defer);
		if (!steps_itself(w) || defer)
			continue;
		give_each(w, w->full, w->units[i].copy);
		gather(w, &w->units[i]); /* which waits for the end of that */
		TRAIN_OK(shardd_release(w->c[0], w->units[i].id, &train_err));
	}
	look(w, moment);
}

/* The shards of the trainers' own optimizer, unit after unit. */
static void step_own(struct crew *w)
{
	for (unsigned i = 0; i < w->n_units; i++) {
		struct memory_piece pieces[MEMORY_MAX_RANKS] = { 0 };
		struct unit *u = &w->units[i];
		struct shardd_shard shard;

		for (uint32_t r = 0; r < w->s->world; r++) {
			uint64_t n = memory_lent(&u->is, r);

			TRAIN_OK(shardd_next_shard(w->c[r], SHARDD_WORLD, &shard, &train_err));
			TRAINER_CHECK(shard.unit == u->id && shard.elements == n);
			pieces[r] = memory_take(&w->ranks[r], 2 * memory_array(n ? n : 1, 4));
		}
		look(w, "shards lent");
		for (uint32_t r = 0; r < w->s->world; r++) {
			TRAIN_OK(shardd_shard_done(w->c[r], u->id, &train_err));
			memory_give(&w->ranks[r], &pieces[r]);
		}
		give_each(w, w->full, u->copy);
		give_each(w, w->grads, u->grads);
		if (memory_spread(&u->is) < w->devices) { /* there are several copies, made equal */
			gather(w, u);
			TRAIN_OK(shardd_release(w->c[0], u->id, &train_err));
		}
	}
}

static void step(struct crew *w)
{
	bool applies = w->s->like.optimizer.when <= SHARDD_OPTIM_AT_STEP || w->s->clips;

	if (w->s->like.optimizer.when == SHARDD_OPTIM_BY_TRAINER)
		step_own(w);
	EVERY(w, step, .group = SHARDD_WORLD, .lr = NULL);
	w->steps++;
	EVERY(w, commit, .step = w->steps, .blob = NULL, .bytes = 0);
	for (unsigned i = 0; applies && i < w->n_units; i++) {
		give_each(w, w->full, w->units[i].copy);
		give_each(w, w->grads, w->units[i].grads);
	}
	look(w, "stepped");
}

/* All gradients of a rank side by side: one bucket, until the order of arrival is known. Making
 * it is collective and waits: one rank. */
static void use_buckets(struct crew *w)
{
	struct shardd_ddp_view views[MAX_UNITS * MEMORY_MAX_TENSORS];
	shardd_unit units[MAX_UNITS];
	const struct shardd_ddp_create_options spec = { .size = sizeof(spec),
							.units = units,
							.n_units = w->n_units };
	uint64_t elements = 0;
	shardd_ddp ddp;
	uint32_t n;

	for (unsigned i = 0; i < w->n_units; i++) {
		units[i] = w->units[i].id;
		elements += memory_gradient(&w->units[i].is);
	}
	TRAIN_OK(shardd_ddp_create(w->c[0], &spec, &ddp, &n, &train_err));
	TRAINER_CHECK(w->s->world == 1 && n <= ARRAY_SIZE(views));
	TRAIN_OK(shardd_ddp_forward(w->c[0], ddp, views, n, &train_err));
	memory_take(&w->ranks[0], elements * memory_size(gradient_dtype(w)));
	look(w, "buckets");
}

/* ---------------------------------------------------------------- registering */

static void describe(const struct unit *u, unsigned number, struct shardd_tensor *tensors,
		     uint64_t shapes[][2])
{
	static const char *const names[] = { "t0", "t1", "t2", "t3", "t4" };

	for (unsigned t = 0; t < u->is.n_tensors; t++) {
		const struct memory_tensor *of = &u->is.tensors[t];

		shapes[t][0] = of->rows;
		shapes[t][1] = of->columns;
		tensors[t] = (struct shardd_tensor){
			.name = names[t],
			.shape = shapes[t],
			.dims = 2,
			.frozen = of->frozen,
			.alias_of = of->alias ? names[0] : NULL,
			.alias_unit = of->alias && number ? "first" : NULL,
		};
	}
}

/* Class shard: two slabs on each device, one of copies of what steps early, and one for each rank's
 * buffers. */
static void book_shards(struct crew *w)
{
	bool kept = w->s->like.optimizer.when <= SHARDD_OPTIM_AT_STEP;
	uint64_t params = 0, other = 0, buffers = 0, copies = 0;

	for (unsigned i = 0; i < w->n_units; i++) {
		const struct memory_unit *u = &w->units[i].is;
		uint64_t all = memory_array(memory_part(u, false) + memory_part(u, true), 4);

		params += memory_taken(all);
		other += (kept + w->s->states) *
			 memory_taken(memory_array(memory_part(u, false), 4));
		buffers += memory_array(w->s->buffer, 8);
		if (!kept && memory_part(u, false))
			copies += all + w->s->states * memory_array(memory_part(u, false), 4);
	}
	w->shard.used = w->devices * (params + other + copies) + w->s->world * buffers;
	w->shard.taken =
		w->devices * (memory_page(params) + memory_page(other) + memory_page(copies)) +
		w->s->world * memory_page(buffers);
	w->shard.peak = w->shard.taken;
}

static void register_all(struct crew *w)
{
	const struct scene *s = w->s;
	struct shardd_tensor tensors[MAX_UNITS][MEMORY_MAX_TENSORS];
	uint64_t shapes[MAX_UNITS][MEMORY_MAX_TENSORS][2];
	struct shardd_unit_spec specs[MAX_UNITS];
	struct shardd_unit_info info[MAX_UNITS];
	struct shardd_buffer buffer = {
		.name = "counts", .shape = &s->buffer, .dims = 1, .dtype = SHARDD_BUFFER_INT64
	};

	for (unsigned i = 0; i < w->n_units; i++) {
		describe(&w->units[i], i, tensors[i], shapes[i]);
		specs[i] = s->like;
		specs[i].size = sizeof(specs[i]);
		specs[i].name = i ? "second" : "first";
		specs[i].tensors = tensors[i];
		specs[i].n_tensors = w->units[i].is.n_tensors;
		specs[i].buffers = &buffer;
		specs[i].n_buffers = s->buffer > 0;
	}
	for (uint32_t r = 0; r < s->world; r++)
		TRAIN_OK(shardd_register(w->c[r], specs, w->n_units, info, &train_err));
	for (unsigned i = 0; i < w->n_units; i++) {
		w->units[i].id = info[i].unit;
		EVERY(w, init, .unit = info[i].unit, .seed = 1, .from = SHARDD_FROM_SEED);
	}
	book_shards(w);
	look(w, "registered");
}

/* ------------------------------------------------------------------- a scene */

static void set_up(struct crew *w, const struct trainer *t)
{
	struct board *b = t->arg;

	*w = (struct crew){ .board = b, .s = b->scene };
	w->devices = b->devices < w->s->world ? b->devices : w->s->world;
	for (unsigned i = 0; i < MAX_UNITS && w->s->tensors[i][0].rows; i++) {
		struct memory_unit *is = &w->units[w->n_units++].is;

		*is = (struct memory_unit){ .like = &w->s->like,
					    .tensors = w->s->tensors[i],
					    .world = w->s->world,
					    .devices = w->devices };
		while (is->n_tensors < MEMORY_MAX_TENSORS && is->tensors[is->n_tensors].rows)
			is->n_tensors++;
	}
	for (uint32_t r = 0; r < w->s->world; r++)
		w->c[r] = train_join(&(struct trainer){
			.socket = t->socket, .job = "measured", .rank = r, .world = w->s->world });
}

static void train(struct crew *w)
{
	struct shardd_clip_options clip = { .size = sizeof(clip), .max_norm = 1 };
	struct shardd_plan_backward_options plan = { .size = sizeof(plan), .clip = &clip };

	if (w->s->clips)
		EVERY(w, plan_backward, .clip = plan.clip);
	ask_gradients(w);
	accumulate_all(w);
	ask_gradients(w);
	if (w->s->defers) {
		reduce_all(w, true, "deferred");
		ask_gradients(w);
		reduce_all(w, true, "deferred again");
		ask_gradients(w);
	}
	reduce_all(w, false, "reduced");
	step(w);
}

static int crew(const struct trainer *t)
{
	static struct crew w; /* large */

	set_up(&w, t);
	register_all(&w);
	gather_all(&w);
	for (unsigned i = 0; i < w.n_units; i++)
		summon(&w, &w.units[i], i > 0);
	use_buffers(&w);
	gather_all(&w);
	if (w.s->buckets) {
		use_buckets(&w);
	} else {
		train(&w);
		train(&w); /* once more, with slabs that are there */
	}
	for (uint32_t r = 0; r < w.s->world; r++)
		train_leave(w.c[r]);
	return 0;
}

static bool has_ended(pid_t pid)
{
	siginfo_t info = { 0 };

	return waitid(P_PID, (id_t)pid, &info, WEXITED | WNOHANG | WNOWAIT) == 0 &&
	       info.si_pid == pid;
}

static void run_scene(const struct scene *s)
{
	struct board *b = trainer_shared(sizeof(*b));
	pid_t pid;

	b->scene = s;
	b->devices = gpu_count();
	pid = trainer_start(&trainfix, "measured", 0, 1, crew, b);
	while (!has_ended(pid)) {
		if (atomic_load(&b->written) > atomic_load(&b->read)) {
			compare(b);
			atomic_fetch_add(&b->read, 1);
		}
		sched_yield();
	}
	cr_assert_eq(trainer_wait(pid, 60), 0, "%s", s->name);
	cr_assert_gt(atomic_load(&b->read), s->buckets ? 8u : 14u, "%s", s->name);
}

/* --------------------------------------------------------------------- scenes */

/* A weight, a bias of few rows, what is frozen, and another name of the first weight. */
#define OF(r, c)                            \
	{                                   \
		.rows = (r), .columns = (c) \
	}
#define FROZEN(r, c)                                        \
	{                                                   \
		.rows = (r), .columns = (c), .frozen = true \
	}
#define ALIAS(r, c)                                        \
	{                                                  \
		.rows = (r), .columns = (c), .alias = true \
	}
#define MODEL                                                     \
	{                                                         \
		{ OF(1001, 513), OF(7, 3), FROZEN(101, 257) },    \
		{                                                 \
			OF(515, 1001), OF(1, 5), ALIAS(1001, 513) \
		}                                                 \
	}
#define TRAINED_MODEL                                            \
	{                                                        \
		{ OF(900, 700), OF(5, 11) },                     \
		{                                                \
			OF(1301, 301), ALIAS(900, 700), OF(3, 1) \
		}                                                \
	}
#define WITH(k, w)                                  \
	{                                           \
		.kind = (k), .lr = 0.1, .when = (w) \
	}

static void run_scenes(const struct scene *scenes, size_t n)
{
	for (size_t i = 0; i < n; i++)
		run_scene(&scenes[i]);
}

Test(memory_held, sharded)
{
	static const struct scene scenes[] = {
		{ .name = "fp32, flat, 4 ranks",
		  .world = 4,
		  .tensors = MODEL,
		  .like = { .optimizer = WITH(SHARDD_ADAMW, SHARDD_OPTIM_AT_STEP),
			    .compute_dtype = SHARDD_FP32 },
		  .states = 2,
		  .buffer = 1000 },
		{ .name = "bf16, flat, nothing frozen, 3 ranks",
		  .world = 3,
		  .tensors = TRAINED_MODEL,
		  .like = { .optimizer = WITH(SHARDD_ADAMW, SHARDD_OPTIM_AT_STEP),
			    .compute_dtype = SHARDD_BF16,
			    .shard_multiple = 128 },
		  .states = 2 },
		{ .name = "bf16 added in fp32, by rows, 4 ranks",
		  .world = 4,
		  .tensors = MODEL,
		  .like = { .optimizer = { .kind = SHARDD_ADAM, .lr = 0.1, .amsgrad = true },
			    .compute_dtype = SHARDD_BF16,
			    .reduce_dtype = SHARDD_FP32,
			    .reduce_profile = SHARDD_PROFILE_FSDP2,
			    .layout = SHARDD_LAYOUT_DIM0 },
		  .states = 3 },
	};

	run_scenes(scenes, ARRAY_SIZE(scenes));
}

/* Replicas with a factor of their own and without, whole on a device and split. */
Test(memory_held, replicated)
{
	static const struct scene scenes[] = {
		{ .name = "2 replicas of 2 ranks",
		  .world = 4,
		  .tensors = MODEL,
		  .like = { .optimizer = WITH(SHARDD_SGD, SHARDD_OPTIM_AT_STEP),
			    .compute_dtype = SHARDD_FP32,
			    .strategy = SHARDD_HYBRID,
			    .shard_ranks = 2 },
		  .defers = true },
		{ .name = "2 replicas of 2 ranks, averaged, by rows",
		  .world = 4,
		  .tensors = TRAINED_MODEL,
		  .like = { .optimizer = WITH(SHARDD_ADAMW, SHARDD_OPTIM_AT_STEP),
			    .compute_dtype = SHARDD_FP16,
			    .gradient_dtype = SHARDD_FP32,
			    .reduce_profile = SHARDD_PROFILE_FSDP2,
			    .layout = SHARDD_LAYOUT_DIM0,
			    .strategy = SHARDD_HYBRID,
			    .shard_ranks = 2 },
		  .states = 2,
		  .defers = true },
		{ .name = "3 replicas",
		  .world = 3,
		  .tensors = MODEL,
		  .like = { .optimizer = WITH(SHARDD_ADAMW, SHARDD_OPTIM_AT_STEP),
			    .compute_dtype = SHARDD_FP32,
			    .gradient_dtype = SHARDD_FP16,
			    .reduce_dtype = SHARDD_BF16,
			    .reduce_profile = SHARDD_PROFILE_FSDP1_HOOK,
			    .strategy = SHARDD_REPLICATE },
		  .states = 2,
		  .defers = true },
		{ .name = "buckets",
		  .world = 1,
		  .tensors = MODEL,
		  .like = { .optimizer = WITH(SHARDD_ADAMW, SHARDD_OPTIM_AT_STEP),
			    .compute_dtype = SHARDD_BF16,
			    .reduce_profile = SHARDD_PROFILE_DDP,
			    .strategy = SHARDD_REPLICATE },
		  .states = 2,
		  .buckets = true },
	};

	run_scenes(scenes, ARRAY_SIZE(scenes));
}

/* The trainers' own optimizer, where ranks are lent their shards and where they are not. */
Test(memory_held, own_optimizer)
{
	static const struct scene scenes[] = {
		{ .name = "own shards by rows, 3 ranks",
		  .world = 3,
		  .tensors = MODEL,
		  .like = { .optimizer = { .when = SHARDD_OPTIM_BY_TRAINER },
			    .compute_dtype = SHARDD_FP32,
			    .layout = SHARDD_LAYOUT_DIM0 } },
		{ .name = "own shards, flat, bf16, 4 ranks",
		  .world = 4,
		  .tensors = MODEL,
		  .like = { .optimizer = { .when = SHARDD_OPTIM_BY_TRAINER },
			    .compute_dtype = SHARDD_BF16,
			    .reduce_profile = SHARDD_PROFILE_FSDP2 } },
		{ .name = "shares of replicas, 4 ranks",
		  .world = 4,
		  .tensors = TRAINED_MODEL,
		  .like = { .optimizer = { .when = SHARDD_OPTIM_BY_TRAINER },
			    .compute_dtype = SHARDD_FP32,
			    .strategy = SHARDD_HYBRID,
			    .shard_ranks = 2 } },
	};

	run_scenes(scenes, ARRAY_SIZE(scenes));
}

Test(memory_held, in_backward)
{
	static const struct scene scenes[] = {
		{ .name = "in backward, bf16, 4 ranks",
		  .world = 4,
		  .tensors = MODEL,
		  .like = { .optimizer = WITH(SHARDD_ADAMW, SHARDD_OPTIM_IN_BACKWARD),
			    .compute_dtype = SHARDD_BF16 },
		  .states = 2 },
		{ .name = "in backward, clipped, by rows, 3 ranks",
		  .world = 3,
		  .tensors = TRAINED_MODEL,
		  .like = { .optimizer = WITH(SHARDD_ADAMW, SHARDD_OPTIM_IN_BACKWARD),
			    .compute_dtype = SHARDD_FP32,
			    .layout = SHARDD_LAYOUT_DIM0 },
		  .states = 2,
		  .clips = true },
	};

	run_scenes(scenes, ARRAY_SIZE(scenes));
}

/* Arrays with room to begin where others do not. */
Test(memory_held, large)
{
	static const struct scene scenes[] = {
		{ .name = "large arrays, 2 ranks",
		  .world = 2,
		  .tensors = { { OF(9000, 1001) }, { OF(3, 5) } },
		  .like = { .optimizer = WITH(SHARDD_SGD, SHARDD_OPTIM_AT_STEP),
			    .compute_dtype = SHARDD_FP32 } },
		{ .name = "large shards of the trainers' own, bf16, 2 ranks",
		  .world = 2,
		  .tensors = { { OF(9000, 1001) }, { OF(3, 5) } },
		  .like = { .optimizer = { .when = SHARDD_OPTIM_BY_TRAINER },
			    .compute_dtype = SHARDD_BF16,
			    .layout = SHARDD_LAYOUT_DIM0 } },
	};

	run_scenes(scenes, ARRAY_SIZE(scenes));
}
