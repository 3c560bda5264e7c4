#include "daemonwatch.h"

#include <dirent.h>
#include <fcntl.h>
#include <poll.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "core/check.h"
#include "core/cleanup.h"

enum {
	DAEMONWATCH_MOST = 16,
	DAEMONWATCH_LOG_BYTES = 16384,
};

/* Copies: the struct daemonfix of a test may be gone before the process is. */
static struct {
	pid_t pid; /* 0: free */
	char log[128];
} daemonwatch_all[DAEMONWATCH_MOST];

void daemonwatch_add(pid_t pid, const char *log)
{
	size_t i = 0;

	while (i < DAEMONWATCH_MOST && daemonwatch_all[i].pid)
		i++;
	CHECK(i < DAEMONWATCH_MOST);
	daemonwatch_all[i].pid = pid;
	snprintf(daemonwatch_all[i].log, sizeof(daemonwatch_all[i].log), "%s", log);
}

void daemonwatch_drop(pid_t pid)
{
	for (size_t i = 0; i < DAEMONWATCH_MOST; i++)
		if (daemonwatch_all[i].pid == pid)
			daemonwatch_all[i].pid = 0;
}

void daemonwatch_print_log(const char *log)
{
	_cleanup_(fclosep) FILE *f = fopen(log, "re");
	char line[1024];

	fprintf(stderr, "---- log of the daemon\n");
	if (f && fseek(f, -DAEMONWATCH_LOG_BYTES, SEEK_END) == 0)
		fprintf(stderr, "(only its end)\n");
	while (f && fgets(line, sizeof(line), f))
		fputs(line, stderr);
	fprintf(stderr, "----\n");
}

static void daemonwatch_print_file(int dir, const char *tid, const char *name)
{
	char path[300], text[4096];
	_cleanup_(fd_closep) int fd = -1;
	ssize_t n;

	snprintf(path, sizeof(path), "%s/%s", tid, name);
	fd = openat(dir, path, O_RDONLY | O_CLOEXEC);
	n = fd < 0 ? -1 : read(fd, text, sizeof(text) - 1);
	if (n <= 0)
		return;
	text[n] = 0;
	fprintf(stderr, "%s %s: %s%s", tid, name, text, text[n - 1] == '\n' ? "" : "\n");
}

void daemonwatch_print_threads(pid_t pid, const char *what)
{
	static const char *const files[] = { "comm", "wchan", "syscall" };
	char path[64];
	struct dirent *e;
	DIR *dir;

	snprintf(path, sizeof(path), "/proc/%d/task", (int)pid);
	dir = opendir(path);
	fprintf(stderr, "---- threads of %s, process %d%s\n", what, (int)pid,
		dir ? "" : ": it is gone");
	while (dir && (e = readdir(dir)))
		for (size_t i = 0; e->d_name[0] != '.' && i < ARRAY_SIZE(files); i++)
			daemonwatch_print_file(dirfd(dir), e->d_name, files[i]);
	if (dir)
		closedir(dir);
	fprintf(stderr, "----\n");
}

/* Return: the process is a child of this one and has ended; it stays a zombie. */
static bool daemonwatch_ended(pid_t pid, siginfo_t *ret)
{
	memset(ret, 0, sizeof(*ret));
	return waitid(P_PID, (id_t)pid, ret, WEXITED | WNOHANG | WNOWAIT) == 0 &&
	       ret->si_pid == pid;
}

void daemonwatch_look(void)
{
	siginfo_t end;

	for (size_t i = 0; i < DAEMONWATCH_MOST; i++) {
		if (!daemonwatch_all[i].pid || !daemonwatch_ended(daemonwatch_all[i].pid, &end))
			continue;
		daemonwatch_print_log(daemonwatch_all[i].log);
		fprintf(stderr, "daemon %d: ended while the test ran: %s %d%s%s\n",
			(int)daemonwatch_all[i].pid,
			end.si_code == CLD_EXITED ? "exit code" : "signal", end.si_status,
			end.si_code == CLD_EXITED ? "" : ", ",
			end.si_code == CLD_EXITED ? "" : strsignal(end.si_status));
		abort(); /* an assertion of Criterion would not fail a .fini */
	}
}

void daemonwatch_turn(int ms)
{
	daemonwatch_look();
	poll(NULL, 0, ms);
}
