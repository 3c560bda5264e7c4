/*
 * Whole groups of four elements are made for one piece, in loops without
 * branches; a range that begins inside a group leaves the first ones out.
 */
#include "host/host.h"

#include "random.h"

#include <string.h>

#define GROUPS (HOST_PIECE / 4)

struct words {
	uint32_t w[GROUPS][4];
};

static void uniform(const struct k_fill *a, float *restrict out, const struct words *w,
		    size_t groups)
{
	const double from = a->a, width = a->b - a->a;
	const uint32_t *word = &w->w[0][0];

	for (size_t i = 0; i < 4 * groups; i++)
		out[i] = (float)(from + width * random_unit(word[i]));
}

static void normal(const struct k_fill *a, float *restrict out, const struct words *w,
		   size_t groups)
{
	const double mean = a->a, deviation = a->b;
	const uint32_t *word = &w->w[0][0];

	for (size_t i = 0; i < 2 * groups; i++) {
		double z[2];

		random_normals(word + 2 * i, z);
		out[2 * i] = (float)(mean + deviation * z[0]);
		out[2 * i + 1] = (float)(mean + deviation * z[1]);
	}
}

/* Elements [at, at+n) of dst; n at most HOST_PIECE-3. */
static void piece(const struct k_fill *a, size_t at, size_t n)
{
	uint64_t index = a->first + at;
	size_t skip = index % 4, groups = (skip + n + 3) / 4;
	struct words w;
	float out[HOST_PIECE];

	for (size_t i = 0; i < groups; i++)
		random_words(a->seed, a->stream, index / 4 + i, w.w[i]);
	if (a->kind == FILL_NORMAL)
		normal(a, out, &w, groups);
	else
		uniform(a, out, &w, groups);
	memcpy(a->dst + at, out + skip, n * sizeof(*out));
}

static void constant(float *dst, float value, size_t n)
{
	for (size_t i = 0; i < n; i++)
		dst[i] = value;
}

void HOST(fill)(const struct k_fill *a, size_t begin, size_t end)
{
	if (a->kind == FILL_CONSTANT && begin < end) {
		constant(a->dst + begin, (float)a->a, end - begin);
		return;
	}
	for (size_t at = begin, n; at < end; at += n) {
		n = end - at < HOST_PIECE - 4 ? end - at : HOST_PIECE - 4;
		piece(a, at, n);
	}
}
