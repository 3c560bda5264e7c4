/*
 * Places of an array of records that users share: each user has a fair part of it, so that one who
 * makes many records does not push out those of the others. Any thread, one at a time.
 */
#ifndef SHARDD_CORE_SHARES_H
#define SHARDD_CORE_SHARES_H

#include <stddef.h>
#include <stdint.h>

/* What a record begins with. */
struct shares_head {
	uint64_t id;  /* ascending, in the order in which they came; 0: the place is empty */
	uint32_t uid; /* whose it is */
};

/* Of users beyond these nobody knows how many records they have: theirs are replaced last. */
#define SHARES_USERS 64u

/* Where a new record of @uid goes, of @n places (> 0) of @bytes each: an empty one; else that of the oldest record
 * of the user who has most, which is @uid if nobody has more. */
size_t shares_place(const void *records, size_t bytes, size_t n, uint32_t uid);

#endif
