#include <criterion/criterion.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "fdcheck.h"
#include "looprun.h"
#include "net/conn.h"

static struct looprun run;
static int peer; /* the client's end */
static unsigned n_closed;
static bool closed;
static struct conn *closed_conn;

static void test_conn_begin(void)
{
	/* libuv keeps a pipe for the life of the process, made with the first loop */
	looprun_init(&run);
	looprun_deinit(&run);
	fdcheck_begin();
	looprun_init(&run);
	peer = -1;
	n_closed = 0;
	closed = false;
}

static void test_conn_end(void)
{
	if (peer >= 0)
		close(peer);
	looprun_deinit(&run);
	fdcheck_end();
}

TestSuite(conn, .init = test_conn_begin, .fini = test_conn_end, .timeout = 20);

static void on_closed(struct conn *c, void *userdata)
{
	cr_assert_eq(userdata, &run);
	closed_conn = c;
	n_closed++;
	closed = true;
	/* still there while it is told, and closing it again is harmless */
	cr_assert_geq(fcntl(conn_fd(c), F_GETFD), 0);
	cr_assert_neq(conn_proc(c), NULL);
	conn_close(c);
}

/* A connection to @pid, told to on_closed. */
static struct conn *connect_to(enum conn_protocol protocol, pid_t pid)
{
	struct conn *c = NULL;
	struct proc *p = NULL;
	int sv[2];

	cr_assert_eq(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, sv), 0);
	cr_assert_eq(proc_new_pid(&run.loop, pid, getuid(), getgid(), &p), 0);
	cr_assert_eq(conn_new(&run.loop, protocol, sv[0], p, &c), 0);
	proc_unref(p);
	peer = sv[1];
	conn_on_closed(c, on_closed, &run);
	return c;
}

static pid_t sleeping_child(void)
{
	pid_t pid = fork();

	if (pid == 0) {
		/* dies with the test */
		pause();
		_exit(0);
	}
	cr_assert_gt(pid, 0);
	return pid;
}

static void turn(unsigned n)
{
	for (unsigned i = 0; i < n; i++)
		uv_run(&run.loop, UV_RUN_NOWAIT);
}

Test(conn, knows_what_it_was_made_of)
{
	struct conn *a = connect_to(CONN_GRPC, getpid());
	int first = peer;
	struct conn *b = connect_to(CONN_LOCAL, getpid());
	int slot;

	cr_assert_eq(conn_protocol(a), CONN_GRPC);
	cr_assert_eq(conn_protocol(b), CONN_LOCAL);
	cr_assert_neq(conn_id(a), conn_id(b));
	cr_assert_eq(proc_pid(conn_proc(a)), getpid());
	cr_assert_eq(conn_user(a), NULL);
	conn_set_user(a, &slot);
	cr_assert_eq(conn_user(a), &slot);
	conn_close(a);
	conn_close(b);
	turn(3);
	cr_assert_eq(n_closed, 2);
	close(first);
}

Test(conn, hang_up_of_the_peer_is_told_once)
{
	struct conn *c = connect_to(CONN_GRPC, getpid());

	turn(5);
	cr_assert_eq(n_closed, 0, "an idle connection lives");
	close(peer);
	peer = -1;
	looprun_flag(&run, &closed, 10);
	turn(5);
	cr_assert_eq(n_closed, 1);
	cr_assert_eq(closed_conn, c);
}

Test(conn, unread_data_does_not_hide_the_hang_up)
{
	connect_to(CONN_GRPC, getpid());
	cr_assert_eq(write(peer, "PRI * HTTP/2.0", 14), 14);
	turn(5);
	cr_assert_eq(n_closed, 0, "data alone is no hang-up");
	close(peer);
	peer = -1;
	looprun_flag(&run, &closed, 10);
}

Test(conn, half_closed_peer_counts_as_gone)
{
	connect_to(CONN_GRPC, getpid());
	shutdown(peer, SHUT_WR);
	looprun_flag(&run, &closed, 10);
	cr_assert_eq(n_closed, 1);
}

Test(conn, end_of_the_process_ends_it_though_the_socket_stays_open)
{
	pid_t pid = sleeping_child();

	connect_to(CONN_LOCAL, pid);
	turn(5);
	cr_assert_eq(n_closed, 0);
	kill(pid, SIGKILL);
	looprun_flag(&run, &closed, 10);
	turn(5);
	cr_assert_eq(n_closed, 1);
	waitpid(pid, NULL, 0);
}

static void on_gone(struct proc_watch *watch)
{
	(void)watch;
	closed = true;
}

Test(conn, process_gone_before_the_connection_was_made)
{
	struct proc_watch watch = { .fn = NULL };
	struct conn *c = NULL;
	struct proc *p = NULL;
	pid_t pid = sleeping_child();
	int sv[2];

	cr_assert_eq(proc_new_pid(&run.loop, pid, 0, 0, &p), 0);
	list_init(&watch.link);
	proc_watch(p, &watch, on_gone);
	kill(pid, SIGKILL);
	looprun_flag(&run, &closed, 10);
	waitpid(pid, NULL, 0);
	closed = false;
	cr_assert_eq(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, sv), 0);
	cr_assert_eq(conn_new(&run.loop, CONN_GRPC, sv[0], p, &c), 0);
	proc_unref(p);
	peer = sv[1];
	conn_on_closed(c, on_closed, &run);
	looprun_flag(&run, &closed, 10);
	cr_assert_eq(n_closed, 1);
}

Test(conn, close_is_told_from_the_loop_and_once)
{
	struct conn *c = connect_to(CONN_GRPC, getpid());

	conn_close(c);
	conn_close(c);
	cr_assert_eq(n_closed, 0, "not from inside conn_close");
	turn(5);
	cr_assert_eq(n_closed, 1);
}

Test(conn, close_reaches_the_peer_past_other_duplicates)
{
	struct conn *c = connect_to(CONN_GRPC, getpid());
	int grpcs = fcntl(conn_fd(c), F_DUPFD_CLOEXEC, 3);
	char byte;

	conn_close(c);
	cr_assert_eq(read(peer, &byte, 1), 0, "the client sees the end at once");
	cr_assert_eq(read(grpcs, &byte, 1), 0, "and so does gRPC's own descriptor");
	turn(5);
	close(grpcs);
}

Test(conn, all_causes_together_are_told_once)
{
	pid_t pid = sleeping_child();
	struct conn *c = connect_to(CONN_LOCAL, pid);

	kill(pid, SIGKILL);
	close(peer);
	peer = -1;
	waitpid(pid, NULL, 0);
	conn_close(c);
	looprun_flag(&run, &closed, 10);
	turn(5);
	cr_assert_eq(n_closed, 1);
}

Test(conn, needs_no_callback)
{
	struct conn *c = connect_to(CONN_LOCAL, getpid());

	conn_on_closed(c, NULL, NULL);
	conn_close(c);
	turn(5);
	cr_assert_eq(n_closed, 0);
	/* test_conn_end() finds no handle and no descriptor left */
}
