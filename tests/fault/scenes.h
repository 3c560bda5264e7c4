/*
 * Scenes: a job in the middle of each op of the table, on so many ranks and devices, stopped
 * between any two completions, and disturbed there. What test_boundaries.c (every op, every
 * boundary, every disturbance) and test_disturbances.c (random ones) share.
 *
 * The fake backends and the fake engine hold back every completion; the test lets one after
 * the other through. So each stage of each op stops at its end, and nothing is compiled into
 * the daemon for that.
 */
#ifndef SHARDD_TESTS_FAULT_SCENES_H
#define SHARDD_TESTS_FAULT_SCENES_H

#include "nodefix.h"

#define SCENE_RANKS 4u
#define SCENE_OPS   32u /* of one rank at one time */

/* On what a scene plays. */
struct stage {
	unsigned ranks, devices;
	bool queues;   /* devices order tasks as GPUs do, and ranks have streams */
	bool streams;  /* then: ops are answered when they are ordered */
	bool promises; /* then: and come after a point that streams reach only at the end */
	bool later;    /* while completions are held, memory is made later */
	bool batches;  /* reductions of several devices are batched */
};

struct scene {
	struct nodefix *n;
	const struct stage *stage;
	struct job *job;
	struct member *m[SCENE_RANKS];
	struct unit *plain; /* always there: what is trained on afterwards */
	struct unit *u;     /* what the scenario is about */
	uint64_t epoch;     /* that it began in */
	uint64_t buffer[SCENE_RANKS];
	struct nodefix_op op[SCENE_RANKS][SCENE_OPS];
	unsigned n_ops[SCENE_RANKS];
	uint64_t promised; /* the last point of streams that ops come after; 0: none */
};

/* Submits what one rank asks for. */
typedef void (*ask_fn)(struct scene *s, unsigned rank);

/* One op of the table, and what it needs. */
struct scenario {
	const char *type;                 /* of the table */
	const char *name;                 /* and in which way */
	void (*prepare)(struct scene *s); /* (optional) must succeed */
	ask_fn submit;                    /* of each rank */
	unsigned ranks;                   /* at least */
};

extern const struct scenario scenarios[];
extern const size_t n_scenarios;

/* A job "scene" with all ranks joined, unit "plain" initialised, a buffer for each rank, a
 * commit. */
void scene_begin(struct scene *s, struct nodefix *n, const struct stage *stage);
/* All ranks train a step again, whatever became of them; then the job is deleted and every
 * byte is back. @gone: the job was deleted. */
void scene_end(struct scene *s, bool gone);

/* The next op of @rank, for nodefix_submit and the like; is there room for @n more? */
struct nodefix_op *scene_op(struct scene *s, unsigned rank);
bool scene_has_room(const struct scene *s, unsigned rank, unsigned n);
/* All ranks ask, to the end; it must succeed. @what: for texts. */
void scene_must(struct scene *s, ask_fn ask, const char *what);
#define MUST(s, ask) scene_must((s), (ask), #ask)
/* Rank @r joins, again if it can. Return: false: what it was still runs. */
bool scene_join(struct scene *s, unsigned r);
/* Everything that was submitted is over. */
bool scene_over(const struct scene *s);
/* Forget ops that are over. */
void scene_clear(struct scene *s);

/* Hold back all completions; let one through (false: there is none); let all through. */
void scene_hold(struct scene *s);
bool scene_step(struct scene *s);
void scene_let_go(struct scene *s);
/* Streams of all ranks have come everywhere. */
void scene_raise(struct scene *s);

/* What can happen to one rank. */
enum disturbance {
	DISTURB_KILL,       /* its process is gone */
	DISTURB_DISCONNECT, /* its connection ends, the process lives */
	DISTURB_REJOIN,     /* it joins again on its session */
	DISTURB_REPLACE,    /* it is gone and another process joins in its place */
	DISTURB_LEAVE,
	DISTURB_DELETE, /* DeleteJob with force */
	DISTURB_CANCEL,
	DISTURB_DEADLINE,
	DISTURB_DRAIN,
	DISTURB_BREAK, /* the communicators of all devices */
	_DISTURB_N
};
const char *disturbance_name(enum disturbance d);
/* Return: false: it makes no sense here, nothing was done. */
bool scene_disturb(struct scene *s, enum disturbance d, unsigned rank);

/* Of nodes that scenes use one after the other. */
void scene_node_begin(struct nodefix *n, const struct stage *stage);
void scene_node_end(struct nodefix *n);

#endif
