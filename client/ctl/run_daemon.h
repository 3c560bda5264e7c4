/*
 * The private daemon of `shardctl run --standalone`: a shardd with a socket in a
 * temporary directory that only this user can enter. A second child only removes
 * that directory if shardctl is killed. One thread.
 */
#ifndef SHARDD_CTL_RUN_DAEMON_H
#define SHARDD_CTL_RUN_DAEMON_H

#include "ctl/run_proc.h"

struct run_daemon {
	char dir[96];     /* empty: none was made */
	char socket[108]; /* in it */
	struct run_proc proc;
	pid_t cleaner; /* removes the directory if we are killed; 0: none */
	int alive;     /* closed by our end: how it notices */
};

/* Nothing runs; run_daemon_stop is safe from here on. */
void run_daemon_init(struct run_daemon *d);

/* Start it and wait until its health is SERVING. Failures are printed.
 * @signals: a signalfd; a signal ends the wait.
 * Return: 0, or the exit code to end with. */
int run_daemon_start(struct run_daemon *d, int signals);

/* End it, SIGTERM first, and remove the directory. Safe twice. */
void run_daemon_stop(struct run_daemon *d);

#endif
