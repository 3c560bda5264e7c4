#include "core/quota.h"

#include <stddef.h>

#include "core/check.h"

void quota_init(struct quota *q, struct quota *parent, uint64_t limit)
{
	*q = (struct quota){ .parent = parent, .limit = limit };
}

uint64_t quota_left(const struct quota *q)
{
	uint64_t left = UINT64_MAX;

	for (; q; q = q->parent) {
		uint64_t limit = q->limit ? q->limit : UINT64_MAX;
		uint64_t here = limit > q->used ? limit - q->used : 0;
		uint64_t user = q->user ? user_left(q->user, USER_STATE) : UINT64_MAX;

		here = user < here ? user : here;
		if (here < left)
			left = here;
	}
	return left;
}

static void quota_raise_to(uint64_t *peak, uint64_t now)
{
	if (*peak < now)
		*peak = now;
}

int quota_charge(struct quota *q, enum mem_class class, uint64_t bytes)
{
	CHECK(class < _MEM_N);
	if (bytes > quota_left(q))
		return QUOTA_E_LIMIT;
	for (; q; q = q->parent) {
		q->used += bytes;
		q->by_class[class] += bytes;
		if (q->user)
			user_add(q->user, USER_STATE, bytes);
	}
	return 0;
}

void quota_undo(struct quota *q, enum mem_class class, uint64_t bytes)
{
	for (; q; q = q->parent) {
		CHECK(q->by_class[class] >= bytes && q->used >= bytes);
		q->used -= bytes;
		q->by_class[class] -= bytes;
		if (q->user)
			user_sub(q->user, USER_STATE, bytes);
	}
}

/* Charges fall only here, so the peak is either recorded here or is the present charge. */
void quota_return(struct quota *q, enum mem_class class, uint64_t bytes)
{
	for (struct quota *at = q; at; at = at->parent) {
		quota_raise_to(&at->peak_used, at->used);
		quota_raise_to(&at->peak[class], at->by_class[class]);
	}
	quota_undo(q, class, bytes);
}

uint64_t quota_peak(const struct quota *q, enum mem_class class)
{
	return q->peak[class] > q->by_class[class] ? q->peak[class] : q->by_class[class];
}

uint64_t quota_peak_used(const struct quota *q)
{
	return q->peak_used > q->used ? q->peak_used : q->used;
}

const char *mem_class_name(enum mem_class class)
{
	static const char *const names[_MEM_N] = { "shard", "full", "grad", "control" };

	return class < _MEM_N ? names[class] : "?";
}
