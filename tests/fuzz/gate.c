/*
 * Arbitrary bytes as both directions of a gRPC connection, in arbitrary pieces.
 *
 * The first byte says how many of the next bytes are lengths of pieces. The rest is records:
 * a byte that says from whom, and for how long nothing came before; a byte of length; so
 * many bytes. However the client's bytes are cut, the same must pass and the same verdict be
 * given, at the same byte; what is charged is what the streams say, never more than what
 * came allows, and all of it is given back.
 */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "core/check.h"
#include "net/gate_flow.h"

static const struct gate_limits limits = {
	.header_bytes = 200,
	.continuations = 2,
	.frame_bytes = 1000,
	.streams = 6,
	.unattached_streams = 3,
	.unattached_bytes = 8192,
	.connection_bytes = 16384,
	.total_bytes = 20000,
	.message_timeout_ms = 1000,
	.idle_timeout_ms = 1000,
	.resets_per_s = 10,
	.pings_per_s = 1,
	.settings_per_s = 1,
	.control_per_s = 4,
};

struct run {
	struct gate_flow flow;
	struct gate_purse user, total;
	enum gate_verdict verdict;
	size_t passed; /* of the client's bytes */
	uint64_t now;
	uint8_t *kept; /* stalled */
	size_t n_kept;
};

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

static void check_sums(const struct run *r)
{
	uint64_t charged = 0;
	uint32_t waiting = 0;

	for (uint32_t i = 0; i < r->flow.n_streams; i++) {
		const struct gate_stream *s = &r->flow.streams[i];

		CHECK(i == 0 || s[-1].id < s->id);
		CHECK(s->id % 2 == 1 && s->id <= r->flow.last_id);
		charged += s->charged;
		waiting += !s->whole;
	}
	CHECK(charged == r->flow.charged && waiting == r->flow.n_waiting);
	CHECK(r->user.used == charged && r->total.used == charged);
	CHECK(charged <= (r->passed / GATE_HEAD_BYTES + 1) * GATE_FRAME_COST);
	CHECK(charged <= (r->flow.attached ? limits.connection_bytes : limits.unattached_bytes) +
				 limits.streams * GATE_FRAME_COST);
	CHECK(r->flow.n_streams <= limits.streams);
}

/* Give @n bytes that were not given yet. */
static void up_piece(struct run *r, const uint8_t *data, size_t n)
{
	/* exactly as long as what is in it, so that a read behind it is seen */
	size_t all = r->n_kept + n, passed = 0;
	uint8_t *buf = malloc(all ? all : 1);

	CHECK(buf);
	if (r->n_kept)
		memcpy(buf, r->kept, r->n_kept);
	if (n)
		memcpy(buf + r->n_kept, data, n);
	r->verdict = gate_flow_up(&r->flow, buf, all, r->now, &passed);
	CHECK(passed <= all && (r->verdict != GATE_PASS || passed == all));
	r->passed += passed;
	free(r->kept);
	r->n_kept = all - passed;
	r->kept = malloc(r->n_kept ? r->n_kept : 1);
	CHECK(r->kept);
	memcpy(r->kept, buf + passed, r->n_kept);
	free(buf);
	check_sums(r);
}

static void up(struct run *r, const uint8_t *data, size_t n, const uint8_t *lengths,
	       size_t n_lengths)
{
	for (size_t at = 0, i = 0; at < n && r->verdict != GATE_CLOSE; i++) {
		size_t piece = n_lengths ? lengths[i % n_lengths] % 32 + 1u : n;

		if (piece > n - at)
			piece = n - at;
		up_piece(r, data + at, piece);
		at += piece;
	}
}

static void run_begin(struct run *r)
{
	static const char preface[] = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

	memset(r, 0, sizeof(*r));
	r->now = 1000000;
	r->user.limit = 16384;
	gate_flow_init(&r->flow, &limits, &r->user, &r->total, r->now);
	up_piece(r, (const uint8_t *)preface, sizeof(preface) - 1);
	CHECK(r->verdict == GATE_PASS);
}

static void run_records(struct run *r, const uint8_t *data, size_t n, const uint8_t *lengths,
			size_t n_lengths)
{
	while (n >= 2 && r->verdict != GATE_CLOSE) {
		uint8_t what = data[0];
		size_t bytes = data[1] < n - 2 ? data[1] : n - 2;

		r->now += (uint64_t)(what >> 3) * 20000u;
		if ((what & 7) == 7)
			gate_flow_down(&r->flow, data + 2, bytes, r->now);
		else if ((what & 7) == 6)
			gate_flow_attach(&r->flow);
		else
			up(r, data + 2, bytes, lengths, n_lengths);
		check_sums(r);
		data += 2 + bytes;
		n -= 2 + bytes;
	}
	if (r->verdict != GATE_CLOSE)
		r->verdict =
			gate_flow_tick(&r->flow, r->now) == GATE_CLOSE ? GATE_CLOSE : r->verdict;
	if (r->verdict == GATE_CLOSE)
		CHECK(r->flow.breach.limit && r->flow.breach.what);
}

static void run_end(struct run *r)
{
	gate_flow_deinit(&r->flow);
	CHECK(r->user.used == 0 && r->total.used == 0 && !r->user.turn && !r->total.turn);
	free(r->kept);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
	size_t n_lengths = n > 0 ? data[0] % 8 : 0;
	struct run whole, cut;

	if (n < 1 + n_lengths)
		return 0;
	run_begin(&whole);
	run_records(&whole, data + 1 + n_lengths, n - 1 - n_lengths, NULL, 0);
	run_begin(&cut);
	run_records(&cut, data + 1 + n_lengths, n - 1 - n_lengths, data + 1, n_lengths);
	/* the begin of a head passes before the head is judged */
	CHECK(whole.verdict == cut.verdict &&
	      whole.passed - whole.flow.up.n_head == cut.passed - cut.flow.up.n_head);
	CHECK(whole.flow.charged == cut.flow.charged);
	CHECK(whole.flow.n_streams == cut.flow.n_streams);
	CHECK(whole.flow.last_id == cut.flow.last_id);
	CHECK(whole.flow.wait == cut.flow.wait);
	if (whole.verdict == GATE_CLOSE)
		CHECK(strcmp(whole.flow.breach.limit, cut.flow.breach.limit) == 0);
	run_end(&whole);
	run_end(&cut);
	return 0;
}
