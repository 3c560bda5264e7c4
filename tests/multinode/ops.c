/*
 * A rank that uses the ops which training with units alone does not: DDP's with its sparse tensors, an
 * optimizer of its own, sparse gradients, shards, other layouts. It prints a hash of what it has read after
 * each. All numbers are multiples of small powers of two, so that sums are exact, in whatever order they are
 * made: the hashes are those of the same ranks on one node.
 */
#include <shardd/shardd.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define OK(call)                                                                                 \
	do {                                                                                     \
		int ok_ = (call);                                                                \
                                                                                                 \
		if (ok_ < 0) {                                                                   \
			fprintf(stderr, "%s: %s: %s\n", #call, shardd_code_name(ok_), err.text); \
			exit(1);                                                                 \
		}                                                                                \
	} while (0)

enum { ROWS = 12, WIDTH = 4, DENSE = 40, STEPS = 3, TENSORS = 3 };

static struct shardd_error err;
static shardd_client *client;
static struct shardd_membership me;
static uint64_t step;

/* FNV-1a */
static void say(const char *what, const void *data, size_t bytes)
{
	const unsigned char *p = data;
	uint64_t hash = UINT64_C(14695981039346656037);

	for (size_t i = 0; i < bytes; i++)
		hash = (hash ^ p[i]) * UINT64_C(1099511628211);
	printf("%s %" PRIu64 " %016" PRIx64 "\n", what, step, hash);
}

/* Of this rank, in this step. */
static float number(uint64_t i, uint64_t salt)
{
	return (float)((i * 5 + salt * 3 + me.rank * 7 + step) % 16) / 4 - 2;
}

static void fill(float *to, uint64_t n, uint64_t salt)
{
	for (uint64_t i = 0; i < n; i++)
		to[i] = number(i, salt);
}

static struct shardd_unit_info make(const char *name, struct shardd_unit_spec spec)
{
	static const uint64_t rows[] = { ROWS, WIDTH }, dense[] = { DENSE };
	const struct shardd_tensor tensors[TENSORS] = {
		{ .name = "dense", .shape = dense, .dims = 1 },
		{ .name = "rows", .shape = rows, .dims = 2 },
		{ .name = "last", .shape = dense, .dims = 1 },
	};
	struct shardd_unit_info u;
	float values[2 * DENSE + ROWS * WIDTH];
	const void *data = values;
	const uint64_t bytes = sizeof(values);

	spec.size = sizeof(spec);
	spec.name = name;
	spec.tensors = tensors;
	spec.n_tensors = TENSORS;
	OK(shardd_register(client, &spec, 1, &u, &err));
	fill(values, sizeof(values) / sizeof(*values), 1);
	OK(shardd_init_broadcast_all(client, &u.unit, &bytes, 1, 0, me.rank ? NULL : &data, &err));
	return u;
}

static void look(const char *what, const struct shardd_unit_info *u)
{
	const void *full;

	OK(shardd_gather(client, u->unit, &full, &err));
	say(what, full, u->elements * sizeof(float));
	OK(shardd_release(client, u->unit, &err));
}

static void end_step(const char *what, const struct shardd_unit_info *u)
{
	OK(shardd_step(client, SHARDD_WORLD, NULL, &err));
	OK(shardd_commit(client, ++step, NULL, 0, &err));
	look(what, u);
}

static void reduce(const struct shardd_unit_info *u)
{
	void *gradient;

	OK(shardd_gradient(client, u->unit, &gradient, &err));
	fill(gradient, u->gradient_elements, 2);
	OK(shardd_reduce(client, u->unit, &err));
}

static const struct shardd_optimizer sgd = { .kind = SHARDD_SGD, .lr = 0.5 };

/* Rows 0, 1... of this rank, as many as its number says. */
static size_t rows_of(int64_t *rows)
{
	size_t n = (me.rank + step) % 3;

	for (size_t i = 0; i < n; i++)
		rows[i] = (int64_t)((i + me.rank) % ROWS);
	return n;
}

/* -- DDP: in buckets, with a sparse tensor, and one that only some ranks use */

static void ddp_pass(shardd_ddp d, uint64_t buffer)
{
	struct shardd_ddp_view views[TENSORS];
	uint8_t untouched[TENSORS];
	int64_t rows[3];
	uint32_t dense = 0, last = 2;
	bool uses = me.rank % 2 == step % 2;

	OK(shardd_ddp_forward(client, d, views, TENSORS, &err));
	fill(views[0].data, views[0].elements, 3);
	fill(views[2].data, views[2].elements, 4);
	OK(shardd_ddp_backward(client, d, &last, !uses, NULL, 0, &err));
	if (uses)
		OK(shardd_ddp_ready(client, d, &last, 1, &err));
	OK(shardd_ddp_ready_rows(client, d, 1, rows, rows_of(rows), buffer, 0, &err));
	OK(shardd_ddp_ready(client, d, &dense, 1, &err));
	OK(shardd_ddp_finish(client, d, untouched, TENSORS, &err));
	say("ddp untouched", untouched, sizeof(untouched));
	say("ddp view", views[0].data, views[0].elements * sizeof(float));
}

/* Each rank has as many passes as its number says, also none: on each node there is once the first rank that
 * has no more. */
static void ddp_uneven(shardd_ddp d, uint64_t buffer, const struct shardd_unit_info *u)
{
	static const unsigned passes[2][4] = { { 1, 0, 3, 2 }, { 2, 3, 0, 1 } };

	for (unsigned k = 0; k < 2; k++) {
		uint64_t surrogates;
		uint32_t last;

		for (unsigned i = 0; i < passes[k][me.rank % 4]; i++) {
			ddp_pass(d, buffer);
			OK(shardd_step(client, SHARDD_WORLD, NULL, &err));
		}
		OK(shardd_join_uneven(client, SHARDD_WORLD, false, &last, &surrogates, &err));
		say("last", &last, sizeof(last));
		say("surrogates", &surrogates, sizeof(surrogates));
		OK(shardd_commit(client, ++step, NULL, 0, &err));
		look("uneven", u);
	}
}

static void ddp(void)
{
	struct shardd_unit_info u =
		make("ddp", (struct shardd_unit_spec){ .strategy = SHARDD_REPLICATE,
						       .reduce_profile = SHARDD_PROFILE_DDP,
						       .optimizer = sgd });
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

	OK(shardd_alloc(client, 4096, &buffer, &values, &err));
	fill(values, 3 * WIDTH, 5);
	OK(shardd_ddp_create(client, &o, &d, NULL, &err));
	for (unsigned i = 0; i < STEPS; i++) {
		ddp_pass(d, buffer);
		end_step("ddp", &u);
	}
	ddp_uneven(d, buffer, &u);
	OK(shardd_free(client, buffer, &err));
}

/* -- a session that reads: replicas are whole on each node, and those of the last commit */

static void read_along(void)
{
	shardd_client *other;
	shardd_reader *r;
	struct shardd_snapshot now;

	OK(shardd_connect(NULL, &other, &err));
	OK(shardd_reader_open(other, getenv("SHARDD_JOB"), &r, &err));
	OK(shardd_reader_hold(r, 0, 0, &now, &err));
	for (size_t i = 0; i < now.n_units; i++)
		for (size_t k = 0; k < now.units[i].n_tensors; k++)
			say("read", now.units[i].tensors[k].data,
			    now.units[i].tensors[k].elements * sizeof(float));
	OK(shardd_reader_release(r, &err));
	shardd_reader_close(r);
	shardd_close(other);
	OK(shardd_barrier(client, SHARDD_WORLD, &err)); /* before there are more units */
}

/* -- an optimizer of the trainers' own */

static void own(enum shardd_strategy strategy, const char *name)
{
	struct shardd_unit_info u =
		make(name,
		     (struct shardd_unit_spec){ .strategy = strategy,
						.optimizer = { .when = SHARDD_OPTIM_BY_TRAINER } });

	for (unsigned i = 0; i < STEPS; i++) {
		struct shardd_shard s;
		float *p;

		reduce(&u);
		OK(shardd_next_shard(client, SHARDD_WORLD, &s, &err));
		p = s.params;
		for (uint64_t k = 0; k < s.elements; k++)
			p[k] -= s.gradient[k] / 2;
		OK(shardd_shard_done(client, u.unit, &err));
		end_step(name, &u);
	}
}

/* -- sparse gradients, shards, other layouts */

static void sparse(const struct shardd_unit_info *u)
{
	int64_t rows[3];
	uint64_t buffer;
	void *values;

	OK(shardd_alloc(client, 4096, &buffer, &values, &err));
	for (unsigned i = 0; i < STEPS; i++) {
		fill(values, 3 * WIDTH, 6);
		OK(shardd_reduce_sparse(client, u->unit, 1, rows, rows_of(rows), buffer, 0, &err));
		end_step("sparse", u);
	}
	OK(shardd_free(client, buffer, &err));
}

static void convert(const struct shardd_unit_info *u)
{
	static const struct {
		enum shardd_layout layout;
		enum shardd_strategy strategy;
	} to[] = { { SHARDD_LAYOUT_DIM0, 0 },
		   { SHARDD_LAYOUT_FLAT, SHARDD_REPLICATE },
		   { SHARDD_LAYOUT_FLAT, SHARDD_SHARD } };

	for (size_t i = 0; i < sizeof(to) / sizeof(*to); i++) {
		const struct shardd_convert_options o = { .size = sizeof(o),
							  .units = &u->unit,
							  .n_units = 1,
							  .layout = to[i].layout,
							  .strategy = to[i].strategy };

		OK(shardd_convert(client, &o, &err));
		reduce(u);
		end_step("converted", u);
	}
}

/* -- shards that each rank writes by itself, where all nodes have as many ranks */

static void shards(void)
{
	static const uint64_t elements[4][TENSORS] = {
		{ 32, 0, 0 }, { 8, 24, 0 }, { 0, 24, 8 }, { 0, 0, 32 }
	};
	struct shardd_unit_info u = make("shards", (struct shardd_unit_spec){ .optimizer = sgd });
	uint64_t buffer;
	void *values;

	OK(shardd_alloc(client, 4096, &buffer, &values, &err));
	for (unsigned i = 0; i < 5; i++) {
		for (uint32_t t = 0; t < TENSORS; t++) {
			uint64_t n = elements[me.rank % 4][t];

			OK(shardd_copy_shard(client, u.unit, t, SHARDD_PARAMETERS, false, buffer, n,
					     &err));
			for (uint64_t k = 0; k < n; k++)
				((float *)values)[k] = ((float *)values)[k] / 2 + number(k, t);
			OK(shardd_copy_shard(client, u.unit, t, SHARDD_PARAMETERS, true, buffer, n,
					     &err));
		}
		OK(shardd_barrier(client, SHARDD_WORLD, &err)); /* before others gather it */
		look("written", &u);
		reduce(&u);
		end_step("written", &u);
		OK(shardd_barrier(client, SHARDD_WORLD, &err)); /* nobody has it gathered */
	}
	OK(shardd_free(client, buffer, &err));
}

int main(int argc, char **argv)
{
	struct shardd_job job = { .size = sizeof(job), .rank = SHARDD_RANK_FROM_ENV };
	struct shardd_unit_info u;

	OK(shardd_connect(NULL, &client, &err));
	OK(shardd_join(client, &job, &me, &err));
	if (argc > 1 && strcmp(argv[1], "shards") == 0) {
		shards();
		OK(shardd_leave(client, &err));
		shardd_close(client);
		return 0;
	}
	ddp();
	read_along();
	own(SHARDD_SHARD, "own");
	own(SHARDD_REPLICATE, "own replicated");
	u = make("plain", (struct shardd_unit_spec){ .optimizer = sgd });
	sparse(&u);
	convert(&u);
	OK(shardd_leave(client, &err));
	shardd_close(client);
	return 0;
}
