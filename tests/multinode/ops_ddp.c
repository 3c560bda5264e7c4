/* DDP: in buckets, with a sparse tensor, and one that only some ranks use. */
#include "ops.h"

static void ops_ddp_pass(shardd_ddp d, uint64_t buffer)
{
	struct shardd_ddp_view views[TENSORS];
	uint8_t untouched[TENSORS];
	int64_t rows[3];
	uint32_t dense = 0, last = 2;
	bool uses = ops.me.rank % 2 == ops.step % 2;

	OK(shardd_ddp_forward(ops.client, d, views, TENSORS, &ops.err));
	ops_fill(views[0].data, views[0].elements, 3);
	ops_fill(views[2].data, views[2].elements, 4);
	OK(shardd_ddp_backward(ops.client, d, &last, !uses, NULL, 0, &ops.err));
	if (uses)
		OK(shardd_ddp_ready(ops.client, d, &last, 1, &ops.err));
	OK(shardd_ddp_ready_rows(ops.client, d, 1, rows, ops_rows_of(rows), buffer, 0, &ops.err));
	OK(shardd_ddp_ready(ops.client, d, &dense, 1, &ops.err));
	OK(shardd_ddp_finish(ops.client, d, untouched, TENSORS, &ops.err));
	ops_say("ddp untouched", untouched, sizeof(untouched));
	ops_show("ddp view", views[0].data, views[0].elements * sizeof(float));
}

/* Each rank has as many passes as its number says, also none: on each node there is once the first rank that
 * has no more. */
static void ops_ddp_uneven(shardd_ddp d, uint64_t buffer, const struct shardd_unit_info *u)
{
	static const unsigned passes[2][4] = { { 1, 0, 3, 2 }, { 2, 3, 0, 1 } };

	for (unsigned k = 0; k < 2; k++) {
		uint64_t surrogates;
		uint32_t last;

		for (unsigned i = 0; i < passes[k][ops.me.rank % 4]; i++) {
			ops_ddp_pass(d, buffer);
			OK(shardd_step(ops.client, SHARDD_WORLD, NULL, &ops.err));
		}
		OK(shardd_join_uneven(ops.client, SHARDD_WORLD, false, &last, &surrogates,
				      &ops.err));
		ops_say("last", &last, sizeof(last));
		ops_say("surrogates", &surrogates, sizeof(surrogates));
		ops_commit();
		ops_look("uneven", u);
	}
}

/* The hooks that compress: sums in BF16 and FP16. */
static void ops_ddp_compressed(enum shardd_dtype dtype, const char *name)
{
	struct shardd_unit_info u =
		ops_make(name, (struct shardd_unit_spec){ .strategy = SHARDD_REPLICATE,
							  .reduce_profile = SHARDD_PROFILE_DDP_HOOK,
							  .reduce_dtype = dtype,
							  .optimizer = ops_sgd });
	struct shardd_ddp_view views[TENSORS];
	static const uint32_t all[TENSORS] = { 0, 1, 2 };
	shardd_ddp d;

	OK(shardd_ddp_create(ops.client,
			     SHARDD_OPTIONS(ddp_create, .units = &u.unit, .n_units = 1,
					    .bucket_bytes = 200),
			     &d, NULL, &ops.err));
	for (unsigned i = 0; i < STEPS; i++) {
		OK(shardd_ddp_forward(ops.client, d, views, TENSORS, &ops.err));
		for (unsigned t = 0; t < TENSORS; t++)
			ops_fill(views[t].data, views[t].elements, t);
		OK(shardd_ddp_backward(ops.client, d, NULL, 0, NULL, 0, &ops.err));
		OK(shardd_ddp_ready(ops.client, d, all, TENSORS, &ops.err));
		OK(shardd_ddp_finish(ops.client, d, NULL, 0, &ops.err));
		ops_end_step(name, &u);
	}
}

void ops_ddp(void)
{
	struct shardd_unit_info u =
		ops_make("ddp", (struct shardd_unit_spec){ .strategy = SHARDD_REPLICATE,
							   .reduce_profile = SHARDD_PROFILE_DDP,
							   .optimizer = ops_sgd });
	const struct shardd_ddp_tensor sparse = { u.unit, 1 };
	const struct shardd_ddp_create_options o = { .size = sizeof(o),
						     .group = SHARDD_WORLD,
						     .units = &u.unit,
						     .n_units = 1,
						     .sparse = &sparse,
						     .n_sparse = 1,
						     .bucket_bytes = 64,
						     .find_unused = true };
	shardd_ddp d;
	uint64_t buffer;
	void *values;

	buffer = ops_buffer(4096, &values);
	OK(shardd_ddp_create(ops.client, &o, &d, NULL, &ops.err));
	for (unsigned i = 0; i < STEPS; i++) {
		ops_ddp_pass(d, buffer);
		ops_end_step("ddp", &u);
	}
	ops_ddp_uneven(d, buffer, &u);
	OK(shardd_free(ops.client, buffer, &ops.err));
	ops_ddp_compressed(SHARDD_BF16, "ddp in bf16");
	ops_ddp_compressed(SHARDD_FP16, "ddp in fp16");
}
