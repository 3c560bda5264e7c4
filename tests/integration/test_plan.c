/* shardctl plan against a real job: the same bytes in each class. */
#include <criterion/criterion.h>
#include <jansson.h>
#include <stdio.h>
#include <string.h>

#include "core/check.h"
#include "failfix.h"

TestSuite(plan, .init = trainfix_begin, .fini = trainfix_end, .timeout = 120);

enum { MOST_RANKS = 4, MOST_UNITS = 4 };

struct scene {
	const char *name;
	uint32_t world;
	unsigned n_units;
	uint64_t trained, frozen; /* elements of a unit */
	struct shardd_unit_spec like;
	enum shardd_resume resume;
	const char *const *args; /* of plan */

	stage reached, seen;
};

static void pass(struct scene *s, unsigned phase)
{
	stage_set(&s->reached, phase);
	TRAINER_AWAIT(atomic_load(&s->seen) >= phase, 60);
}

static void register_all(const struct scene *s, shardd_client *c, struct shardd_unit_info *info)
{
	static const char *const names[] = { "a", "b", "c", "d" };
	struct shardd_tensor tensors[2] = {
		{ .name = "w", .shape = &s->trained, .dims = 1 },
		{ .name = "f", .shape = &s->frozen, .dims = 1, .frozen = true },
	};
	struct shardd_unit_spec specs[MOST_UNITS];

	for (unsigned u = 0; u < s->n_units; u++) {
		specs[u] = s->like;
		specs[u].size = sizeof(specs[u]);
		specs[u].name = names[u];
		specs[u].tensors = tensors;
		specs[u].n_tensors = s->frozen ? 2 : 1;
	}
	TRAIN_OK(shardd_register(c, specs, s->n_units, info, &train_err));
}

/* All ranks, in one process: registers, then gathers all and asks for all gradients. */
static int crew(const struct trainer *t)
{
	struct scene *s = t->arg;
	struct shardd_unit_info info[MOST_UNITS];
	shardd_client *c[MOST_RANKS];
	shardd_ticket tickets[MOST_RANKS];
	const void *data;
	void *gradient;

	for (uint32_t r = 0; r < s->world; r++) {
		const struct trainer one = {
			.socket = t->socket, .job = "j", .rank = r, .world = s->world
		};

		c[r] = train_connect(&one);
		train_join_resuming(c[r], &one, SHARDD_EPHEMERAL, s->resume);
	}
	for (uint32_t r = 0; r < s->world; r++)
		register_all(s, c[r], info);
	for (unsigned u = 0; u < s->n_units; u++) {
		for (uint32_t r = 0; r < s->world; r++)
			TRAIN_OK(shardd_submit_init(c[r],
						    SHARDD_OPTIONS(init, .unit = info[u].unit,
								   .seed = 1,
								   .from = SHARDD_FROM_SEED),
						    &tickets[r], &train_err));
		for (uint32_t r = 0; r < s->world; r++)
			TRAIN_OK(shardd_wait(c[r], tickets[r], -1, NULL, &train_err));
		TRAIN_OK(shardd_gather(c[0], info[u].unit, &data, &train_err));
	}
	for (unsigned u = 0; u < s->n_units; u++)
		for (uint32_t r = 0; r < s->world; r++)
			TRAIN_OK(shardd_gradient(c[r], info[u].unit, &gradient, &train_err));
	pass(s, 1);
	for (unsigned u = 0; u < s->n_units; u++)
		TRAIN_OK(shardd_release(c[0], info[u].unit, &train_err));
	for (uint32_t r = 0; r < s->world; r++)
		train_leave(c[r]);
	return 0;
}

static json_int_t number(const json_t *j, const char *key)
{
	json_t *n = json_object_get(j, key);

	cr_assert(json_is_integer(n), "no number '%s'", key);
	return json_integer_value(n);
}

/* What of the plan is there: the rest of each class comes with steps, commits and checkpoints. */
static json_int_t planned(const json_t *plan, const char *class)
{
	static const char *const there[] = { "parameters",      "gradients",
					     "optimizer state", "copy to roll back to",
					     "gathered copies", "gradient buffers" };
	json_int_t sum = 0;
	json_t *item;
	size_t i;

	json_array_foreach(json_object_get(plan, "items"), i, item)
	{
		if (strcmp(json_string_value(json_object_get(item, "class")), class) != 0)
			continue;
		for (size_t k = 0; k < ARRAY_SIZE(there); k++)
			if (strcmp(json_string_value(json_object_get(item, "name")), there[k]) == 0)
				sum += number(item, "most_bytes");
	}
	return sum;
}

static void compare(const struct scene *s)
{
	static const char *const memory[] = { "memory", NULL };
	json_t *plan = daemonfix_ctl(&trainfix, s->args), *all = daemonfix_ctl(&trainfix, memory);
	json_t *job = json_array_get(json_object_get(all, "jobs"), 0), *c;
	unsigned seen = 0;
	size_t i;

	json_array_foreach(json_object_get(job, "memory"), i, c)
	{
		const char *name = json_string_value(json_object_get(c, "name"));

		if (strcmp(name, "control") == 0 || strcmp(name, "published") == 0)
			continue;
		seen++;
		cr_expect_eq(planned(plan, name), number(c, "used_bytes"),
			     "%s: %s: %lld, used %lld", s->name, name,
			     (long long)planned(plan, name), (long long)number(c, "used_bytes"));
		cr_expect_eq(number(c, "used_bytes"), number(c, "formula_bytes"), "%s: %s", s->name,
			     name);
	}
	cr_expect_eq(seen, 3u);
	json_decref(plan);
	json_decref(all);
}

static void run_scene(const struct scene *like)
{
	struct scene *s = trainer_shared(sizeof(*s));
	pid_t pid;

	*s = *like;
	pid = trainer_start(&trainfix, "j", 0, 1, crew, s);
	AWAIT(atomic_load(&s->reached) == 1, 60);
	compare(s);
	stage_set(&s->seen, 1);
	cr_assert_eq(trainer_wait(pid, 60), 0, "%s", s->name);
}

#define ARGS(...) ((const char *const[]){ "plan", "--backend", "host", __VA_ARGS__, NULL })

Test(plan, is_what_a_job_takes)
{
	const struct scene scenes[] = {
		{ .name = "fp32, AdamW",
		  .world = 3,
		  .n_units = 2,
		  .trained = 100003,
		  .like = { .optimizer = { .kind = SHARDD_ADAMW, .lr = 0.1 },
			    .compute_dtype = SHARDD_FP32 },
		  .args = ARGS("--params", "200006", "--units", "2", "--ranks", "3") },
		{ .name = "bf16, large arrays",
		  .world = 2,
		  .n_units = 1,
		  .trained = 9000001,
		  .like = { .optimizer = { .kind = SHARDD_ADAMW, .lr = 0.1 },
			    .compute_dtype = SHARDD_BF16 },
		  .args = ARGS("--params", "9000001", "--units", "1", "--ranks", "2", "--dtype",
			       "bf16") },
		{ .name = "adapters, amsgrad, fp32 gradients",
		  .world = 4,
		  .n_units = 3,
		  .trained = 2 * 8 * 100,
		  .frozen = 77777,
		  .like = { .optimizer = { .kind = SHARDD_ADAM, .lr = 0.1, .amsgrad = true },
			    .compute_dtype = SHARDD_FP16,
			    .gradient_dtype = SHARDD_FP32 },
		  .args = ARGS("--params", "233331", "--units", "3", "--ranks", "4", "--dtype",
			       "fp32/fp16", "--gradient-dtype", "fp32", "--optimizer", "adam",
			       "--amsgrad", "--lora", "8", "--hidden", "100", "--layers", "3",
			       "--targets", "1") },
		{ .name = "replicas, momentum",
		  .world = 2,
		  .n_units = 1,
		  .trained = 54321,
		  .like = { .optimizer = { .kind = SHARDD_SGD, .lr = 0.1, .momentum = 0.9 },
			    .compute_dtype = SHARDD_FP32,
			    .strategy = SHARDD_REPLICATE,
			    .reduce_profile = SHARDD_PROFILE_DDP },
		  .args = ARGS("--params", "54321", "--units", "1", "--ranks", "2", "--replicas",
			       "2", "--optimizer", "momentum") },
		{ .name = "in backward",
		  .world = 2,
		  .n_units = 3,
		  .trained = 70001,
		  .like = { .optimizer = { .kind = SHARDD_ADAMW,
					   .lr = 0.1,
					   .when = SHARDD_OPTIM_IN_BACKWARD },
			    .compute_dtype = SHARDD_FP32 },
		  .args = ARGS("--params", "210003", "--units", "3", "--ranks", "2",
			       "--in-backward") },
		{ .name = "in backward without a copy",
		  .world = 2,
		  .n_units = 1,
		  .trained = 70001,
		  .like = { .optimizer = { .kind = SHARDD_ADAMW,
					   .lr = 0.1,
					   .when = SHARDD_OPTIM_IN_BACKWARD },
			    .compute_dtype = SHARDD_FP32 },
		  .resume = SHARDD_RESUME_NO_COPY,
		  .args = ARGS("--params", "70001", "--units", "1", "--ranks", "2", "--in-backward",
			       "--resume", "no-copy") },
		{ .name = "bf16 stored, the trainers' optimizer",
		  .world = 2,
		  .n_units = 2,
		  .trained = 5001,
		  .like = { .optimizer = { .when = SHARDD_OPTIM_BY_TRAINER },
			    .storage_dtype = SHARDD_BF16,
			    .compute_dtype = SHARDD_BF16 },
		  .args = ARGS("--params", "10002", "--units", "2", "--ranks", "2", "--dtype",
			       "bf16/bf16", "--optimizer", "trainer") },
	};

	if (!train_on_host()) {
		train_not_here("a plan of host memory");
		return;
	}
	for (size_t i = 0; i < ARRAY_SIZE(scenes); i++)
		run_scene(&scenes[i]);
}

struct said {
	const char *const *args;
	int code;
	const char *words;
};

Test(plan, says_whether_it_fits)
{
	const struct said rows[] = {
		{ ARGS("--params", "1M", "--ranks", "2"), 0, "it fits: a node needs " },
		{ ARGS("--params", "9T", "--ranks", "2"), 1, "it does not fit: a node needs " },
		{ (const char *const[]){ "plan", "--backend", "cuda", "--params", "1M", "--ranks",
					 "2", NULL },
		  0, "whether it fits is not known: the daemon's devices are not cuda" },
		{ (const char *const[]){ "--socket", "/nonexistent/s", "plan", "--params", "7B",
					 "--ranks", "8", "--dtype", "bf16", NULL },
		  0, "no daemon was asked" },
		{ ARGS("--ranks", "2"), 2, "--params" },
		{ ARGS("--params", "7B"), 2, "--ranks" },
		{ ARGS("--params", "many", "--ranks", "2"), 2, "--params \"many\"" },
		{ ARGS("--params", "1e30", "--ranks", "2"), 2, "--params \"1e30\"" },
		{ ARGS("--params", "7B", "--ranks", "0"), 2, "--ranks \"0\"" },
		{ ARGS("--params", "7B", "--ranks", "3", "--nodes", "2"), 2, "evenly" },
		{ ARGS("--params", "7B", "--ranks", "3", "--replicas", "2"), 2, "--replicas" },
		{ ARGS("--params", "7B", "--ranks", "2", "--dtype", "int8"), 2, "int8" },
		{ ARGS("--params", "7B", "--ranks", "2", "--dtype", "/"), 2, "--dtype" },
		{ ARGS("--params", "7B", "--ranks", "2", "--dtype", "bf16/bf16"), 2, "fp32 only" },
		{ ARGS("--params", "7B", "--ranks", "2", "--optimizer", "lion"), 2, "lion" },
		{ ARGS("--params", "7B", "--ranks", "2", "--optimizer", "sgd", "--amsgrad"), 2,
		  "--amsgrad" },
		{ ARGS("--params", "7B", "--ranks", "2", "--lora", "8"), 2, "--hidden" },
		{ ARGS("--params", "7B", "--ranks", "2", "--hidden", "8"), 2, "--lora" },
		{ ARGS("--params", "7B", "--ranks", "2", "--trainable", "8B"), 2, "--trainable" },
		{ ARGS("--params", "3", "--ranks", "2", "--units", "4"), 2, "only 3 parameters" },
		{ ARGS("--params", "7B", "--ranks", "2", "--unit-params", "1"), 2,
		  "--unit-params" },
		{ ARGS("--params", "7B", "--ranks", "2", "more"), 2, "\"more\"" },
	};
	char out[8192];

	if (!train_on_host()) {
		train_not_here("a plan of host memory");
		return;
	}
	for (size_t i = 0; i < ARRAY_SIZE(rows); i++) {
		int code = daemonfix_ctl_text(&trainfix, rows[i].args, out, sizeof(out));

		cr_expect_eq(code, rows[i].code, "row %zu: exit code %d: %s", i, code, out);
		cr_expect(strstr(out, rows[i].words), "row %zu: no '%s' in: %s", i, rows[i].words,
			  out);
	}
}
