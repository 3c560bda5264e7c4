/*
 * Saving: the checkpoint of a job, made in the background.
 *
 * It waits, as a reader does, until the parameters are those of the last commit. Then it opens a
 * generation of them (job/generation.h) and lists them in an index (checkpoint/index.h); a thread of
 * its own, with the ids of the job's owner, writes both to the disk. The job trains on meanwhile.
 * It saves parameters, optimizer state, buffers (from a copy: job/bufcopy.h) and blobs, on whatever
 * devices they are; the files do not tell how many.
 *
 *   WAITING --as of a commit--> WRITING --> DONE
 *      '--refused, cancelled------'-------> FAILED
 *
 * A job has at most one that is not over; the last one is kept for status. Loop thread.
 *
 * The nodes of a job with ranks on several of them make one together (cluster/round.h): each writes what
 * it has, its part. Phase by phase it is told what to do, and answers when it is done:
 *
 *   freeze --> make, or see, the folder --> write --> complete (the node that made the folder) --> end
 *
 * It is WAITING until it has frozen what it has, then WRITING.
 */
#ifndef SHARDD_JOB_SAVING_H
#define SHARDD_JOB_SAVING_H

#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>

#include "checkpoint/index.h"
#include "core/fault.h"
#include "store/state.h"
#include "unit/unit.h"

struct job;
struct node;
struct proc;
struct saving;

enum saving_state { SAVING_WAITING, SAVING_WRITING, SAVING_DONE, SAVING_FAILED, _SAVING_N };

/* What status says of it. */
struct saving_report {
	enum saving_state state;
	uint64_t step;    /* not WAITING: of the checkpoint */
	uint64_t bytes;   /* of tensors, all */
	uint64_t written; /* of them */
	uint64_t copied;  /* of them, before the trainers changed them */
	bool as_left; /* buffers of units are as the trainers have left them, not of the commit */
	const char *path; /* borrowed */
	const char *why;  /* FAILED: borrowed; else "" */
};

/* The end, called once; @f: NULL: DONE. */
typedef void (*saving_cb)(const struct saving_report *r, const struct fault *f, void *userdata);

struct saving_options {
	const char *path;     /* absolute, below one of the node's checkpoint_roots */
	uint64_t bytes_per_s; /* 0: as fast as the disk takes them */
	uint64_t deadline_us; /* of WAITING */
	uint32_t keep;        /* newest ones that stay when it is made; 0: all */
	bool next;            /* of several nodes: of the commit that is about to be made */
	bool memory; /* of several nodes: a replica (job/replica.h); @path, @keep and the rate are nothing */
	uint64_t layout, epoch; /* then: its replica_layout, and the epoch that runs */
};

/* Begin one. @proc: who asks. @done: not before this returns. Return: 0 or a fault code. */
int saving_begin(struct job *job, struct proc *proc, const struct saving_options *o, saving_cb done,
		 void *userdata, struct fault *f);
/* Its caller has gone: one that still waits ends, soon; one that writes goes on. */
void saving_leave(struct job *job, void *userdata);
/* Nobody wants it any more: end it, soon. Without this, one that writes outlives the deletion of the
 * job, whose memory stays until then. */
void saving_cancel(struct job *job);
/* Does one wait for a commit? */
bool saving_waits(const struct job *job);
/* Is there one that is not over? */
bool saving_is_busy(const struct job *job);
/* Of a replica: the same. */
bool saving_is_replicating(const struct job *job);
/* None is busy: drop what is kept for status; and of a replica. */
void saving_forget(struct job *job);
void saving_forget_memory(struct job *job);
/* Call now and then. */
void saving_tick(struct job *job);
/* Return: false: the job had none. */
bool saving_report(const struct job *job, struct saving_report *ret);

/* -- the part of one node of several */

/* The end of a phase. */
struct saving_answer {
	const struct fault *f; /* NULL: it is done; else it has failed, for good */
	bool later;            /* freeze: the parameters are not those of the commit now */
	uint64_t step;         /* freeze: of the commit */
	uint64_t bytes;        /* write: of its tensors; complete: of all parts */
	uint64_t tail;         /* write: of a replica's second file; @bytes: of the first one */
	uint32_t crc;          /* write: of its index */
};
/* May be called inside the function that begins the phase; also without one, if it fails meanwhile. */
typedef void (*saving_part_cb)(struct job *job, const struct saving_answer *a, void *userdata);

/* Begin this node's part: number @self of @parts. The one that somebody here has asked for is used, if
 * there is one. Return: it, until saving_part_end; NULL: @f is filled. */
struct saving *saving_part_begin(struct job *job, const struct saving_options *o, unsigned self,
				 unsigned parts, saving_part_cb answered, void *userdata,
				 struct fault *f);
/* Freeze what this node has of the commit behind step @after (has_after), or, @now, of that one: at once
 * or later. Again: what was frozen is dropped. */
struct saving_freeze_how {
	bool now, has_after;
	uint64_t after;
	uint64_t deadline_us;
};
void saving_part_freeze(struct saving *s, const struct saving_freeze_how *how);
/* Make the folder. @owner, @nonce: as in checkpoint/parts.h. */
void saving_part_make(struct saving *s, uint64_t owner, uint64_t nonce);
/* Its name. */
const char *saving_part_name(const struct saving *s);
/* Find it, where another node has made it. */
void saving_part_see(struct saving *s, const char *name, uint64_t nonce);
/* Into the folder; of a replica, into memory. */
void saving_part_write(struct saving *s);
/* All parts are written. @crcs: of their indexes, copied. */
void saving_part_complete(struct saving *s, const uint32_t *crcs);
/* It is over: all is there (@f is NULL; @bytes: of all parts), or why not. Nothing is answered any more. */
void saving_part_end(struct saving *s, uint64_t bytes, const struct fault *f);
/* Somebody here has asked for one, and none begins. Nothing to do if none waits for that. */
void saving_part_refuse(struct job *job, const struct fault *f);
/* Bytes of the tensors that were written so far. */
uint64_t saving_part_written(const struct saving *s);
/* Does one wait that somebody here has asked for, and that has not begun? */
bool saving_part_is_asked(const struct job *job);

/* The following is loading's, too. */

/* What array @i of a unit is: 0: its parameters; else a state of its optimizer. */
enum index_array saving_array(const state_unit *rec, unsigned i);
enum tensor_type saving_type(enum dtype t);
/* @t: enum buffer_dtype, or 0. */
enum tensor_type saving_buffer_type(uint32_t t);
/* A thread that blocks for the disk. Without signals: a limit of file sizes must not end the daemon
 * with SIGXFSZ. Return: 0 or -errno. */
int saving_start_thread(pthread_t *ret, void *(*run)(void *), void *arg);

/* WAITING, ... Static. */
const char *saving_state_name(enum saving_state s);

#endif
