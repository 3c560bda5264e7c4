/* Admission: which connections, how long it may take, how many there may be. */
#include <criterion/criterion.h>
#include <errno.h>
#include <grp.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "core/cleanup.h"
#include "core/clock.h"
#include "local_abi.h"
#include "netfix.h"

TestSuite(listener, .init = netfix_begin, .fini = netfix_end, .timeout = 60);

Test(listener, both_protocols_are_handed_out_with_their_bytes_unread)
{
	int grpc, local;
	char data[16];

	netfix_listen();
	grpc = netfix_client("PRI * HTTP/2.0");
	netfix_await_conns(1);
	local = netfix_client("SHD1 and so on");
	netfix_await_conns(2);
	cr_assert_eq(conn_protocol(netfix.conns[0]), CONN_GRPC);
	cr_assert_eq(conn_protocol(netfix.conns[1]), CONN_LOCAL);
	cr_assert_eq(recv(conn_fd(netfix.conns[0]), data, sizeof(data), MSG_DONTWAIT), 14);
	cr_assert_eq(memcmp(data, "PRI * HTTP/2.0", 14), 0);
	cr_assert_eq(recv(conn_fd(netfix.conns[1]), data, sizeof(data), MSG_DONTWAIT), 14);
	cr_assert_eq(memcmp(data, "SHD1 and so on", 14), 0);
	cr_assert_eq(listener_connections(netfix.listener), 2);
	close(grpc);
	netfix_await_closed(1);
	cr_assert_eq(listener_connections(netfix.listener), 1);
	close(local);
	netfix_await_closed(2);
	cr_assert_eq(listener_connections(netfix.listener), 0);
}

Test(listener, peer_is_known_by_its_credentials)
{
	int fd;

	netfix_listen();
	fd = netfix_client("PRI ");
	netfix_await_conns(1);
	cr_assert_eq(proc_pid(conn_proc(netfix.conns[0])), getpid());
	cr_assert_eq(proc_uid(conn_proc(netfix.conns[0])), geteuid());
	cr_assert_eq(proc_gid(conn_proc(netfix.conns[0])), getegid());
	close(fd);
}

Test(listener, hello_may_come_byte_by_byte)
{
	const char *hellos[] = { "PRI ", "SHD1" };

	netfix_listen();
	for (unsigned i = 0; i < 2; i++) {
		int fd = netfix_client(NULL);

		for (unsigned k = 0; k < 4; k++) {
			netfix_turn(4);
			cr_assert_eq(netfix.n_conns, i);
			cr_assert_eq(send(fd, hellos[i] + k, 1, 0), 1);
		}
		netfix_await_conns(i + 1);
		close(fd);
	}
	netfix_await_closed(2);
}

/* Connections beyond the burst are handed out later, in the order in which they said hello. */
Test(listener, many_grpc_connections_of_a_user_come_in_turn)
{
	enum { N = 560, BURST = 512, A_SECOND = 400 };
	static int fds[N];
	uint64_t began = clock_now_us(), allowed;
	char hello[16], got[16];

	netfix_listen();
	for (unsigned i = 0; i < N; i++) {
		snprintf(hello, sizeof(hello), "PRI %04u", i);
		fds[i] = netfix_client(hello);
		netfix_turn(1);
	}
	allowed = BURST + A_SECOND * (clock_now_us() - began) / 1000000u + 1;
	cr_expect_geq(netfix.n_conns, BURST);
	cr_expect_leq(netfix.n_conns, allowed, "%u at once", netfix.n_conns);
	netfix_await_conns(N);
	for (unsigned i = 0; i < N; i++) {
		snprintf(hello, sizeof(hello), "PRI %04u", i);
		cr_assert_eq(recv(conn_fd(netfix.conns[i]), got, sizeof(got), MSG_DONTWAIT), 8);
		cr_expect_eq(memcmp(got, hello, 8), 0, "%.8s, not %s", got, hello);
		close(fds[i]);
	}
	netfix_await_closed(N);
}

Test(listener, garbage_is_closed_at_its_first_wrong_byte)
{
	const char *garbage[] = { "GET / HTTP/1.1\r\n", "X", "PX", "PRX", "PRI*", "SH2", "shd1" };

	netfix_listen();
	for (unsigned i = 0; i < ARRAY_SIZE(garbage); i++) {
		int fd = netfix_client(garbage[i]);

		netfix_await_end(fd);
		close(fd);
	}
	cr_assert_eq(netfix.n_conns, 0);
	cr_assert_eq(listener_connections(netfix.listener), 0);
}

Test(listener, wrong_byte_after_a_good_beginning_is_closed)
{
	int fd;

	netfix_listen();
	fd = netfix_client("SH");
	netfix_turn(5);
	cr_assert_eq(send(fd, "?", 1, 0), 1);
	netfix_await_end(fd);
	close(fd);
}

Test(listener, hang_up_before_the_hello_frees_its_place)
{
	int silent, partial;

	netfix_listen();
	silent = netfix_client(NULL);
	partial = netfix_client("PR");
	netfix_await_open(2);
	netfix_turn(5);
	close(silent);
	netfix_await_open(1);
	close(partial);
	netfix_await_open(0);
	cr_assert_eq(netfix.n_conns, 0);
}

Test(listener, thousands_of_silent_connections_do_not_keep_out_others_and_time_out)
{
	enum { N = 2000 };
	static int fds[N];
	int good;

	netfix.options.hello_timeout_us = 400000;
	netfix_listen();
	for (unsigned i = 0; i < N; i++)
		fds[i] = netfix_client(i % 2 ? NULL : "P");
	good = netfix_client("SHD1");
	netfix_await_conns(1);
	netfix_await_open(1);
	for (unsigned i = 0; i < N; i++) {
		netfix_await_end(fds[i]);
		close(fds[i]);
	}
	cr_assert_eq(netfix.n_closed, 0, "who said hello stays");
	close(good);
}

Test(listener, flood_does_not_starve_the_loop)
{
	int fds[200];

	netfix_listen();
	for (unsigned i = 0; i < 200; i++)
		fds[i] = netfix_client(NULL);
	uv_run(&netfix.run.loop, UV_RUN_NOWAIT);
	cr_assert_gt(listener_connections(netfix.listener), 0);
	cr_assert_leq(listener_connections(netfix.listener), 64, "at most a batch in one turn");
	netfix_await_open(200);
	for (unsigned i = 0; i < 200; i++)
		close(fds[i]);
	netfix_await_open(0);
}

static void on_turn(uv_prepare_t *prepare)
{
	(*(unsigned *)prepare->data)++;
}

/* A byte that stays in the socket keeps it readable: the loop must not turn for it. */
Test(listener, partial_hello_does_not_spin_the_loop)
{
	unsigned turns = 0;
	uv_prepare_t prepare;
	int fd;

	netfix.options.hello_timeout_us = 500000;
	netfix_listen();
	fd = netfix_client("PRI");
	netfix_await_open(1);
	uv_prepare_init(&netfix.run.loop, &prepare);
	prepare.data = &turns;
	uv_prepare_start(&prepare, on_turn);
	netfix_await_open(0);
	cr_assert_lt(turns, 400, "%u turns", turns);
	uv_close((uv_handle_t *)&prepare, NULL);
	netfix_await_end(fd);
	close(fd);
}

/* One that sent a part, and others that wait their turn: the timer serves both every 20 ms. Together
 * they made it run every millisecond. */
Test(listener, a_part_of_a_hello_and_turns_do_not_spin_the_loop)
{
	enum { N = 900 };
	static int fds[N];
	unsigned turns = 0;
	uint64_t began_us;
	uv_prepare_t prepare;
	int part;

	netfix.options.hello_timeout_us = 60000000;
	netfix_listen();
	part = netfix_client("PRI");
	for (unsigned i = 0; i < N; i++) {
		fds[i] = netfix_client("PRI ");
		netfix_turn(1);
	}
	uv_prepare_init(&netfix.run.loop, &prepare);
	prepare.data = &turns;
	uv_prepare_start(&prepare, on_turn);
	began_us = clock_now_us();
	netfix_await_conns(N);
	/* each tick: the timer, the part that is readable again, and what the fixture does */
	cr_expect_lt(turns, 50 + 8 * ((clock_now_us() - began_us) / 20000u), "%u turns", turns);
	uv_close((uv_handle_t *)&prepare, NULL);
	close(part);
	for (unsigned i = 0; i < N; i++)
		close(fds[i]);
	netfix_await_closed(N);
}

Test(listener, connections_beyond_the_limit_are_closed_at_once)
{
	int fds[4];

	netfix.options.max_connections = 3;
	netfix_listen();
	/* those that have not said hello count as well */
	for (unsigned i = 0; i < 3; i++)
		fds[i] = netfix_client(i ? "PRI " : NULL);
	netfix_await_conns(2);
	netfix_await_open(3);
	fds[3] = netfix_client("PRI ");
	netfix_await_end(fds[3]);
	close(fds[3]);
	close(fds[1]);
	netfix_await_open(2);
	fds[3] = netfix_client("PRI ");
	netfix_await_conns(3);
	close(fds[0]);
	close(fds[2]);
	close(fds[3]);
}

Test(listener, one_user_may_not_have_too_many_before_the_hello)
{
	int fds[3];

	netfix.options.max_pending_per_uid = 2;
	netfix_listen();
	fds[0] = netfix_client(NULL);
	fds[1] = netfix_client(NULL);
	netfix_await_open(2);
	fds[2] = netfix_client(NULL);
	netfix_await_end(fds[2]);
	close(fds[2]);
	/* a hello makes room */
	cr_assert_eq(send(fds[0], "PRI ", 4, 0), 4);
	netfix_await_conns(1);
	fds[2] = netfix_client("SHD1");
	netfix_await_conns(2);
	for (unsigned i = 0; i < 3; i++)
		close(fds[i]);
}

/* A child that connects as nobody, with one supplementary group. Exits with 0
 * if it was let in, 1 if it was closed out. */
static pid_t stranger(gid_t extra_group)
{
	pid_t pid = fork();

	if (pid == 0) {
		struct pollfd p;
		char byte;

		if (setgroups(1, &extra_group) || setgid(65534) || setuid(65534))
			_exit(2);
		p = (struct pollfd){ .fd = netfix_connect(netfix.path), .events = POLLIN };
		if (p.fd < 0)
			_exit(3);
		/* may already be closed */
		send(p.fd, "PRI ", 4, MSG_NOSIGNAL);
		/* the test answers with a byte whom it was handed */
		if (poll(&p, 1, 20000) != 1)
			_exit(4);
		_exit(recv(p.fd, &byte, 1, 0) == 1 ? 0 : 1);
	}
	cr_assert_gt(pid, 0);
	return pid;
}

struct child {
	pid_t pid;
	int status;
	unsigned answered;
};

static bool child_ended(void *arg)
{
	struct child *c = arg;

	for (; c->answered < netfix.n_conns; c->answered++)
		cr_assert_eq(send(conn_fd(netfix.conns[c->answered]), "y", 1, 0), 1);
	return waitpid(c->pid, &c->status, WNOHANG) == c->pid;
}

/* Return: was it let in? */
static bool stranger_gets_in(gid_t extra_group)
{
	struct child c = { .pid = stranger(extra_group), .answered = netfix.n_conns };
	unsigned before = netfix.n_conns;

	looprun_until(&netfix.run, child_ended, &c, 20);
	cr_assert(WIFEXITED(c.status) && WEXITSTATUS(c.status) <= 1, "%x", c.status);
	cr_assert_eq(netfix.n_conns > before, WEXITSTATUS(c.status) == 0);
	return WEXITSTATUS(c.status) == 0;
}

static void listen_for_strangers(void)
{
	netfix_need_root(); /* to be somebody else */
	netfix.options.mode = 0666;
	netfix_listen();
}

Test(listener, without_lists_whoever_may_open_the_socket_gets_in)
{
	listen_for_strangers();
	cr_assert(stranger_gets_in(4242));
}

Test(listener, admission_by_uid)
{
	uid_t uids[] = { 12345, 54321 };
	int own;

	netfix.options.allow_uids = uids;
	netfix.options.n_allow_uids = 2;
	listen_for_strangers();
	/* the lists were copied */
	uids[0] = 65534;
	cr_assert_not(stranger_gets_in(4242));
	cr_assert_not(stranger_gets_in(4242), "also when it was logged already");
	cr_assert_eq(listener_connections(netfix.listener), 0);
	/* root and the daemon's own uid always pass */
	own = netfix_client("PRI ");
	netfix_await_conns(1);
	close(own);
	netfix_await_closed(1);
	listener_reconfigure(netfix.listener, &netfix.options);
	cr_assert(stranger_gets_in(4242));
}

Test(listener, admission_by_primary_group)
{
	const gid_t gids[] = { 7, 65534 };

	netfix.options.allow_gids = gids;
	netfix.options.n_allow_gids = 2;
	listen_for_strangers();
	cr_assert(stranger_gets_in(4242));
}

Test(listener, admission_by_supplementary_group)
{
	const gid_t gids[] = { 7, 4242 };

	netfix.options.allow_gids = gids;
	netfix.options.n_allow_gids = 2;
	listen_for_strangers();
	cr_assert(stranger_gets_in(4242));
	cr_assert_not(stranger_gets_in(4243));
}

Test(listener, new_limits_count_from_then_on)
{
	int fds[3];

	netfix_listen();
	fds[0] = netfix_client("PRI ");
	fds[1] = netfix_client("SH");
	netfix_await_open(2);
	netfix.options.max_connections = 1;
	netfix.options.hello_timeout_us = 50000;
	listener_reconfigure(netfix.listener, &netfix.options);
	/* also for those that wait already */
	netfix_await_open(1);
	fds[2] = netfix_client("PRI ");
	netfix_await_end(fds[2]);
	cr_assert_eq(netfix.n_closed, 0, "who is in stays in");
	for (unsigned i = 0; i < 3; i++)
		close(fds[i]);
}

Test(listener, connections_outlive_the_listener_and_unknown_ones_do_not)
{
	int in, unknown;

	netfix_listen();
	in = netfix_client("PRI ");
	netfix_await_conns(1);
	unknown = netfix_client("SHD");
	netfix_await_open(2);
	netfix.listener = listener_close(netfix.listener);
	netfix_await_end(unknown);
	netfix_turn(3);
	cr_assert_eq(netfix.n_closed, 0);
	close(in);
	netfix_await_closed(1);
	close(unknown);
}

static void close_inside(struct conn *c, void *userdata)
{
	netfix_on_conn(c, userdata);
	netfix.listener = listener_close(netfix.listener);
}

Test(listener, may_be_closed_from_its_own_callback)
{
	struct fault f = FAULT_NULL;
	int fds[8];

	cr_assert_eq(listener_new(&netfix.run.loop, &netfix.options, close_inside, &netfix,
				  &netfix.listener, &f),
		     0);
	for (unsigned i = 0; i < 8; i++)
		fds[i] = netfix_client("PRI ");
	netfix_await_conns(1);
	for (unsigned i = 0; i < 8; i++)
		close(fds[i]);
	netfix_await_closed(1);
}
