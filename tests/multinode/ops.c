/*
 * A rank that runs all ops, also those that a training with units alone does not need. Its arguments name
 * parts of the program; without any it runs those that need no certain shape.
 */
#include "ops.h"

#include <inttypes.h>
#include <string.h>

struct ops ops;

const struct shardd_optimizer ops_sgd = { .kind = SHARDD_SGD, .lr = 0.5 };

/* FNV-1a */
void ops_say(const char *what, const void *data, size_t bytes)
{
	const unsigned char *p = data;
	uint64_t hash = UINT64_C(14695981039346656037);

	for (size_t i = 0; i < bytes; i++)
		hash = (hash ^ p[i]) * UINT64_C(1099511628211);
	printf("%s %" PRIu64 " %016" PRIx64 "\n", what, ops.step, hash);
}

void ops_show(const char *what, const void *memory, size_t bytes)
{
	void *copy = malloc(bytes + 1);

	if (!copy)
		abort();
	OK(shardd_read(ops.client, copy, memory, bytes, &ops.err));
	ops_say(what, copy, bytes);
	free(copy);
}

float ops_number(uint64_t i, uint64_t salt)
{
	return (float)((i * 5 + salt * 3 + ops.me.rank * 7 + ops.step) % 16) / 4 - 2;
}

void ops_fill(void *memory, uint64_t n, uint64_t salt)
{
	float *values = calloc(n + 1, sizeof(*values));

	if (!values)
		abort();
	for (uint64_t i = 0; i < n; i++)
		values[i] = ops_number(i, salt);
	OK(shardd_write(ops.client, memory, values, n * sizeof(*values), &ops.err));
	free(values);
}

void ops_fill_bf16(void *memory, uint64_t n, uint64_t salt)
{
	uint16_t *values = calloc(n + 1, sizeof(*values));

	if (!values)
		abort();
	for (uint64_t i = 0; i < n; i++) {
		float value = ops_number(i, salt);
		uint32_t bits;

		memcpy(&bits, &value, sizeof(bits));
		values[i] = (uint16_t)(bits >> 16);
	}
	OK(shardd_write(ops.client, memory, values, n * sizeof(*values), &ops.err));
	free(values);
}

struct shardd_unit_info ops_register(const char *name, struct shardd_unit_spec spec)
{
	static const uint64_t rows[] = { ROWS, WIDTH }, dense[] = { DENSE };
	const struct shardd_tensor tensors[TENSORS] = {
		{ .name = "dense", .shape = dense, .dims = 1, .init = SHARDD_INIT_UNIFORM, .b = 1 },
		{ .name = "rows", .shape = rows, .dims = 2, .init = SHARDD_INIT_NORMAL, .b = 1 },
		{ .name = "last", .shape = dense, .dims = 1 },
	};
	struct shardd_unit_info u;

	spec.size = sizeof(spec);
	spec.name = name;
	spec.tensors = tensors;
	spec.n_tensors = TENSORS;
	OK(shardd_register(ops.client, &spec, 1, &u, &ops.err));
	return u;
}

struct shardd_unit_info ops_make_from(const char *name, struct shardd_unit_spec spec, uint32_t root)
{
	struct shardd_unit_info u = ops_register(name, spec);
	float values[ELEMENTS];
	const void *data = values;
	const uint64_t bytes = sizeof(values);

	for (uint64_t i = 0; i < ELEMENTS; i++)
		values[i] = ops_number(i, 1);
	OK(shardd_init_broadcast_all(ops.client, &u.unit, &bytes, 1, root,
				     ops.me.rank == root ? &data : NULL, &ops.err));
	return u;
}

struct shardd_unit_info ops_make(const char *name, struct shardd_unit_spec spec)
{
	return ops_make_from(name, spec, 0);
}

void ops_show_tensors(const char *what, const struct shardd_unit_info *u, const void *memory,
		      size_t size)
{
	struct shardd_tensor_place places[TENSORS];
	char copy[ELEMENTS * sizeof(float)];
	size_t at = 0;

	OK(shardd_tensor_places(ops.client, u->unit, places, TENSORS, &ops.err));
	for (unsigned i = 0; i < TENSORS; i++) {
		OK(shardd_read(ops.client, copy + at,
			       (const char *)memory + places[i].offset * size,
			       places[i].elements * size, &ops.err));
		at += places[i].elements * size;
	}
	ops_say(what, copy, at);
}

void ops_look_as(const char *what, const struct shardd_unit_info *u, size_t size)
{
	const void *full;

	OK(shardd_gather(ops.client, u->unit, &full, &ops.err));
	ops_show_tensors(what, u, full, size);
	OK(shardd_release(ops.client, u->unit, &ops.err));
}

void ops_look(const char *what, const struct shardd_unit_info *u)
{
	ops_look_as(what, u, sizeof(float));
}

void ops_fill_tensors(const struct shardd_unit_info *u, void *memory, enum shardd_dtype dtype)
{
	struct shardd_tensor_place places[TENSORS];

	OK(shardd_tensor_places(ops.client, u->unit, places, TENSORS, &ops.err));
	for (unsigned i = 0; i < TENSORS; i++)
		if (dtype == SHARDD_BF16)
			ops_fill_bf16((uint16_t *)memory + places[i].offset, places[i].elements, i);
		else
			ops_fill((float *)memory + places[i].offset, places[i].elements, i);
}

void ops_fill_gradient(const struct shardd_unit_info *u)
{
	void *gradient;

	OK(shardd_gradient(ops.client, u->unit, &gradient, &ops.err));
	ops_fill_tensors(u, gradient, SHARDD_FP32);
}

void ops_reduce(const struct shardd_unit_info *u)
{
	ops_fill_gradient(u);
	OK(shardd_reduce(ops.client, u->unit, &ops.err));
}

void ops_commit(void)
{
	OK(shardd_commit(ops.client, ++ops.step, NULL, 0, &ops.err));
}

void ops_end_step(const char *what, const struct shardd_unit_info *u)
{
	OK(shardd_step(ops.client, SHARDD_WORLD, NULL, &ops.err));
	ops_commit();
	ops_look(what, u);
}

uint64_t ops_buffer(uint64_t bytes, void **ret_values)
{
	uint64_t buffer;

	OK(shardd_alloc(ops.client, bytes, &buffer, ret_values, &ops.err));
	ops_fill(*ret_values, bytes / sizeof(float), 5);
	return buffer;
}

size_t ops_rows_of(int64_t *rows)
{
	size_t n = (ops.me.rank + ops.step) % 3;

	for (size_t i = 0; i < n; i++)
		rows[i] = (int64_t)((i + ops.me.rank) % ROWS);
	return n;
}

static const struct ops_part {
	const char *name;
	void (*run)(void);
	bool asked; /* only if an argument names it */
} parts[] = {
	{ .name = "ddp", .run = ops_ddp },
	{ .name = "readers", .run = ops_readers },
	{ .name = "own", .run = ops_own },
	{ .name = "sparse", .run = ops_sparse },
	{ .name = "gradients", .run = ops_gradients },
	{ .name = "clips", .run = ops_clips },
	{ .name = "plans", .run = ops_plans },
	{ .name = "replicas", .run = ops_replicas },
	{ .name = "types", .run = ops_types },
	{ .name = "buffers", .run = ops_buffers },
	{ .name = "passes", .run = ops_passes },
	{ .name = "units", .run = ops_units },
	{ .name = "converts", .run = ops_converts },
	{ .name = "groups", .run = ops_groups },
	{ .name = "shards", .run = ops_shards, .asked = true }, /* as many ranks on all nodes */
	{ .name = "refused", .run = ops_refused, .asked = true },
};

static bool ops_is_asked(const struct ops_part *p, int argc, char **argv)
{
	for (int i = 1; i < argc; i++)
		if (strcmp(argv[i], p->name) == 0)
			return true;
	return argc == 1 && !p->asked;
}

int main(int argc, char **argv)
{
	struct shardd_job job = { .size = sizeof(job), .rank = SHARDD_RANK_FROM_ENV };
	struct shardd_info info = { .size = sizeof(info) };

	OK(shardd_connect(NULL, &ops.client, &ops.err));
	OK(shardd_join(ops.client, &job, &ops.me, &ops.err));
	OK(shardd_get_info(ops.client, &info, &ops.err));
	ops.on_gpu = strcmp(info.device.backend, "cuda") == 0;
	for (size_t i = 0; i < OPS_COUNT(parts); i++) {
		if (!ops_is_asked(&parts[i], argc, argv))
			continue;
		printf("part %s\n", parts[i].name);
		parts[i].run();
	}
	OK(shardd_leave(ops.client, &ops.err));
	shardd_close(ops.client);
	return 0;
}
