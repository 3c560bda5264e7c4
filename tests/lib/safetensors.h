/*
 * A safetensors file, read-only: tensors of fp32, bf16 and fp16, and the strings that its
 * maker said about them. Strict: what the format does not allow, and what no vector of
 * these tests needs, is refused, so that a damaged file cannot pass as a smaller one.
 */
#ifndef SHARDD_TESTS_SAFETENSORS_H
#define SHARDD_TESTS_SAFETENSORS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "kernels.h"

#define SAFETENSORS_MAX_DIMS 8

struct safetensors;

struct safetensors_tensor {
	enum dtype dtype;
	uint32_t dims;
	uint64_t shape[SAFETENSORS_MAX_DIMS];
	uint64_t elements; /* their product; 1 of no dimensions */
	const void *data;  /* borrowed from the file; aligned for the type */
};

/* Map the file at @path. @ret_why (borrowed, static): in a few words what is wrong with it.
 * Return: the file, which the caller frees; NULL if it cannot be read or is not one. */
struct safetensors *safetensors_open(const char *path, const char **ret_why);

/* Return: NULL. @f may be NULL. */
struct safetensors *safetensors_free(struct safetensors *f);
void safetensors_freep(struct safetensors **f);

/* The tensor @name. Return: whether there is one; *@ret is written only then. */
bool safetensors_tensor(const struct safetensors *f, const char *name,
			struct safetensors_tensor *ret);

/* Each string of the file's metadata, in the file's order: *@iter is NULL before the first.
 * Return: whether there was another; names and strings are borrowed. */
bool safetensors_next(const struct safetensors *f, void **iter, const char **ret_name,
		      const char **ret_about);

#endif
