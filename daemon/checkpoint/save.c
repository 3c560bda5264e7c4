#include "checkpoint/save.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "crc32c.h"
#include "checkpoint/folder.h"
#include "checkpoint/spool.h"
#include "core/check.h"
#include "core/cleanup.h"

#define FILE_MODE 0666 /* and the umask of the process */

struct save {
	struct index *x;
	const struct save_options *o;
	save_data_cb data;
	void *arg;
	struct save_progress *p;
	struct timespec begun;
	struct fault *f;
};

static int save_file_fault(struct fault *f, const char *doing, const char *name)
{
	char what[320];
	int error = -errno;

	snprintf(what, sizeof(what), "%s '%s'", doing, name);
	return fault_errno(f, error, what);
}

/* ------------------------------------------------------------------------------- writing */

/* Sleep until @bytes may have been written since the beginning. A cancelled save sleeps for at most
 * one turn. */
static void save_pace(const struct save *s, uint64_t bytes)
{
	const struct timespec turn = { .tv_nsec = 10000000 };
	struct timespec now;

	while (s->o->bytes_per_s && !atomic_load(&s->p->cancel)) {
		clock_gettime(CLOCK_MONOTONIC, &now);
		double passed = (double)(now.tv_sec - s->begun.tv_sec) +
				(double)(now.tv_nsec - s->begun.tv_nsec) / 1e9;

		if ((double)bytes <= passed * (double)s->o->bytes_per_s)
			return;
		nanosleep(&turn, NULL);
	}
}

static int save_is_cancelled(struct save_progress *p, struct fault *f)
{
	if (!atomic_load(&p->cancel))
		return 0;
	return fault_set(f, FAULT_CANCELLED, NULL, "the checkpoint was cancelled");
}

static int save_piece(struct save *s, struct spool *file, size_t i)
{
	struct index_piece *p = &s->x->pieces[i];
	uint64_t all = index_piece_bytes(p);

	p->crc = 0;
	p->file_at = spool_bytes(file);
	for (uint64_t at = 0; at < all;) {
		uint64_t n = all - at < SAVE_CHUNK_BYTES ? all - at : SAVE_CHUNK_BYTES;
		const void *data;

		if (save_is_cancelled(s->p, s->f))
			return s->f->code;
		data = s->data(s->arg, i, at, n, s->f);
		if (!data)
			return s->f->code;
		p->crc = crc32c_add(p->crc, data, n);
		if (spool_add(file, data, n, s->f))
			return s->f->code;
		at += n;
		save_pace(s, atomic_fetch_add(&s->p->bytes, n) + n);
	}
	return 0;
}

/* The list of the tensors in file @file. @ret: empty before. */
static int save_list(const struct save *s, size_t file, struct tensor_list *ret)
{
	for (size_t i = 0; i < s->x->n_pieces; i++) {
		const struct index_piece *p = &s->x->pieces[i];
		bool whole = p->begin == 0 && !strchr(p->key, '@');

		if (p->file != file)
			continue;
		if (tensor_list_add(ret, p->key, (enum tensor_type)p->type,
				    whole ? p->shape : &p->elements, whole ? p->dims : 1, s->f))
			return s->f->code;
	}
	return 0;
}

/* The pieces of @file in the order of their data: the largest types first. */
static int save_pieces(struct save *s, struct spool *file, size_t index)
{
	for (size_t size = 8; size; size /= 2)
		for (size_t i = 0; i < s->x->n_pieces; i++)
			if (s->x->pieces[i].file == index &&
			    tensor_type_bytes(s->x->pieces[i].type) == size &&
			    save_piece(s, file, i))
				return s->f->code;
	return 0;
}

/* Return: a descriptor, the caller's; -1: @f is filled. */
static int save_create(int fd, const char *name, struct fault *f)
{
	int file =
		openat(fd, name, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, FILE_MODE);

	if (file < 0)
		save_file_fault(f, "creating", name);
	return file;
}

/* Into the new file @file. */
static int save_tensors_to(struct save *s, int file, size_t index, bool in_memory)
{
	struct tensor_list list = TENSOR_LIST_NULL;
	_cleanup_(freep) char *header = NULL;
	const char *name = s->x->files[index].name;
	struct spool *spool = NULL;
	size_t bytes = 0;

	if (save_list(s, index, &list) == 0 &&
	    tensor_list_encode(&list, &header, &bytes, s->f) == 0 &&
	    (in_memory ? spool_open_memory : spool_open)(file, name, &spool, s->f) == 0 &&
	    spool_add(spool, header, bytes, s->f) == 0 && save_pieces(s, spool, index) == 0 &&
	    spool_end(spool, s->f) == 0) {
		CHECK(spool_bytes(spool) == list.data_at + tensor_list_bytes(&list));
		s->x->files[index].bytes = spool_bytes(spool);
	}
	spool_free(spool);
	tensor_list_deinit(&list);
	return s->f->code;
}

static int save_tensors(struct save *s, int fd, size_t index)
{
	_cleanup_(fd_closep) int file = save_create(fd, s->x->files[index].name, s->f);

	return file >= 0 ? save_tensors_to(s, file, index, false) : (int)s->f->code;
}

static int save_text_fault(const char *name, size_t bytes, size_t at, struct fault *f)
{
	char what[320];
	int error = -errno;

	snprintf(what, sizeof(what), "writing %zu bytes at %zu of '%.255s'", bytes, at, name);
	return fault_errno(f, error, what);
}

static int save_text(int file, const char *name, const char *text, struct fault *f)
{
	size_t bytes = strlen(text);

	for (size_t left = bytes; left;) {
		ssize_t n = write(file, text, left);

		if (n < 0 && errno == EINTR)
			continue;
		if (n < 0)
			return save_text_fault(name, left, bytes - left, f);
		text += n;
		left -= (size_t)n;
	}
	return fsync(file) < 0 ? save_file_fault(f, "syncing", name) : 0;
}

int save_write_text(int fd, const char *name, const char *text, struct fault *f)
{
	_cleanup_(fd_closep) int file = save_create(fd, name, f);

	return file >= 0 ? save_text(file, name, text, f) : (int)f->code;
}

static int save_index(struct save *s, int fd)
{
	_cleanup_(freep) char *text = NULL;

	if (index_encode(s->x, &text, s->f))
		return s->f->code;
	return save_write_text(fd, INDEX_NAME, text, s->f);
}

int save_write_file(int fd, struct index *x, const struct save_options *o, save_data_cb data,
		    void *arg, struct save_progress *p, struct fault *f)
{
	struct save s = { .x = x, .o = o, .data = data, .arg = arg, .p = p, .f = f };

	clock_gettime(CLOCK_MONOTONIC, &s.begun);
	index_sort(x);
	return save_tensors(&s, fd, 0);
}

int save_write_memory(int file, struct index *x, const struct save_options *o, save_data_cb data,
		      void *arg, struct save_progress *p, struct fault *f)
{
	struct save s = { .x = x, .o = o, .data = data, .arg = arg, .p = p, .f = f };

	clock_gettime(CLOCK_MONOTONIC, &s.begun);
	index_sort(x);
	return save_tensors_to(&s, file, 0, true);
}

int save_write(int dir, struct index *x, const struct save_options *o, save_data_cb data, void *arg,
	       struct save_progress *p, struct fault *f)
{
	struct save s = { .x = x, .o = o, .data = data, .arg = arg, .p = p, .f = f };
	struct folder_new new = FOLDER_NEW_NULL;
	struct fault untidy =
		FAULT_NULL; /* what cannot be removed does not keep a save from its end */
	size_t left;

	clock_gettime(CLOCK_MONOTONIC, &s.begun);
	(void)folder_tidy(dir, &left, &untidy);
	if (index_check(x, f) || folder_begin(dir, x->step, &new, f))
		return f->code;
	for (size_t i = 0; !f->code && i < x->n_files; i++)
		save_tensors(&s, new.fd, i);
	if (!f->code && save_index(&s, new.fd) == 0 && save_is_cancelled(p, f) == 0)
		folder_commit(&new, f);
	folder_abandon(&new);
	return f->code;
}
