/*
 * A safetensors file: 8 bytes (length of the header, little endian), the header (JSON: for each
 * tensor its dtype, its shape and its range of the data), the data. The ranges cover the data without
 * a gap, so that a damaged file cannot pass as a smaller one. Headers are read from files that
 * somebody else may have written: everything in them is checked. Any thread; blocks for the disk.
 */
#ifndef SHARDD_CHECKPOINT_TENSOR_FILE_H
#define SHARDD_CHECKPOINT_TENSOR_FILE_H

#include <stddef.h>
#include <stdint.h>

#include "core/fault.h"

struct json_t;

#define TENSOR_FILE_MAX_DIMS 32u
/* The safetensors library accepts no longer header. */
#define TENSOR_FILE_MAX_HEADER 100000000u
#define TENSOR_FILE_MAX_KEY    2047u

enum tensor_type {
	TENSOR_NONE,
	TENSOR_FP32,
	TENSOR_BF16,
	TENSOR_FP16,
	TENSOR_FP64,
	TENSOR_INT64,
	TENSOR_INT32,
	TENSOR_UINT8,
	_TENSOR_N
};

/* F32, BF16, ... as in the header. Static. */
const char *tensor_type_name(enum tensor_type type);
/* Return: TENSOR_NONE of a name that is none. */
enum tensor_type tensor_type_of(const char *name);
/* Bytes of an element. */
size_t tensor_type_bytes(enum tensor_type type);

struct tensor_entry {
	char *key; /* owned by the list */
	enum tensor_type type;
	uint32_t dims;
	uint64_t shape[TENSOR_FILE_MAX_DIMS];
	uint64_t begin, bytes; /* of the data */
};

struct tensor_list {
	struct tensor_entry *entries; /* owned */
	size_t n, room;
	uint64_t data_at;        /* where in the file the data begins; set by encode and read */
	struct json_t *metadata; /* owned: __metadata__ of the header, an object; NULL: none */
};

#define TENSOR_LIST_NULL ((struct tensor_list){ 0 })

void tensor_list_deinit(struct tensor_list *l);

/* Append a tensor with a copy of @key and @shape. Its place is not known before
 * tensor_list_encode. Return: 0, FAULT_INVALID (the name or the shape is not possible) or
 * FAULT_EXHAUSTED. */
int tensor_list_add(struct tensor_list *l, const char *key, enum tensor_type type,
		    const uint64_t *shape, uint32_t dims, struct fault *f);

/* Assign the places, the largest types first and otherwise in the order of the list, so that each
 * tensor is aligned for its type. @ret: the prefix and the header, the caller's to free; its length
 * is data_at. Return: 0 or a fault code. */
int tensor_list_encode(struct tensor_list *l, char **ret, size_t *ret_bytes, struct fault *f);

/* Bytes of the data: after encode or read. */
uint64_t tensor_list_bytes(const struct tensor_list *l);

/* Return: the entry @key (borrowed), or NULL. */
const struct tensor_entry *tensor_list_find(const struct tensor_list *l, const char *key);

/* Return: the text @key of the metadata (borrowed), or NULL. */
const char *tensor_list_metadata(const struct tensor_list *l, const char *key);

/* Read the header of the file or pipe @fd; of a pipe nothing behind it, and whether all data comes is
 * for the reader to see. @name: of the file, for errors. @ret: empty before; its entries are sorted
 * by key. Return: 0 or a fault code: FAULT_LOST of a file that is not whole. */
int tensor_list_read(int fd, const char *name, struct tensor_list *ret, struct fault *f);

#endif
