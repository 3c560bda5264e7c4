/* Groups of some of the ranks, and the collectives that need no unit. What nodes refuse together. */
#include "ops.h"

#include <string.h>

/* -- buffers of a group */

/* @root: a rank. Each rank's numbers are its own before each collective. */
static void ops_collectives(shardd_group g, uint32_t root)
{
	static const struct {
		enum shardd_reduce_op op;
		enum shardd_dtype dtype;
	} how[] = { { SHARDD_SUM, SHARDD_FP32 }, { SHARDD_AVG, SHARDD_FP32 },
		    { SHARDD_MAX, SHARDD_FP32 }, { SHARDD_MIN, SHARDD_FP32 },
		    { SHARDD_SUM, SHARDD_BF16 }, { SHARDD_MAX, SHARDD_BF16 } };
	enum { N = 256, COUNT = 100, AT = 64 };
	uint64_t buffer;
	void *values;

	buffer = ops_buffer(N * sizeof(float), &values);
	for (size_t i = 0; i < OPS_COUNT(how); i++) {
		if (how[i].dtype == SHARDD_BF16)
			ops_fill_bf16(values, 2 * N, i);
		else
			ops_fill(values, N, i);
		OK(shardd_all_reduce(ops.client, g, buffer, AT, COUNT, how[i].dtype, how[i].op,
				     &ops.err));
		ops_show("all-reduce", values, N * sizeof(float));
	}
	ops_fill(values, N, 9);
	OK(shardd_broadcast(ops.client, g, buffer, AT, COUNT, root, &ops.err));
	ops_show("broadcast", values, N * sizeof(float));
	OK(shardd_barrier(ops.client, g, &ops.err));
	OK(shardd_free(ops.client, buffer, &ops.err));
}

/* -- units of a group */

static void ops_group_unit(const char *group, const char *kind, uint32_t root,
			   struct shardd_unit_spec spec)
{
	struct shardd_unit_info u;
	char name[64];
	double norm;

	snprintf(name, sizeof(name), "%s %s", group, kind);
	spec.optimizer = ops_sgd;
	u = ops_make_from(name, spec, root);
	ops_look(name, &u);
	for (unsigned i = 0; i < 2; i++) {
		ops_reduce(&u);
		OK(shardd_clip_grad_norm(ops.client, spec.group, 4, 1, &norm, &ops.err));
		ops_say("norm", &norm, sizeof(norm));
		OK(shardd_step(ops.client, spec.group, NULL, &ops.err));
		ops_look(name, &u);
	}
}

/* Ops whose work goes from one rank, or node, to the next. */
static void ops_in_turn(shardd_group g, const char *group, const uint32_t *ranks)
{
	static const uint64_t shape[] = { 10 };
	static const struct shardd_buffer buffers[] = {
		{ .name = "mean", .shape = shape, .dims = 1 }
	};
	struct shardd_unit_spec spec = {
		.group = g, .optimizer = ops_sgd, .buffers = buffers, .n_buffers = 1
	};
	struct shardd_unit_info u;
	char name[64];
	int64_t rows[3];
	uint64_t buffer;
	void *values, *mine, *full;

	snprintf(name, sizeof(name), "%s in turn", group);
	u = ops_make_from(name, spec, ranks[2]);
	buffer = ops_buffer(4096, &values);
	OK(shardd_reduce_sparse(ops.client, u.unit, 1, rows, ops_rows_of(rows), buffer, 0,
				&ops.err));
	OK(shardd_step(ops.client, g, NULL, &ops.err));
	ops_look(name, &u);
	OK(shardd_unit_buffers(ops.client, u.unit, &mine, &ops.err));
	for (unsigned i = 0; i < 4; i++) {
		ops_fill(mine, 10, i);
		OK(shardd_broadcast_buffers(ops.client, i % 2 ? u.unit : 0, i % 2 ? 0 : g, ranks[i],
					    &ops.err));
		ops_show("buffers", mine, 40);
	}
	OK(shardd_init_own(ops.client, u.unit, buffer, &ops.err));
	OK(shardd_summon(ops.client, u.unit, &full, &ops.err));
	ops_show_tensors("summoned", &u, full, sizeof(float));
	ops_fill_tensors(&u, full, SHARDD_FP32);
	OK(shardd_return(ops.client, u.unit, true, &ops.err)); /* each rank's own shard */
	ops_look(name, &u);
	OK(shardd_free(ops.client, buffer, &ops.err));
}

static void ops_group(const char *name, const uint32_t *ranks, uint32_t n)
{
	bool member = false;
	shardd_group g;

	for (uint32_t i = 0; i < n; i++)
		member |= ranks[i] == ops.me.rank;
	if (!member)
		return;
	OK(shardd_group_create(ops.client, name, ranks, n, &g, &ops.err));
	ops_collectives(g, ranks[n - 1]);
	ops_group_unit(name, "shards", ranks[0], (struct shardd_unit_spec){ .group = g });
	ops_group_unit(name, "replicas", ranks[n - 1],
		       (struct shardd_unit_spec){ .group = g, .strategy = SHARDD_REPLICATE });
	if (n == 4)
		ops_group_unit(name, "hybrid", ranks[1],
			       (struct shardd_unit_spec){
				       .group = g, .strategy = SHARDD_HYBRID, .shard_ranks = 2 });
	if (n == 4)
		ops_in_turn(g, name, ranks);
	if (n == 4) /* ranks of others have units of their own */
		OK(shardd_verify_model(ops.client, g, &ops.err));
}

void ops_groups(void)
{
	static const struct {
		const char *name;
		uint32_t n, ranks[4];
	} groups[] = {
		{ "forth and back", 4, { 0, 2, 1, 3 } },
		{ "turned", 4, { 3, 2, 1, 0 } },
		{ "middle", 2, { 1, 2 } },
		{ "ends", 2, { 3, 0 } },
		{ "first", 2, { 0, 1 } },
		{ "last", 2, { 2, 3 } },
		{ "one", 1, { 2 } },
	};

	ops_collectives(SHARDD_WORLD, 3);
	for (size_t i = 0; i < OPS_COUNT(groups); i++)
		ops_group(groups[i].name, groups[i].ranks, groups[i].n);
	ops_commit();
}

/* -- what is not done over several nodes */

static void ops_expect_refusal(const char *what, int result)
{
	if (result >= 0)
		printf("%s: done\n", what);
	else
		printf("%s: %s: %s\n", what, shardd_code_name(result), ops.err.text);
}

void ops_refused(void)
{
	static const uint32_t pair[] = { 0, 3 };
	struct shardd_unit_info u =
		ops_make("refused", (struct shardd_unit_spec){ .optimizer = ops_sgd,
							       .strategy = SHARDD_REPLICATE });
	uint64_t buffer;
	shardd_group g;
	void *values;

	if (ops.me.rank == pair[0] || ops.me.rank == pair[1])
		OK(shardd_group_create(ops.client, "pair", pair, 2, &g, &ops.err));
	OK(shardd_barrier(ops.client, SHARDD_WORLD, &ops.err));
	ops_reduce(&u);
	ops_expect_refusal("whole job",
			   shardd_clip(ops.client,
				       SHARDD_OPTIONS(clip, .max_norm = 1, .whole_job = true), NULL,
				       &ops.err));
	ops_expect_refusal("divide by active", shardd_join_uneven(ops.client, SHARDD_WORLD, true,
								  NULL, NULL, &ops.err));
	ops_expect_refusal("require even", shardd_join_even(ops.client, SHARDD_WORLD, &ops.err));
	ops_end_step("refused", &u);
	buffer = ops_buffer(4096, &values);
	ops_expect_refusal("write a shard",
			   shardd_copy_shard(ops.client, u.unit, 0, SHARDD_PARAMETERS, true, buffer,
					     DENSE, &ops.err));
	OK(shardd_barrier(ops.client, SHARDD_WORLD, &ops.err));
	ops_look("refused", &u);
	OK(shardd_free(ops.client, buffer, &ops.err));
}
