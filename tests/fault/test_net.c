/* The net folder when descriptors run out. */
#include <criterion/criterion.h>
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include "core/cleanup.h"
#include "net/local.h"
#include "netfix.h"

TestSuite(net, .init = netfix_begin, .fini = netfix_end, .timeout = 60);

enum { CLIENTS = 50 };

static int clients[CLIENTS];
static struct rlimit full;

/* They wait in the backlog: the loop has not turned yet. */
static void connect_all(const char *hello)
{
	for (unsigned i = 0; i < CLIENTS; i++)
		clients[i] = netfix_client(hello);
}

static void close_all(void)
{
	for (unsigned i = 0; i < CLIENTS; i++)
		clients[i] = fd_close(clients[i]);
}

/* Let at most @n more descriptors be opened. */
static void leave_descriptors(int n)
{
	int next = fcntl(0, F_DUPFD_CLOEXEC, 0);
	struct rlimit limit;

	close(next);
	cr_assert_eq(getrlimit(RLIMIT_NOFILE, &full), 0);
	limit = (struct rlimit){ (rlim_t)(next + n), full.rlim_max };
	cr_assert_eq(setrlimit(RLIMIT_NOFILE, &limit), 0);
}

static void restore_descriptors(void)
{
	cr_assert_eq(setrlimit(RLIMIT_NOFILE, &full), 0);
}

static void on_turn(uv_prepare_t *prepare)
{
	(*(unsigned *)prepare->data)++;
}

static bool all_answered(void *arg)
{
	unsigned *n_refused = arg;
	char byte;

	for (unsigned i = 0; i < CLIENTS; i++) {
		if (clients[i] < 0)
			continue;
		if (recv(clients[i], &byte, 1, MSG_DONTWAIT) < 0 && errno == EAGAIN)
			continue;
		clients[i] = fd_close(clients[i]);
		++*n_refused;
	}
	return *n_refused + netfix.n_conns - netfix.n_closed == CLIENTS;
}

Test(net, every_client_is_served_or_refused_when_descriptors_run_out)
{
	unsigned refused = 0, turns = 0;
	uv_prepare_t prepare;
	int late;

	netfix_listen();
	connect_all("PRI ");
	/* a connection takes three: the socket, its duplicate, a pidfd */
	leave_descriptors(10);
	uv_prepare_init(&netfix.run.loop, &prepare);
	prepare.data = &turns;
	uv_prepare_start(&prepare, on_turn);
	looprun_until(&netfix.run, all_answered, &refused, 20);
	cr_assert_gt(netfix.n_conns, 0);
	cr_assert_gt(refused, 30);
	cr_assert_lt(turns, 500, "%u turns", turns);
	uv_close((uv_handle_t *)&prepare, NULL);
	close_all();
	netfix_await_open(0);
	/* still under the lowered limit, with room again */
	late = netfix_client("SHD1");
	netfix_await_conns(netfix.n_conns + 1);
	close(late);
	restore_descriptors();
}

static bool turned(void *arg)
{
	return *(bool *)arg;
}

static void on_time(uv_timer_t *timer)
{
	*(bool *)timer->data = true;
}

/* Not even the reserve can be opened again: accepting pauses, and resumes. */
Test(net, accepting_pauses_without_its_reserve_and_recovers)
{
	unsigned turns = 0;
	bool passed = false;
	uv_prepare_t prepare;
	uv_timer_t timer;

	netfix_listen();
	connect_all("PRI ");
	cr_assert_eq(getrlimit(RLIMIT_NOFILE, &full), 0);
	cr_assert_eq(setrlimit(RLIMIT_NOFILE, &(struct rlimit){ 3, full.rlim_max }), 0);
	uv_prepare_init(&netfix.run.loop, &prepare);
	prepare.data = &turns;
	uv_prepare_start(&prepare, on_turn);
	uv_timer_init(&netfix.run.loop, &timer);
	timer.data = &passed;
	uv_timer_start(&timer, on_time, 350, 0);
	looprun_until(&netfix.run, turned, &passed, 20);
	cr_assert_lt(turns, 200, "%u turns", turns);
	cr_assert_eq(netfix.n_conns, 0);
	uv_close((uv_handle_t *)&timer, NULL);
	uv_close((uv_handle_t *)&prepare, NULL);
	restore_descriptors();
	/* nobody was lost meanwhile: the backlog kept them */
	netfix_await_conns(CLIENTS);
	close_all();
	netfix_await_closed(CLIENTS);
}

Test(net, connection_that_cannot_be_watched_is_refused_and_its_socket_closed)
{
	struct conn *c = NULL;
	struct proc *p = NULL;
	int sv[2], r;

	cr_assert_eq(proc_new_pid(&netfix.run.loop, getpid(), 0, 0, &p), 0);
	cr_assert_eq(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, sv), 0);
	leave_descriptors(0);
	r = conn_new(&netfix.run.loop, CONN_GRPC, sv[0], p, &c);
	cr_assert_eq(r, -EMFILE);
	cr_assert_eq(c, NULL);
	cr_assert_lt(fcntl(sv[0], F_GETFD), 0);
	restore_descriptors();
	close(sv[1]);
	proc_unref(p);
}

static bool channel_closed;

static int op_hello(struct local *l, const uint8_t token[SHD1_TOKEN_BYTES], void *userdata,
		    uint64_t *ret_session, struct fault *f)
{
	(void)l;
	(void)token;
	(void)userdata;
	(void)f;
	*ret_session = 1;
	return 0;
}

static int op_get_slab(struct local *l, uint32_t slab, void *userdata, struct local_slab *ret,
		       struct fault *f)
{
	(void)l;
	(void)slab;
	(void)userdata;
	*ret = (struct local_slab){ .fd = memfd_create("slab", MFD_CLOEXEC) };
	return ret->fd < 0 ? fault_errno(f, -errno, "memfd_create") : 0;
}

static int op_get_ring(struct local *l, uint32_t part, void *userdata, int *ret_fd,
		       uint64_t *ret_bytes, struct fault *f)
{
	(void)l;
	(void)part;
	(void)userdata;
	(void)ret_fd;
	(void)ret_bytes;
	return fault_set(f, FAULT_UNAVAILABLE, NULL, "there are no rings");
}

static void op_closed(struct local *l, void *userdata)
{
	(void)l;
	(void)userdata;
	channel_closed = true;
}

static const struct local_ops ops = { op_hello, op_get_slab, op_get_ring, op_closed };

/* The kernel limits the descriptors under way for each user, except for root. */
static void become_nobody_with_few(rlim_t n)
{
	struct rlimit limit = { n, n };

	cr_assert_eq(setrlimit(RLIMIT_NOFILE, &limit), 0);
	if (getuid() != 0)
		return;
	cr_assert_eq(setresuid(65534, 65534, 65534), 0);
	/* or /proc/self/fd, which the descriptor check reads, is closed to us */
	cr_assert_eq(prctl(PR_SET_DUMPABLE, 1), 0);
}

static int make_channel(void)
{
	struct local *l = NULL;
	struct conn *c = NULL;
	struct proc *p = NULL;
	int sv[2];

	cr_assert_eq(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, sv), 0);
	cr_assert_eq(proc_new_pid(&netfix.run.loop, getpid(), 0, 0, &p), 0);
	cr_assert_eq(conn_new(&netfix.run.loop, CONN_LOCAL, sv[0], p, &c), 0);
	proc_unref(p);
	cr_assert_eq(local_new(&netfix.run.loop, c, &ops, NULL, 10000000, &l), 0);
	return sv[1];
}

Test(net, channel_survives_too_many_descriptors_under_way)
{
	enum { REQUESTS = 60, LIMIT = 40 };
	struct shd1_hello hello = { .h = { SHD1_MAGIC, SHD1_HELLO, sizeof(hello), 0, 0 },
				    .version = 1 };
	unsigned slabs = 0, errors = 0;
	uint8_t answers[SHD1_MAX_FRAME];
	int fd;

	/* whose directory it is; the file system asks nobody else */
	cr_assert(getuid() != 0 || chown(netfix.dir, 65534, 65534) == 0);
	become_nobody_with_few(LIMIT);
	fd = make_channel();
	cr_assert_eq(send(fd, &hello, sizeof(hello), 0), sizeof(hello));
	for (uint32_t i = 1; i <= REQUESTS; i++) {
		struct shd1_get_slab g = { .h = { SHD1_MAGIC, SHD1_GET_SLAB, sizeof(g), i, 0 } };

		cr_assert_eq(send(fd, &g, sizeof(g), 0), sizeof(g));
	}
	netfix_turn(50);
	cr_assert_not(channel_closed);
	/* read without room for descriptors: they are dropped on the way */
	while (recv(fd, answers, sizeof(struct shd1_header), MSG_PEEK) > 0) {
		struct shd1_header h;

		memcpy(&h, answers, sizeof(h));
		cr_assert_eq(recv(fd, answers, h.bytes, 0), h.bytes);
		cr_assert_eq(h.tag, slabs + errors + (h.type != SHD1_WELCOME));
		slabs += h.type == SHD1_SLAB;
		errors += h.type == SHD1_ERROR;
	}
	cr_assert_eq(slabs + errors, REQUESTS, "%u and %u", slabs, errors);
	cr_assert_gt(slabs, LIMIT / 2);
	cr_assert_gt(errors, 0);
	close(fd);
	looprun_flag(&netfix.run, &channel_closed, 10);
}
