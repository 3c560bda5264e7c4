/*
 * charlm: trains a character language model on a text file, data-parallel, with
 * parameters, gradients and optimizer in shardd. Start one process a rank
 * (shardctl run does); each takes its part of every global batch.
 */
#include "charlm_train.h"

#include <errno.h>
#include <getopt.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char usage[] =
	"usage: charlm --data FILE [--steps N] [--seed S] [--batch B] [--json]\n"
	"              [--hidden H] [--context C] [--embed E] [--lr X] [--clip X]\n"
	"              [--dtype fp32|bf16|fp16] [--commit-every N] [--in-backward]\n"
	"              [--shard-ranks S] [--load DIR] [--kill-at STEP --kill-rank R]\n"
	"\n"
	"Train a character language model on the text FILE with shardd. Every rank of the\n"
	"job runs one charlm with the same options.\n"
	"\n"
	"  --data FILE      the text to train on\n"
	"  --steps N        train up to step N (300)\n"
	"  --seed S         seed of the parameters and the batches (1)\n"
	"  --batch B        samples per step over all ranks (64)\n"
	"  --json           rank 0 prints one JSON object per step\n"
	"  --hidden H       width of the two hidden layers (128)\n"
	"  --context C      number of preceding characters the model sees (16)\n"
	"  --embed E        size of a character's embedding (16)\n"
	"  --lr X           AdamW's learning rate (0.003)\n"
	"  --clip X         maximum norm of the gradients; 0: no limit (1)\n"
	"  --dtype T        type of gathered parameters and of gradients (fp32)\n"
	"  --commit-every N commit each N-th step and the last one (1). Above 1 the job keeps a "
	"copy\n"
	"                   of its last commit, and resumes there\n"
	"  --in-backward    step each layer in the backward pass; needs --clip 0\n"
	"  --shard-ranks S  shard over S ranks, and replicate over the rest (all ranks: no "
	"replicas)\n"
	"  --load DIR       a job without a step begins with the newest checkpoint in DIR\n"
	"  --kill-at STEP   rank R kills itself during backward of this step (2 or more),\n"
	"  --kill-rank R    if the job had no commit when the process joined it\n"
	"\n"
	"Environment: SHARDD_SOCKET, SHARDD_JOB (charlm), RANK (0), WORLD_SIZE (1).\n"
	"\n"
	"Exit code: 0 all steps are committed; 1 an error; 2 wrong arguments; 3 stopped early by\n"
	"SIGINT or SIGTERM, or because the job or the daemon is drained: all ranks stop after the\n"
	"same step, which is committed. After a signal the job stays for a restart.\n";

/* Options given as numbers: where they go and what is allowed. */
struct number_option {
	const char *name;
	uint64_t *into;
	uint64_t min, max;
};

struct real_option {
	const char *name;
	double *into;
	bool zero_allowed;
};

static int parse_number(const struct number_option *o, const char *text)
{
	char *end;

	errno = 0;
	*o->into = strtoull(text, &end, 10);
	if (errno == 0 && text[0] >= '0' && text[0] <= '9' && *end == '\0' && *o->into >= o->min &&
	    *o->into <= o->max)
		return 0;
	fprintf(stderr, "charlm: --%s %s: must be a whole number from %llu to %llu\n", o->name,
		text, (unsigned long long)o->min, (unsigned long long)o->max);
	return -EINVAL;
}

static int parse_real(const struct real_option *o, const char *text)
{
	char *end;

	*o->into = strtod(text, &end);
	if (end != text && *end == '\0' && isfinite(*o->into) &&
	    (*o->into > 0 || (o->zero_allowed && *o->into == 0)))
		return 0;
	fprintf(stderr, "charlm: --%s %s: must be a number %s 0\n", o->name, text,
		o->zero_allowed ? "not below" : "above");
	return -EINVAL;
}

static int parse_dtype(enum shardd_dtype *into, const char *text)
{
	static const char *const names[] = {
		[SHARDD_FP32] = "fp32", [SHARDD_BF16] = "bf16", [SHARDD_FP16] = "fp16"
	};

	for (int d = SHARDD_FP32; d <= SHARDD_FP16; d++) {
		if (strcmp(text, names[d]) != 0)
			continue;
		*into = d;
		return 0;
	}
	fprintf(stderr, "charlm: --dtype %s: must be fp32, bf16 or fp16\n", text);
	return -EINVAL;
}

static int parse_one(struct train_options *o, const char *name, const char *value)
{
	const struct number_option numbers[] = {
		{ "steps", &o->steps, 1, 1000000000 },
		{ "seed", &o->seed, 0, UINT64_MAX },
		{ "batch", &o->batch, 1, 65536 },
		{ "hidden", &o->hidden, 1, 4096 },
		{ "context", &o->context, 1, 256 },
		{ "embed", &o->embed, 1, 1024 },
		{ "kill-at", &o->kill_at, 2, 1000000000 },
		{ "kill-rank", &o->kill_rank, 0, 1023 },
		{ "commit-every", &o->commit_every, 1, 1000000000 },
		{ "shard-ranks", &o->shard_ranks, 1, 1024 },
	};
	const struct real_option reals[] = { { "lr", &o->lr, false }, { "clip", &o->clip, true } };

	for (size_t i = 0; i < sizeof(numbers) / sizeof(numbers[0]); i++)
		if (strcmp(name, numbers[i].name) == 0)
			return parse_number(&numbers[i], value);
	for (size_t i = 0; i < sizeof(reals) / sizeof(reals[0]); i++)
		if (strcmp(name, reals[i].name) == 0)
			return parse_real(&reals[i], value);
	if (strcmp(name, "dtype") == 0)
		return parse_dtype(&o->dtype, value);
	*(strcmp(name, "load") == 0 ? &o->load : &o->data) = value;
	return 0;
}

/* Return: 0, 1 (help was printed), or -EINVAL with a sentence on stderr. */
static int parse(struct train_options *o, int argc, char **argv)
{
	static const struct option options[] = {
		{ "data", 1, NULL, 'v' },
		{ "load", 1, NULL, 'v' },
		{ "steps", 1, NULL, 'v' },
		{ "seed", 1, NULL, 'v' },
		{ "batch", 1, NULL, 'v' },
		{ "hidden", 1, NULL, 'v' },
		{ "context", 1, NULL, 'v' },
		{ "embed", 1, NULL, 'v' },
		{ "lr", 1, NULL, 'v' },
		{ "clip", 1, NULL, 'v' },
		{ "dtype", 1, NULL, 'v' },
		{ "kill-at", 1, NULL, 'v' },
		{ "kill-rank", 1, NULL, 'v' },
		{ "commit-every", 1, NULL, 'v' },
		{ "shard-ranks", 1, NULL, 'v' },
		{ "in-backward", 0, NULL, 'b' },
		{ "json", 0, NULL, 'j' },
		{ "help", 0, NULL, 'h' },
		{ 0 },
	};
	int c, which = 0, rc = 0;

	while (rc == 0 && (c = getopt_long(argc, argv, "h", options, &which)) != -1) {
		if (c == 'h') {
			fputs(usage, stdout);
			return 1;
		}
		if (c == 'j')
			o->json = true;
		else if (c == 'b')
			o->in_backward = true;
		else
			rc = c == 'v' ? parse_one(o, options[which].name, optarg) : -EINVAL;
	}
	if (rc == 0 && optind < argc) {
		fprintf(stderr, "charlm: %s is not an option\n", argv[optind]);
		rc = -EINVAL;
	}
	if (rc == 0 && !o->data) {
		fprintf(stderr, "charlm: --data FILE is missing\n");
		rc = -EINVAL;
	}
	if (rc == 0 && o->in_backward && o->clip > 0) {
		fprintf(stderr,
			"charlm: --in-backward needs --clip 0: the norm of all gradients is "
			"not known before the last layer\n");
		rc = -EINVAL;
	}
	if (rc == 0 && (o->kill_at == 0) != (o->kill_rank == TRAIN_NO_RANK)) {
		fprintf(stderr, "charlm: give --kill-at and --kill-rank together\n");
		rc = -EINVAL;
	}
	return rc;
}

int main(int argc, char **argv)
{
	struct train_options options = {
		.steps = 300,
		.seed = 1,
		.batch = 64,
		.context = 16,
		.embed = 16,
		.hidden = 128,
		.lr = 0.003,
		.clip = 1,
		.dtype = SHARDD_FP32,
		.commit_every = 1,
		.kill_rank = TRAIN_NO_RANK,
	};
	int rc = parse(&options, argc, argv);

	if (rc < 0)
		fprintf(stderr, "try charlm --help\n");
	if (rc != 0)
		return rc < 0 ? 2 : 0;
	return train_run(&options);
}
