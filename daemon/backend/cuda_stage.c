#include "backend/cuda_stage.h"

#include <math.h>
#include <stddef.h>
#include <string.h>

#include "core/check.h"
#include "kernels.h"

static struct cuda_record *cuda_stage_at(const struct cuda_stage *s, uint64_t position)
{
	return (struct cuda_record *)(void *)(s->base + position % CUDA_STAGE_BYTES);
}

static struct cuda_record *cuda_stage_put(struct cuda_stage *s, enum cuda_record_kind kind,
					  uint64_t whole)
{
	struct cuda_record *r = cuda_stage_at(s, s->head);

	*r = (struct cuda_record){ .whole = whole, .kind = kind };
	s->head += whole;
	return r;
}

struct cuda_record *cuda_stage_take(struct cuda_stage *s, enum cuda_record_kind kind,
				    uint64_t bytes)
{
	uint64_t whole = (sizeof(struct cuda_record) + bytes + 63) / 64 * 64;
	uint64_t used = s->head - atomic_load_explicit(&s->tail, memory_order_acquire);
	uint64_t to_end = CUDA_STAGE_BYTES - s->head % CUDA_STAGE_BYTES;
	struct cuda_record *r;

	CHECK(bytes <= CUDA_STAGE_PIECE && used <= CUDA_STAGE_BYTES);
	if (CUDA_STAGE_BYTES - used < whole + (to_end < whole ? to_end : 0))
		return NULL;
	if (to_end < whole)
		cuda_stage_put(s, CUDA_RECORD_PAD, to_end);
	r = cuda_stage_put(s, kind, whole);
	r->bytes = bytes;
	return r;
}

static double cuda_stage_fold(const double *partial, uint64_t n, bool inf)
{
	double sum = 0;

	for (uint64_t i = 0; i < n; i++) {
		if (!inf)
			sum += partial[i];
		else if (isnan(partial[i]) || partial[i] > sum)
			sum = partial[i];
		if (isnan(sum))
			break;
	}
	return sum;
}

static void cuda_stage_settle_one(struct cuda_record *r)
{
	if (r->kind == CUDA_RECORD_OUT)
		memcpy(r->dst, cuda_stage_payload(r), r->bytes);
	if (r->kind != CUDA_RECORD_NORM)
		return;
	memset(r->dst, 0, r->entries * sizeof(double));
	*(double *)r->dst =
		cuda_stage_fold(cuda_stage_payload(r), r->bytes / sizeof(double), r->inf);
}

void cuda_stage_settle(struct cuda_stage *s, uint64_t to, bool ok)
{
	uint64_t tail = atomic_load_explicit(&s->tail, memory_order_relaxed);

	while (tail < to) {
		struct cuda_record *r = cuda_stage_at(s, tail);

		CHECK(r->whole > 0);
		if (ok)
			cuda_stage_settle_one(r);
		tail += r->whole;
	}
	CHECK(tail == to);
}
