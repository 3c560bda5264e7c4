#include "net/gate_flow.h"

#include <stdlib.h>
#include <string.h>

#include "core/check.h"

#define GATE_PREFIX_BYTES  5u    /* flag and length before a gRPC message */
#define GATE_SMALL_DATA    256u  /* DATA frames below this size count as control frames */
#define GATE_STREAM_TOKENS 8u    /* control frames that come with a call */
#define GATE_DOWN_BYTES    1024u /* that the client got, for a control frame it may send */

static const char gate_flow_preface[] = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
#define GATE_PREFACE_BYTES (sizeof(gate_flow_preface) - 1)

/* ------------------------------------------------------------ verdicts */

static enum gate_verdict gate_flow_close(struct gate_flow *f, const char *limit, uint64_t value,
					 const char *what)
{
	f->breach = (struct gate_breach){ limit, value, what };
	return GATE_CLOSE;
}

static enum gate_verdict gate_flow_wrong(struct gate_flow *f, const char *what)
{
	return gate_flow_close(f, "http2", 0, what);
}

static enum gate_verdict gate_flow_stall(struct gate_flow *f, enum gate_wait wait,
					 const char *limit, uint64_t value, uint64_t now_us)
{
	if (f->wait == GATE_WAIT_NONE)
		f->wait_since_us = now_us;
	f->wait = wait;
	f->wait_limit = limit;
	f->wait_value = value;
	return GATE_STALL;
}

/* The time for which others kept it waiting does not count. */
static void gate_flow_resume(struct gate_flow *f, uint64_t now_us)
{
	uint64_t lost = now_us - f->wait_since_us;

	for (uint32_t i = 0; f->wait == GATE_WAIT_OTHERS && i < f->n_streams; i++)
		f->streams[i].since_us += lost;
	f->wait = GATE_WAIT_NONE;
}

static enum gate_verdict gate_flow_rate(struct gate_flow *f, struct gate_rate *rate, uint32_t per_s,
					const char *limit, uint64_t now_us, const char *what)
{
	if (gate_rate_take(rate, per_s, now_us))
		return GATE_PASS;
	return gate_flow_close(f, limit, per_s, what);
}

/* A frame that does not advance any call. */
static enum gate_verdict gate_flow_control(struct gate_flow *f, uint64_t now_us)
{
	return gate_flow_rate(f, &f->control, f->limits->control_per_s, "grpc_control_per_s",
			      now_us, "too many control frames");
}

/* ------------------------------------------------------------- streams */

/* The index of the stream @id, or the one where it would be inserted. */
static uint32_t gate_flow_place(const struct gate_flow *f, uint32_t id)
{
	uint32_t low = 0, high = f->n_streams;

	while (low < high) {
		uint32_t middle = low + (high - low) / 2;

		if (f->streams[middle].id < id)
			low = middle + 1;
		else
			high = middle;
	}
	return low;
}

static struct gate_stream *gate_flow_find(const struct gate_flow *f, uint32_t id)
{
	uint32_t i = gate_flow_place(f, id);

	return i < f->n_streams && f->streams[i].id == id ? &f->streams[i] : NULL;
}

static void gate_flow_uncharge(struct gate_flow *f, struct gate_stream *s)
{
	if (s->charged == 0)
		return;
	CHECK(f->charged >= s->charged && f->user->used >= s->charged &&
	      f->total->used >= s->charged);
	f->charged -= s->charged;
	f->user->used -= s->charged;
	f->total->used -= s->charged;
	f->total->returns++;
	s->charged = 0;
	if (f->charged > 0)
		return;
	gate_purse_leave(f->user, f);
	gate_purse_leave(f->total, f);
}

static void gate_flow_whole(struct gate_flow *f, struct gate_stream *s)
{
	CHECK(!s->whole && f->n_waiting > 0);
	s->whole = true;
	f->n_waiting--;
}

static void gate_flow_remove(struct gate_flow *f, uint32_t id)
{
	struct gate_stream *s = gate_flow_find(f, id);
	uint32_t i;

	if (!s)
		return;
	gate_flow_uncharge(f, s);
	if (!s->whole)
		gate_flow_whole(f, s);
	i = (uint32_t)(s - f->streams);
	f->n_streams--;
	memmove(s, s + 1, (f->n_streams - i) * sizeof(*s));
}

void gate_flow_drop(struct gate_flow *f, uint32_t id)
{
	gate_flow_remove(f, id);
}

/* The client ends the stream: the missing bytes never come, and core ends the call. */
static void gate_flow_ended(struct gate_flow *f, uint32_t id)
{
	struct gate_stream *s = gate_flow_find(f, id);

	if (!s || s->whole)
		return;
	gate_flow_whole(f, s);
	gate_flow_uncharge(f, s);
}

static bool gate_flow_grow(struct gate_flow *f)
{
	uint32_t room = f->room ? 2 * f->room : 4;
	struct gate_stream *streams;

	if (f->n_streams < f->room)
		return true;
	streams = realloc(f->streams, room * sizeof(*streams));
	if (!streams)
		return false;
	f->streams = streams;
	f->room = room;
	return true;
}

static enum gate_verdict gate_flow_open(struct gate_flow *f, uint32_t id, uint64_t now_us)
{
	const struct gate_limits *l = f->limits;

	if (f->n_streams >= l->streams)
		return gate_flow_close(f, "streams", l->streams, "too many calls are open");
	if (!f->attached && f->n_streams >= l->unattached_streams)
		return gate_flow_stall(f, GATE_WAIT_OWN, "grpc_unattached_streams",
				       l->unattached_streams, now_us);
	if (f->opened_us < now_us)
		f->opened_us = now_us;
	if (f->opened_us - now_us >= GATE_OPEN_AHEAD * GATE_OPEN_US)
		return gate_flow_stall(f, GATE_WAIT_PACE, "pace", GATE_OPEN_US, now_us);
	if (!gate_flow_grow(f))
		return gate_flow_close(f, "memory", 0, "no memory for a stream");
	f->opened_us += GATE_OPEN_US;
	f->streams[f->n_streams++] = (struct gate_stream){ .id = id, .since_us = now_us };
	f->n_waiting++;
	f->last_id = id;
	gate_rate_add(&f->control, l->control_per_s, GATE_STREAM_TOKENS);
	return GATE_PASS;
}

/* ----------------------------------------------------- heads from the client */

static enum gate_verdict gate_flow_block(struct gate_flow *f, const struct gate_frame *frame)
{
	f->block_bytes += frame->bytes;
	f->opened_us += (uint64_t)frame->bytes / GATE_OPEN_BYTES * GATE_OPEN_US;
	f->block = frame->flags & GATE_FLAG_END_HEADERS ? 0 : frame->stream;
	if (f->block_bytes > f->limits->header_bytes)
		return gate_flow_close(f, "grpc_header_bytes", f->limits->header_bytes,
				       "a header block is too long");
	return GATE_PASS;
}

static enum gate_verdict gate_flow_headers(struct gate_flow *f, const struct gate_frame *frame,
					   uint64_t now_us)
{
	bool ends = frame->flags & GATE_FLAG_END_STREAM;
	enum gate_verdict v;

	if (frame->stream % 2 == 0)
		return gate_flow_wrong(f, "HEADERS on a stream that no client may open");
	/* calls of gRPC have no trailers from the client */
	if (frame->stream <= f->last_id)
		return gate_flow_wrong(f, "a second header block of a stream");
	v = gate_flow_open(f, frame->stream, now_us);
	if (v != GATE_PASS)
		return v;
	if (ends)
		gate_flow_ended(f, frame->stream);
	f->block_bytes = 0;
	f->block_continuations = 0;
	return gate_flow_block(f, frame);
}

static enum gate_verdict gate_flow_continuation(struct gate_flow *f, const struct gate_frame *frame)
{
	if (!f->block || f->block != frame->stream)
		return gate_flow_wrong(f, "CONTINUATION without its HEADERS");
	if (++f->block_continuations > f->limits->continuations)
		return gate_flow_close(f, "grpc_continuations", f->limits->continuations,
				       "a header block has too many CONTINUATION frames");
	return gate_flow_block(f, frame);
}

/* May @cost more be charged for @s? */
static enum gate_verdict gate_flow_admit(struct gate_flow *f, const struct gate_stream *s,
					 uint64_t cost, uint64_t now_us)
{
	const struct gate_limits *l = f->limits;
	uint64_t own = f->attached ? l->connection_bytes : l->unattached_bytes;
	const char *key = f->attached ? "grpc_connection_bytes" : "grpc_unattached_bytes";
	bool had_turn = f->user->turn == f;

	/* A connection alone does not wait for others. */
	if (f->charged + cost > own && s->charged == f->charged)
		return gate_flow_close(f, key, own, "a message is too large");
	if (f->charged + cost > own)
		return gate_flow_stall(f, GATE_WAIT_OWN, key, own, now_us);
	if (!gate_purse_admits(f->user, f->user->limit, cost, f))
		return gate_flow_stall(f, GATE_WAIT_OTHERS, "max_message_bytes_per_user",
				       f->user->limit, now_us);
	if (!gate_purse_admits(f->total, l->total_bytes, cost, f)) {
		/* A connection that waits for the total budget gives up its user's turn: otherwise
		 * two connections that each hold one turn and wait for the other would wait for
		 * ever. */
		gate_purse_leave(f->user, f);
		f->total->returns += had_turn;
		return gate_flow_stall(f, GATE_WAIT_OTHERS, "grpc_total_bytes", l->total_bytes,
				       now_us);
	}
	return GATE_PASS;
}

/* The first frame of a message, if it is a small one, never waits: it may be the
 * whole message. So a client of small messages does not wait for a client of large ones. */
static enum gate_verdict gate_flow_charge(struct gate_flow *f, struct gate_stream *s,
					  uint32_t bytes, uint64_t now_us)
{
	uint64_t cost = bytes < GATE_FRAME_COST ? GATE_FRAME_COST : bytes;
	bool small = bytes <= GATE_FRAME_COST && s->charged == 0 && s->n_prefix == 0;
	enum gate_verdict v = small ? GATE_PASS : gate_flow_admit(f, s, cost, now_us);

	if (v != GATE_PASS)
		return v;
	s->charged += cost;
	f->charged += cost;
	f->user->used += cost;
	f->total->used += cost;
	return GATE_PASS;
}

static enum gate_verdict gate_flow_data(struct gate_flow *f, const struct gate_frame *frame,
					uint64_t now_us)
{
	struct gate_stream *s = gate_flow_find(f, frame->stream);
	bool ends = frame->flags & GATE_FLAG_END_STREAM;
	enum gate_verdict v = GATE_PASS;

	if (frame->stream % 2 == 0 || frame->stream > f->last_id)
		return gate_flow_wrong(f, "DATA on a stream that is not open");
	f->padding = 0;
	/* after the last frame nothing is left that would wait for more */
	if (s && frame->bytes > 0 && !ends)
		v = gate_flow_charge(f, s, frame->bytes, now_us);
	if (v == GATE_PASS && !ends && frame->bytes < GATE_SMALL_DATA)
		v = gate_flow_control(f, now_us);
	return v;
}

static enum gate_verdict gate_flow_reset(struct gate_flow *f, const struct gate_frame *frame,
					 uint64_t now_us)
{
	uint32_t per_s = f->limits->resets_per_s;

	if (frame->bytes != 4 || frame->stream == 0 || frame->stream > f->last_id)
		return gate_flow_wrong(f, "RST_STREAM with a wrong length or stream");
	if (!f->attached)
		per_s = per_s / 10 ? per_s / 10 : 1;
	gate_flow_remove(f, frame->stream);
	return gate_flow_rate(f, &f->resets, per_s, "grpc_resets_per_s", now_us,
			      "too many calls are cancelled");
}

static enum gate_verdict gate_flow_settings(struct gate_flow *f, const struct gate_frame *frame,
					    uint64_t now_us)
{
	bool ack = frame->flags & GATE_FLAG_ACK;

	if (frame->stream != 0 || frame->bytes % 6 != 0 || (ack && frame->bytes > 0))
		return gate_flow_wrong(f, "SETTINGS with a wrong length or stream");
	if (ack)
		return gate_flow_control(f, now_us);
	return gate_flow_rate(f, &f->settings, f->limits->settings_per_s, "grpc_settings_per_s",
			      now_us, "too many SETTINGS frames");
}

static enum gate_verdict gate_flow_ping(struct gate_flow *f, const struct gate_frame *frame,
					uint64_t now_us)
{
	if (frame->stream != 0 || frame->bytes != 8)
		return gate_flow_wrong(f, "PING with a wrong length or stream");
	return gate_flow_rate(f, &f->pings, f->limits->pings_per_s, "grpc_pings_per_s", now_us,
			      "too many PING frames");
}

/* Those of a fixed length, GOAWAY, and types that HTTP/2 does not know. */
static enum gate_verdict gate_flow_other(struct gate_flow *f, const struct gate_frame *frame,
					 uint64_t now_us)
{
	if (frame->type == GATE_PRIORITY && (frame->bytes != 5 || frame->stream == 0))
		return gate_flow_wrong(f, "PRIORITY with a wrong length or stream");
	if (frame->type == GATE_WINDOW_UPDATE && (frame->bytes != 4 || frame->stream > f->last_id))
		return gate_flow_wrong(f, "WINDOW_UPDATE with a wrong length or stream");
	if (frame->type == GATE_GOAWAY && (frame->bytes < 8 || frame->stream != 0))
		return gate_flow_wrong(f, "GOAWAY with a wrong length or stream");
	f->goaway = f->goaway || frame->type == GATE_GOAWAY;
	return gate_flow_control(f, now_us);
}

/* May the frame pass? Only its head has arrived. */
static enum gate_verdict gate_flow_head(struct gate_flow *f, uint64_t now_us)
{
	const struct gate_frame *frame = &f->up.frame;

	if (frame->bytes > f->limits->frame_bytes)
		return gate_flow_close(f, "frame_bytes", f->limits->frame_bytes,
				       "a frame is too long");
	if (f->block && frame->type != GATE_CONTINUATION)
		return gate_flow_wrong(f, "a frame inside a header block");
	switch (frame->type) {
	case GATE_DATA:
		return gate_flow_data(f, frame, now_us);
	case GATE_HEADERS:
		return gate_flow_headers(f, frame, now_us);
	case GATE_CONTINUATION:
		return gate_flow_continuation(f, frame);
	case GATE_RST:
		return gate_flow_reset(f, frame, now_us);
	case GATE_SETTINGS:
		return gate_flow_settings(f, frame, now_us);
	case GATE_PING:
		return gate_flow_ping(f, frame, now_us);
	case GATE_PUSH_PROMISE:
		return gate_flow_wrong(f, "PUSH_PROMISE from a client");
	default:
		return gate_flow_other(f, frame, now_us);
	}
}

/* ---------------------------------------------------- bodies from the client */

static void gate_flow_message(struct gate_flow *f, struct gate_stream *s, const uint8_t *data,
			      size_t n)
{
	size_t at = 0;

	while (at < n && !s->whole) {
		if (s->n_prefix < GATE_PREFIX_BYTES) {
			/* one byte of flags, then the length */
			if (s->n_prefix > 0)
				s->left = s->left << 8 | data[at];
			s->n_prefix++;
			at++;
		} else {
			size_t take = s->left < n - at ? s->left : n - at;

			s->left -= (uint32_t)take;
			at += take;
		}
		if (s->n_prefix == GATE_PREFIX_BYTES && s->left == 0)
			gate_flow_whole(f, s);
	}
	if (at < n)
		s->more = true;
}

/* @n bytes of the body of a DATA frame; @left more bytes of the body follow them. */
static enum gate_verdict gate_flow_data_body(struct gate_flow *f, const uint8_t *data, size_t n)
{
	const struct gate_frame *frame = &f->up.frame;
	struct gate_stream *s = gate_flow_find(f, frame->stream);
	size_t after = f->up.left;

	if ((frame->flags & GATE_FLAG_PADDED) && n + after == frame->bytes) {
		f->padding = data[0];
		if (f->padding >= frame->bytes)
			return gate_flow_wrong(f, "DATA with more padding than bytes");
		data++;
		n--;
	}
	if (f->padding > after) {
		size_t tail = f->padding - after;

		n -= tail < n ? tail : n;
	}
	if (s)
		gate_flow_message(f, s, data, n);
	return GATE_PASS;
}

static void gate_flow_frame_end(struct gate_flow *f)
{
	const struct gate_frame *frame = &f->up.frame;
	struct gate_stream *s;

	if (frame->type != GATE_DATA)
		return;
	s = gate_flow_find(f, frame->stream);
	if (s && s->whole && !s->more)
		gate_flow_uncharge(f, s);
	if (frame->flags & GATE_FLAG_END_STREAM)
		gate_flow_ended(f, frame->stream);
}

static enum gate_verdict gate_flow_begin(struct gate_flow *f, const uint8_t *data, size_t n,
					 size_t *ret_used)
{
	size_t want = GATE_PREFACE_BYTES - f->n_preface;

	*ret_used = want < n ? want : n;
	for (size_t i = 0; i < *ret_used; i++)
		if (data[i] != (uint8_t)gate_flow_preface[f->n_preface + i]) {
			*ret_used = i;
			return gate_flow_wrong(
				f, "the connection does not begin with the HTTP/2 preface");
		}
	f->n_preface = (uint8_t)(f->n_preface + *ret_used);
	return GATE_PASS;
}

/* One part of the received bytes. @ret_used: its bytes. A verdict other than GATE_PASS leaves the
 * state unchanged. */
static enum gate_verdict gate_flow_part(struct gate_flow *f, const uint8_t *data, size_t n,
					uint64_t now_us, size_t *ret_used)
{
	struct gate_frames before = f->up;
	enum gate_verdict v = GATE_PASS;

	switch (gate_frames_next(&f->up, data, n, ret_used)) {
	case GATE_STEP_MORE:
		return GATE_PASS;
	case GATE_STEP_HEAD:
		v = gate_flow_head(f, now_us);
		break;
	case GATE_STEP_BODY:
		if (f->up.frame.type == GATE_DATA)
			v = gate_flow_data_body(f, data, *ret_used);
		break;
	}
	if (v != GATE_PASS) {
		f->up = before;
		*ret_used = 0;
	} else if (gate_frames_whole(&f->up)) {
		gate_flow_frame_end(f);
	}
	return v;
}

enum gate_verdict gate_flow_up(struct gate_flow *f, const uint8_t *data, size_t n, uint64_t now_us,
			       size_t *ret_passed)
{
	enum gate_verdict v = GATE_PASS;
	size_t at = 0, used = 0;

	f->last_us = now_us;
	while (v == GATE_PASS && at < n) {
		if (f->n_preface < GATE_PREFACE_BYTES)
			v = gate_flow_begin(f, data + at, n - at, &used);
		else
			v = gate_flow_part(f, data + at, n - at, now_us, &used);
		at += used;
		if (v == GATE_PASS && f->wait != GATE_WAIT_NONE)
			gate_flow_resume(f, now_us);
	}
	*ret_passed = at;
	return v;
}

/* ---------------------------------------------------------- the other way */

static void gate_flow_down_head(struct gate_flow *f)
{
	const struct gate_frame *frame = &f->down.frame;
	bool ends = (frame->type == GATE_DATA || frame->type == GATE_HEADERS) &&
		    (frame->flags & GATE_FLAG_END_STREAM);

	if (!ends && frame->type != GATE_RST)
		return;
	if (gate_flow_find(f, frame->stream) && f->opened_us >= GATE_OPEN_US)
		f->opened_us -= GATE_OPEN_US;
	gate_flow_remove(f, frame->stream);
}

void gate_flow_down(struct gate_flow *f, const uint8_t *data, size_t n, uint64_t now_us)
{
	size_t at = 0, used = 0;

	f->last_us = now_us;
	for (; at < n; at += used)
		if (gate_frames_next(&f->down, data + at, n - at, &used) == GATE_STEP_HEAD)
			gate_flow_down_head(f);
	f->down_bytes += n;
	gate_rate_add(&f->control, f->limits->control_per_s, f->down_bytes / GATE_DOWN_BYTES);
	f->down_bytes %= GATE_DOWN_BYTES;
}

/* ------------------------------------------------------------- deadlines */

static enum gate_verdict gate_flow_tick_streams(struct gate_flow *f, uint64_t now_us)
{
	uint64_t limit_us = (uint64_t)f->limits->message_timeout_ms * 1000u;

	for (uint32_t i = 0; f->n_waiting > 0 && i < f->n_streams; i++)
		if (!f->streams[i].whole && now_us - f->streams[i].since_us > limit_us)
			return gate_flow_close(f, "grpc_message_timeout_ms",
					       f->limits->message_timeout_ms,
					       "a message did not arrive completely in time");
	return GATE_PASS;
}

enum gate_verdict gate_flow_tick(struct gate_flow *f, uint64_t now_us)
{
	const struct gate_limits *l = f->limits;

	if (f->wait == GATE_WAIT_OTHERS)
		return GATE_PASS;
	if (gate_flow_tick_streams(f, now_us) == GATE_CLOSE)
		return GATE_CLOSE;
	if (f->wait == GATE_WAIT_OWN &&
	    now_us - f->wait_since_us > (uint64_t)l->message_timeout_ms * 1000u)
		return gate_flow_close(f, f->wait_limit, f->wait_value,
				       "the calls that it waits for do not end");
	if (!f->attached && f->n_streams == 0 &&
	    now_us - f->last_us > (uint64_t)l->idle_timeout_ms * 1000u)
		return gate_flow_close(f, "grpc_idle_timeout_ms", l->idle_timeout_ms,
				       "a connection without a session was idle too long");
	return GATE_PASS;
}

/* ------------------------------------------------------------------ life */

void gate_flow_init(struct gate_flow *f, const struct gate_limits *limits, struct gate_purse *user,
		    struct gate_purse *total, uint64_t now_us)
{
	*f = (struct gate_flow){ .limits = limits,
				 .user = user,
				 .total = total,
				 .up = GATE_FRAMES_NULL,
				 .down = GATE_FRAMES_NULL,
				 .last_us = now_us };
	gate_rate_init(&f->resets, limits->resets_per_s, now_us);
	gate_rate_init(&f->pings, limits->pings_per_s, now_us);
	gate_rate_init(&f->settings, limits->settings_per_s, now_us);
	gate_rate_init(&f->control, limits->control_per_s, now_us);
}

void gate_flow_attach(struct gate_flow *f)
{
	f->attached = true;
}

void gate_flow_deinit(struct gate_flow *f)
{
	while (f->n_streams > 0)
		gate_flow_remove(f, f->streams[f->n_streams - 1].id);
	CHECK(f->charged == 0 && f->n_waiting == 0);
	gate_purse_leave(f->user, f);
	gate_purse_leave(f->total, f);
	free(f->streams);
	f->streams = NULL;
	f->room = 0;
}
