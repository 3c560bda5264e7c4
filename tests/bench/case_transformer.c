/*
 * transformer: all ops of a training step of a transformer of 10 million parameters, fp32,
 * AdamW after backward. The trainers compute nothing: they write gradients of ones where
 * backward would write gradients, which is a part of the time. peers/torch_peers has the
 * same sizes.
 */
#include <stdio.h>

#include "bench.h"

#define BLOCKS     8
#define WIDTH      320
#define LENGTH     128
#define VOCABULARY 256
#define UNITS      (BLOCKS + 1) /* 0: embeddings and the last norm */

static const struct tensor_shape {
	const char *name;
	uint64_t rows, columns; /* columns 0: a vector */
} root_tensors[] = {
	{ "tokens", VOCABULARY, WIDTH },
	{ "places", LENGTH, WIDTH },
	{ "norm.weight", WIDTH, 0 },
	{ "norm.bias", WIDTH, 0 },
}, block_tensors[] = {
	{ "norm1.weight", WIDTH, 0 },     { "norm1.bias", WIDTH, 0 },
	{ "qkv.weight", 3 * WIDTH, WIDTH }, { "qkv.bias", 3 * WIDTH, 0 },
	{ "out.weight", WIDTH, WIDTH },   { "out.bias", WIDTH, 0 },
	{ "norm2.weight", WIDTH, 0 },     { "norm2.bias", WIDTH, 0 },
	{ "up.weight", 4 * WIDTH, WIDTH },  { "up.bias", 4 * WIDTH, 0 },
	{ "down.weight", WIDTH, 4 * WIDTH }, { "down.bias", WIDTH, 0 },
};

#define ROOT_TENSORS  (sizeof(root_tensors) / sizeof(root_tensors[0]))
#define BLOCK_TENSORS (sizeof(block_tensors) / sizeof(block_tensors[0]))

static void describe(const struct tensor_shape *shapes, size_t n, struct shardd_tensor *ret)
{
	for (size_t i = 0; i < n; i++)
		ret[i] = (struct shardd_tensor){ .name = shapes[i].name,
						 .shape = &shapes[i].rows,
						 .dims = shapes[i].columns ? 2 : 1,
						 .init = SHARDD_INIT_CONSTANT,
						 .a = 1 };
}

static void register_model(struct trainer *t, struct shardd_unit_info *info)
{
	struct shardd_tensor root[ROOT_TENSORS], block[BLOCK_TENSORS];
	struct shardd_unit_spec specs[UNITS];
	struct shardd_error err;
	char names[UNITS][16];

	describe(root_tensors, ROOT_TENSORS, root);
	describe(block_tensors, BLOCK_TENSORS, block);
	for (unsigned i = 0; i < UNITS; i++) {
		snprintf(names[i], sizeof(names[i]), i ? "block.%u" : "root", i);
		specs[i] = (struct shardd_unit_spec){ .size = sizeof(specs[i]),
						      .name = names[i],
						      .tensors = i ? block : root,
						      .n_tensors = i ? BLOCK_TENSORS : ROOT_TENSORS,
						      .group = SHARDD_WORLD,
						      .optimizer = { .kind = SHARDD_ADAMW,
								     .lr = 1e-6 } };
	}
	trainer_must(t, shardd_register(t->client, specs, UNITS, info, &err), &err, "register");
	for (unsigned i = 0; i < UNITS; i++)
		trainer_must(t, shardd_init_seed(t->client, info[i].unit, 1, &err), &err,
			     "initialise");
}

static void forward(struct trainer *t, const struct shardd_unit_info *info)
{
	for (unsigned i = 0; i < UNITS; i++) {
		t->unit = info[i].unit;
		trainer_gather(t);
		trainer_release(t);
	}
}

/* Nothing waits for a reduce before the step. */
static void backward(struct trainer *t, const struct shardd_unit_info *info, shardd_ticket *reduce)
{
	struct shardd_error err;
	void *data;

	for (unsigned i = UNITS; i-- > 0;) {
		t->unit = info[i].unit;
		trainer_gather(t);
		trainer_must(t, shardd_gradient(t->client, t->unit, &data, &err), &err, "gradient");
		trainer_fill(t, data, info[i].gradient_elements, SHARDD_FP32);
		trainer_release(t);
		trainer_must(t,
			     shardd_submit_reduce(t->client,
						  SHARDD_OPTIONS(reduce, .unit = t->unit),
						  &reduce[i], &err),
			     &err, "reduce");
	}
}

static void step(struct trainer *t, const shardd_ticket *reduce)
{
	struct shardd_error err;

	for (unsigned i = 0; i < UNITS; i++)
		trainer_must(t, shardd_wait(t->client, reduce[i], -1, NULL, &err), &err, "reduce");
	trainer_step(t, ++t->step);
}

static void transformer_main(struct trainer *t)
{
	struct shardd_unit_info info[UNITS];
	shardd_ticket reduce[UNITS];
	uint64_t elements = 0;

	trainer_connect(t);
	trainer_join(t, SHARDD_EPHEMERAL);
	register_model(t, info);
	for (unsigned i = 0; i < UNITS; i++)
		elements += info[i].elements;
	if (t->rank == 0)
		t->crew->numbers[0] = elements;
	for (int i = TRAINER_WARM_UP; i < (int)t->crew->repeat; i++) {
		struct sample *s = trainer_sample(t, 0, i);

		trainer_meet(t);
		sample_begin(s);
		forward(t, info);
		backward(t, info, reduce);
		step(t, reduce);
		sample_end(s);
	}
	trainer_leave(t);
}

int case_transformer(struct bench *b, const struct bench_case *c)
{
	struct crew *crew = crew_new(b, bench_ranks(b, c), 0, 1, bench_repeat(b, c), 1);
	struct figures f = FIGURES_NULL;
	int r = crew ? crew_run(crew, transformer_main) : -1;

	if (r == 0) {
		f.name = c->name;
		f.ranks = crew->ranks;
		f.bytes = crew->numbers[0] * sizeof(float);
		f.dtype = "fp32";
		figures_collective(&f, crew, 0);
		f.ran_us = -1; /* of many ops */
		figures_report(b, &f);
	}
	crew_free(crew);
	return r;
}
