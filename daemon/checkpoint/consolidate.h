/*
 * One safetensors file of a checkpoint's parameters and buffers, for programs that know nothing of
 * shardd. Any thread; blocks for the disk.
 */
#ifndef SHARDD_CHECKPOINT_CONSOLIDATE_H
#define SHARDD_CHECKPOINT_CONSOLIDATE_H

#include <stdbool.h>

#include "checkpoint/index.h"

/* Buffers whose names begin so are a client library's own. */
#define CONSOLIDATE_OWN "shardd:"

struct consolidate_options {
	const char *path; /* of the new file, which must not exist */
	bool short_names; /* TENSOR; else UNIT.TENSOR */
	const char *root; /* the unit whose tensors always have short names; NULL: none */
};

/* Write the parameters, and the buffers of the first rank, of the checkpoint in folder @fd, whose index
 * @x save_read has read. The data is compared with its checksums. Either the whole file is on the disk
 * and has its name, or nothing is left. @ret_bytes: of the file. Return: 0, FAULT_STATE (there is such a
 * file, or two tensors would have one name), FAULT_NOT_FOUND (no unit @o->root, or no folder for the
 * file), FAULT_LOST, FAULT_EXHAUSTED or another fault code. */
int consolidate(int fd, const struct index *x, const struct consolidate_options *o,
		uint64_t *ret_bytes, struct fault *f);

#endif
