#include "backend/launch.h"

#include "core/check.h"

void launch_run(const struct kernels *k, const struct launch *launch, uint64_t begin, uint64_t end)
{
	CHECK(begin <= end && end <= launch->n);
	switch (launch->kind) {
	case LAUNCH_CAST:
		k->cast(&launch->cast, begin, end);
		break;
	case LAUNCH_REDUCE:
		k->reduce(&launch->reduce, begin, end);
		break;
	case LAUNCH_ALL_REDUCE:
		k->all_reduce(&launch->all_reduce, begin, end);
		break;
	case LAUNCH_ADAMW:
		k->adamw(&launch->adamw, begin, end);
		break;
	case LAUNCH_ADAM:
		k->adam(&launch->adam, begin, end);
		break;
	case LAUNCH_SGD:
		k->sgd(&launch->sgd, begin, end);
		break;
	case LAUNCH_NORM:
		k->norm(&launch->norm, begin, end);
		break;
	case LAUNCH_SCALE:
		k->scale(&launch->scale, begin, end);
		break;
	case LAUNCH_FOUND_INF:
		k->found_inf(&launch->found_inf, begin, end);
		break;
	case LAUNCH_FILL:
		k->fill(&launch->fill, begin, end);
		break;
	case LAUNCH_PACK:
		k->pack(&launch->pack, begin, end);
		break;
	case LAUNCH_COPY:
		k->copy(&launch->copy, begin, end);
		break;
	case LAUNCH_CLAMP:
		k->clamp(&launch->clamp, begin, end);
		break;
	case LAUNCH_UNSCALE:
		k->unscale(&launch->unscale, begin, end);
		break;
	case LAUNCH_ADD_ROWS:
		k->add_rows(&launch->add_rows, begin, end);
		break;
	case LAUNCH_REDUCE_STEP:
		k->reduce_step(&launch->reduce_step, begin, end);
		break;
	case _LAUNCH_N:
		CHECK(launch->kind != _LAUNCH_N);
	}
}

/* -------------------------------------------------------------------- bytes */

static uint64_t launch_reduce_bytes(const struct k_reduce *r)
{
	return r->k * dtype_size(r->in_dtype) + (r->accumulate ? 2 : 1) * dtype_size(r->out_dtype);
}

/* Parameters and state are read and written, the gradient is read. */
static uint64_t launch_optimizer_bytes(unsigned state)
{
	return (2 * (1 + state) + 1) * sizeof(float);
}

static uint64_t launch_sgd_bytes(const struct k_sgd *s)
{
	if (s->buf && s->first) /* its first value is the gradient: it is not read */
		return launch_optimizer_bytes(1) - sizeof(float);
	return launch_optimizer_bytes(s->buf ? 1 : 0);
}

/* Each value is read, and what it is added to read and written. */
static uint64_t launch_add_rows_bytes(const struct k_add_rows *a)
{
	return a->n_rows * (dtype_size(a->dtype) + 2 * sizeof(float));
}

static uint64_t launch_step_bytes(const struct k_step *s)
{
	if (s->kind == K_STEP_SGD)
		return launch_sgd_bytes(&s->sgd);
	return launch_optimizer_bytes((s->kind == K_STEP_ADAMW ? s->adamw.vmax : s->adam.vmax) ? 3
											       : 2);
}

/* The gradient is neither written nor read, except for the buffer that it is added to. */
static uint64_t launch_reduce_step_bytes(const struct k_reduce_step *a)
{
	return launch_reduce_bytes(&a->reduce) + launch_step_bytes(&a->step) - 2 * sizeof(float);
}

/* Bytes of one element; launches that change fp32 in place, or only read it, have no dtype. */
static uint64_t launch_element_bytes(const struct launch *launch)
{
	switch (launch->kind) {
	case LAUNCH_CAST:
		return dtype_size(launch->cast.src_dtype) + dtype_size(launch->cast.dst_dtype);
	case LAUNCH_REDUCE:
		return launch_reduce_bytes(&launch->reduce);
	case LAUNCH_ALL_REDUCE:
		return (launch->all_reduce.k + 1) * dtype_size(launch->all_reduce.dtype);
	case LAUNCH_ADAMW:
		return launch_optimizer_bytes(launch->adamw.vmax ? 3 : 2);
	case LAUNCH_ADAM:
		return launch_optimizer_bytes(launch->adam.vmax ? 3 : 2);
	case LAUNCH_SGD:
		return launch_sgd_bytes(&launch->sgd);
	case LAUNCH_SCALE:
	case LAUNCH_CLAMP:
	case LAUNCH_UNSCALE:
		return 2 * sizeof(float);
	case LAUNCH_NORM:
	case LAUNCH_FILL:
		return sizeof(float);
	case LAUNCH_FOUND_INF:
		return dtype_size(launch->found_inf.dtype);
	case LAUNCH_PACK:
		return dtype_size(launch->pack.src_dtype) + dtype_size(launch->pack.dst_dtype);
	case LAUNCH_COPY:
		return 2;
	case LAUNCH_ADD_ROWS:
		return launch_add_rows_bytes(&launch->add_rows);
	case LAUNCH_REDUCE_STEP:
		return launch_reduce_step_bytes(&launch->reduce_step);
	case _LAUNCH_N:
		break;
	}
	return 0;
}

uint64_t launch_bytes(const struct launch *launch)
{
	return launch->n * launch_element_bytes(launch);
}
