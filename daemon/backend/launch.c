#include "backend/launch.h"

#include "core/check.h"

/* ------------------------------------------------------------------- first touch */

/* The kernel maps that much around a page that is read and is there (fault_around_bytes). */
#define LAUNCH_AROUND 65536u

/* Elements of @bytes bytes from @at on. */
struct launch_array {
	const void *at; /* NULL: there is none */
	size_t bytes;
};

#define LAUNCH_WRITTEN 4u

static void launch_step_written(const struct k_step *s, struct launch_array ret[LAUNCH_WRITTEN])
{
	const float *const sgd[LAUNCH_WRITTEN] = { s->sgd.p, s->sgd.buf };
	const float *const adamw[LAUNCH_WRITTEN] = { s->adamw.p, s->adamw.m, s->adamw.v,
						     s->adamw.vmax };
	const float *const adam[LAUNCH_WRITTEN] = { s->adam.p, s->adam.m, s->adam.v, s->adam.vmax };
	const float *const *from = s->kind == K_STEP_SGD     ? sgd
				   : s->kind == K_STEP_ADAMW ? adamw
							     : adam;

	for (unsigned i = 0; i < LAUNCH_WRITTEN; i++)
		ret[i] = (struct launch_array){ from[i], sizeof(float) };
}

/* The large arrays that a launch writes, other than by rows. @ret: zeroed. */
static void launch_written(const struct launch *l, struct launch_array ret[LAUNCH_WRITTEN])
{
	struct k_step step;

	switch (l->kind) {
	case LAUNCH_CAST:
		ret[0] = (struct launch_array){ l->cast.dst, dtype_size(l->cast.dst_dtype) };
		break;
	case LAUNCH_REDUCE:
		ret[0] = (struct launch_array){ l->reduce.out, dtype_size(l->reduce.out_dtype) };
		break;
	case LAUNCH_ADAMW:
		step = (struct k_step){ .kind = K_STEP_ADAMW, .adamw = l->adamw };
		launch_step_written(&step, ret);
		break;
	case LAUNCH_ADAM:
		step = (struct k_step){ .kind = K_STEP_ADAM, .adam = l->adam };
		launch_step_written(&step, ret);
		break;
	case LAUNCH_SGD:
		step = (struct k_step){ .kind = K_STEP_SGD, .sgd = l->sgd };
		launch_step_written(&step, ret);
		break;
	case LAUNCH_REDUCE_STEP:
		launch_step_written(&l->reduce_step.step, ret);
		break;
	case LAUNCH_COPY:
		ret[0] = (struct launch_array){ l->copy.dst, 1 };
		break;
	default:
		break;
	}
}

/* A page that is in the file and is written first is mapped alone, at the cost of a fault. One that
 * is read first is mapped with its neighbours, and for writing, too: so a new daemon maps the memory
 * of the previous one in a fifth of the time. */
static void launch_touch(const struct launch *l, uint64_t begin, uint64_t end)
{
	struct launch_array written[LAUNCH_WRITTEN] = { 0 };

	launch_written(l, written);
	for (unsigned i = 0; i < LAUNCH_WRITTEN && begin < end; i++) {
		uintptr_t base = (uintptr_t)written[i].at;
		uintptr_t from = base + begin * written[i].bytes;
		uintptr_t to = base + end * written[i].bytes;

		for (; base && from < to; from = (from | (LAUNCH_AROUND - 1)) + 1)
			(void)*(const volatile char *)from;
	}
}

void launch_run(const struct kernels *k, const struct launch *launch, uint64_t begin, uint64_t end)
{
	CHECK(begin <= end && end <= launch->n);
	launch_touch(launch, begin, end);
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
	case LAUNCH_ASSEMBLE:
		k->assemble(&launch->assemble, begin, end);
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
	case LAUNCH_ASSEMBLE:
		return launch->assemble.moves;
	case _LAUNCH_N:
		break;
	}
	return 0;
}

uint64_t launch_bytes(const struct launch *launch)
{
	return launch->n * launch_element_bytes(launch);
}
