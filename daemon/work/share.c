#include "work/share.h"

#include <errno.h>
#include <stdlib.h>

#include "core/check.h"

/* An engine counts elements. */
#define SHARE_ELEMENT sizeof(float)

enum res share_begin(struct coll *c, struct share *s, uint64_t bytes)
{
	share_end(s);
	s->bytes = (bytes + sizeof(double) - 1) / sizeof(double) * sizeof(double);
	s->all = calloc(coll_devices(c), s->bytes ? s->bytes : 1);
	return s->all ? RES_DONE : coll_fail(c, -ENOMEM);
}

void *share_slot(const struct share *s, unsigned number)
{
	return s->all + number * s->bytes;
}

void *share_own(const struct coll *c, const struct share *s, unsigned d)
{
	return share_slot(s, c->group->first_device + d);
}

void share_end(struct share *s)
{
	free(s->all);
	*s = (struct share){ 0 };
}

static void *share_on(const struct coll *c, const struct share *s, unsigned d, unsigned number)
{
	return (char *)region_addr(&c->parts[d].scratch[COLL_SHARED]) + number * s->bytes;
}

static enum res share_copy_in(struct coll *c, const struct share *s)
{
	RES_TRY(coll_need_launches(c, 1));
	for (unsigned d = 0; d < c->n_parts; d++)
		coll_launch(&c->parts[d], LAUNCH_COPY, s->bytes)->copy =
			(struct k_copy){ share_on(c, s, d, c->group->first_device + d),
					 share_own(c, s, d) };
	return coll_kernels(c);
}

static enum res share_talk(struct coll *c, const struct share *s)
{
	const void *send[NODE_MAX_DEVICES];
	void *recv[NODE_MAX_DEVICES];

	RES_TRY(coll_can_talk(c));
	for (unsigned d = 0; d < c->n_parts; d++) {
		send[d] = share_on(c, s, d, c->group->first_device + d);
		recv[d] = share_on(c, s, d, 0);
	}
	coll_all_gather(c, send, recv, s->bytes / SHARE_ELEMENT, DTYPE_FP32);
	return RES_WAIT;
}

/* All devices of this node have the same. */
static enum res share_copy_out(struct coll *c, const struct share *s)
{
	RES_TRY(coll_need_launches(c, 1));
	coll_launch(&c->parts[0], LAUNCH_COPY, s->bytes * coll_devices(c))->copy =
		(struct k_copy){ s->all, share_on(c, s, 0, 0) };
	return coll_kernels_sync(c);
}

enum share_stage { SHARE_READY, SHARE_TALK, SHARE_COPY_OUT, SHARE_DONE };

enum res share_tick(struct coll *c, struct share *s)
{
	switch ((enum share_stage)s->stage) {
	case SHARE_READY:
		if (!group_spans(c->group) || !s->bytes)
			return RES_DONE;
		RES_TRY(coll_ready(c));
		RES_TRY(coll_need_scratch(c, COLL_SHARED, s->bytes * coll_devices(c)));
		s->stage = SHARE_TALK;
		return share_copy_in(c, s);
	case SHARE_TALK:
		s->stage = SHARE_COPY_OUT;
		return share_talk(c, s);
	case SHARE_COPY_OUT:
		s->stage = SHARE_DONE;
		return share_copy_out(c, s);
	case SHARE_DONE:
		s->stage = SHARE_READY;
		return RES_DONE;
	}
	CHECK_NOT_REACHED();
}
