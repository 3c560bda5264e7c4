/*
 * Readers: what reads a job's parameters where they are, as a checkpoint when it begins.
 *
 * A reader asks for a hold. It is granted only while the parameters in memory are those of the
 * last commit and nothing is under way that changes them. As long as a reader holds, operations
 * that would change them wait (readers_let): a step that is applied, an optimizer in backward,
 * ShardDone, Initialise, ReturnFull, ConvertUnits. While an operation waits to write, no hold is
 * granted.
 *
 *   IDLE --hold--> WAITING --as of a commit--> HOLDS --release, job ends--> IDLE
 *    ^                 |
 *    '--deadline, gives up, job ends
 *
 * A job that is deleted or drains ends all of it. Loop thread only.
 */
#ifndef SHARDD_JOB_READERS_H
#define SHARDD_JOB_READERS_H

#include <stdbool.h>
#include <stdint.h>

#include "core/condition.h"
#include "core/fault.h"
#include "core/list.h"
#include "core/proc.h"
#include "core/res.h"
#include "job/job_types.h"

struct job;
struct reader;
struct readers;

enum reader_state {
	READER_IDLE,
	READER_WAITING,
	READER_HOLDS,
	_READER_N,
};

/* The end of a wait for a hold: it is granted, or, with @f (else NULL), refused. Called once. */
typedef void (*reader_cb)(struct reader *r, const struct fault *f);

struct reader {
	struct list link; /* readers.all */
	struct list turn; /* readers.waiting or readers.holds */
	struct job *job;  /* borrowed; NULL: it was deleted */
	struct proc *proc;
	uint64_t session;
	uint8_t state;                /* enum reader_state */
	uint64_t step;                /* HOLDS: which */
	uint64_t since_us;            /* in this state */
	uint64_t until_us;            /* WAITING: the wait's deadline */
	bool (*may)(struct job *job); /* (optional) what else must be so that it is granted */
	reader_cb granted;
	void *userdata;
};

void readers_init(struct readers *all);

/* @proc: a reference is taken; NULL: the daemon itself. Return: 0 or -ENOMEM. */
int reader_new(struct job *job, struct proc *proc, uint64_t session, struct reader **ret);
/* Its hold ends. Operations that waited for it are resumed. NULL is
 * allowed.
 * Return: NULL. */
struct reader *reader_free(struct reader *r);

/* Hold the parameters as of the last commit. @deadline_us: of the wait.
 * @granted: called when it is granted or refused, perhaps before this returns, unless this fails.
 * Return: 0 or a fault code. */
int reader_hold(struct reader *r, uint64_t deadline_us, reader_cb granted, void *userdata,
		struct fault *f);
/* Cancel the wait for a hold; its callback is not called. */
void reader_give_up(struct reader *r);
/* Return: 0 or FAULT_STATE: it holds nothing. */
int reader_release(struct reader *r, struct fault *f);

/* Wait until parameters of the job may be written (nobody holds them, and what a generation has not
 * read is copied), or the epoch has ended: a resumed operation must
 * ask again. Never fails. */
enum res readers_let(struct job *job, enum job_change what, struct waiter *w);
/* The same for parameters that get another place and keep their values. No reader may hold them until
 * job->readers.writing is counted down again. @writes: whether it was counted up; the caller's, false at
 * first. Return: false: @w is resumed when this is worth another call. */
bool readers_begin_move(struct job *job, struct waiter *w, bool *writes);
/* What was to be copied before they write is copied: the operations that wait go on. */
void readers_go_on(struct job *job);
/* Something that is not a step writes parameters: until the next commit no reader may hold them,
 * not even of units that it initialises. They stay where they are: readers_generation does not grow. */
void readers_rewrite(struct job *job);
/* Are the masters those of the last commit, and does nothing wait to change them? */
bool readers_may_hold(const struct job *job);
/* A commit: grant what can be granted now. */
void readers_committed(struct job *job);
/* Grant what can be granted now. */
void readers_grant(struct job *job);
/* The epoch of the operations that wait to write has ended. */
void readers_epoch_ended(struct job *job);
/* The job drains: holds end. */
void readers_drain(struct job *job);
/* The job is deleted: its readers no longer have a job. */
void readers_lose_job(struct job *job);
/* Handle deadlines. Operations that wait to write may be resumed. */
void readers_tick(struct job *job, uint64_t now_us);

/* The version of where parameters are: it grows when they may be elsewhere. A trainer that writes new values to the same
 * place does not change it: buffers of generations, and what readers have mapped, would have to be given up for that.
 * Each generation asks whether a unit has values at all. */
uint64_t readers_generation(const struct job *job);
/* What a hold that is requested now would wait for, in words; "" for nothing. */
void readers_wait_for(const struct job *job, char *buf, size_t bytes);
/* What the reader @r, which is WAITING, waits for. */
void reader_wait_for(const struct reader *r, char *buf, size_t bytes);
/* The holders, in words, for operations that wait to write; "" if there are none. */
void readers_holding(const struct job *job, char *buf, size_t bytes);

/* IDLE, WAITING... Return: static string. */
const char *reader_state_name(enum reader_state s);

#endif
