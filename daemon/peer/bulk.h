/*
 * Bytes of another node: the node that needs them fetches them from the one that has them.
 *
 * A fetch is a stream of chunks (PeerService.Fetch) over a connection that links never use, so that no
 * ping or message waits behind it. Fetches of one node from one address share a connection, which is
 * closed 1 s after the last one. A node may fetch where it may have a link: the same certificates, names, list
 * of allowed nodes, and greeting. Each chunk has a checksum (CRC-32C).
 *
 * Files are read and written by threads of their own ("shardd-bulk"), which also compute the checksums.
 * So a descriptor that is lent here is used on other threads until the callback that gives it back.
 *
 * Loop thread only. A callback runs on the loop, never inside a function that the owner calls.
 */
#ifndef SHARDD_PEER_BULK_H
#define SHARDD_PEER_BULK_H

#include <stdint.h>

#include "core/fault.h"
#include "peer/peer.h"

#define BULK_KEY_BYTES   512u                /* the longest key, without its end */
#define BULK_CHUNK_BYTES (UINT64_C(1) << 20) /* of data, at most */
#define BULK_MAX_SERVED  64u                 /* streams that others fetch at once */
#define BULK_MAX_OF_NODE 16u                 /* of these, of one node */
#define BULK_MAX_SILENT  64u                 /* streams that have not said what they fetch */
#define BULK_MAX_OF_HOST 16u                 /* of these, from one IP address */
#define BULK_MAX_FETCHES 64u                 /* that this node fetches at once */
#define BULK_STALL_US    UINT64_C(30000000)  /* a node that takes no chunk for so long is ended */

/* ------------------------------------------------------------------------- the node that has them */

/* What is behind a key. */
struct bulk_source {
	int fd;        /* to pread from; borrowed until bulk_ops.close */
	uint64_t size; /* bytes in it, from 0 on; they do not change meanwhile */
	void *data;    /* the owner's own */
};

/* Borrowed arguments are valid until the callback returns. */
struct bulk_ops {
	/* Node @node asks for @key (printable ASCII). @ret: zeroed.
	 * Return: 0 or a fault code, which the other node gets with the text; FAULT_NOT_FOUND if there
	 * is nothing behind it. */
	int (*open)(void *userdata, const char *node, const char *key, struct bulk_source *ret,
		    struct fault *f);
	/* Does the owner still have @source for others? Asked at each tick; if not, the stream ends
	 * (ABORTED): a node that takes its bytes slowly must not keep them here. */
	bool (*keeps)(void *userdata, const struct bulk_source *source);
	/* Nothing of @source is used any more. Once for each open that returned 0, also when the links
	 * are closed: before the callback of peers_close. */
	void (*close)(void *userdata, struct bulk_source *source);
};

/* Serve fetches from now on, until peers_close. Once. Before, each fetch is refused (UNAVAILABLE).
 * @ops: borrowed. */
void bulk_serve(struct peers *ps, const struct bulk_ops *ops, void *userdata);

/* ---------------------------------------------------------------------- the node that needs them */

struct bulk_fetch; /* valid until its callback returns */

struct bulk_want {
	const char *node;    /* who has them */
	const char *address; /* HOST:PORT of its links */
	const char *key;     /* 1 to BULK_KEY_BYTES bytes of printable ASCII */
	uint64_t bytes; /* how many there are, at least one: the other node must have as many */
	int fd;         /* to pwrite to, from 0 on; borrowed until the callback */
	/* It ends if no chunk came for so long, connecting included: longer than a chunk of 1 MiB takes. */
	uint64_t idle_us;
};

/* It is over. @f: NULL: @bytes are written, all of them; else why not, with the names of node and key, and
 * @bytes were received in order before. Exactly once, also after bulk_cancel (CANCELLED) and when the links
 * are closed (UNAVAILABLE: before the callback of peers_close). */
typedef void (*bulk_done_cb)(void *userdata, const struct fault *f, uint64_t bytes);

/* Begin. All of @want is copied but its descriptor.
 * Return: 0 or a fault code: INVALID, DENIED (not among the allowed nodes; plaintext), EXHAUSTED,
 * UNAVAILABLE (the links are closed). */
int bulk_fetch(struct peers *ps, const struct bulk_want *want, bulk_done_cb done, void *userdata,
	       struct bulk_fetch **ret, struct fault *f);
/* Its callback comes soon. Safe twice. */
void bulk_cancel(struct bulk_fetch *x);
/* That were written so far. */
uint64_t bulk_bytes(const struct bulk_fetch *x);

#endif
