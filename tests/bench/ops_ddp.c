/* DistributedDataParallel: one unit, one tensor, one bucket. */
#include "bench.h"

#define RANKS  4
#define REPEAT 20

static void replicate(struct trainer *t, struct shardd_unit_spec *spec, struct shardd_tensor *w)
{
	(void)t;
	(void)w;
	spec->strategy = SHARDD_REPLICATE;
	spec->reduce_profile = SHARDD_PROFILE_DDP;
}

static int create(struct trainer *t, struct shardd_error *err)
{
	const struct shardd_ddp_create_options spec = { .size = sizeof(spec),
							.units = &t->unit,
							.n_units = 1 };

	return shardd_ddp_create(t->client, &spec, &t->ddp, NULL, err);
}

static void create_once(struct trainer *t)
{
	struct shardd_error err;

	trainer_must(t, create(t, &err), &err, "ddp_create");
}

static int forward(struct trainer *t, struct shardd_error *err)
{
	struct shardd_ddp_view view;
	int rc = shardd_ddp_forward(t->client, t->ddp, &view, 1, err);

	t->data = view.data;
	return rc;
}

static void forward_before(struct trainer *t)
{
	struct shardd_error err;

	trainer_must(t, forward(t, &err), &err, "ddp_forward");
	trainer_fill(t, t->data, t->crew->elements, t->crew->dtype);
}

static int backward(struct trainer *t, shardd_ticket *ticket, struct shardd_error *err)
{
	return shardd_submit_ddp_backward(t->client,
					  SHARDD_OPTIONS(ddp_backward, .ddp = t->ddp,
							 .unused = NULL, .n_unused = 0,
							 .kept = NULL, .n_kept = 0),
					  ticket, err);
}

static void backward_before(struct trainer *t)
{
	struct shardd_error err;

	forward_before(t);
	trainer_must(t, shardd_ddp_backward(t->client, t->ddp, NULL, 0, NULL, 0, &err), &err,
		     "ddp_backward");
}

static int ready(struct trainer *t, shardd_ticket *ticket, struct shardd_error *err)
{
	static const uint32_t first = 0;

	return shardd_submit_ddp_ready(t->client,
				       SHARDD_OPTIONS(ddp_ready, .ddp = t->ddp, .tensors = &first,
						      .n_tensors = 1),
				       ticket, err);
}

static void finish_after(struct trainer *t)
{
	struct shardd_error err;

	trainer_must(t, shardd_ddp_finish(t->client, t->ddp, NULL, 0, &err), &err, "ddp_finish");
	trainer_step(t, ++t->step);
}

static void ready_after(struct trainer *t)
{
	static const uint32_t first = 0;
	struct shardd_error err;

	trainer_must(t, shardd_ddp_ready(t->client, t->ddp, &first, 1, &err), &err, "ddp_ready");
	finish_after(t);
}

static void pass_after(struct trainer *t)
{
	struct shardd_error err;

	trainer_fill(t, t->data, t->crew->elements, t->crew->dtype);
	trainer_must(t, shardd_ddp_backward(t->client, t->ddp, NULL, 0, NULL, 0, &err), &err,
		     "ddp_backward");
	ready_after(t);
}

/* From the mark on: the bucket is reduced as soon as it has them all. */
static int finish(struct trainer *t, struct shardd_error *err)
{
	static const uint32_t first = 0;
	int rc = shardd_ddp_ready(t->client, t->ddp, &first, 1, err);

	return rc < 0 ? rc : shardd_ddp_finish(t->client, t->ddp, NULL, 0, err);
}

static void step_after(struct trainer *t)
{
	trainer_step(t, ++t->step);
}

#define DDP .adapt = replicate, .optimizer = SHARDD_SGD, .collective = true
static const struct op_case op_create = { .call = create, DDP },
			    op_forward = { .prepare = create_once,
					   .call = forward,
					   .after = pass_after,
					   DDP },
			    op_backward = { .prepare = create_once,
					    .before = forward_before,
					    .submit = backward,
					    .after = ready_after,
					    DDP },
			    op_ready = { .prepare = create_once,
					 .before = backward_before,
					 .submit = ready,
					 .after = finish_after,
					 DDP },
			    op_finish = { .prepare = create_once,
					  .before = backward_before,
					  .call = finish,
					  .after = step_after,
					  DDP };

const struct bench_case ddp_cases[] = {
	{ "ddp_create", "DdpCreate", "of one unit", RANKS, REPEAT, case_op, &op_create },
	{ "ddp_forward", "DdpForward", "where the gradients are", RANKS, REPEAT, case_op,
	  &op_forward },
	{ "ddp_backward", "DdpBackward", "the begin of a pass that reduces", RANKS, REPEAT, case_op,
	  &op_backward },
	{ "ddp_ready", "DdpReady", "the mark alone", RANKS, REPEAT, case_op, &op_ready },
	{ "ddp_finish", "DdpReady DdpBucket DdpFinish", "from the mark to averaged gradients",
	  RANKS, REPEAT, case_op, &op_finish },
	{ .name = NULL },
};
