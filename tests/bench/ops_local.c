/* Ops that one rank's call is enough for, measured while all ranks call at once. */
#include "bench.h"

#define RANKS  4
#define REPEAT 100
#define FEW    20 /* turns where much memory is written */

static void guard(struct trainer *t, struct shardd_unit_spec *spec, struct shardd_tensor *w)
{
	(void)t;
	(void)w;
	spec->guarded = true;
}

static void step_on(struct trainer *t)
{
	trainer_reduce(t);
	trainer_step(t, ++t->step);
}

static void gather_before(struct trainer *t)
{
	trainer_gather(t);
}

static int release(struct trainer *t, shardd_ticket *ticket, struct shardd_error *err)
{
	return shardd_submit_release(t->client, SHARDD_OPTIONS(release, .unit = t->unit), ticket,
				     err);
}

static int gradient(struct trainer *t, shardd_ticket *ticket, struct shardd_error *err)
{
	return shardd_submit_gradient(t->client, SHARDD_OPTIONS(gradient, .unit = t->unit), ticket,
				      err);
}

/* The reduce takes the buffer, so that the next turn asks for a new one. */
static void reduce_after(struct trainer *t)
{
	trainer_gradient(t);
	step_on(t);
}

static int accumulate(struct trainer *t, shardd_ticket *ticket, struct shardd_error *err)
{
	return shardd_submit_accumulate(t->client, SHARDD_OPTIONS(accumulate, .unit = t->unit),
					ticket, err);
}

static int alloc(struct trainer *t, shardd_ticket *ticket, struct shardd_error *err)
{
	return shardd_submit_alloc(t->client, SHARDD_OPTIONS(alloc, .bytes = t->crew->elements * 4),
				   ticket, err);
}

static void free_after(struct trainer *t)
{
	struct shardd_error err;

	trainer_must(t, shardd_free(t->client, t->buffer, &err), &err, "free");
}

static void alloc_before(struct trainer *t)
{
	struct shardd_error err;

	trainer_must(t, shardd_alloc(t->client, t->crew->elements * 4, &t->buffer, &t->data, &err),
		     &err, "alloc");
}

static int give_back(struct trainer *t, shardd_ticket *ticket, struct shardd_error *err)
{
	return shardd_submit_free(t->client, SHARDD_OPTIONS(free, .buffer = t->buffer), ticket,
				  err);
}

static int begin_pass(struct trainer *t, shardd_ticket *ticket, struct shardd_error *err)
{
	return shardd_submit_begin_pass(
		t->client, SHARDD_OPTIONS(begin_pass, .unit = t->unit, .pass = SHARDD_FORWARD),
		ticket, err);
}

static int end_pass(struct trainer *t, shardd_ticket *ticket, struct shardd_error *err)
{
	return shardd_submit_end_pass(t->client,
				      SHARDD_OPTIONS(end_pass, .unit = t->unit,
						     .pass = SHARDD_FORWARD, .sync = true),
				      ticket, err);
}

static void begin_before(struct trainer *t)
{
	struct shardd_error err;
	const void *data;

	trainer_must(t, shardd_begin_pass(t->client, t->unit, SHARDD_FORWARD, &data, &err), &err,
		     "begin_pass");
}

static void end_after(struct trainer *t)
{
	struct shardd_error err;

	trainer_must(t, shardd_end_pass(t->client, t->unit, SHARDD_FORWARD, true, &err), &err,
		     "end_pass");
}

static int set_reshard(struct trainer *t, shardd_ticket *ticket, struct shardd_error *err)
{
	return shardd_submit_set_reshard(t->client,
					 SHARDD_OPTIONS(set_reshard, .units = &t->unit,
							.n_units = 1,
							.reshard = SHARDD_RESHARD_AFTER_BACKWARD),
					 ticket, err);
}

static int set_prefetch(struct trainer *t, shardd_ticket *ticket, struct shardd_error *err)
{
	return shardd_submit_set_prefetch(t->client,
					  SHARDD_OPTIONS(set_prefetch, .unit = t->unit,
							 .pass = SHARDD_FORWARD, .units = &t->unit,
							 .n_units = 1),
					  ticket, err);
}

static void with_buffers(struct trainer *t, struct shardd_unit_spec *spec, struct shardd_tensor *w)
{
	static const struct shardd_buffer buffer = { .name = "mean", .dims = 0 };

	(void)t;
	(void)w;
	spec->buffers = &buffer;
	spec->n_buffers = 1;
}

static int unit_buffers(struct trainer *t, shardd_ticket *ticket, struct shardd_error *err)
{
	return shardd_submit_unit_buffers(t->client, SHARDD_OPTIONS(unit_buffers, .unit = t->unit),
					  ticket, err);
}

static const struct op_case
	op_release = { .before = gather_before, .submit = release },
	op_gradient = { .submit = gradient, .after = reduce_after, .optimizer = SHARDD_SGD },
	/* reads the buffer and the sum, writes the sum */
	op_accumulate = { .before = trainer_gradient,
			  .submit = accumulate,
			  .collective = true,
			  .each = 3,
			  .limit = LIMIT_TRIAD },
	op_alloc = { .submit = alloc, .after = free_after },
	op_free = { .before = alloc_before, .submit = give_back },
	op_begin_pass = { .adapt = guard, .submit = begin_pass, .after = end_after },
	op_end_pass = { .adapt = guard, .before = begin_before, .submit = end_pass },
	op_set_reshard = { .adapt = guard, .submit = set_reshard },
	op_set_prefetch = { .adapt = guard, .submit = set_prefetch },
	op_unit_buffers = { .adapt = with_buffers, .submit = unit_buffers };

const struct bench_case local_cases[] = {
	{ "release", "Release", "the last reference", RANKS, REPEAT, case_op, &op_release },
	{ "gradient", "GradientBuffer", "a buffer for gradients", RANKS, FEW, case_op,
	  &op_gradient },
	{ "accumulate", "Accumulate", "gradients added up before a reduce", RANKS, FEW, case_op,
	  &op_accumulate },
	{ "alloc", "AllocBuffer", "a buffer of the session's own", RANKS, REPEAT, case_op,
	  &op_alloc },
	{ "free", "FreeBuffer", "giving it back", RANKS, REPEAT, case_op, &op_free },
	{ "begin_pass", "BeginPass", "of a guarded unit", RANKS, REPEAT, case_op, &op_begin_pass },
	{ "end_pass", "EndPass", "of a guarded unit", RANKS, REPEAT, case_op, &op_end_pass },
	{ "set_reshard", "SetReshard", "of one unit", RANKS, REPEAT, case_op, &op_set_reshard },
	{ "set_prefetch", "SetPrefetch", "of one unit", RANKS, REPEAT, case_op, &op_set_prefetch },
	{ "unit_buffers", "UnitBuffers", "a rank's own buffers of a unit", RANKS, REPEAT, case_op,
	  &op_unit_buffers },
	{ .name = NULL },
};
