/* Shared by the files of saving. */
#ifndef SHARDD_JOB_SAVING_IMPL_H
#define SHARDD_JOB_SAVING_IMPL_H

#include "checkpoint/draft.h"
#include "checkpoint/folder.h"
#include "checkpoint/save.h"
#include "job/bufcopy.h"
#include "job/generation.h"
#include "job/job.h"
#include "job/readers.h"
#include "job/replica.h"
#include "job/saving.h"

/* The part of one node of several: saving_part.c. */
enum saving_part_stage {
	SAVING_PART_NONE,   /* all of it is here */
	SAVING_PART_ASKED,  /* for somebody here; no phase has begun */
	SAVING_PART_IDLE,   /* no phase runs */
	SAVING_PART_FREEZE, /* until the parameters are those of a commit */
	SAVING_PART_SEE,
	SAVING_PART_WRITE,
	SAVING_PART_COMPLETE,
	SAVING_PART_DROP, /* it failed: the folder goes */
};

struct saving_part {
	uint8_t stage; /* enum saving_part_stage */
	bool begins;   /* this node makes the folder */
	bool now, has_after;
	bool posted; /* the end of FREEZE is in the loop queue, as @granted */
	struct work granted;
	uint64_t after;       /* FREEZE: the commit must be behind this step */
	unsigned self, parts; /* number of this node, and how many there are */
	char name[FOLDER_NAME_BYTES];
	uint64_t owner, nonce;
	int dir, fd;           /* owned; -1: none */
	struct folder_new new; /* owned: of the node that makes it */
	uint32_t crc;
	uint32_t *crcs; /* owned: COMPLETE: of all parts */
	uint64_t all_bytes;
	uint64_t tail;           /* of a replica: bytes of its tail */
	saving_part_cb answered; /* NULL: it is over for the others */
	void *userdata;
	struct fault why; /* then: how, while the thread runs still */
};

struct saving {
	struct job *job;
	uint8_t state;      /* enum saving_state */
	bool running;       /* the thread has not ended */
	bool memory;        /* into @replica, */
	uint64_t layout;    /* of this layout, */
	uint64_t epoch;     /* begun in this epoch */
	char *path, *roots; /* owned */
	uid_t uid;
	gid_t gid;
	struct reader *reader;   /* owned: until it is granted or refused */
	struct generation *g;    /* owned, while it is WRITING */
	struct replica *replica; /* owned ref, while it is written; NULL: none */
	uint8_t *specs;          /* owned: the records of the units for it */
	size_t specs_bytes;
	uint64_t copied;
	uint64_t step;
	uint64_t began_us;  /* when it was asked for */
	struct draft draft; /* what the thread makes the index of */
	struct index x;     /* the thread's */
	char *blobs;        /* owned: copies, one after the other */
	uint64_t blob_bytes;
	struct bufcopy *buffers; /* owned ref; NULL: the job has none */
	bool as_left;            /* these are not of the commit */
	uint64_t bytes;          /* of all tensors */
	struct save_options o;
	uint32_t keep;
	struct fault prune; /* what was not removed is no fault of the checkpoint */
	struct save_progress p;
	char *chunk; /* owned: what is being written */
	struct fault f;
	pthread_t thread;
	struct work ended;
	saving_cb done; /* NULL: it was called */
	void *userdata;
	struct saving_part part;
};

/* What will be written, of the job as it is now (saving_list.c). Return: 0 or a fault code. */
int saving_list(struct saving *s);

/* Return: 0 or a fault code. */
int saving_check(const struct job *job, const struct saving_options *o, struct fault *f);
struct saving *saving_new(struct job *job, const struct saving_options *o);
/* It could not begin. */
void saving_free(struct saving *s);
/* It waits, until its reader is granted: saving_freeze. Return: 0 or a fault code. */
int saving_wait(struct saving *s, struct proc *proc, uint64_t deadline_us,
		bool (*may)(struct job *job));
/* List it, within the hold. Return: 0 or a fault code. */
int saving_freeze(struct saving *s);
/* It is frozen, and is written from here on. */
void saving_is_written(struct saving *s);
/* Over: s->f says how. */
void saving_finish(struct saving *s);
/* The thread has ended. */
void saving_join(struct saving *s);
const void *saving_data(void *arg, size_t piece, uint64_t offset, size_t bytes, struct fault *f);
/* The thread makes the index, with the one file @name. */
int saving_make_index(struct saving *s, const char *name);
void saving_lost(const struct saving *s, int why, struct fault *f);
/* What only the making of it needs. */
void saving_drop(struct saving *s);

/* Have the nodes of its job make it together. Return: 0 or a fault code. */
int saving_part_ask(struct saving *s, const struct saving_options *o);
/* Of a part: nothing runs, and it was cancelled, or lost its memory (saving_tick). */
void saving_part_tick(struct saving *s);
/* Its reader was granted, or has ended (@f). Within the hold. */
void saving_part_granted(struct saving *s, const struct fault *f);

#endif
