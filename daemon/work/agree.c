#include "work/agree.h"

#include <stdio.h>

#include "core/check.h"
#include "job/span.h"

/* Of a node, in the slots of all its devices. */
struct agree_slot {
	uint32_t code; /* 0: nothing is wrong */
	char text[380];
};

static enum res agree_begin(struct coll *c, struct agree *a,
			    int (*check)(const struct coll *c, struct fault *f))
{
	const struct span *s = c->job->across.span;
	struct fault own = FAULT_NULL;

	RES_TRY(share_begin(c, &a->share, sizeof(struct agree_slot)));
	(void)check(c, &own);
	for (unsigned d = 0; own.code && d < c->n_parts; d++) {
		struct agree_slot *slot = share_own(c, &a->share, d);

		slot->code = own.code;
		snprintf(slot->text, sizeof(slot->text), "on node %.63s: %.300s",
			 s->nodes[s->self].name, own.text);
	}
	return RES_DONE;
}

static enum res agree_conclude(struct coll *c, struct agree *a)
{
	for (unsigned d = 0; d < coll_devices(c); d++) {
		const struct agree_slot *slot = share_slot(&a->share, d);

		if (!slot->code)
			continue;
		c->everywhere = true;
		fault_set(c->fault, slot->code < _FAULT_N ? slot->code : FAULT_INTERNAL, NULL,
			  "%.*s", (int)sizeof(slot->text) - 1, slot->text);
		return RES_FAILED;
	}
	return RES_DONE;
}

enum res agree_tick(struct coll *c, struct agree *a,
		    int (*check)(const struct coll *c, struct fault *f))
{
	if (!group_spans(c->group) || a->done)
		return check(c, c->fault) ? RES_FAILED : RES_DONE;
	if (!a->share.all)
		RES_TRY(agree_begin(c, a, check));
	RES_TRY(share_tick(c, &a->share));
	a->done = true;
	return agree_conclude(c, a);
}

void agree_end(struct agree *a)
{
	share_end(&a->share);
}
