/* Spools: the file has what was added, whatever the sizes, past the page cache and through it. */
#include <criterion/criterion.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include "checkpoint/spool.h"
#include "core/check.h"
#include "core/cleanup.h"
#include "fdcheck.h"

#define BLOCK ((size_t)4 << 20)
#define MOST  (2 * BLOCK + 4097)

static unsigned char *data;

static void begin(void)
{
	fdcheck_begin();
	data = malloc(MOST);
	for (size_t i = 0; i < MOST; i++)
		data[i] = (unsigned char)(i * 2654435761u >> 11);
}

static void end(void)
{
	free(data);
	fdcheck_end();
}

TestSuite(spool, .init = begin, .fini = end, .timeout = 60);

/* A file without a name. */
static int file_in(const char *dir)
{
	int fd = open(dir, O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);

	cr_assert_geq(fd, 0, "%s: %s", dir, strerror(errno));
	return fd;
}

static void expect_contents(int fd, size_t bytes)
{
	unsigned char *got = malloc(bytes + 1);
	struct stat st;

	cr_assert_eq(fstat(fd, &st), 0);
	cr_assert_eq(st.st_size, (off_t)bytes);
	cr_assert_eq(pread(fd, got, bytes, 0), (ssize_t)bytes);
	cr_expect(memcmp(got, data, bytes) == 0, "%zu bytes", bytes);
	free(got);
}

/* In pieces of @piece bytes. */
static void write_all(const char *dir, size_t bytes, size_t piece)
{
	_cleanup_(fd_closep) int fd = file_in(dir);
	struct fault f = FAULT_NULL;
	struct spool *s;

	cr_assert_eq(spool_open(fd, "file", &s, &f), 0, "%s", f.text);
	for (size_t at = 0; at < bytes; at += piece)
		cr_assert_eq(spool_add(s, data + at, bytes - at < piece ? bytes - at : piece, &f),
			     0, "%s", f.text);
	cr_expect_eq(spool_bytes(s), bytes);
	cr_assert_eq(spool_end(s, &f), 0, "%s", f.text);
	spool_free(s);
	expect_contents(fd, bytes);
}

/* /dev/shm is memory, where some kernels know no O_DIRECT. */
Test(spool, writes_any_number_of_bytes)
{
	static const char *const dirs[] = { "/tmp", "/dev/shm" };
	static const size_t sizes[] = { 0,         1,     511,       4095,         4096,
					4097,      BLOCK, BLOCK - 1, BLOCK + 1,    2 * BLOCK,
					BLOCK * 2, MOST,  MOST - 1,  BLOCK + 12288 };

	for (unsigned d = 0; d < ARRAY_SIZE(dirs); d++)
		for (unsigned i = 0; i < ARRAY_SIZE(sizes); i++) {
			write_all(dirs[d], sizes[i], BLOCK);
			write_all(dirs[d], sizes[i], 1000003);
		}
}

/* The call that adds a later block, or the end, says so. */
Test(spool, tells_of_bytes_that_could_not_be_written)
{
	_cleanup_(fd_closep) int fd = file_in("/tmp");
	const struct rlimit few = { BLOCK + 1000, RLIM_INFINITY };
	struct fault f = FAULT_NULL;
	struct spool *s;
	struct rlimit before;

	cr_assert_eq(getrlimit(RLIMIT_FSIZE, &before), 0);
	signal(SIGXFSZ, SIG_IGN);
	cr_assert_eq(setrlimit(RLIMIT_FSIZE, &few), 0);
	cr_assert_eq(spool_open(fd, "large", &s, &f), 0);
	for (unsigned i = 0; i < 3 && !f.code; i++)
		(void)spool_add(s, data, BLOCK, &f);
	if (!f.code)
		(void)spool_end(s, &f);
	cr_expect(strstr(f.text, " bytes at ") && strstr(f.text, " of 'large'") &&
			  strstr(f.text, strerror(EFBIG)),
		  "%s", f.text);
	spool_free(s);
	cr_assert_eq(setrlimit(RLIMIT_FSIZE, &before), 0);
}

Test(spool, can_be_given_up_at_any_time)
{
	static const size_t sizes[] = { 0, 100, BLOCK, MOST };

	for (unsigned i = 0; i < ARRAY_SIZE(sizes); i++) {
		_cleanup_(fd_closep) int fd = file_in("/tmp");
		struct fault f = FAULT_NULL;
		struct spool *s;

		cr_assert_eq(spool_open(fd, "file", &s, &f), 0);
		cr_assert_eq(spool_add(s, data, sizes[i], &f), 0);
		cr_expect_null(spool_free(s));
	}
	cr_expect_null(spool_free(NULL));
}
