/*
 * The ring: shared memory of a trainer and the daemon for the ops of one session.
 *
 * It has two queues with the same number of fixed-width entries: submissions, which the client
 * writes and the daemon reads, and completions, which the daemon writes and the client reads.
 * Head and tail count entries without end and wrap at 2^32; entry i is at i & (entries - 1). A
 * message that does not fit into an entry is in the long piece with the same index.
 *
 *   client                                    daemon
 *   entry, then sq_tail = t (release)   --->  sq_tail (acquire), entry copied once
 *   sq_head (acquire): room             <---  sq_head = h (release)
 *   cq_tail (acquire), entry            <---  entry, then cq_tail = t (release)
 *   cq_head = h (release)               --->  cq_head (acquire): room
 *
 * A side with nothing to do sets its sleep flag, checks the queue once more, and then sleeps. A
 * side that has written something checks whether the other side sleeps. Each side has a full
 * barrier between its store and its load, so at least one side sees the other's store.
 *
 *   daemon: daemon_sleeps = 1; barrier; sq_tail?   client: sq_tail; barrier; daemon_sleeps?
 *           ... polls its eventfd                          1: set it to 0, write the eventfd
 *   client: client_sleeps = 1; barrier; cq_tail?   daemon: cq_tail; barrier; client_sleeps?
 *           ... futex wait while it is 1                   1: set it to 0, futex wake
 *
 * The daemon takes no more submissions than it has room for completions, so a completion is
 * never lost and never waits. The daemon trusts nothing that the client writes here.
 */
#ifndef SHARDD_RING_ABI_H
#define SHARDD_RING_ABI_H

#include <assert.h>
#include <stdalign.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>

#define RING_MAGIC       0x52444853u /* "SHDR" read as a little-endian word */
#define RING_VERSION     2u
#define RING_MIN_ENTRIES 64u
#define RING_MAX_ENTRIES 4096u
#define RING_SHORT_BYTES 48u   /* longest message inside an entry */
#define RING_LONG_BYTES  1024u /* longest message in a long piece */

/* A submission or a completion. */
struct ring_entry {
	uint64_t tag;   /* chosen by the client; copied into the completion */
	uint16_t op;    /* submission: RING_NOP, or the method's number (methods.h) */
	uint16_t code;  /* completion: a gRPC status code */
	uint32_t bytes; /* of the message: a request, a reply, or with a code an ErrorInfo */
	uint8_t data[RING_SHORT_BYTES]; /* the packed message if it fits */
};

#define RING_NOP 0u /* does nothing; the daemon answers it */

/* At the start of the memory. */
struct ring_shared {
	/* written by the daemon before the client sees the memory */
	uint32_t magic;
	uint32_t version;
	uint32_t entries; /* per queue: a power of two */
	uint32_t zero;
	uint64_t bytes;                    /* of the whole memory */
	uint64_t sq, cq, sq_long, cq_long; /* offsets of the queues and long pieces */

	/* written by the client */
	alignas(64) _Atomic uint32_t sq_tail;
	alignas(64) _Atomic uint32_t cq_head;
	/* written by the daemon */
	alignas(64) _Atomic uint32_t sq_head;
	alignas(64) _Atomic uint32_t cq_tail;
	_Atomic uint32_t closed;  /* 1: the session has ended; nothing more is taken or posted */
	_Atomic uint32_t spin_us; /* how long to poll before sleeping; 0: cores are scarce */
	/* written by both */
	alignas(64) _Atomic uint32_t daemon_sleeps;
	alignas(64) _Atomic uint32_t client_sleeps; /* a futex */
	/* Ops to cancel: bit t%64 of word t/64 is the unanswered op with the tag t. The client sets
	 * it, then writes the eventfd; it clears it before it uses the tag again. The daemon clears
	 * it when it cancels the op. A cancel needs no entry, so a full queue does not delay it. */
	alignas(64) _Atomic uint64_t cancels[RING_MAX_ENTRIES / 64];
};

static_assert(sizeof(struct ring_entry) == 64, "entry");
static_assert(offsetof(struct ring_entry, data) == 16, "entry");
static_assert(offsetof(struct ring_shared, sq_tail) == 64, "first line");
static_assert(offsetof(struct ring_shared, cq_tail) == 256, "the daemon's lines");
static_assert(offsetof(struct ring_shared, cancels) == 448, "shared");
static_assert(sizeof(struct ring_shared) == 960, "shared");
static_assert(sizeof(_Atomic uint32_t) == sizeof(uint32_t), "futex");

/* The full barrier after publishing @index. It is a read-modify-write, since thread sanitizers do
 * not support fences. Loads after it, and those of the side that goes to sleep, use
 * memory_order_seq_cst. */
static inline void ring_barrier(_Atomic uint32_t *index)
{
	atomic_fetch_add_explicit(index, 0, memory_order_seq_cst);
}

/* Publish an index and execute that barrier, in one operation. */
static inline void ring_publish(_Atomic uint32_t *index, uint32_t value)
{
	atomic_exchange_explicit(index, value, memory_order_seq_cst);
}

/* Pause between two loads of memory that another core writes. */
static inline void ring_pause(void)
{
#if defined(__x86_64__)
	__builtin_ia32_pause();
#elif defined(__aarch64__)
	__asm__ volatile("yield");
#endif
}

/* Compute the offsets for @entries. */
static inline void ring_layout(struct ring_shared *s, uint32_t entries)
{
	uint64_t queue = (uint64_t)entries * sizeof(struct ring_entry);

	s->entries = entries;
	s->sq = 4096;
	s->cq = s->sq + queue;
	s->sq_long = s->cq + queue;
	s->cq_long = s->sq_long + (uint64_t)entries * RING_LONG_BYTES;
	s->bytes = s->cq_long + (uint64_t)entries * RING_LONG_BYTES;
}

#endif
