/* Which buckets of a rank can go: each is an op of the daemon's own, behind what its tensors wait
 * for. */
#include <errno.h>

#include "core/check.h"
#include "ddp/op_ddp.h"
#include "op/op_list.h"
#include "op/op.h"
#include "op/op_run.h"
#include "reduce/sparse.h"

static void op_ddp_launch_on_done(struct op *op, void *userdata)
{
	struct ddp_rank *rank = userdata;

	CHECK(rank->under_way > 0);
	rank->under_way--;
	if (!rank->fault.code)
		rank->fault = op->fault;
}

static void op_ddp_launch_fill_waits(struct op *op, const struct ddp_rank *rank)
{
	_Static_assert(DDP_MAX_WAITS <= OP_MAX_AFTER, "room in struct op");
	op->group = rank->ddp->group;
	for (unsigned i = 0; i < rank->n_waits; i++)
		op->after[op->n_after++] = rank->waits[i];
}

/* The tensor of the bucket that was just launched, if it is a sparse one. */
static const struct ddp_tensor *op_ddp_launch_sparse_of(const struct ddp_rank *rank,
							uint32_t *ret_index)
{
	const struct ddp_buckets *b = ddp_buckets_of(rank);

	CHECK(rank->launched > 0 && rank->launched <= b->n);
	*ret_index = b->tensors[b->begin[rank->launched - 1]];
	return rank->ddp->tensors[*ret_index].sparse ? &rank->ddp->tensors[*ret_index] : NULL;
}

static void op_ddp_launch_fill_sparse(struct op *op, void *arg)
{
	const struct op *by = arg;
	struct ddp_rank *rank = ddp_args(by)->rank;
	uint32_t i;
	const struct ddp_tensor *t = op_ddp_launch_sparse_of(rank, &i);

	CHECK(t && t->unit->rec->group == rank->ddp->group->id);
	op_ddp_launch_fill_waits(op, rank);
	op->unit = t->unit;
	op->touches = TOUCH_GRADS;
	op->buffer = rank->rows[i].n ? rank->rows[i].buffer : 0;
	sparse_args(op)->tensor = t->tensor;
	sparse_args(op)->rows = rank->rows[i].rows;
	sparse_args(op)->n = rank->rows[i].n;
	sparse_args(op)->values_offset = rank->rows[i].values_offset;
	sparse_args(op)->d = rank->ddp;
	sparse_args(op)->index = i;
	sparse_args(op)->layout = rank->layout;
}

static void op_ddp_launch_fill(struct op *op, void *arg)
{
	const struct op *by = arg;
	struct ddp_rank *rank = ddp_args(by)->rank;

	op_ddp_launch_fill_waits(op, rank);
	op->touches = TOUCH_GRADS;
	ddp_args(op)->d = rank->ddp;
	ddp_args(op)->rank = rank;
	ddp_args(op)->bucket = rank->launched - 1;
	ddp_args(op)->layout = rank->layout;
	op->buffer = rank->buffer;
}

void op_ddp_launch(struct op *op)
{
	struct ddp_rank *rank = ddp_args(op)->rank;
	uint32_t i;

	while (ddp_launch(rank) >= 0) {
		bool sparse = op_ddp_launch_sparse_of(rank, &i);
		const struct op_type *type = sparse ? &op_sparse : &op_ddp_bucket;

		rank->under_way++; /* it may be over when it has begun */
		if (op_spawn(op, type, sparse ? op_ddp_launch_fill_sparse : op_ddp_launch_fill, op,
			     op_ddp_launch_on_done, rank) == 0)
			continue;
		rank->under_way--;
		fault_errno(&rank->fault, -ENOMEM, "launching a bucket");
		op_give_up(op, type, rank->ddp->group, &rank->fault);
	}
}
