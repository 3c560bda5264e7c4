/*
 * The training loop of charlm. A step is eight passes, four layers forward and
 * four backward. Every op of a step has a slot for its ticket: while one pass is
 * computed, the parameters of the next are being fetched and the gradients of the
 * ones before are being reduced. All tickets are ended before the commit.
 *
 * Nothing here undoes anything: if a peer dies, every op of the epoch ends with
 * ABORTED, the daemon drops what was not committed, and the loop starts again
 * from the last committed step.
 */
#include "charlm_train.h"

#include "charlm_half.h"
#include "charlm_trainer.h"

#include <errno.h>
#include <inttypes.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

enum { REPORT_EVERY = 10 };

/* Set by SIGINT and SIGTERM: all ranks stop together after the step they are in. */
static volatile sig_atomic_t stop_asked;

static void on_signal(int number)
{
	(void)number;
	stop_asked = 1;
}

static uint64_t now_ns(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

/* ------------------------------------------------------------------ tickets */

/* Note that the op of a slot was submitted, if it was. Return: @rc. */
static int sent(struct trainer *t, unsigned slot, int rc)
{
	t->open[slot] = rc >= 0;
	return rc;
}

/* Wait for the op of an open slot and end its ticket. */
static int finish(struct trainer *t, unsigned slot, struct shardd_result *ret)
{
	t->open[slot] = false;
	return shardd_wait(t->client, t->tickets[slot], -1, ret, &t->err);
}

/* End every open ticket. Return: 0, or the first error, which stays in t->err. */
static int finish_all(struct trainer *t)
{
	struct shardd_error first = { 0 };
	int ret = 0, rc;

	for (unsigned slot = 0; slot < SLOT_N; slot++) {
		rc = t->open[slot] ? finish(t, slot, NULL) : 0;
		if (rc < 0 && ret == 0) {
			first = t->err;
			ret = rc;
		}
	}
	if (ret < 0)
		t->err = first;
	return ret;
}

/* ------------------------------------------------------------------- passes */

static bool is_backward(unsigned pass)
{
	return pass >= LAYER_N;
}

static enum layer layer_of(unsigned pass)
{
	return is_backward(pass) ? PASSES - 1 - pass : pass;
}

/* Ask for what a pass needs, without waiting for it. */
static int fetch(struct trainer *t, unsigned pass)
{
	enum layer l = layer_of(pass);
	shardd_unit unit = t->units[l].unit;
	unsigned slot = SLOT_GATHER + pass;
	int rc = sent(t, slot,
		      shardd_submit_gather(t->client, SHARDD_OPTIONS(gather, .unit = unit),
					   &t->tickets[slot], &t->err));

	if (rc < 0 || !is_backward(pass))
		return rc;
	slot = SLOT_GRADIENT + l;
	return sent(t, slot,
		    shardd_submit_gradient(t->client, SHARDD_OPTIONS(gradient, .unit = unit),
					   &t->tickets[slot], &t->err));
}

/* @from, @n elements, as fp32: in place, or copied or widened into our own memory. */
static int load_params(struct trainer *t, const void *from, uint64_t n, const float **ret)
{
	enum shardd_dtype dtype = t->options->dtype;
	void *copy = dtype == SHARDD_FP32 ? t->params : t->staged;
	int rc = 0;

	if (!t->on_host) {
		rc = shardd_read(t->client, copy, from, n * shardd_dtype_size(dtype), &t->err);
		from = copy;
	}
	if (rc >= 0 && dtype != SHARDD_FP32) {
		half_widen(t->params, from, dtype, n);
		from = t->params;
	}
	*ret = from;
	return rc;
}

/* The other way: @n elements of our own gradient into @into. */
static int store_gradient(struct trainer *t, void *into, uint64_t n)
{
	enum shardd_dtype dtype = t->options->dtype;
	const void *from = t->gradient;

	if (dtype != SHARDD_FP32) {
		half_narrow(t->on_host ? into : t->staged, t->gradient, dtype, n);
		from = t->staged;
	}
	if (t->on_host)
		return 0;
	return shardd_write(t->client, into, from, n * shardd_dtype_size(dtype), &t->err);
}

/* The parameters of a pass as fp32. */
static int open_params(struct trainer *t, unsigned pass, const float **ret)
{
	enum layer l = layer_of(pass);
	struct shardd_result gathered;
	int rc = finish(t, SLOT_GATHER + pass, &gathered);

	if (rc < 0)
		return rc;
	if (t->held[l]++ == 0)
		trainer_count(t, (int64_t)gathered.bytes);
	return load_params(t, gathered.data, t->units[l].elements, ret);
}

static int release(struct trainer *t, unsigned pass)
{
	enum layer l = layer_of(pass);
	unsigned slot = SLOT_RELEASE + pass;
	size_t bytes = t->units[l].elements * shardd_dtype_size(t->options->dtype);

	if (--t->held[l] == 0)
		trainer_count(t, -(int64_t)bytes);
	return sent(t, slot,
		    shardd_submit_release(t->client,
					  SHARDD_OPTIONS(release, .unit = t->units[l].unit),
					  &t->tickets[slot], &t->err));
}

/* Gradients of one layer into its buffer, and off they go. The daemon takes the
 * mean over ranks: each hands in the sum over its own samples, over a rank's even share of them. */
static int backward(struct trainer *t, unsigned pass, uint64_t step, const float *params)
{
	const struct train_options *o = t->options;
	enum layer l = layer_of(pass);
	unsigned slot = SLOT_REDUCE + l;
	struct shardd_result buffer;
	int rc = finish(t, SLOT_GRADIENT + l, &buffer);
	float *into;

	if (rc < 0)
		return rc;
	trainer_count(t, (int64_t)buffer.bytes);
	into = o->dtype == SHARDD_FP32 && t->on_host ? buffer.data : t->gradient;
	model_backward(t->model, l, params, (double)t->me.world_size / (double)o->batch, into);
	if (into == t->gradient)
		rc = store_gradient(t, buffer.data, t->units[l].elements);
	if (rc < 0)
		return rc;
	if (l == LAYER_HIDDEN2 && t->may_die && step == o->kill_at && t->me.rank == o->kill_rank)
		raise(SIGKILL); /* one layer reduced, one half-way: the worst moment */
	return sent(t, slot,
		    shardd_submit_reduce(t->client,
					 SHARDD_OPTIONS(reduce, .unit = t->units[l].unit),
					 &t->tickets[slot], &t->err));
}

/* Every sample's loss is in its own slot, and zero in the others': the sum over ranks only
 * adds zeros, so it is the same for any number of ranks. The
 * last slot counts the ranks that want to stop: all of them learn it in one step. */
static int share_losses(struct trainer *t)
{
	uint64_t batch = t->options->batch;
	int rc = 0;

	memset(t->losses, 0, (batch + 1) * sizeof(float));
	model_loss(t->model, t->losses + t->first);
	t->losses[batch] = stop_asked || shardd_draining(t->client);
	if (!t->on_host)
		rc = shardd_write(t->client, t->shared, t->losses, (batch + 1) * sizeof(float),
				  &t->err);
	if (rc < 0)
		return rc;
	return sent(t, SLOT_LOSS,
		    shardd_submit_all_reduce(t->client,
					     SHARDD_OPTIONS(all_reduce, .buffer = t->buffer,
							    .count = batch + 1,
							    .dtype = SHARDD_FP32, .op = SHARDD_SUM),
					     &t->tickets[SLOT_LOSS], &t->err));
}

static int run_pass(struct trainer *t, unsigned pass, uint64_t step)
{
	const float *params;
	int rc = open_params(t, pass, &params);

	if (rc >= 0 && pass + 1 < PASSES)
		rc = fetch(t, pass + 1);
	if (rc < 0)
		return rc;
	if (is_backward(pass)) {
		rc = backward(t, pass, step, params);
	} else {
		model_forward(t->model, layer_of(pass), params);
		if (layer_of(pass) == LAYER_OUT)
			rc = share_losses(t);
	}
	return rc < 0 ? rc : release(t, pass);
}

/* -------------------------------------------------------------------- steps */

static void draw_batch(struct trainer *t, uint64_t step)
{
	for (unsigned i = 0; i < t->count; i++)
		text_sample(&t->text, (unsigned)t->options->context, t->options->seed, step,
			    t->first + i, model_context(t->model, i), model_target(t->model, i));
}

/* With its number: layers that were stepped in backward need no commit to continue from it. */
static int optimize(struct trainer *t, uint64_t step)
{
	int rc = 0;

	if (t->options->clip > 0)
		rc = sent(t, SLOT_CLIP,
			  shardd_submit_clip(t->client,
					     SHARDD_OPTIONS(clip, .max_norm = t->options->clip,
							    .norm_type = 2),
					     &t->tickets[SLOT_CLIP], &t->err));
	if (rc < 0)
		return rc;
	return sent(t, SLOT_STEP,
		    shardd_submit_step(t->client, SHARDD_OPTIONS(step, .number = &step),
				       &t->tickets[SLOT_STEP], &t->err));
}

/* The mean over the global batch, in sample order: the same for any world size. */
static double mean_loss(const struct trainer *t)
{
	double sum = 0;

	for (uint64_t i = 0; i < t->options->batch; i++)
		sum += t->losses[i];
	return sum / (double)t->options->batch;
}

static bool is_committed(const struct trainer *t, uint64_t step)
{
	return t->stop || step == t->options->steps || step % t->options->commit_every == 0;
}

static int train_step(struct trainer *t, uint64_t step)
{
	size_t width = shardd_dtype_size(t->options->dtype);
	int rc;

	draw_batch(t, step);
	rc = fetch(t, 0);
	for (unsigned pass = 0; pass < PASSES && rc >= 0; pass++)
		rc = run_pass(t, pass, step);
	if (rc >= 0)
		rc = optimize(t, step);
	if (rc >= 0)
		rc = finish_all(t);
	if (rc >= 0 && !t->on_host)
		rc = shardd_read(t->client, t->losses, t->shared,
				 (t->options->batch + 1) * sizeof(float), &t->err);
	if (rc < 0)
		return rc;
	for (int l = 0; l < LAYER_N; l++) /* the reduces took the buffers back */
		trainer_count(t, -(int64_t)(t->units[l].elements * width));
	t->loss = mean_loss(t);
	t->stop = t->losses[t->options->batch] > 0;
	if (!is_committed(t, step))
		return 0;
	return trainer_commit(t, step);
}

/* Every step as an object; for people the first one, every tenth and the last one. */
static bool is_reported(const struct trainer *t, uint64_t step)
{
	if (t->me.rank != 0)
		return false;
	return t->options->json || step == 1 || step % REPORT_EVERY == 0 ||
	       step == t->options->steps || t->stop;
}

static void report(struct trainer *t, uint64_t step)
{
	uint64_t now = now_ns(), samples = (step - t->reported_step) * t->options->batch;
	double rate = (double)samples / ((double)(now - t->reported_ns) / 1e9);

	if (!is_reported(t, step))
		return;
	if (t->options->json)
		printf("{\"step\":%" PRIu64
		       ",\"loss\":%.17g,\"tokens_per_s\":%.1f,\"bytes_held\":%" PRIu64 "}\n",
		       step, t->loss, rate, t->bytes_peak);
	else
		printf("step %6" PRIu64 "  loss %.4f  %8.0f tokens/s  %7.1f KiB held\n", step,
		       t->loss, rate, (double)t->bytes_peak / 1024);
	fflush(stdout);
	t->reported_step = step;
	t->reported_ns = now;
}

/* From the step after the last one to the end. */
static int train_epoch(struct trainer *t)
{
	uint64_t step = t->me.has_step ? t->me.step : 0;
	int rc = 0;

	t->reported_step = step;
	t->reported_ns = now_ns();
	if (step >= t->options->steps && !(t->me.has_commit && t->me.committed_step == step))
		rc = trainer_commit(t, step); /* it was only applied */
	if (rc < 0)
		return rc;
	if (step >= t->options->steps)
		trainer_say(t, "rank %u is finished: step %" PRIu64 " is committed\n", t->me.rank,
			    step);
	while (step < t->options->steps) {
		rc = train_step(t, ++step);
		if (rc < 0)
			return rc;
		report(t, step);
		if (t->stop) {
			trainer_say(t, "rank %u was asked to stop: step %" PRIu64 " is committed\n",
				    t->me.rank, step);
			t->unfinished = step < t->options->steps;
			/* Leaving an EPHEMERAL job for good ends it and its state. */
			if (t->unfinished && !shardd_draining(t->client))
				return 0;
			break;
		}
	}
	rc = shardd_leave(t->client, &t->err);
	return rc == -SHARDD_ABORTED ? 0 : rc; /* others left before: all is committed */
}

/* The first time, and after each epoch that a peer's death has ended. */
static int enter(void *data)
{
	struct trainer *t = data;
	struct shardd_error why = t->err;

	if (t->entered) {
		finish_all(t);
		if (stop_asked || shardd_draining(t->client)) {
			trainer_say(t, "rank %u stops: %s\n", t->me.rank, why.text);
			t->unfinished = true;
			return 1;
		}
		trainer_say(t, "rank %u returns to the last commit: %s\n", t->me.rank, why.text);
	}
	t->entered = true;
	return trainer_enter(t);
}

static int epoch(void *data)
{
	return train_epoch(data);
}

/* Through as many epochs as it takes: a peer's death ends one, for all. */
static int train(struct trainer *t)
{
	int rc = shardd_rejoin(enter, epoch, t);

	return rc > 0 ? 0 : rc;
}

/* ------------------------------------------------------------ life of a run */

static int load(struct trainer *t)
{
	const struct train_options *o = t->options;
	int rc = text_load(&t->text, o->data);

	if (rc == -ENODATA)
		return trainer_fail(t, SHARDD_INVALID_ARGUMENT, "%s is empty", o->data);
	if (rc < 0)
		return trainer_fail(t, SHARDD_INVALID_ARGUMENT, "cannot read %s: %s", o->data,
				    strerror(-rc));
	if (t->text.n <= o->context || t->text.vocab < 2)
		return trainer_fail(
			t, SHARDD_INVALID_ARGUMENT,
			"%s is too small: %zu bytes, %u different; needed are more than --context "
			"%" PRIu64 ", and 2",
			o->data, t->text.n, t->text.vocab, o->context);
	return 0;
}

static void watch_signals(void)
{
	/* The second one kills: it may be that the others will never come. */
	struct sigaction action = { .sa_handler = on_signal,
				    .sa_flags = SA_RESTART | SA_RESETHAND };

	sigaction(SIGINT, &action, NULL);
	sigaction(SIGTERM, &action, NULL);
}

int train_run(const struct train_options *options)
{
	struct trainer t = { .options = options, .may_die = options->kill_at > 0 };
	int rc = load(&t);

	if (rc >= 0)
		rc = shardd_connect(NULL, &t.client, &t.err);
	if (rc >= 0) {
		watch_signals();
		rc = train(&t);
	}
	if (rc < 0)
		fprintf(stderr, "charlm: %s: %s\n", shardd_code_name(rc), t.err.text);
	shardd_close(t.client);
	trainer_deinit(&t);
	if (rc >= 0 && t.unfinished)
		return TRAIN_UNFINISHED;
	return rc < 0 ? 1 : 0;
}
