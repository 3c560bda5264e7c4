/* The reader of frames, the rates and budgets, and what the flow of one connection makes of
 * them. The gate itself, with sockets: tests/hostile and tests/stress. */
#include <criterion/criterion.h>
#include <string.h>

#include "core/check.h"
#include "fdcheck.h"
#include "net/gate_flow.h"

TestSuite(gate, .timeout = 20, .init = fdcheck_begin, .fini = fdcheck_end);

static const struct gate_limits small_limits = {
	.header_bytes = 1000,
	.continuations = 2,
	.frame_bytes = 16384,
	.streams = 4,
	.unattached_streams = 2,
	.unattached_bytes = 32768,
	.connection_bytes = 65536,
	.total_bytes = 131072,
	.message_timeout_ms = 1000,
	.idle_timeout_ms = 2000,
	.resets_per_s = 10,
	.pings_per_s = 2,
	.settings_per_s = 1,
	.control_per_s = 10,
};

static struct gate_purse user, total;
static uint64_t now;

/* ------------------------------------------------------------------ bytes */

struct bytes {
	uint8_t data[200000];
	size_t n;
};

static struct bytes wire; /* what is sent next */

static void put(const void *data, size_t n)
{
	cr_assert_leq(wire.n + n, sizeof(wire.data));
	memcpy(wire.data + wire.n, data, n);
	wire.n += n;
}

static void put_head(unsigned type, unsigned flags, uint32_t stream, size_t n)
{
	const uint8_t head[] = {
		(uint8_t)(n >> 16),      (uint8_t)(n >> 8),      (uint8_t)n,
		(uint8_t)type,           (uint8_t)flags,         (uint8_t)(stream >> 24),
		(uint8_t)(stream >> 16), (uint8_t)(stream >> 8), (uint8_t)stream
	};

	put(head, sizeof(head));
}

static void put_frame(unsigned type, unsigned flags, uint32_t stream, size_t n)
{
	static const uint8_t zeros[65536];

	put_head(type, flags, stream, n);
	put(zeros, n);
}

static void put_headers(uint32_t stream)
{
	put_frame(GATE_HEADERS, GATE_FLAG_END_HEADERS, stream, 10);
}

/* The first frame of a message of @message bytes, @n of them in it. */
static void put_message(uint32_t stream, unsigned flags, uint32_t message, size_t n)
{
	static const uint8_t zeros[16384];
	const uint8_t prefix[] = { 0, (uint8_t)(message >> 24), (uint8_t)(message >> 16),
				   (uint8_t)(message >> 8), (uint8_t)message };

	put_head(GATE_DATA, flags, stream, n + 5);
	put(prefix, 5);
	put(zeros, n);
}

static void flow_begin(struct gate_flow *f)
{
	now = 1000000;
	user = (struct gate_purse){ .limit = 65536 };
	total = (struct gate_purse){ .used = 0 };
	gate_flow_init(f, &small_limits, &user, &total, now);
	wire.n = 0;
	put("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 24);
}

/* What is on the wire, in pieces of @piece bytes. What was not passed stays there. */
static enum gate_verdict send_in(struct gate_flow *f, size_t piece)
{
	enum gate_verdict v = GATE_PASS;
	size_t at = 0, passed = 0;

	while (v == GATE_PASS && at < wire.n) {
		size_t n = piece < wire.n - at ? piece : wire.n - at;

		v = gate_flow_up(f, wire.data + at, n, now, &passed);
		cr_assert_leq(passed, n);
		cr_assert(v != GATE_PASS || passed == n);
		at += passed;
	}
	memmove(wire.data, wire.data + at, wire.n - at);
	wire.n -= at;
	return v;
}

static enum gate_verdict send_all(struct gate_flow *f)
{
	return send_in(f, sizeof(wire.data));
}

static void closed_by(struct gate_flow *f, const char *limit)
{
	enum gate_verdict v = send_all(f);

	cr_assert_eq(v, GATE_CLOSE, "%d", v);
	cr_assert_str_eq(f->breach.limit, limit, "%s: %s", f->breach.limit, f->breach.what);
	gate_flow_deinit(f);
	cr_assert(user.used == 0 && total.used == 0 && !user.turn && !total.turn);
}

static void passes(struct gate_flow *f)
{
	cr_assert_eq(send_all(f), GATE_PASS, "%s", f->breach.what ? f->breach.what : "stalled");
}

/* Core ends @stream. */
static void answer(struct gate_flow *f, uint32_t stream)
{
	const uint8_t frame[] = { 0, 0, 1, GATE_HEADERS,    GATE_FLAG_END_STREAM | 4,
				  0, 0, 0, (uint8_t)stream, 0 };

	gate_flow_down(f, frame, sizeof(frame), now);
}

/* ----------------------------------------------------------------- frames */

Test(gate, frames_are_found_in_pieces_of_any_size)
{
	for (size_t piece = 1; piece < 40; piece++) {
		struct gate_frames r = GATE_FRAMES_NULL;
		unsigned heads = 0;
		size_t body = 0;

		wire.n = 0;
		put_frame(GATE_PING, GATE_FLAG_ACK, 0, 8);
		put_frame(GATE_DATA, 0, 0x80000005, 20);
		put_frame(GATE_SETTINGS, 0, 0, 0);
		for (size_t at = 0, used; at < wire.n; at += used) {
			size_t n = piece < wire.n - at ? piece : wire.n - at;
			enum gate_step step = gate_frames_next(&r, wire.data + at, n, &used);

			cr_assert(used > 0 && used <= n);
			heads += step == GATE_STEP_HEAD;
			body += step == GATE_STEP_BODY ? used : 0;
			if (step == GATE_STEP_HEAD && heads == 2)
				cr_assert(r.frame.stream == 5 && r.frame.bytes == 20);
		}
		cr_assert(heads == 3 && body == 28 && gate_frames_whole(&r));
	}
}

Test(gate, the_longest_frame_is_read_as_such)
{
	static const uint8_t head[] = { 0xff, 0xff, 0xff, 0xee, 0xff, 0xff, 0xff, 0xff, 0xff };
	struct gate_frames r = GATE_FRAMES_NULL;
	size_t used;

	cr_assert_eq(gate_frames_next(&r, head, sizeof(head), &used), GATE_STEP_HEAD);
	cr_assert(r.frame.bytes == 0xffffff && r.frame.type == 0xee && r.frame.flags == 0xff);
	cr_assert_eq(r.frame.stream, 0x7fffffff);
	cr_assert(!gate_frames_whole(&r));
}

/* ---------------------------------------------------------- rates, budgets */

Test(gate, a_rate_lets_a_burst_through_and_comes_back_with_time)
{
	struct gate_rate r;
	unsigned taken = 0;

	gate_rate_init(&r, 10, 5);
	while (gate_rate_take(&r, 10, 5))
		taken++;
	cr_assert_eq(taken, 10 * GATE_BURST);
	cr_assert(!gate_rate_take(&r, 10, 50000));
	cr_assert(gate_rate_take(&r, 10, 150000));
	cr_assert(!gate_rate_take(&r, 10, 150000));
	/* a very long time is no more than a burst, and a clock that stands gives nothing */
	for (taken = 0; gate_rate_take(&r, 10, UINT64_MAX); taken++)
		;
	cr_assert_eq(taken, 10 * GATE_BURST);
	gate_rate_add(&r, 10, 3);
	for (taken = 0; gate_rate_take(&r, 10, UINT64_MAX); taken++)
		;
	cr_assert_eq(taken, 3);
}

Test(gate, one_at_a_time_exceeds_a_budget)
{
	struct gate_purse p = { .used = 90 };
	int a = 0, b = 0;

	cr_assert(gate_purse_admits(&p, 100, 10, &a));
	cr_assert(gate_purse_admits(&p, 100, 11, &a));
	cr_assert(!gate_purse_admits(&p, 100, 11, &b));
	cr_assert(gate_purse_admits(&p, 100, 10, &b));
	gate_purse_leave(&p, &b);
	cr_assert(!gate_purse_admits(&p, 100, 11, &b));
	gate_purse_leave(&p, &a);
	cr_assert(gate_purse_admits(&p, 100, 11, &b));
	p.used = 1000; /* a limit that was lowered */
	cr_assert(!gate_purse_admits(&p, 100, 1, &a));
}

/* ------------------------------------------------------- limits of one flow */

Test(gate, a_call_comes_and_goes)
{
	struct gate_flow f;

	flow_begin(&f);
	put_frame(GATE_SETTINGS, 0, 0, 12);
	put_headers(1);
	put_message(1, GATE_FLAG_END_STREAM, 100, 100);
	passes(&f);
	cr_assert(f.n_streams == 1 && f.n_waiting == 0 && f.charged == 0);
	answer(&f, 1);
	cr_assert_eq(f.n_streams, 0);
	gate_flow_deinit(&f);
}

Test(gate, what_is_charged_is_given_back)
{
	struct gate_flow f;

	flow_begin(&f);
	gate_flow_attach(&f);
	for (uint32_t i = 1; i <= 7; i += 2) {
		put_headers(i);
		put_message(i, 0, 20000, 5000);
	}
	passes(&f);
	cr_assert(f.n_waiting == 4 && f.charged == 4 * 5005 && user.used == f.charged);
	put_frame(GATE_DATA, 0, 1, 15000); /* the rest of it */
	passes(&f);
	cr_assert_eq(f.charged, 3 * 5005);
	put_frame(GATE_RST, 0, 3, 4); /* given up */
	passes(&f);
	cr_assert_eq(f.charged, 2 * 5005);
	answer(&f, 5); /* refused before it was whole */
	cr_assert_eq(f.charged, 5005);
	put_frame(GATE_DATA, GATE_FLAG_END_STREAM, 7, 10); /* ended before it was whole */
	passes(&f);
	cr_assert(f.charged == 0 && user.used == 0 && total.used == 0 && f.n_waiting == 0);
	gate_flow_deinit(&f);
}

/* A small frame keeps alive the buffer it was read into: it costs more than its bytes. */
Test(gate, small_frames_cost_a_frame)
{
	struct gate_flow f;

	flow_begin(&f);
	put_headers(1);
	put_message(1, 0, 1000, 1);
	passes(&f);
	cr_assert_eq(f.charged, GATE_FRAME_COST);
	gate_flow_deinit(&f);
}

Test(gate, bytes_behind_a_message_stay_charged)
{
	struct gate_flow f;

	flow_begin(&f);
	put_headers(1);
	put_message(1, 0, 10, 5000); /* 10 of them are the message */
	passes(&f);
	cr_assert(f.n_waiting == 0 && f.charged == 5005);
	answer(&f, 1);
	cr_assert_eq(f.charged, 0);
	gate_flow_deinit(&f);
}

Test(gate, padding_is_no_part_of_a_message)
{
	struct gate_flow f;

	flow_begin(&f);
	put_headers(1);
	put_head(GATE_DATA, GATE_FLAG_PADDED, 1, 1 + 5 + 3 + 7);
	put("\7\0\0\0\0\4abc", 9);
	put("\0\0\0\0\0\0\0", 7);
	cr_assert_eq(send_in(&f, 1), GATE_PASS);
	cr_assert_eq(f.n_waiting, 1);
	put_head(GATE_DATA, GATE_FLAG_PADDED, 1, 2);
	put("\0d", 2);
	passes(&f);
	cr_assert(f.n_waiting == 0 && f.charged == 0);
	put_head(GATE_DATA, GATE_FLAG_PADDED, 1, 3);
	put("\3xx", 3);
	closed_by(&f, "http2");
}

Test(gate, header_blocks_have_a_length)
{
	struct gate_flow f;

	flow_begin(&f);
	put_frame(GATE_HEADERS, 0, 1, 500);
	put_frame(GATE_CONTINUATION, GATE_FLAG_END_HEADERS, 1, 500);
	put_frame(GATE_HEADERS, 0, 3, 500);
	passes(&f);
	put_head(GATE_CONTINUATION, 0, 3, 501); /* judged by its head */
	closed_by(&f, "grpc_header_bytes");
}

Test(gate, header_blocks_have_few_frames)
{
	struct gate_flow f;

	flow_begin(&f);
	put_frame(GATE_HEADERS, 0, 1, 5);
	put_frame(GATE_CONTINUATION, 0, 1, 0);
	put_frame(GATE_CONTINUATION, 0, 1, 0);
	passes(&f);
	put_frame(GATE_CONTINUATION, 0, 1, 0);
	closed_by(&f, "grpc_continuations");
}

Test(gate, calls_before_attach_wait_for_each_other)
{
	struct gate_flow f;

	flow_begin(&f);
	put_headers(1);
	put_headers(3);
	put_headers(5);
	cr_assert_eq(send_all(&f), GATE_STALL);
	cr_assert(f.n_streams == 2 && wire.n == 19 && f.wait == GATE_WAIT_OWN);
	cr_assert_eq(send_all(&f), GATE_STALL);
	answer(&f, 3);
	passes(&f);
	cr_assert(f.n_streams == 2 && f.wait == GATE_WAIT_NONE);
	put_headers(7);
	cr_assert_eq(send_all(&f), GATE_STALL);
	gate_flow_attach(&f);
	passes(&f);
	put_headers(9);
	passes(&f);
	put_headers(11); /* more than were agreed */
	closed_by(&f, "streams");
}

Test(gate, half_messages_wait)
{
	struct gate_flow f;

	flow_begin(&f);
	put_headers(1);
	put_message(1, 0, 40000, 16379);
	put_headers(3);
	put_message(3, 0, 16379 + 100, 16379);
	passes(&f);
	cr_assert_eq(f.charged, 32768);
	put_frame(GATE_DATA, 0, 3, 99); /* not its last one */
	cr_assert_eq(send_all(&f), GATE_STALL);
	wire.n = 0;
	put_frame(GATE_DATA, GATE_FLAG_END_STREAM, 3, 100); /* the last one leaves nothing */
	passes(&f);
	cr_assert_eq(f.charged, 16384);
	put_frame(GATE_DATA, 0, 1, 16384);
	passes(&f);
	put_frame(GATE_DATA, 0, 1, 1000); /* alone, it waits for nobody */
	closed_by(&f, "grpc_unattached_bytes");
}

Test(gate, small_messages_do_not_wait)
{
	struct gate_flow f;

	flow_begin(&f);
	user.used = total.used = 1 << 30; /* all that there is, and more */
	total.turn = user.turn = &user;
	put_headers(1);
	put_message(1, 0, 100, 100);
	put_headers(3);
	put_message(3, 0, 10000, 10000);
	cr_assert_eq(send_all(&f), GATE_STALL);
	cr_assert(f.n_streams == 2 && f.n_waiting == 1 && f.wait == GATE_WAIT_OTHERS);
	/* and the time for which others kept it waiting is not its own */
	now += 5000000;
	cr_assert_eq(gate_flow_tick(&f, now), GATE_PASS);
	user.used = total.used = 0;
	user.turn = total.turn = NULL;
	passes(&f);
	cr_assert_eq(gate_flow_tick(&f, now + 900000), GATE_PASS);
	cr_assert_eq(gate_flow_tick(&f, now + 1100000), GATE_PASS); /* it was whole */
	gate_flow_deinit(&f);
}

/* Of one user: one has the turn of all and needs the user's, the other the other way round. */
Test(gate, turns_are_not_waited_for_in_a_circle)
{
	struct gate_flow a, b;
	size_t others;

	flow_begin(&a);
	gate_flow_init(&b, &small_limits, &user, &total, now);
	gate_flow_attach(&a);
	gate_flow_attach(&b);
	total.used = small_limits.total_bytes; /* other users' */
	put_headers(1);
	put_message(1, 0, 60000, 10000);
	passes(&a);
	cr_assert_eq(total.turn, &a);
	others = user.limit - user.used;
	user.used += others; /* more of its connections */
	put("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 24);
	put_headers(1);
	put_message(1, 0, 60000, 100);
	passes(&b);
	put_frame(GATE_DATA, 0, 1, 10000);
	cr_assert_eq(send_all(&b), GATE_STALL);
	wire.n = 0;
	put_frame(GATE_DATA, 0, 1, 10000);
	passes(&a);
	user.used -= others;
	total.used -= small_limits.total_bytes;
	gate_flow_deinit(&a);
	gate_flow_deinit(&b);
	cr_assert(user.used == 0 && total.used == 0 && !user.turn && !total.turn);
}

Test(gate, a_message_has_a_deadline)
{
	struct gate_flow f;

	flow_begin(&f);
	put_headers(1);
	passes(&f);
	cr_assert_eq(gate_flow_tick(&f, now + 900000), GATE_PASS);
	cr_assert_eq(gate_flow_tick(&f, now + 1100000), GATE_CLOSE);
	cr_assert_str_eq(f.breach.limit, "grpc_message_timeout_ms");
	gate_flow_deinit(&f);
}

Test(gate, who_says_nothing_before_attach_is_closed)
{
	struct gate_flow f;

	flow_begin(&f);
	passes(&f);
	cr_assert_eq(gate_flow_tick(&f, now + 1900000), GATE_PASS);
	cr_assert_eq(gate_flow_tick(&f, now + 2100000), GATE_CLOSE);
	cr_assert_str_eq(f.breach.limit, "grpc_idle_timeout_ms");
	gate_flow_attach(&f);
	cr_assert_eq(gate_flow_tick(&f, now + 2100000), GATE_PASS);
	gate_flow_deinit(&f);
}

static void flood(const char *limit, unsigned type, unsigned flags, uint32_t stream, size_t n,
		  unsigned most)
{
	struct gate_flow f;

	flow_begin(&f);
	put_headers(1);
	passes(&f);
	for (unsigned i = 0; i < most; i++)
		put_frame(type, flags, stream, n);
	passes(&f);
	now += 1000000; /* a second later a second's worth may come again */
	put_frame(type, flags, stream, n);
	passes(&f);
	for (unsigned i = 0; i < most; i++)
		put_frame(type, flags, stream, n);
	closed_by(&f, limit);
}

Test(gate, floods)
{
	flood("grpc_pings_per_s", GATE_PING, 0, 0, 8, 8);
	flood("grpc_pings_per_s", GATE_PING, GATE_FLAG_ACK, 0, 8, 8);
	flood("grpc_settings_per_s", GATE_SETTINGS, 0, 0, 6, 4);
	flood("grpc_control_per_s", GATE_SETTINGS, GATE_FLAG_ACK, 0, 0, 40);
	flood("grpc_control_per_s", GATE_WINDOW_UPDATE, 0, 1, 4, 40);
	flood("grpc_control_per_s", GATE_PRIORITY, 0, 9, 5, 40);
	flood("grpc_control_per_s", GATE_DATA, 0, 1, 0, 40);
	flood("grpc_control_per_s", GATE_GOAWAY, 0, 0, 8, 40);
	flood("grpc_control_per_s", 77, 0, 3, 100, 40);
	/* a tenth of it before Attach */
	flood("grpc_resets_per_s", GATE_RST, 0, 1, 4, 4);
}

/* What HTTP/2 does not allow, or no client of gRPC does. */
Test(gate, wrong_frames)
{
	static const struct {
		unsigned type, flags;
		uint32_t stream;
		size_t n;
	} wrong[] = {
		{ GATE_HEADERS, 4, 2, 10 },      { GATE_HEADERS, 4, 0, 10 },
		{ GATE_HEADERS, 4, 1, 10 },      { GATE_HEADERS, 5, 1, 10 },
		{ GATE_CONTINUATION, 4, 1, 10 }, { GATE_CONTINUATION, 4, 0, 10 },
		{ GATE_DATA, 0, 3, 300 },        { GATE_DATA, 0, 0, 300 },
		{ GATE_DATA, 0, 2, 300 },        { GATE_PUSH_PROMISE, 4, 1, 10 },
		{ GATE_PING, 0, 1, 8 },          { GATE_PING, 0, 0, 7 },
		{ GATE_SETTINGS, 0, 0, 7 },      { GATE_SETTINGS, 0, 1, 6 },
		{ GATE_SETTINGS, 1, 0, 6 },      { GATE_RST, 0, 0, 4 },
		{ GATE_RST, 0, 1, 5 },           { GATE_RST, 0, 3, 4 },
		{ GATE_WINDOW_UPDATE, 0, 0, 5 }, { GATE_WINDOW_UPDATE, 0, 3, 4 },
		{ GATE_PRIORITY, 0, 0, 5 },      { GATE_PRIORITY, 0, 1, 4 },
		{ GATE_GOAWAY, 0, 0, 7 },        { GATE_GOAWAY, 0, 1, 8 },
	};

	for (size_t i = 0; i < ARRAY_SIZE(wrong); i++) {
		struct gate_flow f;

		flow_begin(&f);
		put_headers(1);
		passes(&f);
		put_frame(wrong[i].type, wrong[i].flags, wrong[i].stream, wrong[i].n);
		closed_by(&f, "http2");
	}
}

Test(gate, a_frame_longer_than_agreed)
{
	struct gate_flow f;

	flow_begin(&f);
	put_head(GATE_DATA, 0, 1, 16385);
	closed_by(&f, "frame_bytes");
}

Test(gate, a_frame_inside_a_header_block)
{
	struct gate_flow f;

	flow_begin(&f);
	put_frame(GATE_HEADERS, 0, 1, 10);
	put_frame(GATE_PING, 0, 0, 8);
	closed_by(&f, "http2");
}

Test(gate, another_preface)
{
	struct gate_flow f;

	flow_begin(&f);
	wire.data[23] = 'x';
	cr_assert_eq(send_in(&f, 5), GATE_CLOSE);
	gate_flow_deinit(&f);
}

/* Core may have ended a stream that the client still sends on: nobody's fault. */
Test(gate, a_stream_that_core_has_ended)
{
	struct gate_flow f;

	flow_begin(&f);
	put_headers(1);
	put_message(1, 0, 50000, 10000);
	passes(&f);
	answer(&f, 1);
	cr_assert(f.charged == 0 && f.n_streams == 0);
	put_frame(GATE_DATA, 0, 1, 16384);
	put_frame(GATE_DATA, GATE_FLAG_END_STREAM, 1, 0);
	put_frame(GATE_WINDOW_UPDATE, 0, 1, 4);
	put_frame(GATE_RST, 0, 1, 4);
	passes(&f);
	cr_assert(f.charged == 0 && f.n_streams == 0);
	gate_flow_deinit(&f);
}

/* Calls that are answered cost no time; calls that pile up come one after the other. */
Test(gate, calls_ahead_of_their_answers_are_paced)
{
	static struct gate_limits many;
	struct gate_flow f;
	unsigned opened;

	many = small_limits;
	many.streams = 1000;
	flow_begin(&f);
	f.limits = &many;
	gate_flow_attach(&f);
	for (uint32_t id = 1; id < 250; id += 2) {
		put_headers(id);
		passes(&f);
		answer(&f, id);
	}
	for (uint32_t i = 200; i < 500; i++)
		put_headers(1 + 2 * i);
	cr_assert_eq(send_all(&f), GATE_STALL);
	cr_assert(f.wait == GATE_WAIT_PACE);
	opened = f.n_streams;
	cr_assert(opened >= GATE_OPEN_AHEAD && opened <= GATE_OPEN_AHEAD + 1, "%u", opened);
	now += 4 * GATE_OPEN_US;
	cr_assert_eq(send_all(&f), GATE_STALL);
	cr_assert_eq(f.n_streams, opened + 4);
	gate_flow_deinit(&f);
}
