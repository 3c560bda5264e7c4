/*
 * Limits how often a log line may be written on behalf of a user: a client that does the same thing
 * in a loop must not fill the log, nor push other users' lines out of it. Loop thread only.
 */
#ifndef SHARDD_CORE_PACE_H
#define SHARDD_CORE_PACE_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

#define PACE_USERS    64u
#define PACE_BURST    100u
#define PACE_A_SECOND 10u

struct pace_user {
	uid_t uid;
	uint32_t left;      /* lines that may be written now */
	uint64_t skipped;   /* since the last one that was */
	uint64_t filled_us; /* when @left was last added to; 0: the entry is free */
};

struct pace {
	struct pace_user users[PACE_USERS];
};

/* May one more line be written for @uid at @now_us? @ret_skipped: how many lines were skipped since
 * the last one. A new user takes the entry of the user that was quiet longest. */
bool pace_take(struct pace *p, uid_t uid, uint64_t now_us, uint64_t *ret_skipped);

#endif
