#include "work/chain.h"

#include <string.h>

#include "core/check.h"
#include "kernels.h"

bool chain_is_wanted(const struct group *g)
{
	return group_spans(g) && g->job->node->order_ranks;
}

/* Ranks of one device are side by side, and devices in the order of their ranks. */
static bool chain_in_order(const struct coll *c)
{
	for (uint32_t i = 1; i < coll_size(c); i++)
		if (group_device_number(c->group, i) < group_device_number(c->group, i - 1))
			return false;
	return true;
}

enum res chain_check(struct coll *c)
{
	if (chain_in_order(c) && comm_can_chain(coll_between(c)))
		return RES_DONE;
	c->everywhere = true;
	fault_set(
		c->fault, FAULT_UNIMPLEMENTED, NULL,
		"%s: order: ranks needs host memory, and ranks that are on devices in their order: "
		"set order: devices on all nodes",
		c->type->name);
	return RES_FAILED;
}

static void chain_add(const struct chain *ch, const void *in, struct k_factor pre, void *values,
		      uint64_t n, bool begin)
{
	const struct k_reduce add = { .out = values,
				      .out_dtype = ch->sum_dtype,
				      .in = &in,
				      .k = 1,
				      .in_dtype = ch->in_dtype,
				      .pre = pre,
				      .sum_dtype = ch->sum_dtype,
				      .accumulate = !begin };

	kernels_host()->reduce(&add, 0, n);
}

static void chain_add_rank(const struct chain_part *p, uint32_t k, char *values, uint64_t first,
			   uint64_t n, bool begin)
{
	size_t size = dtype_size(p->chain->sum_dtype);

	for (uint64_t at = 0, part; at < n; at += part) {
		struct k_factor pre = p->chain->pre;
		const void *in;

		part = n - at;
		in = p->chain->source(p->chain, p->d, k, first + at, &part, &pre);
		CHECK(part > 0 && part <= n - at);
		if (in)
			chain_add(p->chain, in, pre, values + at * size, part, begin);
		else if (begin)
			memset(values + at * size, 0, part * size);
	}
}

/* On a thread of the engine. */
static void chain_fold(void *userdata, void *values, uint64_t first, uint64_t n, bool begin)
{
	const struct chain_part *p = userdata;

	for (uint32_t k = 0; k < p->chain->c->parts[p->d].n; k++)
		chain_add_rank(p, k, values, first, n, begin && k == 0);
}

void chain_talk(struct chain *ch, void *const *recv, uint64_t count, bool whole)
{
	struct comm_fold fold[NODE_MAX_DEVICES];

	for (unsigned d = 0; d < ch->c->n_parts; d++) {
		ch->parts[d] = (struct chain_part){ ch, d };
		fold[d] = (struct comm_fold){ chain_fold, &ch->parts[d] };
	}
	coll_chain(ch->c, fold, recv, count, ch->sum_dtype, whole);
}
