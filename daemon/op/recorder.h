/*
 * The flight recorder: the last ops, and the last that devices did for them, always on. Two
 * rings of fixed records, written as these come and go; nothing is allocated after start.
 * Loop thread only.
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
	bool is_private;  /* the job was */
	uint32_t rank;
	int pid;
	uint64_t number;
	uint64_t seq;
	uint64_t epoch;
	uint64_t announced_us; /* clock_now_us */
	uint64_t active_us;    /* when it became active (op.h); 0: never */
	uint64_t started_us;   /* 0: never */
	uint64_t finished_us;  /* 0: pending */
	uint64_t bytes;        /* of the memory that it handed out */
	char error[160];       /* "" : none */
};

/* What one device did for one op: one task, or several one after the other. */
struct device_record {
	uint64_t id; /* from 1; 0: empty */
	char job[65];
	char unit[64];
	char device[32];
	const char *queue; /* static */
	const char *name;  /* of the op; static */
	uid_t uid;         /* as above */
	bool is_private;   /* as above */
	uint64_t number;   /* of a collective */
	uint64_t epoch;
	uint64_t submitted_us; /* the first */
	uint64_t began_us;     /* its first kernel; 0: not yet, or the device does not tell */
	uint64_t ended_us;     /* the last so far */
	uint64_t bytes;        /* that its kernels read and write */
	uint32_t kernels;
	unsigned pending; /* tasks that have not ended */
	int status;       /* negative errno: the device failed one */
};

struct recorder {
	struct record *ring;
	size_t size; /* of either ring */
	uint64_t next_id;
	struct device_record *devices;
	uint64_t next_device_id;
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

/* The same of what devices do. */
struct device_record *recorder_add_device(void);
struct device_record *recorder_find_device(uint64_t id);
const struct device_record *recorder_device_at(size_t i);

#endif
