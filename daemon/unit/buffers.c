/* Buffers of a unit: data that is not a parameter; every rank has its own. */
#include "unit/unit.h"

/* Aligned for numbers of every size. */
#define BUFFER_ALIGN 64u

static uint64_t buffers_element_bytes(uint32_t dtype)
{
	switch ((enum buffer_dtype)dtype) {
	case BUFFER_FP64:
	case BUFFER_INT64:
		return 8;
	case BUFFER_BF16:
	case BUFFER_FP16:
		return 2;
	case BUFFER_UINT8:
		return 1;
	default:
		return 4;
	}
}

uint64_t unit_buffer_bytes(const state_buffer *b)
{
	uint64_t n = 0;

	(void)layout_numel(b->shape, (uint32_t)b->n_shape, &n);
	return n * buffers_element_bytes(b->dtype);
}

static uint64_t buffers_aligned(uint64_t bytes, uint64_t to)
{
	return (bytes + to - 1) / to * to;
}

uint64_t unit_buffer_next(const state_unit *rec, size_t i, uint64_t offset)
{
	return offset + buffers_aligned(unit_buffer_bytes(rec->buffers[i]), BUFFER_ALIGN);
}

static uint64_t buffers_offset(const state_unit *rec, size_t i)
{
	uint64_t at = 0;

	for (size_t k = 0; k < i; k++)
		at = unit_buffer_next(rec, k, at);
	return at;
}

uint64_t unit_buffers_bytes(const state_unit *rec)
{
	return buffers_aligned(buffers_offset(rec, rec->n_buffers), POOL_ALIGN);
}

bool unit_buffers_fit(const state_unit *rec)
{
	uint64_t at = 0, n;

	for (size_t k = 0; k < rec->n_buffers; k++) {
		const state_buffer *b = rec->buffers[k];

		if (!layout_numel(b->shape, (uint32_t)b->n_shape, &n))
			return false;
		at += buffers_aligned(unit_buffer_bytes(b), BUFFER_ALIGN);
		if (at > LAYOUT_MAX_ELEMENTS * sizeof(float))
			return false;
	}
	return true;
}
