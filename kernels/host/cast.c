#include "host/host.h"

#include "host/lanes.h"

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

/* Bypasses the caches: narrows into a piece that stays in the first-level cache, and stores from
 * there. Elements before the first and after the last whole vector are stored normally. */
static void narrow_past(const struct k_cast *a, size_t begin, size_t end)
{
	uint16_t piece[HOST_PIECE] __attribute__((aligned(sizeof(lanes)))), *dst = a->dst;
	const size_t each = sizeof(lanes) / sizeof(*dst);
	size_t head = (0 - (uintptr_t)(dst + begin) / sizeof(*dst)) % each, n;
	const float *src = a->src;

	n = head < end - begin ? head : end - begin;
	narrow(a, begin, n);
	for (begin += n; end - begin >= each; begin += n) {
		n = host_piece(begin, end) / each * each;
		HOST(narrow)(piece, a->dst_dtype, 0, src + begin, n);
		lanes_stream_all(dst + begin, piece, n * sizeof(*dst));
	}
	narrow(a, begin, end - begin);
	lanes_fence();
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
	else if (a->src_dtype == DTYPE_FP32 && a->stream)
		narrow_past(a, begin, end);
	else if (a->src_dtype == DTYPE_FP32)
		narrow(a, begin, end - begin);
	else if (a->dst_dtype == DTYPE_FP32)
		widen(a, begin, end - begin);
	else
		rewrite(a, begin, end);
}
