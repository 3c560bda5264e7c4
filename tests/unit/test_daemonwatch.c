/*
 * The fixtures of the tests themselves. Suites that waited for a daemon which had crashed took
 * 30 to 70 s to say so, and then that a trainer "did not end".
 */
#include <criterion/criterion.h>
#include <fcntl.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include "daemonwatch.h"
#include "fdcheck.h"

TestSuite(daemonwatch, .init = fdcheck_begin, .fini = fdcheck_end, .timeout = 20);

/* A process in the place of a daemon: it ends as @end says, SIGKILL or an exit code below 0. */
static pid_t daemon_that_ends(int end)
{
	pid_t pid = fork();

	cr_assert_geq(pid, 0);
	if (pid == 0) {
		if (end > 0)
			raise(end);
		_exit(-end);
	}
	return pid;
}

static void wait_for_its_end(pid_t pid)
{
	siginfo_t info;

	cr_assert_eq(waitid(P_PID, (id_t)pid, &info, WEXITED | WNOWAIT), 0);
}

static void watch_one_that_ends(int end)
{
	pid_t pid = daemon_that_ends(end);

	daemonwatch_add(pid, "/dev/null");
	wait_for_its_end(pid);
	daemonwatch_turn(1);
}

Test(daemonwatch, a_killed_daemon_fails_the_test, .signal = SIGABRT)
{
	watch_one_that_ends(SIGKILL);
}

Test(daemonwatch, one_that_ends_by_itself_does_too, .signal = SIGABRT)
{
	watch_one_that_ends(0);
}

Test(daemonwatch, one_that_may_end_does_not)
{
	pid_t pid = daemon_that_ends(-3);
	int status;

	daemonwatch_add(pid, "/dev/null");
	daemonwatch_drop(pid);
	wait_for_its_end(pid);
	daemonwatch_turn(1);
	cr_assert_eq(waitpid(pid, &status, 0), pid);
	cr_assert_eq(WEXITSTATUS(status), 3);
}

Test(daemonwatch, one_that_runs_does_not)
{
	pid_t pid = fork();

	if (pid == 0)
		for (;;)
			pause();
	daemonwatch_add(pid, "/dev/null");
	daemonwatch_look();
	daemonwatch_drop(pid);
	kill(pid, SIGKILL);
	cr_assert_eq(waitpid(pid, NULL, 0), pid);
}

/* A trainer is forked from the test and has its table; the daemon is no child of it. */
Test(daemonwatch, it_is_no_matter_for_a_forked_child)
{
	pid_t pid = daemon_that_ends(0), child;
	int status;

	daemonwatch_add(pid, "/dev/null");
	wait_for_its_end(pid);
	child = fork();
	if (child == 0) {
		daemonwatch_look();
		_exit(0);
	}
	cr_assert_eq(waitpid(child, &status, 0), child);
	cr_assert_eq(status, 0);
	daemonwatch_drop(pid);
	cr_assert_eq(waitpid(pid, NULL, 0), pid);
}
