/*
 * The client's end of the local channel against a peer that speaks SHD1 from a
 * thread: it hands out memfds, and goes wrong on demand.
 */
#include <criterion/criterion.h>
#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "client_error.h"
#include "core/clock.h"
#include "fdcheck.h"
#include "map.h"

TestSuite(client_map, .timeout = 30, .init = fdcheck_begin, .fini = fdcheck_end);

#define PAGE    4096u
#define SESSION 77u

enum {
	SLAB_READ_ONLY = 3, /* 3 pages, read-only */
	SLAB_WRITABLE = 4,  /* 4 pages */
	SLAB_GATED = 5,     /* comes when the gate is opened */
	SLAB_REFUSED = 6,   /* NOT_FOUND */
	SLAB_FATAL = 7,     /* the channel ends */
	SLAB_SHORT = 8,     /* its memory is shorter than what the frame says */
	SLAB_NO_FD = 9,
	SLAB_OTHER_TAG = 10,
	SLAB_SLOWLY = 11, /* the frame comes in two parts, the second at the gate */
};

static const uint8_t token[SHD1_TOKEN_BYTES] = "0123456789abcde";

struct peer {
	char dir[32];
	char path[64];
	int listener;
	int gate; /* eventfd */
	atomic_uint asked;
	pthread_t thread;
};

static void fill(struct shd1_header *h, uint16_t type, size_t bytes, uint32_t tag)
{
	*h = (struct shd1_header){ SHD1_MAGIC, type, (uint16_t)bytes, tag, 0 };
}

/* @fd: borrowed; -1: none. */
static void send_with_fd(int sock, const void *frame, size_t bytes, int fd)
{
	union {
		char bytes[CMSG_SPACE(sizeof(int))];
		struct cmsghdr align;
	} control = { 0 };
	struct iovec iov = { (void *)frame, bytes };
	struct msghdr msg = { .msg_iov = &iov, .msg_iovlen = 1 };

	if (fd >= 0) {
		msg.msg_control = control.bytes;
		msg.msg_controllen = sizeof(control.bytes);
		*CMSG_FIRSTHDR(&msg) = (struct cmsghdr){ .cmsg_len = CMSG_LEN(sizeof(int)),
							 .cmsg_level = SOL_SOCKET,
							 .cmsg_type = SCM_RIGHTS };
		memcpy(CMSG_DATA(CMSG_FIRSTHDR(&msg)), &fd, sizeof(fd));
	}
	if (sendmsg(sock, &msg, MSG_NOSIGNAL) != (ssize_t)bytes)
		abort();
}

static void send_error(int sock, uint32_t tag, uint32_t code, uint32_t fatal)
{
	struct shd1_error e = { .code = code, .fatal = fatal };

	fill(&e.h, SHD1_ERROR, sizeof(e), tag);
	snprintf(e.text, sizeof(e.text), "no such slab");
	send_with_fd(sock, &e, sizeof(e), -1);
}

static void wait_gate(struct peer *p)
{
	uint64_t n;

	if (read(p->gate, &n, sizeof(n)) != sizeof(n))
		abort();
}

static void answer(struct peer *p, int sock, const struct shd1_get_slab *q)
{
	uint64_t bytes = (uint64_t)q->slab * PAGE;
	struct shd1_slab s = { .slab = q->slab, .bytes = bytes };
	int fd = memfd_create("slab", MFD_CLOEXEC);
	char first = (char)('a' + q->slab);
	size_t part = q->slab == SLAB_SLOWLY ? 20 : sizeof(s);

	atomic_fetch_add(&p->asked, 1);
	if (fd < 0 || ftruncate(fd, (off_t)(q->slab == SLAB_SHORT ? PAGE : bytes)) < 0 ||
	    pwrite(fd, &first, 1, 0) != 1)
		abort();
	s.writable = q->slab == SLAB_WRITABLE;
	fill(&s.h, SHD1_SLAB, sizeof(s), q->h.tag + (q->slab == SLAB_OTHER_TAG));
	if (q->slab == SLAB_GATED)
		wait_gate(p);
	if (q->slab == SLAB_REFUSED || q->slab == SLAB_FATAL)
		send_error(sock, q->h.tag, SHARDD_NOT_FOUND, q->slab == SLAB_FATAL);
	else
		send_with_fd(sock, &s, part, q->slab == SLAB_NO_FD ? -1 : fd);
	if (q->slab == SLAB_SLOWLY) {
		wait_gate(p);
		send_with_fd(sock, (char *)&s + part, sizeof(s) - part, -1);
	}
	close(fd);
}

static void *serve(void *arg)
{
	struct peer *p = arg;
	struct shd1_hello hello;
	struct shd1_welcome welcome = { .version = SHD1_VERSION, .session = SESSION };
	struct shd1_get_slab q;
	int sock = accept(p->listener, NULL, NULL);

	if (sock < 0 || recv(sock, &hello, sizeof(hello), MSG_WAITALL) != sizeof(hello))
		abort();
	if (memcmp(hello.token, token, sizeof(token)) != 0) {
		send_error(sock, hello.h.tag, SHARDD_PERMISSION_DENIED, 1);
	} else {
		fill(&welcome.h, SHD1_WELCOME, sizeof(welcome), hello.h.tag);
		send_with_fd(sock, &welcome, sizeof(welcome), -1);
		while (recv(sock, &q, sizeof(q), MSG_WAITALL) == sizeof(q))
			answer(p, sock, &q);
	}
	close(sock);
	return NULL;
}

static void peer_start(struct peer *p)
{
	struct sockaddr_un sa = { .sun_family = AF_UNIX };

	*p = (struct peer){ .dir = "/tmp/shardd-map-XXXXXX" };
	cr_assert_not_null(mkdtemp(p->dir));
	snprintf(p->path, sizeof(p->path), "%s/s", p->dir);
	strcpy(sa.sun_path, p->path);
	p->gate = eventfd(0, EFD_CLOEXEC);
	p->listener = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
	cr_assert_eq(bind(p->listener, (struct sockaddr *)&sa, sizeof(sa)), 0);
	cr_assert_eq(listen(p->listener, 4), 0);
	cr_assert_eq(pthread_create(&p->thread, NULL, serve, p), 0);
}

static void open_gate(struct peer *p)
{
	uint64_t one = 1;

	cr_assert_eq(write(p->gate, &one, sizeof(one)), sizeof(one));
}

/* The client has closed its end. */
static void peer_stop(struct peer *p)
{
	pthread_join(p->thread, NULL);
	close(p->listener);
	close(p->gate);
	unlink(p->path);
	rmdir(p->dir);
}

static void test_client_map_begin(struct peer *p, struct map *m)
{
	struct shardd_error err;

	peer_start(p);
	map_init(m);
	cr_assert_eq(map_open(m, p->path, token, SESSION, &err), 0, "%s", err.text);
}

static void finish(struct peer *p, struct map *m)
{
	map_deinit(m);
	map_deinit(m);
	peer_stop(p);
}

static int address(struct map *m, uint32_t slab, uint64_t offset, uint64_t bytes, bool writable,
		   int timeout_ms, void **ret, struct shardd_error *err)
{
	struct map_place place = {
		.slab = slab, .offset = offset, .bytes = bytes, .writable = writable
	};

	*err = (struct shardd_error){ 0 };
	return map_address(m, &place, timeout_ms, ret, err);
}

Test(client_map, a_slab_is_fetched_once)
{
	struct shardd_error err;
	struct peer p;
	struct map m;
	void *a = NULL, *b = NULL, *w = NULL;

	test_client_map_begin(&p, &m);
	cr_expect_eq(address(&m, SLAB_READ_ONLY, 0, PAGE, false, -1, &a, &err), 0);
	cr_expect_eq(address(&m, SLAB_WRITABLE, 0, 4 * PAGE, true, -1, &w, &err), 0);
	cr_expect_eq(address(&m, SLAB_READ_ONLY, PAGE, 2 * PAGE, false, 0, &b, &err), 0);
	cr_expect_eq((char *)b - (char *)a, PAGE);
	cr_expect_eq(*(char *)a, 'a' + SLAB_READ_ONLY);
	cr_expect_eq(*(char *)w, 'a' + SLAB_WRITABLE);
	memset(w, 1, 4 * PAGE);
	cr_expect_eq(atomic_load(&p.asked), 2);
	finish(&p, &m);
}

Test(client_map, a_place_outside_its_slab_is_refused)
{
	struct shardd_error err;
	struct peer p;
	struct map m;
	void *a = NULL;

	test_client_map_begin(&p, &m);
	cr_expect_eq(address(&m, 3, 0, 3 * PAGE + 1, false, -1, &a, &err), -SHARDD_INTERNAL);
	cr_expect_eq(address(&m, 3, UINT64_MAX, 2, false, -1, &a, &err), -SHARDD_INTERNAL);
	cr_expect_eq(address(&m, 3, 2, UINT64_MAX, false, -1, &a, &err), -SHARDD_INTERNAL);
	cr_expect_eq(address(&m, 3, 0, 8, true, -1, &a, &err), -SHARDD_INTERNAL,
		     "to be written, in a read-only slab");
	cr_expect_null(a);
	cr_expect_eq(address(&m, 3, 3 * PAGE, 0, false, -1, &a, &err), 0);
	finish(&p, &m);
}

Test(client_map, not_yet_is_an_answer)
{
	static const uint32_t slabs[] = { SLAB_GATED, SLAB_SLOWLY };
	uint64_t deadline;
	struct shardd_error err;
	struct peer p;
	struct map m;
	void *a;
	int r;

	test_client_map_begin(&p, &m);
	for (size_t i = 0; i < 2; i++) {
		a = NULL;
		for (int k = 0; k < 3; k++) {
			r = address(&m, slabs[i], 0, 1, false, k, &a, &err);
			cr_expect_eq(r, -SHARDD_DEADLINE_EXCEEDED);
			cr_expect_eq(err.native, EAGAIN);
		}
		open_gate(&p);
		deadline = clock_now_us() + 10000000;
		do {
			r = address(&m, slabs[i], 0, 1, false, 0, &a, &err);
		} while (r != 0 && clock_now_us() < deadline);
		cr_assert_eq(r, 0, "%s", err.text);
		cr_expect_eq(*(char *)a, (char)('a' + slabs[i]));
	}
	cr_expect_eq(atomic_load(&p.asked), 2, "each was asked for once");
	finish(&p, &m);
}

Test(client_map, another_slab_goes_on_with_the_exchange_under_way)
{
	struct shardd_error err;
	struct peer p;
	struct map m;
	void *a = NULL, *b = NULL;

	test_client_map_begin(&p, &m);
	cr_expect_eq(address(&m, SLAB_GATED, 0, 1, false, 0, &a, &err), -SHARDD_DEADLINE_EXCEEDED);
	open_gate(&p);
	cr_expect_eq(address(&m, SLAB_WRITABLE, 0, 1, true, -1, &b, &err), 0);
	cr_expect_eq(address(&m, SLAB_GATED, 0, 1, false, 0, &a, &err), 0);
	cr_expect_eq(*(char *)a, 'a' + SLAB_GATED);
	finish(&p, &m);
}

Test(client_map, a_refusal_leaves_the_channel)
{
	struct shardd_error err;
	struct peer p;
	struct map m;
	void *a = NULL;

	test_client_map_begin(&p, &m);
	cr_expect_eq(address(&m, SLAB_REFUSED, 0, 1, false, -1, &a, &err), -SHARDD_NOT_FOUND);
	cr_expect_not_null(strstr(err.text, "no such slab"));
	cr_expect_eq(address(&m, SLAB_SHORT, 0, 1, false, -1, &a, &err), -SHARDD_INTERNAL);
	cr_expect_eq(address(&m, SLAB_NO_FD, 0, 1, false, -1, &a, &err), -SHARDD_INTERNAL);
	cr_expect_eq(address(&m, SLAB_WRITABLE, 0, 1, true, -1, &a, &err), 0);
	finish(&p, &m);
}

Test(client_map, a_broken_channel_keeps_what_is_mapped)
{
	static const uint32_t slabs[] = { SLAB_FATAL, SLAB_OTHER_TAG };
	static const int codes[] = { -SHARDD_NOT_FOUND, -SHARDD_UNAVAILABLE };
	struct shardd_error err;
	struct peer p;
	struct map m;
	void *a;

	for (size_t i = 0; i < 2; i++) {
		test_client_map_begin(&p, &m);
		cr_expect_eq(address(&m, SLAB_READ_ONLY, 0, 1, false, -1, &a, &err), 0);
		cr_expect_eq(address(&m, slabs[i], 0, 1, false, -1, &a, &err), codes[i]);
		cr_expect_eq(address(&m, SLAB_WRITABLE, 0, 1, true, -1, &a, &err),
			     -SHARDD_UNAVAILABLE);
		cr_expect_eq(address(&m, SLAB_READ_ONLY, 0, 1, false, -1, &a, &err), 0);
		cr_expect_eq(*(char *)a, 'a' + SLAB_READ_ONLY);
		finish(&p, &m);
	}
}

Test(client_map, a_wrong_token_and_a_wrong_session_are_told)
{
	static const uint8_t other[SHD1_TOKEN_BYTES] = { 0 };
	struct shardd_error err;
	struct peer p;
	struct map m;

	peer_start(&p);
	map_init(&m);
	/* a successor of the daemon that gave the token: connecting is tried again */
	cr_expect_eq(map_open(&m, p.path, other, SESSION, &err), -SHARDD_UNAVAILABLE);
	cr_expect_eq(err.native, ECONNRESET);
	cr_expect(error_is_lost(-SHARDD_UNAVAILABLE, &err));
	finish(&p, &m);
	peer_start(&p);
	map_init(&m);
	cr_expect_eq(map_open(&m, p.path, token, SESSION + 1, &err), -SHARDD_UNAVAILABLE);
	finish(&p, &m);
	map_init(&m);
	cr_expect_eq(map_open(&m, p.path, token, SESSION, &err), -SHARDD_UNAVAILABLE);
	cr_expect_eq(err.native, ENOENT);
	map_deinit(&m);
}

/* The client is connected to the next daemon. */
static void come_back(struct peer *p, struct map *m)
{
	struct channel channel;
	struct shardd_error err;

	channel_init(&channel);
	cr_assert_eq(channel_open(&channel, p->path, token, SESSION, &err), 0, "%s", err.text);
	map_reconnected(m, &channel);
}

/* Memory of the next daemon came in the place of what another reader of the client still read. */
Test(client_map, nothing_takes_the_place_of_what_is_pinned)
{
	struct shardd_error err;
	void *at[4] = { NULL };
	struct peer p[4];
	struct map m;

	test_client_map_begin(&p[0], &m);
	for (unsigned i = 0; i < 4; i++) {
		if (i) {
			peer_start(&p[i]);
			come_back(&p[i], &m);
		}
		cr_assert_eq(address(&m, SLAB_READ_ONLY, 0, PAGE, false, -1, &at[i], &err), 0);
		if (i == 0)
			cr_assert(map_pin(&m, at[0]) && map_pin(&m, at[0]));
		if (i == 1)
			map_unpin(&m, at[0]); /* once more, and it is not pinned any more */
		if (i == 2)
			map_unpin(&m, at[0]);
		map_forget(&m, i == 0 ? SLAB_READ_ONLY : SLAB_WRITABLE); /* it stays */
	}
	cr_expect_neq(at[1], at[0]);
	cr_expect_eq(at[2], at[1], "nobody reads that one");
	cr_expect_eq(at[3], at[0], "nor this one");
	cr_expect_eq(*(char *)at[0], 'a' + SLAB_READ_ONLY);
	cr_expect_not(map_pin(&m, (char *)at[0] + PAGE));
	map_deinit(&m);
	for (unsigned i = 0; i < 4; i++)
		peer_stop(&p[i]);
}

static uint8_t adjacent[2 * PAGE];

static int adjacent_map(void *device, const struct map_source *s, int timeout_ms, uint8_t **ret,
			struct shardd_error *err)
{
	(void)device;
	(void)timeout_ms;
	(void)err;
	*ret = adjacent + (s->slab - 1) * PAGE;
	return 0;
}

static void adjacent_unmap(void *device, const struct mapping *m)
{
	(void)device;
	(void)m;
}

/* Zero bytes where a read-only slab ends and a writable one begins were refused as read-only. */
Test(client_map, nothing_is_written_between_two_slabs)
{
	static const struct map_ops ops = { .map = adjacent_map, .unmap = adjacent_unmap };
	static const uint8_t handle[MAP_IPC_BYTES];
	struct shardd_error err = { 0 };
	struct map m;
	void *at = NULL;

	map_init(&m);
	map_use(&m, &ops, NULL);
	for (uint32_t slab = 1; slab <= 2; slab++) {
		struct map_place place = { .slab = slab,
					   .bytes = PAGE,
					   .writable = slab == 2,
					   .ipc = handle,
					   .slab_bytes = PAGE };

		cr_assert_eq(map_address(&m, &place, -1, &at, &err), 0, "%s", err.text);
	}
	cr_expect_eq(map_write(&m, at, "", 0, &err), 0, "%s", err.text);
	cr_expect_eq(map_write(&m, adjacent, "x", 1, &err), -SHARDD_INVALID_ARGUMENT);
	map_deinit(&m);
}
