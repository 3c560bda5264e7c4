/*
 * A real daemon for a test, and trainers as real processes.
 *
 * The test process itself never uses the client library (gRPC core must not be
 * initialised before a fork): it asks the daemon with shardctl, trainers are
 * forked children that connect on their own.
 */
#ifndef SHARDD_TESTS_DAEMONFIX_H
#define SHARDD_TESTS_DAEMONFIX_H

#include <jansson.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

struct daemonfix {
	pid_t pid;
	char dir[64]; /* private, removed at the end */
	char socket[128];
	char log[128]; /* what the daemon wrote */
	bool held;     /* by shardd-holder, whose pid it is */
};

/* The backend of all daemons: SHARDD_TEST_BACKEND, else host; and its first device's id. */
const char *daemonfix_backend(void);
const char *daemonfix_device(void);

/* A failure of what is here aborts the test, so that it counts in a .fini too.
 *
 * Start build/bin/shardd (directory: SHARDD_BIN_DIR, the environment wins over the
 * macro) on a private socket, wait until it accepts. @args: further arguments, ended
 * by NULL; may be NULL. Fails the test if it does not come up in 20 s. */
void daemonfix_start(struct daemonfix *d, const char *const *args);

/* The same with shardd-holder, which starts it again when it has died. */
void daemonfix_start_held(struct daemonfix *d, const char *const *args);
/* The pid of the daemon itself. */
pid_t daemonfix_daemon(struct daemonfix *d);
/* Send @signal to the daemon, or with SIGUSR2 to the holder, and wait until another one
 * serves. */
void daemonfix_replace_daemon(struct daemonfix *d, int signal);

/* SIGKILL, and another one on the same socket; what the first has written stays in the log. */
void daemonfix_restart(struct daemonfix *d, const char *const *args);

/* SIGTERM, wait; fails the test unless it exits 0 within 30 s and the log holds no
 * sanitizer report and no broken invariant. Prints the log if it fails. */
void daemonfix_stop(struct daemonfix *d);

/* From here on its end is no failure: the test tells it to end, or kills and reaps it. Until
 * then every wait of the fixtures fails at once when the daemon has ended. */
void daemonfix_may_end(const struct daemonfix *d);

/* Still there and answering? Fails the test if not. */
void daemonfix_check_alive(struct daemonfix *d);

/* `shardctl --json ARGS...` against the daemon; fails the test if it exits non-zero.
 * @args: ended by NULL. Return: a new reference, json_decref. */
json_t *daemonfix_ctl(struct daemonfix *d, const char *const *args);
/* The same without --json, any outcome: exit status; @out: stdout and stderr. */
int daemonfix_ctl_text(struct daemonfix *d, const char *const *args, char *out, size_t bytes);

/* Descriptors the daemon has open, and bytes it has charged (used_bytes of all devices). */
unsigned daemonfix_fds(struct daemonfix *d);
uint64_t daemonfix_bytes(struct daemonfix *d);

/* Wait (polling, no fixed sleep) until both are what they were; fails after 20 s. */
void daemonfix_settles(struct daemonfix *d, unsigned fds, uint64_t bytes);

/* A trainer: a forked child that runs @fn and exits with what it returns. */
struct trainer {
	const char *socket;
	const char *job;
	uint32_t rank;
	uint32_t world;
	void *arg;
};
typedef int (*trainer_fn)(const struct trainer *t);

pid_t trainer_start(struct daemonfix *d, const char *job, uint32_t rank, uint32_t world,
		    trainer_fn fn, void *arg);
/* Exit status (128+n for a signal); fails the test after @seconds, killing it. */
int trainer_wait(pid_t pid, unsigned seconds);
/* @world trainers of @job at once; fails the test unless all return 0 in @seconds. */
void trainers_run(struct daemonfix *d, const char *job, uint32_t world, trainer_fn fn, void *arg,
		  unsigned seconds);

/* Memory shared between the test and its trainers (MAP_SHARED), zeroed; freed with the
 * process. */
void *trainer_shared(size_t bytes);

/* Inside a trainer: report and leave with 1 when @cond does not hold. */
#define TRAINER_CHECK(cond) trainer_check((cond), #cond, __FILE__, __LINE__)
void trainer_check(bool ok, const char *cond, const char *file, int line);

#endif
