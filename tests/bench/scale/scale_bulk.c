/* peer/bulk where links are not those of daemon/peer: no bytes move. */
#include "core/check.h"
#include "peer/bulk.h"

void bulk_serve(struct peers *ps, const struct bulk_ops *ops, void *userdata)
{
	(void)ps;
	(void)ops;
	(void)userdata;
}

int bulk_fetch(struct peers *ps, const struct bulk_want *want, bulk_done_cb done, void *userdata,
	       struct bulk_fetch **ret, struct fault *f)
{
	(void)ps;
	(void)done;
	(void)userdata;
	(void)ret;
	return fault_set(f, FAULT_UNAVAILABLE, "peer", "'%s' of node '%s': no bytes move here",
			 want->key, want->node);
}

void bulk_cancel(struct bulk_fetch *x)
{
	(void)x;
	CHECK_NOT_REACHED();
}

uint64_t bulk_bytes(const struct bulk_fetch *x)
{
	(void)x;
	CHECK_NOT_REACHED();
}
