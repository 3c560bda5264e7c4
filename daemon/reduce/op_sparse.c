/*
 * ReduceSparse: rows of a tensor's gradient, of every rank in their order. Which rows comes in
 * the message and is checked there; the values are in the rank's buffer. Also what a bucket
 * of a sparse tensor is.
 *
 * On one device DDP's rows go straight into the gradient. Else each device has a table of the
 * whole tensor that is 0 at first, into which its ranks' rows go; the devices' tables are
 * added, and the sum, with what the plan does after it, is added to the gradient. Sums that are
 * rounded, or of replicas, are made rank after rank (sparse_fold.c). The same between nodes, which show each
 * other first how many rows they have: without any there is nothing to add.
 */
#include <errno.h>
#include <stdlib.h>

#include "core/check.h"
#include "op/op.h"
#include "op/op_util.h"
#include "op/op_list.h"
#include "reduce/reduce_ddp.h"
#include "reduce/reduce_run.h"
#include "reduce/sparse.h"
#include "step/apply.h"
#include "step/backward.h"
#include "unit/optim.h"
#include "work/chain.h"
#include "work/coll.h"
#include "shardd.pb-c.h"

static uint64_t op_sparse_rows_of(const struct unit *u, uint32_t tensor)
{
	return u->rec->tensors[tensor]->shape[0];
}

/* Elements of a row. */
static uint64_t op_sparse_width_of(const struct unit *u, uint32_t tensor)
{
	const state_tensor *t = u->rec->tensors[tensor];
	uint64_t n;

	CHECK(layout_numel(t->shape, (uint32_t)t->n_shape, &n));
	return n / t->shape[0];
}

static size_t op_sparse_size_of(const struct unit *u)
{
	return dtype_size((enum dtype)u->rec->gradient_dtype);
}

int op_sparse_check_rows(const struct unit *u, uint32_t tensor, const int64_t *rows, size_t n,
			 struct fault *f)
{
	const state_tensor *t = tensor < u->rec->n_tensors ? u->rec->tensors[tensor] : NULL;

	if (!t || !t->n_shape || t->n_strides || t->frozen || *t->alias_of)
		return fault_set(f, FAULT_INVALID, "tensor",
				 "unit '%.100s': tensor %u has no rows with gradients",
				 u->rec->name, tensor);
	for (size_t i = 0; i < n; i++)
		if (rows[i] < 0 || (uint64_t)rows[i] >= t->shape[0])
			return fault_set(
				f, FAULT_INVALID, "rows.rows",
				"row %zu is %lld, which is out of range for tensor '%.64s' of "
				"unit '%.64s' (0..%llu)",
				i, (long long)rows[i], t->name, u->rec->name,
				(unsigned long long)t->shape[0] - 1);
	return 0;
}

static int op_sparse_decode(struct op *op, const ProtobufCMessage *msg, struct fault *f)
{
	const Shardd__V1__ReduceSparseRequest *r = (const Shardd__V1__ReduceSparseRequest *)msg;
	const Shardd__V1__SparseRows *rows = r->rows;

	op->touches = TOUCH_GRADS;
	op->move = MOVE_REDUCE_ROWS; /* in a ddp: none, as the ddp has its own passes */
	sparse_args(op)->tensor = r->tensor;
	if (op_take_unit(op, r->unit, f))
		return f->code;
	op->group = job_group_by_id(op->m->job, op->unit->rec->group);
	if (op_sparse_check_rows(op->unit, r->tensor, rows ? rows->rows : NULL,
				 rows ? rows->n_rows : 0, f))
		return f->code;
	if (!rows || !rows->n_rows)
		return 0;
	op->buffer = rows->buffer;
	sparse_args(op)->rows = rows->rows;
	sparse_args(op)->n = rows->n_rows;
	sparse_args(op)->values_offset = rows->values_offset;
	return 0;
}

static int op_sparse_check_values(struct op *op, struct fault *f)
{
	uint64_t width = op_sparse_width_of(op->unit, sparse_args(op)->tensor);
	size_t size = op_sparse_size_of(op->unit);

	CHECK(size > 0 && width > 0);
	if (sparse_args(op)->values_offset % size)
		return fault_set(f, FAULT_INVALID, "rows.values_offset",
				 "values_offset is %llu; it must be a multiple of %zu",
				 (unsigned long long)sparse_args(op)->values_offset, size);
	if (sparse_args(op)->n > LAYOUT_MAX_ELEMENTS / width ||
	    !op_buffer_at(op, sparse_args(op)->values_offset, sparse_args(op)->n * width * size, f))
		return fault_set(f, FAULT_INVALID, "rows",
				 "%llu rows are too many: their values have more than 2^48 "
				 "elements, or do not fit the buffer",
				 (unsigned long long)sparse_args(op)->n);
	return 0;
}

/* The next Reduce replaces the gradient by sums that began with it as it is now. */
static int op_sparse_check_accumulated(const struct op *op, struct fault *f)
{
	const struct member_unit *mu = member_unit_find(op->m, op->unit);

	if (!mu || !mu->included)
		return 0;
	return fault_set(f, FAULT_STATE, NULL,
			 "rank %u has accumulated gradients of unit '%.100s' on top of what was "
			 "reduced: call Reduce before more rows",
			 op->m->rank, op->unit->rec->name);
}

static int op_sparse_check(struct op *op, struct fault *f)
{
	const struct unit *u = op->unit;

	if (op_check_not_torn(op, f) || op_check_initialised(op, f))
		return f->code;
	if (sparse_args(op)->n && op_sparse_check_values(op, f))
		return f->code;
	if (unit_pools_gradient(u->rec) && !sparse_args(op)->d)
		return fault_set(f, FAULT_STATE, NULL,
				 "unit '%.100s' is stepped in backward or by the trainer: it takes "
				 "no sparse "
				 "gradients",
				 u->rec->name);
	if (!sparse_args(op)->d && op_sparse_check_accumulated(op, f))
		return f->code;
	op_print(op, "ReduceSparse of tensor '%.64s' of unit '%.64s'",
		 u->rec->tensors[sparse_args(op)->tensor]->name, u->rec->name);
	op->entry.print.words[2] = sparse_args(op)->tensor;
	op->entry.print.words[3] = sparse_args(op)->d ? sparse_args(op)->d->number : 0;
	op_print_order(op);
	return 0;
}

/* -------------------------------------------------------------------- running */

static const struct op *op_sparse_first_of(const struct coll *c)
{
	return c->ops[0];
}

struct unit_run sparse_run(const struct coll *c, unsigned d)
{
	struct unit_run op_sparse_run = { 0 };

	if (!unit_part_run(c->unit, &c->unit->parts[d], sparse_args(op_sparse_first_of(c))->tensor,
			   &op_sparse_run))
		op_sparse_run.n = 0;
	return op_sparse_run;
}

float *sparse_gradient(const struct coll *c, unsigned d)
{
	return optim_at(&c->unit->parts[d].grads, sparse_run(c, d).at);
}

static float *op_sparse_rows_go_to(const struct coll *c, unsigned d)
{
	const struct sparse_work *w = sparse_of(c);

	return w->apart ? region_addr(&c->parts[d].scratch[SPARSE_TABLE]) : sparse_gradient(c, d);
}

/* Of each rank's values, and of the sum: in fp32 no profile has two of either. */
static struct k_factor op_sparse_before(const struct coll *c)
{
	const struct reduce_plan *plan = &sparse_of(c)->plan;

	if (sparse_of(c)->folds)
		return (struct k_factor){ .how = K_FACTOR_NONE };
	return c->unit->rec->shard_ranks == 1
		       ? reduce_either(reduce_either(plan->pre, plan->partial), plan->replica)
		       : plan->pre;
}

static struct k_factor op_sparse_after(const struct coll *c)
{
	const struct reduce_plan *plan = &sparse_of(c)->plan;

	return c->unit->rec->shard_ranks > 1 ? reduce_either(plan->partial, plan->post)
					     : plan->post;
}

/* Beside buckets a unit has a gradient as a whole: what got none is 0. */
static void op_sparse_has_gradient(struct unit *u, const struct op *op)
{
	if (sparse_args(op)->d) {
		unit_got_gradient(u, sparse_args(op)->tensor);
		return;
	}
	if (!u->has_gradient)
		u->some_lack = false;
	else if (u->lacks)
		u->lacks[sparse_args(op)->tensor] = 0;
	u->has_gradient = true;
}

static void op_sparse_pass_on(const struct coll *c, const struct sparse_work *w)
{
	struct ddp *d = sparse_args(op_sparse_first_of(c))->d;
	uint32_t i = sparse_args(op_sparse_first_of(c))->index;
	unsigned layout = sparse_args(op_sparse_first_of(c))->layout;

	reduce_ddp_begins_pass(c, d, d->layouts[layout].of[i]);
	d->untouched[i] = !w->all;
	reduce_ddp_surrogates_passed(c, d, layout, d->layouts[layout].of[i]);
}

/* The rows are in the gradient. Return: is the unit's gradient of this pass whole? */
static bool op_sparse_added(struct coll *c)
{
	const struct op *op = op_sparse_first_of(c);
	const struct sparse_work *w = sparse_of(c);

	if (sparse_args(op)->d)
		op_sparse_pass_on(c, w);
	if (op->m->epoch == c->job->rec->epoch && (w->all || !sparse_args(op)->d))
		op_sparse_has_gradient(c->unit, op);
	return sparse_args(op)->d &&
	       reduce_ddp_unit_is_whole(c, sparse_args(op)->d, sparse_args(op)->index);
}

/* ------------------------------------------------------------------- the table */

static enum res op_sparse_add_table(struct coll *c)
{
	struct sparse_work *w = sparse_of(c);

	RES_TRY(coll_need_launches(c, 1));
	for (unsigned d = 0; d < c->n_parts; d++) {
		struct unit_run op_sparse_run = sparse_run(c, d);

		w->tables[d] = op_sparse_rows_go_to(c, d) + op_sparse_run.first;
		if (op_sparse_run.n)
			coll_launch(&c->parts[d], LAUNCH_REDUCE, op_sparse_run.n)->reduce =
				(struct k_reduce){ .out = sparse_gradient(c, d),
						   .out_dtype = DTYPE_FP32,
						   .in = &w->tables[d],
						   .k = 1,
						   .in_dtype = DTYPE_FP32,
						   .sum_dtype = DTYPE_FP32,
						   .post = op_sparse_after(c),
						   .accumulate = true };
	}
	return coll_kernels(c);
}

static enum res op_sparse_between(struct coll *c)
{
	const struct sparse_work *w = sparse_of(c);
	void *data[NODE_MAX_DEVICES];

	if (coll_is_alone(c))
		return RES_DONE;
	RES_TRY(coll_can_talk(c));
	for (unsigned d = 0; d < c->n_parts; d++)
		data[d] = op_sparse_rows_go_to(c, d);
	coll_all_reduce(c, data, w->elements, DTYPE_FP32, REDUCE_SUM);
	return RES_WAIT;
}

/* -------------------------------------------------------------------- its rows */

static uint64_t op_sparse_n_of(const struct coll *c, const struct coll_part *p, uint32_t turn)
{
	return turn < p->n ? sparse_args(c->ops[p->members[turn]])->n : 0;
}

static bool op_sparse_any_left(const struct coll *c)
{
	for (unsigned d = 0; d < c->n_parts; d++)
		for (uint32_t turn = c->turn; turn < c->parts[d].n; turn++)
			if (op_sparse_n_of(c, &c->parts[d], turn))
				return true;
	return false;
}

struct k_add_rows sparse_rows_launch(const struct coll *c, unsigned d)
{
	const struct coll_part *p = &c->parts[d];
	const struct sparse_work *w = sparse_of(c);
	uint32_t tensor = sparse_args(op_sparse_first_of(c))->tensor;

	return (struct k_add_rows){
		.out = op_sparse_rows_go_to(c, d),
		.row_elements = op_sparse_width_of(c->unit, tensor),
		.rows = (int64_t *)region_addr(&p->scratch[SPARSE_ROWS]) + w->given[d],
		.n_rows = op_sparse_n_of(c, p, c->turn),
		.values = c->turn < p->n ? w->values[p->members[c->turn]] : NULL,
		.dtype = (enum dtype)c->unit->rec->gradient_dtype,
		.pre = op_sparse_before(c),
		.row_limit = op_sparse_rows_of(c->unit, tensor),
	};
}

void sparse_add_rows(struct coll *c, unsigned d)
{
	struct coll_part *p = &c->parts[d];
	struct sparse_work *w = sparse_of(c);
	struct k_add_rows a;

	if (!op_sparse_n_of(c, p, c->turn))
		return;
	a = sparse_rows_launch(c, d);
	coll_launch(p, LAUNCH_ADD_ROWS, a.row_elements)->add_rows = a;
	w->given[d] += a.n_rows;
	CHECK(w->given[d] * sizeof(int64_t) <= p->scratch[SPARSE_ROWS].bytes);
}

/* One rank of a device after the other: entries of several may name the same row. */
static enum res op_sparse_add_turn(struct coll *c)
{
	RES_TRY(coll_need_launches(c, 1));
	for (unsigned d = 0; d < c->n_parts; d++)
		if (sparse_repeats_now(c, d))
			sparse_add_coalesced(c, d);
		else
			sparse_add_rows(c, d);
	c->turn++;
	return coll_kernels(c);
}

/* The next turn in which a device has rows, of which there is one. Return: does a member name
 * some of them again? */
static bool op_sparse_next_turn(struct coll *c)
{
	bool any = false, repeats = false;

	while (!any) {
		CHECK(c->turn < c->n); /* some device has one, says op_sparse_any_left */
		for (unsigned d = 0; d < c->n_parts; d++)
			any = any || op_sparse_n_of(c, &c->parts[d], c->turn);
		c->turn += !any;
	}
	for (unsigned d = 0; d < c->n_parts; d++)
		repeats = repeats || sparse_repeats_now(c, d);
	return repeats;
}

static void op_sparse_zero(struct coll *c, unsigned d, float *at, uint64_t n)
{
	if (n)
		coll_launch(&c->parts[d], LAUNCH_FILL, n)->fill =
			(struct k_fill){ .dst = at, .kind = FILL_CONSTANT };
}

/* What is added to: a unit without a gradient gets one that is 0. */
static void op_sparse_zero_gradient(struct coll *c, unsigned d)
{
	const struct op *op = op_sparse_first_of(c);
	const struct sparse_work *w = sparse_of(c);
	const struct unit_part *up = &c->unit->parts[d];

	if (!sparse_args(op)->d && !c->unit->has_gradient)
		op_sparse_zero(c, d, optim_at(&up->grads, 0), up->n);
	else if (unit_lacks_gradient(c->unit, sparse_args(op)->tensor) ||
		 (sparse_args(op)->d && w->all))
		op_sparse_zero(c, d, sparse_gradient(c, d), sparse_run(c, d).n);
}

/* The rows of a part's members, to where the device reads them. */
static void op_sparse_copy_rows(struct coll *c, struct coll_part *p)
{
	const struct sparse_work *w = sparse_of(c);
	int64_t *to = w->mine ? region_addr(&p->scratch[SPARSE_ROWS]) : NULL;

	for (uint32_t turn = 0; turn < p->n; turn++) {
		const struct op *op = c->ops[p->members[turn]];
		const struct sparse_repeats *r = op->owned;
		uint64_t n = op_sparse_n_of(c, p, turn) + (r ? r->n_rows : 0);

		if (n)
			coll_launch(p, LAUNCH_COPY, n * sizeof(*to))->copy =
				(struct k_copy){ to, r ? r->at : sparse_args(op)->rows };
		to += n;
	}
}

static enum res op_sparse_clear(struct coll *c)
{
	const struct sparse_work *w = sparse_of(c);

	RES_TRY(coll_need_launches(c, (size_t)c->n + 2));
	for (unsigned d = 0; d < c->n_parts; d++) {
		op_sparse_zero_gradient(c, d);
		if (w->apart && w->all && !w->folds)
			op_sparse_zero(c, d, op_sparse_rows_go_to(c, d), w->elements);
		op_sparse_copy_rows(c, &c->parts[d]);
	}
	c->turn = 0;
	return coll_kernels(c);
}

/* ---------------------------------------------------------------------- the op */

/* Buckets divide by those who have inputs, if they are asked to. DDP's Reducer multiplies a
 * dense bucket by a reciprocal, and divides a sparse one. */
static void op_sparse_plan_of(const struct coll *c, struct reduce_plan *ret)
{
	const state_unit *rec = c->unit->rec;
	uint32_t ranks = rec->reduce_profile >= PROFILE_DDP ? coll_divide_by(c) : coll_size(c);
	struct reduce_setting s = reduce_setting_now(c->unit, ranks, reduce_device_of(c->unit));

	reduce_plan_make(&s, ret);
	if (rec->reduce_profile == PROFILE_DDP)
		ret->pre = reduce_divide_by(&s, ranks, s.gradient_dtype);
}

static struct sparse_state *op_sparse_state_of(const struct coll *c)
{
	return coll_own(c, sizeof(struct sparse_state));
}

static int op_sparse_begin_work(struct coll *c, struct fault *f)
{
	size_t pointers = c->n + (size_t)coll_size(c) * c->n_parts;
	struct sparse_work *w = calloc(1, sizeof(*w) + pointers * sizeof(void *));
	uint32_t tensor = sparse_args(op_sparse_first_of(c))->tensor;

	if (!w)
		return fault_errno(f, -ENOMEM, "ReduceSparse");
	op_sparse_state_of(c)->work = w;
	op_sparse_plan_of(c, &w->plan);
	w->elements = op_sparse_rows_of(c->unit, tensor) * op_sparse_width_of(c->unit, tensor);
	w->apart = !coll_is_alone(c) || c->unit->rec->reduce_profile < PROFILE_DDP ||
		   w->plan.post.how != K_FACTOR_NONE;
	w->partials = w->values + c->n;
	w->folds = sparse_folds(c->unit, &w->plan);
	if (w->folds)
		sparse_fold_init(c, w);
	else if (sparse_repeats_init(c, op_sparse_rows_of(c->unit, tensor)) < 0)
		return fault_errno(f, -ENOMEM, "ReduceSparse");
	for (uint32_t i = 0; i < c->n; i++) {
		struct op *op = c->ops[i];

		w->mine += sparse_args(op)->n;
		if (!sparse_args(op)->n)
			continue;
		w->values[i] = op_buffer_at(op, sparse_args(op)->values_offset, 0, f);
		CHECK(w->values[i]); /* the op holds them since it was checked */
	}
	CHECK(w->apart || sparse_run(c, 0).n == w->elements);
	return 0;
}

static uint64_t op_sparse_scratch_of(const struct coll *c, unsigned which)
{
	const struct sparse_work *w = sparse_of(c);

	if (!w->all)
		return 0;
	if (which == SPARSE_ROWS)
		return (w->mine + sparse_repeats_indices(c)) * sizeof(int64_t);
	if (which == SPARSE_TABLE)
		return w->apart ? w->elements * sizeof(float) : 0;
	if (w->folds)
		return sparse_fold_scratch(c, which);
	if (which != SPARSE_COALESCED)
		return 0;
	return sparse_repeats_bytes(
		c, op_sparse_width_of(c->unit, sparse_args(op_sparse_first_of(c))->tensor));
}

/* What the nodes show each other: a slot has the number of a device's rows, and what a bucket shows. */
static uint64_t op_sparse_arrival_bytes(const struct coll *c)
{
	const struct sparse_args *a = sparse_args(op_sparse_first_of(c));
	const struct ddp_rank *r = a->d ? &a->d->ranks[0] : NULL;

	return r ? reduce_ddp_arrival_bytes(c, a->d, r->layout, ddp_buckets_of(r)->of[a->index])
		 : 0;
}

static enum res op_sparse_show_begin(struct coll *c)
{
	const struct sparse_args *a = sparse_args(op_sparse_first_of(c));
	struct share *s = &op_sparse_state_of(c)->share;
	uint64_t arrival = op_sparse_arrival_bytes(c);

	RES_TRY(share_begin(c, s, sizeof(uint64_t) + arrival));
	for (unsigned d = 0; d < c->n_parts; d++) {
		uint64_t *own = share_own(c, s, d);

		for (uint32_t turn = 0; turn < c->parts[d].n; turn++)
			*own += op_sparse_n_of(c, &c->parts[d], turn);
		if (arrival)
			reduce_ddp_arrival_fill(a->d, own + 1);
	}
	return RES_DONE;
}

static int op_sparse_check_order(struct coll *c)
{
	if (!chain_is_wanted(c->group))
		return 0;
	c->everywhere = true;
	return fault_set(
		c->fault, FAULT_UNIMPLEMENTED, NULL,
		"%s of unit '%.100s': order: ranks is not possible for sparse gradients: set "
		"order: devices on all nodes",
		c->type->name, c->unit->rec->name);
}

static enum res op_sparse_show(struct coll *c)
{
	struct share *s = &op_sparse_state_of(c)->share;

	if (!sparse_of(c) && (op_sparse_check_order(c) || op_sparse_begin_work(c, c->fault)))
		return RES_FAILED;
	if (!s->all)
		RES_TRY(op_sparse_show_begin(c));
	RES_TRY(share_tick(c, s));
	for (unsigned d = 0; d < coll_devices(c); d++)
		sparse_of(c)->all += *(const uint64_t *)share_slot(s, d);
	if (!op_sparse_arrival_bytes(c))
		return RES_DONE;
	return reduce_ddp_arrival_take(c, sparse_args(op_sparse_first_of(c))->d,
				       (const uint64_t *)share_slot(s, 0) + 1);
}

static enum res op_sparse_prepare(struct coll *c)
{
	if (sparse_args(op_sparse_first_of(c))->d)
		RES_TRY(backward_prepare(c));
	for (unsigned k = SPARSE_ROWS; k <= SPARSE_SUMS; k++)
		if (op_sparse_scratch_of(c, k))
			RES_TRY(coll_need_scratch(c, k, op_sparse_scratch_of(c, k)));
	return RES_DONE;
}

static void op_sparse_free(struct coll *c)
{
	free(sparse_of(c));
	share_end(&op_sparse_state_of(c)->share);
	shards_free(c);
}

enum op_sparse_stage {
	SPARSE_APPLY,
	SPARSE_SHOW,
	SPARSE_PREPARE,
	SPARSE_FOLD,
	SPARSE_NEXT_TURN,
	SPARSE_FILL_REPEATS,
	SPARSE_ADD_TURN,
	SPARSE_BETWEEN,
	SPARSE_ADD_TABLE,
	SPARSE_ADDED,
	SPARSE_ARRIVE
};

/*
 *   PREPARE --ranks are folded--> FOLD -----------------------------------------> ADDED
 *      '--> NEXT_TURN [--> FILL_REPEATS] --> ADD_TURN --> NEXT_TURN ...              ^
 *               '--no rank is left--> BETWEEN --> ADD_TABLE (if there is a table) ---'
 */
static enum res op_sparse_tick(struct coll *c)
{
	const struct sparse_work *w = sparse_of(c);

	switch ((enum op_sparse_stage)c->stage) {
	case SPARSE_APPLY: /* a prepared step still needs the gradients that this one would change */
		c->stage = SPARSE_SHOW;
		RES_TRY(sparse_args(op_sparse_first_of(c))->d ? apply_wait_step(c->job, &c->waiter)
							      : apply_wait(c->job, &c->waiter));
		fallthrough;
	case SPARSE_SHOW:
		RES_TRY(coll_check_epoch(c, true));
		RES_TRY(op_sparse_show(c));
		c->stage = SPARSE_PREPARE;
		fallthrough;
	case SPARSE_PREPARE:
		RES_TRY(coll_check_epoch(c, true));
		RES_TRY(coll_ready(c));
		RES_TRY(op_sparse_prepare(c));
		w = sparse_of(c);
		c->stage = w->folds && w->all ? SPARSE_FOLD : SPARSE_NEXT_TURN;
		return op_sparse_clear(c);
	case SPARSE_FOLD:
		RES_TRY(sparse_fold_tick(c));
		c->stage = SPARSE_ADDED;
		return op_sparse_tick(c);
	case SPARSE_NEXT_TURN:
		if (!op_sparse_any_left(c)) {
			c->stage = w->apart && w->all ? SPARSE_BETWEEN : SPARSE_ADDED;
			return op_sparse_tick(c);
		}
		c->stage = SPARSE_ADD_TURN;
		if (!op_sparse_next_turn(c))
			return op_sparse_tick(c);
		c->stage = SPARSE_FILL_REPEATS;
		return sparse_repeats_clear(c);
	case SPARSE_FILL_REPEATS:
		c->stage = SPARSE_ADD_TURN;
		return sparse_repeats_fill(c);
	case SPARSE_ADD_TURN:
		c->stage = SPARSE_NEXT_TURN;
		return op_sparse_add_turn(c);
	case SPARSE_BETWEEN:
		c->stage = SPARSE_ADD_TABLE;
		RES_TRY(op_sparse_between(c));
		fallthrough;
	case SPARSE_ADD_TABLE:
		c->stage = SPARSE_ADDED;
		return op_sparse_add_table(c);
	case SPARSE_ADDED:
		if (!op_sparse_added(c))
			return RES_DONE;
		c->stage = SPARSE_ARRIVE;
		fallthrough;
	case SPARSE_ARRIVE:
		RES_TRY(backward_arrive_tick(c));
		backward_reduced(c);
		return RES_DONE;
	}
	CHECK_NOT_REACHED();
}

static void op_sparse_surrogate_init(struct op *op)
{
	sparse_args(op)->rows = NULL;
	sparse_args(op)->n = 0;
}

static void op_sparse_ask(const struct op *op, uint64_t words[ASKED_WORDS])
{
	const struct sparse_args *a = sparse_args(op);

	words[0] = op->unit->id;
	words[1] = a->tensor;
	words[2] = a->d != NULL;
	words[3] = a->d ? a->d->number : 0;
	words[4] = a->layout;
	words[5] = a->index;
}

/* Without rows. */
static int op_sparse_asked(struct op *op, const uint64_t words[ASKED_WORDS], struct fault *f)
{
	struct sparse_args *a = sparse_args(op);

	op->touches = TOUCH_GRADS;
	if (op_take_unit(op, (uint32_t)words[0], f))
		return f->code;
	op->group = job_group_by_id(op->m->job, op->unit->rec->group);
	a->tensor = (uint32_t)words[1];
	a->index = (uint32_t)words[5];
	if (op_sparse_check_rows(op->unit, a->tensor, NULL, 0, f) || !words[2])
		return f->code;
	a->d = reduce_ddp_stand_in(op, words[3], words[4], f);
	a->layout = (unsigned)words[4];
	if (a->d &&
	    (words[5] >= a->d->n || a->d->tensors[a->index].unit != op->unit ||
	     a->d->tensors[a->index].tensor != a->tensor || !a->d->tensors[a->index].sparse))
		fault_set(f, FAULT_STATE, NULL, "ddp %u has no sparse tensor %u there", a->d->id,
			  a->index);
	return f->code;
}

const struct op_type op_sparse = {
	.name = "ReduceSparse",
	.collective = true,
	.surrogates = true,
	.request = &shardd__v1__reduce_sparse_request__descriptor,
	.decode = op_sparse_decode,
	.check = op_sparse_check,
	.coll_tick = op_sparse_tick,
	.coll_bytes = sizeof(struct sparse_state),
	.coll_free = op_sparse_free,
	.reply = &shardd__v1__reduce_sparse_response__descriptor,
	.reads_inputs = true,
	.surrogate_init = op_sparse_surrogate_init,
	.ask = op_sparse_ask,
	.asked = op_sparse_asked,
};
