#include "core/child.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/close_range.h>
#include <sched.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "core/check.h"
#include "core/cleanup.h"

/* Of the child until it executes its program. */
#define CHILD_STACK_BYTES 65536u

struct child_start {
	const struct child_options *o;
	pid_t parent;
	int error; /* why there is no program */
};

/* What is ignored would stay so in the program. The handlers are the child's own. */
static void child_reset_signals(void)
{
	struct sigaction by_default = { .sa_handler = SIG_DFL };
	sigset_t none;

	for (int s = 1; s < NSIG; s++)
		sigaction(s, &by_default, NULL); /* some are not for us to set */
	sigemptyset(&none);
	sigprocmask(SIG_SETMASK, &none, NULL);
}

static int child_set_descriptors(const struct child_options *o)
{
	int null = open("/dev/null", O_RDONLY | O_CLOEXEC);

	if (null < 0 || dup2(null, STDIN_FILENO) < 0 || dup2(o->output, STDOUT_FILENO) < 0 ||
	    dup2(o->output, STDERR_FILENO) < 0)
		return -errno;
	if (o->keep == CHILD_KEPT_FD ? fcntl(o->keep, F_SETFD, 0) < 0
				     : dup2(o->keep, CHILD_KEPT_FD) < 0)
		return -errno;
	/* all of ours are closed by the exec anyway; this is for those of libraries */
	syscall(SYS_close_range, CHILD_KEPT_FD + 1, ~0u, CLOSE_RANGE_CLOEXEC);
	return 0;
}

/* In our memory, on a stack of its own: no lock may be taken, nothing allocated. */
static int child_main(void *arg)
{
	struct child_start *s = arg;

	/* our death before this call would not be seen any more, but by the changed parent */
	if (prctl(PR_SET_PDEATHSIG, SIGKILL) < 0 || getppid() != s->parent)
		_exit(127);
	s->error = child_set_descriptors(s->o);
	if (s->error == 0) {
		child_reset_signals();
		/* rights that the daemon has got for itself; without any it changes nothing */
		prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0);
		execve(s->o->path, s->o->argv, s->o->envp);
		s->error = -errno;
	}
	_exit(127);
}

int child_spawn(const struct child_options *o, pid_t *ret)
{
	_cleanup_(freep) char *stack = aligned_alloc(16, CHILD_STACK_BYTES);
	struct child_start s = { .o = o, .parent = getpid() };
	sigset_t all, old;
	pid_t pid;
	int r;

	CHECK(o->keep > STDERR_FILENO);
	if (!stack)
		return -ENOMEM;
	sigfillset(&all); /* no handler of ours may run in the child */
	pthread_sigmask(SIG_SETMASK, &all, &old);
	pid = clone(child_main, stack + CHILD_STACK_BYTES, CLONE_VM | CLONE_VFORK | SIGCHLD, &s);
	r = pid < 0 ? -errno : s.error;
	pthread_sigmask(SIG_SETMASK, &old, NULL);
	if (pid >= 0 && r < 0)
		waitpid(pid, NULL, 0); /* it has ended */
	if (r == 0)
		*ret = pid;
	return r;
}
