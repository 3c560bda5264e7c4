/* Shared by the files of loading. */
#ifndef SHARDD_JOB_LOADING_IMPL_H
#define SHARDD_JOB_LOADING_IMPL_H

#include <pthread.h>

#include "checkpoint/save.h"
#include "job/job.h"
#include "job/loading.h"
#include "job/upload.h"

/* Where one piece of the index goes to. */
struct loading_place {
	bool known;
	char *at;          /* in host memory: of a shard, or @blob; else NULL */
	uint64_t upload;   /* else: in the upload, one replica after the other */
	unsigned replicas; /* of them */
	uint8_t *blob;     /* owned: of a rank, until it is the job's */
	struct unit *unit; /* parameters: of this unit and tensor */
	uint32_t tensor;
	bool left_out; /* not read: a buffer of a rank that the job does not have, or of another node */
	uint32_t first_run,
		runs; /* of a tensor that has parts on other nodes, if these are not all of it */
};

/* Bytes [begin, begin + bytes) of a piece, which are of a part here. */
struct loading_run {
	uint64_t begin, bytes;
	char *to;        /* in host memory; NULL: */
	uint64_t upload; /* in the upload */
};

/* A rank that was not there when the job was saved has the buffers of the first one that was. */
struct loading_copy {
	const char *from;
	char *to;
	uint64_t bytes;
};

enum loading_state {
	LOADING_ASKED, /* the nodes of the job: that they begin */
	LOADING_OPENING,
	LOADING_MEMORY,   /* waits for the job's ops, and for the memory of the kept copy */
	LOADING_PLACED,   /* waits for the other nodes */
	LOADING_DRAINING, /* until nobody reads what the units had */
	LOADING_READING,
	LOADING_READ, /* waits for the other nodes */
};

/* Of a job with ranks on several nodes. */
struct loading_part {
	bool on;
	bool over;  /* for the others: nothing is answered any more */
	bool reads; /* all nodes have found it */
	loading_part_cb answered;
	void *userdata;
	struct fault why; /* over */
	uint64_t all_bytes;
};

struct loading {
	struct job *job;
	uint8_t state;        /* enum loading_state */
	struct waiter waiter; /* MEMORY, DRAINING */
	char *path, *roots;   /* owned */
	uid_t uid;
	gid_t gid;
	bool has_step;
	uint64_t step;
	int fd; /* owned: of the checkpoint */
	struct index x;
	struct loading_place *places; /* owned: by piece */
	struct upload *upload;        /* owned: of what is not in host memory */
	uint32_t n_units;             /* that are loaded: others may be registered meanwhile */
	uint64_t charged;             /* to the job's quota, for blobs */
	uint64_t awaits_us;           /* ops, since then; 0: not yet */
	struct loading_copy *copies;  /* owned */
	size_t n_copies;
	struct loading_run *runs; /* owned */
	uint32_t n_runs, runs_room;
	char *chunk; /* owned: what is cut into runs; NULL: nothing is */
	struct loading_part part;
	bool in_memory; /* of @memory; else of a folder */
	struct loading_memory memory;
	uint64_t bytes; /* that are read, of all of them */
	struct save_progress p;
	struct loading_report report;
	struct fault f;
	pthread_t thread;
	bool runs_thread;
	struct work ended;
	loading_cb done;
	void *userdata;
};

/* Is the piece of a unit that this node has nothing of? */
static inline bool loading_is_elsewhere(const struct loading *l, const struct index_piece *p)
{
	return l->in_memory && p->array != INDEX_BLOB &&
	       l->memory.is_elsewhere(l->memory.arg, p->unit);
}

/* Where all that was read goes to (loading_place.c). Return: 0 or a fault code. */
int loading_place_all(struct loading *l);

#endif
