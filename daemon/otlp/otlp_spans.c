#include "otlp/otlp_spans.h"

#include <errno.h>
#include <openssl/evp.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <unistd.h>

#include "core/check.h"
#include "core/text.h"
#include "job/job.h"
#include "job/span.h"
#include "op/op.h"

/* --------------------------------------------------------------------------------- ids */

/* A bijection that spreads: numbers in a row become ids that have nothing in common (splitmix64). */
static uint64_t otlp_spans_mix(uint64_t x)
{
	x += UINT64_C(0x9e3779b97f4a7c15);
	x = (x ^ x >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
	x = (x ^ x >> 27) * UINT64_C(0x94d049bb133111eb);
	x ^= x >> 31;
	return x ? x : 1; /* 0 is no id */
}

static uint64_t otlp_spans_new_id(struct otlp_spans *s)
{
	return otlp_spans_mix(s->seed - ++s->last_id);
}

static void otlp_spans_put_id(struct otlp_spans *s, uint8_t ret[8])
{
	const uint64_t id = otlp_spans_new_id(s);

	memcpy(ret, &id, sizeof(id));
}

static void otlp_spans_hash(EVP_MD_CTX *c, const void *data, size_t bytes)
{
	CHECK(EVP_DigestUpdate(c, data, bytes) == 1);
}

/* What all nodes of the job know of its step, in 32 bytes. If libcrypto has no memory they are this node's own: no
 * collector takes an id of zeros. */
static void otlp_spans_digest(struct otlp_spans *s, const struct job *job, uint64_t base,
			      uint64_t epoch, uint8_t ret[32])
{
	const uint64_t words[] = { job->rec->incarnation, job->rec->uid, epoch, base };
	EVP_MD_CTX *c = EVP_MD_CTX_new();

	for (unsigned i = 0; i < 4; i++)
		otlp_spans_put_id(s, ret + 8 * i);
	if (!c || EVP_DigestInit_ex(c, EVP_sha256(), NULL) != 1) {
		EVP_MD_CTX_free(c);
		return;
	}
	otlp_spans_hash(c, words, sizeof(words));
	otlp_spans_hash(c, job->rec->name, strlen(job->rec->name));
	if (!job->rec->incarnation) { /* of this node alone; it may have had one of that name before */
		otlp_spans_hash(c, job->node->instance, NODE_INSTANCE_BYTES);
		otlp_spans_hash(c, &job->number, sizeof(job->number));
	}
	CHECK(EVP_DigestFinal_ex(c, ret, NULL) == 1);
	EVP_MD_CTX_free(c);
}

/* The node of rank 0 has the root of the trace; the spans of other nodes' steps are below it. */
static void otlp_spans_set_ids(struct otlp_spans *s, const struct job *job, uint64_t base,
			       struct otlp_span *span)
{
	uint8_t digest[32];
	uint64_t root;

	otlp_spans_digest(s, job, base, span->epoch, digest);
	memcpy(span->trace, digest, OTLP_TRACE_BYTES);
	memcpy(&root, digest + OTLP_TRACE_BYTES, sizeof(root));
	root = otlp_spans_mix(root);
	if (span_is_here(job->across.span, 0)) {
		span->id = root;
		return;
	}
	span->parent = root;
	span->id = otlp_spans_new_id(s);
}

/* -------------------------------------------------------------------------------- places */

/* Return: NULL: there is none, and that is counted. */
static struct otlp_span *otlp_spans_place(struct otlp_spans *s)
{
	if (s->n_filling == OTLP_SPANS) {
		s->n_dropped++;
		return NULL;
	}
	if (s->n_filling >= OTLP_SPANS / 2)
		s->half_full(s->userdata);
	return &s->filling[s->n_filling++];
}

static void otlp_spans_add(struct otlp_spans *s, const struct otlp_span *span)
{
	struct otlp_span *to = otlp_spans_place(s);

	if (to)
		*to = *span;
}

/* --------------------------------------------------------------------------------- steps */

/* Does a number that @every divides lie in the step that began at @base? */
static bool otlp_spans_samples(const struct otlp_spans *s, uint64_t base, uint64_t stride)
{
	return (base + (stride ? stride : 1)) / s->every != base / s->every;
}

static void otlp_spans_end_step(struct otlp_spans *s, struct otlp_step *step)
{
	if (step->told)
		return;
	step->told = true;
	otlp_spans_add(s, &step->span);
}

/* The next place whose step is over. One that goes on keeps its place: if it began again, its trace would have two
 * roots. Return: NULL: there is none, and that is counted. */
static struct otlp_step *otlp_spans_step_place(struct otlp_spans *s)
{
	for (unsigned i = 0; i < OTLP_SPANS_STEPS; i++) {
		struct otlp_step *step = &s->steps[(s->next + i) % OTLP_SPANS_STEPS];

		if (step->job && !step->told && !step->committed)
			continue;
		s->next = (s->next + i + 1) % OTLP_SPANS_STEPS;
		if (step->job)
			otlp_spans_end_step(s, step);
		return step;
	}
	s->n_dropped++;
	return NULL;
}

/* Return: NULL: there is no place for it. */
static struct otlp_step *otlp_spans_begin_step(struct otlp_spans *s, const struct job *job,
					       uint64_t base, uint64_t epoch)
{
	struct otlp_step *step = otlp_spans_step_place(s);

	if (!step)
		return NULL;
	*step = (struct otlp_step){ .job = job->number, .base = base, .epoch = epoch };
	step->span = (struct otlp_span){ .kind = OTLP_SPAN_STEP,
					 .step = base + (job->ops.stride ? job->ops.stride : 1),
					 .epoch = epoch,
					 .uid = job->rec->uid,
					 .began_us = UINT64_MAX };
	text_copy(step->span.job, sizeof(step->span.job), job->rec->name);
	otlp_spans_set_ids(s, job, base, &step->span);
	return step;
}

static struct otlp_step *otlp_spans_find_base(struct otlp_spans *s, const struct job *job,
					      uint64_t base, uint64_t epoch)
{
	for (unsigned i = 0; i < OTLP_SPANS_STEPS; i++)
		if (s->steps[i].job == job->number && s->steps[i].base == base &&
		    s->steps[i].epoch == epoch)
			return &s->steps[i];
	return NULL;
}

/* The one that the job has committed as its present step, or is about to. */
static struct otlp_step *otlp_spans_find_committed(struct otlp_spans *s, const struct job *job,
						   uint64_t epoch)
{
	const uint64_t now = job->rec->step;

	for (unsigned i = 0; i < OTLP_SPANS_STEPS; i++) {
		struct otlp_step *step = &s->steps[i];

		if (step->job == job->number && step->epoch == epoch &&
		    (step->committed ? step->committed == now : step->base < now && !step->told))
			return step;
	}
	return NULL;
}

static struct otlp_step *otlp_spans_step_of(struct otlp_spans *s, const struct record *r,
					    const struct op *op)
{
	const struct job *job = op->m->job;
	struct otlp_step *step;

	if (strcmp(r->name, "Commit") == 0 && !*r->error) {
		step = otlp_spans_find_committed(s, job, r->epoch);
		if (step)
			step->span.step = step->committed = job->rec->step;
		if (step)
			step->span.committed = true;
		return step;
	}
	if (!otlp_spans_samples(s, job->rec->step, job->ops.stride))
		return NULL;
	step = otlp_spans_find_base(s, job, job->rec->step, r->epoch);
	return step ? step : otlp_spans_begin_step(s, job, job->rec->step, r->epoch);
}

static const struct job *otlp_spans_find_job(const struct otlp_spans *s, uint32_t number)
{
	struct job *job, *tmp;

	list_for_each (job, tmp, &s->jobs->all, link)
		if (job->number == number)
			return job;
	return NULL;
}

static bool otlp_spans_is_over(const struct otlp_spans *s, const struct otlp_step *step)
{
	const struct job *job = otlp_spans_find_job(s, step->job);

	return !job || job->rec->step != step->base || job->rec->epoch != step->epoch;
}

void otlp_spans_end_steps(struct otlp_spans *s, bool all)
{
	for (unsigned i = 0; i < OTLP_SPANS_STEPS; i++) {
		struct otlp_step *step = &s->steps[i];

		if (step->job && !step->told && (all || otlp_spans_is_over(s, step)))
			otlp_spans_end_step(s, step);
	}
}

/* ----------------------------------------------------------------------- what has ended */

/* The recorder shows these to their owner alone. */
static bool otlp_spans_is_hidden(const struct job *job)
{
	return job->rec->is_private && job->rec->uid != geteuid();
}

static void otlp_spans_fill_op(struct otlp_span *to, const struct record *r, const struct op *op)
{
	to->active_us = r->active_us;
	to->started_us = r->started_us;
	to->began_us = r->announced_us;
	to->ended_us = r->finished_us;
	to->number = r->number;
	to->bytes = r->bytes;
	to->rank = r->rank;
	to->last_rank = op->recorded.last_rank;
	to->pid = r->pid;
	to->name = r->name;
	text_copy(to->unit, sizeof(to->unit), r->unit);
	text_copy(to->group, sizeof(to->group), r->group);
	text_copy(to->error, sizeof(to->error), r->error);
}

/* What it has of its step. */
static void otlp_spans_below(struct otlp_span *to, const struct otlp_step *step, uint64_t id)
{
	*to = (struct otlp_span){ .kind = OTLP_SPAN_OP,
				  .id = id,
				  .parent = step->span.id,
				  .step = step->span.step,
				  .epoch = step->span.epoch,
				  .uid = step->span.uid };
	memcpy(to->trace, step->span.trace, OTLP_TRACE_BYTES);
	text_copy(to->job, sizeof(to->job), step->span.job);
}

static void otlp_spans_widen(struct otlp_span *span, uint64_t began_us, uint64_t ended_us)
{
	if (began_us < span->began_us)
		span->began_us = began_us;
	if (ended_us > span->ended_us)
		span->ended_us = ended_us;
}

static void otlp_spans_on_op(const struct record *r, const struct op *op, void *userdata)
{
	struct otlp_spans *s = userdata;
	struct otlp_step *step;
	struct otlp_span *to;

	if (otlp_spans_is_hidden(op->m->job))
		return;
	step = otlp_spans_step_of(s, r, op);
	if (!step)
		return;
	step->span.ops++;
	step->span.failed += *r->error != '\0';
	otlp_spans_widen(&step->span, r->announced_us, r->finished_us);
	to = otlp_spans_place(s);
	if (!to)
		return;
	otlp_spans_below(to, step, otlp_spans_mix(s->seed + r->head.id));
	otlp_spans_fill_op(to, r, op);
}

/* Its step is over as a rule, and perhaps told: the checkpoint goes on beside the next ones. */
static void otlp_spans_on_checkpoint(const struct job *job, const struct recorder_checkpoint *c,
				     void *userdata)
{
	struct otlp_spans *s = userdata;
	struct otlp_span span;

	if (otlp_spans_is_hidden(job))
		return;
	for (unsigned i = 0; i < OTLP_SPANS_STEPS; i++) {
		if (s->steps[i].job != job->number || !c->step || s->steps[i].committed != c->step)
			continue;
		otlp_spans_below(&span, &s->steps[i], otlp_spans_new_id(s));
		span.kind = OTLP_SPAN_CHECKPOINT;
		span.name = "Checkpoint";
		span.began_us = c->began_us;
		span.ended_us = c->ended_us;
		span.bytes = c->bytes;
		text_copy(span.error, sizeof(span.error), c->error);
		otlp_spans_add(s, &span);
		return;
	}
}

/* ----------------------------------------------------------------------------------- life */

int otlp_spans_init(struct otlp_spans *s, const struct jobs *jobs,
		    void (*half_full)(void *userdata), void *userdata)
{
	*s = (struct otlp_spans){ .jobs = jobs, .half_full = half_full, .userdata = userdata };
	if (getrandom(&s->seed, sizeof(s->seed), 0) != sizeof(s->seed))
		return -errno;
	s->filling = calloc(OTLP_SPANS, sizeof(*s->filling));
	s->taken = calloc(OTLP_SPANS, sizeof(*s->taken));
	return s->filling && s->taken ? 0 : -ENOMEM;
}

void otlp_spans_deinit(struct otlp_spans *s)
{
	if (recorder.sink.userdata == s)
		recorder.sink = (struct recorder_sink){ 0 };
	free(s->filling);
	free(s->taken);
	s->filling = s->taken = NULL;
}

void otlp_spans_sample(struct otlp_spans *s, uint32_t every)
{
	s->every = every;
	recorder.sink = every ? (struct recorder_sink){ .op = otlp_spans_on_op,
							.checkpoint = otlp_spans_on_checkpoint,
							.userdata = s }
			      : (struct recorder_sink){ 0 };
}

size_t otlp_spans_take(struct otlp_spans *s)
{
	CHECK(s->n_taken == 0);
	s->n_taken = s->n_filling;
	s->n_filling = 0;
	struct otlp_span *full = s->filling;

	s->filling = s->taken;
	s->taken = full;
	return s->n_taken;
}
