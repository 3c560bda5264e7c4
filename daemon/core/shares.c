#include "core/shares.h"

#include "core/check.h"

struct shares_count {
	uint32_t uid;
	size_t n;
	size_t oldest; /* place */
};

static const struct shares_head *shares_at(const void *records, size_t bytes, size_t i)
{
	return (const struct shares_head *)(const void *)((const char *)records + i * bytes);
}

static struct shares_count *shares_find(struct shares_count *counts, size_t *n, uint32_t uid)
{
	for (size_t i = 0; i < *n; i++)
		if (counts[i].uid == uid)
			return &counts[i];
	if (*n == SHARES_USERS)
		return NULL;
	counts[*n] = (struct shares_count){ .uid = uid };
	return &counts[(*n)++];
}

size_t shares_place(const void *records, size_t bytes, size_t n, uint32_t uid)
{
	struct shares_count counts[SHARES_USERS] = { { .uid = uid } }, *most = counts;
	size_t users = 1; /* @uid is the first: of equals it comes first */

	CHECK(n > 0);
	for (size_t i = 0; i < n; i++) {
		const struct shares_head *h = shares_at(records, bytes, i);
		struct shares_count *c;

		if (!h->id)
			return i;
		c = shares_find(counts, &users, h->uid);
		if (c && (!c->n++ || h->id < shares_at(records, bytes, c->oldest)->id))
			c->oldest = i;
	}
	for (size_t i = 1; i < users; i++)
		if (counts[i].n > most->n || (most != counts && counts[i].n == most->n &&
					      shares_at(records, bytes, counts[i].oldest)->id <
						      shares_at(records, bytes, most->oldest)->id))
			most = &counts[i];
	return most->oldest;
}
