#include "checkpoint/tensor_file.h"

#include <errno.h>
#include <jansson.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "core/check.h"
#include "core/cleanup.h"

#define PREFIX       8u /* also the alignment of the data */
#define DATA_UNKNOWN ((uint64_t)INT64_MAX)

static const struct {
	const char *name;
	size_t bytes;
} tensor_types[_TENSOR_N] = {
	[TENSOR_NONE] = { "none", 0 }, [TENSOR_FP32] = { "F32", 4 }, [TENSOR_BF16] = { "BF16", 2 },
	[TENSOR_FP16] = { "F16", 2 },  [TENSOR_FP64] = { "F64", 8 }, [TENSOR_INT64] = { "I64", 8 },
	[TENSOR_INT32] = { "I32", 4 }, [TENSOR_UINT8] = { "U8", 1 },
};

const char *tensor_type_name(enum tensor_type type)
{
	CHECK(type < _TENSOR_N);
	return tensor_types[type].name;
}

enum tensor_type tensor_type_of(const char *name)
{
	for (int t = TENSOR_NONE + 1; t < _TENSOR_N; t++)
		if (strcmp(tensor_types[t].name, name) == 0)
			return (enum tensor_type)t;
	return TENSOR_NONE;
}

size_t tensor_type_bytes(enum tensor_type type)
{
	CHECK(type < _TENSOR_N);
	return tensor_types[type].bytes;
}

void tensor_list_deinit(struct tensor_list *l)
{
	for (size_t i = 0; i < l->n; i++)
		free(l->entries[i].key);
	free(l->entries);
	json_decref(l->metadata);
	*l = TENSOR_LIST_NULL;
}

/* ------------------------------------------------------------------ the list */

static bool tensor_file_list_grow(struct tensor_list *l)
{
	size_t room = l->room ? 2 * l->room : 16;
	struct tensor_entry *entries;

	if (l->n < l->room)
		return true;
	entries = reallocarray(l->entries, room, sizeof(*entries));
	if (!entries)
		return false;
	l->entries = entries;
	l->room = room;
	return true;
}

/* The bytes of @e, from its type and its shape. Return: false on overflow. */
static bool tensor_file_entry_measure(const struct tensor_entry *e, uint64_t *ret)
{
	uint64_t bytes = tensor_type_bytes(e->type);

	for (uint32_t i = 0; i < e->dims; i++)
		if (__builtin_mul_overflow(bytes, e->shape[i], &bytes))
			return false;
	*ret = bytes;
	return bytes <= INT64_MAX;
}

int tensor_list_add(struct tensor_list *l, const char *key, enum tensor_type type,
		    const uint64_t *shape, uint32_t dims, struct fault *f)
{
	struct tensor_entry e = { .type = type, .dims = dims };

	CHECK(type > TENSOR_NONE && type < _TENSOR_N);
	if (dims > TENSOR_FILE_MAX_DIMS)
		return fault_set(f, FAULT_INVALID, NULL,
				 "tensor '%.200s' has %u dimensions; a checkpoint holds at most %u",
				 key, dims, TENSOR_FILE_MAX_DIMS);
	if (strlen(key) > TENSOR_FILE_MAX_KEY || !*key || strcmp(key, "__metadata__") == 0)
		return fault_set(f, FAULT_INVALID, NULL,
				 "'%.200s' cannot be the name of a tensor in a checkpoint", key);
	if (dims)
		memcpy(e.shape, shape, dims * sizeof(*shape));
	if (!tensor_file_entry_measure(&e, &e.bytes))
		return fault_set(f, FAULT_INVALID, NULL, "tensor '%.200s' is too large", key);
	e.key = strdup(key);
	if (!e.key || !tensor_file_list_grow(l)) {
		free(e.key);
		return fault_errno(f, -ENOMEM, "listing the tensors of a checkpoint");
	}
	l->entries[l->n++] = e;
	return 0;
}

uint64_t tensor_list_bytes(const struct tensor_list *l)
{
	uint64_t bytes = 0;

	for (size_t i = 0; i < l->n; i++)
		bytes += l->entries[i].bytes;
	return bytes;
}

/* ---------------------------------------------------------------- the header */

static bool tensor_file_list_place(struct tensor_list *l)
{
	uint64_t at = 0;

	for (size_t size = 8; size; size /= 2)
		for (size_t i = 0; i < l->n; i++) {
			struct tensor_entry *e = &l->entries[i];

			if (tensor_type_bytes(e->type) != size)
				continue;
			e->begin = at;
			if (__builtin_add_overflow(at, e->bytes, &at) || at > INT64_MAX)
				return false;
		}
	return true;
}

static json_t *tensor_file_entry_json(const struct tensor_entry *e)
{
	json_t *shape = json_array();

	for (uint32_t i = 0; i < e->dims; i++)
		if (json_array_append_new(shape, json_integer((json_int_t)e->shape[i]))) {
			json_decref(shape);
			return NULL;
		}
	return json_pack("{s:s, s:o, s:[I, I]}", "dtype", tensor_type_name(e->type), "shape", shape,
			 "data_offsets", (json_int_t)e->begin, (json_int_t)(e->begin + e->bytes));
}

/* Return: a new reference, or NULL with @f filled. */
static json_t *tensor_file_list_json(const struct tensor_list *l, struct fault *f)
{
	json_t *header = json_object();

	for (size_t i = 0; header && i < l->n; i++) {
		const char *key = l->entries[i].key;
		json_t *entry = tensor_file_entry_json(&l->entries[i]);

		if (json_object_get(header, key))
			fault_set(f, FAULT_INVALID, NULL, "two tensors have the name '%.200s'",
				  key);
		if (f->code || !entry || json_object_set_new(header, key, entry) == 0) {
			if (!f->code && entry)
				continue;
			json_decref(entry);
		}
		json_decref(header);
		header = NULL;
	}
	if (!header)
		fault_set(f, FAULT_INVALID, NULL,
			  "a tensor's name is not UTF-8, or there is no memory for the header");
	return header;
}

static int tensor_file_list_frame(struct tensor_list *l, const char *text, char **ret,
				  size_t *ret_bytes, struct fault *f)
{
	size_t n = strlen(text), padded = (n + PREFIX - 1) / PREFIX * PREFIX;
	uint64_t prefix = padded;
	char *out;

	if (padded > TENSOR_FILE_MAX_HEADER)
		return fault_set(f, FAULT_EXHAUSTED, NULL,
				 "the header of a file of %zu tensors has %zu bytes; safetensors "
				 "allows %u",
				 l->n, padded, TENSOR_FILE_MAX_HEADER);
	out = malloc(PREFIX + padded);
	if (!out)
		return fault_errno(f, -ENOMEM, "writing the header of a checkpoint");
	for (unsigned i = 0; i < PREFIX; i++)
		out[i] = (char)(prefix >> 8 * i & 0xff);
	memcpy(out + PREFIX, text, n);
	memset(out + PREFIX + n, ' ', padded - n);
	l->data_at = *ret_bytes = PREFIX + padded;
	*ret = out;
	return 0;
}

int tensor_list_encode(struct tensor_list *l, char **ret, size_t *ret_bytes, struct fault *f)
{
	_cleanup_(freep) char *text = NULL;
	json_t *header;

	if (!tensor_file_list_place(l))
		return fault_set(f, FAULT_INVALID, NULL, "the tensors of a file are too large");
	header = tensor_file_list_json(l, f);
	if (!header)
		return f->code;
	text = json_dumps(header, JSON_COMPACT);
	json_decref(header);
	if (!text)
		return fault_errno(f, -ENOMEM, "writing the header of a checkpoint");
	return tensor_file_list_frame(l, text, ret, ret_bytes, f);
}

/* --------------------------------------------------------------- reading one */

static int tensor_file_bad(struct fault *f, const char *name, const char *why)
{
	return fault_set(f, FAULT_LOST, NULL, "'%.200s' is not a whole safetensors file: %s", name,
			 why);
}

static bool tensor_file_count(const json_t *number, uint64_t *ret)
{
	if (!json_is_integer(number) || json_integer_value(number) < 0)
		return false;
	*ret = (uint64_t)json_integer_value(number);
	return true;
}

/* Return: NULL, or what is wrong. */
static const char *tensor_file_entry_parse(const json_t *j, uint64_t data, struct tensor_entry *e)
{
	const json_t *shape = json_object_get(j, "shape");
	const json_t *offsets = json_object_get(j, "data_offsets");
	const char *type = json_string_value(json_object_get(j, "dtype"));
	uint64_t end, bytes;

	e->type = type ? tensor_type_of(type) : TENSOR_NONE;
	if (e->type == TENSOR_NONE)
		return "a tensor's dtype is none of F32, BF16, F16, F64, I64, I32 and U8";
	if (!json_is_array(shape) || json_array_size(shape) > TENSOR_FILE_MAX_DIMS)
		return "a tensor's shape is not a list of at most 32 numbers";
	e->dims = (uint32_t)json_array_size(shape);
	for (uint32_t i = 0; i < e->dims; i++)
		if (!tensor_file_count(json_array_get(shape, i), &e->shape[i]))
			return "a tensor's shape has something else than numbers";
	if (json_array_size(offsets) != 2 ||
	    !tensor_file_count(json_array_get(offsets, 0), &e->begin) ||
	    !tensor_file_count(json_array_get(offsets, 1), &end) || end < e->begin || end > data)
		return "a tensor's data_offsets are not inside the file";
	e->bytes = end - e->begin;
	if (!tensor_file_entry_measure(e, &bytes) || bytes != e->bytes)
		return "a tensor's data_offsets are not the bytes of its shape";
	return NULL;
}

static int tensor_file_entry_by_place(const void *a, const void *b)
{
	const struct tensor_entry *x = a, *y = b;

	if (x->begin != y->begin)
		return x->begin < y->begin ? -1 : 1;
	return (x->bytes > y->bytes) - (x->bytes < y->bytes);
}

static int tensor_file_entry_by_key(const void *a, const void *b)
{
	const struct tensor_entry *x = a, *y = b;

	return strcmp(x->key, y->key);
}

/* @data: its bytes; DATA_UNKNOWN: as many as the tensors have. */
static bool tensor_file_list_covers(struct tensor_list *l, uint64_t data)
{
	uint64_t at = 0;

	if (l->n)
		qsort(l->entries, l->n, sizeof(*l->entries), tensor_file_entry_by_place);
	for (size_t i = 0; i < l->n; i++) {
		if (l->entries[i].begin != at)
			return false;
		at += l->entries[i].bytes;
	}
	if (l->n)
		qsort(l->entries, l->n, sizeof(*l->entries), tensor_file_entry_by_key);
	return data == DATA_UNKNOWN || at == data;
}

static int tensor_file_list_parse(const json_t *header, uint64_t data, const char *name,
				  struct tensor_list *l, struct fault *f)
{
	const char *key, *why;
	json_t *j;

	json_object_foreach((json_t *)(uintptr_t)header, key, j)
	{
		struct tensor_entry e = { 0 };

		if (strcmp(key, "__metadata__") == 0) {
			l->metadata = json_is_object(j) ? json_incref(j) : NULL;
			continue;
		}
		why = strlen(key) > TENSOR_FILE_MAX_KEY ? "a tensor's name is too long"
							: tensor_file_entry_parse(j, data, &e);
		if (why)
			return tensor_file_bad(f, name, why);
		e.key = strdup(key);
		if (!e.key || !tensor_file_list_grow(l)) {
			free(e.key);
			return fault_errno(f, -ENOMEM, "reading the header of a checkpoint");
		}
		l->entries[l->n++] = e;
	}
	if (!tensor_file_list_covers(l, data))
		return tensor_file_bad(f, name,
				       "tensors overlap, or bytes of the file are in no tensor");
	return 0;
}

/* @at: -1: of a pipe, what comes next. */
static int tensor_file_read(int fd, const char *name, void *buf, size_t bytes, off_t at,
			    struct fault *f)
{
	while (bytes) {
		ssize_t n = at < 0 ? read(fd, buf, bytes) : pread(fd, buf, bytes, at);

		if (n < 0 && errno == EINTR)
			continue;
		if (n < 0)
			return fault_errno(f, -errno, name);
		if (n == 0)
			return tensor_file_bad(f, name, "it is shorter than its header says");
		buf = (char *)buf + n;
		bytes -= (size_t)n;
		at += at < 0 ? 0 : n;
	}
	return 0;
}

/* @file_bytes: of a whole file; 0: of a pipe. */
static int tensor_file_read_header(int fd, const char *name, uint64_t file_bytes,
				   struct tensor_list *ret, struct fault *f)
{
	_cleanup_(freep) char *text = NULL;
	unsigned char prefix[PREFIX];
	uint64_t bytes = 0, data;
	json_t *header;

	if (tensor_file_read(fd, name, prefix, PREFIX, file_bytes ? 0 : -1, f))
		return f->code;
	for (unsigned i = 0; i < PREFIX; i++)
		bytes |= (uint64_t)prefix[i] << 8 * i;
	if (bytes > TENSOR_FILE_MAX_HEADER || (file_bytes && bytes > file_bytes - PREFIX))
		return tensor_file_bad(f, name, "its header is longer than the file, or too long");
	text = malloc(bytes + 1);
	if (!text)
		return fault_errno(f, -ENOMEM, "reading the header of a checkpoint");
	if (tensor_file_read(fd, name, text, bytes, file_bytes ? (off_t)PREFIX : -1, f))
		return f->code;
	header = json_loadb(text, bytes, JSON_REJECT_DUPLICATES, NULL);
	if (!json_is_object(header)) {
		json_decref(header);
		return tensor_file_bad(f, name, "its header is not a JSON object");
	}
	ret->data_at = PREFIX + bytes;
	data = file_bytes ? file_bytes - ret->data_at : DATA_UNKNOWN;
	tensor_file_list_parse(header, data, name, ret, f);
	json_decref(header);
	return f->code;
}

int tensor_list_read(int fd, const char *name, struct tensor_list *ret, struct fault *f)
{
	struct stat st;

	if (fstat(fd, &st) < 0)
		return fault_errno(f, -errno, name);
	if (!S_ISFIFO(st.st_mode) && (!S_ISREG(st.st_mode) || st.st_size < (off_t)PREFIX))
		return tensor_file_bad(f, name, "it is too short for a header");
	if (tensor_file_read_header(fd, name, S_ISFIFO(st.st_mode) ? 0 : (uint64_t)st.st_size, ret,
				    f))
		tensor_list_deinit(ret);
	return f->code;
}

const char *tensor_list_metadata(const struct tensor_list *l, const char *key)
{
	return json_string_value(json_object_get(l->metadata, key));
}

const struct tensor_entry *tensor_list_find(const struct tensor_list *l, const char *key)
{
	const struct tensor_entry wanted = { .key = (char *)(uintptr_t)key };

	return l->n ? bsearch(&wanted, l->entries, l->n, sizeof(wanted), tensor_file_entry_by_key)
		    : NULL;
}
