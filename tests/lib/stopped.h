/* Processes that are stopped, and seen to be. */
#ifndef TESTS_STOPPED_H
#define TESTS_STOPPED_H

#include <criterion/criterion.h>
#include <dirent.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <sys/types.h>

#include "await.h"

static inline bool stopped_is_thread(pid_t pid, const char *tid)
{
	char path[64], text[256], *end = NULL;
	FILE *f;

	snprintf(path, sizeof(path), "/proc/%d/task/%.16s/stat", (int)pid, tid);
	f = fopen(path, "re");
	if (!f)
		return true; /* it has ended */
	if (fgets(text, sizeof(text), f))
		end = strrchr(text, ')');
	fclose(f);
	return end && end[1] && end[2] == 'T';
}

/* Are all threads of the process? */
static inline bool stopped_is(pid_t pid)
{
	bool all = true;
	char path[64];
	const struct dirent *d;
	DIR *dir;

	snprintf(path, sizeof(path), "/proc/%d/task", (int)pid);
	dir = opendir(path);
	if (!dir)
		return false;
	while (all && (d = readdir(dir)))
		all = *d->d_name == '.' || stopped_is_thread(pid, d->d_name);
	closedir(dir);
	return all;
}

/* kill(2) does not wait for it: until one thread takes the signal, the others go on. */
static inline void stopped_stop(pid_t pid)
{
	cr_assert_eq(kill(pid, SIGSTOP), 0);
	AWAIT(stopped_is(pid), 20);
}

#endif
