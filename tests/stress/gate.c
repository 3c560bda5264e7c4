/* The gate between clients and something that answers: threads of clients connect, send
 * calls, read answers, hang up in the middle or exceed a limit, while the loop attaches, ends
 * and reconfigures. What comes back is what was sent; at the end nothing is left. */
#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "core/check.h"
#include "core/cleanup.h"
#include "core/proc.h"
#include "net/gate.h"

enum { CLIENTS = 4, ROUNDS = 150, FRAMES = 60, FRAME = 9 + 4000, CALLS = 100, PATIENCE_MS = 20000 };

static const struct gate_limits limits = {
	.header_bytes = 1000,
	.continuations = 2,
	.frame_bytes = 16384,
	.streams = 1000,
	.unattached_streams = 2,
	.unattached_bytes = 65536,
	.connection_bytes = 1 << 20,
	.total_bytes = 1 << 20,
	.message_timeout_ms = 20000,
	.idle_timeout_ms = 20000,
	.resets_per_s = 1000,
	.pings_per_s = 1000000,
	.settings_per_s = 5,
	.control_per_s = 1000000,
};

/* A connection as the loop has it. */
struct side {
	struct work work;
	int fd; /* the daemon's end of the client's socket */
	struct gate_conn *gc;
};

static uv_loop_t loop;
static struct loopq queue;
static struct gate *gate;
static struct work stop;
static pthread_t clients[CLIENTS];
static atomic_uint n_open, n_echoes, n_done;

/* -------------------------------------------------------------------- core */

/* Core's first frame, for which the gate waits. */
static const uint8_t settings[] = { 0, 0, 0, 4, 0, 0, 0, 0, 0 };

/* Sends back what it gets: to the gate both ways look alike. */
static void *echo_main(void *arg)
{
	int fd = (int)(intptr_t)arg;
	struct pollfd p = { .fd = fd, .events = POLLIN };
	char data[8192];
	ssize_t n;

	CHECK(send(fd, settings, sizeof(settings), MSG_NOSIGNAL) == sizeof(settings));
	while (poll(&p, 1, PATIENCE_MS) > 0 && (n = recv(fd, data, sizeof(data), 0)) > 0) {
		for (ssize_t at = 0, sent; at < n; at += sent) {
			sent = send(fd, data + at, (size_t)(n - at), MSG_NOSIGNAL);
			if (sent < 0 && errno == EAGAIN) {
				struct pollfd out = { .fd = fd, .events = POLLOUT };

				CHECK(poll(&out, 1, PATIENCE_MS) > 0);
				sent = 0;
			} else if (sent < 0) {
				at = n;
				sent = 0;
			}
		}
	}
	close(fd);
	atomic_fetch_sub(&n_echoes, 1);
	return NULL;
}

static void echo_start(int fd)
{
	pthread_attr_t attr;
	pthread_t thread;

	atomic_fetch_add(&n_echoes, 1);
	pthread_attr_init(&attr);
	pthread_attr_setdetachstate(&attr, PTHREAD_CREATE_DETACHED);
	CHECK(pthread_create(&thread, &attr, echo_main, (void *)(intptr_t)fd) == 0);
	pthread_attr_destroy(&attr);
}

/* -------------------------------------------------------------------- loop */

static void on_closed(struct conn *c, void *userdata)
{
	struct side *s = userdata;

	(void)c;
	gate_conn_end(s->gc);
	atomic_fetch_sub(&n_open, 1);
	free(s);
}

static void on_connected(struct work *work)
{
	struct side *s = CONTAINER_OF(work, struct side, work);
	struct proc *proc;
	struct conn *c;
	int fd;

	CHECK(proc_new_pid(&loop, getpid(), getuid(), getgid(), &proc) == 0);
	CHECK(conn_new(&loop, CONN_GRPC, s->fd, proc, &c) == 0);
	proc_unref(proc);
	conn_on_closed(c, on_closed, s);
	CHECK(gate_open(gate, c, 1 << 20, &fd, &s->gc) == 0);
	echo_start(fd);
	gate_attached(s->gc);
	if (conn_id(c) % 16 == 0)
		gate_reconfigure(gate, &limits);
}

static void on_stop(struct work *work)
{
	(void)work;
	gate = gate_close(gate);
	loopq_close(&queue);
}

/* ----------------------------------------------------------------- clients */

static bool send_all(int fd, const uint8_t *data, size_t n)
{
	for (size_t at = 0; at < n;) {
		ssize_t sent = send(fd, data + at, n - at, MSG_NOSIGNAL);

		if (sent < 0)
			return false;
		at += (size_t)sent;
	}
	return true;
}

static bool read_same(int fd, const uint8_t *data, size_t n)
{
	uint8_t got[FRAME];

	for (size_t at = 0; at < n;) {
		size_t want = n - at < sizeof(got) ? n - at : sizeof(got);
		ssize_t r = recv(fd, got, want, 0);

		if (r <= 0)
			return false;
		CHECK(memcmp(got, data + at, (size_t)r) == 0);
		at += (size_t)r;
	}
	return true;
}

static int client_connect(void)
{
	struct side *s = calloc(1, sizeof(*s));
	int pair[2];

	CHECK(s && socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair) == 0);
	s->fd = pair[1];
	atomic_fetch_add(&n_open, 1);
	loopq_post(&queue, &s->work, on_connected);
	return pair[0];
}

/* Calls that are never answered: when the client is gone the gate ends them one by one. */
static void open_calls(int fd)
{
	uint8_t headers[10] = { 0, 0, 1, 1, 4 };

	for (unsigned i = 0; i < CALLS; i++) {
		headers[8] = (uint8_t)(2 * i + 1);
		CHECK(send_all(fd, headers, sizeof(headers)));
		CHECK(read_same(fd, headers, sizeof(headers)));
	}
}

/* Frames of a type that means nothing: what comes back is followed, too. */
static void client_round(unsigned round, unsigned seed)
{
	static const uint8_t preface[] = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
	static const uint8_t wrong[] = { 0, 0, 1, 9, 0, 0, 0, 0, 1, 0 };
	uint8_t frame[FRAME] = { 0, 4000 >> 8, 4000 & 255, 99, 0, 0, 0, 0, 1 };
	unsigned frames = 1 + (round * 7 + seed) % FRAMES;
	int fd = client_connect();

	CHECK(send_all(fd, preface, 24) && read_same(fd, settings, sizeof(settings)) &&
	      read_same(fd, preface, 24));
	if (round % 4 == 0)
		open_calls(fd);
	for (unsigned i = 0; i < frames; i++) {
		memset(frame + 9, (int)(i + round), FRAME - 9);
		CHECK(send_all(fd, frame, FRAME));
		if (round % 3 == 1 && i + 1 == frames)
			break; /* hangs up while it comes back */
		CHECK(read_same(fd, frame, FRAME));
	}
	if (round % 3 == 2) {
		send_all(fd, wrong, sizeof(wrong));
		while (recv(fd, frame, FRAME, 0) > 0)
			;
	}
	close(fd);
}

static void *client_main(void *arg)
{
	for (unsigned i = 0; i < ROUNDS; i++)
		client_round(i, (unsigned)(intptr_t)arg);
	if (atomic_fetch_add(&n_done, 1) + 1 < CLIENTS)
		return NULL;
	while (atomic_load(&n_open) > 0 || atomic_load(&n_echoes) > 0)
		poll(NULL, 0, 1);
	loopq_post(&queue, &stop, on_stop);
	return NULL;
}

int main(void)
{
	CHECK(uv_loop_init(&loop) == 0);
	CHECK(loopq_init(&queue, &loop) == 0);
	CHECK(gate_new(&queue, &limits, &gate) == 0);
	for (unsigned i = 0; i < CLIENTS; i++)
		CHECK(pthread_create(&clients[i], NULL, client_main, (void *)(intptr_t)i) == 0);
	uv_run(&loop, UV_RUN_DEFAULT);
	for (unsigned i = 0; i < CLIENTS; i++)
		pthread_join(clients[i], NULL);
	CHECK(uv_loop_close(&loop) == 0);
	printf("%u connections through the gate\n", CLIENTS * ROUNDS);
	return 0;
}
