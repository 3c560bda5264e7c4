#include "ddp/op_ddp_shown.h"

#include <errno.h>

#include "core/check.h"
#include "reduce/reduce_ddp.h"

/* A slot: a byte for each tensor of the bucket, then the order of arrival. */
struct slot {
	uint32_t n;       /* tensors of the bucket, 0: all are used */
	uint64_t arrival; /* where that is */
	uint64_t shows;   /* bytes of it; 0: it is not shown */
	uint64_t bytes;
};

static struct slot op_ddp_shown_slot(const struct coll *c)
{
	const struct ddp_args *a = ddp_args(c->ops[0]);
	const struct ddp_buckets *b = &a->d->layouts[a->layout];
	struct slot s = { 0 };

	if (ddp_may_leave_out(a->d))
		s.n = b->begin[a->bucket + 1] - b->begin[a->bucket];
	s.bytes = (s.n + sizeof(double) - 1) / sizeof(double) * sizeof(double);
	s.arrival = s.bytes;
	s.shows = reduce_ddp_arrival_bytes(c, a->d, a->layout, a->bucket);
	s.bytes += s.shows;
	return s;
}

/* A surrogate's rank has no pass. */
static void op_ddp_shown_fill_used(const struct coll *c, const struct coll_part *p,
				   const struct slot *s, uint8_t *used)
{
	const struct ddp_args *a = ddp_args(c->ops[0]);
	const struct ddp_buckets *b = &a->d->layouts[a->layout];

	for (uint32_t i = 0; i < p->n; i++) {
		const struct ddp_rank *r = &a->d->ranks[p->members[i]];

		for (uint32_t k = 0; !c->ops[p->members[i]]->surrogate && k < s->n; k++)
			used[k] |= !(r->flags[b->tensors[b->begin[a->bucket] + k]] & DDP_UNUSED);
	}
}

static enum res op_ddp_shown_begin(struct coll *c, struct op_ddp_shown *shown)
{
	const struct slot s = op_ddp_shown_slot(c);

	RES_TRY(share_begin(c, &shown->share, s.bytes));
	for (unsigned d = 0; d < c->n_parts; d++) {
		uint8_t *own = share_own(c, &shown->share, d);

		op_ddp_shown_fill_used(c, &c->parts[d], &s, own);
		if (s.shows)
			reduce_ddp_arrival_fill(ddp_args(c->ops[0])->d, own + s.arrival);
	}
	return RES_DONE;
}

enum res op_ddp_shown_tick(struct coll *c, struct op_ddp_shown *s)
{
	struct slot slot;
	uint8_t *first;

	if (!s->share.all)
		RES_TRY(op_ddp_shown_begin(c, s));
	RES_TRY(share_tick(c, &s->share));
	slot = op_ddp_shown_slot(c);
	first = share_slot(&s->share, 0); /* the first rank is on the first device */
	return slot.shows ? reduce_ddp_arrival_take(c, ddp_args(c->ops[0])->d, first + slot.arrival)
			  : RES_DONE;
}

bool op_ddp_shown_is_used(const struct coll *c, const struct op_ddp_shown *s, uint32_t k)
{
	if (!ddp_may_leave_out(ddp_args(c->ops[0])->d))
		return true; /* there is none without a rank that has inputs */
	for (unsigned d = 0; d < coll_devices(c); d++)
		if (((const uint8_t *)share_slot(&s->share, d))[k])
			return true;
	return false;
}

void op_ddp_shown_end(struct op_ddp_shown *s)
{
	share_end(&s->share);
}
