#include "ctl/run_proc.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/pidfd.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "core/check.h"
#include "core/cleanup.h"

void run_proc_init(struct run_proc *p, const char *prefix)
{
	snprintf(p->prefix, sizeof(p->prefix), "[%s] ", prefix);
	p->pid = 0;
	p->pidfd = -1;
	run_lines_init(&p->out, -1, STDOUT_FILENO, p->prefix);
	run_lines_init(&p->err, -1, STDERR_FILENO, p->prefix);
}

void run_proc_deinit(struct run_proc *p)
{
	if (!p->pid)
		return;
	run_proc_signal(p, SIGKILL);
	run_proc_reap(p);
}

/* ------------------------------------------------------------- environment */

/* Is @entry ("NAME=value" or "NAME") about the same name as @other? */
static bool run_proc_same_name(const char *entry, const char *other)
{
	size_t n = strcspn(entry, "=");

	return n == strcspn(other, "=") && strncmp(entry, other, n) == 0;
}

static bool run_proc_is_changed(const char *entry, const char *const *changes)
{
	for (; *changes; changes++)
		if (run_proc_same_name(entry, *changes))
			return true;
	return false;
}

/* Ours with @changes. Return: free() it (the texts are borrowed), or NULL. */
static char **run_proc_environment(const char *const *changes)
{
	size_t n = 1;
	char **env;
	char **at;

	for (char **e = environ; *e; e++)
		n++;
	for (const char *const *c = changes; *c; c++)
		n++;
	env = at = calloc(n, sizeof(*env));
	if (!env)
		return NULL;
	for (char **e = environ; *e; e++)
		if (!run_proc_is_changed(*e, changes))
			*at++ = *e;
	for (const char *const *c = changes; *c; c++)
		if (strchr(*c, '='))
			*at++ = (char *)*c;
	return env;
}

/* ------------------------------------------------------------------- start */

struct pipes {
	int null;
	int out[2];
	int err[2];
};

static void run_proc_pipes_deinit(struct pipes *p)
{
	fd_close(p->null);
	for (int i = 0; i < 2; i++) {
		fd_close(p->out[i]);
		fd_close(p->err[i]);
	}
}

static int run_proc_pipes_open(struct pipes *p)
{
	p->null = open("/dev/null", O_RDONLY | O_CLOEXEC);
	if (p->null < 0 || pipe2(p->out, O_CLOEXEC) < 0 || pipe2(p->err, O_CLOEXEC) < 0)
		return -errno;
	if (fcntl(p->out[0], F_SETFL, O_NONBLOCK) < 0 || fcntl(p->err[0], F_SETFL, O_NONBLOCK) < 0)
		return -errno;
	return 0;
}

/* In the child: from here on only what is safe after fork beside other threads. */
static _Noreturn void run_proc_child(const struct run_command *command, char **env,
				     const struct pipes *p, pid_t parent)
{
	const char *why;
	sigset_t none;

	setpgid(0, 0);
	prctl(PR_SET_PDEATHSIG, command->death_signal);
	/* It may have died before it could be told. */
	if (getppid() != parent)
		_exit(128 + command->death_signal);
	signal(SIGPIPE, SIG_DFL);
	sigemptyset(&none);
	sigprocmask(SIG_SETMASK, &none, NULL);
	if (dup2(p->null, 0) >= 0 && dup2(p->out[1], 1) >= 0 && dup2(p->err[1], 2) >= 0)
		execvpe(command->argv[0], command->argv, env);
	why = strerrordesc_np(errno);
	dprintf(2, "shardctl: cannot start %s: %s\n", command->argv[0], why ? why : "?");
	_exit(127);
}

int run_proc_start(struct run_proc *p, const struct run_command *command)
{
	_cleanup_(run_proc_pipes_deinit) struct pipes pipes = { -1, { -1, -1 }, { -1, -1 } };
	_cleanup_(freep) char **env = run_proc_environment(command->env);
	pid_t parent = getpid();
	pid_t pid;
	int r;

	CHECK(!p->pid);
	if (!env)
		return -ENOMEM;
	r = run_proc_pipes_open(&pipes);
	if (r < 0)
		return r;
	fflush(NULL);
	pid = fork();
	if (pid < 0)
		return -errno;
	if (pid == 0)
		run_proc_child(command, env, &pipes, parent);
	setpgid(pid, pid); /* parent and child both do this, since either may run first */
	p->pid = pid;
	p->pidfd = pidfd_open(pid, 0);
	r = -errno;
	run_lines_init(&p->out, STEAL_FD(pipes.out[0]), STDOUT_FILENO, p->prefix);
	run_lines_init(&p->err, STEAL_FD(pipes.err[0]), STDERR_FILENO, p->prefix);
	if (p->pidfd >= 0)
		return 0;
	run_proc_deinit(p);
	return r;
}

/* -------------------------------------------------------------- supervision */

void run_proc_fds(const struct run_proc *p, struct pollfd *fds)
{
	fds[0] = (struct pollfd){ .fd = p->pidfd, .events = POLLIN };
	fds[1] = (struct pollfd){ .fd = p->out.from, .events = POLLIN };
	fds[2] = (struct pollfd){ .fd = p->err.from, .events = POLLIN };
}

bool run_proc_ready(struct run_proc *p, const struct pollfd *fds)
{
	if (fds[1].revents)
		run_lines_pump(&p->out);
	if (fds[2].revents)
		run_lines_pump(&p->err);
	return p->pid && fds[0].revents;
}

void run_proc_signal(const struct run_proc *p, int sig)
{
	if (p->pid)
		kill(-p->pid, sig);
}

int run_proc_reap(struct run_proc *p)
{
	siginfo_t info = { 0 };
	int r;

	CHECK(p->pid);
	do {
		r = waitid(P_PID, (id_t)p->pid, &info, WEXITED | WNOWAIT);
	} while (r < 0 && errno == EINTR);
	/* Its process id is not reused until it is waited for. */
	run_proc_signal(p, SIGKILL);
	waitid(P_PID, (id_t)p->pid, &info, WEXITED);
	run_lines_finish(&p->out);
	run_lines_finish(&p->err);
	p->pidfd = fd_close(p->pidfd);
	p->pid = 0;
	return info.si_code == CLD_EXITED ? info.si_status : 128 + info.si_status;
}
