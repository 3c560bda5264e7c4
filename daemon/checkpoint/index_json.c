/* The index as JSON: {"crc32c": CHECKSUM, "checkpoint": {...}}. The checksum is of the second
 * value, printed without spaces and with sorted keys. */
#include "checkpoint/index.h"

#include <errno.h>
#include <inttypes.h>
#include <jansson.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "crc32c.h"
#include "core/cleanup.h"

#define FORMAT    "shardd-checkpoint"
#define CANONICAL (JSON_COMPACT | JSON_SORT_KEYS)
#define CRC_TEXT  9 /* eight digits */

static void index_json_freep(json_t **j)
{
	json_decref(*j);
	*j = NULL;
}

static void index_json_crc_text(uint32_t crc, char text[CRC_TEXT])
{
	snprintf(text, CRC_TEXT, "%08" PRIx32, crc);
}

/* Return: a new reference, or NULL. */
static json_t *index_json_piece_json(const struct index *x, const struct index_piece *p)
{
	json_t *shape = json_array(), *j;
	char crc[CRC_TEXT];
	int bad = 0;

	index_json_crc_text(p->crc, crc);
	for (uint32_t i = 0; i < p->dims; i++)
		bad |= json_array_append_new(shape, json_integer((json_int_t)p->shape[i]));
	j = json_pack("{s:s, s:s, s:s, s:s, s:o, s:I, s:I, s:s, s:s, s:s}", "unit", p->unit,
		      "tensor", p->tensor, "array", index_array_name(p->array), "dtype",
		      tensor_type_name(p->type), "shape", shape, "begin", (json_int_t)p->begin,
		      "elements", (json_int_t)p->elements, "file", x->files[p->file].name, "key",
		      p->key, "crc32c", crc);
	if (p->array == INDEX_PARAM)
		bad |= json_object_set_new(j, "steps", json_integer((json_int_t)p->steps));
	if (p->array == INDEX_BUFFER || p->array == INDEX_BLOB)
		bad |= json_object_set_new(j, "rank", json_integer(p->rank));
	if (bad) {
		json_decref(j);
		return NULL;
	}
	return j;
}

/* Return: a new reference, or NULL. */
static json_t *index_json_make(const struct index *x)
{
	json_t *files = json_array(), *pieces = json_array();
	int bad = 0;

	for (size_t i = 0; i < x->n_files; i++)
		bad |= json_array_append_new(files,
					     json_pack("{s:s, s:I}", "name", x->files[i].name,
						       "bytes", (json_int_t)x->files[i].bytes));
	for (size_t i = 0; i < x->n_pieces; i++)
		bad |= json_array_append_new(pieces, index_json_piece_json(x, &x->pieces[i]));
	if (bad) {
		json_decref(files);
		json_decref(pieces);
		return NULL;
	}
	return json_pack("{s:s, s:i, s:s, s:I, s:I, s:I, s:o, s:o}", "format", FORMAT, "version",
			 INDEX_VERSION, "job", x->job, "step", (json_int_t)x->step, "world_size",
			 (json_int_t)x->world_size, "created_unix_s", (json_int_t)x->created_unix_s,
			 "files", files, "pieces", pieces);
}

/* The checksum of @j. Return: false without memory. */
static bool index_json_crc(const json_t *j, char ret[CRC_TEXT])
{
	_cleanup_(freep) char *text = json_dumps(j, CANONICAL);

	if (text)
		index_json_crc_text(crc32c_add(0, text, strlen(text)), ret);
	return text;
}

int index_encode(const struct index *x, char **ret, struct fault *f)
{
	_cleanup_(index_json_freep) json_t *j = index_json_make(x), *all = NULL;
	char crc[CRC_TEXT];

	if (j && index_json_crc(j, crc))
		all = json_pack("{s:s, s:O}", "crc32c", crc, "checkpoint", j);
	*ret = all ? json_dumps(all, JSON_INDENT(1) | JSON_SORT_KEYS) : NULL;
	if (!*ret)
		return fault_set(f, FAULT_INVALID, NULL,
				 "the index of the checkpoint cannot be written: a name is not "
				 "UTF-8, or there is no memory");
	return 0;
}

/* ---------------------------------------------------------------------- reading */

static int index_json_bad(struct fault *f, const char *why)
{
	return fault_set(f, FAULT_LOST, NULL, "%s is not a whole index of a checkpoint: %s",
			 INDEX_NAME, why);
}

/* Return: whether there is the number @key, up to @most. */
static bool index_json_number(const json_t *j, const char *key, uint64_t most, uint64_t *ret)
{
	const json_t *n = json_object_get(j, key);

	if (!json_is_integer(n) || json_integer_value(n) < 0 ||
	    (uint64_t)json_integer_value(n) > most)
		return false;
	*ret = (uint64_t)json_integer_value(n);
	return true;
}

static bool index_json_is_file_name(const char *name)
{
	return name && *name && *name != '.' && !strchr(name, '/') && strlen(name) < 256 &&
	       strcmp(name, INDEX_NAME) != 0;
}

static int index_json_read_files(const json_t *files, struct index *x, struct fault *f)
{
	if (!json_is_array(files) || json_array_size(files) > INDEX_MAX_FILES)
		return index_json_bad(f, "files is not a list of at most 4096 files");
	for (size_t i = 0; i < json_array_size(files); i++) {
		const json_t *j = json_array_get(files, i);
		const char *name = json_string_value(json_object_get(j, "name"));
		uint64_t bytes;

		if (!index_json_is_file_name(name) ||
		    !index_json_number(j, "bytes", INT64_MAX, &bytes))
			return index_json_bad(f, "a file has no plain name, or no size");
		for (size_t k = 0; k < i; k++)
			if (strcmp(x->files[k].name, name) == 0)
				return index_json_bad(f, "a file is listed twice");
		if (index_add_file(x, name, f))
			return f->code;
		x->files[i].bytes = bytes;
	}
	return 0;
}

static bool index_json_read_array(const json_t *j, struct index_piece *p)
{
	const char *name = json_string_value(json_object_get(j, "array"));
	const char *type = json_string_value(json_object_get(j, "dtype"));
	uint64_t rank = 0;

	for (p->array = 0; p->array < _INDEX_ARRAY_N; p->array++)
		if (name && strcmp(name, index_array_name(p->array)) == 0)
			break;
	p->type = (uint8_t)(type ? tensor_type_of(type) : TENSOR_NONE);
	if (p->array == _INDEX_ARRAY_N || p->type == TENSOR_NONE)
		return false;
	if (p->array == INDEX_PARAM && !index_json_number(j, "steps", INT64_MAX, &p->steps))
		return false;
	if ((p->array == INDEX_BUFFER || p->array == INDEX_BLOB) &&
	    !index_json_number(j, "rank", UINT32_MAX, &rank))
		return false;
	p->rank = (uint32_t)rank;
	return true;
}

static bool index_json_read_shape(const json_t *j, struct index_piece *p)
{
	const json_t *shape = json_object_get(j, "shape");
	uint64_t bytes = tensor_type_bytes(p->type);

	if (!json_is_array(shape) || json_array_size(shape) > TENSOR_FILE_MAX_DIMS)
		return false;
	p->dims = (uint32_t)json_array_size(shape);
	for (uint32_t i = 0; i < p->dims; i++) {
		const json_t *n = json_array_get(shape, i);

		if (!json_is_integer(n) || json_integer_value(n) < 0)
			return false;
		p->shape[i] = (uint64_t)json_integer_value(n);
		if (__builtin_mul_overflow(bytes, p->shape[i], &bytes) || bytes > INT64_MAX)
			return false;
	}
	return index_json_number(j, "begin", INT64_MAX, &p->begin) &&
	       index_json_number(j, "elements", INT64_MAX, &p->elements) &&
	       p->elements <= bytes; /* so the bytes of a piece do not overflow: index_check */
}

static bool index_json_read_crc(const json_t *j, uint32_t *ret)
{
	const char *text = json_string_value(json_object_get(j, "crc32c"));

	if (!text || strlen(text) != CRC_TEXT - 1 ||
	    strspn(text, "0123456789abcdef") != CRC_TEXT - 1)
		return false;
	*ret = (uint32_t)strtoul(text, NULL, 16);
	return true;
}

static bool index_json_read_file(const json_t *j, const struct index *x, struct index_piece *p)
{
	const char *name = json_string_value(json_object_get(j, "file"));

	for (p->file = 0; name && p->file < x->n_files; p->file++)
		if (strcmp(x->files[p->file].name, name) == 0)
			return true;
	return false;
}

static int index_json_read_piece(const json_t *j, struct index *x, struct fault *f)
{
	const char *unit = json_string_value(json_object_get(j, "unit"));
	const char *tensor = json_string_value(json_object_get(j, "tensor"));
	const char *key = json_string_value(json_object_get(j, "key"));
	uint64_t shape[TENSOR_FILE_MAX_DIMS];
	struct index_piece p = { .unit = (char *)(uintptr_t)unit,
				 .tensor = (char *)(uintptr_t)tensor,
				 .shape = shape };

	if (!unit || !tensor || !key || !index_json_read_array(j, &p) ||
	    !index_json_read_shape(j, &p) || !index_json_read_crc(j, &p.crc) ||
	    !index_json_read_file(j, x, &p))
		return index_json_bad(f,
				      "a piece lacks a field, or a field has an impossible value");
	if (index_add(x, &p, f))
		return f->code;
	if (strcmp(x->pieces[x->n_pieces - 1].key, key) != 0)
		return index_json_bad(f, "a piece has a key that is not its own");
	return 0;
}

static int index_json_read(const json_t *j, struct index *x, struct fault *f)
{
	const json_t *pieces = json_object_get(j, "pieces");
	const char *job = json_string_value(json_object_get(j, "job"));
	uint64_t step, ranks, created;

	if (!job || !index_json_number(j, "step", INT64_MAX, &step) ||
	    !index_json_number(j, "world_size", UINT32_MAX, &ranks) ||
	    !index_json_number(j, "created_unix_s", INT64_MAX, &created) || !json_is_array(pieces))
		return index_json_bad(f,
				      "it lacks job, step, world_size, created_unix_s or pieces");
	if (index_init(x, job, step, (uint32_t)ranks, f))
		return f->code;
	x->created_unix_s = created;
	index_json_read_files(json_object_get(j, "files"), x, f);
	for (size_t i = 0; !f->code && i < json_array_size(pieces); i++)
		index_json_read_piece(json_array_get(pieces, i), x, f);
	return f->code;
}

/* Is @all a checkpoint's index, of this version, with its own checksum? */
static int index_json_check_frame(const json_t *all, struct fault *f)
{
	const json_t *j = json_object_get(all, "checkpoint");
	const char *said = json_string_value(json_object_get(all, "crc32c"));
	const char *format = json_string_value(json_object_get(j, "format"));
	uint64_t version;
	char crc[CRC_TEXT];

	if (!said || !format || strcmp(format, FORMAT) != 0 ||
	    !index_json_number(j, "version", INT64_MAX, &version))
		return index_json_bad(f, "it lacks crc32c, format or version");
	if (version != INDEX_VERSION)
		return fault_set(f, FAULT_UNIMPLEMENTED, NULL,
				 "the checkpoint has version %" PRIu64 " of the format; this "
				 "program reads version %d: use a newer shardd",
				 version, INDEX_VERSION);
	if (!index_json_crc(j, crc))
		return fault_errno(f, -ENOMEM, "checking the index of a checkpoint");
	if (strcmp(crc, said) != 0)
		return index_json_bad(f, "its checksum is another one");
	return 0;
}

int index_decode_part(const char *text, size_t bytes, struct index *ret, struct fault *f)
{
	_cleanup_(index_json_freep) json_t *all =
		json_loadb(text, bytes, JSON_REJECT_DUPLICATES, NULL);

	if (!json_is_object(all))
		return index_json_bad(f, "it is not a JSON object");
	if (index_json_check_frame(all, f))
		return f->code;
	if (index_json_read(json_object_get(all, "checkpoint"), ret, f))
		index_deinit(ret);
	else
		ret->crc = crc32c_add(0, text, bytes);
	return f->code;
}

int index_decode(const char *text, size_t bytes, struct index *ret, struct fault *f)
{
	if (index_decode_part(text, bytes, ret, f) == 0 && index_check(ret, f))
		index_deinit(ret);
	return f->code;
}
