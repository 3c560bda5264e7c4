/*
 * A child of shardctl run: a trainer, or the private daemon.
 *
 * It leads its own process group. So a signal from the terminal reaches it only through
 * shardctl, and its children end with it. It does not outlive shardctl: the kernel
 * signals it when shardctl dies. One thread.
 */
#ifndef SHARDD_CTL_RUN_PROC_H
#define SHARDD_CTL_RUN_PROC_H

#include <poll.h>
#include <stdbool.h>
#include <stddef.h>
#include <sys/types.h>

#include "ctl/run_lines.h"

#define RUN_PROC_FDS 3u

struct run_proc {
	char prefix[24]; /* of its lines */
	pid_t pid;       /* 0: not running */
	int pidfd;       /* -1: not running */
	struct run_lines out;
	struct run_lines err;
};

struct run_command {
	char *const *argv;      /* argv[0] is looked up in PATH if it has no slash */
	const char *const *env; /* "NAME=value" sets, "NAME" removes; NULL-terminated */
	int death_signal;       /* when shardctl dies */
};

/* Not running; run_proc_deinit is safe from here on. */
void run_proc_init(struct run_proc *p, const char *prefix);

/* Kill it if it runs, and wait for that. Safe twice. */
void run_proc_deinit(struct run_proc *p);

/* Return: 0 or negative errno. If the program does not exist, the child exits with
 * 127. */
int run_proc_start(struct run_proc *p, const struct run_command *command);

/* The descriptors to poll: RUN_PROC_FDS entries, -1 for none. */
void run_proc_fds(const struct run_proc *p, struct pollfd *fds);

/* Pass lines on after a poll of those. Return: true if the process has ended: then
 * run_proc_reap. */
bool run_proc_ready(struct run_proc *p, const struct pollfd *fds);

/* Send @sig to its process group. Does nothing if it does not run. */
void run_proc_signal(const struct run_proc *p, int sig);

/* It has ended: end what is left of its group, pass on its last lines.
 * Return: its exit code, 128+n after signal n. */
int run_proc_reap(struct run_proc *p);

#endif
