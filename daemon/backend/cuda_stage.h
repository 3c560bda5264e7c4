/*
 * Staging: a ring of pinned memory through which host memory goes to and from a device.
 *
 * Each entry is a record and its payload, side by side. The executor takes them at the
 * head; when the device has passed them, the reaper settles them (copies results to their
 * destination) and returns them at the tail. Positions only grow.
 */
#ifndef SHARDD_BACKEND_CUDA_STAGE_H
#define SHARDD_BACKEND_CUDA_STAGE_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#define CUDA_STAGE_BYTES (UINT64_C(4) << 20)
/* Maximum payload of one entry: it fits eventually, whatever is in the ring. */
#define CUDA_STAGE_PIECE (UINT64_C(1) << 20)

enum cuda_record_kind {
	CUDA_RECORD_PAD, /* nothing: the rest of the ring's end */
	CUDA_RECORD_IN,  /* host to device: nothing to settle */
	CUDA_RECORD_OUT, /* device to host: payload goes to @dst */
	CUDA_RECORD_NORM /* partials: folded into the first of @entries at @dst */
};

struct cuda_record {
	_Alignas(64) uint64_t whole; /* bytes of record and payload, with padding */
	uint64_t bytes;              /* of the payload */
	void *dst;
	uint64_t entries;
	uint32_t kind;
	uint32_t inf;
};

struct cuda_stage {
	uint8_t *base; /* borrowed, pinned */
	uint64_t head; /* the executor's */
	_Atomic uint64_t tail;
};

/* Take room for @bytes (at most CUDA_STAGE_PIECE). Executor.
 * Return: the record, payload behind it; NULL: not now. */
struct cuda_record *cuda_stage_take(struct cuda_stage *s, enum cuda_record_kind kind,
				    uint64_t bytes);
static inline void *cuda_stage_payload(struct cuda_record *r)
{
	return r + 1;
}
/* Settle everything from the tail to @to; the caller then moves the tail. @ok: false if
 * the device failed, and nothing came. Reaper. */
void cuda_stage_settle(struct cuda_stage *s, uint64_t to, bool ok);

#endif
