/*
 * Publications of a job, and their generations.
 *
 * A publication is a declared view (publish/view.h) of the job's tensors. A generation is what it made of
 * the masters of one committed step: complete or not there, and never changed afterwards. Each has a
 * buffer, a slab that only the daemon can write; other processes map it and lease it, or hold it without
 * a call (publish/board.h). A buffer is used again when nobody has leased or holds its generation and the
 * policy does not keep it. Trainers never wait for
 * readers: if there is no buffer, there is no new generation, and the publication counts that.
 *
 *   buffer:  EMPTY --a commit--> MAKING --all blocks are made--> READY --reused--> MAKING
 *              ^------the job ends, a device fails----'            |
 *              ^------the publication is dropped, the units change-'
 *
 * Nothing of a generation outlives the daemon but its number, so that readers see that a number never
 * comes twice. Nor does it under the name of a publication that was dropped, while readers of that one may
 * be there: they ask for what is newer than what they have. Loop thread only.
 */
#ifndef SHARDD_PUBLISH_PUBLICATION_H
#define SHARDD_PUBLISH_PUBLICATION_H

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
#define PUBLICATIONS_MAX        64u /* of a job */
/* By board: each has a page of the job's memory. */
#define PUBLICATION_MAX_READERS 1024u
#define PUBLICATION_MAX_OTHERS  64u /* of these, of one user who is not the job's owner */
/* Of a declaration, packed: it is in every head of the job's journal. */
#define PUBLICATION_MAX_BYTES (256u << 10)

struct publication;

enum published_state { PUBLISHED_EMPTY, PUBLISHED_MAKING, PUBLISHED_READY, _PUBLISHED_N };

/* A buffer, and the generation in it. */
struct published {
	struct publication *p;
	uint8_t state;             /* enum published_state */
	struct assembly *assembly; /* owned ref: what it is of */
	struct slab *slab;         /* owned ref; NULL: it has no memory yet */
	uint32_t *crc;             /* owned: CRC-32C of each block */
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
	uint64_t failed;      /* not made: no memory, or what was declared is not there any more */
	uint64_t deltas;      /* of those that were made */
	uint64_t delta_bytes;
	uint64_t changed, compared; /* values, by these deltas */
	uint64_t not_deltas;        /* too much has changed for one, or there was no memory */
	uint64_t streamed;          /* bytes, sent to readers that do not map them */
};

struct publication {
	struct list link; /* job->readers.publications */
	struct job *job;
	state_published *rec;      /* the job's record's */
	struct assembly *assembly; /* owned ref; NULL: none that fits the units as they are */
	uint64_t units;            /* readers_generation of it */
	struct user_charge cost;   /* its tables */
	struct published buffers[PUBLICATION_MAX_BUFFERS];
	unsigned n_buffers;
	struct published *making_at; /* MAKING; NULL: none */
	struct making making;
	struct delta_end base;   /* of the delta that is made */
	struct device_note note; /* of what is made */
	uint64_t number;         /* of the next one; 0: not known yet */
	bool wanted;             /* a generation, at the next commit */
	bool full;               /* the one that is wanted waits for a buffer */
	bool gone;               /* it was dropped: freed when nothing is made any more */
	struct list waits;
	struct board board;
	struct publication_counts counts;
	uint64_t since_unix_us; /* when these were 0 */
	char why[256];          /* what went wrong last; "": nothing since the last one was made */
};

/* Declare one: an equal one that exists is given. @ret: the job's. Return: 0, FAULT_INVALID (a field of
 * the declaration), FAULT_STATE (one of this name is declared otherwise; the units are not registered),
 * FAULT_EXHAUSTED. */
int publication_declare(struct job *job, const view_declaration *d, struct publication **ret,
			struct fault *f);
/* It is not known any more. Waits end; leases stay, but lead nowhere. */
void publication_drop(struct publication *p);
/* Return: borrowed; NULL: there is none. */
struct publication *publication_find(const struct job *job, const char *name);

/* Have a generation made at the next moment at which the masters are those of a commit, which may be now. */
void publication_want(struct publication *p);
/* Is the newest generation of the masters as they are? */
bool publication_is_current(struct publication *p);
/* Return: the newest generation; NULL: there is none. */
struct published *publication_newest(struct publication *p);
/* Return: the one of that number, if it is there; else NULL. */
struct published *publication_numbered(struct publication *p, uint64_t number);
/* Wait for one that is newer than w->newer_than; w->done follows, not from here. */
void publication_await(struct publication *p, struct publication_wait *w);
/* Wait no longer. Safe if it does not. */
void publication_leave(struct publication_wait *w);

/* A reader that takes generations by the board. @payer: its user; NULL: nobody. @ret:
 * publication_close_reader. Return: 0 or FAULT_EXHAUSTED. */
int publication_open_reader(struct publication *p, struct user *payer, uid_t uid,
			    struct board_reader **ret, struct fault *f);
/* What it holds is given back. NULL is allowed. Return: NULL. */
struct board_reader *publication_close_reader(struct board_reader *r);
/* A slab that @r may map. Return: borrowed, or NULL. */
struct slab *publication_slab_for(const struct board_reader *r, uint32_t id);
/* Does @r hold @g? */
bool publication_reader_holds(const struct board_reader *r, const struct published *g);

/* Lease @g. Return: the caller's, or NULL without memory. */
struct publication_lease *publication_lease(struct published *g);
/* NULL is allowed. Return: NULL. */
struct publication_lease *publication_release(struct publication_lease *l);

/* Has somebody leased or held @g, which is READY, and does not any more? */
bool publication_was_used(const struct published *g);

/* A commit has taken effect: make what is due. */
void publications_committed(struct job *job);
/* Make what could not be made yet, and end waits. Call now and then. */
void publications_tick(struct job *job, uint64_t now_us);
/* Those of the record of a restored job. Return: 0 or a fault code. */
int publications_restore(struct job *job, struct fault *f);
/* The job is deleted: what is made ends soon, waits end now. */
void publications_end(struct job *job);
/* Bytes of the generations that are there, and of the one that is made. */
uint64_t publications_bytes(const struct job *job);
/* Free them all; nothing is made any more. */
void publications_free(struct job *job);

/* EMPTY, MAKING, READY. Static. */
const char *published_state_name(enum published_state s);

#endif
