/*
 * Which rank of a job announces its collectives later than the others, from the records of the flight
 * recorder. An op of a group and number is one collective; how late a rank is in it is the time from
 * the rank in the middle (of an even number the earlier of the two) to it. So one rank that is early
 * makes none of the others late. Records of one node alone: its clock is theirs. Any thread.
 */
#ifndef SHARDD_CTL_LATE_H
#define SHARDD_CTL_LATE_H

#include <stddef.h>
#include <stdint.h>

#include "status.pb-c.h"

struct late_rank {
	uint32_t rank;
	int32_t pid;
	uint64_t collectives; /* that it was in */
	uint64_t last;        /* of them, those that it was the last in */
	uint64_t median_us;   /* how late it was in these */
	uint64_t p95_us;
	uint64_t worst_us;
	uint64_t
		waited_us; /* for so long the rank in the middle waited for it; each time counts once */
};

enum late_verdict {
	LATE_UNKNOWN, /* no collective of two ranks */
	LATE_NONE,    /* the ranks wait less than LATE_PERCENT of the time */
	LATE_MANY,    /* now for one, now for another */
	LATE_ONE      /* ranks[0] */
};

/* Below that share of the time waiting is no finding. */
#define LATE_PERCENT 5u

struct late {
	struct late_rank *ranks; /* the one that was waited for most comes first */
	size_t n;
	uint64_t collectives;
	uint64_t
		incomplete; /* collectives that not all ranks have ended well, or of which records are gone */
	uint64_t steps;     /* commits among them; without any, steps of the optimizer */
	uint64_t span_us;   /* from the first announcement to the last */
	uint64_t waited_us; /* the sum of all ranks' */
	enum late_verdict verdict;
};

/* @steps: look at the last so many only; 0: at all. Return: 0 or -ENOMEM; else late_deinit. */
int late_find(const Shardd__V1__OpsResponse *ops, uint64_t steps, struct late *ret);
void late_deinit(struct late *l);

#endif
