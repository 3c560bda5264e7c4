/*
 * DdpBucket: one bucket of a ddp is reduced. No request: the daemon asks for it itself, for
 * each rank when it has launched the bucket, so that ranks meet in the order of buckets.
 *
 * On one device a kernel a piece folds the ranks' buffers into the units' gradients, and
 * from there the average goes back into every buffer. Between devices it goes through sums of
 * the whole bucket, in the dtype that the units' plans add in, which is one for all of a bucket.
 * What no rank has used is left alone everywhere. Between nodes the same: each has the pieces of its own
 * ranks, and what these are made from is shown first (op_ddp_shown.h).
 */
#include <errno.h>
#include <stdlib.h>

#include "core/check.h"
#include "ddp/op_ddp.h"
#include "ddp/op_ddp_shown.h"
#include "op/op_list.h"
#include "op/op.h"
#include "op/op_util.h"
#include "reduce/reduce_ddp.h"
#include "reduce/reduce_run.h"
#include "step/apply.h"
#include "step/backward.h"
#include "unit/optim.h"
#include "unit/reduce_plan.h"
#include "work/chain.h"
#include "work/coll.h"

/* Tensors side by side, in the bucket and in their unit, with zeros from the same ranks. */
struct piece {
	uint64_t off, n; /* elements of the bucket */
	uint32_t tensor; /* the first one */
	uint64_t at;     /* one device: element of the unit's gradients */
	struct k_factor pre;
};

struct bucket_work {
	const struct ddp *d;
	const struct ddp_buckets *b;
	uint32_t bucket;
	enum dtype dtype;
	size_t size; /* of an element */
	enum dtype sum_dtype;
	uint64_t zeros;    /* bytes of them that are needed */
	uint32_t arriving; /* of its tensors, the next to be looked at when all are reduced */
	uint32_t n_pieces;
	struct piece *pieces;
	char **base;       /* by member: its bucket; NULL: it contributes zeros */
	const void **next; /* where inputs of kernels are noted */
	const void *inputs[];
};

struct op_ddp_bucket_state {
	struct gradient_state gradient; /* first: gradient_of */
	struct bucket_work *work;       /* owned; NULL: not yet */
	struct op_ddp_shown shown;
	struct chain chain;
};

static struct op_ddp_bucket_state *op_ddp_bucket_of(const struct coll *c)
{
	return coll_own(c, sizeof(struct op_ddp_bucket_state));
}

static struct bucket_work *op_ddp_bucket_work_of(const struct coll *c)
{
	return op_ddp_bucket_of(c)->work;
}

static void op_ddp_bucket_free(struct coll *c)
{
	free(op_ddp_bucket_of(c)->work);
	op_ddp_shown_end(&op_ddp_bucket_of(c)->shown);
	shards_free(c);
}

static int op_ddp_bucket_check(struct op *op, struct fault *f)
{
	const struct ddp *d = ddp_args(op)->d;

	if (op_check_not_torn(op, f))
		return f->code;
	if (!op_hold_buffer(op, op->buffer))
		return fault_set(f, FAULT_STATE, NULL,
				 "bucket %u of ddp %u: this rank has given its gradients back",
				 ddp_args(op)->bucket, d->id);
	op_print(op, "bucket %u of ddp %u%s", ddp_args(op)->bucket, d->id,
		 ddp_args(op)->layout ? " (rebuilt)" : "");
	op->entry.print.words[2] = d->number;
	op->entry.print.words[3] = ddp_args(op)->bucket;
	op->entry.print.words[4] = ddp_args(op)->layout;
	op_print_order(op);
	return 0;
}

/* Its units are to no other op meanwhile: what that does, a step before all, could take their
 * gradients away. Passes come after a reduction for the state it leaves, and this leaves none.
 * Another bucket of the group is behind this one on all ranks. */
static bool op_ddp_bucket_meets(const struct op *op, const struct op *other)
{
	const struct ddp *d = ddp_args(op)->d;
	const struct ddp_buckets *b = &d->layouts[ddp_args(op)->layout];
	uint32_t j = b->begin[ddp_args(op)->bucket], end = b->begin[ddp_args(op)->bucket + 1];

	if (other->type->is_pass)
		return false;
	if (other->type == &op_ddp_bucket)
		return other->group == op->group;
	while (other->unit && j < end && d->tensors[b->tensors[j]].unit != other->unit)
		j++;
	return j < end;
}

/* -------------------------------------------------------------- what it has */

/* The tensor at @j of the assignment. */
static bool op_ddp_bucket_is_touched(const struct coll *c, uint32_t j)
{
	const struct bucket_work *w = op_ddp_bucket_work_of(c);

	return op_ddp_shown_is_used(c, &op_ddp_bucket_of(c)->shown, j - w->b->begin[w->bucket]);
}

static bool op_ddp_bucket_gives_zeros(const struct coll *c, uint32_t i, uint32_t tensor)
{
	return !op_ddp_bucket_work_of(c)->base[i] ||
	       op_ddp_bucket_work_of(c)->d->ranks[i].flags[tensor] & DDP_ZERO;
}

static uint64_t op_ddp_bucket_offset_of(const struct bucket_work *w, uint32_t tensor)
{
	uint32_t first = w->b->tensors[w->b->begin[w->bucket]];

	CHECK(w->size > 0);
	return (w->b->offset[tensor] - w->b->offset[first]) / w->size;
}

static bool op_ddp_bucket_joins(const struct coll *c, const struct piece *p, uint32_t tensor)
{
	const struct bucket_work *w = op_ddp_bucket_work_of(c);
	const struct ddp_tensor *t = &w->d->tensors[tensor];

	if (t->unit != w->d->tensors[p->tensor].unit ||
	    op_ddp_bucket_offset_of(w, tensor) != p->off + p->n ||
	    ddp_run(w->d, 0, tensor).at != p->at + p->n)
		return false;
	for (uint32_t i = 0; i < c->n; i++)
		if (op_ddp_bucket_gives_zeros(c, i, tensor) !=
		    op_ddp_bucket_gives_zeros(c, i, p->tensor))
			return false;
	return true;
}

static struct reduce_plan op_ddp_bucket_plan_of(const struct coll *c, uint32_t tensor)
{
	const struct unit *u = op_ddp_bucket_work_of(c)->d->tensors[tensor].unit;
	struct reduce_setting s = reduce_setting_now(u, coll_divide_by(c), reduce_device_of(u));
	struct reduce_plan plan;

	reduce_plan_make(&s, &plan);
	return plan;
}

static void op_ddp_bucket_add_pieces(struct coll *c)
{
	struct bucket_work *w = op_ddp_bucket_work_of(c);

	for (uint32_t j = w->b->begin[w->bucket]; j < w->b->begin[w->bucket + 1]; j++) {
		uint32_t i = w->b->tensors[j];
		uint64_t n = w->d->tensors[i].elements;
		struct piece *p = w->n_pieces ? &w->pieces[w->n_pieces - 1] : NULL;

		if (!op_ddp_bucket_is_touched(c, j))
			continue;
		if (p && op_ddp_bucket_joins(c, p, i))
			p->n += n;
		else
			w->pieces[w->n_pieces++] =
				(struct piece){ op_ddp_bucket_offset_of(w, i), n, i,
						ddp_run(w->d, 0, i).at,
						op_ddp_bucket_plan_of(c, i).pre };
	}
	for (uint32_t k = 0; k < w->n_pieces; k++)
		for (uint32_t i = 0; i < c->n; i++)
			if (op_ddp_bucket_gives_zeros(c, i, w->pieces[k].tensor) &&
			    w->pieces[k].n * w->size > w->zeros)
				w->zeros = w->pieces[k].n * w->size;
}

/* Addresses are noted at the start: the ops hold their buffers until it ends. */
static int op_ddp_bucket_begin_work(struct coll *c)
{
	const struct op *op = c->ops[0];
	const struct ddp_buckets *b = &ddp_args(op)->d->layouts[ddp_args(op)->layout];
	uint32_t bucket = ddp_args(op)->bucket, first = b->tensors[b->begin[bucket]];
	size_t n = b->begin[bucket + 1] - b->begin[bucket];
	size_t op_ddp_bucket_inputs = n * (c->n + 2 * (size_t)c->n_parts);
	struct bucket_work *w = calloc(1, sizeof(*w) + op_ddp_bucket_inputs * sizeof(void *) +
						  c->n * sizeof(char *) + n * sizeof(struct piece));

	CHECK(bucket < b->n && n > 0);
	if (!w)
		return -ENOMEM;
	op_ddp_bucket_of(c)->work = w;
	w->d = ddp_args(op)->d;
	w->b = b;
	w->bucket = bucket;
	w->arriving = b->begin[bucket];
	w->dtype = (enum dtype)w->d->tensors[first].unit->rec->gradient_dtype;
	w->size = dtype_size(w->dtype);
	w->sum_dtype = op_ddp_bucket_plan_of(c, first).sum_dtype; /* of its other units, too */
	w->next = w->inputs;
	w->base = (char **)(w->inputs + op_ddp_bucket_inputs);
	w->pieces = (struct piece *)(w->base + c->n);
	for (uint32_t i = 0; i < c->n; i++) {
		const struct member_buffer *mb = c->ops[i]->held;

		if (c->ops[i]->surrogate)
			continue;
		CHECK(mb && mb->region.bytes >= b->bytes); /* taken when it was checked */
		w->base[i] = (char *)region_addr(&mb->region) + b->offset[first];
	}
	return 0;
}

/* -------------------------------------------------------------------- the end */

/* The next of its units whose last gradient of the pass is here. Return: false: there is none. */
static bool op_ddp_bucket_next_unit(struct coll *c)
{
	struct bucket_work *w = op_ddp_bucket_work_of(c);
	struct ddp *d = ddp_args(c->ops[0])->d;

	while (w->arriving < w->b->begin[w->bucket + 1]) {
		uint32_t i = w->b->tensors[w->arriving++];

		if (!reduce_ddp_unit_is_whole(c, d, i))
			continue;
		c->unit = d->tensors[i].unit;
		return true;
	}
	return false;
}

static void op_ddp_bucket_note_gradients(struct coll *c)
{
	struct bucket_work *w = op_ddp_bucket_work_of(c);
	bool over = c->ops[0]->m->epoch != c->job->rec->epoch;

	for (uint32_t j = w->b->begin[w->bucket]; j < w->b->begin[w->bucket + 1]; j++) {
		uint32_t i = w->b->tensors[j];
		const struct ddp_tensor *t = &w->d->tensors[i];
		bool touched = op_ddp_bucket_is_touched(c, j);

		CHECK(t->unit->rec->group == c->group->id && !t->sparse);
		ddp_args(c->ops[0])->d->untouched[i] = !touched;
		/* a gradient of an epoch that has ended is of no use to the next one */
		if (touched && !over)
			unit_got_gradient(t->unit, t->tensor);
	}
}

/* -------------------------------------------------------------------- kernels */

static const void **op_ddp_bucket_inputs(struct coll *c, struct coll_part *p,
					 const struct piece *piece)
{
	struct bucket_work *w = op_ddp_bucket_work_of(c);
	const void **in = w->next;

	for (uint32_t k = 0; k < p->n; k++) {
		uint32_t i = p->members[k];

		CHECK(w->next < (const void **)w->base);
		*w->next++ = op_ddp_bucket_gives_zeros(c, i, piece->tensor)
				     ? region_addr(&p->scratch[1])
				     : (void *)(w->base[i] + piece->off * w->size);
	}
	return in;
}

/* What is left alone, but has no gradient either: norms must not see what is there from
 * earlier steps. */
static void op_ddp_bucket_zero_untouched(struct coll *c, unsigned d)
{
	const struct bucket_work *w = op_ddp_bucket_work_of(c);

	for (uint32_t j = w->b->begin[w->bucket]; j < w->b->begin[w->bucket + 1]; j++) {
		uint32_t i = w->b->tensors[j];
		const struct ddp_tensor *t = &w->d->tensors[i];
		const struct unit_run op_ddp_bucket_run = ddp_run(w->d, d, i);

		if (op_ddp_bucket_run.n && !op_ddp_bucket_is_touched(c, j) &&
		    unit_lacks_gradient(t->unit, t->tensor))
			coll_launch(&c->parts[d], LAUNCH_FILL, op_ddp_bucket_run.n)->fill =
				(struct k_fill){ .dst = optim_at(&t->unit->parts[d].grads,
								 op_ddp_bucket_run.at),
						 .kind = FILL_CONSTANT };
	}
}

static size_t op_ddp_bucket_tensors_of(const struct bucket_work *w)
{
	return w->b->begin[w->bucket + 1] - w->b->begin[w->bucket];
}

/* -- one device ---------------------------------------------------------------- */

static float *op_ddp_bucket_gradients(const struct bucket_work *w, const struct piece *p)
{
	return optim_at(&w->d->tensors[p->tensor].unit->parts[0].grads, p->at);
}

static enum res op_ddp_bucket_back_to_ranks(struct coll *c)
{
	struct bucket_work *w = op_ddp_bucket_work_of(c);

	RES_TRY(coll_need_launches(c, (size_t)w->n_pieces * c->n));
	for (uint32_t k = 0; k < w->n_pieces; k++) {
		const struct piece *p = &w->pieces[k];

		for (uint32_t i = 0; i < c->n; i++)
			if (w->base[i])
				coll_launch(&c->parts[0], LAUNCH_CAST, p->n)->cast =
					(struct k_cast){ .dst = w->base[i] + p->off * w->size,
							 .src = op_ddp_bucket_gradients(w, p),
							 .dst_dtype = w->dtype,
							 .src_dtype = DTYPE_FP32 };
	}
	return coll_kernels(c);
}

static enum res op_ddp_bucket_fold(struct coll *c)
{
	struct bucket_work *w = op_ddp_bucket_work_of(c);

	RES_TRY(coll_need_launches(c, op_ddp_bucket_tensors_of(w)));
	for (uint32_t k = 0; k < w->n_pieces; k++) {
		const struct piece *p = &w->pieces[k];
		struct reduce_plan plan = op_ddp_bucket_plan_of(c, p->tensor);

		coll_launch(&c->parts[0], LAUNCH_REDUCE, p->n)->reduce =
			(struct k_reduce){ .out = op_ddp_bucket_gradients(w, p),
					   .out_dtype = DTYPE_FP32,
					   .in = op_ddp_bucket_inputs(c, &c->parts[0], p),
					   .k = c->n,
					   .in_dtype = w->dtype,
					   .pre = plan.pre,
					   .sum_dtype = plan.sum_dtype,
					   .post = plan.post };
	}
	op_ddp_bucket_zero_untouched(c, 0);
	return coll_kernels(c);
}

/* -- several devices ------------------------------------------------------------ */

/* From element @off on. */
static void *op_ddp_bucket_sums(const struct coll *c, const struct coll_part *p, uint64_t off)
{
	return (char *)region_addr(&p->scratch[0]) +
	       off * dtype_size(op_ddp_bucket_work_of(c)->sum_dtype);
}

/* @n elements of the bucket's sums from @off on, to @out. */
static void op_ddp_bucket_finish_launch(struct coll *c, struct coll_part *p,
					const struct piece *piece, uint64_t off, uint64_t n,
					void *out, enum dtype dtype)
{
	struct bucket_work *w = op_ddp_bucket_work_of(c);
	struct reduce_plan plan = op_ddp_bucket_plan_of(c, piece->tensor);

	CHECK(w->next < (const void **)w->base);
	CHECK(off + n <= w->b->elements[w->bucket]);
	*w->next = op_ddp_bucket_sums(c, p, off);
	coll_launch(p, LAUNCH_REDUCE, n)->reduce = (struct k_reduce){ .out = out,
								      .out_dtype = dtype,
								      .in = w->next++,
								      .k = 1,
								      .in_dtype = w->sum_dtype,
								      .sum_dtype = w->sum_dtype,
								      .post = plan.post };
}

static void op_ddp_bucket_finish_part(struct coll *c, unsigned d)
{
	struct bucket_work *w = op_ddp_bucket_work_of(c);
	struct coll_part *p = &c->parts[d];

	for (uint32_t j = w->b->begin[w->bucket]; j < w->b->begin[w->bucket + 1]; j++) {
		uint32_t i = w->b->tensors[j];
		const struct unit_run op_ddp_bucket_run = ddp_run(w->d, d, i);
		struct piece whole = { .tensor = i };

		if (op_ddp_bucket_run.n && op_ddp_bucket_is_touched(c, j))
			op_ddp_bucket_finish_launch(c, p, &whole,
						    op_ddp_bucket_offset_of(w, i) +
							    op_ddp_bucket_run.first,
						    op_ddp_bucket_run.n,
						    optim_at(&w->d->tensors[i].unit->parts[d].grads,
							     op_ddp_bucket_run.at),
						    DTYPE_FP32);
	}
	for (uint32_t k = 0; k < w->n_pieces; k++) {
		const struct piece *pc = &w->pieces[k];
		const void **in = w->next;

		for (uint32_t m = 0; m < p->n; m++) {
			char *base = w->base[p->members[m]];

			w->next = in; /* the same for all of them */
			if (base)
				op_ddp_bucket_finish_launch(c, p, pc, pc->off, pc->n,
							    base + pc->off * w->size, w->dtype);
		}
		w->next = in + 1;
	}
	op_ddp_bucket_zero_untouched(c, d);
}

static enum res op_ddp_bucket_finish_all(struct coll *c)
{
	struct bucket_work *w = op_ddp_bucket_work_of(c);

	RES_TRY(coll_need_launches(c, op_ddp_bucket_tensors_of(w) * (c->n + 2)));
	w->next = w->inputs;
	for (unsigned d = 0; d < c->n_parts; d++)
		op_ddp_bucket_finish_part(c, d);
	return coll_kernels(c);
}

/* What no rank has used belongs to no piece. */
static const void *op_ddp_bucket_source(const struct chain *ch, unsigned d, uint32_t k,
					uint64_t first, uint64_t *n, struct k_factor *pre)
{
	const struct bucket_work *w = op_ddp_bucket_work_of(ch->c);
	const struct coll_part *p = &ch->c->parts[d];
	const struct piece *pc = w->pieces, *end = pc + w->n_pieces;
	uint64_t until;

	while (pc < end && pc->off + pc->n <= first)
		pc++;
	until = pc == end ? first + *n : first < pc->off ? pc->off : pc->off + pc->n;
	*n = until - first < *n ? until - first : *n;
	if (pc == end || first < pc->off)
		return NULL;
	*pre = pc->pre;
	return op_ddp_bucket_gives_zeros(ch->c, p->members[k], pc->tensor)
		       ? region_addr(&p->scratch[1])
		       : (void *)(w->base[p->members[k]] + first * w->size);
}

static void op_ddp_bucket_chain(struct coll *c, void *const *data)
{
	const struct bucket_work *w = op_ddp_bucket_work_of(c);
	struct chain *ch = &op_ddp_bucket_of(c)->chain;

	*ch = (struct chain){ .c = c,
			      .source = op_ddp_bucket_source,
			      .in_dtype = w->dtype,
			      .sum_dtype = w->sum_dtype };
	chain_talk(ch, data, w->b->elements[w->bucket], true);
}

static enum res op_ddp_bucket_between(struct coll *c)
{
	struct bucket_work *w = op_ddp_bucket_work_of(c);
	void *data[NODE_MAX_DEVICES];

	RES_TRY(coll_can_talk(c));
	for (unsigned d = 0; d < c->n_parts; d++)
		data[d] = op_ddp_bucket_sums(c, &c->parts[d], 0);
	if (chain_is_wanted(c->group))
		op_ddp_bucket_chain(c, data);
	else
		coll_all_reduce(c, data, w->b->elements[w->bucket], w->sum_dtype, REDUCE_SUM);
	return RES_WAIT;
}

static enum res op_ddp_bucket_fold_parts(struct coll *c)
{
	struct bucket_work *w = op_ddp_bucket_work_of(c);

	RES_TRY(coll_need_launches(c, w->n_pieces));
	for (unsigned d = 0; d < c->n_parts; d++) {
		struct coll_part *p = &c->parts[d];

		for (uint32_t k = 0; k < w->n_pieces; k++) {
			struct reduce_plan plan = op_ddp_bucket_plan_of(c, w->pieces[k].tensor);

			coll_launch(p, LAUNCH_REDUCE, w->pieces[k].n)->reduce =
				(struct k_reduce){ .out = op_ddp_bucket_sums(c, p,
									     w->pieces[k].off),
						   .out_dtype = w->sum_dtype,
						   .in = op_ddp_bucket_inputs(c, p, &w->pieces[k]),
						   .k = p->n,
						   .in_dtype = w->dtype,
						   .pre = plan.pre,
						   .sum_dtype = w->sum_dtype };
		}
	}
	return coll_kernels(c);
}

/* ------------------------------------------------------------------ the op */

static enum res op_ddp_bucket_clear(struct coll *c)
{
	if (!op_ddp_bucket_work_of(c)->zeros)
		return RES_DONE;
	RES_TRY(coll_need_launches(c, 1));
	for (unsigned d = 0; d < c->n_parts; d++) {
		struct coll_part *p = &c->parts[d];

		coll_launch(p, LAUNCH_FILL, (op_ddp_bucket_work_of(c)->zeros + 3) / sizeof(float))
			->fill = (struct k_fill){ .dst = region_addr(&p->scratch[1]),
						  .kind = FILL_CONSTANT };
	}
	return chain_is_wanted(c->group) ? coll_kernels_sync(c) : coll_kernels(c);
}

static enum res op_ddp_bucket_prepare_units(struct coll *c)
{
	const struct bucket_work *w = op_ddp_bucket_work_of(c);

	for (uint32_t j = w->b->begin[w->bucket]; j < w->b->begin[w->bucket + 1]; j++) {
		c->unit = w->d->tensors[w->b->tensors[j]].unit;
		RES_TRY(backward_prepare(c));
	}
	c->unit = NULL;
	return RES_DONE;
}

static enum res op_ddp_bucket_begin(struct coll *c)
{
	if (!op_ddp_bucket_of(c)->work && op_ddp_bucket_begin_work(c) < 0)
		return coll_fail(c, -ENOMEM);
	RES_TRY(op_ddp_shown_tick(c, &op_ddp_bucket_of(c)->shown));
	op_ddp_bucket_add_pieces(c);
	return RES_DONE;
}

static enum res op_ddp_bucket_prepare(struct coll *c)
{
	const struct bucket_work *w = op_ddp_bucket_work_of(c);

	RES_TRY(op_ddp_bucket_prepare_units(c));
	if (!coll_is_alone(c))
		RES_TRY(coll_need_scratch(c, 0,
					  w->b->elements[w->bucket] * dtype_size(w->sum_dtype)));
	if (w->zeros)
		RES_TRY(coll_need_scratch(c, 1, w->zeros + sizeof(float)));
	return RES_DONE;
}

enum op_ddp_bucket_stage {
	BUCKET_APPLY,
	BUCKET_BEGIN,
	BUCKET_PREPARE,
	BUCKET_FOLD,       /* one device */
	BUCKET_BACK,       /* then: the averages, to the ranks */
	BUCKET_FOLD_PARTS, /* several */
	BUCKET_BETWEEN,
	BUCKET_FINISH,
	BUCKET_REDUCED,
	BUCKET_ARRIVE
};

static enum res op_ddp_bucket_tick(struct coll *c)
{
	switch ((enum op_ddp_bucket_stage)c->stage) {
	case BUCKET_APPLY: /* a prepared step still needs the gradients that this one would overwrite */
		c->stage = BUCKET_BEGIN;
		RES_TRY(apply_wait_step(c->job, &c->waiter));
		fallthrough;
	case BUCKET_BEGIN:
		RES_TRY(coll_check_epoch(c, true));
		RES_TRY(op_ddp_bucket_begin(c));
		c->stage = BUCKET_PREPARE;
		fallthrough;
	case BUCKET_PREPARE:
		RES_TRY(coll_check_epoch(c, true));
		RES_TRY(coll_ready(c));
		if (chain_is_wanted(c->group))
			RES_TRY(chain_check(c));
		RES_TRY(op_ddp_bucket_prepare(c));
		c->stage = coll_is_alone(c)            ? BUCKET_FOLD
			   : chain_is_wanted(c->group) ? BUCKET_BETWEEN
						       : BUCKET_FOLD_PARTS;
		RES_TRY(op_ddp_bucket_clear(c));
		return op_ddp_bucket_tick(c);
	case BUCKET_FOLD:
		c->stage = BUCKET_BACK;
		return op_ddp_bucket_fold(c);
	case BUCKET_BACK:
		c->stage = BUCKET_REDUCED;
		return op_ddp_bucket_back_to_ranks(c);
	case BUCKET_FOLD_PARTS:
		c->stage = BUCKET_BETWEEN;
		return op_ddp_bucket_fold_parts(c);
	case BUCKET_BETWEEN:
		c->stage = BUCKET_FINISH;
		return op_ddp_bucket_between(c);
	case BUCKET_FINISH:
		c->stage = BUCKET_REDUCED;
		return op_ddp_bucket_finish_all(c);
	case BUCKET_REDUCED:
		reduce_ddp_begins_pass(c, ddp_args(c->ops[0])->d, op_ddp_bucket_work_of(c)->bucket);
		op_ddp_bucket_note_gradients(c);
		c->stage = BUCKET_ARRIVE;
		fallthrough;
	case BUCKET_ARRIVE: /* each unit whose last gradient of the pass is here */
		do {
			if (c->unit) {
				RES_TRY(backward_arrive_tick(c));
				backward_reduced(c);
			}
		} while (op_ddp_bucket_next_unit(c));
		reduce_ddp_surrogates_passed(c, ddp_args(c->ops[0])->d, ddp_args(c->ops[0])->layout,
					     op_ddp_bucket_work_of(c)->bucket);
		return RES_DONE;
	}
	CHECK_NOT_REACHED();
}

static void op_ddp_bucket_surrogate_init(struct op *op)
{
	ddp_args(op)->rank = &ddp_args(op)->d->ranks[op->entry.index];
}

static void op_ddp_bucket_ask(const struct op *op, uint64_t words[ASKED_WORDS])
{
	words[0] = ddp_args(op)->d->number;
	words[1] = ddp_args(op)->bucket;
	words[2] = ddp_args(op)->layout;
}

static int op_ddp_bucket_asked(struct op *op, const uint64_t words[ASKED_WORDS], struct fault *f)
{
	struct ddp *d = reduce_ddp_stand_in(op, words[0], words[2], f);

	if (!d)
		return f->code;
	if (words[1] >= d->layouts[words[2]].n)
		return fault_set(f, FAULT_STATE, NULL, "ddp %u has no bucket %llu", d->id,
				 (unsigned long long)words[1]);
	op->touches = TOUCH_GRADS;
	ddp_args(op)->d = d;
	ddp_args(op)->bucket = (uint32_t)words[1];
	ddp_args(op)->layout = (unsigned)words[2];
	return 0;
}

const struct op_type op_ddp_bucket = {
	.name = "DdpBucket",
	.collective = true,
	.surrogates = true,
	.check = op_ddp_bucket_check,
	.coll_tick = op_ddp_bucket_tick,
	.coll_bytes = sizeof(struct op_ddp_bucket_state),
	.coll_free = op_ddp_bucket_free,
	.meets = op_ddp_bucket_meets,
	.reads_inputs = true,
	.surrogate_init = op_ddp_bucket_surrogate_init,
	.ask = op_ddp_bucket_ask,
	.asked = op_ddp_bucket_asked,
};
