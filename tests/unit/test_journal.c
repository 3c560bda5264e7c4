/* The journal: what a process that was killed at any instruction has left can be read, up to the
 * last entry that it had finished; what is damaged is refused. */
#include <criterion/criterion.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "fdcheck.h"
#include "store/journal.h"

TestSuite(journal, .init = fdcheck_begin, .fini = fdcheck_end, .timeout = 60);

static void append(struct journal *j, const char *text)
{
	size_t n = strlen(text);
	char *at = journal_begin(j, n);

	cr_assert(at);
	memcpy(at, text, n);
	journal_end(j, n);
}

static void base(struct journal *j, const char *text)
{
	size_t n = strlen(text);
	char *at = journal_base_begin(j, n);

	cr_assert(at);
	memcpy(at, text, n);
	journal_base_end(j, n);
}

static struct journal *open_again(const struct journal *j, struct fault *f)
{
	int fds[JOURNAL_FILES] = { journal_fd(j, 0), journal_fd(j, 1) };
	struct journal *again = NULL;

	*f = FAULT_NULL;
	if (journal_open(fds, &again, f))
		cr_assert(!again && f->text[0]);
	return again;
}

/* All entries, with '|' behind each. */
static void expect(const struct journal *j, const char *want)
{
	char all[256] = "";
	const void *at;
	uint64_t pos = 0;
	size_t n;

	while (journal_next(j, &pos, &at, &n)) {
		strncat(all, at, n);
		strcat(all, "|");
	}
	cr_expect_str_eq(all, want);
}

static void expect_again(const struct journal *j, const char *want)
{
	struct fault f;
	struct journal *again = open_again(j, &f);

	cr_assert(again, "%s", f.text);
	expect(again, want);
	journal_free(again);
}

static void expect_refused(const struct journal *j, const char *words)
{
	struct fault f;

	cr_assert_null(open_again(j, &f));
	cr_expect_eq(f.code, FAULT_INVALID);
	cr_expect(strstr(f.text, words), "\"%s\" is not in \"%s\"", words, f.text);
}

/* The file with the entries. */
static uint8_t *map(const struct journal *j, unsigned file)
{
	struct stat st;
	void *at;

	cr_assert_eq(fstat(journal_fd(j, file), &st), 0);
	at = mmap(NULL, (size_t)st.st_size, PROT_READ | PROT_WRITE, MAP_SHARED, journal_fd(j, file),
		  0);
	cr_assert_neq(at, MAP_FAILED);
	return at;
}

static struct journal *new (void)
{
	struct journal *j = NULL;

	cr_assert_eq(journal_new(&j), 0);
	return j;
}

Test(journal, entries_come_back_in_order)
{
	struct journal *j = new ();

	expect_again(j, "");
	append(j, "one");
	append(j, "");
	append(j, "three, which is longer than a word");
	expect(j, "one||three, which is longer than a word|");
	expect_again(j, "one||three, which is longer than a word|");
	journal_free(j);
}

Test(journal, an_entry_counts_when_it_is_whole)
{
	struct journal *j = new ();
	char *at;

	append(j, "one");
	at = journal_begin(j, 100);
	memset(at, 'x', 50);
	expect_again(j, "one|");
	memset(at, 'y', 100);
	expect_again(j, "one|");
	append(j, "two");
	expect_again(j, "one|two|");
	journal_free(j);
}

Test(journal, a_base_replaces_what_was_there)
{
	struct journal *j = new ();
	char *at;

	append(j, "old");
	at = journal_base_begin(j, 4);
	memcpy(at, "base", 4);
	expect_again(j, "old|");
	append(j, "older");
	expect_again(j, "old|older|");
	base(j, "base");
	expect_again(j, "base|");
	append(j, "new");
	expect_again(j, "base|new|");
	base(j, "another");
	expect_again(j, "another|");
	base(j, "third");
	append(j, "x");
	expect_again(j, "third|x|");
	journal_free(j);
}

Test(journal, it_grows)
{
	static char large[300000];
	struct journal *j = new ();
	uint64_t before = journal_bytes(j);

	memset(large, 'a', sizeof(large) - 1);
	base(j, "b");
	cr_expect_not(journal_is_long(j));
	for (int i = 0; i < 8; i++)
		append(j, large);
	cr_expect(journal_is_long(j));
	cr_expect_gt(journal_bytes(j), before + 8 * sizeof(large) - 1000000);
	base(j, large);
	cr_expect_not(journal_is_long(j));
	cr_expect_eq(journal_reserve(j, 5000000), 0);
	before = journal_bytes(j);
	cr_expect_not_null(journal_begin(j, 5000000));
	cr_expect_eq(journal_bytes(j), before, "it was reserved");
	journal_free(j);
}

/* The next daemon writes on. */
Test(journal, a_successor_goes_on_and_so_does_the_next)
{
	struct journal *j = new (), *second;
	struct fault f;

	base(j, "base");
	append(j, "one");
	second = open_again(j, &f);
	cr_assert(second, "%s", f.text);
	append(second, "two");
	expect_again(j, "base|one|two|");
	base(second, "new");
	append(second, "three");
	expect_again(j, "new|three|");
	journal_free(second);
	journal_free(j);
}

Test(journal, what_was_not_written_down_is_not_believed)
{
	struct journal *j = new ();

	base(j, "base");
	journal_spoil(j);
	cr_expect(journal_is_spoiled(j));
	expect_refused(j, "incomplete");
	base(j, "whole again");
	cr_expect_not(journal_is_spoiled(j));
	expect_again(j, "whole again|");
	journal_free(j);
}

/* Header: magic, format, spoiled, generation, end, end of the base. */
enum { AT_MAGIC = 0, AT_FORMAT = 8, AT_GENERATION = 16, AT_END = 24, AT_ENTRY = 64 };

static void set64(uint8_t *at, uint64_t value)
{
	memcpy(at, &value, sizeof(value));
}

Test(journal, a_newer_format_is_refused_and_left_as_it_is)
{
	struct journal *j = new ();
	uint8_t *at, before[128];
	struct stat st;

	append(j, "one");
	at = map(j, 0);
	at[AT_FORMAT] = JOURNAL_FORMAT + 1;
	memcpy(before, at, sizeof(before));
	expect_refused(j, "newer shardd (format 4, this one reads up to 3): start that version");
	cr_expect_arr_eq(at, before, sizeof(before));
	at[AT_FORMAT] = JOURNAL_FORMAT;
	expect_again(j, "one|");
	cr_assert_eq(fstat(journal_fd(j, 0), &st), 0);
	munmap(at, (size_t)st.st_size);
	journal_free(j);
}

Test(journal, damage_is_refused)
{
	static const struct {
		unsigned at;
		const char *words;
	} harms[] = {
		{ AT_MAGIC, "does not begin as a journal does" },
		{ AT_ENTRY, "damaged at byte 64" },      /* its length */
		{ AT_ENTRY + 8, "damaged at byte 64" },  /* its sum */
		{ AT_ENTRY + 16, "damaged at byte 64" }, /* what it says */
		{ AT_ENTRY + 24 + 16, "damaged at byte 88" },
	};
	struct journal *j = new ();
	uint8_t *at;

	append(j, "one");
	append(j, "two");
	at = map(j, 0);
	for (size_t i = 0; i < sizeof(harms) / sizeof(harms[0]); i++) {
		at[harms[i].at] ^= 1;
		expect_refused(j, harms[i].words);
		at[harms[i].at] ^= 1;
	}
	expect_again(j, "one|two|");
	set64(at + AT_END, 63);
	expect_refused(j, "ends at 63 of");
	set64(at + AT_END, UINT64_C(1) << 40);
	expect_refused(j, "ends at 1099511627776 of");
	set64(at + AT_END, AT_ENTRY + 30);
	expect_refused(j, "damaged at byte 88");
	set64(at + AT_GENERATION, 0);
	expect_refused(j, "neither file is valid");
	munmap(at, 4096);
	journal_free(j);
}

Test(journal, files_that_are_none_are_refused)
{
	struct fault f = FAULT_NULL;
	struct journal *j = NULL;
	int p[2], fds[JOURNAL_FILES];

	cr_assert_eq(pipe(p), 0);
	fds[0] = fds[1] = p[0];
	cr_expect_eq(journal_open(fds, &j, &f), FAULT_INVALID);
	cr_expect_null(j);
	close(p[0]);
	close(p[1]);
	f = FAULT_NULL;
	fds[0] = fds[1] = memfd_create("empty", MFD_CLOEXEC);
	cr_expect_eq(journal_open(fds, &j, &f), FAULT_INVALID);
	cr_expect(strstr(f.text, "a file of 0 bytes"), "%s", f.text);
	close(fds[0]);
}
