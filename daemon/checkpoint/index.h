/*
 * The index of a checkpoint, index.json: of which job and step it is, its files, and for every
 * piece of every array where it is and its checksum. docs/checkpoints.md describes the format.
 *
 * A piece is a range of the elements of one array: of a tensor's parameters or optimizer state, of a
 * unit's buffer, or of a rank's blob. The pieces of an array are all of it, once. An index is read
 * from a file that somebody else may have written: everything in it is checked. Any thread.
 */
#ifndef SHARDD_CHECKPOINT_INDEX_H
#define SHARDD_CHECKPOINT_INDEX_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "checkpoint/tensor_file.h"
#include "core/fault.h"

#define INDEX_NAME      "index.json"
#define INDEX_VERSION   1
#define INDEX_MAX_FILES 4096u
#define INDEX_MAX_BYTES (UINT64_C(1) << 30)

/* The kinds of arrays; the optimizer state has the names of PyTorch. */
enum index_array {
	INDEX_PARAM,
	INDEX_EXP_AVG,
	INDEX_EXP_AVG_SQ,
	INDEX_MAX_EXP_AVG_SQ,
	INDEX_MOMENTUM_BUFFER,
	INDEX_BUFFER, /* of a unit, on one rank */
	INDEX_BLOB,   /* of a rank: unit and tensor are empty */
	_INDEX_ARRAY_N
};

struct index_piece {
	char *unit, *tensor; /* owned */
	uint8_t array;       /* enum index_array */
	uint8_t type;        /* enum tensor_type */
	uint32_t rank;       /* BUFFER, BLOB: whose it is; else 0 */
	uint32_t dims;
	uint64_t *shape;          /* owned: of the whole array */
	uint64_t begin, elements; /* of the array, row by row */
	uint64_t steps;           /* PARAM: steps of the optimizer; else 0 */
	uint32_t file;            /* index of files */
	uint32_t crc;             /* CRC-32C of its bytes */
	char *key;                /* owned: its name in the file */
	uint64_t file_at; /* where its bytes begin in the file; set by writing and reading */
	uint64_t source;  /* of whom writes it: where it is in their memory; else 0 */
};

/* Where the data of a file are, if there is no descriptor of it. */
#define INDEX_IN_FOLDER (-1)
#define INDEX_NOT_HERE  (-2) /* nothing of it may be read */

struct index_file {
	char *name; /* owned: without a folder */
	uint64_t bytes;
	int fd; /* borrowed: of the file, in memory; or one of the two above */
};

struct index {
	char *job; /* owned */
	uint64_t step;
	uint32_t world_size;
	uint64_t created_unix_s;
	struct index_file *files; /* owned */
	size_t n_files;
	struct index_piece *pieces; /* owned */
	size_t n_pieces, room;
	uint32_t crc; /* of one that was read: CRC-32C of its text */
};

#define INDEX_NULL ((struct index){ 0 })

/* param, exp_avg, ... Static. */
const char *index_array_name(enum index_array array);

/* @job is copied. Return: 0 or FAULT_EXHAUSTED. */
int index_init(struct index *x, const char *job, uint64_t step, uint32_t world_size,
	       struct fault *f);
/* Safe after INDEX_NULL and twice. */
void index_deinit(struct index *x);
/* Append the file @name, copied. Return: 0 or FAULT_EXHAUSTED. */
int index_add_file(struct index *x, const char *name, struct fault *f);
/* Append a piece; texts and shape of @p are copied, its key is made of them. Return: 0 or
 * a fault code. */
int index_add(struct index *x, const struct index_piece *p, struct fault *f);

/* Bytes of a piece. */
uint64_t index_piece_bytes(const struct index_piece *p);

/* Order the pieces as index_check does, which need not be all of their arrays. */
void index_sort(struct index *x);
/* Order the pieces: by unit, tensor, array, rank and first element. Check that the pieces of each array agree
 * and are all of it. Return: 0 or FAULT_LOST. */
int index_check(struct index *x, struct fault *f);

/* The first piece of an array of a tensor or a unit's buffer; the pieces are in order. Return: n_pieces: there is
 * none. */
size_t index_find(const struct index *x, const char *unit, const char *tensor,
		  enum index_array array);
/* Is @p one of that array? */
bool index_is_of(const struct index_piece *p, const char *unit, const char *tensor,
		 enum index_array array);

/* As text. @ret: the caller's to free. Return: 0 or a fault code. */
int index_encode(const struct index *x, char **ret, struct fault *f);
/* @ret: empty before. Return: 0 or FAULT_LOST (it is damaged), FAULT_UNIMPLEMENTED (of a newer
 * version), FAULT_EXHAUSTED. */
int index_decode(const char *text, size_t bytes, struct index *ret, struct fault *f);
/* The same of one whose pieces need not be all of their arrays. */
int index_decode_part(const char *text, size_t bytes, struct index *ret, struct fault *f);

#endif
