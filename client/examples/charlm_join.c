/*
 * How a rank of charlm gets into an epoch, the first time and after a death: join,
 * check what was stored with the last commit, register, initialise, allocate. All
 * ranks do the same in the same order, since initialising is collective.
 */
#include "charlm_trainer.h"

#include <inttypes.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* What a rank stores with a commit. The generator is counter-based: seed and step
 * are all of its state. */
struct blob {
	char magic[8];
	uint64_t seed;
	uint64_t step;
	uint64_t text_hash;
	uint64_t batch;
};

static const char blob_magic[8] = "charlm 1";

void trainer_say(const struct trainer *t, const char *text, ...)
{
	FILE *out = t->options->json ? stderr : stdout;
	va_list args;

	va_start(args, text);
	vfprintf(out, text, args);
	va_end(args);
	fflush(out);
}

int trainer_fail(struct trainer *t, enum shardd_code code, const char *text, ...)
{
	va_list args;

	t->err = (struct shardd_error){ .code = (int)code, .domain = "charlm" };
	va_start(args, text);
	vsnprintf(t->err.text, sizeof(t->err.text), text, args);
	va_end(args);
	return -(int)code;
}

void trainer_count(struct trainer *t, int64_t bytes)
{
	t->bytes_now += (uint64_t)bytes;
	if (t->bytes_now > t->bytes_peak)
		t->bytes_peak = t->bytes_now;
}

/* ------------------------------------------------------- joining and set-up */

static int check_blob(struct trainer *t)
{
	const struct train_options *o = t->options;
	struct blob b;

	/* A rank that the job has got since its last commit has none: the others check theirs. */
	if (!t->me.has_commit || !t->me.blob_bytes)
		return 0;
	if (t->me.blob_bytes == sizeof(b))
		memcpy(&b, t->me.blob, sizeof(b));
	if (t->me.blob_bytes != sizeof(b) || memcmp(b.magic, blob_magic, sizeof(b.magic)) != 0)
		return trainer_fail(
			t, SHARDD_FAILED_PRECONDITION,
			"the job's last commit was not made by this charlm: name another job");
	if (b.step != t->me.blob_step)
		return trainer_fail(t, SHARDD_INTERNAL,
				    "the blob of step %" PRIu64
				    " belongs to the commit of step %" PRIu64,
				    b.step, t->me.blob_step);
	if (b.seed != o->seed || b.text_hash != t->text.hash || b.batch != o->batch)
		return trainer_fail(t, SHARDD_FAILED_PRECONDITION,
				    "the job was trained with --seed %" PRIu64 ", --batch %" PRIu64
				    " and %s text: give the same values, or name another job",
				    b.seed, b.batch,
				    b.text_hash == t->text.hash ? "this" : "another");
	return 0;
}

/* Which samples of the global batch are this rank's. If they cannot be split evenly, the first ranks take
 * one more each. */
static int split_batch(struct trainer *t)
{
	unsigned batch = (unsigned)t->options->batch, world = t->me.world_size;
	unsigned more = batch % world;

	if (batch < world)
		return trainer_fail(
			t, SHARDD_INVALID_ARGUMENT,
			"--batch %u has no sample for some of the %u ranks: give %u or more", batch,
			world, world);
	t->count = batch / world + (t->me.rank < more);
	t->first = t->me.rank * (batch / world) + (t->me.rank < more ? t->me.rank : more);
	return 0;
}

/* What the daemon gave us, told once; the same for every epoch of this process. */
static int learn_device(struct trainer *t)
{
	bool known = t->device.id[0];
	struct shardd_info info = { .size = sizeof(info) };
	int rc = shardd_get_info(t->client, &info, &t->err);

	if (rc < 0)
		return rc;
	t->device = info.device;
	t->on_host = strcmp(t->device.backend, "cuda") != 0;
	if (!known)
		trainer_say(t, "rank %u of %u: memory on %s%s%s\n", t->me.rank, t->me.world_size,
			    t->device.id, t->on_host ? "" : " ", t->device.uuid);
	return 0;
}

/* Then the losses of all steps are those of commits, however many steps there are between two. */
static bool resumes_at_commits(const struct train_options *o)
{
	return o->commit_every > 1;
}

static int join(struct trainer *t)
{
	const struct shardd_membership before = t->me;
	struct shardd_job job = { .size = sizeof(job),
				  .name = getenv("SHARDD_JOB") ? NULL : "charlm",
				  .world_size = getenv("WORLD_SIZE") ? 0 : 1,
				  .rank = getenv("RANK") ? SHARDD_RANK_FROM_ENV : 0,
				  /* 0: as the job is */
				  .resume = resumes_at_commits(t->options) ? SHARDD_RESUME_COMMITTED
									   : 0 };
	int rc = shardd_join(t->client, &job, &t->me, &t->err);

	if (rc < 0)
		return rc;
	/* A process that finds a commit was restarted, and must not die of the option again. */
	t->may_die = t->may_die && !t->me.has_commit;
	rc = learn_device(t);
	if (rc >= 0)
		rc = check_blob(t);
	if (rc >= 0)
		rc = split_batch(t);
	if (rc >= 0 && before.world_size &&
	    (before.rank != t->me.rank || before.world_size != t->me.world_size))
		trainer_say(t, "rank %u of %u is rank %u of %u now: pid %d\n", before.rank,
			    before.world_size, t->me.rank, t->me.world_size, (int)getpid());
	if (rc >= 0 && t->me.has_step)
		trainer_say(t, "rank %u resumed at step %" PRIu64 ": epoch %" PRIu64 ", pid %d\n",
			    t->me.rank, t->me.step, t->me.epoch, (int)getpid());
	/* Not a death: the other ranks need not wait for us. But the state of an EPHEMERAL job ends when
	 * the last rank leaves. */
	if (rc < 0 && !t->me.resumed)
		shardd_leave(t->client, NULL);
	return rc;
}

/* A layer's tensors: uniform after Xavier; the bias starts at 0. */
static void describe_layer(struct trainer *t, const struct model_shape *s, enum layer layer,
			   struct shardd_tensor *tensors, uint64_t *shape,
			   struct shardd_unit_spec *ret)
{
	struct layer_shape l = layer_shape(s, layer);
	double bound = sqrt(6.0 / (l.in + l.out));

	shape[0] = l.in;
	shape[1] = l.out;
	tensors[0] = (struct shardd_tensor){ .name = "weight",
					     .shape = shape,
					     .dims = 2,
					     .init = SHARDD_INIT_UNIFORM,
					     .a = -bound,
					     .b = bound };
	tensors[1] = (struct shardd_tensor){ .name = "bias", .shape = shape + 1, .dims = 1 };
	*ret = (struct shardd_unit_spec){
		.size = sizeof(*ret),
		.name = layer_name(layer),
		.tensors = tensors,
		.n_tensors = layer == LAYER_EMBED ? 1 : 2,
		.compute_dtype = t->options->dtype,
		.strategy = t->options->shard_ranks ? SHARDD_HYBRID : SHARDD_SHARD,
		.shard_ranks = (uint32_t)t->options->shard_ranks,
		.optimizer = { .kind = SHARDD_ADAMW,
			       .lr = t->options->lr,
			       .weight_decay = 0.01,
			       .when = t->options->in_backward ? SHARDD_OPTIM_IN_BACKWARD
							       : SHARDD_OPTIM_AT_STEP },
	};
}

static struct model_shape model_shape(const struct trainer *t)
{
	const struct train_options *o = t->options;

	return (struct model_shape){ t->text.vocab, (unsigned)o->context, (unsigned)o->embed,
				     (unsigned)o->hidden };
}

/* Memory of our own, which does not depend on the number of ranks. */
static int make_copies(struct trainer *t, const struct model_shape *s)
{
	size_t largest = 0;

	if (t->params)
		return 0;
	for (int l = 0; l < LAYER_N; l++)
		if (layer_elements(s, l) > largest)
			largest = layer_elements(s, l);
	t->params = malloc(largest * sizeof(float));
	t->gradient = malloc(largest * sizeof(float));
	t->staged = malloc(largest * sizeof(uint16_t));
	return t->params && t->gradient && t->staged ? 0 : -1;
}

/* For this rank's samples, which are others when the job has another number of ranks. */
static int make_model(struct trainer *t)
{
	struct model_shape s = model_shape(t);

	if (t->model && t->model_count == t->count)
		return 0;
	t->model = model_free(t->model);
	t->model_count = t->count;
	if (make_copies(t, &s) < 0 || model_new(&s, t->count, &t->model) < 0)
		return trainer_fail(t, SHARDD_RESOURCE_EXHAUSTED,
				    "not enough memory for the model");
	return 0;
}

/* The newest checkpoint, in place of values by the seed. It ends the epoch, so that all join again.
 * Return: -SHARDD_ABORTED then. */
static int load_checkpoint(struct trainer *t)
{
	int rc = shardd_barrier(t->client, 0, &t->err); /* all have registered */

	if (rc >= 0 && t->me.rank == 0)
		rc = shardd_load_checkpoint(t->client, getenv("SHARDD_JOB") ? NULL : "charlm",
					    t->options->load, NULL, NULL, &t->err);
	if (rc >= 0)
		rc = shardd_barrier(t->client, 0, &t->err);
	if (rc >= 0)
		rc = trainer_fail(t, SHARDD_INTERNAL, "the load has not ended the epoch");
	return rc;
}

/* All units in one call; those that no earlier life initialised, by the seed or the checkpoint. */
static int register_layers(struct trainer *t)
{
	struct shardd_tensor tensors[LAYER_N][2];
	struct shardd_unit_spec specs[LAYER_N];
	struct model_shape s = model_shape(t);
	uint64_t shapes[LAYER_N][2];
	int rc;

	for (int l = 0; l < LAYER_N; l++)
		describe_layer(t, &s, l, tensors[l], shapes[l], &specs[l]);
	rc = shardd_register(t->client, specs, LAYER_N, t->units, &t->err);
	if (rc >= 0 && t->options->load && !t->me.has_step && !t->me.has_commit)
		return load_checkpoint(t);
	for (int l = 0; l < LAYER_N && rc >= 0; l++)
		if (!t->units[l].initialised)
			rc = shardd_init_seed(t->client, t->units[l].unit, t->options->seed,
					      &t->err);
	return rc;
}

/* The buffer of the losses, and where they are written before they go there. */
static int make_losses(struct trainer *t, uint64_t bytes)
{
	int rc = shardd_alloc(t->client, bytes, &t->buffer, &t->shared, &t->err);

	if (rc < 0)
		return rc;
	free(t->losses_copy);
	t->losses_copy = t->on_host ? NULL : malloc(bytes);
	if (!t->on_host && !t->losses_copy)
		return trainer_fail(t, SHARDD_RESOURCE_EXHAUSTED, "not enough memory");
	t->losses = t->on_host ? t->shared : t->losses_copy;
	return 0;
}

int trainer_enter(struct trainer *t)
{
	uint64_t loss_bytes = ((uint64_t)t->options->batch + 1) * sizeof(float);
	int rc = join(t);

	if (rc >= 0)
		rc = make_model(t);
	if (rc >= 0)
		rc = register_layers(t);
	if (rc >= 0)
		rc = make_losses(t, loss_bytes);
	if (rc < 0)
		return rc;
	memset(t->held, 0, sizeof(t->held));
	t->bytes_now = 0;
	trainer_count(t, (int64_t)loss_bytes);
	return 0;
}

int trainer_commit(struct trainer *t, uint64_t step)
{
	struct blob b = { .seed = t->options->seed,
			  .step = step,
			  .text_hash = t->text.hash,
			  .batch = t->options->batch };

	memcpy(b.magic, blob_magic, sizeof(b.magic));
	return shardd_commit(t->client, step, &b, sizeof(b), &t->err);
}

void trainer_deinit(struct trainer *t)
{
	t->model = model_free(t->model);
	free(t->params);
	free(t->gradient);
	free(t->staged);
	free(t->losses_copy);
	t->params = t->gradient = t->losses_copy = NULL;
	t->staged = NULL;
	text_deinit(&t->text);
}
