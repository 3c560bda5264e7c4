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

#include "publish/publication_types.h"

#define PUBLICATIONS_MAX 64u /* of a job */
/* By board: each has a page of the job's memory. */
#define PUBLICATION_MAX_READERS 1024u
#define PUBLICATION_MAX_OTHERS  64u /* of these, of one user who is not the job's owner */
/* Of a declaration, packed: it is in every head of the job's journal. */
#define PUBLICATION_MAX_BYTES (256u << 10)

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
/* Since when, as the daemon has seen it; @now_us: it has not yet. */
uint64_t publication_reader_since(const struct board_reader *r, const struct published *g,
				  uint64_t now_us);

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
