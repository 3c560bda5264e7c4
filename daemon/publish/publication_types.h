/* What a publication is (publish/publication.h), for those who read it. Loop thread only. */
#ifndef SHARDD_PUBLISH_PUBLICATION_TYPES_H
#define SHARDD_PUBLISH_PUBLICATION_TYPES_H

#include <stdbool.h>
#include <stdint.h>

#include "core/fault.h"
#include "core/list.h"
#include "core/user.h"
#include "job/job_types.h"
#include "op/device_note.h"
#include "publish/assembly.h"
#include "publish/board.h"
#include "publish/delta.h"
#include "publish/making.h"

#define PUBLICATION_MAX_BUFFERS 16u

struct publication;

enum published_state { PUBLISHED_EMPTY, PUBLISHED_MAKING, PUBLISHED_READY, _PUBLISHED_N };

/* A buffer, and the generation in it. */
struct published {
	struct publication *p;
	uint8_t state;             /* enum published_state */
	struct assembly *assembly; /* owned ref: what it is of */
	struct slab *slab;         /* owned ref; NULL: it has no memory yet */
	uint32_t *crc;             /* owned: CRC-32C of each block */
	struct user_charge cost;   /* @crc's */
	struct delta delta;        /* from the generation before */
	uint64_t number;           /* from 1 */
	uint64_t step;             /* that the masters were of */
	uint64_t commit;           /* readers.commits then */
	uint32_t checksum;         /* CRC-32C of @crc, in little-endian order */
	uint64_t began_us, made_us;
	struct list leases; /* of struct publication_lease */
	uint64_t leased;    /* how often */
};

/* A reader's right to a generation: its buffer is not used again. Owned by the reader. */
struct publication_lease {
	struct list link; /* published.leases; unlinked: the publication is gone */
	struct list held; /* the owner's */
	uint64_t id;      /* the owner's */
	uint64_t session; /* the owner, for status */
	int pid;
	uint64_t since_us;
	struct published *g; /* NULL: the publication is gone */
	bool streams;        /* a call's that sends it: the owner is that call */
	uint64_t sent;       /* bytes, by that call */
};

/* Somebody waits for a generation; embedded by its owner. */
struct publication_wait {
	struct list link;     /* publication.waits */
	uint64_t newer_than;  /* a number */
	uint64_t deadline_us; /* UINT64_MAX: none */
	bool asks;            /* it has wanted one: it ends with the reason if none can be made */
	/* Called once, from the loop, after it was unlinked. @f NULL: publication_newest is there. */
	void (*done)(struct publication_wait *w, const struct fault *f);
};

struct publication_counts {
	uint64_t made, bytes; /* generations, their bytes */
	uint64_t made_us;     /* the time that they took, together */
	uint64_t skipped;     /* not made: no buffer was free before the next one was due */
	uint64_t dropped;     /* of those that no reader had leased */
	uint64_t waits;       /* how often a generation that was due has waited for a buffer */
	uint64_t waited_us;   /* for how long, together, of the waits that are over */
	uint64_t expired;     /* waits that ended after wait_ms: with skipped */
	uint64_t failed;      /* not made: no memory, or what was declared is not there any more */
	uint64_t deltas;      /* of those that were made */
	uint64_t delta_bytes;
	uint64_t delta_us; /* the time of these generations, with their deltas: of made_us */
	uint64_t changed, compared; /* values, of all generations that were compared with a base */
	uint64_t not_deltas;        /* too much has changed for one, or there was no memory */
	uint64_t streamed;          /* bytes, sent to readers that do not map them */
};

struct publication {
	struct list link; /* job->readers.publications */
	struct job *job;
	state_published *rec;      /* the job's record's */
	struct assembly *assembly; /* owned ref; NULL: none that fits the units as they are */
	uint64_t units;            /* readers_generation of it */
	struct user_charge cost;   /* its own, without assemblies and checksums */
	struct published buffers[PUBLICATION_MAX_BUFFERS];
	unsigned n_buffers;
	struct published *making_at; /* MAKING; NULL: none */
	struct making making;
	struct delta_end base;   /* of the delta that is made */
	struct device_note note; /* of what is made */
	uint64_t number;         /* of the next one; 0: not known yet */
	bool wanted;             /* a generation, at the next commit */
	uint64_t waits_since_us; /* the one that is wanted waits for a buffer; 0: it does not */
	bool gone;               /* it was dropped: freed when nothing is made any more */
	struct list waits;
	struct board board;
	struct publication_counts counts;
	uint64_t since_unix_us; /* when these were 0 */
	char why[256];          /* what went wrong last; "": nothing since the last one was made */
};

#endif
