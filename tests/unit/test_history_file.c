/* The file of jobs that have ended, as another daemon may have left it. */
#include <criterion/criterion.h>
#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "core/memfile.h"
#include "fdcheck.h"
#include "job/history.h"
#include "nodefix.h"

enum { HEAD_BYTES = 16, FILE_BYTES = HEAD_BYTES + HISTORY_MOST * sizeof(struct history_record) };

static struct nodefix n;
static int left = -1; /* the file, as the keeper has it */

static void begin(void)
{
	fdcheck_begin();
	nodefix_begin(&n, NULL);
}

static void end(void)
{
	history_close();
	if (left >= 0)
		close(left);
	left = -1;
	nodefix_end(&n);
	fdcheck_end();
}

TestSuite(history_file, .init = begin, .fini = end, .timeout = 60);

static long open_with(size_t most)
{
	long dropped = 0;

	cr_assert_eq(history_open(most, left, &dropped), 0);
	return dropped;
}

/* A daemon records @jobs jobs, named "j0"..., and dies. */
static void leave(size_t jobs)
{
	cr_assert_eq(open_with(jobs), 0);
	for (size_t i = 0; i < jobs; i++) {
		char name[16];

		snprintf(name, sizeof(name), "j%zu", i);
		history_add(nodefix_job(&n, name, 1, 0));
	}
	left = fcntl(history_fd(), F_DUPFD_CLOEXEC, 3);
	cr_assert_geq(left, 0);
	history_close();
}

static struct history_record *map(void **ret)
{
	*ret = mmap(NULL, FILE_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, left, 0);
	cr_assert_neq(*ret, MAP_FAILED);
	return (struct history_record *)(void *)((char *)*ret + HEAD_BYTES);
}

/* The names of all, the newest first, with a blank behind each. */
static const char *names(void)
{
	static const struct history_record *all[HISTORY_MOST];
	static char text[256];
	size_t found = history_all(all);

	text[0] = '\0';
	for (size_t i = 0; i < found; i++) {
		strcat(text, all[i]->job);
		strcat(text, " ");
	}
	return text;
}

Test(history_file, a_successor_has_all_records_and_goes_on)
{
	leave(3);
	cr_assert_eq(open_with(8), 0);
	cr_assert_str_eq(names(), "j2 j1 j0 ");
	history_add(nodefix_job(&n, "new", 1, 0));
	cr_assert_str_eq(names(), "new j2 j1 j0 ");
}

/* Killed in the middle of a record, or the memory is not ours alone. */
Test(history_file, a_record_that_is_not_whole_is_dropped_and_counted)
{
	void *at;

	leave(3);
	map(&at)[1].step++;
	munmap(at, FILE_BYTES);
	cr_assert_eq(open_with(8), 1);
	cr_assert_str_eq(names(), "j2 j0 ");
}

/* Killed between the two writes of a move: both places have it. */
Test(history_file, a_record_that_is_there_twice_counts_once)
{
	struct history_record *all;
	void *at;

	leave(3);
	all = map(&at);
	all[300] = all[0];
	munmap(at, FILE_BYTES);
	cr_assert_eq(open_with(3), 0, "and no other one makes room for it");
	cr_assert_str_eq(names(), "j2 j1 j0 ");
}

Test(history_file, the_newest_remain_when_fewer_are_kept)
{
	leave(5);
	cr_assert_eq(open_with(2), 3);
	cr_assert_str_eq(names(), "j4 j3 ");
	history_add(nodefix_job(&n, "new", 1, 0));
	cr_assert_str_eq(names(), "new j4 ");
}

Test(history_file, records_move_to_the_places_that_are_used)
{
	struct history_record *all;
	void *at;

	leave(4);
	all = map(&at);
	all[200] = all[0];
	all[0] = (struct history_record){ 0 };
	munmap(at, FILE_BYTES);
	cr_assert_eq(open_with(4), 0);
	cr_assert_str_eq(names(), "j3 j2 j1 j0 ");
}

Test(history_file, another_version_is_not_read)
{
	void *at;

	leave(2);
	map(&at);
	((uint32_t *)at)[2]++;
	munmap(at, FILE_BYTES);
	cr_assert_eq(open_with(8), -1);
	cr_assert_str_eq(names(), "");
	history_add(nodefix_job(&n, "new", 1, 0));
	cr_assert_str_eq(names(), "new ");
}

Test(history_file, what_is_no_such_file_is_not_read)
{
	int sizes[] = { 0, HEAD_BYTES, FILE_BYTES };

	for (size_t i = 0; i < 3; i++) { /* the last one has no seals: it may shrink under us */
		cr_assert_eq(memfile_new("not-ours", &left), 0);
		cr_assert_eq(ftruncate(left, sizes[i]), 0);
		cr_assert_eq(open_with(8), -1);
		cr_assert_str_eq(names(), "");
		history_close();
		close(left);
	}
	left = open("/dev/null", O_RDWR | O_CLOEXEC);
	cr_assert_eq(open_with(8), -1);
}

Test(history_file, texts_without_an_end_are_dropped)
{
	struct history_record *all;
	void *at;

	leave(2);
	all = map(&at);
	memset(all[0].job, 'x', sizeof(all[0].job));
	memset(all[1].error, 'x', sizeof(all[1].error));
	munmap(at, FILE_BYTES);
	cr_assert_eq(open_with(8), 2);
	cr_assert_str_eq(names(), "");
}
