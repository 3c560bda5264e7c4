/* An MPS control daemon for the time of one probe, in a folder of its own. */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "stage.h"

#define PROGRAM  "nvidia-cuda-mps-control"
#define LIMIT_MS 20000u

void mps_avoid(void)
{
	setenv("CUDA_MPS_PIPE_DIRECTORY", "/nonexistent/mps", 1);
}

/* Run the control program: with "-d", or with @line on its standard input.
 * Return: its exit status, or -1. */
static int control(char *const argv[], const char *line)
{
	uint64_t end = now_ns() + UINT64_C(1000000) * LIMIT_MS;
	int in[2], status, null;
	pid_t pid;

	/* not a pipe: one that the program closes without reading would raise SIGPIPE */
	if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, in) < 0)
		return -1;
	pid = fork();
	if (pid == 0) {
		null = open("/dev/null", O_RDWR);
		dup2(in[0], STDIN_FILENO);
		dup2(null, STDOUT_FILENO);
		dup2(null, STDERR_FILENO);
		execvp(PROGRAM, argv);
		_exit(127);
	}
	close(in[0]);
	if (line && send(in[1], line, strlen(line), MSG_NOSIGNAL) < 0)
		errno = 0;
	close(in[1]);
	while (pid > 0 && waitpid(pid, &status, WNOHANG) == 0) {
		if (now_ns() > end) {
			kill(pid, SIGKILL);
			waitpid(pid, &status, 0);
			return -1;
		}
		poll(NULL, 0, 10);
	}
	return pid > 0 && WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

int mps_start(struct stage *s, char *why, size_t bytes)
{
	static char *const argv[] = { PROGRAM, "-d", NULL };
	int rc;

	snprintf(s->mps_dir, sizeof(s->mps_dir), "/tmp/shardd-mps-XXXXXX");
	if (!mkdtemp(s->mps_dir)) {
		s->mps_dir[0] = 0;
		snprintf(why, bytes, "no folder for it");
		return -1;
	}
	setenv("CUDA_MPS_PIPE_DIRECTORY", s->mps_dir, 1);
	setenv("CUDA_MPS_LOG_DIRECTORY", s->mps_dir, 1);
	rc = control(argv, NULL);
	if (rc == 0)
		return 0;
	if (rc == 127)
		snprintf(why, bytes, PROGRAM " is not on this machine");
	else
		snprintf(why, bytes, PROGRAM " -d ended with %d", rc);
	mps_stop(s);
	return -1;
}

static void remove_dir(const char *path)
{
	DIR *dir = opendir(path);
	struct dirent *e;

	if (!dir)
		return;
	while ((e = readdir(dir)))
		unlinkat(dirfd(dir), e->d_name, 0);
	closedir(dir);
	rmdir(path);
}

void mps_stop(struct stage *s)
{
	static char *const argv[] = { PROGRAM, NULL };

	if (!s->mps_dir[0])
		return;
	setenv("CUDA_MPS_PIPE_DIRECTORY", s->mps_dir, 1);
	control(argv, "quit -t 5\n");
	remove_dir(s->mps_dir);
	s->mps_dir[0] = 0;
	mps_avoid();
}
