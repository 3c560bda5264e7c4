/*
 * The bytes of one connection, in both directions. The gate's thread.
 *
 *   client socket --read, judge--> up ----write--> core's end of the pair
 *   client socket <--write------ down <---read---- core's end of the pair
 *
 * A side that has ended (end of file, error) is not read any more. When core has ended and all that
 * it sent was passed on, the client's socket is shut down: the conn sees that and closes. When the
 * client has ended, the conn has seen it, too; bytes that the client sent before are still passed
 * on until the loop ends the connection.
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>

#include "core/check.h"
#include "core/cleanup.h"
#include "net/gate_impl.h"

/* Time limit for a client that does not receive core's last bytes. */
#define GATE_LAST_WORDS_US 5000000u

/* If a client is gone and had more than GATE_LINGER_CALLS, they end GATE_LINGER_BATCH at a time:
 * core takes about 100 us for each, during which it serves no other call. */
#define GATE_LAST_TURNS   16u
#define GATE_LINGER_CALLS 16u
#define GATE_LINGER_BATCH 4u
#define GATE_LINGER_US    2000000u
#define GATE_CANCEL       8u /* of HTTP/2's error codes */

/* ------------------------------------------------------------- interest */

static void gate_pipe_set(struct gate_side *side, uint32_t events)
{
	struct epoll_event ev = { .events = events, .data.ptr = side };
	int op = side->events == 0 ? EPOLL_CTL_ADD : events == 0 ? EPOLL_CTL_DEL : EPOLL_CTL_MOD;

	if (side->fd < 0 || side->events == events)
		return;
	/* This fails only for lack of memory: then it is tried again at the next change, or at the
	 * tick. */
	if (epoll_ctl(side->gc->gate->epoll_fd, op, side->fd, &ev) == 0)
		side->events = events;
}

static bool gate_pipe_may_write(const struct gate_buffer *b)
{
	return b->at < b->passed;
}

/* A socket without wanted events is not in the set: its hang-up would wake us again and again. */
static void gate_pipe_watch(struct gate_conn *gc)
{
	uint32_t client = 0, core = 0;

	if (gc->open && !gc->closed) {
		if (gc->core_spoke && !gc->client.ended && !gc->core.ended && !gc->up.data)
			client |= EPOLLIN;
		if (gate_pipe_may_write(&gc->down))
			client |= EPOLLOUT;
		if (!gc->core.ended && !gc->down.data)
			core |= EPOLLIN;
		if (!gc->core.ended && gate_pipe_may_write(&gc->up))
			core |= EPOLLOUT;
	}
	gate_pipe_set(&gc->client, client);
	gate_pipe_set(&gc->core, core);
	atomic_store_explicit(&gc->held, gc->flow.charged, memory_order_relaxed);
}

/* --------------------------------------------------------------- buffers */

static void gate_pipe_drop(struct gate_buffer *b)
{
	free(b->data);
	*b = (struct gate_buffer){ .data = NULL };
}

/* Keep @n bytes, of which @passed may be written. Return: false without memory. */
static bool gate_pipe_keep(struct gate_buffer *b, const uint8_t *data, size_t passed, size_t n)
{
	CHECK(!b->data && passed <= n);
	if (n == 0)
		return true;
	b->data = malloc(n);
	if (!b->data)
		return false;
	memcpy(b->data, data, n);
	b->at = 0;
	b->passed = passed;
	b->end = n;
	return true;
}

/* Return: bytes that @fd took, -EAGAIN as 0; or negative errno. */
static ssize_t gate_pipe_send(int fd, const uint8_t *data, size_t n)
{
	ssize_t r;

	if (n == 0)
		return 0;
	do {
		r = send(fd, data, n, MSG_DONTWAIT | MSG_NOSIGNAL);
	} while (r < 0 && errno == EINTR);
	if (r < 0)
		return errno == EAGAIN ? 0 : -errno;
	return r;
}

/* Return: bytes, 0 at the end (also by error), -EAGAIN. */
static ssize_t gate_pipe_recv(int fd, uint8_t *data, size_t n)
{
	ssize_t r;

	do {
		r = recv(fd, data, n, MSG_DONTWAIT);
	} while (r < 0 && errno == EINTR);
	if (r < 0)
		return errno == EAGAIN ? -EAGAIN : 0;
	return r;
}

/* ------------------------------------------------------------------ ends */

/* Tell the client why, at the start of its next frame. If not all of it can be sent at once, only
 * the log has the reason. */
static void gate_pipe_goaway(struct gate_conn *gc)
{
	enum { ENHANCE_YOUR_CALM = 11, FIXED = GATE_HEAD_BYTES + 8, ROOM = 256 };
	uint8_t frame[FIXED + ROOM] = { [3] = GATE_GOAWAY, [FIXED - 1] = ENHANCE_YOUR_CALM };
	const struct gate_breach *b = &gc->flow.breach;
	int n = snprintf((char *)frame + FIXED, ROOM, "%s: limit %s=%llu", b->what, b->limit,
			 (unsigned long long)b->value);

	if (gc->down.data || !gate_frames_whole(&gc->flow.down) || n < 0 || n >= ROOM)
		return;
	frame[1] = (uint8_t)((8 + n) >> 8);
	frame[2] = (uint8_t)(8 + n);
	for (unsigned i = 0; i < 4; i++)
		frame[GATE_HEAD_BYTES + i] = (uint8_t)(gc->flow.last_id >> (24 - 8 * i));
	gate_pipe_send(gc->client.fd, frame, (size_t)(FIXED + n));
}

/* Forget bytes that were not judged. Bytes that may be written stay; they end at the end of a
 * judged part. */
static void gate_pipe_cut(struct gate_buffer *b)
{
	b->end = b->passed;
	if (b->at == b->end)
		gate_pipe_drop(b);
}

static void gate_pipe_break(struct gate_conn *gc)
{
	gc->closed = true;
	gate_pipe_cut(&gc->up);
	gate_pipe_goaway(gc);
	gate_broken(gc);
}

static void gate_pipe_no_memory(struct gate_conn *gc)
{
	gc->flow.breach = (struct gate_breach){ "memory", 0, "no memory to pass data on" };
	gate_pipe_break(gc);
}

/* Core accepts no more data. Bytes that it has sent before its end must still be read. */
static void gate_pipe_core_deaf(struct gate_conn *gc)
{
	gc->core_deaf = !gc->client.ended;
	gc->client.ended = true;
	gate_pipe_drop(&gc->up);
}

/* Core sends nothing more: bytes that it has sent are still passed on. */
static void gate_pipe_core_ended(struct gate_conn *gc, uint64_t now_us)
{
	if (gc->core.ended)
		return;
	gc->core.ended = true;
	gc->core_ended_us = now_us;
	gate_pipe_drop(&gc->up);
}

static void gate_pipe_client_ended(struct gate_conn *gc)
{
	gc->client.ended = true;
	gate_pipe_drop(&gc->down);
}

/* Core has ended a connection that its client has not ended: it found an error that the gate does
 * not check, such as bytes beyond a flow-control window. */
static void gate_pipe_core_refused(struct gate_conn *gc)
{
	if (gc->closed || (gc->client.ended && !gc->core_deaf) || gc->flow.goaway)
		return;
	gc->closed = true;
	gc->flow.breach = (struct gate_breach){ "http2", 0, "gRPC core refused what was sent" };
	gate_broken(gc);
}

/* Handle the end of a side. */
static void gate_pipe_settle(struct gate_conn *gc)
{
	if (gc->core.ended && !gc->down.data) {
		gate_pipe_core_refused(gc);
		shutdown(gc->client.fd, SHUT_RDWR);
	}
	if (gc->client.ended && !gc->up.data)
		shutdown(gc->core.fd, SHUT_WR);
	gate_pipe_watch(gc);
}

/* ------------------------------------------------------------ client to core */

/* Write what may pass of the @n bytes at @data, keep the rest; @v is the verdict on the bytes after
 * the first @passed ones. */
static void gate_pipe_pass_up(struct gate_conn *gc, const uint8_t *data, size_t passed, size_t n,
			      enum gate_verdict v)
{
	ssize_t sent = gate_pipe_send(gc->core.fd, data, passed);

	if (sent < 0)
		gate_pipe_core_deaf(gc);
	else if (!gate_pipe_keep(&gc->up, data + sent, passed - (size_t)sent, n - (size_t)sent))
		gate_pipe_no_memory(gc);
	else if (v == GATE_CLOSE)
		gate_pipe_break(gc);
}

static void gate_pipe_wait(struct gate_conn *gc, enum gate_verdict v)
{
	list_unlink(&gc->waiting);
	if (v == GATE_STALL)
		list_append(gc->flow.wait == GATE_WAIT_PACE ? &gc->gate->paced : &gc->gate->waiting,
			    &gc->waiting);
}

static void gate_pipe_read_client(struct gate_conn *gc, uint64_t now_us)
{
	uint8_t *scratch = gc->gate->scratch;
	enum gate_verdict v;
	ssize_t n = gate_pipe_recv(gc->client.fd, scratch, GATE_TURN_BYTES);
	size_t passed;

	if (n == -EAGAIN)
		return;
	if (n <= 0) {
		gate_pipe_client_ended(gc);
		return;
	}
	v = gate_flow_up(&gc->flow, scratch, (size_t)n, now_us, &passed);
	gate_pipe_wait(gc, v);
	gate_pipe_pass_up(gc, scratch, passed, (size_t)n, v);
}

static void gate_pipe_write_core(struct gate_conn *gc)
{
	struct gate_buffer *b = &gc->up;
	ssize_t sent = gate_pipe_send(gc->core.fd, b->data + b->at, b->passed - b->at);

	if (sent < 0) {
		gate_pipe_core_deaf(gc);
		return;
	}
	b->at += (size_t)sent;
	if (b->at == b->end)
		gate_pipe_drop(b);
}

/* Judge again the bytes that were kept back. */
static void gate_pipe_judge(struct gate_conn *gc, uint64_t now_us)
{
	struct gate_buffer *b = &gc->up;
	enum gate_verdict v;
	size_t passed;

	if (!b->data || b->passed == b->end)
		return;
	v = gate_flow_up(&gc->flow, b->data + b->passed, b->end - b->passed, now_us, &passed);
	b->passed += passed;
	gate_pipe_wait(gc, v);
	if (v == GATE_CLOSE)
		gate_pipe_break(gc);
	else if (gate_pipe_may_write(b))
		gate_pipe_write_core(gc);
}

/* ------------------------------------------------------------ core to client */

/* Return: false if there was nothing. */
static bool gate_pipe_read_core(struct gate_conn *gc, uint64_t now_us)
{
	uint8_t *scratch = gc->gate->scratch;
	ssize_t sent, n = gate_pipe_recv(gc->core.fd, scratch, GATE_TURN_BYTES);

	if (n == -EAGAIN)
		return false;
	if (n <= 0) {
		gate_pipe_core_ended(gc, now_us);
		return false;
	}
	gc->core_spoke = true;
	gate_flow_down(&gc->flow, scratch, (size_t)n, now_us);
	sent = gate_pipe_send(gc->client.fd, scratch, (size_t)n);
	if (sent < 0)
		gate_pipe_client_ended(gc);
	else if (!gate_pipe_keep(&gc->down, scratch + sent, (size_t)(n - sent), (size_t)(n - sent)))
		gate_pipe_no_memory(gc);
	if (gc->flow.wait != GATE_WAIT_NONE && !gc->closed)
		gate_pipe_judge(gc, now_us); /* a stream may have ended */
	return true;
}

static void gate_pipe_write_client(struct gate_conn *gc)
{
	struct gate_buffer *b = &gc->down;
	ssize_t sent = gate_pipe_send(gc->client.fd, b->data + b->at, b->passed - b->at);

	if (sent < 0) {
		gate_pipe_client_ended(gc);
		return;
	}
	b->at += (size_t)sent;
	if (b->at == b->end)
		gate_pipe_drop(b);
}

/* ----------------------------------------------------------------- events */

static void gate_pipe_client_ready(struct gate_conn *gc, uint32_t events, uint64_t now_us)
{
	if ((events & (EPOLLOUT | EPOLLERR | EPOLLHUP)) && gate_pipe_may_write(&gc->down))
		gate_pipe_write_client(gc);
	if ((events & (EPOLLIN | EPOLLERR | EPOLLHUP)) && !gc->client.ended && !gc->core.ended &&
	    !gc->up.data)
		gate_pipe_read_client(gc, now_us);
}

static void gate_pipe_core_ready(struct gate_conn *gc, uint32_t events, uint64_t now_us)
{
	if ((events & (EPOLLIN | EPOLLERR | EPOLLHUP)) && !gc->core.ended && !gc->down.data)
		gate_pipe_read_core(gc, now_us);
	if ((events & (EPOLLOUT | EPOLLERR | EPOLLHUP)) && gate_pipe_may_write(&gc->up))
		gate_pipe_write_core(gc);
}

void gate_pipe_ready(struct gate_side *side, uint32_t events, uint64_t now_us)
{
	struct gate_conn *gc = side->gc;

	MAGIC_CHECK(gc, GATE_CONN_MAGIC);
	if (!gc->open || gc->closed)
		return;
	if (side == &gc->client)
		gate_pipe_client_ready(gc, events, now_us);
	else
		gate_pipe_core_ready(gc, events, now_us);
	gate_pipe_settle(gc);
}

void gate_pipe_retry(struct gate_conn *gc, uint64_t now_us)
{
	list_unlink(&gc->waiting);
	if (!gc->open || gc->closed)
		return;
	gate_pipe_judge(gc, now_us);
	gate_pipe_settle(gc);
}

void gate_pipe_tick(struct gate_conn *gc, uint64_t now_us)
{
	if (!gc->open || gc->closed)
		return;
	if (gc->core.ended && now_us - gc->core_ended_us > GATE_LAST_WORDS_US)
		gate_pipe_drop(&gc->down);
	if (!gc->core.ended && gate_flow_tick(&gc->flow, now_us) == GATE_CLOSE)
		gate_pipe_break(gc);
	gate_pipe_settle(gc);
}

int gate_pipe_open(struct gate_conn *gc, uint64_t now_us)
{
	gate_flow_init(&gc->flow, &gc->gate->limits, &gc->user->purse, &gc->gate->total, now_us);
	gc->open = true;
	gate_pipe_watch(gc);
	return gc->core.events ? 0 : -ENOMEM; /* the client follows when core has spoken */
}

/* ------------------------------------------------------- the end of many calls */

/* Can we send core frames of our own after the bytes that it has received? If not, core learns of
 * the end by the end of the byte stream, and ends all calls at once, as it does with few calls. */
static bool gate_pipe_may_linger(const struct gate_conn *gc)
{
	const struct gate_flow *f = &gc->flow;

	return gc->open && !gc->core.ended && f->n_streams > GATE_LINGER_CALLS && !f->block &&
	       f->up.n_head == 0 && (f->up.left == 0 || f->up.frame.type == GATE_DATA);
}

/* Send a reply that core wrote before the loop closed the connection, as far as the client receives
 * it now. */
static void gate_pipe_last_words(struct gate_conn *gc, uint64_t now_us)
{
	for (unsigned i = 0; i < GATE_LAST_TURNS && !gc->client.ended && !gc->core.ended; i++) {
		if (gate_pipe_may_write(&gc->down))
			gate_pipe_write_client(gc);
		if (gc->down.data)
			return;
		if (!gate_pipe_read_core(gc, now_us))
			return;
	}
}

bool gate_pipe_end(struct gate_conn *gc, uint64_t now_us)
{
	if (gc->open && !gc->closed)
		gate_pipe_last_words(gc, now_us);
	list_unlink(&gc->waiting);
	gc->closed = true;
	gate_pipe_watch(gc);
	shutdown(gc->client.fd, SHUT_RDWR);
	gc->client.fd = fd_close(gc->client.fd);
	gate_pipe_drop(&gc->down);
	gate_pipe_cut(&gc->up);
	if (!gate_pipe_may_linger(gc))
		return false;
	gc->linger_us = now_us;
	gc->linger_end_us = now_us + GATE_LINGER_US;
	return true;
}

/* The bytes that core still expects of a DATA frame, then resets. */
static bool gate_pipe_put_resets(struct gate_conn *gc)
{
	uint8_t data[GATE_LINGER_BATCH * (GATE_HEAD_BYTES + 4)] = { 0 };
	struct gate_flow *f = &gc->flow;
	size_t n = 0;
	ssize_t sent;

	for (; n < sizeof(data) && f->n_streams > 0; n += GATE_HEAD_BYTES + 4) {
		uint32_t id = f->streams[f->n_streams - 1].id;

		data[n + 2] = 4;
		data[n + 3] = GATE_RST;
		for (unsigned i = 0; i < 4; i++)
			data[n + 5 + i] = (uint8_t)(id >> (24 - 8 * i));
		data[n + GATE_HEAD_BYTES + 3] = GATE_CANCEL;
		gate_flow_drop(f, id);
	}
	sent = gate_pipe_send(gc->core.fd, data, n);
	return sent >= 0 &&
	       gate_pipe_keep(&gc->up, data + sent, n - (size_t)sent, n - (size_t)sent);
}

static bool gate_pipe_put_rest(struct gate_conn *gc)
{
	uint8_t *scratch = gc->gate->scratch;
	size_t n = gc->flow.up.left;
	ssize_t sent;

	memset(scratch, 0, n);
	gc->flow.up.left = 0;
	sent = gate_pipe_send(gc->core.fd, scratch, n);
	return sent >= 0 &&
	       gate_pipe_keep(&gc->up, scratch + sent, n - (size_t)sent, n - (size_t)sent);
}

bool gate_pipe_linger(struct gate_conn *gc, uint64_t now_us)
{
	uint8_t *scratch = gc->gate->scratch;
	ssize_t n = gate_pipe_recv(gc->core.fd, scratch, GATE_TURN_BYTES);

	if (n > 0)
		gate_flow_down(&gc->flow, scratch, (size_t)n, now_us);
	if (n == 0 || gc->flow.n_streams == 0 || now_us > gc->linger_end_us)
		return true;
	if (gate_pipe_may_write(&gc->up)) {
		gate_pipe_write_core(gc);
		return false;
	}
	if (gc->flow.up.left > 0)
		return !gate_pipe_put_rest(gc);
	if (now_us < gc->linger_us)
		return false;
	gc->linger_us = now_us + GATE_LINGER_BATCH * GATE_OPEN_US;
	return !gate_pipe_put_resets(gc);
}

void gate_pipe_close(struct gate_conn *gc)
{
	if (gc->open)
		gate_flow_deinit(&gc->flow);
	gc->open = false;
	list_unlink(&gc->waiting);
	/* closing takes them out of the set: no other process has them */
	gc->client.fd = fd_close(gc->client.fd);
	gc->core.fd = fd_close(gc->core.fd);
	gate_pipe_drop(&gc->up);
	gate_pipe_drop(&gc->down);
}
