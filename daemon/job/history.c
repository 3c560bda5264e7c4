#include "job/history.h"

#include <errno.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "core/cleanup.h"
#include "core/fnv.h"
#include "core/memfile.h"
#include "core/text.h"
#include "job/job_types.h"

#define HISTORY_MAGIC   UINT64_C(0x5348444849535431)
#define HISTORY_VERSION 1u

/* The file. Records beyond @most are empty, and take no memory. */
struct history_file {
	uint64_t magic;
	uint32_t version, record_bytes;
	struct history_record records[HISTORY_MOST];
};

static struct {
	struct history_file *file; /* mapped; NULL: not open */
	int fd;
	size_t most;
	uint64_t last; /* id */
} history = { .fd = -1 };

static uint64_t history_check(const struct history_record *r)
{
	const unsigned char *at = (const unsigned char *)r->job;
	const unsigned char *end = (const unsigned char *)(r + 1);
	uint64_t sum = fnv_add(fnv_add(FNV_BEGIN, r->head.id), r->head.uid);

	for (; at < end; at++)
		sum = fnv_add(sum, *at);
	return sum;
}

/* The keeper may have passed anything. */
static int history_map(int fd, struct history_file **ret)
{
	struct stat st;
	void *at;

	if (fstat(fd, &st) < 0)
		return -errno;
	if (!S_ISREG(st.st_mode) || st.st_size != (off_t)sizeof(struct history_file) ||
	    (fcntl(fd, F_GET_SEALS) & F_SEAL_SHRINK) == 0)
		return -EINVAL;
	at = mmap(NULL, sizeof(struct history_file), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	if (at == MAP_FAILED)
		return -errno;
	*ret = at;
	return 0;
}

/* A record that was being written, or that another program has changed, is none. Texts end. */
static bool history_is_whole(const struct history_record *r)
{
	return r->check == history_check(r) && memchr(r->job, '\0', sizeof(r->job)) &&
	       memchr(r->error, '\0', sizeof(r->error));
}

/* Is there another one of that id? A daemon that was killed while it moved a record leaves two. */
static bool history_is_twice(size_t i)
{
	const struct history_record *all = history.file->records;

	for (size_t k = 0; k < i; k++)
		if (all[k].head.id == all[i].head.id)
			return true;
	return false;
}

/* Those that are not whole, or there already. Return: how many records are left. @dropped: counts the first. */
static size_t history_drop_broken(long *dropped)
{
	struct history_record *all = history.file->records;
	size_t n = 0;

	for (size_t i = 0; i < HISTORY_MOST; i++) {
		if (!all[i].head.id)
			continue;
		if (!history_is_whole(&all[i])) {
			all[i].head.id = 0;
			++*dropped;
		} else if (history_is_twice(i)) {
			all[i].head.id = 0;
		} else {
			history.last =
				all[i].head.id > history.last ? all[i].head.id : history.last;
			n++;
		}
	}
	return n;
}

static void history_drop_oldest(void)
{
	struct history_record *all = history.file->records, *oldest = NULL;

	for (size_t i = 0; i < HISTORY_MOST; i++)
		if (all[i].head.id && (!oldest || all[i].head.id < oldest->head.id))
			oldest = &all[i];
	oldest->head.id = 0;
}

/* From behind the places that are used to empty ones before that. */
static void history_move_up(void)
{
	struct history_record *all = history.file->records;
	size_t room = 0;

	for (size_t i = history.most; i < HISTORY_MOST; i++) {
		if (!all[i].head.id)
			continue;
		while (all[room].head.id)
			room++;
		all[room] = all[i];
		atomic_signal_fence(memory_order_seq_cst);
		all[i].head.id = 0;
	}
}

static long history_sort_out(void)
{
	long dropped = 0;

	for (size_t n = history_drop_broken(&dropped); n > history.most; n--, dropped++)
		history_drop_oldest();
	history_move_up();
	return dropped;
}

static int history_open_old(int fd)
{
	int r = history_map(fd, &history.file);

	if (r < 0)
		return r;
	if (history.file->magic == HISTORY_MAGIC && history.file->version == HISTORY_VERSION &&
	    history.file->record_bytes == sizeof(struct history_record))
		return 0;
	munmap(history.file, sizeof(*history.file));
	history.file = NULL;
	return -EINVAL;
}

static int history_open_new(void)
{
	_cleanup_(fd_closep) int fd = -1;
	int r = memfile_new("shardd-history", &fd);

	if (r < 0)
		return r;
	if (ftruncate(fd, sizeof(struct history_file)) < 0 ||
	    fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW) < 0)
		return -errno;
	r = history_map(fd, &history.file);
	if (r < 0)
		return r;
	history.file->version = HISTORY_VERSION;
	history.file->record_bytes = sizeof(struct history_record);
	history.file->magic = HISTORY_MAGIC;
	history.fd = STEAL_FD(fd);
	return 0;
}

int history_open(size_t most, int fd, long *ret_dropped)
{
	int r = fd < 0 ? -ENOENT : history_open_old(fd);
	const bool is_lost = fd >= 0 && r < 0;

	if (r < 0)
		r = history_open_new();
	if (r < 0)
		return r;
	history.most = most < HISTORY_MOST ? most : HISTORY_MOST;
	*ret_dropped = is_lost ? -1 : history_sort_out();
	return 0;
}

void history_close(void)
{
	if (history.file)
		munmap(history.file, sizeof(*history.file));
	history.file = NULL;
	history.fd = fd_close(history.fd);
	history.last = 0;
}

int history_fd(void)
{
	return history.fd;
}

static void history_fill(struct history_record *r, const struct job *job)
{
	const state_job *rec = job->rec;

	memset(r, 0, sizeof(*r));
	r->head.uid = rec->uid;
	text_copy(r->job, sizeof(r->job), rec->name);
	text_copy(r->error, sizeof(r->error), job->ops.last_error);
	r->began_unix_s = rec->created_unix_s;
	r->ended_unix_s = (uint64_t)time(NULL);
	r->step = rec->step;
	r->has_commit = rec->has_commit;
	r->peak_bytes = quota_peak_used(&job->quota);
	r->ops = job->ops.total;
	r->ranks = rec->world_size;
	r->why = job->life.why ? job->life.why : HISTORY_DELETED;
	r->is_private = rec->is_private;
	r->was_torn = job->life.torn;
}

/* The id is written last: until then the place is empty. */
void history_add(const struct job *job)
{
	struct history_record *all, *at, r;

	if (!history.file || !history.most)
		return;
	all = history.file->records;
	at = &all[shares_place(all, sizeof(*all), history.most, job->rec->uid)];
	history_fill(&r, job);
	r.head.id = history.last + 1;
	r.check = history_check(&r);
	r.head.id = 0;
	at->head.id = 0;
	atomic_signal_fence(memory_order_seq_cst);
	*at = r;
	atomic_signal_fence(memory_order_seq_cst);
	at->head.id = ++history.last;
}

static int history_compare(const void *x, const void *y)
{
	const struct history_record *const *a = x, *const *b = y;

	return (*a)->head.id > (*b)->head.id ? -1 : (*a)->head.id < (*b)->head.id;
}

size_t history_all(const struct history_record *ret[HISTORY_MOST])
{
	size_t n = 0;

	for (size_t i = 0; history.file && i < history.most; i++)
		if (history.file->records[i].head.id)
			ret[n++] = &history.file->records[i];
	qsort(ret, n, sizeof(ret[0]), history_compare);
	return n;
}
