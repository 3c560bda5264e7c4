/*
 * What the tests of failures have in common: waiting for a condition, what a trainer
 * was told, and looking into the daemon from outside.
 */
#ifndef SHARDD_TESTS_FAILFIX_H
#define SHARDD_TESTS_FAILFIX_H

#include <criterion/criterion.h>
#include <poll.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "await.h"
#include "core/clock.h"
#include "daemonfix.h"
#include "daemonwatch.h"
#include "trainfix.h"

/* AWAIT of a trainer, which it ends. */
#define TRAINER_AWAIT(cond, seconds)                                                             \
	do {                                                                                     \
		uint64_t await_until_ = clock_now_us() + (uint64_t)(seconds)*1000000u;           \
		while (!(cond)) {                                                                \
			trainer_check(clock_now_us() < await_until_, #cond, __FILE__, __LINE__); \
			poll(NULL, 0, 1);                                                        \
		}                                                                                \
	} while (0)

/* As trainfix_begin and trainfix_end, the daemon with further arguments; the end also
 * for a daemon that has ended (failfix_await_daemon). */
void failfix_begin(const char *const *args);
void failfix_end(void);
/* What the daemon has made for all that come later (communicators) it keeps: from here on
 * the descriptors are counted again. Waits until all trainers are gone. */
void failfix_again(void);
/* The daemon was told to end: wait for it. Return: the exit code. */
int failfix_await_daemon(unsigned seconds);

/* What a call of a trainer ended with; in shared memory. */
struct told {
	atomic_uint n; /* how often something was told; the rest is of the last time */
	int rc;
	uint64_t at_us;
	char text[512];
};

/* Note the end of a call: its result, and the text in train_err if it failed. */
void told_note(struct told *t, int rc);
/* In the test: it was @code, and @words are in its text. Waits for it up to 20 s. */
void told_check(struct told *t, enum shardd_code code, const char *words);

/* In a trainer: the last error has @words in its text, else it ends the trainer. */
void told_now(const char *words);

/* Steps in which test and trainers go on together; in shared memory. */
typedef atomic_uint stage;
static inline void stage_set(stage *s, unsigned to)
{
	atomic_store(s, to);
}

/* Does rank @rank of @job have an op @op in state @state ("WAIT", "RUN")? */
bool fail_has_op(struct daemonfix *d, const char *job, uint32_t rank, const char *op,
		 const char *state);
/* The record of that op. @ret: text of @key, cut to @bytes. Return: false: no such op. */
bool fail_op_text(struct daemonfix *d, const char *job, uint32_t rank, const char *op,
		  const char *key, char *ret, size_t bytes);

/* Of `status`: a number or text of the job. Numbers that are not
 * there are UINT64_MAX, texts "". */
uint64_t fail_job_number(struct daemonfix *d, const char *job, const char *key);
void fail_job_text(struct daemonfix *d, const char *job, const char *key, char *ret, size_t bytes);
bool fail_job_is(struct daemonfix *d, const char *job, const char *state);
bool fail_has_job(struct daemonfix *d, const char *job);
bool fail_rank_is(struct daemonfix *d, const char *job, uint32_t rank, const char *state);
uint64_t fail_quarantined(struct daemonfix *d);
/* Does the daemon's log hold @words? */
bool fail_logged(struct daemonfix *d, const char *words);
/* In how many lines? */
unsigned fail_times_logged(struct daemonfix *d, const char *words);

/* kill -9 and wait for the end. */
void fail_kill(pid_t pid);

#endif
