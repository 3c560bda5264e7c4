#include <criterion/criterion.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include "core/cleanup.h"
#include "fdcheck.h"
#include "looprun.h"
#include "net/local.h"

enum {
	SLAB = 3,
	SLAB_BYTES = 8192,
	RING_BYTES = 12288,
	SESSION = 77,
	TIMEOUT_US = 80000,
	GRPC_NOT_FOUND = 5
};

static struct looprun run;
static struct local *channel;
static int client, daemon_end;
static unsigned n_closed, n_hello, n_get;
static bool closed, close_in_get;

static int op_hello(struct local *l, const uint8_t token[SHD1_TOKEN_BYTES], void *userdata,
		    uint64_t *ret_session, struct fault *f)
{
	cr_assert_eq(userdata, &run);
	cr_assert_eq(l, channel);
	n_hello++;
	for (size_t i = 0; i < SHD1_TOKEN_BYTES; i++)
		if (token[i] != 0x5a)
			return fault_set(f, FAULT_DENIED, NULL, "no session has this token");
	*ret_session = SESSION;
	return 0;
}

static int op_get_slab(struct local *l, uint32_t slab, void *userdata, struct local_slab *ret,
		       struct fault *f)
{
	(void)userdata;
	n_get++;
	if (close_in_get)
		local_close(l);
	if (slab != SLAB)
		return fault_set(f, FAULT_NOT_FOUND, NULL, "there is no slab %u", slab);
	*ret = (struct local_slab){ memfd_create("slab", MFD_CLOEXEC), true, true, true,
				    SLAB_BYTES };
	cr_assert_geq(ret->fd, 0);
	cr_assert_eq(ftruncate(ret->fd, SLAB_BYTES), 0);
	cr_assert_eq(pwrite(ret->fd, "mark", 4, 4096), 4);
	return 0;
}

/* Part 7 there is not. */
static int op_get_ring(struct local *l, uint32_t part, void *userdata, int *ret_fd,
		       uint64_t *ret_bytes, struct fault *f)
{
	(void)l;
	(void)userdata;
	if (part == 7)
		return fault_set(f, FAULT_INVALID, "part", "a ring has no part 7");
	*ret_fd = memfd_create("ring", MFD_CLOEXEC);
	cr_assert_geq(*ret_fd, 0);
	cr_assert_eq(pwrite(*ret_fd, "ring", 4, 0), 4);
	*ret_bytes = RING_BYTES;
	return 0;
}

static void op_closed(struct local *l, void *userdata)
{
	(void)userdata;
	cr_assert_neq(local_conn(l), NULL);
	n_closed++;
	closed = true;
}

static const struct local_ops ops = { op_hello, op_get_slab, op_get_ring, op_closed };

static void open_channel(uint64_t timeout_us)
{
	struct conn *c = NULL;
	struct proc *p = NULL;
	int sv[2], on = 1;

	cr_assert_eq(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, sv), 0);
	/* as a socket unit with PassCredentials= would hand it on: must not matter */
	cr_assert_eq(setsockopt(sv[0], SOL_SOCKET, SO_PASSCRED, &on, sizeof(on)), 0);
	cr_assert_eq(proc_new_pid(&run.loop, getpid(), getuid(), getgid(), &p), 0);
	cr_assert_eq(conn_new(&run.loop, CONN_LOCAL, sv[0], p, &c), 0);
	proc_unref(p);
	daemon_end = sv[0];
	client = sv[1];
	cr_assert_eq(local_new(&run.loop, c, &ops, &run, timeout_us, &channel), 0);
}

static void test_local_begin(void)
{
	/* libuv keeps a pipe for the life of the process, made with the first loop */
	looprun_init(&run);
	looprun_deinit(&run);
	fdcheck_begin();
	looprun_init(&run);
	/* no test but those of the timeout may run into it */
	open_channel(60 * 1000000ull);
}

static void test_local_end(void)
{
	client = fd_close(client);
	looprun_flag(&run, &closed, 10);
	cr_assert_eq(n_closed, 1);
	looprun_deinit(&run);
	fdcheck_end();
}

/* After begin: a channel with little time for a frame instead. */
static void begin_short(void)
{
	client = fd_close(client);
	looprun_flag(&run, &closed, 10);
	closed = false;
	n_closed = 0;
	open_channel(TIMEOUT_US);
}

TestSuite(local, .init = test_local_begin, .fini = test_local_end, .timeout = 30);

static void turn(unsigned n)
{
	for (unsigned i = 0; i < n; i++)
		uv_run(&run.loop, UV_RUN_NOWAIT);
}

static struct shd1_hello hello_frame(uint8_t token)
{
	struct shd1_hello f = { .h = { SHD1_MAGIC, SHD1_HELLO, sizeof(f), 100, 0 }, .version = 1 };

	memset(f.token, token, sizeof(f.token));
	return f;
}

static struct shd1_get_slab get_frame(uint32_t tag, uint32_t slab)
{
	struct shd1_get_slab f = { .h = { SHD1_MAGIC, SHD1_GET_SLAB, sizeof(f), tag, 0 },
				   .slab = slab };

	return f;
}

static void send_bytes(const void *data, size_t n)
{
	cr_assert_eq(send(client, data, n, MSG_NOSIGNAL), (ssize_t)n);
}

/* Wait for @n bytes; turns the loop. *@fd gets a descriptor that came with them.
 * Return: bytes read, fewer at the end of the stream. */
static size_t receive(void *data, size_t n, int *fd)
{
	_Alignas(struct cmsghdr) char control[CMSG_SPACE(sizeof(int) * 4)];
	size_t have = 0;

	while (have < n) {
		struct iovec iov = { (char *)data + have, n - have };
		struct msghdr msg = { .msg_iov = &iov,
				      .msg_iovlen = 1,
				      .msg_control = control,
				      .msg_controllen = sizeof(control) };
		ssize_t r = recvmsg(client, &msg, MSG_CMSG_CLOEXEC | MSG_DONTWAIT);
		struct cmsghdr *c = r > 0 ? CMSG_FIRSTHDR(&msg) : NULL;

		if (r < 0 && errno == EAGAIN) {
			turn(1);
			continue;
		}
		if (r <= 0)
			break;
		have += (size_t)r;
		if (!c)
			continue;
		cr_assert_eq(c->cmsg_len, CMSG_LEN(sizeof(int)));
		cr_assert(fd && *fd < 0, "a descriptor where none was expected");
		memcpy(fd, CMSG_DATA(c), sizeof(int));
	}
	return have;
}

static void expect_end(void)
{
	char byte;

	cr_assert_eq(receive(&byte, 1, NULL), 0, "more came");
	looprun_flag(&run, &closed, 10);
}

static void expect_error(uint32_t tag, uint32_t fatal)
{
	struct shd1_error e;

	cr_assert_eq(receive(&e, sizeof(e), NULL), sizeof(e));
	cr_assert_eq(e.h.magic, SHD1_MAGIC);
	cr_assert_eq(e.h.type, SHD1_ERROR);
	cr_assert_eq(e.h.bytes, sizeof(e));
	cr_assert_eq(e.h.tag, tag);
	cr_assert_eq(e.fatal, fatal);
	cr_assert_neq(e.code, 0);
	cr_assert_neq(e.text[0], '\0');
}

/* A fatal error, then the end. */
static void expect_fatal(uint32_t tag)
{
	expect_error(tag, 1);
	expect_end();
}

/* A SLAB frame with a descriptor, which is checked and closed. */
static void expect_slab(uint32_t tag)
{
	struct shd1_slab s;
	char mark[4];
	int fd = -1;

	cr_assert_eq(receive(&s, sizeof(s), &fd), sizeof(s));
	cr_assert_eq(s.h.type, SHD1_SLAB);
	cr_assert_eq(s.h.tag, tag);
	cr_assert_eq(s.slab, SLAB);
	cr_assert_eq(s.writable, 1);
	cr_assert_eq(s.bytes, SLAB_BYTES);
	cr_assert_geq(fd, 0, "the descriptor came along");
	cr_assert_eq(pread(fd, mark, 4, 4096), 4);
	cr_assert_eq(memcmp(mark, "mark", 4), 0);
	close(fd);
}

static void say_hello(void)
{
	struct shd1_hello f = hello_frame(0x5a);
	struct shd1_welcome w;

	send_bytes(&f, sizeof(f));
	cr_assert_eq(receive(&w, sizeof(w), NULL), sizeof(w));
	cr_assert_eq(w.h.type, SHD1_WELCOME);
	cr_assert_eq(w.h.bytes, sizeof(w));
	cr_assert_eq(w.h.tag, 100);
	cr_assert_eq(w.version, SHD1_VERSION);
	cr_assert_eq(w.session, SESSION);
}

Test(local, hello_is_welcomed)
{
	say_hello();
	cr_assert_eq(n_hello, 1);
	cr_assert_eq(conn_protocol(local_conn(channel)), CONN_LOCAL);
}

static void ask_ring(uint32_t tag, uint32_t part)
{
	struct shd1_get_ring f = { .h = { SHD1_MAGIC, SHD1_GET_RING, sizeof(f), tag, 0 },
				   .part = part };

	send_bytes(&f, sizeof(f));
}

Test(local, the_ring_comes_with_its_descriptor)
{
	struct shd1_ring s;
	char mark[4];
	int fd = -1;

	say_hello();
	ask_ring(9, 1);
	cr_assert_eq(receive(&s, sizeof(s), &fd), sizeof(s));
	cr_assert_eq(s.h.type, SHD1_RING);
	cr_assert_eq(s.h.tag, 9);
	cr_assert_eq(s.part, 1);
	cr_assert_eq(s.bytes, RING_BYTES);
	cr_assert_geq(fd, 0, "the descriptor came along");
	cr_assert_eq(pread(fd, mark, 4, 0), 4);
	cr_assert_eq(memcmp(mark, "ring", 4), 0);
	close(fd);
}

Test(local, a_part_of_the_ring_that_is_not_there)
{
	say_hello();
	ask_ring(10, 7);
	expect_error(10, 0);
	ask_ring(11, 7);
	expect_error(11, 0);
}

Test(local, a_ring_before_hello_is_fatal)
{
	ask_ring(12, 0);
	expect_fatal(12);
}

Test(local, newer_client_is_told_our_version)
{
	struct shd1_hello f = hello_frame(0x5a);
	struct shd1_welcome w;

	f.version = 4;
	send_bytes(&f, sizeof(f));
	cr_assert_eq(receive(&w, sizeof(w), NULL), sizeof(w));
	cr_assert_eq(w.version, SHD1_VERSION);
}

Test(local, hello_may_come_byte_by_byte)
{
	struct shd1_hello f = hello_frame(0x5a);
	struct shd1_welcome w;

	for (size_t i = 0; i < sizeof(f); i++) {
		send_bytes((char *)&f + i, 1);
		turn(2);
	}
	cr_assert_eq(receive(&w, sizeof(w), NULL), sizeof(w));
	cr_assert_eq(w.h.type, SHD1_WELCOME);
}

Test(local, unknown_token_ends_the_channel)
{
	struct shd1_hello f = hello_frame(0x11);

	send_bytes(&f, sizeof(f));
	expect_fatal(100);
}

Test(local, first_frame_must_be_hello)
{
	struct shd1_get_slab g = get_frame(5, SLAB);

	send_bytes(&g, sizeof(g));
	expect_fatal(5);
	cr_assert_eq(n_get, 0, "nothing is handed to a stranger");
}

Test(local, second_hello_is_fatal)
{
	struct shd1_hello f = hello_frame(0x5a);

	say_hello();
	send_bytes(&f, sizeof(f));
	expect_fatal(100);
	cr_assert_eq(n_hello, 1);
}

Test(local, slab_descriptor_can_be_mapped_and_shares_memory)
{
	struct shd1_get_slab g = get_frame(9, SLAB);
	struct shd1_slab s;
	int fd = -1;
	char *map;

	say_hello();
	send_bytes(&g, sizeof(g));
	cr_assert_eq(receive(&s, sizeof(s), &fd), sizeof(s));
	map = mmap(NULL, s.bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	cr_assert_neq(map, MAP_FAILED);
	cr_assert_eq(memcmp(map + 4096, "mark", 4), 0);
	map[0] = 'x';
	munmap(map, s.bytes);
	close(fd);
}

Test(local, unknown_slab_is_an_answer_and_the_channel_stays)
{
	struct shd1_get_slab bad = get_frame(1, 999), good = get_frame(2, SLAB);

	say_hello();
	send_bytes(&bad, sizeof(bad));
	send_bytes(&good, sizeof(good));
	expect_error(1, 0);
	expect_slab(2);
	cr_assert_eq(n_closed, 0);
}

/* A bad frame, after a good hello and one good request before it in the stream. */
static void break_with(const void *frame, size_t n)
{
	struct shd1_get_slab g = get_frame(1, SLAB);

	say_hello();
	send_bytes(&g, sizeof(g));
	send_bytes(frame, n);
	/* more behind it must not be looked at */
	send_bytes(&g, sizeof(g));
	expect_slab(1);
	expect_fatal(0);
	cr_assert_eq(n_get, 1);
}

Test(local, wrong_magic_is_fatal)
{
	struct shd1_get_slab g = get_frame(2, SLAB);

	g.h.magic ^= 1;
	break_with(&g, sizeof(g));
}

Test(local, wrong_size_is_fatal)
{
	struct shd1_get_slab g = get_frame(2, SLAB);

	g.h.bytes = SHD1_MAX_FRAME + 1;
	break_with(&g, sizeof(g));
}

Test(local, wrong_type_is_fatal)
{
	struct shd1_get_slab g = get_frame(2, SLAB);

	g.h.type = SHD1_SLAB;
	break_with(&g, sizeof(g));
}

Test(local, reserved_word_that_is_not_zero_is_fatal)
{
	struct shd1_get_slab g = get_frame(2, SLAB);

	g.zero = 1;
	break_with(&g, sizeof(g));
}

Test(local, garbage_instead_of_hello_is_fatal)
{
	char noise[2000];

	memset(noise, 0xa5, sizeof(noise));
	send_bytes(noise, sizeof(noise));
	expect_fatal(0);
	cr_assert_eq(n_hello, 0);
}

/* @frame with @n descriptors of ours. */
static void send_with_descriptors(const void *frame, size_t size, int n)
{
	_Alignas(struct cmsghdr) char control[CMSG_SPACE(sizeof(int) * 16)] = { 0 };
	struct iovec iov = { (void *)frame, size };
	struct msghdr msg = { .msg_iov = &iov,
			      .msg_iovlen = 1,
			      .msg_control = control,
			      .msg_controllen = CMSG_SPACE(sizeof(int) * (size_t)n) };
	struct cmsghdr *c = CMSG_FIRSTHDR(&msg);

	c->cmsg_level = SOL_SOCKET;
	c->cmsg_type = SCM_RIGHTS;
	c->cmsg_len = CMSG_LEN(sizeof(int) * (size_t)n);
	for (int i = 0; i < n; i++)
		memcpy(CMSG_DATA(c) + sizeof(int) * (size_t)i, &client, sizeof(int));
	cr_assert_eq(sendmsg(client, &msg, MSG_NOSIGNAL), (ssize_t)size);
}

Test(local, descriptor_from_the_client_is_fatal_and_not_kept)
{
	struct shd1_get_slab g = get_frame(2, SLAB);
	unsigned before;

	say_hello();
	before = fdcheck_count();
	send_with_descriptors(&g, sizeof(g), 1);
	expect_error(0, 1);
	cr_assert_leq(fdcheck_count(), before);
	expect_end();
	cr_assert_eq(n_get, 0);
}

Test(local, many_descriptors_with_the_hello_are_fatal)
{
	struct shd1_hello f = hello_frame(0x5a);

	send_with_descriptors(&f, sizeof(f), 16);
	expect_fatal(0);
	cr_assert_eq(n_hello, 0);
}

Test(local, silence_before_hello_ends_the_channel, .init = begin_short)
{
	expect_end();
	cr_assert_eq(n_hello, 0);
}

Test(local, half_a_frame_then_silence_ends_the_channel, .init = begin_short)
{
	struct shd1_get_slab g = get_frame(2, SLAB);

	say_hello();
	send_bytes(&g, sizeof(g) - 1);
	expect_end();
	cr_assert_eq(n_get, 0);
}

static unsigned n_drops;

static void on_drop(uv_timer_t *timer)
{
	struct shd1_get_slab g = get_frame(2, SLAB);

	(void)timer;
	if (n_drops < sizeof(g) - 1 && !closed)
		n_drops += send(client, (char *)&g + n_drops, 1, MSG_NOSIGNAL) == 1;
}

/* The time runs from the frame's first byte: bytes that trickle in do not extend it. */
Test(local, frame_that_trickles_in_ends_the_channel, .init = begin_short)
{
	uv_timer_t timer;

	say_hello();
	uv_timer_init(&run.loop, &timer);
	uv_timer_start(&timer, on_drop, 0, TIMEOUT_US / 1000 / 5);
	looprun_flag(&run, &closed, 10);
	cr_assert_lt(n_drops, sizeof(struct shd1_get_slab) - 1);
	uv_close((uv_handle_t *)&timer, NULL);
	turn(2);
}

static void on_time(uv_timer_t *timer)
{
	*(bool *)timer->data = true;
}

Test(local, idle_channel_lives_longer_than_a_frame_may_take, .init = begin_short)
{
	struct shd1_get_slab g = get_frame(2, SLAB);
	bool passed = false;
	uv_timer_t timer;

	say_hello();
	uv_timer_init(&run.loop, &timer);
	timer.data = &passed;
	uv_timer_start(&timer, on_time, 3 * TIMEOUT_US / 1000, 0);
	looprun_flag(&run, &passed, 10);
	uv_close((uv_handle_t *)&timer, NULL);
	turn(2);
	cr_assert_eq(n_closed, 0);
	send_bytes(&g, sizeof(g));
	expect_slab(2);
}

static void shrink_send_buffer(void)
{
	int bytes = 4096;

	cr_assert_eq(setsockopt(daemon_end, SOL_SOCKET, SO_SNDBUF, &bytes, sizeof(bytes)), 0);
}

Test(local, client_that_never_reads_is_closed)
{
	unsigned sent = 0;

	say_hello();
	shrink_send_buffer();
	while (!closed) {
		struct shd1_get_slab g = get_frame(sent, SLAB);

		if (send(client, &g, sizeof(g), MSG_NOSIGNAL) == sizeof(g))
			sent++;
		turn(1);
	}
	cr_assert_gt(sent, 64, "a slow reader is given some room");
	cr_assert_lt(n_get, 1000, "but not without end");
}

Test(local, queued_answers_come_in_order_when_the_client_reads_late)
{
	enum { N = 40 };

	say_hello();
	shrink_send_buffer();
	for (unsigned i = 0; i < N; i++) {
		struct shd1_get_slab g = get_frame(i, i % 3 ? SLAB : 999);

		send_bytes(&g, sizeof(g));
	}
	while (n_get < N)
		turn(1);
	for (unsigned i = 0; i < N; i++) {
		if (i % 3)
			expect_slab(i);
		else
			expect_error(i, 0);
	}
	cr_assert_eq(n_closed, 0);
}

Test(local, answers_before_a_fatal_error_are_still_delivered)
{
	enum { N = 40 };

	say_hello();
	shrink_send_buffer();
	for (unsigned i = 0; i < N; i++) {
		struct shd1_get_slab g = get_frame(i, SLAB);

		send_bytes(&g, sizeof(g));
	}
	send_bytes("junk", 4);
	while (n_get < N)
		turn(1);
	for (unsigned i = 0; i < N; i++)
		expect_slab(i);
	expect_fatal(0);
}

/* Answers wait, the last one is fatal, nobody reads: the timer ends it. */
Test(local, fatal_error_that_is_not_read_does_not_keep_the_channel, .init = begin_short)
{
	say_hello();
	shrink_send_buffer();
	for (unsigned i = 0; i < 40; i++) {
		struct shd1_get_slab g = get_frame(i, SLAB);

		send_bytes(&g, sizeof(g));
	}
	send_bytes("junk", 4);
	looprun_flag(&run, &closed, 10);
}

Test(local, thousand_pipelined_requests_are_answered_in_order)
{
	enum { N = 1000 };
	unsigned sent = 0;

	say_hello();
	for (unsigned i = 0; i < N; i++) {
		while (sent < N && sent < i + 50) {
			struct shd1_get_slab g = get_frame(sent, SLAB);

			send_bytes(&g, sizeof(g));
			sent++;
		}
		expect_slab(i);
	}
	cr_assert_eq(n_get, N);
}

Test(local, client_may_vanish_in_the_middle_of_a_frame)
{
	struct shd1_get_slab g = get_frame(2, SLAB);

	say_hello();
	send_bytes(&g, 10);
	turn(2);
	client = fd_close(client);
	looprun_flag(&run, &closed, 10);
	cr_assert_eq(n_get, 0);
}

Test(local, client_may_vanish_with_answers_waiting)
{
	say_hello();
	shrink_send_buffer();
	for (unsigned i = 0; i < 40; i++) {
		struct shd1_get_slab g = get_frame(i, SLAB);

		send_bytes(&g, sizeof(g));
	}
	while (n_get < 40)
		turn(1);
	client = fd_close(client);
	looprun_flag(&run, &closed, 10);
	/* test_local_end() finds the descriptors of the waiting answers closed */
}

Test(local, close_from_our_side_is_told_once)
{
	say_hello();
	local_close(channel);
	local_close(channel);
	cr_assert_eq(n_closed, 0, "not from inside local_close");
	expect_end();
	turn(3);
	cr_assert_eq(n_closed, 1);
}

Test(local, close_from_inside_a_request_sends_nothing_more)
{
	struct shd1_get_slab g[2] = { get_frame(1, SLAB), get_frame(2, SLAB) };

	say_hello();
	close_in_get = true;
	send_bytes(g, sizeof(g));
	expect_end();
	cr_assert_eq(n_get, 1);
}
