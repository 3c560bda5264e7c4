/*
 * The jobs that have ended, the last ones of each user (core/shares.h). They are in a file of memory of
 * fixed size, which outlives the daemon where jobs do: a successor finds all records but, perhaps, one
 * that was being written. Loop thread only.
 */
#ifndef SHARDD_JOB_HISTORY_H
#define SHARDD_JOB_HISTORY_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "core/shares.h"

#define HISTORY_MOST 4096u

/* Why a job ended. Equal to the wire's EndCause. */
enum history_why {
	HISTORY_DELETED = 1, /* by a call */
	HISTORY_FINISHED,    /* EPHEMERAL, and all its ranks have left */
	HISTORY_EXPIRED,     /* nobody came back; all trainers had left cleanly */
	HISTORY_CRASHED,     /* nobody came back, and a trainer had died */
	HISTORY_REPLACED,    /* by a new one of its name */
	HISTORY_UNUSED,      /* the first rank that was to join it could not */
};

/* All of it is plain data. */
struct history_record {
	struct shares_head head; /* first */
	uint64_t check;          /* of all that follows */
	char job[65];
	char error[191]; /* the last one of its ops; "": none */
	uint64_t began_unix_s, ended_unix_s;
	uint64_t step; /* of the last commit */
	uint64_t peak_bytes;
	uint64_t ops;
	uint32_t ranks;
	uint8_t why; /* enum history_why */
	uint8_t has_commit;
	uint8_t is_private;
	uint8_t was_torn;
};

struct job;

/* Begin with the records of a predecessor in @fd (borrowed; -1: there is none), or, if these cannot be
 * read, without any. @most: records, at most HISTORY_MOST; the newest of a predecessor's remain.
 * @ret_dropped: records of the predecessor that are dropped: they are too many, or not whole; -1: all, since its file
 * cannot be read. Return: 0 or negative errno. */
int history_open(size_t most, int fd, long *ret_dropped);
/* Safe to call twice, and if it was never opened. */
void history_close(void);
/* Borrowed; -1: none, or that of the predecessor. */
int history_fd(void);

/* @job ends now. Does nothing if the history is not open. */
void history_add(const struct job *job);

/* All records, the newest first: borrowed until the next call of the others. Return: how many. */
size_t history_all(const struct history_record *ret[HISTORY_MOST]);

#endif
