#include "checkpoint/parts.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "crc32c.h"
#include "core/check.h"
#include "core/cleanup.h"

#define PARTS_MARKER "marker"
#define PARTS_INDEX  "index-%05u.json"
#define PARTS_NAME   64

/* ---------------------------------------------------------------------------- the marker */

static void parts_marker_text(uint64_t nonce, char text[24])
{
	snprintf(text, 24, "%016" PRIx64 "\n", nonce);
}

int parts_begin(int dir, uint64_t step, uint64_t owner, uint64_t nonce, struct folder_new *ret,
		struct fault *f)
{
	struct fault untidy = FAULT_NULL; /* as in save_write */
	char text[24];
	size_t left;

	parts_marker_text(nonce, text);
	(void)folder_tidy(dir, &left, &untidy);
	untidy = FAULT_NULL;
	(void)folder_tidy_nodes(dir, owner, &untidy);
	if (folder_begin_nodes(dir, step, owner, ret, f) ||
	    save_write_text(ret->fd, PARTS_MARKER, text, f))
		return f->code;
	if (fsync(ret->fd) < 0 || fsync(dir) < 0)
		return fault_errno(f, -errno, "syncing the folder for the checkpoint");
	return 0;
}

int parts_see(int dir, const char *name, uint64_t nonce, struct fault *f)
{
	_cleanup_(fd_closep) int fd = folder_enter_nodes(dir, name);
	_cleanup_(freep) char *text = NULL;
	char expected[24];
	size_t bytes;

	parts_marker_text(nonce, expected);
	if (fd == -ENOENT) {
		fault_set(f, FAULT_STATE, NULL, "it does not see '%.64s' there", name);
		return -1;
	}
	if (fd < 0) {
		fault_errno(f, fd, "opening what another node has made there");
		return -1;
	}
	if (save_read_text(fd, PARTS_MARKER, &text, &bytes, f) == 0 && strcmp(text, expected) == 0)
		return STEAL_FD(fd);
	*f = FAULT_NULL;
	fault_set(f, FAULT_STATE, NULL, "it sees another '%.64s' there", name);
	return -1;
}

/* ------------------------------------------------------------------------------- one part */

int parts_write(int fd, struct index *x, unsigned part, const struct save_options *o,
		save_data_cb data, void *arg, struct save_progress *p, uint32_t *ret_crc,
		struct fault *f)
{
	_cleanup_(freep) char *text = NULL;
	char name[PARTS_NAME];

	snprintf(name, sizeof(name), PARTS_INDEX, part);
	if (save_write_file(fd, x, o, data, arg, p, f) || index_encode(x, &text, f) ||
	    save_write_text(fd, name, text, f))
		return f->code;
	*ret_crc = crc32c_add(0, text, strlen(text));
	return fsync(fd) < 0 ? fault_errno(f, -errno, "syncing the folder for the checkpoint") : 0;
}

/* ---------------------------------------------------------------------------- all of them */

static int parts_check_part(const struct index *x, const struct index *part, unsigned number,
			    uint32_t crc, struct fault *f)
{
	char name[PARTS_NAME];

	snprintf(name, sizeof(name), PARTS_FILE, number);
	if (part->crc != crc)
		return fault_set(f, FAULT_LOST, NULL,
				 "part %u has an index with checksum %08x here, and %08x on the "
				 "node that has written it: the file system shows nodes different "
				 "files",
				 number, part->crc, crc);
	if (part->step == x->step && part->world_size == x->world_size &&
	    strcmp(part->job, x->job) == 0 && part->n_files == 1 &&
	    strcmp(part->files[0].name, name) == 0)
		return 0;
	return fault_set(f, FAULT_LOST, NULL,
			 "part %u is of step %" PRIu64 " of job '%.100s' with %u ranks, not of "
			 "step %" PRIu64 " of '%.100s' with %u",
			 number, part->step, part->job, part->world_size, x->step, x->job,
			 x->world_size);
}

static int parts_add_part(struct index *x, const struct index *part, unsigned number,
			  struct fault *f)
{
	if (index_add_file(x, part->files[0].name, f))
		return f->code;
	x->files[number].bytes = part->files[0].bytes;
	if (part->created_unix_s > x->created_unix_s)
		x->created_unix_s = part->created_unix_s;
	for (size_t i = 0; !f->code && i < part->n_pieces; i++) {
		struct index_piece p = part->pieces[i];

		p.file = number;
		index_add(x, &p, f);
	}
	return f->code;
}

static int parts_merge_part(const struct parts_memory *from, unsigned number, struct index *x,
			    struct fault *f)
{
	struct index part = INDEX_NULL;

	if (index_decode_part(from->index, from->index_bytes, &part, f))
		return f->code;
	if (!number) /* all must have that of the first one */
		x->world_size = part.world_size;
	if (parts_check_part(x, &part, number, part.crc, f) == 0 &&
	    parts_add_part(x, &part, number, f) == 0)
		x->files[number].fd = from->fd < 0 ? INDEX_NOT_HERE : from->fd;
	index_deinit(&part);
	return f->code;
}

int parts_merge(const struct parts_memory *parts, unsigned n, const char *job, uint64_t step,
		struct index *x, struct fault *f)
{
	index_init(x, job, step, 0, f);
	for (unsigned i = 0; !f->code && i < n; i++)
		parts_merge_part(&parts[i], i, x, f);
	if (!f->code && index_check(x, f) == 0)
		save_check_files(-1, x, f);
	if (f->code)
		index_deinit(x);
	return f->code;
}

static int parts_read_part(int fd, struct index *x, unsigned number, uint32_t crc, struct fault *f)
{
	_cleanup_(freep) char *text = NULL;
	struct index part = INDEX_NULL;
	char name[PARTS_NAME];
	size_t bytes = 0;

	snprintf(name, sizeof(name), PARTS_INDEX, number);
	if (save_read_text(fd, name, &text, &bytes, f) || index_decode_part(text, bytes, &part, f))
		return f->code;
	if (parts_check_part(x, &part, number, crc, f) == 0)
		parts_add_part(x, &part, number, f);
	index_deinit(&part);
	return f->code;
}

static int parts_remove(int fd, const char *name, struct fault *f)
{
	char what[PARTS_NAME + 16];

	snprintf(what, sizeof(what), "removing '%s'", name);
	return unlinkat(fd, name, 0) < 0 ? fault_errno(f, -errno, what) : 0;
}

/* What only the making of it needs. */
static int parts_remove_rest(int fd, unsigned parts, struct fault *f)
{
	char name[PARTS_NAME];

	for (unsigned i = 0; !f->code && i < parts; i++) {
		snprintf(name, sizeof(name), PARTS_INDEX, i);
		parts_remove(fd, name, f);
	}
	return f->code ? (int)f->code : parts_remove(fd, PARTS_MARKER, f);
}

/* Are the files here as their nodes have written them? */
static int parts_check_files(int fd, uint64_t *ret_bytes, struct fault *f)
{
	struct index x = INDEX_NULL;
	uint64_t bytes = 0;

	if (save_read(fd, &x, f))
		return f->code;
	for (size_t i = 0; i < x.n_pieces; i++)
		bytes += index_piece_bytes(&x.pieces[i]);
	index_deinit(&x);
	*ret_bytes = bytes;
	return 0;
}

int parts_complete(struct folder_new *n, struct index *x, const uint32_t *crcs, unsigned parts,
		   uint64_t *ret_bytes, struct fault *f)
{
	_cleanup_(freep) char *text = NULL;

	for (unsigned i = 0; !f->code && i < parts; i++)
		parts_read_part(n->fd, x, i, crcs[i], f);
	if (f->code || index_check(x, f) || index_encode(x, &text, f) ||
	    save_write_text(n->fd, INDEX_NAME, text, f) || parts_check_files(n->fd, ret_bytes, f) ||
	    parts_remove_rest(n->fd, parts, f))
		return f->code;
	return folder_commit(n, f);
}
