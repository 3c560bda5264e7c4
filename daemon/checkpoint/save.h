/*
 * Write a checkpoint, and verify one. Any thread but the loop's: it blocks for the disk.
 */
#ifndef SHARDD_CHECKPOINT_SAVE_H
#define SHARDD_CHECKPOINT_SAVE_H

#include <stdatomic.h>
#include <stdbool.h>

#include "checkpoint/index.h"

#define SAVE_CHUNK_BYTES (UINT64_C(4) << 20)

/* Shared with other threads: how far it is, and that it must end. */
struct save_progress {
	_Atomic uint64_t bytes; /* written or read so far, of the pieces */
	_Atomic bool cancel;
};

/* At most SAVE_CHUNK_BYTES of piece @piece of the index from byte @offset on. Return: them, valid until
 * the next call; NULL: @f is filled. */
typedef const void *(*save_data_cb)(void *arg, size_t piece, uint64_t offset, size_t bytes,
				    struct fault *f);

struct save_options {
	uint64_t bytes_per_s; /* 0: as fast as the disk takes them */
};

/* Write the checkpoint @x into the folder of checkpoints @dir. Checksums, places and sizes are
 * noted in @x; its pieces are put in order first (index_check), so @data is called with the numbers
 * of that order. The page cache stays as it is (spool.h). Either the
 * whole checkpoint is on the disk and has its name, or nothing of it is left.
 * Return: 0, FAULT_STATE (there is one of this step), FAULT_EXHAUSTED (no room), FAULT_CANCELLED, or
 * another fault code. */
int save_write(int dir, struct index *x, const struct save_options *o, save_data_cb data, void *arg,
	       struct save_progress *p, struct fault *f);

/* Write the one file of @x into folder @fd, and sync it: the pieces need not be all of their arrays. Else
 * as save_write. Return: 0 or a fault code. */
int save_write_file(int fd, struct index *x, const struct save_options *o, save_data_cb data,
		    void *arg, struct save_progress *p, struct fault *f);
/* The same into the new, empty file @file in memory (memfd_create). */
int save_write_memory(int file, struct index *x, const struct save_options *o, save_data_cb data,
		      void *arg, struct save_progress *p, struct fault *f);
/* A new file @name in folder @fd, synced. Return: 0 or a fault code. */
int save_write_text(int fd, const char *name, const char *text, struct fault *f);
/* Read it, up to INDEX_MAX_BYTES. @ret: the caller's to free, with a 0 at its end. Return: 0 or a fault
 * code. */
int save_read_text(int fd, const char *name, char **ret, size_t *ret_bytes, struct fault *f);

/* Read the index of the checkpoint in folder @fd, and check that its files have what it says, but
 * not their data. @ret: empty before. Return: 0, FAULT_LOST (damaged), FAULT_NOT_FOUND or another
 * fault code. */
int save_read(int fd, struct index *ret, struct fault *f);

/* The second half of that: note where each piece is in its file, and check that it is there as @x says.
 * Files that are not here are left out. Return: as save_read. */
int save_check_files(int fd, struct index *x, struct fault *f);

/* Read @bytes at @offset of a piece of the checkpoint in folder @fd, whose files are open in
 * @files. */
int save_read_piece(const struct index *x, int file, const struct index_piece *p, uint64_t offset,
		    void *buf, size_t bytes, struct fault *f);
/* Open file @i for reading; one in memory needs no @fd. Return: a descriptor, the caller's; -1: @f is filled. */
int save_open_file(int fd, const struct index *x, size_t i, struct fault *f);

/* Read all data of the checkpoint in folder @fd and compare the checksums of @x, which save_read
 * has read. Return: 0 or FAULT_LOST, FAULT_CANCELLED, or another fault code. */
int save_verify(int fd, const struct index *x, struct save_progress *p, struct fault *f);

/* Where the data of a checkpoint goes to, chunk by chunk, at most SAVE_CHUNK_BYTES each. */
struct save_sink {
	/* Room for @bytes bytes of piece @piece from byte @offset on, until @put. Return: NULL: @f is
	 * filled. */
	void *(*room)(void *arg, size_t piece, uint64_t offset, size_t bytes, struct fault *f);
	/* (optional) They are there. Return: 0 or a fault code. */
	int (*put)(void *arg, size_t piece, uint64_t offset, size_t bytes, struct fault *f);
	/* (optional) Is this piece read? */
	bool (*takes)(void *arg, size_t piece);
	void *arg;
};

/* Read the data of the checkpoint in folder @fd to where @sink says, and compare the checksums: after an
 * error it has had parts of it. Return: as save_verify. */
int save_load(int fd, const struct index *x, const struct save_sink *sink, struct save_progress *p,
	      struct fault *f);

#endif
