#include "host/host.h"

#include <string.h>

static void copy(const struct k_cast *a, size_t begin, size_t end)
{
	size_t size = dtype_size(a->src_dtype);

	memcpy((char *)a->dst + begin * size, (const char *)a->src + begin * size,
	       (end - begin) * size);
}

static void narrow(const struct k_cast *a, size_t begin, size_t n)
{
	const float *src = a->src;

	HOST(narrow)(a->dst, a->dst_dtype, begin, src + begin, n);
}

static void widen(const struct k_cast *a, size_t begin, size_t n)
{
	float *dst = a->dst;

	HOST(widen)(dst + begin, a->src, a->src_dtype, begin, n);
}

/* From one 16-bit type to the other. */
static void rewrite(const struct k_cast *a, size_t begin, size_t end)
{
	float wide[HOST_PIECE];

	for (size_t at = begin, n; at < end; at += n) {
		n = host_piece(at, end);
		HOST(widen)(wide, a->src, a->src_dtype, at, n);
		HOST(narrow)(a->dst, a->dst_dtype, at, wide, n);
	}
}

void HOST(cast)(const struct k_cast *a, size_t begin, size_t end)
{
	if (begin >= end)
		return;
	if (a->src_dtype == a->dst_dtype)
		copy(a, begin, end);
	else if (a->src_dtype == DTYPE_FP32)
		narrow(a, begin, end - begin);
	else if (a->dst_dtype == DTYPE_FP32)
		widen(a, begin, end - begin);
	else
		rewrite(a, begin, end);
}
