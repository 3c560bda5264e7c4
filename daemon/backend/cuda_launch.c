/*
 * From a launch to a kernel, a copy or a fill on a stream.
 */
#include "backend/cuda_impl.h"

#ifdef SHARDD_CUDA

#include <errno.h>
#include <math.h>
#include <string.h>

#include "adam.h"
#include "backend/redo.h"
#include "core/check.h"
#include "step.h"

static CUresult cuda_launch_grid(struct cuda *c, struct cuda_queue *q, enum cuda_fn fn,
				 unsigned blocks, void *args)
{
	void *params[1] = { args };

	q->launched++;
	return c->lib->cuLaunchKernel(c->kernels.fn[fn], blocks, 1, 1, cuda_fn_threads(fn), 1, 1, 0,
				      q->stream, params, NULL);
}

static unsigned cuda_launch_blocks_of(const struct cuda *c, enum cuda_fn fn, uint64_t n)
{
	return cuda_fn_blocks(fn, n, c->kernels.sms, c->kernels.per_sm[fn]);
}

static CUresult cuda_launch_run(struct cuda *c, struct cuda_queue *q, enum cuda_fn fn, uint64_t n,
				void *args)
{
	return cuda_launch_grid(c, q, fn, cuda_launch_blocks_of(c, fn, n), args);
}

static CUresult cuda_launch_copy(struct cuda *c, struct cuda_queue *q, void *dst, const void *src,
				 uint64_t bytes)
{
	q->launched++;
	return c->lib->cuMemcpyAsync(cuda_ptr(dst), cuda_ptr(src), bytes, q->stream);
}

static CUresult cuda_launch_cast(struct cuda *c, struct cuda_queue *q, const struct launch *k)
{
	const struct k_cast *a = &k->cast;
	struct cuda_cast args = { cuda_ptr(a->dst), cuda_ptr(a->src), k->n, a->dst_dtype,
				  a->src_dtype };

	if (a->dst_dtype == a->src_dtype) /* a copy engine leaves the multiprocessors alone */
		return cuda_launch_copy(c, q, a->dst, a->src, k->n * dtype_size(a->dst_dtype));
	return cuda_launch_run(c, q, CUDA_FN_CAST, k->n, &args);
}

static void cuda_launch_fill_inputs(uint64_t *to, const void *const *in, unsigned k)
{
	for (unsigned i = 0; i < k; i++)
		to[i] = cuda_ptr(in[i]);
}

static struct cuda_factor cuda_launch_factor(const struct k_factor *f)
{
	return (struct cuda_factor){ f->how, f->dtype, f->value };
}

static CUresult cuda_launch_reduce(struct cuda *c, struct cuda_queue *q, const struct launch *k)
{
	const struct k_reduce *a = &k->reduce;
	bool rounds = k_reduce_rounds(a);
	struct cuda_reduce_many args = { .a = { .out = cuda_ptr(a->out),
						.n = k->n,
						.k = a->k,
						.in_dtype = a->in_dtype,
						.out_dtype = a->out_dtype,
						.sum_dtype = a->sum_dtype,
						.pre = cuda_launch_factor(&a->pre),
						.post = cuda_launch_factor(&a->post),
						.accumulate = a->accumulate } };

	if (a->k <= CUDA_FEW_INPUTS) {
		cuda_launch_fill_inputs(args.a.in, a->in, a->k);
		return cuda_launch_run(c, q, rounds ? CUDA_FN_REDUCE_ROUND : CUDA_FN_REDUCE, k->n,
				       &args.a);
	}
	cuda_launch_fill_inputs(args.in, a->in, a->k);
	return cuda_launch_run(c, q, rounds ? CUDA_FN_REDUCE_ROUND_MANY : CUDA_FN_REDUCE_MANY, k->n,
			       &args);
}

static CUresult cuda_launch_all_reduce(struct cuda *c, struct cuda_queue *q, const struct launch *k)
{
	const struct k_all_reduce *a = &k->all_reduce;
	struct cuda_all_reduce_many args = { .a = { .out = cuda_ptr(a->out),
						    .n = k->n,
						    .k = a->k,
						    .dtype = a->dtype,
						    .op = a->op } };

	if (a->k <= CUDA_FEW_INPUTS) {
		cuda_launch_fill_inputs(args.a.in, a->in, a->k);
		return cuda_launch_run(c, q, CUDA_FN_ALL_REDUCE, k->n, &args.a);
	}
	cuda_launch_fill_inputs(args.in, a->in, a->k);
	return cuda_launch_run(c, q, CUDA_FN_ALL_REDUCE_MANY, k->n, &args);
}

/* The common arguments of the four kernels; @x: where the scalars are. */
#define ADAM_ARGS(s, x, count)                                                            \
	.p = cuda_ptr((s)->p), .g = cuda_ptr((s)->g), .m = cuda_ptr((s)->m),              \
	.v = cuda_ptr((s)->v), .n = (count), .w1 = (x)->w1, .b2 = (x)->b2, .w2 = (x)->w2, \
	.step_size = (x)->step_size, .sq = (x)->sq, .eps = (x)->eps

static struct cuda_adam_f64 cuda_launch_adam_f64_args(uint64_t n, const struct adam_step *s)
{
	return (struct cuda_adam_f64){ ADAM_ARGS(s, s->d, n),     .vmax = cuda_ptr(s->vmax),
				       .decay = s->d->decay,      .wd = s->d->wd,
				       .decoupled = s->decoupled, .maximize = s->maximize };
}

static CUresult cuda_launch_adam_f64(struct cuda *c, struct cuda_queue *q, uint64_t n,
				     const struct adam_step *s)
{
	struct cuda_adam_f64 args = cuda_launch_adam_f64_args(n, s);

	return cuda_launch_run(c, q, CUDA_FN_ADAM_F64, n, &args);
}

static struct cuda_adam_any cuda_launch_adam_any_args(uint64_t n, const struct adam_step *s)
{
	return (struct cuda_adam_any){ ADAM_ARGS(s, s, n),
				       .vmax = cuda_ptr(s->vmax),
				       .tail_from = s->tail_from,
				       .decay = s->decay,
				       .wd = s->wd,
				       .decoupled = s->decoupled,
				       .maximize = s->maximize };
}

static CUresult cuda_launch_adam_any(struct cuda *c, struct cuda_queue *q, uint64_t n,
				     const struct adam_step *s)
{
	struct cuda_adam_any args = cuda_launch_adam_any_args(n, s);

	return cuda_launch_run(c, q, CUDA_FN_ADAM_ANY, n, &args);
}

static CUresult cuda_launch_adamw_plain(struct cuda *c, struct cuda_queue *q, uint64_t n,
					const struct adam_step *s)
{
	struct cuda_adamw args = { ADAM_ARGS(s, s, n), .decay = s->decay };

	return cuda_launch_run(c, q, CUDA_FN_ADAMW, n, &args);
}

static CUresult cuda_launch_adam_plain(struct cuda *c, struct cuda_queue *q, uint64_t n,
				       const struct adam_step *s)
{
	struct cuda_adam args = { ADAM_ARGS(s, s, n), .wd = s->wd };

	return cuda_launch_run(c, q, CUDA_FN_ADAM, n, &args);
}

/* The plain forms exist for speed: they keep more threads on a multiprocessor. */
static CUresult cuda_launch_adam_step(struct cuda *c, struct cuda_queue *q, uint64_t n,
				      const struct adam_step *s)
{
	if (s->f64)
		return cuda_launch_adam_f64(c, q, n, s);
	if (s->vmax || s->maximize || s->tail_from < n)
		return cuda_launch_adam_any(c, q, n, s);
	return s->decoupled ? cuda_launch_adamw_plain(c, q, n, s)
			    : cuda_launch_adam_plain(c, q, n, s);
}

static CUresult cuda_launch_adamw(struct cuda *c, struct cuda_queue *q, const struct launch *k)
{
	struct adam_step s = adam_step_of_adamw(&k->adamw);

	return cuda_launch_adam_step(c, q, k->n, &s);
}

static CUresult cuda_launch_adam(struct cuda *c, struct cuda_queue *q, const struct launch *k)
{
	struct adam_step s = adam_step_of_adam(&k->adam);

	return cuda_launch_adam_step(c, q, k->n, &s);
}

static struct cuda_sgd cuda_launch_sgd_args(const struct launch *k)
{
	const struct k_sgd *a = &k->sgd;

	return (struct cuda_sgd){ .p = cuda_ptr(a->p),
				  .g = cuda_ptr(a->g),
				  .buf = cuda_ptr(a->buf),
				  .n = k->n,
				  .tail_from = a->profile == K_FUSED ? a->tail_from : UINT64_MAX,
				  .lr = a->lr,
				  .wd = a->wd,
				  .mu = a->mu,
				  .w = (float)(1 - a->dampening),
				  .nesterov = a->nesterov,
				  .first = a->first,
				  .maximize = a->maximize };
}

static CUresult cuda_launch_sgd(struct cuda *c, struct cuda_queue *q, const struct launch *k)
{
	struct cuda_sgd args = cuda_launch_sgd_args(k);

	return cuda_launch_run(c, q, CUDA_FN_SGD, k->n, &args);
}

static CUresult cuda_launch_clamp(struct cuda *c, struct cuda_queue *q, const struct launch *k)
{
	struct cuda_clamp args = { cuda_ptr(k->clamp.x), k->n, k->clamp.lo, k->clamp.hi };

	return cuda_launch_run(c, q, CUDA_FN_CLAMP, k->n, &args);
}

static CUresult cuda_launch_unscale(struct cuda *c, struct cuda_queue *q, const struct launch *k)
{
	struct cuda_unscale args = { .x = cuda_ptr(k->unscale.x),
				     .n = k->n,
				     .found = cuda_ptr(k->unscale.found),
				     .inv = k->unscale.inv };

	return cuda_launch_run(c, q, CUDA_FN_UNSCALE, k->n, &args);
}

static CUresult cuda_launch_add_rows(struct cuda *c, struct cuda_queue *q, const struct launch *k)
{
	const struct k_add_rows *a = &k->add_rows;
	struct cuda_add_rows args = { .out = cuda_ptr(a->out),
				      .n = k->n,
				      .rows = cuda_ptr(a->rows),
				      .n_rows = a->n_rows,
				      .values = cuda_ptr(a->values),
				      .first_row = a->first_row,
				      .row_limit = a->row_limit,
				      .pre = cuda_launch_factor(&a->pre),
				      .dtype = a->dtype };

	return cuda_launch_run(c, q, CUDA_FN_ADD_ROWS, k->n, &args);
}

static struct cuda_scale cuda_launch_scale_args(const struct launch *k)
{
	return (struct cuda_scale){ .x = cuda_ptr(k->scale.x),
				    .n = k->n,
				    .factor = k->scale.factor };
}

static CUresult cuda_launch_scale(struct cuda *c, struct cuda_queue *q, const struct launch *k)
{
	struct cuda_scale args = cuda_launch_scale_args(k);

	return cuda_launch_run(c, q, CUDA_FN_SCALE, k->n, &args);
}

static CUresult cuda_launch_found_inf(struct cuda *c, struct cuda_queue *q, const struct launch *k)
{
	struct cuda_found_inf args = { .x = cuda_ptr(k->found_inf.x),
				       .n = k->n,
				       .found = cuda_ptr(k->found_inf.found),
				       .dtype = k->found_inf.dtype };

	return cuda_launch_run(c, q, CUDA_FN_FOUND_INF, k->n, &args);
}

static CUresult cuda_launch_assemble(struct cuda *c, struct cuda_queue *q, const struct launch *k)
{
	const struct k_assemble *a = &k->assemble;
	struct cuda_assemble args = { .tensors = cuda_ptr(a->tensors),
				      .blocks = cuda_ptr(a->blocks),
				      .base = a->base,
				      .crc = cuda_ptr(a->crc),
				      .n = k->n,
				      .pass = a->pass };

	CHECK(a->crc || a->pass != K_ASSEMBLE_MAKE);
	if (a->delta) {
		args.shift = cuda_ptr(a->delta->base) - cuda_ptr(a->delta->made);
		args.out = cuda_ptr(a->delta->out);
		args.room = a->delta->room;
		args.used = cuda_ptr(a->delta->used);
		args.deltas = cuda_ptr(a->delta->blocks);
	}
	return cuda_launch_run(c, q, CUDA_FN_ASSEMBLE, k->n, &args);
}

/* Whole rows, and the existing part of the last one. */
static CUresult cuda_launch_pack(struct cuda *c, struct cuda_queue *q, const struct launch *k)
{
	const struct k_pack *a = &k->pack;
	uint64_t rows = k->n / a->row_elements, rest = k->n % a->row_elements;
	struct cuda_pack args = { .dst = cuda_ptr(a->dst),
				  .src = cuda_ptr(a->src),
				  .rows = rows,
				  .row_elements = a->row_elements,
				  .dst_stride = a->dst_stride,
				  .src_stride = a->src_stride,
				  .dst_dtype = a->dst_dtype,
				  .src_dtype = a->src_dtype };
	CUresult r = CUDA_SUCCESS;

	if (rows > 0)
		r = cuda_launch_run(c, q, CUDA_FN_PACK, k->n - rest, &args);
	if (r != CUDA_SUCCESS || rest == 0)
		return r;
	args.dst += rows * a->dst_stride * dtype_size(a->dst_dtype);
	args.src += rows * a->src_stride * dtype_size(a->src_dtype);
	args.rows = 1;
	args.row_elements = rest;
	return cuda_launch_run(c, q, CUDA_FN_PACK, rest, &args);
}

static CUresult cuda_launch_fill(struct cuda *c, struct cuda_queue *q, const struct launch *k)
{
	const struct k_fill *a = &k->fill;
	struct cuda_fill args = { .dst = cuda_ptr(a->dst),
				  .n = k->n,
				  .seed = a->seed,
				  .stream = a->stream,
				  .first = a->first,
				  .a = a->a,
				  .b = a->b,
				  .kind = a->kind };
	float constant = (float)a->a;
	unsigned bits;

	if (a->kind != FILL_CONSTANT)
		return cuda_launch_run(c, q, CUDA_FN_FILL, k->n, &args);
	memcpy(&bits, &constant, sizeof(bits));
	q->launched++;
	return c->lib->cuMemsetD32Async(args.dst, bits, k->n, q->stream);
}

static CUresult cuda_launch_run_norm(struct cuda *c, struct cuda_queue *q, const struct launch *k,
				     enum cuda_fn fn, unsigned blocks)
{
	struct cuda_norm args = { .x = cuda_ptr(k->norm.x),
				  .n = k->n,
				  .partial = q->scratch,
				  .inf = isinf(k->norm.p) != 0 };
	struct cuda_norm_power power = { args.x, args.n, args.partial, k->norm.p };

	return cuda_launch_grid(c, q, fn, blocks, fn == CUDA_FN_NORM ? (void *)&args : &power);
}

/* The partials go to scratch memory, which the next norm on this stream uses again, and
 * from there to staging, where the reaper folds them. */
static enum cuda_step cuda_launch_norm(struct cuda *c, struct cuda_queue *q, const struct launch *k,
				       CUresult *ret)
{
	bool inf = isinf(k->norm.p);
	enum cuda_fn fn = inf || k->norm.p == 2 ? CUDA_FN_NORM : CUDA_FN_NORM_POWER;
	unsigned blocks = cuda_launch_blocks_of(c, fn, k->n);
	uint64_t bytes = blocks * sizeof(double);
	struct cuda_record *r;

	CHECK(blocks <= CUDA_NORM_PARTIALS);
	r = cuda_stage_take(&q->stage, CUDA_RECORD_NORM, bytes);
	if (!r)
		return CUDA_STEP_FULL;
	r->dst = k->norm.partial;
	r->entries = (k->n + KERNEL_NORM_BLOCK - 1) / KERNEL_NORM_BLOCK;
	r->inf = inf;
	*ret = cuda_launch_run_norm(c, q, k, fn, blocks);
	q->launched++;
	if (*ret == CUDA_SUCCESS)
		*ret = c->lib->cuMemcpyDtoHAsync(cuda_stage_payload(r), q->scratch, bytes,
						 q->stream);
	return CUDA_STEP_DONE;
}

/* Whether the driver knows @p; else it is ordinary memory of our process. */
static CUresult cuda_launch_is_device(const struct cuda *c, const void *p, bool *ret)
{
	unsigned type = 0;
	CUresult r =
		c->lib->cuPointerGetAttribute(&type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, cuda_ptr(p));

	*ret = r == CUDA_SUCCESS && type != CU_MEMORYTYPE_HOST;
	return r == CUDA_ERROR_INVALID_VALUE ? CUDA_SUCCESS : r;
}

/* One piece of a copy with host memory at one end. */
static enum cuda_step cuda_launch_copy_piece(struct cuda *c, struct cuda_queue *q,
					     struct cuda_item *item, const struct launch *k,
					     bool to_host, CUresult *ret)
{
	uint64_t left = k->n - item->at;
	uint64_t bytes = left < CUDA_STAGE_PIECE ? left : CUDA_STAGE_PIECE;
	char *dst = (char *)k->copy.dst + item->at;
	const char *src = (const char *)k->copy.src + item->at;
	struct cuda_record *r =
		cuda_stage_take(&q->stage, to_host ? CUDA_RECORD_OUT : CUDA_RECORD_IN, bytes);

	if (!r)
		return CUDA_STEP_FULL;
	q->launched++;
	if (to_host) {
		r->dst = dst;
		*ret = c->lib->cuMemcpyDtoHAsync(cuda_stage_payload(r), cuda_ptr(src), bytes,
						 q->stream);
	} else {
		memcpy(cuda_stage_payload(r), src, bytes);
		*ret = c->lib->cuMemcpyHtoDAsync(cuda_ptr(dst), cuda_stage_payload(r), bytes,
						 q->stream);
	}
	item->at += bytes;
	return CUDA_STEP_DONE;
}

static enum cuda_step cuda_launch_staged_copy(struct cuda *c, struct cuda_queue *q,
					      struct cuda_item *item, const struct launch *k,
					      CUresult *ret)
{
	enum cuda_step step = CUDA_STEP_DONE;
	bool from = false, to = false;

	*ret = cuda_launch_is_device(c, k->copy.src, &from);
	if (*ret == CUDA_SUCCESS)
		*ret = cuda_launch_is_device(c, k->copy.dst, &to);
	if (*ret != CUDA_SUCCESS)
		return CUDA_STEP_DONE;
	if (from && to) {
		*ret = cuda_launch_copy(c, q, k->copy.dst, k->copy.src, k->n);
		return CUDA_STEP_DONE;
	}
	if (!from && !to) {
		*ret = CUDA_ERROR_INVALID_VALUE;
		return CUDA_STEP_DONE;
	}
	item->results |= from;
	while (item->at < k->n && step == CUDA_STEP_DONE && *ret == CUDA_SUCCESS)
		step = cuda_launch_copy_piece(c, q, item, k, from, ret);
	return step;
}

/* ----------------------------------------- a reduction, and the step on it */

/* Elements [at, at + n) of the reduction's out, but to @to. */
static CUresult cuda_launch_reduce_block(struct cuda *c, struct cuda_queue *q,
					 const struct k_reduce *a, uint64_t at, uint64_t n,
					 void *to)
{
	const void *in[KERNEL_MAX_INPUTS];
	struct launch k = { .kind = LAUNCH_REDUCE, .n = n, .reduce = *a };
	CUresult r = CUDA_SUCCESS;

	for (unsigned i = 0; i < a->k; i++)
		in[i] = (const char *)a->in[i] + at * dtype_size(a->in_dtype);
	k.reduce.in = in;
	k.reduce.out = to;
	if (a->accumulate)
		r = cuda_launch_copy(c, q, to, (const float *)a->out + at, n * sizeof(float));
	return r == CUDA_SUCCESS ? cuda_launch_reduce(c, q, &k) : r;
}

static CUresult cuda_launch_step_block(struct cuda *c, struct cuda_queue *q, const struct k_step *s,
				       uint64_t n)
{
	struct launch k = { .n = n };

	if (s->kind == K_STEP_ADAMW) {
		k.adamw = s->adamw;
		return cuda_launch_adamw(c, q, &k);
	}
	if (s->kind == K_STEP_ADAM) {
		k.adam = s->adam;
		return cuda_launch_adam(c, q, &k);
	}
	k.sgd = s->sgd;
	return cuda_launch_sgd(c, q, &k);
}

static bool cuda_launch_is_far_ahead(struct cuda *c, struct cuda_queue *q)
{
	uint64_t executed;

	pthread_mutex_lock(&c->lock);
	executed = q->executed;
	pthread_mutex_unlock(&c->lock);
	return q->launched - executed >= CUDA_MAX_AHEAD;
}

/* Block after block through the same memory: the stream executes them one after the other. */
static enum cuda_step cuda_launch_reduce_step(struct cuda *c, struct cuda_queue *q,
					      struct cuda_item *item, const struct launch *k,
					      CUresult *ret)
{
	const struct k_reduce_step *a = &k->reduce_step;
	void *gradient = (void *)(uintptr_t)c->gradient;

	CHECK(q->which == BACKEND_Q_MAIN);
	while (item->at < k->n && *ret == CUDA_SUCCESS) {
		uint64_t n = k->n - item->at < CUDA_BLOCK ? k->n - item->at : CUDA_BLOCK;
		struct k_step step = k_step_at(&a->step, item->at, gradient);

		if (q->launched - q->marked >= CUDA_MARK_EVERY)
			return CUDA_STEP_MARK;
		if (cuda_launch_is_far_ahead(c, q))
			return CUDA_STEP_FULL;
		*ret = cuda_launch_reduce_block(c, q, &a->reduce, a->first + item->at, n, gradient);
		if (*ret == CUDA_SUCCESS)
			*ret = cuda_launch_step_block(c, q, &step, n);
		item->at += n;
	}
	return CUDA_STEP_DONE;
}

/* ------------------------------------ launches that a successor can complete */

static CUresult cuda_launch_adam_undo(struct cuda *c, struct cuda_queue *q, uint64_t n,
				      const struct adam_step *s, const struct cuda_undo *u)
{
	struct cuda_adam_f64_undo f64 = { .undo = *u };
	struct cuda_adam_undo any = { .undo = *u };

	if (s->f64) {
		f64.a = cuda_launch_adam_f64_args(n, s);
		return cuda_launch_run(c, q, CUDA_FN_ADAM_F64_UNDO, n, &f64);
	}
	any.a = cuda_launch_adam_any_args(n, s);
	return cuda_launch_run(c, q, CUDA_FN_ADAM_UNDO, n, &any);
}

CUresult cuda_launch_undo(struct cuda *c, struct cuda_queue *q, const struct launch *k,
			  uint64_t number)
{
	struct cuda_undo u = cuda_undo_of(c, number);
	struct adam_step s;

	switch (k->kind) {
	case LAUNCH_ADAMW:
		s = adam_step_of_adamw(&k->adamw);
		return cuda_launch_adam_undo(c, q, k->n, &s, &u);
	case LAUNCH_ADAM:
		s = adam_step_of_adam(&k->adam);
		return cuda_launch_adam_undo(c, q, k->n, &s, &u);
	case LAUNCH_SGD:
		return cuda_launch_run(c, q, CUDA_FN_SGD_UNDO, k->n,
				       &(struct cuda_sgd_undo){ cuda_launch_sgd_args(k), u });
	default:
		CHECK(k->kind == LAUNCH_SCALE);
		return cuda_launch_run(c, q, CUDA_FN_SCALE_UNDO, k->n,
				       &(struct cuda_scale_undo){ cuda_launch_scale_args(k), u });
	}
}

/* The number is written down before the launch: one that is not there was not launched. */
static CUresult cuda_launch_redo(struct cuda *c, struct cuda_queue *q, const struct cuda_item *item,
				 const struct launch *k)
{
	const struct backend_task *t = item->task;

	CHECK(q->which == BACKEND_Q_MAIN && c->undo.mem);
	redo_number(t->redo, t->first_redo + item->launch, ++c->undo.last);
	return cuda_launch_undo(c, q, k, c->undo.last);
}

/* Launches that are one launch, or nearly. */
static CUresult (*const launchers[_LAUNCH_N])(struct cuda *, struct cuda_queue *,
					      const struct launch *) = {
	[LAUNCH_CAST] = cuda_launch_cast,
	[LAUNCH_REDUCE] = cuda_launch_reduce,
	[LAUNCH_ALL_REDUCE] = cuda_launch_all_reduce,
	[LAUNCH_ADAMW] = cuda_launch_adamw,
	[LAUNCH_ADAM] = cuda_launch_adam,
	[LAUNCH_SGD] = cuda_launch_sgd,
	[LAUNCH_SCALE] = cuda_launch_scale,
	[LAUNCH_FILL] = cuda_launch_fill,
	[LAUNCH_FOUND_INF] = cuda_launch_found_inf,
	[LAUNCH_PACK] = cuda_launch_pack,
	[LAUNCH_CLAMP] = cuda_launch_clamp,
	[LAUNCH_UNSCALE] = cuda_launch_unscale,
	[LAUNCH_ADD_ROWS] = cuda_launch_add_rows,
	[LAUNCH_ASSEMBLE] = cuda_launch_assemble,
};

static enum cuda_step cuda_launch_one(struct cuda *c, struct cuda_queue *q, struct cuda_item *item,
				      const struct launch *k, CUresult *ret)
{
	if (item->task->redo) {
		*ret = cuda_launch_redo(c, q, item, k);
		return CUDA_STEP_DONE;
	}
	switch (k->kind) {
	case LAUNCH_NORM:
		item->results = true;
		return cuda_launch_norm(c, q, k, ret);
	case LAUNCH_COPY:
		return cuda_launch_staged_copy(c, q, item, k, ret);
	case LAUNCH_REDUCE_STEP:
		return cuda_launch_reduce_step(c, q, item, k, ret);
	default:
		CHECK(launchers[k->kind]);
		*ret = launchers[k->kind](c, q, k);
		return CUDA_STEP_DONE;
	}
}

enum cuda_step cuda_launch(struct cuda *c, struct cuda_queue *q, struct cuda_item *item)
{
	while (item->launch < item->task->n_launches) {
		const struct launch *k = &item->task->launches[item->launch];
		enum cuda_step step = CUDA_STEP_DONE;
		CUresult r = CUDA_SUCCESS;

		if (k->n > 0) {
			if (q->launched - q->marked >= CUDA_MARK_EVERY)
				return CUDA_STEP_MARK;
			step = cuda_launch_is_far_ahead(c, q) ? CUDA_STEP_FULL
							      : cuda_launch_one(c, q, item, k, &r);
			if (step != CUDA_STEP_DONE)
				return step;
		}
		if (r != CUDA_SUCCESS) {
			item->status = cuda_result(c, r, "a kernel");
			return CUDA_STEP_DONE;
		}
		item->launch++;
		item->at = 0;
	}
	return CUDA_STEP_DONE;
}

#endif
