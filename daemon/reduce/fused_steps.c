#include "reduce/fused_steps.h"

#include <errno.h>
#include <stdlib.h>

#include "core/check.h"
#include "op/op.h"
#include "step.h"
#include "step/apply.h"
#include "step/backward.h"
#include "unit/optim.h"
#include "unit/runs.h"
#include "work/coll.h"

/* The steps of a part cut its spans into at most so many launches. */
static size_t fused_steps_most(const struct coll *c)
{
	size_t most = 0;

	for (unsigned d = 0; d < c->n_parts; d++) {
		size_t n = optim_step_launches(c->unit, &c->unit->parts[d],
					       backward_rates(c->job, c->unit), NULL);

		most = n > most ? n : most;
	}
	return most;
}

int fused_steps_init(struct fused_steps *s, const struct coll *c)
{
	size_t most = fused_steps_most(c);

	fused_steps_deinit(s);
	s->launches = calloc(most ? most : 1, sizeof(*s->launches));
	s->room = (unsigned)most;
	return s->launches ? 0 : -ENOMEM;
}

void fused_steps_deinit(struct fused_steps *s)
{
	free(s->launches);
	*s = (struct fused_steps){ 0 };
}

bool fused_steps_in_time(const struct coll *c)
{
	return c->ops[0]->m->epoch == c->job->rec->epoch;
}

bool fused_steps_begin(struct fused_steps *s, struct coll *c, unsigned d)
{
	if (gradient_of(c)->fused == FUSED_BEGUN && !fused_steps_in_time(c))
		return false;
	if (gradient_of(c)->fused == FUSED_BEGUN) {
		apply_mark(c->job);
		job_change_begin(c->job);
	}
	gradient_of(c)->fused = FUSED_STEPPED;
	s->n = (unsigned)optim_step_launches(c->unit, &c->unit->parts[d],
					     backward_rates(c->job, c->unit), s->launches);
	CHECK(s->n <= s->room); /* as many as were counted when it was planned */
	return true;
}

static struct k_step fused_steps_one(const struct launch *launch)
{
	struct k_step s = { 0 };

	if (launch->kind == LAUNCH_ADAMW) {
		s.kind = K_STEP_ADAMW;
		s.adamw = launch->adamw;
	} else if (launch->kind == LAUNCH_ADAM) {
		s.kind = K_STEP_ADAM;
		s.adam = launch->adam;
	} else {
		CHECK(launch->kind == LAUNCH_SGD);
		s.kind = K_STEP_SGD;
		s.sgd = launch->sgd;
	}
	return s;
}

static uint64_t fused_steps_at(const struct k_step *s, const struct unit_part *p)
{
	const float *first = s->kind == K_STEP_ADAMW  ? s->adamw.p
			     : s->kind == K_STEP_ADAM ? s->adam.p
						      : s->sgd.p;

	return (uint64_t)(first - optim_at(&p->params, 0));
}

/* A step may reach over several spans: what is between them stays as it is. */
void fused_steps_launch(const struct fused_steps *s, struct coll *c, unsigned d,
			const struct unit_run *span, const struct k_reduce *r)
{
	uint64_t span_end = span->at + span->n;

	for (unsigned i = 0; i < s->n; i++) {
		const struct k_step step = fused_steps_one(&s->launches[i]);
		uint64_t at = fused_steps_at(&step, &c->unit->parts[d]),
			 end = at + s->launches[i].n;
		uint64_t from = at > span->at ? at : span->at;

		end = end < span_end ? end : span_end;
		if (from >= end)
			continue;
		coll_launch(&c->parts[d], LAUNCH_REDUCE_STEP, end - from)->reduce_step =
			(struct k_reduce_step){ .reduce = *r,
						.first = from - span->at,
						.step = k_step_at(&step, from - at, NULL) };
	}
}
