#include "publish/published_readers.h"

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

static int published_readers_check_list(const uint32_t *ids, size_t n, const char *of,
					struct fault *f)
{
	char field[64];

	snprintf(field, sizeof(field), "readers.%s", of);
	if (n > PUBLISHED_READERS_MAX)
		return fault_set(f, FAULT_INVALID, field,
				 "%s has %zu entries; at most %u are possible: name a group", field,
				 n, PUBLISHED_READERS_MAX);
	for (size_t i = 0; i < n; i++) {
		snprintf(field, sizeof(field), "readers.%s[%zu]", of, i);
		if (ids[i] == UINT32_MAX)
			return fault_set(f, FAULT_INVALID, field, "%s is %u, which nobody has",
					 field, ids[i]);
	}
	return 0;
}

int published_readers_check(const view_declaration *d, struct fault *f)
{
	const Shardd__V1__PublishedReaders *r = d->readers;

	if (d->readers_may_publish && (!r || (!r->n_users && !r->n_groups)))
		return fault_set(f, FAULT_INVALID, "readers_may_publish",
				 "readers_may_publish is set, and readers names nobody");
	if (!r)
		return 0;
	if (published_readers_check_list(r->users, r->n_users, "users", f))
		return f->code;
	return published_readers_check_list(r->groups, r->n_groups, "groups", f);
}

static int published_readers_compare(const void *a, const void *b)
{
	const gid_t *x = a, *y = b;

	return *x < *y ? -1 : *x > *y;
}

static bool published_readers_in(const struct published_reader *r, gid_t gid)
{
	return r->n_gids &&
	       bsearch(&gid, r->gids, r->n_gids, sizeof(gid), published_readers_compare);
}

bool published_readers_has(const view_declaration *d, const struct published_reader *r)
{
	const Shardd__V1__PublishedReaders *may = d->readers;

	for (size_t i = 0; may && i < may->n_users; i++)
		if (may->users[i] == r->uid)
			return true;
	for (size_t i = 0; may && i < may->n_groups; i++)
		if (published_readers_in(r, may->groups[i]))
			return true;
	return false;
}
