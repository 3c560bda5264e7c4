/*
 * The ring: what a trainer and the daemon have in shared memory, for the ops of one session.
 *
 * Two queues of fixed-width entries, as many in one as in the other: submissions, which the
 * client writes and the daemon reads, and completions, the other way round. Head and tail
 * count entries for ever and wrap at 2^32; entry i is at i & (entries - 1). A message that is
 * longer than an entry has room for lies in the long piece of the same index.
 *
 *   client                                    daemon
 *   entry, then sq_tail = t (release)   --->  sq_tail (acquire), entry copied once
 *   sq_head (acquire): room             <---  sq_head = h (release)
 *   cq_tail (acquire), entry            <---  entry, then cq_tail = t (release)
 *   cq_head = h (release)               --->  cq_head (acquire): room
 *
 * Who has nothing to do says so before it sleeps, and looks once more; who has written
 * something looks whether the other one sleeps. Between the two stores and loads of each
 * side is a full barrier, so that one of both sees the other's.
 *
 *   daemon: daemon_sleeps = 1; barrier; sq_tail?   client: sq_tail; barrier; daemon_sleeps?
 *           ... polls its eventfd                          1: set it to 0, write the eventfd
 *   client: client_sleeps = 1; barrier; cq_tail?   daemon: cq_tail; barrier; client_sleeps?
 *           ... futex wait while it is 1                   1: set it to 0, futex wake
 *
 * The daemon takes no more submissions than it has room for completions, so that a
 * completion is never lost and never waits. It believes nothing of what is written here.
 */
#ifndef SHARDD_RING_ABI_H
#define SHARDD_RING_ABI_H

#include <assert.h>
#include <stdalign.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>

#define RING_MAGIC       0x52444853u /* "SHDR" read as a little-endian word */
#define RING_VERSION     1u
#define RING_MIN_ENTRIES 64u
#define RING_MAX_ENTRIES 4096u
#define RING_SHORT_BYTES 48u   /* of a message inside an entry */
#define RING_LONG_BYTES  1024u /* of one in its long piece */

/* A submission or a completion. */
struct ring_entry {
	uint64_t tag;   /* the client's; comes back */
	uint16_t op;    /* submission: RING_NOP, or 1 + the method's index in the Shardd service */
	uint16_t code;  /* completion: a gRPC status code */
	uint32_t bytes; /* of the message: a request, a reply, or with a code an ErrorInfo */
	uint8_t data[RING_SHORT_BYTES]; /* the message, packed, if it is not longer */
};

#define RING_NOP 0u /* is answered, and does nothing */

/* At the start of the memory. */
struct ring_shared {
	/* the daemon's, written before the client sees it */
	uint32_t magic;
	uint32_t version;
	uint32_t entries; /* of a queue: a power of two */
	uint32_t zero;
	uint64_t bytes;                    /* of all */
	uint64_t sq, cq, sq_long, cq_long; /* where they are */

	/* the client's */
	alignas(64) _Atomic uint32_t sq_tail;
	alignas(64) _Atomic uint32_t cq_head;
	/* the daemon's */
	alignas(64) _Atomic uint32_t sq_head;
	alignas(64) _Atomic uint32_t cq_tail;
	_Atomic uint32_t closed;  /* 1: the session is over, nothing is taken or posted any more */
	_Atomic uint32_t spin_us; /* how long to look before sleeping; 0: cores are scarce */
	/* of both */
	alignas(64) _Atomic uint32_t daemon_sleeps;
	alignas(64) _Atomic uint32_t client_sleeps; /* a futex */
};

static_assert(sizeof(struct ring_entry) == 64, "entry");
static_assert(offsetof(struct ring_entry, data) == 16, "entry");
static_assert(offsetof(struct ring_shared, sq_tail) == 64, "first line");
static_assert(offsetof(struct ring_shared, cq_tail) == 256, "the daemon's lines");
static_assert(sizeof(struct ring_shared) == 448, "shared");
static_assert(sizeof(_Atomic uint32_t) == sizeof(uint32_t), "futex");

/* The full barrier of who has published @index: read, change and write in one, since thread
 * sanitizers do not know fences. What is looked at behind it, and by who went to sleep, is
 * looked at with memory_order_seq_cst. */
static inline void ring_barrier(_Atomic uint32_t *index)
{
	atomic_fetch_add_explicit(index, 0, memory_order_seq_cst);
}

/* Publish an index, with that barrier behind it, in one. */
static inline void ring_publish(_Atomic uint32_t *index, uint32_t value)
{
	atomic_exchange_explicit(index, value, memory_order_seq_cst);
}

/* Between two looks at memory that another core writes. */
static inline void ring_pause(void)
{
#if defined(__x86_64__)
	__builtin_ia32_pause();
#elif defined(__aarch64__)
	__asm__ volatile("yield");
#endif
}

/* Where everything is, for @entries. */
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
