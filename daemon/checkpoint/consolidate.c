#include "checkpoint/consolidate.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <unistd.h>

#include "crc32c.h"
#include "checkpoint/save.h"
#include "core/check.h"
#include "core/cleanup.h"

#define FILE_MODE 0666 /* and the umask of the process */

struct consolidate {
	int fd, out; /* the checkpoint's folder; the new file */
	const struct index *x;
	const struct consolidate_options *o;
	struct tensor_list list;
	size_t *pieces; /* owned: of the entries of the list, their first piece */
	char *chunk;    /* owned */
	struct fault *f;
};

static int consolidate_fault(struct consolidate *c, const char *doing)
{
	char what[320];
	int error = -errno;

	snprintf(what, sizeof(what), "%s '%.256s'", doing, c->o->path);
	return fault_errno(c->f, error, what);
}

/* ------------------------------------------------------------------------------ the list */

/* Return: the caller's to free, or NULL. */
static char *consolidate_name(const struct consolidate *c, const struct index_piece *p)
{
	bool alone = c->o->short_names || (c->o->root && strcmp(p->unit, c->o->root) == 0);
	char *name = NULL;

	if (alone)
		return strdup(p->tensor);
	return asprintf(&name, "%s.%s", p->unit, p->tensor) < 0 ? NULL : name;
}

static int consolidate_list_piece(struct consolidate *c, size_t i)
{
	const struct index_piece *p = &c->x->pieces[i];
	_cleanup_(freep) char *name = consolidate_name(c, p);

	if (!name)
		return fault_errno(c->f, -ENOMEM, "listing the tensors of a checkpoint");
	c->pieces[c->list.n] = i;
	return tensor_list_add(&c->list, name, (enum tensor_type)p->type, p->shape, p->dims, c->f);
}

/* Parameters, and of each buffer that of the first rank: they are in the order of ranks. Those of the
 * library's own are nobody's parameters. */
static bool consolidate_takes(const struct index *x, size_t i)
{
	const struct index_piece *p = &x->pieces[i], *before = i ? p - 1 : NULL;

	if (p->begin || (p->array != INDEX_PARAM && p->array != INDEX_BUFFER))
		return false;
	if (p->array == INDEX_PARAM)
		return true;
	if (strncmp(p->tensor, CONSOLIDATE_OWN, strlen(CONSOLIDATE_OWN)) == 0)
		return false;
	return !before || before->array != INDEX_BUFFER || strcmp(before->unit, p->unit) != 0 ||
	       strcmp(before->tensor, p->tensor) != 0;
}

static int consolidate_list(struct consolidate *c)
{
	c->pieces = calloc(c->x->n_pieces + 1, sizeof(*c->pieces));
	c->chunk = malloc(SAVE_CHUNK_BYTES);
	if (!c->pieces || !c->chunk)
		return fault_errno(c->f, -ENOMEM, "listing the tensors of a checkpoint");
	for (size_t i = 0; !c->f->code && i < c->x->n_pieces; i++)
		if (consolidate_takes(c->x, i))
			consolidate_list_piece(c, i);
	return c->f->code;
}

/* ------------------------------------------------------------------------------ the data */

static int consolidate_write(struct consolidate *c, const char *data, size_t bytes, uint64_t at)
{
	while (bytes) {
		ssize_t n = pwrite(c->out, data, bytes, (off_t)at);

		if (n < 0 && errno == EINTR)
			continue;
		if (n < 0)
			return consolidate_fault(c, "writing");
		data += n;
		bytes -= (size_t)n;
		at += (uint64_t)n;
	}
	return 0;
}

static int consolidate_piece(struct consolidate *c, const struct index_piece *p, uint64_t to)
{
	_cleanup_(fd_closep) int file = save_open_file(c->fd, c->x, p->file, c->f);
	uint64_t all = index_piece_bytes(p);
	uint32_t crc = 0;

	if (file < 0)
		return c->f->code;
	for (uint64_t at = 0; at < all;) {
		uint64_t n = all - at < SAVE_CHUNK_BYTES ? all - at : SAVE_CHUNK_BYTES;

		if (save_read_piece(c->x, file, p, at, c->chunk, n, c->f) ||
		    consolidate_write(c, c->chunk, n, to + at))
			return c->f->code;
		crc = crc32c_add(crc, c->chunk, n);
		at += n;
	}
	if (crc != p->crc)
		return fault_set(c->f, FAULT_LOST, NULL,
				 "tensor '%.200s' in file '%.100s' is damaged: its checksum is "
				 "%08x, and the index says %08x",
				 p->key, c->x->files[p->file].name, crc, p->crc);
	return 0;
}

/* All pieces of the tensor of entry @e: they follow one another in the index. */
static int consolidate_tensor(struct consolidate *c, size_t e)
{
	uint64_t at = c->list.data_at + c->list.entries[e].begin;
	uint64_t end = at + c->list.entries[e].bytes;

	for (size_t i = c->pieces[e]; !c->f->code && at < end; i++) {
		CHECK(i < c->x->n_pieces); /* index_check: the pieces are all of the array */
		consolidate_piece(c, &c->x->pieces[i], at);
		at += index_piece_bytes(&c->x->pieces[i]);
	}
	return c->f->code;
}

static int consolidate_fill(struct consolidate *c, uint64_t *ret_bytes)
{
	_cleanup_(freep) char *header = NULL;
	size_t bytes = 0;

	if (consolidate_list(c) || tensor_list_encode(&c->list, &header, &bytes, c->f) ||
	    consolidate_write(c, header, bytes, 0))
		return c->f->code;
	for (size_t e = 0; !c->f->code && e < c->list.n; e++)
		consolidate_tensor(c, e);
	*ret_bytes = c->list.data_at + tensor_list_bytes(&c->list);
	if (!c->f->code && fsync(c->out) < 0)
		consolidate_fault(c, "syncing");
	return c->f->code;
}

/* Under another name first: linkat does not replace a file. */
static int consolidate_give_name(struct consolidate *c, const char *temporary)
{
	if (link(temporary, c->o->path) == 0)
		return 0;
	if (errno == EEXIST)
		return fault_set(c->f, FAULT_STATE, NULL, "there is a file '%.256s' already",
				 c->o->path);
	return consolidate_fault(c, "naming");
}

/* Is there the unit whose tensors are to have short names? */
static int consolidate_check_root(const struct consolidate *c)
{
	for (size_t i = 0; c->o->root && i < c->x->n_pieces; i++)
		if (strcmp(c->x->pieces[i].unit, c->o->root) == 0)
			return 0;
	return c->o->root ? fault_set(c->f, FAULT_NOT_FOUND, NULL,
				      "the checkpoint has no unit '%.200s'", c->o->root)
			  : 0;
}

int consolidate(int fd, const struct index *x, const struct consolidate_options *o,
		uint64_t *ret_bytes, struct fault *f)
{
	struct consolidate c = { .fd = fd, .out = -1, .x = x, .o = o, .f = f };
	_cleanup_(freep) char *temporary = NULL;
	uint32_t random;

	if (consolidate_check_root(&c))
		return f->code;
	if (getrandom(&random, sizeof(random), 0) != sizeof(random) ||
	    asprintf(&temporary, "%s.%08" PRIx32, o->path, random) < 0)
		return fault_errno(f, -ENOMEM, "consolidating a checkpoint");
	c.out = open(temporary, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, FILE_MODE);
	if (c.out < 0 && errno == ENOENT)
		return fault_set(f, FAULT_NOT_FOUND, NULL,
				 "making '%.256s': there is no such folder: make it first",
				 o->path);
	if (c.out < 0)
		return consolidate_fault(&c, "making a file beside");
	if (consolidate_fill(&c, ret_bytes) == 0)
		consolidate_give_name(&c, temporary);
	unlink(temporary);
	fd_close(c.out);
	tensor_list_deinit(&c.list);
	free(c.pieces);
	free(c.chunk);
	return f->code;
}
