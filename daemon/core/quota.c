#include "core/quota.h"

#include <stddef.h>

#include "core/check.h"

void quota_init(struct quota *q, struct quota *parent, uint64_t limit)
{
	*q = (struct quota){ .parent = parent, .limit = limit };
}

/* In this account alone. */
static uint64_t quota_left_here(const struct quota *q)
{
	uint64_t limit = q->limit ? q->limit : UINT64_MAX;
	uint64_t here = limit > q->used ? limit - q->used : 0;
	uint64_t user = q->user ? user_left(q->user, USER_STATE) : UINT64_MAX;

	return user < here ? user : here;
}

uint64_t quota_left(const struct quota *q)
{
	uint64_t left = UINT64_MAX;

	for (; q; q = q->parent) {
		uint64_t here = quota_left_here(q);

		left = here < left ? here : left;
	}
	return left;
}

static void quota_add(struct quota *q, enum mem_class class, uint64_t bytes)
{
	q->used += bytes;
	q->by_class[class] += bytes;
	if (q->user)
		user_add(q->user, USER_STATE, bytes);
}

static void quota_sub(struct quota *q, enum mem_class class, uint64_t bytes)
{
	CHECK(q->by_class[class] >= bytes && q->used >= bytes);
	q->used -= bytes;
	q->by_class[class] -= bytes;
	if (q->user)
		user_sub(q->user, USER_STATE, bytes);
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
	for (; q; q = q->parent)
		quota_add(q, class, bytes);
	return 0;
}

void quota_undo(struct quota *q, enum mem_class class, uint64_t bytes)
{
	for (; q; q = q->parent)
		quota_sub(q, class, bytes);
}

static void quota_note_peak(struct quota *q, enum mem_class class)
{
	quota_raise_to(&q->peak_used, q->used);
	quota_raise_to(&q->peak[class], q->by_class[class]);
}

/* Charges fall only here and in quota_return_here, so the peak is either recorded there or is the
 * present charge. */
void quota_return(struct quota *q, enum mem_class class, uint64_t bytes)
{
	for (struct quota *at = q; at; at = at->parent)
		quota_note_peak(at, class);
	quota_undo(q, class, bytes);
}

int quota_charge_here(struct quota *q, enum mem_class class, uint64_t bytes)
{
	CHECK(class < _MEM_N);
	if (bytes > quota_left_here(q))
		return QUOTA_E_LIMIT;
	quota_add(q, class, bytes);
	return 0;
}

void quota_return_here(struct quota *q, enum mem_class class, uint64_t bytes)
{
	quota_note_peak(q, class);
	quota_sub(q, class, bytes);
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
	static const char *const names[_MEM_N] = { "shard", "full", "grad", "control",
						   "published" };

	return class < _MEM_N ? names[class] : "?";
}
