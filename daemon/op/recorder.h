/*
 * The flight recorder: the last ops, always on. A ring of fixed records, written as
 * ops come and go; nothing is allocated after start. Loop thread only.
 */
#ifndef SHARDD_OP_RECORDER_H
#define SHARDD_OP_RECORDER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

struct op;

struct record {
	uint64_t id;         /* from 1; 0: empty */
	const struct op *op; /* while pending */
	char job[65];
	char unit[64];
	char group[32];
	const char *name; /* static */
	uid_t uid;        /* the job's owner: a later job of that name may be another's */
	uint32_t rank;
	int pid;
	uint64_t number;
	uint64_t seq;
	uint64_t epoch;
	uint64_t announced_us; /* clock_now_us */
	uint64_t started_us;   /* 0: never */
	uint64_t finished_us;  /* 0: pending */
	char error[160];       /* "" : none */
};

struct recorder {
	struct record *ring;
	size_t size;
	uint64_t next_id;
};

/* The daemon's one recorder. */
extern struct recorder recorder;

/* Return: 0 or -ENOMEM. */
int recorder_init(size_t size);
void recorder_deinit(void);

/* A new record to be filled; overwrites the oldest. Never NULL after init with a size
 * over 0; NULL else. */
struct record *recorder_add(void);
/* By id; NULL if it has been overwritten. */
struct record *recorder_find(uint64_t id);
/* The @i-th oldest (0: the oldest kept). Return: NULL past the end. */
const struct record *recorder_at(size_t i);

#endif
