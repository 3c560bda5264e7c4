/*
 * Users and groups that may read a publication, beside those who may open its job: its declaration names
 * them. They may lease its generations and nothing else of the job. Pure functions, any thread.
 */
#ifndef SHARDD_PUBLISH_PUBLISHED_READERS_H
#define SHARDD_PUBLISH_PUBLISHED_READERS_H

#include <stdbool.h>
#include <stddef.h>
#include <sys/types.h>

#include "core/fault.h"
#include "publish/view.h"

#define PUBLISHED_READERS_MAX 64u /* users, and groups, of a publication */

/* A process that asks. */
struct published_reader {
	uid_t uid;
	const gid_t *gids; /* borrowed, ascending; its primary group is among them */
	size_t n_gids;
};

/* Return: 0 or FAULT_INVALID. */
int published_readers_check(const view_declaration *d, struct fault *f);
/* Is @r one of those whom @d names? */
bool published_readers_has(const view_declaration *d, const struct published_reader *r);

#endif
