/*
 * What readers of the publications of trainers.Exact must see: the masters of a step by the arithmetic that exact.h
 * describes, the transforms of the declaration (reads.py) one after the other, each as a copy, and the types by their
 * definition. It shares no code with the daemon and its kernels, and does nothing fast.
 */
#include "exact.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { PARTS = 2 }; /* the engine's ranks */

static void *model_alloc(uint64_t n, size_t size)
{
	void *p = calloc(n ? n : 1, size);

	if (!p) {
		fputs("chaos-exact: no memory\n", stderr);
		exit(1);
	}
	return p;
}

/* ------------------------------------------------------------------------- the masters */

struct masters {
	uint64_t step;
	float *p[EXACT_UNITS], *v[EXACT_UNITS]; /* parameters, momentum */
};

static void masters_init(struct masters *m)
{
	m->step = 0;
	for (unsigned u = 0; u < EXACT_UNITS; u++) {
		m->p[u] = model_alloc(exact_unit_elements(&exact_units[u]), sizeof(float));
		m->v[u] = model_alloc(exact_unit_elements(&exact_units[u]), sizeof(float));
	}
}

static void masters_deinit(struct masters *m)
{
	for (unsigned u = 0; u < EXACT_UNITS; u++) {
		free(m->p[u]);
		free(m->v[u]);
	}
}

static void masters_step(struct masters *m)
{
	m->step++;
	for (unsigned u = 0; u < EXACT_UNITS; u++) {
		const float momentum = exact_units[u].momentum ? (float)EXACT_MOMENTUM : 0;
		uint64_t n = exact_unit_elements(&exact_units[u]), stride;

		for (uint64_t i = exact_first(u, m->step, &stride); i < n; i += stride) {
			float mean = (exact_gradient(m->step, 0, u, i) +
				      exact_gradient(m->step, 1, u, i)) /
				     EXACT_RANKS;

			m->v[u][i] = momentum * m->v[u][i] + mean;
			m->p[u][i] -= (float)EXACT_RATE * m->v[u][i];
		}
	}
}

/* ---------------------------------------------------------------------- the transforms */

/* A tensor with one dimension is one column. */
struct matrix {
	uint64_t rows, columns;
	float *x;
};

static struct matrix matrix_new(uint64_t rows, uint64_t columns)
{
	return (struct matrix){ rows, columns, model_alloc(rows * columns, sizeof(float)) };
}

static float *matrix_at(const struct matrix *m, uint64_t row, uint64_t column)
{
	return &m->x[row * m->columns + column];
}

/* A copy of a master. */
static struct matrix matrix_of(const struct masters *m, unsigned u, const char *name)
{
	const float *from = m->p[u];
	const struct exact_tensor *t = exact_units[u].tensors;
	struct matrix r;

	for (; strcmp(t->name, name) != 0; t++)
		from += exact_elements(t);
	r = matrix_new(t->rows, t->columns ? t->columns : 1);
	memcpy(r.x, from, exact_elements(t) * sizeof(float));
	return r;
}

/* Each of these frees what it is given. */
static struct matrix matrix_turned(struct matrix m)
{
	struct matrix r = matrix_new(m.columns, m.rows);

	for (uint64_t i = 0; i < r.rows; i++)
		for (uint64_t k = 0; k < r.columns; k++)
			*matrix_at(&r, i, k) = *matrix_at(&m, k, i);
	free(m.x);
	return r;
}

/* Part @part of @parts equal ones, of the rows. */
static struct matrix matrix_rows(struct matrix m, uint64_t parts, uint64_t part)
{
	struct matrix r = matrix_new(m.rows / parts, m.columns);

	for (uint64_t i = 0; i < r.rows; i++)
		for (uint64_t k = 0; k < r.columns; k++)
			*matrix_at(&r, i, k) = *matrix_at(&m, part * r.rows + i, k);
	free(m.x);
	return r;
}

static struct matrix matrix_columns(struct matrix m, uint64_t parts, uint64_t part)
{
	return matrix_turned(matrix_rows(matrix_turned(m), parts, part));
}

static struct matrix matrix_below(struct matrix a, struct matrix b)
{
	struct matrix r = matrix_new(a.rows + b.rows, a.columns);

	for (uint64_t i = 0; i < r.rows; i++)
		for (uint64_t k = 0; k < r.columns; k++)
			*matrix_at(&r, i, k) =
				i < a.rows ? *matrix_at(&a, i, k) : *matrix_at(&b, i - a.rows, k);
	free(a.x);
	free(b.x);
	return r;
}

static struct matrix matrix_beside(struct matrix a, struct matrix b)
{
	return matrix_turned(matrix_below(matrix_turned(a), matrix_turned(b)));
}

/* Rows of 0 up to a multiple. */
static struct matrix matrix_padded(struct matrix m, uint64_t multiple)
{
	uint64_t more = (multiple - m.rows % multiple) % multiple;

	return matrix_below(m, matrix_new(more, m.columns));
}

/* --------------------------------------------------------------------------- the types */

struct type {
	const char *name;
	size_t bytes;
	int fraction, bias; /* bits of the fraction, and the exponent's bias; 0: fp32 */
	uint32_t most;      /* code of the largest number */
};

static const struct type fp32 = { "FP32", 4, 0, 0, 0 };
static const struct type bf16 = { "BF16", 2, 7, 127, 0x7f7f };
static const struct type fp16 = { "FP16", 2, 10, 15, 0x7bff };
static const struct type e4m3 = { "E4M3", 1, 3, 7, 0x7e };

/* The nearest number, and of two the even one: @x in units of the last place, of its power of two or of the least
 * one, is rounded to a whole number. @x is finite. */
static uint32_t type_code(const struct type *t, float x)
{
	int least = 1 - t->bias, power = x == 0 ? least : ilogbf(x);
	uint32_t code, sign = signbit(x) ? 1u << (8 * t->bytes - 1) : 0;
	double unit;

	power = power < least ? least : power;
	unit = ldexp(1, power - t->fraction);
	code = (uint32_t)(((power - least) << t->fraction) + (int)rint(fabs((double)x) / unit));
	return sign | (code > t->most ? t->most : code);
}

/* @to: of @n * @t->bytes. */
static void type_write(const struct type *t, const float *x, uint64_t n, uint8_t *to)
{
	for (uint64_t i = 0; i < n; i++) {
		uint32_t code;

		if (t->fraction)
			code = type_code(t, x[i]);
		else
			memcpy(&code, &x[i], sizeof(code));
		for (size_t k = 0; k < t->bytes; k++)
			*to++ = (uint8_t)(code >> 8 * k); /* little-endian */
	}
}

/* ------------------------------------------------------------------- what is published */

/* Frees @m. @shape: of the tensor, as Python prints a list. @layer: the name begins with it. */
static void publish(const struct masters *at, struct matrix m, const struct type *t,
		    const char *shape, const char *layer, const char *name)
{
	uint64_t n = m.rows * m.columns;
	uint8_t *bytes = model_alloc(n, t->bytes);

	type_write(t, m.x, n, bytes);
	printf("%" PRIu64 " %s%s %s %s %" PRIu64 "\n", at->step, layer, name, t->name, shape,
	       n * t->bytes);
	fwrite(bytes, t->bytes, n, stdout);
	free(bytes);
	free(m.x);
}

/* The scales of the tiles of @m, by which its elements are divided. */
static struct matrix publish_scales(struct matrix *m, uint64_t rows, uint64_t columns)
{
	struct matrix r =
		matrix_new((m->rows + rows - 1) / rows, (m->columns + columns - 1) / columns);

	for (uint64_t i = 0; i < m->rows; i++)
		for (uint64_t k = 0; k < m->columns; k++) {
			float *most = matrix_at(&r, i / rows, k / columns);

			*most = fmaxf(*most, fabsf(*matrix_at(m, i, k)));
		}
	for (uint64_t i = 0; i < r.rows * r.columns; i++)
		r.x[i] = r.x[i] / 448 == 0 ? 1 : r.x[i] / 448;
	for (uint64_t i = 0; i < m->rows; i++)
		for (uint64_t k = 0; k < m->columns; k++)
			*matrix_at(m, i, k) /= *matrix_at(&r, i / rows, k / columns);
	return r;
}

static void publish_layer(const struct masters *at, unsigned u, unsigned rank)
{
	const char *layer = u == 1 ? "layers.0." : "layers.1.";
	struct matrix qkv = matrix_rows(matrix_of(at, u, "q"), PARTS, rank);
	struct matrix bias = matrix_rows(matrix_of(at, u, "q_bias"), PARTS, rank);
	struct matrix o = matrix_of(at, u, "o"), scale = publish_scales(&o, o.rows, o.columns);

	qkv = matrix_below(qkv, matrix_rows(matrix_of(at, u, "k"), PARTS, rank));
	qkv = matrix_below(qkv, matrix_rows(matrix_of(at, u, "v"), PARTS, rank));
	bias = matrix_below(bias, matrix_rows(matrix_of(at, u, "k_bias"), PARTS, rank));
	bias = matrix_below(bias, matrix_rows(matrix_of(at, u, "v_bias"), PARTS, rank));
	publish(at, qkv, &bf16, "[64,96]", layer, "qkv");
	publish(at, bias, &bf16, "[64]", layer, "qkv_bias");
	publish(at, o, &e4m3, "[96,96]", layer, "eight");
	publish(at, scale, &fp32, "[]", layer, "eight_scale");
}

static void publish_all(const struct masters *at, unsigned rank)
{
	struct matrix tiles = matrix_turned(matrix_of(at, 0, "tiles"));
	struct matrix scales = publish_scales(&tiles, 16, 32);
	struct matrix o = matrix_columns(matrix_of(at, 1, "o"), PARTS, rank), c_attn;
	struct matrix left = matrix_columns(matrix_of(at, 0, "c_attn"), 3, 2);
	struct matrix right = matrix_columns(matrix_of(at, 0, "c_attn"), 3, 0);

	for (unsigned u = 1; u < EXACT_UNITS; u++)
		publish_layer(at, u, rank);
	o = matrix_below(o, matrix_columns(matrix_of(at, 2, "o"), PARTS, rank));
	c_attn = matrix_turned(matrix_of(at, 0, "c_attn"));
	publish(at, o, &bf16, "[2,96,48]", "", "stacked");
	publish(at, matrix_padded(matrix_of(at, 0, "embed"), 64), &bf16, "[256,288]", "", "embed");
	publish(at, matrix_rows(c_attn, PARTS, rank), &fp16, "[144,96]", "", "c_attn");
	publish(at, matrix_beside(left, right), &fp32, "[96,192]", "", "columns");
	publish(at, tiles, &e4m3, "[201,200]", "", "tiles");
	publish(at, scales, &fp32, "[13,7]", "", "tiles.scale_inv");
	publish(at, matrix_of(at, 0, "norm"), &bf16, "[96]", "", "norm");
}

int exact_publish(unsigned rank, const uint64_t *steps, int n)
{
	struct masters m;

	masters_init(&m);
	for (int i = 0; i < n; i++) {
		while (m.step < steps[i])
			masters_step(&m);
		publish_all(&m, rank);
	}
	masters_deinit(&m);
	return fflush(stdout) == 0 && !ferror(stdout) ? 0 : 1;
}
