/*
 * The flight recorder, always on: all pending ops, the latest that have ended, the latest work of devices, and the
 * latest of what happened to publications. Of
 * what has ended each job has its share: a new record takes the place of the oldest one of the job that has
 * most, so that a busy job does not push out what happened in another one. A job is a name and an owner. It keeps its
 * share after its end, until more than a 64th as many jobs as records have some: then the records of those go first
 * that have recorded nothing for the longest time. Nothing is allocated after start. Loop thread only.
 */
#ifndef SHARDD_OP_RECORDER_H
#define SHARDD_OP_RECORDER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#include "core/list.h"

struct job;
struct op;

/* Whose it is, and what both kinds of records begin with. */
struct record_head {
	struct list link;
	uint64_t id; /* from 1, in the order in which they came; 0: empty */
	char job[65];
	uid_t uid;           /* the job's owner: a later job of that name may be another's */
	bool is_private;     /* the job was */
	uint32_t job_number; /* of the job: an earlier one of that name has another */
};

/* An op that has ended. */
struct record {
	struct record_head head; /* first */
	char unit[64];
	char group[32];
	const char *name; /* static */
	uint32_t rank;
	int pid;
	uint64_t number;
	uint64_t seq;
	uint64_t epoch;
	uint64_t announced_us; /* clock_now_us */
	uint64_t active_us;    /* when it became active (op.h); 0: never */
	uint64_t started_us;   /* 0: never */
	uint64_t finished_us;
	uint64_t step;   /* the last committed one of the job then */
	uint64_t bytes;  /* of the memory that it handed out */
	char error[160]; /* "" : none */
};

/* What one device did for one op: one task, or several one after the other. */
struct device_record {
	struct record_head head; /* first */
	char unit[64];
	char device[32];
	const char *queue; /* static */
	const char *name;  /* of the op; static */
	uint64_t number;   /* of a collective */
	uint64_t epoch;
	uint64_t submitted_us; /* the first */
	uint64_t began_us;     /* its first kernel; 0: not yet, or the device does not tell */
	uint64_t ended_us;     /* the last so far */
	uint64_t bytes;        /* that its kernels read and write */
	uint32_t kernels;
	unsigned pending; /* tasks that have not ended; it is not overwritten meanwhile */
	int status;       /* negative errno: the device failed one */
};

enum published_kind {
	PUBLISHED_GENERATION, /* from its beginning until its buffer is another one's */
	PUBLISHED_SKIPPED,    /* one that was due and was not made, for want of a buffer */
	PUBLISHED_FAILED,     /* one that could not be made */
	PUBLISHED_READER,     /* one by board, while it is open */
	PUBLISHED_LEASE,
	_PUBLISHED_KIND_N
};

/* How the daemon knows of a lease. */
enum published_lease {
	PUBLISHED_BY_CALL,   /* it gave and took it back itself */
	PUBLISHED_BY_STREAM, /* a call that sends the generation */
	PUBLISHED_BY_BOARD,  /* it saw the reader's hold: the times are those of its looks */
	/* The reader has used the generation between two looks, which are the times. */
	PUBLISHED_BETWEEN_LOOKS,
};

/* Something of a publication that is over. */
struct published_record {
	struct record_head head; /* first */
	char publication[64];
	uint8_t kind;  /* enum published_kind */
	uint8_t lease; /* LEASE: enum published_lease */
	bool was_used; /* GENERATION: a reader has leased it */
	int pid;       /* READER, LEASE */
	uint64_t session;
	uint64_t number; /* GENERATION, LEASE */
	uint64_t step;   /* the job's then; of a generation: its own */
	uint64_t began_us;
	uint64_t made_us; /* GENERATION; 0: it never was */
	uint64_t ended_us;
	uint64_t bytes, delta_bytes; /* GENERATION */
	char why[160];               /* SKIPPED, FAILED; GENERATION: why it is over */
};

/* The records of one job, oldest first. */
struct recorder_trail {
	struct list link; /* of the store; or of its spare ones */
	struct list records;
	size_t n;
};

/* Records of one kind. */
struct recorder_store {
	char *records;
	size_t size, bytes; /* how many, and of each */
	uint64_t next_id;
	struct list empty;
	struct recorder_trail *all_trails; /* @size of them */
	struct list trails, spare;
	size_t n_trails;
};

/* A checkpoint that is over. */
struct recorder_checkpoint {
	uint64_t step;
	uint64_t began_us, ended_us; /* clock_now_us */
	uint64_t bytes;
	const char *error; /* "": none */
};

/* (optional) Called with what has ended, at once; NULL: nothing is called. */
struct recorder_sink {
	void (*op)(const struct record *r, const struct op *op, void *userdata);
	void (*checkpoint)(const struct job *job, const struct recorder_checkpoint *c,
			   void *userdata);
	void *userdata;
};

struct recorder {
	struct recorder_store ops, devices, published;
	struct recorder_sink sink;
	struct list pending; /* of struct op, in the order in which they came */
};

/* The daemon's one recorder. */
extern struct recorder recorder;

/* @size: of the stores for ops and devices; that for publications has a quarter, at least 16. Return: 0 or -ENOMEM. */
int recorder_init(size_t size);
void recorder_deinit(void);

/* A number for an op that comes. */
uint64_t recorder_next_op(void);
/* A record for op number @id of @job, which has ended. What is not in its head is that of another op: fill all of it.
 * Return: NULL only with size 0. */
struct record *recorder_add(uint64_t id, const char *job, uid_t uid);

/* A record for work of @job, which is zero but for its head; nobody overwrites it before recorder_end_device.
 * Return: NULL if all records are of work that has not ended. */
struct device_record *recorder_add_device(const char *job, uid_t uid);
/* Its last task so far has ended. */
void recorder_end_device(struct device_record *r);
/* There is another one. */
void recorder_resume_device(struct device_record *r);
/* A record of a publication of @job, which is zero but for its head. Return: NULL only with size 0. */
struct published_record *recorder_add_published(const char *job, uid_t uid);
/* Those that are there, in no order: for @i from 0 on, until @i is recorder_size(). NULL: an empty place. */
size_t recorder_size(void);
const struct record *recorder_op_at(size_t i);
const struct device_record *recorder_device_at(size_t i);
const struct published_record *recorder_published_at(size_t i);

#endif
