#include "host/host.h"

#include "convert.h"

#define BF16_INF 0x7f80u
#define FP16_INF 0x7c00u

/* The loops count instead of stopping: without an early exit they are vectorised. */
static bool any_fp32(const float *x, size_t n)
{
	unsigned bad = 0;

	for (size_t i = 0; i < n; i++)
		bad |= (f32_bits(x[i]) & FP32_INF) == FP32_INF;
	return bad;
}

static bool any_short(const uint16_t *x, size_t n, uint16_t inf)
{
	unsigned bad = 0;

	for (size_t i = 0; i < n; i++)
		bad |= (x[i] & inf) == inf;
	return bad;
}

static bool any(const struct k_found_inf *a, size_t at, size_t n)
{
	if (a->dtype == DTYPE_FP32)
		return any_fp32((const float *)a->x + at, n);
	return any_short((const uint16_t *)a->x + at, n,
			 a->dtype == DTYPE_BF16 ? BF16_INF : FP16_INF);
}

/* Other threads may work on other ranges: all write the same value. */
void HOST(found_inf)(const struct k_found_inf *a, size_t begin, size_t end)
{
	float one = 1;

	for (size_t at = begin, n; at < end; at += n) {
		n = host_piece(at, end);
		if (any(a, at, n)) {
			__atomic_store(a->found, &one, __ATOMIC_RELAXED);
			return;
		}
	}
}
