/*
 * A checkpoint made of one safetensors file, or of a pipe with its bytes, whose tensors have the keys of a
 * checkpoint (docs/checkpoints.md): how state that another program has written becomes one that the
 * daemon loads. Any thread but the loop's; blocks for the disk.
 */
#ifndef SHARDD_CHECKPOINT_IMPORT_H
#define SHARDD_CHECKPOINT_IMPORT_H

#include "checkpoint/index.h"

struct import_options {
	const char *name; /* of the file, for errors */
	const char *job;  /* what the index calls it */
	uint64_t step;
	uint32_t world_size; /* 0: not known */
};

/* Write the checkpoint into the folder of checkpoints @dir, of the file or pipe @fd. The data of a
 * pipe must be in the order in which a checkpoint has it. Metadata of the file says how often the
 * optimizer has stepped each tensor: steps/UNIT/TENSOR. @ret: empty before; what was written. Either
 * the whole checkpoint has its name, or nothing of it is left. Return: 0, FAULT_INVALID (a key, a
 * type or a shape that a checkpoint cannot have), FAULT_STATE (there is one of this step), FAULT_LOST
 * (the file is not whole) or another fault code. */
int import_file(int dir, int fd, const struct import_options *o, struct index *ret,
		struct fault *f);

#endif
