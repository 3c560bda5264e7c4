/*
 * Arbitrary bytes as a client's side of a local channel, in arbitrary pieces.
 *
 * The first byte says how many of the next bytes are lengths of pieces; the rest
 * is the stream. However it is cut, the same frames must come out and the same
 * end must be found; every frame must be valid in every field.
 */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "core/check.h"
#include "net/local_codec.h"

struct outcome {
	uint32_t n_frames;
	uint32_t tags; /* of all frames, in order, mixed */
	size_t bytes;  /* taken by whole frames */
	enum res end;  /* RES_WAIT or RES_FAILED */
};

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

static void check_frame(const union local_frame *frame, size_t size, size_t n)
{
	CHECK(size <= n && size == frame->h.bytes);
	CHECK(frame->h.magic == SHD1_MAGIC && frame->h.zero == 0);
	if (frame->h.type == SHD1_HELLO) {
		CHECK(size == sizeof(frame->hello));
		CHECK(frame->hello.version > 0 && frame->hello.zero == 0);
	} else {
		/* laid out alike */
		CHECK(frame->h.type == SHD1_GET_SLAB || frame->h.type == SHD1_GET_RING);
		CHECK(size == sizeof(frame->get_slab) && frame->get_slab.zero == 0);
	}
}

/* Take all whole frames at the begin of @n bytes. Return: bytes taken. */
static size_t take_frames(const uint8_t *data, size_t n, struct outcome *o)
{
	struct fault f = FAULT_NULL;
	union local_frame frame;
	size_t at = 0, size = 0;

	while ((o->end = local_codec_next(data + at, n - at, &frame, &size, &f)) == RES_DONE) {
		check_frame(&frame, size, n - at);
		o->n_frames++;
		o->tags = o->tags * 31 + frame.h.tag;
		at += size;
	}
	if (o->end == RES_FAILED) {
		struct shd1_error e;

		CHECK(f.code == FAULT_INVALID && f.text[0] != '\0');
		local_codec_error(&e, 0, 3, 1, &f);
		CHECK(e.text[sizeof(e.text) - 1] == '\0');
	}
	o->bytes += at;
	return at;
}

/* As local.c does it: pieces are added to a buffer, whole frames taken from it. The
 * buffer has exactly the size of what is in it, so that a read behind it is seen. */
static struct outcome in_pieces(const uint8_t *lengths, size_t n_lengths, const uint8_t *data,
				size_t n)
{
	struct outcome o = { .end = RES_WAIT };
	uint8_t *buf = NULL;
	size_t have = 0, at = 0;

	for (size_t i = 0; at < n && o.end == RES_WAIT; i++) {
		size_t piece = n_lengths ? lengths[i % n_lengths] + 1u : n, taken;

		if (piece > n - at)
			piece = n - at;
		buf = realloc(buf, have + piece);
		CHECK(buf);
		memcpy(buf + have, data + at, piece);
		have += piece;
		at += piece;
		taken = take_frames(buf, have, &o);
		have -= taken;
		memmove(buf, buf + taken, have);
	}
	free(buf);
	return o;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
	size_t n_lengths = n > 0 ? data[0] % 8 : 0;
	struct outcome whole, cut;

	if (n < 1 + n_lengths)
		return 0;
	whole = in_pieces(NULL, 0, data + 1 + n_lengths, n - 1 - n_lengths);
	cut = in_pieces(data + 1, n_lengths, data + 1 + n_lengths, n - 1 - n_lengths);
	CHECK(whole.n_frames == cut.n_frames);
	CHECK(whole.tags == cut.tags);
	CHECK(whole.bytes == cut.bytes);
	CHECK(whole.end == cut.end);
	return 0;
}
