/*
 * Each element of a generation is the one that its declaration says, of tensors whose elements all differ: on the
 * host, and on one or several GPUs that units are sharded over. What it has to be is computed here, element by
 * element.
 */
#include <criterion/criterion.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "convert.h"
#include "core/check.h"
#include "failfix.h"

static void test_published_values_begin(void)
{
	failfix_begin(NULL);
}

TestSuite(published_values, .init = test_published_values_begin, .fini = failfix_end,
	  .timeout = 120);

enum { WORLD = 4, UNITS = 2, TENSORS = 3, ROWS = 84, COLUMNS = 52, LONG = 40007, TILE = 16 };
enum { A, B, VECTOR }; /* tensors of each unit */

static const uint64_t a_shape[] = { ROWS, COLUMNS }, b_shape[] = { COLUMNS, ROWS },
		      v_shape[] = { LONG };

#define SUITE_RULES                                                                                \
	" {\"name\": \"joined.{i}\", \"type\": \"bf16\", \"sources\": ["                           \
	"   {\"tensor\": \"layer.{i}.a\", \"slice\": {\"dim\": 0}},"                               \
	"   {\"tensor\": \"layer.{i}.b\", \"transpose\": true, \"slice\": {\"dim\": 0}}]},"        \
	" {\"name\": \"beside.{i}\", \"join_dim\": 1, \"sources\": ["                              \
	"   \"layer.{i}.a\", {\"tensor\": \"layer.{i}.b\", \"transpose\": true}]},"                \
	" {\"name\": \"columns.{i}\", \"type\": \"fp16\", \"pad_dim\": 1, \"pad_multiple\": 32,"   \
	"  \"sources\": [{\"tensor\": \"layer.{i}.a\", \"slice\": {\"dim\": 1}}]},"                \
	" {\"name\": \"eight.{i}\", \"type\": \"e4m3\", \"scale_block\": [16, 16], \"sources\": [" \
	"   {\"tensor\": \"layer.{i}.b\", \"transpose\": true}]},"                                 \
	" {\"name\": \"vector.{i}\", \"sources\": [\"layer.{i}.vector\"]},"                        \
	" {\"name\": \"stacked\", \"stack\": \"i\", \"sources\": [\"layer.{i}.a\"]}"

#define DECLARATION                                                                                \
	"{\"name\": \"engine\", \"rules_only\": true, \"tp_size\": 2, \"tp_rank\": 1, \"rules\": " \
	"[" SUITE_RULES "]}"

/* Element @i of tensor @t of unit @u; all differ, and are exact in fp32. */
static float value(unsigned u, unsigned t, uint64_t i)
{
	int64_t mixed = (int64_t)((i * 7919 + t * 104729 + u * 15485863) % 262144);

	return (float)(mixed - 131072) / 64;
}

/* Element (row, column) of a, or of b transposed. */
static float matrix(unsigned u, unsigned t, uint64_t row, uint64_t column)
{
	return t == A ? value(u, A, row * COLUMNS + column) : value(u, B, column * ROWS + row);
}

/* -------------------------------------------------------------------------- trainers */

static void make_values(shardd_client *c, unsigned u, shardd_unit unit)
{
	struct shardd_tensor_place places[TENSORS];
	struct shardd_result r;
	shardd_ticket ticket;
	float *g;

	TRAIN_OK(shardd_tensor_places(c, unit, places, TENSORS, &train_err));
	TRAIN_OK(shardd_submit_gradient(c, SHARDD_OPTIONS(gradient, .unit = unit), &ticket,
					&train_err));
	TRAIN_OK(shardd_wait(c, ticket, -1, &r, &train_err));
	g = train_alloc(r.bytes);
	memset(g, 0, r.bytes);
	for (unsigned t = 0; t < TENSORS; t++)
		for (uint64_t i = 0; i < places[t].elements; i++)
			g[places[t].offset + i] = -value(u, t, i);
	train_write(c, r.data, g, r.bytes);
	free(g);
	TRAIN_OK(shardd_reduce(c, unit, &train_err));
}

/* Parameters of 0, from which a step with rate 1 takes the gradient. */
static void make_units(shardd_client *c)
{
	shardd_unit units[UNITS];

	for (unsigned u = 0; u < UNITS; u++) {
		struct shardd_tensor tensors[TENSORS] = {
			{ .name = "a", .shape = a_shape, .dims = 2 },
			{ .name = "b", .shape = b_shape, .dims = 2 },
			{ .name = "vector", .shape = v_shape, .dims = 1 },
		};
		struct shardd_unit_spec spec = { .size = sizeof(spec),
						 .tensors = tensors,
						 .n_tensors = TENSORS,
						 .layout = u ? SHARDD_LAYOUT_DIM0
							     : SHARDD_LAYOUT_FLAT,
						 .compute_dtype = SHARDD_FP32,
						 .gradient_dtype = SHARDD_FP32 };
		struct shardd_unit_info info;
		char name[16];

		snprintf(name, sizeof(name), "layer.%u", u);
		spec.name = name;
		spec.optimizer.kind = SHARDD_SGD;
		spec.optimizer.lr = 1;
		TRAIN_OK(shardd_register(c, &spec, 1, &info, &train_err));
		TRAIN_OK(shardd_init_seed(c, info.unit, 1, &train_err));
		units[u] = info.unit;
	}
	for (unsigned u = UNITS; u-- > 0;)
		make_values(c, u, units[u]);
	TRAIN_OK(shardd_step(c, SHARDD_WORLD, NULL, &train_err));
	TRAIN_OK(shardd_commit(c, 1, NULL, 0, &train_err));
}

/* ----------------------------------------------------------------------- what it has */

struct made {
	const struct shardd_published_tensor *t;
	void *data; /* a copy */
};

static struct made find(shardd_client *c, const struct shardd_generation *g, const char *name)
{
	struct made m = { 0 };

	for (size_t i = 0; i < g->n_tensors; i++)
		if (strcmp(g->tensors[i].name, name) == 0)
			m.t = &g->tensors[i];
	TRAINER_CHECK(m.t);
	m.data = train_alloc(m.t->bytes);
	if (c)
		train_read(c, m.data, m.t->data, m.t->bytes);
	else
		memcpy(m.data, m.t->data, m.t->bytes);
	return m;
}

/* Bits of element @i of @m. */
static uint32_t bits_at(const struct made *m, uint64_t i)
{
	uint32_t bits;

	if (m->t->dtype == SHARDD_E4M3)
		return ((const uint8_t *)m->data)[i];
	if (m->t->dtype != SHARDD_FP32)
		return ((const uint16_t *)m->data)[i];
	memcpy(&bits, (const float *)m->data + i, sizeof(bits));
	return bits;
}

static uint32_t bits_of(const struct made *m, float x)
{
	return m->t->dtype == SHARDD_FP32   ? f32_bits(x)
	       : m->t->dtype == SHARDD_BF16 ? bf16_from_f32(x)
					    : fp16_from_f32(x);
}

static void check_at(const struct made *m, uint64_t i, float want)
{
	if (bits_at(m, i) != bits_of(m, want))
		fprintf(stderr, "%s[%llu] is 0x%x, and must be %g\n", m->t->name,
			(unsigned long long)i, bits_at(m, i), (double)want);
	TRAINER_CHECK(bits_at(m, i) == bits_of(m, want));
}

static void check_joined(shardd_client *c, const struct shardd_generation *g, unsigned u)
{
	struct made m = find(c, g, u ? "joined.1" : "joined.0");

	TRAINER_CHECK(m.t->shape[0] == ROWS && m.t->shape[1] == COLUMNS);
	for (uint64_t row = 0; row < ROWS; row++)
		for (uint64_t k = 0; k < COLUMNS; k++)
			check_at(&m, row * COLUMNS + k,
				 matrix(u, row < ROWS / 2 ? A : B, ROWS / 2 + row % (ROWS / 2), k));
	free(m.data);
}

static void check_beside(shardd_client *c, const struct shardd_generation *g, unsigned u)
{
	struct made m = find(c, g, u ? "beside.1" : "beside.0");

	TRAINER_CHECK(m.t->shape[0] == ROWS && m.t->shape[1] == 2 * COLUMNS);
	for (uint64_t row = 0; row < ROWS; row++)
		for (uint64_t k = 0; k < 2 * COLUMNS; k++)
			check_at(&m, row * 2 * COLUMNS + k,
				 matrix(u, k < COLUMNS ? A : B, row, k % COLUMNS));
	free(m.data);
}

static void check_columns(shardd_client *c, const struct shardd_generation *g, unsigned u)
{
	struct made m = find(c, g, u ? "columns.1" : "columns.0");

	TRAINER_CHECK(m.t->shape[0] == ROWS && m.t->shape[1] == 32);
	for (uint64_t row = 0; row < ROWS; row++)
		for (uint64_t k = 0; k < 32; k++)
			check_at(&m, row * 32 + k,
				 k < COLUMNS / 2 ? matrix(u, A, row, COLUMNS / 2 + k) : 0);
	free(m.data);
}

/* The largest |x| of the tile that has (row, column). */
static float largest(unsigned u, uint64_t row, uint64_t column)
{
	float most = 0;

	for (uint64_t r = row / TILE * TILE; r < ROWS && r < (row / TILE + 1) * TILE; r++)
		for (uint64_t k = column / TILE * TILE;
		     k < COLUMNS && k < (column / TILE + 1) * TILE; k++)
			most = fmaxf(most, fabsf(matrix(u, B, r, k)));
	return most;
}

static void check_eight(shardd_client *c, const struct shardd_generation *g, unsigned u)
{
	struct made m = find(c, g, u ? "eight.1" : "eight.0");
	struct made scales = find(c, g, u ? "eight.1_scale" : "eight.0_scale");
	uint64_t across = (COLUMNS + TILE - 1) / TILE;

	TRAINER_CHECK(scales.t->shape[1] == across);
	for (uint64_t row = 0; row < ROWS; row++)
		for (uint64_t k = 0; k < COLUMNS; k++) {
			float scale = largest(u, row, k) / 448;

			check_at(&scales, row / TILE * across + k / TILE, scale);
			TRAINER_CHECK(bits_at(&m, row * COLUMNS + k) ==
				      e4m3_from_f32(matrix(u, B, row, k) / scale));
		}
	free(m.data);
	free(scales.data);
}

static void check_rest(shardd_client *c, const struct shardd_generation *g, unsigned u)
{
	struct made m = find(c, g, u ? "vector.1" : "vector.0"), all = find(c, g, "stacked");

	for (uint64_t i = 0; i < LONG; i++)
		check_at(&m, i, value(u, VECTOR, i));
	TRAINER_CHECK(all.t->dims == 3 && all.t->shape[0] == UNITS);
	for (uint64_t i = 0; i < (uint64_t)ROWS * COLUMNS; i++)
		check_at(&all, u * ROWS * COLUMNS + i, value(u, A, i));
	free(m.data);
	free(all.data);
}

/* @c: whose memory it is in; NULL: the process's own. */
static void check(shardd_client *c, const struct shardd_generation *g)
{
	TRAINER_CHECK(g->step == 1 && g->n_tensors == 6 * UNITS + 1);
	for (unsigned u = 0; u < UNITS; u++) {
		check_joined(c, g, u);
		check_beside(c, g, u);
		check_columns(c, g, u);
		check_eight(c, g, u);
		check_rest(c, g, u);
	}
}

static void read_them(const char *job, shardd_client *c)
{
	struct shardd_fetch_options o = { .size = sizeof(o) };
	struct shardd_generation g, copy;
	shardd_fetched *to = NULL;
	shardd_live *l;

	TRAIN_OK(shardd_publication_declare(c, job, DECLARATION, NULL, &train_err));
	TRAIN_OK(shardd_publication_publish(c, job, "engine", 0, NULL, &train_err));
	TRAIN_OK(shardd_live_open(c, job, "engine", 0, &l, &train_err));
	TRAIN_OK(shardd_live_acquire(l, 0, &g, &train_err));
	check(c, &g);
	/* every block against the checksum that the device has made */
	TRAIN_OK(shardd_publication_fetch(c, job, "engine", &o, &to, &copy, &train_err));
	check(NULL, &copy);
	TRAINER_CHECK(copy.checksum == g.checksum);
	shardd_fetched_free(to);
	shardd_live_close(l);
	TRAIN_OK(shardd_publication_drop(c, job, "engine", &train_err));
}

struct play {
	stage done;
};

/* Rank 0 reads the generation as a trainer, and by a second client that has not joined. */
static int trains(const struct trainer *t)
{
	struct play *p = t->arg;
	shardd_client *c = train_join(t), *other;

	make_units(c);
	if (t->rank == 0) {
		read_them(t->job, c);
		other = train_connect(t);
		read_them(t->job, other);
		shardd_close(other);
		stage_set(&p->done, 1);
	}
	TRAINER_AWAIT(atomic_load(&p->done), 60);
	train_leave(c);
	return 0;
}

Test(published_values, are_those_of_the_declaration)
{
	struct play *p = trainer_shared(sizeof(*p));
	pid_t ranks[WORLD];

	for (uint32_t r = 0; r < WORLD; r++)
		ranks[r] = trainer_start(&trainfix, "values", r, WORLD, trains, p);
	for (uint32_t r = 0; r < WORLD; r++)
		cr_assert_eq(trainer_wait(ranks[r], 60), 0);
}
