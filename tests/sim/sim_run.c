/*
 * Kernels: kernels/ref on translated addresses.
 *
 * Every address is checked before anything runs, for its whole extent, its alignment and
 * the right to write; what fails breaks the context. Unused fields of a struct must be
 * zero: they are there to be used some day.
 */
#include <fcntl.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "cuda_kernels.h"
#include "ref/ref.h"
#include "kernels.h"
#include "sim_impl.h"
#include "sim_run.h"

/* What a kernel of one launch has been given; @ok: so far everything is there. */
struct run {
	unsigned blocks;
	bool ok;
};

static void *bytes_at(struct run *run, uint64_t addr, uint64_t bytes, uint64_t align, bool write)
{
	void *p;

	if (!run->ok)
		return NULL;
	if (bytes && addr % align) {
		stream_fault(CUDA_ERROR_MISALIGNED_ADDRESS, "0x%llx is not aligned to %llu",
			     (unsigned long long)addr, (unsigned long long)align);
		run->ok = false;
		return NULL;
	}
	p = item_translate(addr, bytes, write, false);
	run->ok = p != NULL;
	return p;
}

static void *at(struct run *run, uint64_t addr, uint64_t n, uint64_t size, bool write)
{
	uint64_t bytes;

	if (__builtin_mul_overflow(n, size, &bytes))
		bytes = UINT64_MAX;
	return bytes_at(run, addr, bytes, size, write);
}

static const void *in(struct run *run, uint64_t addr, uint64_t n, uint32_t dtype)
{
	return at(run, addr, n, dtype_size(dtype), false);
}

static void *out(struct run *run, uint64_t addr, uint64_t n, uint32_t dtype)
{
	return at(run, addr, n, dtype_size(dtype), true);
}

static void check_dtype(uint32_t dtype)
{
	if (dtype == DTYPE_NONE || dtype >= _DTYPE_N)
		sim_breach("a kernel was given element type %u", dtype);
}

static void check_zero(uint32_t zero)
{
	if (zero)
		sim_breach("a kernel was given an argument whose unused field is not zero");
}

static void run_cast(struct run *run, const struct cuda_cast *a)
{
	struct k_cast k = { .dst_dtype = a->dst_dtype, .src_dtype = a->src_dtype };

	check_dtype(a->dst_dtype);
	check_dtype(a->src_dtype);
	k.dst = out(run, a->dst, a->n, a->dst_dtype);
	k.src = in(run, a->src, a->n, a->src_dtype);
	if (run->ok)
		kernels_ref()->cast(&k, 0, a->n);
}

/* The caller's to free. */
static const void **inputs(struct run *run, const uint64_t *addr, uint32_t k, uint32_t most,
			   uint64_t n, uint32_t dtype)
{
	const void **p;

	check_dtype(dtype);
	if (k < 1 || k > most)
		sim_breach("a kernel was given %u inputs: it takes 1 to %u", k, most);
	p = calloc(k, sizeof(*p));
	if (!p)
		sim_breach("out of memory");
	for (uint32_t i = 0; i < k; i++)
		p[i] = in(run, addr[i], n, dtype);
	return p;
}

static struct k_factor factor(const struct cuda_factor *f)
{
	if (f->how > K_FACTOR_MUL)
		sim_breach("a kernel was given factor %u", f->how);
	if (f->how)
		check_dtype(f->dtype);
	return (struct k_factor){ f->how, f->dtype, f->value };
}

/* @rounds: the kernel is a form that does. */
static void run_reduce(struct run *run, const struct cuda_reduce *a, const uint64_t *addr,
		       uint32_t most, bool rounds)
{
	const void **x = inputs(run, addr, a->k, most, a->n, a->in_dtype);
	struct k_reduce k = { .in = x,
			      .k = a->k,
			      .in_dtype = a->in_dtype,
			      .out_dtype = a->out_dtype,
			      .sum_dtype = a->sum_dtype,
			      .pre = factor(&a->pre),
			      .post = factor(&a->post),
			      .accumulate = a->accumulate != 0 };

	check_zero(a->zero);
	check_dtype(a->out_dtype);
	check_dtype(a->sum_dtype);
	if (k_reduce_rounds(&k) != rounds)
		sim_breach("a reduction was given to the form of the kernel for others");
	k.out = out(run, a->out, a->n, a->out_dtype);
	if (run->ok)
		kernels_ref()->reduce(&k, 0, a->n);
	free(x);
}

static void run_all_reduce(struct run *run, const struct cuda_all_reduce *a, const uint64_t *addr,
			   uint32_t most)
{
	const void **x = inputs(run, addr, a->k, most, a->n, a->dtype);
	struct k_all_reduce k = { .in = x, .k = a->k, .dtype = a->dtype, .op = a->op };

	check_zero(a->zero);
	if (a->op == REDUCE_NONE || a->op >= _REDUCE_N)
		sim_breach("a kernel was given reduction %u", a->op);
	k.out = out(run, a->out, a->n, a->dtype);
	if (run->ok)
		kernels_ref()->all_reduce(&k, 0, a->n);
	free(x);
}

static void run_adamw(struct run *run, const struct cuda_adamw *a)
{
	struct k_adamw k = { .decay = a->decay,
			     .w1 = a->w1,
			     .b2 = a->b2,
			     .w2 = a->w2,
			     .step_size = a->step_size,
			     .sq = a->sq,
			     .eps = a->eps };

	check_zero(a->zero);
	k.p = out(run, a->p, a->n, DTYPE_FP32);
	k.g = in(run, a->g, a->n, DTYPE_FP32);
	k.m = out(run, a->m, a->n, DTYPE_FP32);
	k.v = out(run, a->v, a->n, DTYPE_FP32);
	if (run->ok)
		kernels_ref()->adamw(&k, 0, a->n);
}

static void run_adam(struct run *run, const struct cuda_adam *a)
{
	struct k_adam k = { .wd = a->wd,
			    .w1 = a->w1,
			    .b2 = a->b2,
			    .w2 = a->w2,
			    .step_size = a->step_size,
			    .sq = a->sq,
			    .eps = a->eps };

	check_zero(a->zero);
	k.p = out(run, a->p, a->n, DTYPE_FP32);
	k.g = in(run, a->g, a->n, DTYPE_FP32);
	k.m = out(run, a->m, a->n, DTYPE_FP32);
	k.v = out(run, a->v, a->n, DTYPE_FP32);
	if (run->ok)
		kernels_ref()->adam(&k, 0, a->n);
}

static void run_adam_any(struct run *run, const struct cuda_adam_any *a)
{
	struct k_adam_f64 none = { 0 };
	struct adam_step s = { .decoupled = a->decoupled != 0,
			       .maximize = a->maximize != 0,
			       .decay = a->decay,
			       .wd = a->wd,
			       .w1 = a->w1,
			       .b2 = a->b2,
			       .w2 = a->w2,
			       .step_size = a->step_size,
			       .sq = a->sq,
			       .eps = a->eps,
			       .d = &none,
			       .tail_from = a->tail_from };

	s.p = out(run, a->p, a->n, DTYPE_FP32);
	s.g = in(run, a->g, a->n, DTYPE_FP32);
	s.m = out(run, a->m, a->n, DTYPE_FP32);
	s.v = out(run, a->v, a->n, DTYPE_FP32);
	if (a->vmax)
		s.vmax = out(run, a->vmax, a->n, DTYPE_FP32);
	if (run->ok)
		ref_adam_step(&s, 0, a->n);
}

static void run_adam_f64(struct run *run, const struct cuda_adam_f64 *a)
{
	const struct k_adam_f64 d = { .decay = a->decay,
				      .wd = a->wd,
				      .w1 = a->w1,
				      .b2 = a->b2,
				      .w2 = a->w2,
				      .step_size = a->step_size,
				      .sq = a->sq,
				      .eps = a->eps };
	struct adam_step s = {
		.decoupled = a->decoupled != 0, .maximize = a->maximize != 0, .f64 = true, .d = &d
	};

	s.p = out(run, a->p, a->n, DTYPE_FP32);
	s.g = in(run, a->g, a->n, DTYPE_FP32);
	s.m = out(run, a->m, a->n, DTYPE_FP32);
	s.v = out(run, a->v, a->n, DTYPE_FP32);
	if (a->vmax)
		s.vmax = out(run, a->vmax, a->n, DTYPE_FP32);
	if (run->ok)
		ref_adam_step(&s, 0, a->n);
}

static void run_sgd(struct run *run, const struct cuda_sgd *a)
{
	struct k_sgd k = { .lr = a->lr,
			   .wd = a->wd,
			   .mu = a->mu,
			   .nesterov = a->nesterov != 0,
			   .first = a->first != 0,
			   .maximize = a->maximize != 0,
			   .dampening = 1 - (double)a->w, /* exact: w came from there */
			   .profile = K_FUSED,
			   .tail_from = a->tail_from };

	check_zero(a->zero);
	k.p = out(run, a->p, a->n, DTYPE_FP32);
	k.g = in(run, a->g, a->n, DTYPE_FP32);
	if (a->mu != 0)
		k.buf = out(run, a->buf, a->n, DTYPE_FP32);
	if (run->ok)
		kernels_ref()->sgd(&k, 0, a->n);
}

/* The partials of ref's blocks go into those of the launch in turn: another order than a
 * device's, the same sum within what kernels/cuda promises. */
static void norm_fold(const double *of_ref, uint64_t n_ref, double *partial, unsigned n, bool inf)
{
	memset(partial, 0, n * sizeof(*partial));
	for (uint64_t i = 0; i < n_ref; i++) {
		double *p = &partial[i % n];

		if (!inf)
			*p += of_ref[i];
		else if (of_ref[i] > *p || isnan(of_ref[i]))
			*p = of_ref[i];
	}
}

static void run_power(struct run *run, const struct cuda_norm_power *a)
{
	uint64_t n_ref = (a->n + KERNEL_NORM_BLOCK - 1) / KERNEL_NORM_BLOCK;
	struct k_norm k = { .p = a->p };
	double *partial;

	if (!(a->p > 0))
		sim_breach("a norm was given power %g", a->p);
	if (run->blocks > CUDA_NORM_PARTIALS)
		sim_breach("a norm was launched with %u blocks", run->blocks);
	k.x = in(run, a->x, a->n, DTYPE_FP32);
	partial = at(run, a->partial, run->blocks, sizeof(double), true);
	if (!run->ok)
		return;
	k.partial = calloc(n_ref + 1, sizeof(double));
	if (!k.partial)
		sim_breach("out of memory");
	kernels_ref()->norm(&k, 0, a->n);
	norm_fold(k.partial, n_ref, partial, run->blocks, isinf(k.p));
	free(k.partial);
}

static void run_norm(struct run *run, const struct cuda_norm *a)
{
	const struct cuda_norm_power power = { a->x, a->n, a->partial, a->inf ? INFINITY : 2 };

	check_zero(a->zero);
	run_power(run, &power);
}

static void run_scale(struct run *run, const struct cuda_scale *a)
{
	struct k_scale k = { .factor = a->factor, NULL };

	check_zero(a->zero);
	k.x = out(run, a->x, a->n, DTYPE_FP32);
	if (run->ok)
		kernels_ref()->scale(&k, 0, a->n);
}

static void run_fill(struct run *run, const struct cuda_fill *a)
{
	struct k_fill k = { .seed = a->seed,
			    .stream = a->stream,
			    .first = a->first,
			    .kind = a->kind,
			    .a = a->a,
			    .b = a->b };

	check_zero(a->zero);
	if (a->kind < FILL_CONSTANT || a->kind > FILL_NORMAL)
		sim_breach("a kernel was given fill %u", a->kind);
	k.dst = out(run, a->dst, a->n, DTYPE_FP32);
	if (run->ok)
		kernels_ref()->fill(&k, 0, a->n);
}

static void run_found_inf(struct run *run, const struct cuda_found_inf *a)
{
	struct k_found_inf k = { .dtype = a->dtype };

	check_zero(a->zero);
	check_dtype(a->dtype);
	k.x = in(run, a->x, a->n, a->dtype);
	k.found = out(run, a->found, 1, DTYPE_FP32);
	if (run->ok)
		kernels_ref()->found_inf(&k, 0, a->n);
}

static void run_clamp(struct run *run, const struct cuda_clamp *a)
{
	struct k_clamp k = { .x = out(run, a->x, a->n, DTYPE_FP32), .lo = a->lo, .hi = a->hi };

	if (run->ok)
		kernels_ref()->clamp(&k, 0, a->n);
}

static void run_unscale(struct run *run, const struct cuda_unscale *a)
{
	struct k_unscale k = { .inv = a->inv };

	check_zero(a->zero);
	k.x = out(run, a->x, a->n, DTYPE_FP32);
	k.found = out(run, a->found, 1, DTYPE_FP32);
	if (run->ok)
		kernels_ref()->unscale(&k, 0, a->n);
}

static void run_add_rows(struct run *run, const struct cuda_add_rows *a)
{
	struct k_add_rows k = { .row_elements = a->n,
				.n_rows = a->n_rows,
				.dtype = a->dtype,
				.pre = factor(&a->pre),
				.first_row = a->first_row,
				.row_limit = a->row_limit };
	uint64_t rows = a->row_limit - a->first_row;

	check_dtype(a->dtype);
	k.out = out(run, a->out, rows * a->n, DTYPE_FP32);
	k.rows = at(run, a->rows, a->n_rows, sizeof(*k.rows), false);
	k.values = in(run, a->values, a->n_rows * a->n, a->dtype);
	if (run->ok)
		kernels_ref()->add_rows(&k, 0, a->n);
}

/* Elements from the first one to behind the last one. */
static uint64_t extent(uint64_t rows, uint64_t row_elements, uint64_t stride)
{
	uint64_t n;

	if (!rows || !row_elements)
		return 0;
	if (__builtin_mul_overflow(rows - 1, stride, &n) ||
	    __builtin_add_overflow(n, row_elements, &n))
		return UINT64_MAX;
	return n;
}

static void run_pack(struct run *run, const struct cuda_pack *a)
{
	struct k_pack k = { .dst_stride = a->dst_stride,
			    .src_stride = a->src_stride,
			    .row_elements = a->row_elements,
			    .dst_dtype = a->dst_dtype,
			    .src_dtype = a->src_dtype };

	check_dtype(a->dst_dtype);
	check_dtype(a->src_dtype);
	k.dst = out(run, a->dst, extent(a->rows, a->row_elements, a->dst_stride), a->dst_dtype);
	k.src = in(run, a->src, extent(a->rows, a->row_elements, a->src_stride), a->src_dtype);
	if (run->ok && a->row_elements)
		kernels_ref()->pack(&k, 0, a->rows * a->row_elements);
}

/* -- a kernel whose tables are in the device's memory, with addresses of it */

#define MOST_BOXES 4096u

static uint64_t address(const void *p)
{
	return (uint64_t)(uintptr_t)p;
}

static uint64_t box_extent(const struct k_assemble_box *x)
{
	uint64_t n = 1;

	for (unsigned i = 0; i < 3; i++)
		n += (x->n[i] - 1) * x->src_stride[i];
	return n;
}

/* @boxes: MOST_BOXES. */
static void run_boxes(struct run *run, struct k_assemble_tensor *t, struct k_assemble_box *boxes)
{
	const struct k_assemble_box *from =
		bytes_at(run, address(t->boxes), t->n_boxes * sizeof(*from), 8, false);

	if (t->n_boxes > MOST_BOXES)
		sim_breach("a tensor has %u boxes; the simulator knows %u", t->n_boxes, MOST_BOXES);
	for (unsigned i = 0; run->ok && i < t->n_boxes; i++) {
		boxes[i] = from[i];
		check_dtype(from[i].src_dtype);
		boxes[i].src =
			in(run, address(from[i].src), box_extent(&from[i]), from[i].src_dtype);
	}
	t->boxes = boxes;
}

static void run_scales(struct run *run, struct k_assemble_tensor *t, struct k_assemble_scales *own)
{
	const struct k_assemble_scales *from =
		bytes_at(run, address(t->scales), sizeof(*from), 8, false);

	if (!run->ok)
		return;
	*own = *from;
	own->amax = at(run, address(from->amax), 1, sizeof(*own->amax), true);
	t->scales = own;
}

/* A block that is made. */
struct run_made {
	char *to;
	uint64_t addr; /* of the device */
	uint64_t n;
	size_t size; /* of an element */
};

/* The delta of block @e, as that of a block 0. Return: NULL: there is none. */
static const struct k_delta *run_delta(struct run *run, const struct cuda_assemble *a, uint64_t e,
				       const struct run_made *m, struct k_delta *ret)
{
	if (!a->deltas)
		return NULL;
	*ret = (struct k_delta){
		.base = at(run, m->addr + a->shift, m->n, m->size, false),
		.made = m->to,
		.out = bytes_at(run, a->out, a->room, 8, true),
		.room = a->room,
		.used = bytes_at(run, a->used, sizeof(uint64_t), 8, true),
		.blocks = bytes_at(run, a->deltas + e * sizeof(*ret->blocks), sizeof(*ret->blocks),
				   8, true),
	};
	return run->ok ? ret : NULL;
}

/* Block @e, whose tensor is translated for it alone. */
static void run_block(struct run *run, const struct cuda_assemble *a, uint64_t e,
		      const struct k_assemble_block *b, uint32_t *crc)
{
	static struct k_assemble_box boxes[MOST_BOXES];
	struct k_assemble_scales scales;
	const struct k_assemble_tensor *from =
		bytes_at(run, a->tensors + b->tensor * sizeof(*from), sizeof(*from), 8, false);
	struct k_assemble_tensor t;
	struct k_assemble_block own = *b;
	struct k_assemble k = {
		.tensors = &t, .blocks = &own, .crc = crc, .pass = (enum k_assemble_pass)a->pass
	};
	struct k_delta delta;
	size_t size;

	if (!run->ok)
		return;
	t = *from;
	own.tensor = 0;
	size = dtype_size(t.dst_dtype);
	run_boxes(run, &t, boxes);
	if (t.scales && run->ok)
		run_scales(run, &t, &scales);
	if (a->pass == K_ASSEMBLE_MAKE && run->ok) {
		char *to =
			at(run, a->base + address(from->dst) + b->first * size, b->n, size, true);

		t.dst = to ? to - b->first * size : NULL;
		if (to)
			k.delta = run_delta(
				run, a, e,
				&(struct run_made){ to,
						    a->base + address(from->dst) + b->first * size,
						    b->n, size },
				&delta);
	}
	if (run->ok)
		kernels_ref()->assemble(&k, 0, 1);
}

static void run_assemble(struct run *run, const struct cuda_assemble *a)
{
	bool makes = a->pass == K_ASSEMBLE_MAKE;
	const struct k_assemble_block *blocks =
		bytes_at(run, a->blocks, a->n * sizeof(*blocks), 8, false);
	uint32_t *crc = makes ? at(run, a->crc, a->n, sizeof(*crc), true) : NULL;

	check_zero(a->zero);
	if (!makes && a->crc)
		sim_breach("a pass that makes nothing was given checksums");
	for (uint64_t e = 0; run->ok && e < a->n; e++)
		run_block(run, a, e, &blocks[e], makes ? crc + e : NULL);
}

/* -- kernels that keep what they change: their own code, since that order is what they are for */

static void *undo_array(struct run *run, uint64_t addr, uint64_t n)
{
	return addr ? out(run, addr, n, DTYPE_FP32) : NULL;
}

#define UNDO_ADDRESS(p) ((uint64_t)(uintptr_t)(p))

static struct cuda_undo undo_of(struct run *run, const struct cuda_undo *u)
{
	struct cuda_undo own = *u;

	check_zero(u->zero);
	if (!u->launch || u->launch >> (64 - CUDA_UNDO_LAUNCH_SHIFT))
		sim_breach("a kernel was given launch %llu", (unsigned long long)u->launch);
	if (undo_threads(run->blocks) > u->room)
		sim_breach("a kernel of %u threads was given room for %u",
			   undo_threads(run->blocks), u->room);
	own.words = UNDO_ADDRESS(at(run, u->words, u->room, CUDA_UNDO_WORD, true));
	own.old = UNDO_ADDRESS(
		at(run, u->old, (uint64_t)u->room * 2 * CUDA_UNDO_ARRAYS, CUDA_UNDO_VECTOR, true));
	return own;
}

/* Of both Adams. */
#define UNDO_ADAM(own, from)                                                               \
	do {                                                                               \
		(own).a.p = UNDO_ADDRESS(undo_array(run, (from)->a.p, (from)->a.n));       \
		(own).a.m = UNDO_ADDRESS(undo_array(run, (from)->a.m, (from)->a.n));       \
		(own).a.v = UNDO_ADDRESS(undo_array(run, (from)->a.v, (from)->a.n));       \
		(own).a.vmax = UNDO_ADDRESS(undo_array(run, (from)->a.vmax, (from)->a.n)); \
		(own).a.g = UNDO_ADDRESS(in(run, (from)->a.g, (from)->a.n, DTYPE_FP32));   \
		(own).undo = undo_of(run, &(from)->undo);                                  \
	} while (0)

static void run_adam_undo(struct run *run, const struct cuda_adam_undo *a)
{
	struct cuda_adam_undo own = *a;

	UNDO_ADAM(own, a);
	if (run->ok)
		undo_run(CUDA_FN_ADAM_UNDO, &own, run->blocks);
}

static void run_adam_f64_undo(struct run *run, const struct cuda_adam_f64_undo *a)
{
	struct cuda_adam_f64_undo own = *a;

	UNDO_ADAM(own, a);
	if (run->ok)
		undo_run(CUDA_FN_ADAM_F64_UNDO, &own, run->blocks);
}

static void run_sgd_undo(struct run *run, const struct cuda_sgd_undo *a)
{
	struct cuda_sgd_undo own = *a;

	check_zero(a->a.zero);
	own.a.p = UNDO_ADDRESS(out(run, a->a.p, a->a.n, DTYPE_FP32));
	own.a.g = UNDO_ADDRESS(in(run, a->a.g, a->a.n, DTYPE_FP32));
	if (a->a.mu != 0)
		own.a.buf = UNDO_ADDRESS(out(run, a->a.buf, a->a.n, DTYPE_FP32));
	own.undo = undo_of(run, &a->undo);
	if (run->ok)
		undo_run(CUDA_FN_SGD_UNDO, &own, run->blocks);
}

static void run_scale_undo(struct run *run, const struct cuda_scale_undo *a)
{
	struct cuda_scale_undo own = *a;

	check_zero(a->a.zero);
	own.a.x = UNDO_ADDRESS(out(run, a->a.x, a->a.n, DTYPE_FP32));
	own.undo = undo_of(run, &a->undo);
	if (run->ok)
		undo_run(CUDA_FN_SCALE_UNDO, &own, run->blocks);
}

static void run_spin(struct run *run, const struct cuda_spin *a)
{
	uint64_t *ran = a->ran ? at(run, a->ran, 1, sizeof(*ran), true) : NULL;
	uint64_t took;

	if (!run->ok)
		return;
	took = spin_run(a->nanoseconds);
	if (ran)
		*ran = took;
}

static void run_reduce_few(struct run *run, const struct cuda_reduce *a, bool rounds)
{
	run_reduce(run, a, a->in, CUDA_FEW_INPUTS, rounds);
}

static void run_reduce_many(struct run *run, const struct cuda_reduce_many *a, bool rounds)
{
	run_reduce(run, &a->a, a->in, CUDA_MANY_INPUTS, rounds);
}

static void run_all_reduce_many(struct run *run, const struct cuda_all_reduce_many *a)
{
	run_all_reduce(run, &a->a, a->in, CUDA_MANY_INPUTS);
}

void kernel_run(unsigned fn, const void *args, unsigned blocks)
{
	struct run run = { .blocks = blocks, .ok = true };

	switch ((enum cuda_fn)fn) {
	case CUDA_FN_CAST:
		run_cast(&run, args);
		break;
	case CUDA_FN_REDUCE:
		run_reduce_few(&run, args, false);
		break;
	case CUDA_FN_REDUCE_MANY:
		run_reduce_many(&run, args, false);
		break;
	case CUDA_FN_REDUCE_ROUND:
		run_reduce_few(&run, args, true);
		break;
	case CUDA_FN_REDUCE_ROUND_MANY:
		run_reduce_many(&run, args, true);
		break;
	case CUDA_FN_ALL_REDUCE:
		run_all_reduce(&run, args, ((const struct cuda_all_reduce *)args)->in,
			       CUDA_FEW_INPUTS);
		break;
	case CUDA_FN_ALL_REDUCE_MANY:
		run_all_reduce_many(&run, args);
		break;
	case CUDA_FN_ADAMW:
		run_adamw(&run, args);
		break;
	case CUDA_FN_ADAM:
		run_adam(&run, args);
		break;
	case CUDA_FN_ADAM_ANY:
		run_adam_any(&run, args);
		break;
	case CUDA_FN_ADAM_F64:
		run_adam_f64(&run, args);
		break;
	case CUDA_FN_SGD:
		run_sgd(&run, args);
		break;
	case CUDA_FN_NORM:
		run_norm(&run, args);
		break;
	case CUDA_FN_NORM_POWER:
		run_power(&run, args);
		break;
	case CUDA_FN_SCALE:
		run_scale(&run, args);
		break;
	case CUDA_FN_FILL:
		run_fill(&run, args);
		break;
	case CUDA_FN_FOUND_INF:
		run_found_inf(&run, args);
		break;
	case CUDA_FN_PACK:
		run_pack(&run, args);
		break;
	case CUDA_FN_CLAMP:
		run_clamp(&run, args);
		break;
	case CUDA_FN_UNSCALE:
		run_unscale(&run, args);
		break;
	case CUDA_FN_ADD_ROWS:
		run_add_rows(&run, args);
		break;
	case CUDA_FN_ASSEMBLE:
		run_assemble(&run, args);
		break;
	case CUDA_FN_ADAM_UNDO:
		run_adam_undo(&run, args);
		break;
	case CUDA_FN_ADAM_F64_UNDO:
		run_adam_f64_undo(&run, args);
		break;
	case CUDA_FN_SGD_UNDO:
		run_sgd_undo(&run, args);
		break;
	case CUDA_FN_SCALE_UNDO:
		run_scale_undo(&run, args);
		break;
	case CUDA_FN_SPIN:
		run_spin(&run, args);
		break;
	case _CUDA_FN_N:
		break;
	}
}
