#include "checkpoint/import.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "checkpoint/save.h"
#include "core/check.h"
#include "core/cleanup.h"

#define FILE_NAME "shard-00000.safetensors"

struct import {
	int fd;
	bool pipe;
	const struct import_options *o;
	struct index *x;
	struct tensor_list list;
	uint64_t at; /* bytes of the data that were taken out of the pipe */
	char *chunk; /* owned */
	struct fault *f;
};

/* ------------------------------------------------------------------------------ keys */

static int import_bad(struct import *im, const char *key, const char *why)
{
	return fault_set(im->f, FAULT_INVALID, NULL, "tensor '%.200s' of '%.200s' %s", key,
			 im->o->name, why);
}

/* Decimal, up to @most. Return: whether it is one. */
static bool import_number(const char *text, uint64_t most, uint64_t *ret)
{
	char *end;

	if (!text || *text < '0' || *text > '9')
		return false;
	errno = 0;
	*ret = strtoull(text, &end, 10);
	return !errno && !*end && *ret <= most;
}

static unsigned import_digit(char c)
{
	return c >= 'A' && c <= 'F' ? (unsigned)(c - 'A' + 10) : (unsigned)(c - '0');
}

/* Take what is %XX for itself. What is no such code makes another key than it was: import_add. */
static void import_unescape(char *text)
{
	char *to = text;

	for (; *text; text++)
		if (*text == '%' && text[1] && text[2]) {
			*to++ = (char)(import_digit(text[1]) << 4 | import_digit(text[2]));
			text += 2;
		} else {
			*to++ = *text;
		}
	*to = '\0';
}

/* Cut the text @at at its first slash. Return: what is behind it; NULL: there is none. */
static char *import_cut(char *at)
{
	char *slash = at ? strchr(at, '/') : NULL;

	if (!slash)
		return NULL;
	*slash = '\0';
	return slash + 1;
}

static bool import_parse_rank(const char *text, struct index_piece *p)
{
	uint64_t rank;

	if (!import_number(text, UINT32_MAX, &rank))
		return false;
	p->rank = (uint32_t)rank;
	return true;
}

/* @key: ARRAY/UNIT/TENSOR, buffer/RANK/UNIT/TENSOR or blob/RANK; changed, and what @p refers to.
 * Return: whether it is. */
static bool import_parse_key(char *key, struct index_piece *p)
{
	char *rest = import_cut(key), *tensor;

	for (p->array = 0; rest && p->array < _INDEX_ARRAY_N; p->array++)
		if (strcmp(key, index_array_name((enum index_array)p->array)) == 0)
			break;
	if (!rest || p->array == _INDEX_ARRAY_N)
		return false;
	if (p->array == INDEX_BLOB) {
		p->unit = p->tensor = rest + strlen(rest);
		return import_parse_rank(rest, p);
	}
	if (p->array == INDEX_BUFFER) {
		tensor = import_cut(rest);
		if (!tensor || !import_parse_rank(rest, p))
			return false;
		rest = tensor;
	}
	tensor = import_cut(rest);
	if (!tensor || !*rest || !*tensor)
		return false;
	import_unescape(rest);
	import_unescape(tensor);
	p->unit = rest;
	p->tensor = tensor;
	return true;
}

/* ---------------------------------------------------------------------------- pieces */

static bool import_is_state(uint8_t array)
{
	return array > INDEX_PARAM && array < INDEX_BUFFER;
}

static int import_check_type(struct import *im, const struct tensor_entry *e, uint8_t array)
{
	if (array == INDEX_BLOB && (e->type != TENSOR_UINT8 || e->dims != 1))
		return import_bad(im, e->key, "is a blob: it must be U8 with one dimension");
	if (import_is_state(array) && e->type != TENSOR_FP32)
		return import_bad(im, e->key, "is the state of an optimizer: it must be F32");
	if (array == INDEX_PARAM && e->type != TENSOR_FP32 && e->type != TENSOR_BF16 &&
	    e->type != TENSOR_FP16)
		return import_bad(im, e->key, "is a parameter: it must be F32, BF16 or F16");
	return 0;
}

/* What the metadata says of the steps of the parameter with the key @key. @ret: borrowed; NULL: nothing. */
static int import_steps_text(struct import *im, const char *key, const char **ret)
{
	_cleanup_(freep) char *name = NULL;

	if (asprintf(&name, "steps/%s", key + strlen("param/")) < 0)
		return fault_errno(im->f, -ENOMEM, "importing a checkpoint");
	*ret = tensor_list_metadata(&im->list, name);
	return 0;
}

static int import_steps(struct import *im, const struct tensor_entry *e, uint64_t *ret)
{
	const char *said = NULL;

	if (import_steps_text(im, e->key, &said))
		return im->f->code;
	if (said && !import_number(said, INT64_MAX, ret))
		return import_bad(im, e->key, "has metadata that gives no number of steps");
	return 0;
}

static int import_add(struct import *im, const struct tensor_entry *e)
{
	struct index *x = im->x;
	_cleanup_(freep) char *key = strdup(e->key);
	uint64_t shape[TENSOR_FILE_MAX_DIMS];
	struct index_piece p = { .type = (uint8_t)e->type,
				 .dims = e->dims,
				 .shape = shape,
				 .elements = e->bytes / tensor_type_bytes(e->type),
				 .source = e->begin };

	if (!key)
		return fault_errno(im->f, -ENOMEM, "importing a checkpoint");
	if (!import_parse_key(key, &p))
		return import_bad(
			im, e->key,
			"has no key of a checkpoint, such as param/UNIT/TENSOR or blob/0");
	if (import_check_type(im, e, p.array))
		return im->f->code;
	if (p.array == INDEX_PARAM && import_steps(im, e, &p.steps))
		return im->f->code;
	memcpy(shape, e->shape, e->dims * sizeof(*shape));
	if (index_add(x, &p, im->f))
		return im->f->code;
	if (strcmp(x->pieces[x->n_pieces - 1].key, e->key) != 0)
		return import_bad(
			im, e->key,
			"has a key that a checkpoint would write in another way: %, / and "
			"@ in a unit's name are %25, %2F and %40");
	return 0;
}

/* The state of an optimizer belongs to a parameter, which comes before it in the order of the index. */
static int import_check_state(struct import *im)
{
	const struct index *x = im->x;
	const struct index_piece *param = NULL;
	const char *steps = NULL;

	for (size_t i = 0; i < x->n_pieces; i++) {
		const struct index_piece *p = &x->pieces[i];

		if (p->array == INDEX_PARAM)
			param = p;
		if (!import_is_state(p->array))
			continue;
		if (!param || strcmp(param->unit, p->unit) != 0 ||
		    strcmp(param->tensor, p->tensor) != 0)
			return import_bad(im, p->key, "is of a parameter that is not there");
		if (param->dims != p->dims ||
		    memcmp(param->shape, p->shape, p->dims * sizeof(*p->shape)) != 0)
			return import_bad(im, p->key, "has another shape than its parameter");
		if (import_steps_text(im, param->key, &steps))
			return im->f->code;
		if (!steps)
			return import_bad(im, param->key,
					  "has the state of an optimizer, and no metadata "
					  "steps/UNIT/TENSOR that says how often it was stepped");
	}
	return 0;
}

static int import_list(struct import *im)
{
	struct index *x = im->x;

	if (index_init(x, im->o->job, im->o->step, im->o->world_size, im->f) ||
	    index_add_file(x, FILE_NAME, im->f))
		return im->f->code;
	x->created_unix_s = (uint64_t)time(NULL);
	for (size_t i = 0; i < im->list.n; i++)
		if (import_add(im, &im->list.entries[i]))
			return im->f->code;
	if (!x->n_pieces)
		return fault_set(im->f, FAULT_INVALID, NULL, "'%.200s' has no tensors",
				 im->o->name);
	return index_check(x, im->f) ? (int)im->f->code : import_check_state(im);
}

/* ------------------------------------------------------------------------------ data */

static int import_read(struct import *im, void *buf, size_t bytes, uint64_t at, bool may_end)
{
	while (bytes) {
		ssize_t n = im->pipe ? read(im->fd, buf, bytes)
				     : pread(im->fd, buf, bytes, (off_t)(im->list.data_at + at));

		if (n < 0 && errno == EINTR)
			continue;
		if (n < 0)
			return fault_errno(im->f, -errno, im->o->name);
		if (n == 0 && may_end)
			return 0;
		if (n == 0)
			return fault_set(im->f, FAULT_LOST, NULL,
					 "'%.200s' ended in the middle of its data", im->o->name);
		buf = (char *)buf + n;
		bytes -= (size_t)n;
		at += (uint64_t)n;
		im->at = at;
	}
	return 0;
}

/* All data was read: is there more? */
static int import_check_end(struct import *im)
{
	uint64_t all = tensor_list_bytes(&im->list);
	char more;

	if (im->at != all || !im->pipe)
		return 0;
	if (import_read(im, &more, 1, all, true))
		return im->f->code;
	if (im->at == all)
		return 0;
	return fault_set(im->f, FAULT_LOST, NULL, "'%.200s' goes on behind its data", im->o->name);
}

static const void *import_data(void *arg, size_t piece, uint64_t offset, size_t bytes,
			       struct fault *f)
{
	struct import *im = arg;
	const struct index_piece *p = &im->x->pieces[piece];

	CHECK(f == im->f && bytes <= SAVE_CHUNK_BYTES);

	if (im->pipe && im->at != p->source + offset) {
		fault_set(im->f, FAULT_INVALID, NULL,
			  "'%.200s' is a pipe, and tensor '%.200s' is not at the place where a "
			  "checkpoint has it: write a file and import that",
			  im->o->name, p->key);
		return NULL;
	}
	if (import_read(im, im->chunk, bytes, p->source + offset, false) || import_check_end(im))
		return NULL;
	return im->chunk;
}

int import_file(int dir, int fd, const struct import_options *o, struct index *ret, struct fault *f)
{
	struct import im = { .fd = fd, .o = o, .x = ret, .f = f };
	struct save_options as_fast = { 0 };
	struct save_progress p = { 0 };
	struct stat st;

	if (fstat(fd, &st) < 0)
		return fault_errno(f, -errno, o->name);
	im.pipe = S_ISFIFO(st.st_mode);
	im.chunk = malloc(SAVE_CHUNK_BYTES);
	if (!im.chunk)
		return fault_errno(f, -ENOMEM, "importing a checkpoint");
	if (tensor_list_read(fd, o->name, &im.list, f) == 0 && import_list(&im) == 0)
		save_write(dir, ret, &as_fast, import_data, &im, &p, f);
	tensor_list_deinit(&im.list);
	free(im.chunk);
	if (f->code)
		index_deinit(ret);
	return f->code;
}
