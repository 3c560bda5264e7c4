/*
 * publish_transforms: a generation on request in each type, and by each transform of rules, beside the memory's
 * speed. The job has three matrices, as the projections q, k and v of a layer, in fp32.
 */
#include <stdio.h>

#include "bench.h"

#define TRANSFORMS_TENSORS 3u
#define TRANSFORMS_COLUMNS \
	4096u /* of a matrix, also of a real one: columns are a power of two apart */

#define EACH "{\"name\": \"qkv.{m}\", \"sources\": ["
#define SLICE(dim)                                                  \
	EACH "{\"tensor\": \"qkv.{m}\", \"slice\": {\"dim\": " #dim \
	     ", \"parts\": 2, \"part\": 1}}]}"
#define RULES(rule) "\"type\": \"bf16\", \"rules\": [" rule "]"

/* @passes: how often the masters are read; @part: the share of them that is. */
struct transform {
	const char *name, *dtype, *json;
	double passes, part;
};

/* Of tensors with scales the largest values are found first: two passes. */
static const struct transform transforms[] = {
	{ "publish_bf16", "bf16", "\"type\": \"bf16\"", 1, 1 },
	{ "publish_fp16", "fp16", "\"type\": \"fp16\"", 1, 1 },
	{ "publish_fp32", "fp32", "\"type\": \"fp32\"", 1, 1 },
	{ "publish_e4m3_tensor", "e4m3", "\"type\": \"e4m3\"", 2, 1 },
	{ "publish_e4m3_block", "e4m3", "\"type\": \"e4m3\", \"scale_block\": [128, 128]", 2, 1 },
	{ "publish_joined", "bf16",
	  RULES("{\"name\": \"qkv\", \"sources\": [\"qkv.q\", \"qkv.k\", \"qkv.v\"]}"), 1, 1 },
	{ "publish_rows", "bf16", RULES(SLICE(0)), 1, 0.5 },
	{ "publish_columns", "bf16", RULES(SLICE(1)), 1, 0.5 },
	{ "publish_transposed", "bf16",
	  RULES(EACH "{\"tensor\": \"qkv.{m}\", \"transpose\": true}]}"), 1, 1 },
	{ "publish_padded", "bf16",
	  RULES(EACH "\"qkv.{m}\"], \"pad_dim\": 1, \"pad_multiple\": 4160}"), 1, 1 },
};

#define TRANSFORMS_N (sizeof(transforms) / sizeof(transforms[0]))

/* Of each matrix; even, so that it has two halves. */
static uint64_t transforms_rows(uint64_t elements)
{
	uint64_t rows = elements / TRANSFORMS_TENSORS / TRANSFORMS_COLUMNS / 2 * 2;

	return rows ? rows : 2;
}

static void transforms_register(struct trainer *t)
{
	static const char *const names[TRANSFORMS_TENSORS] = { "q", "k", "v" };
	uint64_t shape[2] = { transforms_rows(t->crew->elements), TRANSFORMS_COLUMNS };
	struct shardd_tensor tensors[TRANSFORMS_TENSORS] = { 0 };
	struct shardd_unit_spec spec = { .size = sizeof(spec),
					 .name = "qkv",
					 .tensors = tensors,
					 .n_tensors = TRANSFORMS_TENSORS,
					 .group = SHARDD_WORLD,
					 .compute_dtype = SHARDD_FP32,
					 .gradient_dtype = SHARDD_FP32,
					 .optimizer = { .kind = SHARDD_SGD, .lr = 1 } };
	struct shardd_unit_info info;
	struct shardd_error err;

	for (unsigned i = 0; i < TRANSFORMS_TENSORS; i++)
		tensors[i] = (struct shardd_tensor){ .name = names[i],
						     .shape = shape,
						     .dims = 2,
						     .init = SHARDD_INIT_NORMAL,
						     .b = 0.02 };
	trainer_must(t, shardd_register(t->client, &spec, 1, &info, &err), &err, "register");
	trainer_must(t, shardd_init_seed(t->client, info.unit, 1, &err), &err, "initialise");
}

static void transforms_declare(struct trainer *t, unsigned k)
{
	struct shardd_error err;
	char json[320];

	snprintf(json, sizeof(json), "{\"name\": \"made\", %s}", transforms[k].json);
	trainer_must(t,
		     shardd_publication_declare(t->client, t->crew->job, json, &t->crew->numbers[k],
						&err),
		     &err, "declare");
}

/* The next generation of the same values. */
static void transforms_time(struct trainer *t, unsigned k, int i)
{
	struct sample *s = trainer_sample(t, k, i);
	struct shardd_error err;

	trainer_must(t, shardd_commit(t->client, ++t->step, NULL, 0, &err), &err, "commit");
	trainer_meet(t);
	if (t->rank == 0) {
		sample_begin(s);
		trainer_must(t,
			     shardd_publication_publish(t->client, t->crew->job, "made", 60000,
							NULL, &err),
			     &err, "publish");
		sample_end(s);
	}
	trainer_meet(t);
}

static void transforms_main(struct trainer *t)
{
	struct shardd_error err;

	trainer_connect(t);
	trainer_join(t, SHARDD_EPHEMERAL);
	transforms_register(t);
	for (unsigned k = 0; k < TRANSFORMS_N; k++) {
		if (t->rank == 0)
			transforms_declare(t, k);
		trainer_meet(t);
		trainer_limit(t, k, LIMIT_COPY, t->crew->elements * 6);
		for (int i = TRAINER_WARM_UP; i < (int)t->crew->repeat; i++)
			transforms_time(t, k, i);
		trainer_limit(t, k, LIMIT_COPY, t->crew->elements * 6);
		if (t->rank == 0)
			trainer_must(t,
				     shardd_publication_drop(t->client, t->crew->job, "made", &err),
				     &err, "drop");
	}
	trainer_leave(t);
}

static void transforms_report(const struct bench *b, const struct crew *crew, double of_device)
{
	uint64_t elements =
		TRANSFORMS_TENSORS * TRANSFORMS_COLUMNS * transforms_rows(crew->elements);

	for (unsigned k = 0; k < TRANSFORMS_N; k++) {
		const struct transform *x = &transforms[k];
		struct figures f = FIGURES_NULL;

		f.name = x->name;
		f.ranks = crew->ranks;
		f.bytes = crew->numbers[k];
		f.dtype = x->dtype;
		figures_calls(&f, crew, k, 0, 1);
		f.ran_us = -1;
		figures_traffic(
			&f, (double)elements * 4 * x->passes * x->part + (double)crew->numbers[k],
			crew_limit(crew, k, of_device));
		figures_report(b, &f);
	}
}

int case_publish_transforms(struct bench *b, const struct bench_case *c)
{
	uint64_t elements = b->o.bytes / 2;
	struct crew *crew =
		crew_new(b, bench_ranks(b, c), 0, TRANSFORMS_N, bench_repeat(b, c), elements);
	double of_device = bench_on_device(b) ? limit_measure(LIMIT_COPY, elements * 6) : -1;
	int r = crew ? crew_run(crew, transforms_main) : -1;

	if (r == 0)
		transforms_report(b, crew, of_device);
	crew_free(crew);
	return r;
}
