#include "work/chain.h"

#include <string.h>

#include "core/check.h"

bool chain_is_wanted(const struct group *g)
{
	return group_spans(g) && g->job->node->order_ranks;
}

bool chain_is_used(const struct coll *c)
{
	const struct device *d = c->parts[0].device;

	if (chain_is_wanted(c->group))
		return true;
	return group_spans(c->group) && backend_info(d->backend)->order == BACKEND_ORDER_NONE &&
	       comm_can_sum(coll_between(c));
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
	if (!chain_is_wanted(c->group) || (chain_in_order(c) && comm_can_sum(coll_between(c))))
		return RES_DONE;
	c->everywhere = true;
	fault_set(
		c->fault, FAULT_UNIMPLEMENTED, NULL,
		"%s: order: ranks needs host memory, and ranks that are on devices in their order: "
		"set order: devices on all nodes",
		c->type->name);
	return RES_FAILED;
}

/* @k inputs at a time, to the values that are there; @begin: these are the first ones. */
static void chain_add(const struct chain_part *p, const void *const *in, unsigned k,
		      struct k_factor pre, void *values, uint64_t n, bool begin)
{
	const struct chain *ch = p->chain;
	struct launch launch = { .kind = LAUNCH_REDUCE, .n = n };

	launch.reduce = (struct k_reduce){ .out = values,
					   .out_dtype = ch->sum_dtype,
					   .in = in,
					   .k = k,
					   .in_dtype = ch->in_dtype,
					   .pre = pre,
					   .sum_dtype = ch->sum_dtype,
					   .post = ch->post,
					   .accumulate = !begin };
	backend_run(ch->c->parts[p->d].device->backend, &launch, ch->owner);
}

/* Where the ranks have the elements from @first on, of which there are @n, or fewer that lie together.
 * Return: how many; in[0] is NULL: there is nothing to be added to them. */
static uint64_t chain_find(const struct chain_part *p, uint64_t first, uint64_t n, const void **in,
			   struct k_factor *pre)
{
	*pre = p->chain->pre;
	in[0] = NULL;
	for (uint32_t k = 0; k < p->chain->c->parts[p->d].n; k++) {
		uint64_t part = n;

		in[k] = p->chain->source(p->chain, p->d, k, first, &part, pre);
		CHECK(part > 0 && part <= n && (k == 0 || part == n) && !in[k] == !in[0]);
		n = part;
	}
	return n;
}

/* On a thread of the engine. Where values begin all ranks are added at once, else one after the other:
 * the sum is rounded at every addition, so that both have the same bits. */
static void chain_fold(void *userdata, void *values, uint64_t first, uint64_t n, bool begin)
{
	const struct chain_part *p = userdata;
	const uint32_t ranks = p->chain->c->parts[p->d].n, together = begin ? ranks : 1;
	const size_t size = dtype_size(p->chain->sum_dtype);
	const void *in[KERNEL_MAX_INPUTS];
	struct k_factor pre;

	CHECK(ranks <= KERNEL_MAX_INPUTS);
	for (uint64_t at = 0, part; at < n; at += part) {
		char *to = (char *)values + at * size;

		part = chain_find(p, first + at, n - at, in, &pre);
		if (!in[0] && begin)
			memset(to, 0, part * size);
		for (uint32_t k = 0; in[0] && k < ranks; k += together)
			chain_add(p, in + k, together, pre, to, part, begin);
	}
}

void chain_talk(struct chain *ch, void *const *recv, uint64_t count, bool whole)
{
	const struct comm_sum sum = { .count = count,
				      .dtype = ch->sum_dtype,
				      .whole = whole,
				      .chained = chain_is_wanted(ch->c->group) };
	struct comm_fold fold[NODE_MAX_DEVICES];

	CHECK(!sum.chained || !ch->post.how);
	ch->owner = job_as_owner(ch->c->job);
	for (unsigned d = 0; d < ch->c->n_parts; d++) {
		ch->parts[d] = (struct chain_part){ ch, d };
		fold[d] = (struct comm_fold){ chain_fold, &ch->parts[d] };
	}
	coll_sum(ch->c, &sum, fold, recv);
}
