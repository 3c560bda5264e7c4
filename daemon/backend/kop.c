#include "backend/kop.h"

#include "core/check.h"

void kop_run(const struct kernels *k, const struct kop *kop, uint64_t begin, uint64_t end)
{
	CHECK(begin <= end && end <= kop->n);
	switch (kop->kind) {
	case KOP_CAST:
		k->cast(&kop->cast, begin, end);
		break;
	case KOP_REDUCE:
		k->reduce(&kop->reduce, begin, end);
		break;
	case KOP_ALL_REDUCE:
		k->all_reduce(&kop->all_reduce, begin, end);
		break;
	case KOP_ADAMW:
		k->adamw(&kop->adamw, begin, end);
		break;
	case KOP_ADAM:
		k->adam(&kop->adam, begin, end);
		break;
	case KOP_SGD:
		k->sgd(&kop->sgd, begin, end);
		break;
	case KOP_NORM:
		k->norm(&kop->norm, begin, end);
		break;
	case KOP_SCALE:
		k->scale(&kop->scale, begin, end);
		break;
	case KOP_FOUND_INF:
		k->found_inf(&kop->found_inf, begin, end);
		break;
	case KOP_FILL:
		k->fill(&kop->fill, begin, end);
		break;
	case KOP_PACK:
		k->pack(&kop->pack, begin, end);
		break;
	case KOP_COPY:
		k->copy(&kop->copy, begin, end);
		break;
	case KOP_CLAMP:
		k->clamp(&kop->clamp, begin, end);
		break;
	case KOP_UNSCALE:
		k->unscale(&kop->unscale, begin, end);
		break;
	case KOP_ADD_ROWS:
		k->add_rows(&kop->add_rows, begin, end);
		break;
	case KOP_REDUCE_STEP:
		k->reduce_step(&kop->reduce_step, begin, end);
		break;
	case _KOP_N:
		CHECK(kop->kind != _KOP_N);
	}
}

/* -------------------------------------------------------------------- bytes */

static uint64_t kop_reduce_bytes(const struct k_reduce *r)
{
	return r->k * dtype_size(r->in_dtype) + (r->accumulate ? 2 : 1) * dtype_size(r->out_dtype);
}

/* Parameters and state are read and written, the gradient is read. */
static uint64_t kop_optimizer_bytes(unsigned state)
{
	return (2 * (1 + state) + 1) * sizeof(float);
}

static uint64_t kop_sgd_bytes(const struct k_sgd *s)
{
	if (s->buf && s->first) /* its first value is the gradient: it is not read */
		return kop_optimizer_bytes(1) - sizeof(float);
	return kop_optimizer_bytes(s->buf ? 1 : 0);
}

/* Each value is read, and what it is added to read and written. */
static uint64_t kop_add_rows_bytes(const struct k_add_rows *a)
{
	return a->n_rows * (dtype_size(a->dtype) + 2 * sizeof(float));
}

static uint64_t kop_step_bytes(const struct k_step *s)
{
	if (s->kind == K_STEP_SGD)
		return kop_sgd_bytes(&s->sgd);
	return kop_optimizer_bytes((s->kind == K_STEP_ADAMW ? s->adamw.vmax : s->adam.vmax) ? 3
											    : 2);
}

/* The gradient is neither written nor read, except for the buffer that it is added to. */
static uint64_t kop_reduce_step_bytes(const struct k_reduce_step *a)
{
	return kop_reduce_bytes(&a->reduce) + kop_step_bytes(&a->step) - 2 * sizeof(float);
}

/* Bytes of one element; kops that change fp32 in place, or only read it, have no dtype. */
static uint64_t kop_element_bytes(const struct kop *kop)
{
	switch (kop->kind) {
	case KOP_CAST:
		return dtype_size(kop->cast.src_dtype) + dtype_size(kop->cast.dst_dtype);
	case KOP_REDUCE:
		return kop_reduce_bytes(&kop->reduce);
	case KOP_ALL_REDUCE:
		return (kop->all_reduce.k + 1) * dtype_size(kop->all_reduce.dtype);
	case KOP_ADAMW:
		return kop_optimizer_bytes(kop->adamw.vmax ? 3 : 2);
	case KOP_ADAM:
		return kop_optimizer_bytes(kop->adam.vmax ? 3 : 2);
	case KOP_SGD:
		return kop_sgd_bytes(&kop->sgd);
	case KOP_SCALE:
	case KOP_CLAMP:
	case KOP_UNSCALE:
		return 2 * sizeof(float);
	case KOP_NORM:
	case KOP_FILL:
		return sizeof(float);
	case KOP_FOUND_INF:
		return dtype_size(kop->found_inf.dtype);
	case KOP_PACK:
		return dtype_size(kop->pack.src_dtype) + dtype_size(kop->pack.dst_dtype);
	case KOP_COPY:
		return 2;
	case KOP_ADD_ROWS:
		return kop_add_rows_bytes(&kop->add_rows);
	case KOP_REDUCE_STEP:
		return kop_reduce_step_bytes(&kop->reduce_step);
	case _KOP_N:
		break;
	}
	return 0;
}

uint64_t kop_bytes(const struct kop *kop)
{
	return kop->n * kop_element_bytes(kop);
}
