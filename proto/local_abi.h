/*
 * The local channel, SHD1: the second protocol on the unix socket, beside gRPC.
 *
 * A stream of frames, fixed-width, in the byte order of the machine (both ends
 * are on one node). The first frame is HELLO, which binds the channel to a
 * session by the token that Attach returned; its first four bytes are what the
 * listener peeks at. Descriptors travel only from the daemon to the client, one
 * per SLAB or RING frame, attached to the frame's first byte.
 */
#ifndef SHARDD_LOCAL_ABI_H
#define SHARDD_LOCAL_ABI_H

#include <assert.h>
#include <stdint.h>

#define SHD1_MAGIC       0x31444853u /* "SHD1" read as a little-endian word */
#define SHD1_VERSION     1u
#define SHD1_TOKEN_BYTES 16u
#define SHD1_MAX_FRAME   512u /* header included */

enum shd1_type {
	SHD1_HELLO = 1,    /* client: token */
	SHD1_WELCOME = 2,  /* daemon: the channel is bound */
	SHD1_GET_SLAB = 3, /* client: asks for a slab */
	SHD1_SLAB = 4,     /* daemon: the slab, with one descriptor */
	SHD1_ERROR = 5,    /* daemon: why a request failed; the channel stays open unless fatal */
	SHD1_GET_RING = 6, /* client: asks for a part of the session's ring; creates the ring */
	SHD1_RING = 7,     /* daemon: the part of the ring, with one descriptor */
};

/* The header of every frame. */
struct shd1_header {
	uint32_t magic; /* SHD1_MAGIC */
	uint16_t type;  /* enum shd1_type */
	uint16_t bytes; /* of the whole frame, header included */
	uint32_t tag;   /* chosen by the client; copied into the answer */
	uint32_t zero;  /* 0 */
};

struct shd1_hello {
	struct shd1_header h;
	uint32_t version; /* the newest that the client speaks */
	uint32_t zero;
	uint8_t token[SHD1_TOKEN_BYTES];
};

struct shd1_welcome {
	struct shd1_header h;
	uint32_t version; /* the version of this channel */
	uint32_t zero;
	uint64_t session;
};

struct shd1_get_slab {
	struct shd1_header h;
	uint32_t slab;
	uint32_t zero;
};

struct shd1_slab {
	struct shd1_header h;
	uint32_t slab;
	uint32_t writable; /* 1: map for writing; 0: the descriptor is read-only */
	uint64_t bytes;    /* of the slab */
	/* 1: a daemon that takes this one's jobs over has the same memory under the same number; 0:
	 * it ends with this daemon, and the number may be another slab's then. */
	uint32_t lasts;
	/* 1: pages of the host, also on a node whose slabs are memory of GPUs: for mmap. */
	uint32_t pages;
};

enum shd1_ring_part {
	SHD1_RING_MEMORY = 0, /* a memfd, see ring_abi.h; requested first, once per session */
	SHD1_RING_EVENT = 1,  /* an eventfd: written to wake the daemon */
};

struct shd1_get_ring {
	struct shd1_header h;
	uint32_t part; /* enum shd1_ring_part */
	uint32_t zero;
};

struct shd1_ring {
	struct shd1_header h;
	uint32_t part;
	uint32_t zero;
	uint64_t bytes; /* of the memory */
};

struct shd1_error {
	struct shd1_header h;
	uint32_t code;  /* a gRPC status code */
	uint32_t fatal; /* 1: the daemon closes the channel after this frame */
	char text[256]; /* one sentence, zero-terminated */
};

static_assert(sizeof(struct shd1_header) == 16, "header");
static_assert(sizeof(struct shd1_hello) == 40, "hello");
static_assert(sizeof(struct shd1_welcome) == 32, "welcome");
static_assert(sizeof(struct shd1_get_slab) == 24, "get_slab");
static_assert(sizeof(struct shd1_slab) == 40, "slab");
static_assert(sizeof(struct shd1_get_ring) == 24, "get_ring");
static_assert(sizeof(struct shd1_ring) == 32, "ring");
static_assert(sizeof(struct shd1_error) == 280, "error");
static_assert(sizeof(struct shd1_error) <= SHD1_MAX_FRAME, "frame limit");

#endif
