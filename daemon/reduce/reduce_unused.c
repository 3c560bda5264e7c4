#include "reduce/reduce_unused.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "core/check.h"
#include "op/op.h"
#include "work/coll.h"
#include "shardd.pb-c.h"
#include "reduce/reduce_run.h"

/* Of the reply's bits; what goes over a ring. */
#define MAX_TENSORS 4096u

/* ------------------------------------------------------------------- one rank */

static int reduce_unused_check_tensor(const struct unit *u, const uint32_t *tensors, size_t i,
				      struct fault *f)
{
	uint32_t tensor = tensors[i];

	if (tensor >= u->rec->n_tensors)
		return fault_set(f, FAULT_INVALID, "unused_tensors",
				 "tensor %u of unit '%.100s' is out of range (0..%zu)", tensor,
				 u->rec->name, u->rec->n_tensors - 1);
	if (tensor >= MAX_TENSORS)
		return fault_set(
			f, FAULT_INVALID, "unused_tensors",
			"tensor %u of unit '%.100s' cannot be listed as unused: only the first "
			"%u tensors can; register smaller units",
			tensor, u->rec->name, MAX_TENSORS);
	if (!unit_trains(u, tensor))
		return fault_set(f, FAULT_INVALID, "unused_tensors",
				 "tensor '%.100s' of unit '%.100s' is not trained: list trained "
				 "tensors only",
				 u->rec->tensors[tensor]->name, u->rec->name);
	if (i && tensor <= tensors[i - 1])
		return fault_set(f, FAULT_INVALID, "unused_tensors",
				 "unused_tensors has %u after %u; its numbers must ascend", tensor,
				 tensors[i - 1]);
	return 0;
}

int reduce_unused_decode(struct op *op, const Shardd__V1__ReduceRequest *r, struct fault *f)
{
	reduce_args(op)->tensors = r->unused_tensors;
	reduce_args(op)->n_tensors = r->n_unused_tensors;
	if (r->n_unused_tensors && (r->unused || r->defer_all_reduce))
		return fault_set(f, FAULT_INVALID, "unused_tensors",
				 "unused_tensors and %s are both set: set one of them",
				 r->unused ? "unused" : "defer_all_reduce");
	for (size_t i = 0; i < r->n_unused_tensors; i++)
		if (reduce_unused_check_tensor(op->unit, r->unused_tensors, i, f))
			return f->code;
	return 0;
}

void reduce_unused_declare(const struct op *op)
{
	if (!group_spans(op->group) || op->unit->turns.leaves_out ||
	    (!reduce_args(op)->unused && !reduce_args(op)->n_tensors))
		return;
	op->m->job->jobs->ops.leave_out(op->m->job, op->unit);
}

static int reduce_unused_compare(const void *a, const void *b)
{
	uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;

	return x < y ? -1 : x > y;
}

static bool reduce_unused_names(const struct op *op, uint32_t tensor)
{
	return reduce_args(op)->unused ||
	       (reduce_args(op)->n_tensors &&
		bsearch(&tensor, reduce_args(op)->tensors, reduce_args(op)->n_tensors,
			sizeof(tensor), reduce_unused_compare));
}

/* ------------------------------------------------------------------- all ranks */

/* Can there be a tensor that none here has used? The rule is that there is not. */
static bool reduce_unused_some_may_here(const struct coll *c)
{
	for (uint32_t i = 0; i < c->n; i++) {
		const struct op *op = c->ops[i];
		const struct member_unit *mu = member_unit_find(c->members[i], c->unit);

		if ((!reduce_args(op)->unused && !reduce_args(op)->n_tensors) ||
		    (mu && mu->accumulated.slab && !op->surrogate))
			return false;
	}
	return !c->unit->has_partials;
}

static bool reduce_unused_used_by_none_here(const struct coll *c, uint32_t tensor)
{
	for (uint32_t i = 0; i < c->n; i++)
		if (!reduce_unused_names(c->ops[i], tensor))
			return false;
	return true;
}

/* What the nodes show each other: whether there can be such a tensor, then a bit for each. */
static enum res reduce_unused_show(struct coll *c)
{
	struct share *s = &shards_of(c)->share;
	size_t n = c->unit->rec->n_tensors;

	RES_TRY(share_begin(c, s, 1 + n / 8 + 1));
	for (unsigned d = 0; d < c->n_parts; d++) {
		uint8_t *own = share_own(c, s, d);

		own[0] = reduce_unused_some_may_here(c);
		for (uint32_t i = 0; own[0] && i < n; i++)
			if (reduce_unused_used_by_none_here(c, i))
				own[1 + i / 8] |= (uint8_t)(1u << i % 8);
	}
	return RES_DONE;
}

static bool reduce_unused_is_set(const struct coll *c, unsigned device, size_t bit)
{
	const uint8_t *slot = share_slot(&shards_of(c)->share, device);

	return bit ? slot[1 + (bit - 1) / 8] >> (bit - 1) % 8 & 1 : slot[0];
}

/* By all devices, which are all ranks. */
static bool reduce_unused_all_set(const struct coll *c, size_t bit)
{
	for (unsigned d = 0; d < coll_devices(c); d++)
		if (!reduce_unused_is_set(c, d, bit))
			return false;
	return true;
}

static bool reduce_unused_some_may(const struct coll *c)
{
	return group_spans(c->group) ? reduce_unused_all_set(c, 0) : reduce_unused_some_may_here(c);
}

static bool reduce_unused_used_by_none(const struct coll *c, uint32_t tensor)
{
	return group_spans(c->group) ? reduce_unused_all_set(c, 1 + (size_t)tensor)
				     : reduce_unused_used_by_none_here(c, tensor);
}

/* Into @ret, room for all. Return: how many; @ret_all: is that all there is? */
static size_t reduce_unused_find(const struct coll *c, uint32_t *ret, bool *ret_all)
{
	size_t n = 0;

	*ret_all = true;
	for (uint32_t i = 0; i < c->unit->rec->n_tensors; i++) {
		if (!unit_trains(c->unit, i))
			continue;
		if (reduce_unused_used_by_none(c, i))
			ret[n++] = i;
		else
			*ret_all = false;
	}
	return n;
}

/* Only where all are unused there may be more than MAX_TENSORS. */
static size_t reduce_unused_bits_bytes(const uint32_t *tensors, size_t n)
{
	if (!n)
		return 0;
	return tensors[n - 1] < MAX_TENSORS ? tensors[n - 1] / 8 + 1 : MAX_TENSORS / 8;
}

/* From here on args.reduce is what all of them say; behind the tensors there are the bits. Return:
 * 0 or -ENOMEM. */
static int reduce_unused_tell(struct coll *c, const uint32_t *tensors, size_t n, bool all)
{
	size_t bytes = reduce_unused_bits_bytes(tensors, n);

	for (uint32_t i = 0; i < c->n; i++) {
		struct op *op = c->ops[i];
		uint8_t *bits;

		CHECK(!op->owned);
		op->owned = calloc(1, n * sizeof(*tensors) + bytes + 1);
		if (!op->owned)
			return -ENOMEM;
		if (n)
			memcpy(op->owned, tensors, n * sizeof(*tensors));
		bits = (uint8_t *)op->owned + n * sizeof(*tensors);
		for (size_t k = 0; k < n && tensors[k] < MAX_TENSORS; k++)
			bits[tensors[k] / 8] |= (uint8_t)(1u << tensors[k] % 8);
	}
	for (uint32_t i = 0; i < c->n; i++) {
		reduce_args(c->ops[i])->unused = all;
		reduce_args(c->ops[i])->tensors = c->ops[i]->owned;
		reduce_args(c->ops[i])->n_tensors = n;
	}
	return 0;
}

/* Nothing of what they say comes to anything. */
static void reduce_unused_overrule(struct coll *c)
{
	for (uint32_t i = 0; i < c->n; i++) {
		reduce_args(c->ops[i])->unused = false;
		reduce_args(c->ops[i])->n_tensors = 0;
	}
}

enum res reduce_unused_agree(struct coll *c, bool *ret_none)
{
	uint32_t *tensors;
	size_t n;
	int r;

	*ret_none = false;
	if (group_spans(c->group) && !c->leaves_out) { /* ranks of some node use all */
		reduce_unused_overrule(c);
		return RES_DONE;
	}
	if (group_spans(c->group) && !shards_of(c)->share.all)
		RES_TRY(reduce_unused_show(c));
	if (group_spans(c->group))
		RES_TRY(share_tick(c, &shards_of(c)->share));
	if (!reduce_unused_some_may(c)) {
		share_end(&shards_of(c)->share);
		reduce_unused_overrule(c);
		return RES_DONE;
	}
	tensors = calloc(c->unit->rec->n_tensors, sizeof(*tensors));
	if (!tensors)
		return coll_fail(c, -ENOMEM);
	n = reduce_unused_find(c, tensors, ret_none);
	r = reduce_unused_tell(c, tensors, n, *ret_none);
	share_end(&shards_of(c)->share);
	free(tensors);
	return r ? coll_fail(c, r) : RES_DONE;
}

/* --------------------------------------------------------------------- the unit */

static bool reduce_unused_is_left_out(const struct coll *c, uint32_t tensor)
{
	return reduce_unused_names(c->ops[0], tensor);
}

bool reduce_leaves_out(const struct coll *c)
{
	if (c->unit->has_gradient && !c->unit->some_lack)
		return false;
	return reduce_args(c->ops[0])->n_tensors;
}

int reduce_unused_note(struct coll *c)
{
	struct unit *u = c->unit;
	bool some = reduce_leaves_out(c);

	if (reduce_args(c->ops[0])->defer)
		return 0; /* the gradient stays what it is */
	if (some && unit_track_gradients(u) < 0)
		return -ENOMEM;
	for (uint32_t i = 0; some && i < u->rec->n_tensors; i++)
		u->lacks[i] = reduce_unused_is_left_out(c, i) && (!u->has_gradient || u->lacks[i]);
	u->some_lack = some;
	return 0;
}

void reduce_unused_reply(const struct op *op, Shardd__V1__ReduceResponse *reply)
{
	reply->unit = op->unit->id;
	reply->unused = reduce_args(op)->unused;
	if (!op->owned || !reduce_args(op)->n_tensors)
		return; /* without @owned: what it named was of its request alone */
	reply->unused_bits.data =
		(uint8_t *)(reduce_args(op)->tensors + reduce_args(op)->n_tensors);
	reply->unused_bits.len =
		reduce_unused_bits_bytes(reduce_args(op)->tensors, reduce_args(op)->n_tensors);
}
