/*
 * A checkpoint that several nodes make, in a folder that all of them see: a shared file system.
 *
 *   one node: parts_begin --> each other: parts_see --> each: parts_write --> the first one: parts_complete
 *
 * The folder has a temporary name (checkpoint/folder.h), and a marker by which the others see that it is
 * the same one. Each node writes a file of tensors and an index of it, and has them synced before it says
 * so. The first one reads these indexes, makes one of them, checks that all pieces of all arrays are
 * there, and gives the folder its name. Any thread but the loop's: it blocks for the disk.
 */
#ifndef SHARDD_CHECKPOINT_PARTS_H
#define SHARDD_CHECKPOINT_PARTS_H

#include "checkpoint/folder.h"
#include "checkpoint/save.h"

#define PARTS_FILE "shard-%05u.safetensors"

/* Make the folder and its marker, @nonce. @owner: as in folder_begin_nodes; what it has left is
 * removed. @ret: also after an error, folder_abandon. Return: 0 or a fault code. */
int parts_begin(int dir, uint64_t step, uint64_t owner, uint64_t nonce, struct folder_new *ret,
		struct fault *f);
/* Is it the folder @name of @dir, with that marker? Return: a descriptor of it, the caller's; -1: @f is
 * filled: it is not seen here. */
int parts_see(int dir, const char *name, uint64_t nonce, struct fault *f);
/* Write @x, whose one file is that of part @part (PARTS_FILE), into the folder @fd, as save_write, and
 * sync it. @ret_crc: of its index. Return: 0 or a fault code. */
int parts_write(int fd, struct index *x, unsigned part, const struct save_options *o,
		save_data_cb data, void *arg, struct save_progress *p, uint32_t *ret_crc,
		struct fault *f);
/* All parts are written, and have said @crcs. @x: has the job, the step and the world size. @ret_bytes:
 * of all pieces. Return: 0: the checkpoint has its name; or FAULT_LOST (it is not whole) or another
 * fault code. */
int parts_complete(struct folder_new *n, struct index *x, const uint32_t *crcs, unsigned parts,
		   uint64_t *ret_bytes, struct fault *f);

/* -- parts in memory, which no folder has */

struct parts_memory {
	int fd;            /* borrowed: a file as PARTS_FILE; -1: it is not here, and not read */
	const char *index; /* borrowed: its index, as text */
	size_t index_bytes;
};

/* Make one index of those of @parts, whose files are in memory, and check that all pieces of all arrays
 * are there, and the files that are here as they say. @x: empty before. Return: 0; FAULT_LOST: a part is
 * missing, damaged, or not of step @step of @job; or another fault code: @x is empty. */
int parts_merge(const struct parts_memory *parts, unsigned n, const char *job, uint64_t step,
		struct index *x, struct fault *f);

#endif
