/*
 * How often something may be done on behalf of a user (a token bucket for each): a client that
 * does the same thing in a loop must not fill the log, or keep the loop busy. Loop thread only.
 */
#ifndef SHARDD_CORE_PACE_H
#define SHARDD_CORE_PACE_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

#define PACE_USERS 64u

struct pace_user {
	uid_t uid;
	uint32_t left;      /* what may be done now */
	uint64_t skipped;   /* since the last that was done */
	uint64_t filled_us; /* when @left was last added to; 0: the entry is free */
};

/* Initialise with both rates; all else is zero. */
struct pace {
	uint32_t burst;    /* at once */
	uint32_t a_second; /* from then on */
	struct pace_user users[PACE_USERS];
};

/* May it be done once more for @uid at @now_us? @ret_skipped: how often it was not, since the last
 * time that it was. The user who was quiet longest gives its entry to a new one. */
bool pace_take(struct pace *p, uid_t uid, uint64_t now_us, uint64_t *ret_skipped);

#endif
