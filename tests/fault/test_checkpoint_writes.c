/*
 * Every call by which a checkpoint is written fails once, with each error of a disk, or is the last one
 * of its process: before it, or after it. Whatever happens: the checkpoint before is whole, a name
 * is that of a whole one, the error names the cause, and the next save succeeds and leaves nothing over.
 */
#include <criterion/criterion.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "checkpoint/folder.h"
#include "checkpoint/save.h"
#include "core/check.h"
#include "core/cleanup.h"
#include "fdcheck.h"

/* ------------------------------------------------------------------- calls that fail */

enum { OFF = -1, KILL_BEFORE = 0x10000, KILL_AFTER };

static int left = OFF;   /* calls until the one that it is about */
static int how;          /* an errno, KILL_BEFORE, KILL_AFTER */
static const char *what; /* that call */

/* Return: must the call fail? */
static bool begins(const char *name)
{
	if (left < 0 || left-- > 0)
		return false;
	what = name;
	if (how == KILL_BEFORE)
		raise(SIGKILL);
	if (how == KILL_AFTER)
		return false;
	errno = how;
	return true;
}

static void ends(void)
{
	if (what && how == KILL_AFTER)
		raise(SIGKILL);
}

#define WRAP(type, name, declared, ...)         \
	type __real_##name declared;            \
	type __wrap_##name declared;            \
	type __wrap_##name declared             \
	{                                       \
		type r;                         \
                                                \
		if (begins(#name))              \
			return (type)-1;        \
		r = __real_##name(__VA_ARGS__); \
		ends();                         \
		return r;                       \
	}

WRAP(int, mkdirat, (int fd, const char *path, mode_t mode), fd, path, mode)
WRAP(ssize_t, write, (int fd, const void *data, size_t bytes), fd, data, bytes)
WRAP(int, fsync, (int fd), fd)
WRAP(int, renameat2, (int a, const char *from, int b, const char *to, unsigned flags), a, from, b,
     to, flags)
WRAP(int, flock, (int fd, int op), fd, op)

int __real_openat(int fd, const char *path, int flags, ...);
int __wrap_openat(int fd, const char *path, int flags, ...);
int __wrap_openat(int fd, const char *path, int flags, ...)
{
	mode_t mode = 0;
	va_list more;
	int r;

	va_start(more, flags);
	if (flags & O_CREAT)
		mode = (mode_t)va_arg(more, unsigned);
	va_end(more);
	if (begins("openat"))
		return -1;
	r = __real_openat(fd, path, flags, mode);
	ends();
	return r;
}

/* ------------------------------------------------------------------------- a checkpoint */

#define ELEMENTS 5000

static char base[64];
static int dir = -1;

static void begin(void)
{
	fdcheck_begin();
	snprintf(base, sizeof(base), "/tmp/shardd-writes-XXXXXX");
	cr_assert(mkdtemp(base));
	dir = open(base, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	cr_assert_geq(dir, 0);
}

static void end(void)
{
	char command[128];

	dir = fd_close(dir);
	snprintf(command, sizeof(command), "rm -rf '%s'", base);
	cr_assert_eq(system(command), 0);
	fdcheck_end();
}

TestSuite(checkpoint_writes, .init = begin, .fini = end, .timeout = 120);

static const void *data_of(void *arg, size_t piece, uint64_t offset, size_t bytes, struct fault *f)
{
	static unsigned char buf[SAVE_CHUNK_BYTES];

	(void)arg;
	(void)f;
	for (size_t i = 0; i < bytes; i++)
		buf[i] = (unsigned char)((offset + i) * 31 + piece);
	return buf;
}

static void add(struct index *x, const char *tensor, uint32_t file)
{
	uint64_t shape[] = { ELEMENTS };
	struct index_piece p = { .unit = (char *)(uintptr_t) "unit",
				 .tensor = (char *)(uintptr_t)tensor,
				 .array = INDEX_PARAM,
				 .type = TENSOR_FP32,
				 .dims = 1,
				 .shape = shape,
				 .elements = ELEMENTS,
				 .file = file };
	struct fault f = FAULT_NULL;

	cr_assert_eq(index_add(x, &p, &f), 0, "%s", f.text);
}

static int save(uint64_t step, struct fault *f)
{
	const struct save_options o = { 0 };
	struct save_progress p = { 0 };
	struct index x = INDEX_NULL;
	int r;

	cr_assert_eq(index_init(&x, "job", step, 1, f), 0);
	cr_assert_eq(index_add_file(&x, "shard-00000.safetensors", f), 0);
	cr_assert_eq(index_add_file(&x, "shard-00001.safetensors", f), 0);
	add(&x, "a", 0);
	add(&x, "b", 1);
	r = save_write(dir, &x, &o, data_of, NULL, &p, f);
	index_deinit(&x);
	return r;
}

static int verify(uint64_t step, struct fault *f)
{
	_cleanup_(fd_closep) int fd = folder_open(dir, step, f);
	struct save_progress p = { 0 };
	struct index x = INDEX_NULL;
	int r = fd < 0 ? (int)f->code : save_read(fd, &x, f);

	if (r == 0)
		r = save_verify(fd, &x, &p, f);
	index_deinit(&x);
	return r;
}

static unsigned names(void)
{
	DIR *d = opendir(base);
	struct dirent *e;
	unsigned n = 0;

	while ((e = readdir(d)))
		n += strcmp(e->d_name, ".") != 0 && strcmp(e->d_name, "..") != 0;
	closedir(d);
	return n;
}

static void remove_step(uint64_t step)
{
	char command[160];

	snprintf(command, sizeof(command), "rm -rf '%s/step-%012u'", base, (unsigned)step);
	cr_assert_eq(system(command), 0);
}

/* Calls of one save. */
static int count(void)
{
	struct fault f = FAULT_NULL;
	int n;

	left = 1 << 20;
	cr_assert_eq(save(1, &f), 0, "%s", f.text);
	n = (1 << 20) - left;
	left = OFF;
	cr_assert_geq(n, 15);
	return n;
}

/* A checkpoint of step 2 is whole or not there, and can be made. */
static void expect_sound(int call, const char *when)
{
	struct fault f = FAULT_NULL, none = FAULT_NULL;
	int r = verify(2, &none);

	cr_assert(r == 0 || r == FAULT_NOT_FOUND, "call %d, %s, %s: %s", call, when, what,
		  none.text);
	cr_assert_eq(verify(1, &f), 0, "%s", f.text);
	if (r == 0)
		remove_step(2);
	cr_assert_eq(save(2, &f), 0, "call %d, %s: %s", call, when, f.text);
	cr_assert_eq(verify(2, &f), 0, "%s", f.text);
	cr_assert_eq(names(), 2, "call %d, %s: something is left over", call, when);
	remove_step(2);
}

static void fails_with(int error, int n)
{
	for (int call = 0; call < n; call++) {
		struct fault f = FAULT_NULL;
		int r;

		left = call;
		how = error;
		what = NULL;
		r = save(2, &f);
		left = OFF;
		cr_assert(what, "call %d", call);
		if (r)
			cr_expect(strstr(f.text, strerror(error)), "%s: %s", what, f.text);
		if (r && strcmp(what, "write") == 0)
			cr_expect(strstr(f.text, " bytes at ") && strstr(f.text, " of '"), "%s",
				  f.text);
		if (r && (error == ENOSPC || error == EDQUOT))
			cr_expect_eq(r, FAULT_EXHAUSTED, "%s: %s", what, f.text);
		if (!r) /* it was about what another process has left */
			cr_expect(strcmp(what, "openat") == 0 || strcmp(what, "flock") == 0, "%s",
				  what);
		expect_sound(call, strerror(error));
	}
}

Test(checkpoint_writes, each_call_fails_with_each_error)
{
	static const int errors[] = { ENOSPC, EIO, EROFS, EDQUOT, EACCES, EMFILE };
	int n = count();

	for (unsigned i = 0; i < ARRAY_SIZE(errors); i++)
		fails_with(errors[i], n);
}

static bool is_direct(void)
{
	_cleanup_(fd_closep) int fd =
		openat(dir, ".", O_TMPFILE | O_WRONLY | O_CLOEXEC | O_DIRECT, 0600);

	return fd >= 0;
}

/* A disk whose blocks are larger than those that are written past the page cache: it is written through
 * it. The call is the first write. */
Test(checkpoint_writes, a_disk_with_larger_blocks_is_written_through_the_cache)
{
	int n = count(), writes = 0;

	for (int call = 0; call < n; call++) {
		struct fault f = FAULT_NULL;
		int r;

		left = call;
		how = EINVAL;
		what = NULL;
		r = save(2, &f);
		left = OFF;
		writes += strcmp(what, "write") == 0 && r == 0;
		expect_sound(call, strerror(EINVAL));
	}
	if (!is_direct())
		cr_skip_test("this disk cannot be written past the page cache");
	cr_expect_eq(writes, 2, "the first write of each file");
}

static void kills(int when, const char *name, int n)
{
	for (int call = 0; call < n; call++) {
		pid_t pid = fork();
		int status;

		if (pid == 0) {
			struct fault f = FAULT_NULL;

			left = call;
			how = when;
			save(2, &f);
			_exit(0);
		}
		cr_assert_eq(waitpid(pid, &status, 0), pid);
		cr_assert(WIFSIGNALED(status), "call %d, %s", call, name);
		expect_sound(call, name);
	}
}

Test(checkpoint_writes, each_call_is_the_last_one)
{
	int n = count();

	kills(KILL_BEFORE, "killed before it", n);
	kills(KILL_AFTER, "killed after it", n);
}

/* Writing goes on behind what a signal has interrupted. */
Test(checkpoint_writes, an_interrupted_write_is_made_again)
{
	int n = count();

	for (int call = 0; call < n; call++) {
		struct fault f = FAULT_NULL;

		left = call;
		how = EINTR;
		what = NULL;
		(void)save(2, &f);
		left = OFF;
		if (what && strcmp(what, "write") == 0)
			cr_expect_eq(f.code, 0, "%s", f.text);
		expect_sound(call, "EINTR");
	}
}
