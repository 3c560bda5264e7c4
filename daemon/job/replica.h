/*
 * Replicas: parts of a job's committed state in memory, for when a node is gone with its own (docs/nodes.md).
 *
 * A job with ranks on several nodes has a part on each. After a commit each node writes its part into
 * memory, as it would into a file of a checkpoint (job/saving.h), and the next node takes a copy of it. So
 * two nodes have each part. Parts of one step are complete when all nodes have both; then those of earlier
 * steps go.
 *
 * A part is two files in memory (memfd): the tensors, as in a checkpoint; and the tail: the text of its
 * index, the records of the job's units (restore_pack_specs), and 8 bytes, the length of the index. The job's account pays for them. Loop
 * thread only; any thread may read the files while a part is referenced. They are closed on a thread of their
 * own: the loop must not wait for that.
 */
#ifndef SHARDD_JOB_REPLICA_H
#define SHARDD_JOB_REPLICA_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "backend/host_room.h"
#include "core/closer.h"
#include "core/fault.h"
#include "core/list.h"

struct job;
struct node;

/* "replica/LABEL/STEP/LAYOUT/PART/tensors" */
#define REPLICA_KEY_BYTES 192u
/* Of a file. */
#define REPLICA_MAX_BYTES (UINT64_C(1) << 50)

enum replica_file { REPLICA_TENSORS, REPLICA_TAIL, _REPLICA_FILES };

struct replica {
	struct list link;  /* job->across.replicas */
	struct node *node; /* borrowed */
	struct job *job;   /* borrowed; NULL: it is not kept any more */
	unsigned refs;
	uint64_t step;
	uint32_t part, parts; /* number of the node, and of how many */
	uint64_t layout;      /* replica_layout */
	uint64_t epoch;       /* in which it was begun; 0: this node has it only to go back to it */
	bool whole;           /* both files are */
	bool complete;        /* all nodes have what they should have of this step */
	int fds[_REPLICA_FILES]; /* owned */
	uint64_t bytes[_REPLICA_FILES];
	uint64_t charged;            /* to the job's account */
	struct host_room *room;      /* borrowed */
	struct host_promise promise; /* of what is charged, while it is kept */
	uint64_t leaves;             /* it is being closed: bytes of its pages */
	struct closer_item closing;
};

/* What identifies one. */
struct replica_id {
	uint64_t step, layout;
	uint32_t part, parts;
};

/* A part that is not written yet; @bytes: about as many as it will have. One with the same id goes first.
 * Return: 0, FAULT_EXHAUSTED, or another fault code. */
int replica_new(struct job *job, const struct replica_id *id, uint64_t bytes, struct replica **ret,
		struct fault *f);
/* Its files are written, and are so long. Return: 0 or FAULT_EXHAUSTED; then it is dropped. */
int replica_is_whole(struct replica *r, struct fault *f);
/* The tail of one, in memory. */
struct replica_tail {
	char *data; /* owned: the index */
	size_t index_bytes;
	const uint8_t *specs; /* in it */
	size_t specs_bytes;
};
/* Read it from @fd, of @bytes bytes. Return: 0, FAULT_LOST (it is damaged), or another fault code. */
int replica_read_tail(int fd, uint64_t bytes, struct replica_tail *ret, struct fault *f);
/* It will have @bytes bytes in all: charge them now. Return: 0 or FAULT_EXHAUSTED. */
int replica_expect(struct replica *r, uint64_t bytes, struct fault *f);
/* It is not kept any more, and the account does not pay for it; its memory goes with the last reference.
 * NULL is allowed. Return: NULL. */
struct replica *replica_drop(struct replica *r);
struct replica *replica_ref(struct replica *r);
/* NULL is allowed. Return: NULL. */
struct replica *replica_unref(struct replica *r);

/* Return: NULL: there is none that is whole. */
struct replica *replica_find(const struct job *job, const struct replica_id *id);
/* All nodes have theirs of @step and @layout, or have gone back to them: all others go. */
void replica_completed(struct job *job, uint64_t step, uint64_t layout);
/* The layout of parts that a round @round of all nodes makes: parts of two rounds, or of two jobs, never fit. */
uint64_t replica_layout(const struct job *job, uint64_t round);
/* A new step is about to be written: only parts of the last complete step stay, and of the last one that is whole
 * here: nodes may have died before they were told that it is complete. */
void replica_tidy(struct job *job);
/* The job ends, or its state is another one. */
void replica_forget(struct job *job);
/* Bytes in all. @ret_step: of the last complete ones. Return: false: there are none. */
bool replica_report(const struct job *job, uint64_t *ret_step, uint64_t *ret_bytes);

/* The name of one file, for other nodes. */
void replica_key(const char *label, const struct replica_id *id, enum replica_file file,
		 char ret[REPLICA_KEY_BYTES]);
/* The file of that name of @job. @ret: borrowed while it is referenced. Return: false: there is none. */
bool replica_lookup(const struct job *job, const char *key, struct replica **ret,
		    enum replica_file *ret_file);

#endif
