/* Reading a checkpoint: its index, its files, and whether both agree. */
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "crc32c.h"
#include "checkpoint/save.h"
#include "core/cleanup.h"

static int verify_bad(struct fault *f, const char *file, const char *why)
{
	return fault_set(f, FAULT_LOST, NULL, "file '%.255s' of the checkpoint %s", file, why);
}

static int verify_open(int fd, const char *name, struct fault *f)
{
	int file = openat(fd, name, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
	struct stat st;
	char what[320];

	if (file < 0) {
		int error = -errno;

		snprintf(what, sizeof(what), "opening '%s'", name);
		if (error == -ENOENT)
			verify_bad(f, name, "is missing");
		else
			fault_errno(f, error, what);
		return -1;
	}
	if (fstat(file, &st) == 0 && S_ISREG(st.st_mode))
		return file;
	verify_bad(f, name, "is not a regular file");
	return fd_close(file);
}

static int verify_read_fault(struct fault *f, const char *name, size_t bytes, uint64_t at)
{
	char what[384];
	int error = -errno;

	snprintf(what, sizeof(what), "reading %zu bytes at %" PRIu64 " of '%.255s'", bytes, at,
		 name);
	return fault_errno(f, error, what);
}

static int verify_pread(int file, const char *name, void *buf, size_t bytes, uint64_t at,
			struct fault *f)
{
	while (bytes) {
		ssize_t n = pread(file, buf, bytes, (off_t)at);

		if (n < 0 && errno == EINTR)
			continue;
		if (n < 0)
			return verify_read_fault(f, name, bytes, at);
		if (n == 0)
			return verify_bad(f, name, "is too short");
		buf = (char *)buf + n;
		bytes -= (size_t)n;
		at += (uint64_t)n;
	}
	return 0;
}

/* ------------------------------------------------------------------------------ the index */

int save_read_text(int fd, const char *name, char **ret, size_t *ret_bytes, struct fault *f)
{
	_cleanup_(fd_closep) int file = verify_open(fd, name, f);
	_cleanup_(freep) char *text = NULL;
	struct stat st;

	if (file < 0)
		return f->code;
	if (fstat(file, &st) < 0)
		return fault_errno(f, -errno, name);
	if ((uint64_t)st.st_size > INDEX_MAX_BYTES)
		return verify_bad(f, name, "is too long");
	text = malloc((size_t)st.st_size + 1);
	if (!text)
		return fault_errno(f, -ENOMEM, "reading the index of a checkpoint");
	if (verify_pread(file, name, text, (size_t)st.st_size, 0, f))
		return f->code;
	text[st.st_size] = '\0';
	*ret_bytes = (size_t)st.st_size;
	*ret = STEAL_PTR(text);
	return 0;
}

static int verify_read_index(int fd, struct index *ret, struct fault *f)
{
	_cleanup_(freep) char *text = NULL;
	size_t bytes = 0;

	if (save_read_text(fd, INDEX_NAME, &text, &bytes, f))
		return f->code;
	return index_decode(text, bytes, ret, f);
}

/* Is the piece in the file as the index says? */
static int verify_piece(struct index_piece *p, const struct tensor_list *list, const char *name,
			struct fault *f)
{
	const struct tensor_entry *e = tensor_list_find(list, p->key);

	if (!e || (uint8_t)e->type != p->type || e->bytes != index_piece_bytes(p))
		return fault_set(f, FAULT_LOST, NULL,
				 "file '%.100s' of the checkpoint has no tensor '%.200s' as the "
				 "index describes it",
				 name, p->key);
	p->file_at = list->data_at + e->begin;
	return 0;
}

static int verify_file(int fd, struct index *x, size_t i, struct fault *f)
{
	_cleanup_(fd_closep) int file = save_open_file(fd, x, i, f);
	struct tensor_list list = TENSOR_LIST_NULL;
	const char *name = x->files[i].name;
	size_t n = 0;

	if (file < 0 || tensor_list_read(file, name, &list, f))
		return f->code;
	if (list.data_at + tensor_list_bytes(&list) != x->files[i].bytes)
		verify_bad(f, name, "has another size than the index says");
	for (size_t k = 0; !f->code && k < x->n_pieces; k++)
		if (x->pieces[k].file == i) {
			verify_piece(&x->pieces[k], &list, name, f);
			n++;
		}
	if (!f->code && n != list.n)
		verify_bad(f, name, "has tensors that the index does not describe");
	tensor_list_deinit(&list);
	return f->code;
}

/* Of one in memory, another descriptor. */
static int verify_open_memory(const struct index_file *file, struct fault *f)
{
	int fd = -1;

	if (file->fd == INDEX_NOT_HERE)
		fault_set(f, FAULT_INTERNAL, NULL, "file '%.255s' is needed and is not here",
			  file->name);
	else
		fd = fcntl(file->fd, F_DUPFD_CLOEXEC, 0);
	if (fd < 0 && !f->code)
		fault_errno(f, -errno, "opening a part of a checkpoint in memory");
	return fd;
}

int save_open_file(int fd, const struct index *x, size_t i, struct fault *f)
{
	if (x->files[i].fd != INDEX_IN_FOLDER)
		return verify_open_memory(&x->files[i], f);
	return verify_open(fd, x->files[i].name, f);
}

int save_check_files(int fd, struct index *x, struct fault *f)
{
	for (size_t i = 0; !f->code && i < x->n_files; i++)
		if (x->files[i].fd != INDEX_NOT_HERE)
			verify_file(fd, x, i, f);
	return f->code;
}

int save_read(int fd, struct index *ret, struct fault *f)
{
	if (verify_read_index(fd, ret, f))
		return f->code;
	if (save_check_files(fd, ret, f))
		index_deinit(ret);
	return f->code;
}

/* ------------------------------------------------------------------------------- the data */

int save_read_piece(const struct index *x, int file, const struct index_piece *p, uint64_t offset,
		    void *buf, size_t bytes, struct fault *f)
{
	return verify_pread(file, x->files[p->file].name, buf, bytes, p->file_at + offset, f);
}

static int verify_data(const struct index *x, int file, size_t piece, const struct save_sink *sink,
		       struct save_progress *progress, struct fault *f)
{
	const struct index_piece *p = &x->pieces[piece];
	uint64_t all = index_piece_bytes(p);
	uint32_t crc = 0;

	for (uint64_t at = 0; at < all;) {
		uint64_t n = all - at < SAVE_CHUNK_BYTES ? all - at : SAVE_CHUNK_BYTES;
		void *to;

		if (atomic_load(&progress->cancel))
			return fault_set(f, FAULT_CANCELLED, NULL,
					 "reading the checkpoint was cancelled");
		to = sink->room(sink->arg, piece, at, n, f);
		if (!to || save_read_piece(x, file, p, at, to, n, f))
			return f->code;
		crc = crc32c_add(crc, to, n);
		if (sink->put && sink->put(sink->arg, piece, at, n, f))
			return f->code;
		at += n;
		atomic_fetch_add(&progress->bytes, n);
	}
	if (crc != p->crc)
		return fault_set(f, FAULT_LOST, NULL,
				 "tensor '%.200s' in file '%.100s' is damaged: its checksum is "
				 "%08x, and the index says %08x",
				 p->key, x->files[p->file].name, crc, p->crc);
	return 0;
}

static void *verify_room(void *arg, size_t piece, uint64_t offset, size_t bytes, struct fault *f)
{
	(void)piece, (void)offset, (void)bytes, (void)f;
	return arg;
}

int save_verify(int fd, const struct index *x, struct save_progress *p, struct fault *f)
{
	_cleanup_(freep) void *buf = malloc(SAVE_CHUNK_BYTES);
	const struct save_sink sink = { .room = verify_room, .arg = buf };

	if (!buf)
		return fault_errno(f, -ENOMEM, "verifying a checkpoint");
	return save_load(fd, x, &sink, p, f);
}

int save_load(int fd, const struct index *x, const struct save_sink *sink, struct save_progress *p,
	      struct fault *f)
{
	for (size_t i = 0; !f->code && i < x->n_files; i++) {
		_cleanup_(fd_closep) int file = -1;

		for (size_t k = 0; !f->code && k < x->n_pieces; k++) {
			if (x->pieces[k].file != i || (sink->takes && !sink->takes(sink->arg, k)))
				continue;
			if (file < 0)
				file = save_open_file(fd, x, i, f);
			if (file >= 0)
				verify_data(x, file, k, sink, p, f);
		}
	}
	return f->code;
}
