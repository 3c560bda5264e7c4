/*
 * SHD1 frames as bytes: pure functions, no descriptor, no memory. Shared by the local channel and
 * the fuzzer. Any thread.
 */
#ifndef SHARDD_NET_LOCAL_CODEC_H
#define SHARDD_NET_LOCAL_CODEC_H

#include <stddef.h>
#include <stdint.h>

#include "core/fault.h"
#include "core/res.h"
#include "local_abi.h"

union local_frame {
	struct shd1_header h;
	struct shd1_hello hello;
	struct shd1_get_slab get_slab;
	struct shd1_get_ring get_ring;
	uint8_t bytes[SHD1_MAX_FRAME];
};

/* Look at @n bytes from a client. RES_DONE: the first frame is copied to @ret, valid in every
 * field, and its size to @ret_bytes. RES_WAIT: it is not complete yet. RES_FAILED: the stream is
 * broken, the cause is in @f. */
enum res local_codec_next(const uint8_t *data, size_t n, union local_frame *ret, size_t *ret_bytes,
			  struct fault *f);

/* Fill an SHD1_ERROR frame from @f. @code: gRPC status number. */
void local_codec_error(struct shd1_error *e, uint32_t tag, uint32_t code, uint32_t fatal,
		       const struct fault *f);

#endif
