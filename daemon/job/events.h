/*
 * What has happened to jobs: the last events of each user (core/shares.h), for whoever asks later or waits for
 * the next. Nothing is allocated after start. The daemon's one ring; loop thread only.
 */
#ifndef SHARDD_JOB_EVENTS_H
#define SHARDD_JOB_EVENTS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "core/condition.h"
#include "core/shares.h"

/* Equal to the wire's EventKind. */
enum events_kind {
	EVENTS_CREATED = 1,
	EVENTS_RESTORED,
	EVENTS_JOINED,
	EVENTS_FORMED,
	EVENTS_LEFT,
	EVENTS_DIED,
	EVENTS_EPOCH_ENDED,
	EVENTS_STALL,
	EVENTS_STALL_ENDED,
	EVENTS_COMMIT,
	EVENTS_CHECKPOINT,
	EVENTS_CHECKPOINT_FAILED,
	EVENTS_DRAIN,
	EVENTS_DEVICE_LOST,
	EVENTS_ENDED,
	EVENTS_WAITS_FOR_MEMORY,
	EVENTS_ADMITTED,
};

#define EVENTS_NO_RANK (-1)
/* Of a job's commits one is told in that time, with the number of the others. */
#define EVENTS_COMMIT_US UINT64_C(10000000)

struct events_record {
	struct shares_head head; /* first */
	uint64_t nth;            /* of its owner's events: without a gap unless some are gone */
	uint64_t unix_ms;
	uint64_t epoch;
	char job[65];
	char text[255];
	int32_t rank; /* EVENTS_NO_RANK: of none */
	int32_t pid;  /* 0: of none */
	uint8_t kind;
	bool is_private;
};

struct job;
struct member;

/* @size: events that are kept. Return: 0 or -ENOMEM. */
int events_init(size_t size);
/* Safe without events_init. */
void events_deinit(void);

/* Does nothing without events_init. @text: cut to its room. */
void events_add(const struct job *job, enum events_kind kind, const char *fmt, ...)
	__attribute__((format(printf, 3, 4)));
void events_add_rank(const struct member *m, enum events_kind kind, const char *fmt, ...)
	__attribute__((format(printf, 3, 4)));
/* The job has committed @step: told at most once in EVENTS_COMMIT_US. */
void events_add_commit(struct job *job, uint64_t step);

/* Signalled after each. */
struct condition *events_changed(void);
/* The id of the newest; 0: there was none. */
uint64_t events_last(void);
/* NULL: there was none. */
const struct events_record *events_newest(void);
/* A number for this run of the daemon, in which ids begin with 1; not 0. */
uint64_t events_run(void);
size_t events_size(void);
/* In no order, for @i from 0 to events_size(). NULL: an empty place. */
const struct events_record *events_at(size_t i);

#endif
