#include "store/journal.h"

#include <errno.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "core/check.h"
#include "core/cleanup.h"
#include "core/fnv.h"
#include "core/memfile.h"

#define JOURNAL_MAGIC  UINT64_C(0x31434552444d5348) /* "HSMDREC1" */
#define JOURNAL_ALIGN  8u
#define JOURNAL_GROWTH (UINT64_C(256) << 10) /* a file grows by multiples of it */
/* A new base costs as much as the changes since the last one. */
#define JOURNAL_SHORT (UINT64_C(1) << 20)

/* The begin of each file. */
struct journal_header {
	uint64_t magic;
	uint32_t format;
	_Atomic uint32_t spoiled;
	_Atomic uint64_t generation; /* the valid file has the higher one; 0: not valid */
	_Atomic uint64_t end;        /* of the last entry, from the begin of the file */
	uint64_t base_end;           /* of the first */
	uint64_t unused[3];
};

_Static_assert(sizeof(struct journal_header) == 64, "entries begin behind it");

/* Before the bytes of an entry. */
struct journal_head {
	uint64_t bytes;
	uint64_t sum;
};

struct journal_file {
	int fd;
	uint64_t bytes; /* of the file, all of them mapped */
	struct journal_header *at;
};

struct journal {
	struct journal_file files[JOURNAL_FILES];
	unsigned valid;
};

static uint64_t journal_sum(const void *data, size_t bytes)
{
	const unsigned char *p = data;
	uint64_t sum = fnv_add(FNV_BEGIN, bytes), word;

	for (; bytes >= sizeof(word); bytes -= sizeof(word), p += sizeof(word)) {
		memcpy(&word, p, sizeof(word));
		sum = fnv_add(sum, word);
	}
	for (; bytes; bytes--, p++)
		sum = fnv_add(sum, *p);
	return sum;
}

static uint64_t journal_entry_bytes(uint64_t bytes)
{
	return sizeof(struct journal_head) +
	       (bytes + JOURNAL_ALIGN - 1) / JOURNAL_ALIGN * JOURNAL_ALIGN;
}

static int journal_map(struct journal_file *file, uint64_t bytes)
{
	void *at = file->at ? mremap(file->at, file->bytes, bytes, MREMAP_MAYMOVE)
			    : mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file->fd, 0);

	if (at == MAP_FAILED)
		return -ENOMEM;
	file->at = at;
	file->bytes = bytes;
	return 0;
}

/* The pages are taken here: a write to one that the kernel does not have would end the process. */
static int journal_grow(struct journal_file *file, uint64_t need)
{
	uint64_t bytes = (need + JOURNAL_GROWTH - 1) / JOURNAL_GROWTH * JOURNAL_GROWTH;

	if (need <= file->bytes)
		return 0;
	if (fallocate(file->fd, 0, 0, (off_t)bytes) < 0)
		return -ENOMEM;
	return journal_map(file, bytes);
}

static void journal_clear(struct journal_file *file)
{
	struct journal_header *h = file->at;

	atomic_store_explicit(&h->generation, 0, memory_order_release);
	h->magic = JOURNAL_MAGIC;
	h->format = JOURNAL_FORMAT;
	atomic_store_explicit(&h->spoiled, 0, memory_order_relaxed);
	atomic_store_explicit(&h->end, sizeof(*h), memory_order_relaxed);
	h->base_end = sizeof(*h);
}

static int journal_new_file(struct journal_file *file)
{
	int r = memfile_new("shardd-journal", &file->fd);

	return r < 0 ? r : journal_grow(file, sizeof(struct journal_header));
}

static struct journal *journal_alloc(void)
{
	struct journal *r = calloc(1, sizeof(*r));

	for (unsigned i = 0; r && i < JOURNAL_FILES; i++)
		r->files[i].fd = -1;
	return r;
}

int journal_new(struct journal **ret)
{
	struct journal *r = journal_alloc();
	int e = r ? 0 : -ENOMEM;

	for (unsigned i = 0; e == 0 && i < JOURNAL_FILES; i++) {
		e = journal_new_file(&r->files[i]);
		if (e == 0)
			journal_clear(&r->files[i]);
	}
	if (e < 0) {
		journal_free(r);
		return e;
	}
	atomic_store_explicit(&r->files[0].at->generation, 1, memory_order_release);
	*ret = r;
	return 0;
}

struct journal *journal_free(struct journal *r)
{
	for (unsigned i = 0; r && i < JOURNAL_FILES; i++) {
		if (r->files[i].at)
			munmap(r->files[i].at, r->files[i].bytes);
		fd_close(r->files[i].fd);
	}
	free(r);
	return NULL;
}

/* ------------------------------------------------------------- a predecessor's */

static int journal_take_file(struct journal_file *file, int fd, struct fault *f)
{
	struct stat st;

	if (fstat(fd, &st) < 0)
		return fault_errno(f, -errno, "reading the journal of the previous daemon");
	if (!S_ISREG(st.st_mode) || st.st_size < (off_t)sizeof(struct journal_header))
		return fault_set(f, FAULT_INVALID, "journal",
				 "the journal of the previous daemon has a file of %lld bytes",
				 (long long)st.st_size);
	file->fd = fcntl(fd, F_DUPFD_CLOEXEC, 3);
	if (file->fd < 0)
		return fault_errno(f, -errno, "taking over the journal");
	if (journal_map(file, (uint64_t)st.st_size) < 0)
		return fault_errno(f, -ENOMEM, "mapping the journal");
	return 0;
}

/* The format is that of the valid file: a newer daemon may have changed what the rest means. */
static int journal_check_header(const struct journal_header *h, uint64_t bytes, struct fault *f)
{
	uint64_t end = atomic_load_explicit(&h->end, memory_order_acquire);

	if (h->magic != JOURNAL_MAGIC)
		return fault_set(f, FAULT_INVALID, "journal",
				 "the journal of the previous daemon is damaged: it does not begin "
				 "as a journal does");
	if (h->format > JOURNAL_FORMAT)
		return fault_set(f, FAULT_INVALID, "journal",
				 "the journal was written by a newer shardd (format %u, this one "
				 "reads up to %u): start that version again; the state is kept",
				 h->format, JOURNAL_FORMAT);
	if (atomic_load_explicit(&h->spoiled, memory_order_acquire))
		return fault_set(f, FAULT_INVALID, "journal",
				 "the journal is incomplete: the previous daemon lacked the memory "
				 "to continue it");
	if (end < sizeof(*h) || end > bytes)
		return fault_set(
			f, FAULT_INVALID, "journal",
			"the journal of the previous daemon is damaged: it ends at %llu of "
			"%llu bytes",
			(unsigned long long)end, (unsigned long long)bytes);
	return 0;
}

static int journal_check_entries(const struct journal *r, struct fault *f)
{
	const struct journal_header *h = r->files[r->valid].at;
	uint64_t end = atomic_load_explicit(&h->end, memory_order_acquire), at = sizeof(*h);

	while (at < end) {
		struct journal_head head = { 0 };

		if (end - at >= sizeof(head))
			memcpy(&head, (const char *)h + at, sizeof(head));
		if (end - at < sizeof(head) || head.bytes > end - at - sizeof(head) ||
		    journal_entry_bytes(head.bytes) > end - at ||
		    journal_sum((const char *)h + at + sizeof(head), head.bytes) != head.sum)
			return fault_set(
				f, FAULT_INVALID, "journal",
				"the journal of the previous daemon is damaged at byte %llu "
				"of %llu",
				(unsigned long long)at, (unsigned long long)end);
		at += journal_entry_bytes(head.bytes);
	}
	return 0;
}

int journal_open(const int fds[JOURNAL_FILES], struct journal **ret, struct fault *f)
{
	struct journal *r = journal_alloc();
	uint64_t generations[JOURNAL_FILES] = { 0 };

	if (!r)
		return fault_errno(f, -ENOMEM, "taking over the journal");
	for (unsigned i = 0; !f->code && i < JOURNAL_FILES; i++)
		if (journal_take_file(&r->files[i], fds[i], f) == 0)
			generations[i] = atomic_load_explicit(&r->files[i].at->generation,
							      memory_order_acquire);
	r->valid = generations[1] > generations[0];
	if (!f->code && !generations[r->valid])
		fault_set(f, FAULT_INVALID, "journal",
			  "the journal of the previous daemon is damaged: neither file is valid");
	if (!f->code &&
	    journal_check_header(r->files[r->valid].at, r->files[r->valid].bytes, f) == 0)
		journal_check_entries(r, f);
	if (f->code) {
		journal_free(r);
		return f->code;
	}
	*ret = r;
	return 0;
}

int journal_fd(const struct journal *r, unsigned file)
{
	CHECK(file < JOURNAL_FILES);
	return r->files[file].fd;
}

uint64_t journal_bytes(const struct journal *r)
{
	return r->files[0].bytes + r->files[1].bytes;
}

/* --------------------------------------------------------------------- writing */

int journal_reserve(struct journal *r, size_t bytes)
{
	struct journal_file *file = &r->files[r->valid];

	return journal_grow(file, atomic_load_explicit(&file->at->end, memory_order_relaxed) +
					  journal_entry_bytes(bytes));
}

static uint64_t journal_file_end(const struct journal_file *file)
{
	return atomic_load_explicit(&file->at->end, memory_order_relaxed);
}

static void *journal_file_begin(struct journal_file *file, size_t bytes)
{
	uint64_t end = journal_file_end(file);

	if (journal_grow(file, end + journal_entry_bytes(bytes)) < 0)
		return NULL;
	return (char *)file->at + end + sizeof(struct journal_head);
}

static void journal_file_publish(struct journal_file *file, size_t bytes)
{
	uint64_t end = journal_file_end(file);
	char *to = (char *)file->at + end;
	struct journal_head head = { .bytes = bytes, .sum = journal_sum(to + sizeof(head), bytes) };

	CHECK(end + journal_entry_bytes(bytes) <= file->bytes);
	memcpy(to, &head, sizeof(head));
	/* read by a successor, in journal_check_header */
	atomic_store_explicit(&file->at->end, end + journal_entry_bytes(bytes),
			      memory_order_release);
}

void *journal_begin(struct journal *r, size_t bytes)
{
	return journal_file_begin(&r->files[r->valid], bytes);
}

void journal_end(struct journal *r, size_t bytes)
{
	journal_file_publish(&r->files[r->valid], bytes);
}

/* What becomes of the other file does not matter until its generation is the higher one. */
void *journal_base_begin(struct journal *r, size_t bytes)
{
	struct journal_file *to = &r->files[!r->valid];

	journal_clear(to);
	return journal_file_begin(to, bytes);
}

void journal_base_end(struct journal *r, size_t bytes)
{
	struct journal_file *from = &r->files[r->valid], *to = &r->files[!r->valid];
	uint64_t generation = atomic_load_explicit(&from->at->generation, memory_order_relaxed) + 1;

	journal_file_publish(to, bytes);
	to->at->base_end = journal_file_end(to);
	atomic_store_explicit(&to->at->generation, generation, memory_order_release);
	r->valid = !r->valid;
}

bool journal_is_long(const struct journal *r)
{
	const struct journal_header *h = r->files[r->valid].at;
	uint64_t base = h->base_end - sizeof(*h);
	uint64_t changes = atomic_load_explicit(&h->end, memory_order_relaxed) - h->base_end;

	return changes > JOURNAL_SHORT && changes > 2 * base;
}

void journal_spoil(struct journal *r)
{
	atomic_store_explicit(&r->files[r->valid].at->spoiled, 1, memory_order_release);
}

bool journal_is_spoiled(const struct journal *r)
{
	return atomic_load_explicit(&r->files[r->valid].at->spoiled, memory_order_relaxed) != 0;
}

bool journal_next(const struct journal *r, uint64_t *at, const void **ret, size_t *ret_bytes)
{
	const struct journal_header *h = r->files[r->valid].at;
	struct journal_head head;

	if (*at == 0)
		*at = sizeof(*h);
	if (*at >= atomic_load_explicit(&h->end, memory_order_relaxed))
		return false;
	memcpy(&head, (const char *)h + *at, sizeof(head));
	*ret = (const char *)h + *at + sizeof(head);
	*ret_bytes = head.bytes;
	*at += journal_entry_bytes(head.bytes);
	return true;
}
