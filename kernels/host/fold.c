/*
 * The sum of several inputs that are all read in one loop, each widened in registers: this is a
 * whole reduction if it rounds only to fp32.
 */
#include "host/fold.h"

#include "host/lanes.h"

static inline __attribute__((always_inline)) lanes term(const struct fold *f, lanes x)
{
	return f->pre.exact ? x * lanes_all(f->pre.inverse) : x / lanes_all(f->pre.by);
}

/* For @k inputs of type @t, both compile-time constants. */
static inline __attribute__((always_inline)) void loop(const struct fold *f, unsigned k,
						       enum dtype t)
{
	const struct fold c = *f;
	const void *in[FOLD_INPUTS];
	const lanes post = lanes_all(c.post);

	for (unsigned j = 0; j < k; j++)
		in[j] = f->in[j];
	for (size_t i = 0; i < c.n; i += LANES) {
		lanes sum = term(&c, lanes_load(in[0], t, c.at + i));

		if (c.go_on)
			sum = lanes_load(c.to, DTYPE_FP32, i) + sum;
		for (unsigned j = 1; j < k; j++)
			sum += term(&c, lanes_load(in[j], t, c.at + i));
		sum *= post;
		if (c.add)
			sum = lanes_load(c.to, DTYPE_FP32, i) + sum;
		if (c.stream)
			lanes_stream(c.to + i, sum);
		else
			lanes_store(c.to + i, sum);
	}
}

static inline __attribute__((always_inline)) void of_type(const struct fold *f, enum dtype t)
{
	switch (f->k) {
	case 1:
		return loop(f, 1, t);
	case 2:
		return loop(f, 2, t);
	case 3:
		return loop(f, 3, t);
	case 4:
		return loop(f, 4, t);
	case 5:
		return loop(f, 5, t);
	case 6:
		return loop(f, 6, t);
	case 7:
		return loop(f, 7, t);
	default:
		return loop(f, FOLD_INPUTS, t);
	}
}

static void whole(const struct fold *f)
{
	if (f->dtype == DTYPE_FP32)
		of_type(f, DTYPE_FP32);
	else if (f->dtype == DTYPE_BF16)
		of_type(f, DTYPE_BF16);
	else
		of_type(f, DTYPE_FP16);
}

/* Fewer elements than a vector: copied through full vectors. */
static void rest(const struct fold *f)
{
	uint8_t space[FOLD_INPUTS][LANES * sizeof(float)] = { 0 };
	size_t size = dtype_size(f->dtype);
	const void *in[FOLD_INPUTS];
	float to[LANES] = { 0 };
	struct fold own = *f;

	for (unsigned j = 0; j < f->k; j++) {
		memcpy(space[j], (const char *)f->in[j] + f->at * size, f->n * size);
		in[j] = space[j];
	}
	if (f->go_on || f->add)
		memcpy(to, f->to, f->n * sizeof(*to));
	own.stream = false;
	own.in = in;
	own.at = 0;
	own.to = to;
	own.n = LANES;
	whole(&own);
	memcpy(f->to, to, f->n * sizeof(*to));
}

/* Up to the first address that can be streamed to. */
static size_t head(const struct fold *f)
{
	size_t n = (0 - (uintptr_t)f->to / sizeof(float)) % LANES;

	if (!f->stream)
		return 0;
	return n < f->n ? n : f->n;
}

/* The next @n elements of @left. */
static struct fold take(struct fold *left, size_t n)
{
	struct fold part = *left;

	part.n = n;
	left->at += n;
	left->to += n;
	left->n -= n;
	return part;
}

void HOST(fold)(const struct fold *f)
{
	struct fold left = *f, part = take(&left, head(f));

	if (part.n)
		rest(&part);
	part = take(&left, left.n / LANES * LANES);
	if (part.n)
		whole(&part);
	if (left.n)
		rest(&left);
	if (f->stream)
		lanes_fence();
}

bool HOST(fold_knows)(enum dtype t)
{
	return lanes_know(t);
}
