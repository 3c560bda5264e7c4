/*
 * Members of the gloo engine, each a process of its own with a loop, that meet through files in a
 * folder. A member reports by its exit status.
 */
#ifndef SHARDD_TESTS_GLOOFIX_H
#define SHARDD_TESTS_GLOOFIX_H

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <sys/types.h>
#include <unistd.h>

#include "engine/engine_impl.h"
#include "looprun.h"

#define GLOOFIX_MAX 4 /* members */

/* In a member: Criterion's own checks belong to the parent. */
#define EXPECT(cond)                                                               \
	do {                                                                       \
		if (!(cond)) {                                                     \
			fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #cond); \
			_exit(1);                                                  \
		}                                                                  \
	} while (0)

/* One member. */
struct gloofix {
	unsigned rank, size;
	unsigned descriptors; /* at the start */
	struct looprun run;
	struct backend *b;
	struct engine *e;
	struct comm *c;
	int status; /* of making @c */
	bool ready, failed;
	unsigned n_failed;
	unsigned syncs; /* so far */
	char why[256];  /* it failed */
};

/* gloo_options.reason_ms, by rank, of the members that begin from now on. */
extern unsigned gloofix_reason_ms[GLOOFIX_MAX];

/* The store: a file for each key. */
extern const struct comm_store gloofix_store;
int gloofix_exchange(void *userdata, struct comm_exchange *x, unsigned timeout_ms);
int gloofix_set(void *userdata, const char *key, const void *value, size_t bytes);
long gloofix_get(void *userdata, const char *key, unsigned timeout_ms, void *value,
		 size_t capacity);
void gloofix_make_folder(void);
void gloofix_remove_folder(void);

void gloofix_begin(struct gloofix *m, unsigned rank, unsigned size);
/* comm_options.ready; @userdata: the member. */
void gloofix_on_ready(void *userdata, struct comm *comm, int status);
/* Start to make a communicator; the result is in @m. */
void gloofix_ask(struct gloofix *m, const char *prefix, unsigned rank, unsigned size,
		 unsigned connect_ms);
struct comm *gloofix_meet(struct gloofix *m, const char *prefix, unsigned rank, unsigned size);
void gloofix_end(struct gloofix *m);
/* All members are here: they are connected, and what the last operation sent has arrived. */
void gloofix_sync(struct gloofix *m);

/* An operation. */
struct waited {
	struct comm_op op;
	bool done;
	int status;
};

struct waited gloofix_waited(void);
/* It ends with @status, within 20 s. */
void gloofix_expect(struct gloofix *m, struct waited *w, int status);

/* What a member does. */
typedef void (*gloofix_scene)(struct gloofix *m);
pid_t gloofix_start(gloofix_scene scene, unsigned rank, unsigned size);
void gloofix_join(pid_t pid, bool killed);
/* @scene at every member; the last one is killed by its scene if @killed. */
void gloofix_play(gloofix_scene scene, unsigned size, bool killed);

double gloofix_now_s(void);

#endif
