#include "net/local_codec.h"

#include <string.h>

#include "core/check.h"

/* Bytes of a frame a client may send; 0: not one of them. */
static size_t local_codec_client_frame_bytes(uint16_t type)
{
	switch (type) {
	case SHD1_HELLO:
		return sizeof(struct shd1_hello);
	case SHD1_GET_SLAB:
		return sizeof(struct shd1_get_slab);
	case SHD1_GET_RING:
		return sizeof(struct shd1_get_ring);
	default:
		return 0;
	}
}

/* A stream with a wrong start is refused at its first wrong byte, not after a wait for more. */
static int local_codec_check_magic(const uint8_t *data, size_t n, struct fault *f)
{
	const uint32_t magic = SHD1_MAGIC;
	size_t seen = n < sizeof(magic) ? n : sizeof(magic);

	if (memcmp(data, &magic, seen) == 0)
		return 0;
	return fault_set(f, FAULT_INVALID, "magic",
			 "a frame of the local channel must begin with SHD1");
}

static int local_codec_check_header(const struct shd1_header *h, struct fault *f)
{
	size_t bytes = local_codec_client_frame_bytes(h->type);

	if (bytes == 0)
		return fault_set(f, FAULT_INVALID, "type",
				 "type %u is not a frame a client may send", h->type);
	if (h->bytes != bytes)
		return fault_set(f, FAULT_INVALID, "bytes",
				 "a frame of type %u has %zu bytes, not %u", h->type, bytes,
				 h->bytes);
	if (h->zero != 0)
		return fault_set(f, FAULT_INVALID, "zero", "the header's last word must be zero");
	return 0;
}

static int local_codec_check_body(const union local_frame *frame, struct fault *f)
{
	/* a GET_RING is laid out as a GET_SLAB */
	uint32_t zero = frame->h.type == SHD1_HELLO ? frame->hello.zero : frame->get_slab.zero;

	if (frame->h.type == SHD1_HELLO && frame->hello.version == 0)
		return fault_set(f, FAULT_INVALID, "version", "version 0 of SHD1 does not exist");
	if (zero != 0)
		return fault_set(f, FAULT_INVALID, "zero", "a reserved word must be zero");
	return 0;
}

enum res local_codec_next(const uint8_t *data, size_t n, union local_frame *ret, size_t *ret_bytes,
			  struct fault *f)
{
	union local_frame frame = { .bytes = { 0 } };

	if (n > 0 && local_codec_check_magic(data, n, f))
		return RES_FAILED;
	if (n < sizeof(frame.h))
		return RES_WAIT;
	memcpy(&frame.h, data, sizeof(frame.h));
	if (local_codec_check_header(&frame.h, f))
		return RES_FAILED;
	CHECK(frame.h.bytes <= sizeof(frame));
	if (n < frame.h.bytes)
		return RES_WAIT;
	memcpy(frame.bytes, data, frame.h.bytes);
	if (local_codec_check_body(&frame, f))
		return RES_FAILED;
	*ret = frame;
	*ret_bytes = frame.h.bytes;
	return RES_DONE;
}

void local_codec_error(struct shd1_error *e, uint32_t tag, uint32_t code, uint32_t fatal,
		       const struct fault *f)
{
	/* The whole struct is sent, so it must not contain bytes of the stack. */
	memset(e, 0, sizeof(*e));
	e->h.magic = SHD1_MAGIC;
	e->h.type = SHD1_ERROR;
	e->h.bytes = sizeof(*e);
	e->h.tag = tag;
	e->code = code;
	e->fatal = fatal;
	/* what does not fit is cut off */
	memcpy(e->text, f->text, strnlen(f->text, sizeof(e->text) - 1));
}
