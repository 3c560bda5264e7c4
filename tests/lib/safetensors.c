/*
 * Bytes of a header (64 bits, little endian), the header (JSON), the data. Each tensor is
 * a range of the data; together they are all of it, once.
 */
#include "core/check.h"
#include "safetensors.h"

#include <fcntl.h>
#include <jansson.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "core/cleanup.h"

#define PREFIX 8

struct safetensors {
	const char *base; /* the whole file, mapped */
	size_t size;
	const char *data; /* behind the header */
	size_t data_size;
	json_t *header;
	json_t *about; /* of the header, or NULL */
};

struct safetensors *safetensors_free(struct safetensors *f)
{
	if (!f)
		return NULL;
	json_decref(f->header);
	if (f->base)
		munmap((void *)(uintptr_t)f->base, f->size);
	free(f);
	return NULL;
}

void safetensors_freep(struct safetensors **f)
{
	*f = safetensors_free(*f);
}

static const char *map(struct safetensors *f, const char *path)
{
	_cleanup_(fd_closep) int fd = open(path, O_RDONLY | O_CLOEXEC);
	struct stat st;
	void *base;

	if (fd < 0 || fstat(fd, &st) < 0)
		return "cannot be opened";
	if (st.st_size < PREFIX)
		return "too short for a header";
	base = mmap(NULL, (size_t)st.st_size, PROT_READ, MAP_SHARED, fd, 0);
	if (base == MAP_FAILED)
		return "cannot be mapped";
	f->base = base;
	f->size = (size_t)st.st_size;
	return NULL;
}

static const char *parse(struct safetensors *f)
{
	uint64_t bytes;

	memcpy(&bytes, f->base, PREFIX);
	if (bytes > f->size - PREFIX)
		return "header longer than the file";
	f->data = f->base + PREFIX + bytes;
	f->data_size = f->size - PREFIX - (size_t)bytes;
	f->header = json_loadb(f->base + PREFIX, (size_t)bytes, JSON_REJECT_DUPLICATES, NULL);
	if (!json_is_object(f->header))
		return "header is not a JSON object";
	f->about = json_object_get(f->header, "__metadata__");
	return NULL;
}

static enum dtype dtype_of(const json_t *entry)
{
	const char *name = json_string_value(json_object_get(entry, "dtype"));

	if (!name)
		return DTYPE_NONE;
	return strcmp(name, "F32") == 0    ? DTYPE_FP32
	       : strcmp(name, "BF16") == 0 ? DTYPE_BF16
	       : strcmp(name, "F16") == 0  ? DTYPE_FP16
					   : DTYPE_NONE;
}

/* A number that counts something. Return: whether it is one. */
static bool count(const json_t *number, uint64_t *ret)
{
	if (!json_is_integer(number) || json_integer_value(number) < 0)
		return false;
	*ret = (uint64_t)json_integer_value(number);
	return true;
}

static const char *shape_of(const json_t *entry, struct safetensors_tensor *ret)
{
	const json_t *shape = json_object_get(entry, "shape");

	if (!json_is_array(shape) || json_array_size(shape) > SAFETENSORS_MAX_DIMS)
		return "shape";
	ret->dims = (uint32_t)json_array_size(shape);
	ret->elements = 1;
	for (uint32_t i = 0; i < ret->dims; i++)
		if (!count(json_array_get(shape, i), &ret->shape[i]) ||
		    __builtin_mul_overflow(ret->elements, ret->shape[i], &ret->elements))
			return "shape";
	return NULL;
}

/* One tensor of the header. Return: NULL, or which part of it is wrong. */
static const char *read_entry(const struct safetensors *f, const json_t *entry,
			      struct safetensors_tensor *ret, uint64_t *ret_begin,
			      uint64_t *ret_end)
{
	const json_t *offsets = json_object_get(entry, "data_offsets");
	uint64_t bytes;
	const char *why;

	ret->dtype = dtype_of(entry);
	if (ret->dtype == DTYPE_NONE)
		return "dtype";
	why = shape_of(entry, ret);
	if (why)
		return why;
	if (json_array_size(offsets) != 2 || json_object_size(entry) != 3 ||
	    !count(json_array_get(offsets, 0), ret_begin) ||
	    !count(json_array_get(offsets, 1), ret_end) || *ret_end < *ret_begin ||
	    *ret_end > f->data_size)
		return "data_offsets";
	if (__builtin_mul_overflow(ret->elements, dtype_size(ret->dtype), &bytes) ||
	    bytes != *ret_end - *ret_begin)
		return "data_offsets that are not the bytes of the shape";
	ret->data = f->data + *ret_begin;
	CHECK(dtype_size(ret->dtype) > 0);
	if ((uintptr_t)ret->data % dtype_size(ret->dtype))
		return "data_offsets that are not aligned";
	return NULL;
}

struct range {
	uint64_t begin, end;
};

static int by_begin(const void *a, const void *b)
{
	const struct range *x = a, *y = b;

	if (x->begin != y->begin)
		return x->begin < y->begin ? -1 : 1;
	return (x->end > y->end) - (x->end < y->end);
}

/* No hole between the tensors, and no byte in two of them. */
static const char *check_cover(const struct safetensors *f, struct range *ranges, size_t n)
{
	uint64_t at = 0;

	if (n)
		qsort(ranges, n, sizeof(*ranges), by_begin);
	for (size_t i = 0; i < n; i++) {
		if (ranges[i].begin != at)
			return "tensors that overlap, or bytes between them";
		at = ranges[i].end;
	}
	return at == f->data_size ? NULL : "bytes behind the last tensor";
}

static const char *check_about(const struct safetensors *f)
{
	const char *key;
	json_t *value;

	if (!f->about)
		return NULL;
	if (!json_is_object(f->about))
		return "__metadata__ is not an object";
	json_object_foreach(f->about, key, value) if (
		!json_is_string(value)) return "__metadata__ has something else than strings";
	return NULL;
}

static const char *safetensors_check(const struct safetensors *f)
{
	_cleanup_(freep) struct range *ranges =
		calloc(json_object_size(f->header) + 1, sizeof(*ranges));
	struct safetensors_tensor t;
	const char *key, *why = check_about(f);
	json_t *entry;
	size_t n = 0;

	if (!ranges)
		return "no memory";
	json_object_foreach(f->header, key, entry)
	{
		if (entry == f->about)
			continue;
		if (!why)
			why = read_entry(f, entry, &t, &ranges[n].begin, &ranges[n].end);
		n++;
	}
	return why ? why : check_cover(f, ranges, n);
}

struct safetensors *safetensors_open(const char *path, const char **ret_why)
{
	struct safetensors *f = calloc(1, sizeof(*f));
	const char *why = f ? map(f, path) : "no memory";

	if (!why)
		why = parse(f);
	if (!why)
		why = safetensors_check(f);
	if (!why)
		return f;
	*ret_why = why;
	return safetensors_free(f);
}

bool safetensors_tensor(const struct safetensors *f, const char *name,
			struct safetensors_tensor *ret)
{
	const json_t *entry = json_object_get(f->header, name);
	struct safetensors_tensor t = { .dtype = DTYPE_NONE };
	uint64_t begin, end;

	if (!entry || entry == f->about || read_entry(f, entry, &t, &begin, &end))
		return false;
	*ret = t;
	return true;
}

bool safetensors_next(const struct safetensors *f, void **iter, const char **ret_name,
		      const char **ret_about)
{
	*iter = *iter ? json_object_iter_next(f->about, *iter) : json_object_iter(f->about);
	if (!*iter)
		return false;
	*ret_name = json_object_iter_key(*iter);
	*ret_about = json_string_value(json_object_iter_value(*iter));
	return true;
}
