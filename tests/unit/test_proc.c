#include <criterion/criterion.h>
#include <errno.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "core/check.h"
#include "core/cleanup.h"
#include "core/proc.h"
#include "fdcheck.h"
#include "looprun.h"

#define TEST(name) Test(proc, name, .init = fdcheck_begin, .fini = fdcheck_end, .timeout = 20)

struct observer {
	struct proc_watch watch;
	struct observer *unlinks; /* another's watch to take away */
	bool called;
};

static void on_gone(struct proc_watch *w)
{
	struct observer *o = CONTAINER_OF(w, struct observer, watch);

	o->called = true;
	if (o->unlinks)
		list_unlink(&o->unlinks->watch.link);
}

/* Return: a child that waits for its end. */
static pid_t start_child(void)
{
	pid_t pid = fork();

	cr_assert_geq(pid, 0);
	if (pid == 0)
		for (;;)
			pause();
	return pid;
}

static void end_child(pid_t pid)
{
	cr_assert_eq(kill(pid, SIGKILL), 0);
	cr_assert_eq(waitpid(pid, NULL, 0), pid);
}

TEST(tells_every_watch_once_when_a_child_is_killed)
{
	struct observer a = { .called = false }, b = { .called = false };
	pid_t pid = start_child();
	struct looprun l;
	struct proc *p;

	looprun_init(&l);
	cr_assert_eq(proc_new_pid(&l.loop, pid, 7, 8, &p), 0);
	cr_assert_eq(proc_pid(p), pid);
	cr_assert_eq(proc_uid(p), 7);
	cr_assert_eq(proc_gid(p), 8);
	list_init(&a.watch.link);
	list_init(&b.watch.link);
	proc_watch(p, &a.watch, on_gone);
	proc_watch(p, &b.watch, on_gone);
	uv_run(&l.loop, UV_RUN_NOWAIT);
	cr_assert_not(proc_gone(p));
	cr_assert_not(a.called);
	end_child(pid);
	looprun_flag(&l, &b.called, 5);
	cr_assert(a.called);
	cr_assert(proc_gone(p));
	a.called = b.called = false;
	uv_run(&l.loop, UV_RUN_NOWAIT);
	cr_assert_not(a.called || b.called);
	p = proc_unref(p);
	cr_assert_null(p);
	looprun_deinit(&l);
}

TEST(a_watch_set_after_the_end_is_told_at_the_next_turn)
{
	struct observer a = { .called = false }, late = { .called = false };
	pid_t pid = start_child();
	struct looprun l;
	struct proc *p;

	looprun_init(&l);
	cr_assert_eq(proc_new_pid(&l.loop, pid, 0, 0, &p), 0);
	list_init(&a.watch.link);
	list_init(&late.watch.link);
	proc_watch(p, &a.watch, on_gone);
	end_child(pid);
	looprun_flag(&l, &a.called, 5);
	proc_watch(p, &late.watch, on_gone);
	cr_assert_not(late.called);
	looprun_flag(&l, &late.called, 5);
	proc_unref(p);
	looprun_deinit(&l);
}

TEST(a_callback_may_take_another_watch_away)
{
	struct observer second = { .called = false };
	struct observer first = { .unlinks = &second };
	pid_t pid = start_child();
	struct looprun l;
	struct proc *p;

	looprun_init(&l);
	cr_assert_eq(proc_new_pid(&l.loop, pid, 0, 0, &p), 0);
	list_init(&first.watch.link);
	list_init(&second.watch.link);
	proc_watch(p, &first.watch, on_gone);
	proc_watch(p, &second.watch, on_gone);
	end_child(pid);
	looprun_flag(&l, &first.called, 5);
	uv_run(&l.loop, UV_RUN_NOWAIT);
	cr_assert_not(second.called);
	proc_unref(p);
	looprun_deinit(&l);
}

TEST(a_pid_that_is_gone_is_no_process)
{
	pid_t pid = start_child();
	struct proc *p = NULL;
	struct looprun l;

	end_child(pid);
	looprun_init(&l);
	cr_assert_eq(proc_new_pid(&l.loop, pid, 0, 0, &p), -ESRCH);
	cr_assert_null(p);
	looprun_deinit(&l);
}

TEST(the_peer_of_a_socket_is_known)
{
	struct looprun l;
	struct proc *p, *same;
	int pair[2];

	looprun_init(&l);
	cr_assert_eq(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair), 0);
	cr_assert_eq(proc_new_peer(&l.loop, pair[0], &p), 0);
	cr_assert_eq(proc_pid(p), getpid());
	cr_assert_eq(proc_uid(p), getuid());
	cr_assert_eq(proc_gid(p), getgid());
	same = proc_ref(p);
	cr_assert_eq(same, p);
	proc_unref(p);
	cr_assert_not(proc_gone(same));
	proc_unref(same);
	cr_assert_null(proc_unref(NULL));
	fd_close(pair[0]);
	fd_close(pair[1]);
	looprun_deinit(&l);
}

TEST(a_descriptor_that_is_no_socket_is_refused)
{
	struct proc *p = NULL;
	struct looprun l;
	int pair[2];

	looprun_init(&l);
	cr_assert_eq(pipe(pair), 0);
	cr_assert_eq(proc_new_peer(&l.loop, pair[0], &p), -ENOTSOCK);
	cr_assert_null(p);
	fd_close(pair[0]);
	fd_close(pair[1]);
	looprun_deinit(&l);
}

TEST(the_state_of_a_process_is_that_of_the_kernel)
{
	struct observer o = { .called = false };
	pid_t pid = start_child();
	struct proc *p, *own;
	struct looprun l;
	int status;

	looprun_init(&l);
	cr_assert_eq(proc_new_pid(&l.loop, pid, 0, 0, &p), 0);
	cr_assert_eq(proc_new_pid(&l.loop, getpid(), 0, 0, &own), 0);
	cr_expect_eq(proc_state(own), 'R');
	cr_assert_eq(kill(pid, SIGSTOP), 0);
	cr_assert_eq(waitpid(pid, &status, WUNTRACED), pid);
	cr_expect_eq(proc_state(p), 'T');
	cr_assert_eq(kill(pid, SIGCONT), 0);
	cr_expect_neq(proc_state(p), 'T');
	list_init(&o.watch.link);
	proc_watch(p, &o.watch, on_gone);
	cr_assert_eq(kill(pid, SIGKILL), 0);
	looprun_flag(&l, &o.called, 5);
	cr_expect_eq(proc_state(p), '\0', "the pid may be another process's");
	cr_assert_eq(waitpid(pid, NULL, 0), pid);
	proc_unref(p);
	proc_unref(own);
	looprun_deinit(&l);
}

/* A successor of the daemon knows a process again by its pid and this number. */
TEST(the_start_of_a_process_is_the_same_for_everybody)
{
	struct proc *p, *again, *own;
	struct observer o = { .called = false };
	pid_t pid = start_child();
	struct looprun l;
	uint64_t began;

	looprun_init(&l);
	cr_assert_eq(proc_new_pid(&l.loop, pid, 0, 0, &p), 0);
	cr_assert_eq(proc_new_pid(&l.loop, pid, 0, 0, &again), 0);
	cr_assert_eq(proc_new_pid(&l.loop, getpid(), 0, 0, &own), 0);
	began = proc_began(p);
	cr_expect_neq(began, 0);
	cr_expect_leq(proc_began(own), began);
	list_init(&o.watch.link);
	proc_watch(p, &o.watch, on_gone);
	cr_assert_eq(kill(pid, SIGKILL), 0);
	looprun_flag(&l, &o.called, 5);
	cr_expect_eq(proc_began(p), began, "it is known");
	cr_expect_eq(proc_began(again), 0, "the pid may be another process's");
	cr_assert_eq(waitpid(pid, NULL, 0), pid);
	proc_unref(p);
	proc_unref(again);
	proc_unref(own);
	looprun_deinit(&l);
}
