/*
 * The folder of a job's checkpoints: one folder a step, step-000000000123.
 *
 * A checkpoint is made under a temporary name, .saving-..., which its maker keeps locked, and gets its
 * name when all of it is on the disk. It is taken away under another, .removing-.... So a name
 * step-... always is a whole checkpoint, whenever a process is killed. What a killed process has
 * left under the other names is not locked: the next save or prune removes it. One that several nodes
 * make (checkpoint/parts.h) is .nodes-..., which only the next save of its job removes.
 *
 * All paths are below a descriptor of the folder, and no symbolic link is followed. Any thread;
 * blocks for the disk.
 */
#ifndef SHARDD_CHECKPOINT_FOLDER_H
#define SHARDD_CHECKPOINT_FOLDER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "core/fault.h"

#define FOLDER_NAME_BYTES 64u

/* The name of the checkpoint of @step. */
void folder_step_name(uint64_t step, char ret[FOLDER_NAME_BYTES]);
/* Return: whether @name is that of a checkpoint. */
bool folder_step_of(const char *name, uint64_t *ret);

/* A checkpoint that is being made. */
struct folder_new {
	int dir; /* borrowed: the folder of checkpoints */
	int fd;  /* owned: its own, locked; -1: none */
	uint64_t step;
	uint64_t owner;               /* of one that nodes make; else 0 */
	char name[FOLDER_NAME_BYTES]; /* the temporary one */
};

#define FOLDER_NEW_NULL ((struct folder_new){ .dir = -1, .fd = -1 })

/* Begin the checkpoint of @step in @dir (borrowed). Return: 0, FAULT_STATE (there is one of this
 * step) or another fault code. */
int folder_begin(int dir, uint64_t step, struct folder_new *ret, struct fault *f);
/* The same of one that several nodes make: as .nodes-..., without a lock, since not all file systems tell
 * other machines of it. @owner: not 0: another one for each job: only it removes what is left. */
int folder_begin_nodes(int dir, uint64_t step, uint64_t owner, struct folder_new *ret,
		       struct fault *f);
/* Remove what nodes have left of @owner, who makes none. Return: 0 or a fault code. */
int folder_tidy_nodes(int dir, uint64_t owner, struct fault *f);
/* Can @name be that of one that nodes make? */
bool folder_is_of_nodes(const char *name);
/* Open it, on one of the nodes. Return: a descriptor, the caller's, or -errno. */
int folder_enter_nodes(int dir, const char *name);
/* All its files are written and synced: give it its name. Return: 0 or a fault code; then it
 * must still be abandoned. */
int folder_commit(struct folder_new *n, struct fault *f);
/* Remove what there is of it, unless it was committed. Safe after FOLDER_NEW_NULL and twice. */
void folder_abandon(struct folder_new *n);

/* The steps of which there are checkpoints, in order. @ret: the caller's to free. Return: 0 or a
 * fault code. */
int folder_list(int dir, uint64_t **ret, size_t *ret_n, struct fault *f);

/* Open the checkpoint of @step for reading. Return: a descriptor, the caller's; -1: @f is filled:
 * FAULT_NOT_FOUND. */
int folder_open(int dir, uint64_t step, struct fault *f);

/* Remove all checkpoints but the newest @keep, and what killed processes have left. @ret_removed: of
 * checkpoints; @ret_left: of those leftovers. Return: 0 or a fault code. */
int folder_prune(int dir, size_t keep, size_t *ret_removed, size_t *ret_left, struct fault *f);
/* Remove only what killed processes have left. */
int folder_tidy(int dir, size_t *ret_left, struct fault *f);

#endif
