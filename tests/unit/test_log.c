#include <criterion/criterion.h>
#include <errno.h>
#include <fcntl.h>
#include <jansson.h>
#include <pthread.h>
#include <regex.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include "core/cleanup.h"
#include "core/clock.h"
#include "core/log.h"
#include "core/log_format.h"
#include "core/log_journal.h"
#include "fdcheck.h"

#define TEST(name) Test(log, name, .init = fdcheck_begin, .fini = fdcheck_end, .timeout = 30)

/* A directory for the test's files, and what was written there. */
struct place {
	char dir[64];
	char file[96];
	char other[96];
};

static void place_init(struct place *p)
{
	snprintf(p->dir, sizeof(p->dir), "/tmp/shardd-log-XXXXXX");
	cr_assert_not_null(mkdtemp(p->dir));
	snprintf(p->file, sizeof(p->file), "%s/log", p->dir);
	snprintf(p->other, sizeof(p->other), "%s/log.1", p->dir);
}

static void place_deinit(struct place *p)
{
	unlink(p->file);
	unlink(p->other);
	cr_assert_eq(rmdir(p->dir), 0);
}

/* The whole file; the caller frees it. */
static char *slurp(const char *path)
{
	_cleanup_(fclosep) FILE *in = fopen(path, "r");
	char *text = calloc(1, 1 << 21);
	size_t n;

	cr_assert_not_null(in, "%s", path);
	cr_assert_not_null(text);
	n = fread(text, 1, (1 << 21) - 1, in);
	text[n] = '\0';
	return text;
}

static unsigned count_lines(const char *text)
{
	unsigned n = 0;

	for (; *text; text++)
		n += *text == '\n';
	return n;
}

static void open_log(enum log_level level, bool json, const char *path)
{
	struct log_options o = { .level = level, .json = json, .path = path };

	cr_assert_eq(log_open(&o), 0);
}

static bool matches(const char *text, const char *pattern)
{
	regex_t re;
	bool r;

	cr_assert_eq(regcomp(&re, pattern, REG_EXTENDED | REG_NOSUB), 0);
	r = regexec(&re, text, 0, NULL, 0) == 0;
	regfree(&re);
	return r;
}

/* Put @fd in the place of standard error. Return: the old one, for restore_stderr. */
static int replace_stderr(int fd)
{
	int saved = fcntl(STDERR_FILENO, F_DUPFD_CLOEXEC, 100);

	cr_assert_geq(saved, 0);
	cr_assert_eq(dup2(fd, STDERR_FILENO), STDERR_FILENO);
	return saved;
}

/* The same with a new file. */
static int stderr_into(const char *path)
{
	int fd = open(path, O_WRONLY | O_CREAT | O_CLOEXEC, 0600);
	int saved = replace_stderr(fd);

	close(fd);
	return saved;
}

static void restore_stderr(int saved)
{
	dup2(saved, STDERR_FILENO);
	close(saved);
}

TEST(a_line_has_time_level_topic_and_message)
{
	_cleanup_(freep) char *text = NULL;
	struct place p;

	place_init(&p);
	open_log(LOG_INFO, false, p.file);
	log_warn("net", "refused pid=%d name=\"a b\"", 42);
	log_close();
	text = slurp(p.file);
	cr_assert(matches(text, "^20[0-9]{2}-[01][0-9]-[0-3][0-9]T[0-2][0-9]:[0-5][0-9]:[0-6][0-9]"
				"\\.[0-9]{6}Z warn  net refused pid=42 name=\"a b\"\n$"),
		  "%s", text);
	cr_assert_eq(log_dropped(), 0);
	place_deinit(&p);
}

TEST(levels_above_the_limit_are_left_out)
{
	_cleanup_(freep) char *text = NULL;
	struct place p;

	place_init(&p);
	open_log(LOG_WARN, false, p.file);
	log_debug("a", "debug");
	log_info("a", "info");
	log_warn("a", "warn");
	log_error("a", "error");
	log_close();
	text = slurp(p.file);
	cr_assert_eq(count_lines(text), 2);
	cr_assert_null(strstr(text, "a info"));
	place_deinit(&p);
}

TEST(json_is_one_object_a_line_with_the_pairs_as_fields)
{
	_cleanup_(freep) char *text = NULL;
	json_t *o, *fields;
	struct place p;

	place_init(&p);
	open_log(LOG_DEBUG, true, p.file);
	log_debug("rpc", "x=1 slow \\ \"call\" method=%s text=\"one two\" us=17 empty=", "Gather");
	log_close();
	text = slurp(p.file);
	cr_assert_eq(count_lines(text), 1);
	o = json_loads(text, JSON_REJECT_DUPLICATES, NULL);
	cr_assert_not_null(o, "%s", text);
	cr_assert_str_eq(json_string_value(json_object_get(o, "level")), "debug");
	cr_assert_str_eq(json_string_value(json_object_get(o, "topic")), "rpc");
	cr_assert_str_eq(json_string_value(json_object_get(o, "message")), "x=1 slow \\ \"call\"");
	cr_assert_eq(json_string_length(json_object_get(o, "time")), 27);
	fields = json_object_get(o, "fields");
	cr_assert_eq(json_object_size(fields), 4);
	cr_assert_str_eq(json_string_value(json_object_get(fields, "method")), "Gather");
	cr_assert_str_eq(json_string_value(json_object_get(fields, "text")), "one two");
	cr_assert_str_eq(json_string_value(json_object_get(fields, "us")), "17");
	cr_assert_str_eq(json_string_value(json_object_get(fields, "empty")), "");
	json_decref(o);
	place_deinit(&p);
}

TEST(json_without_pairs_has_no_fields)
{
	static const char *const messages[] = { "plain",     "",  "a=1 then words",
						"Key=value", "=", "k=\"open" };
	char line[LOG_LINE_MAX + 1];

	for (size_t i = 0; i < sizeof(messages) / sizeof(messages[0]); i++) {
		struct log_record r = { .topic = "t", .message = messages[i] };
		json_t *o;

		line[log_format_json(line, &r)] = '\0';
		o = json_loads(line, 0, NULL);
		cr_assert_not_null(o, "%s", line);
		cr_assert_str_eq(json_string_value(json_object_get(o, "message")), messages[i]);
		cr_assert_null(json_object_get(o, "fields"));
		json_decref(o);
	}
}

static void print_message(char *buf, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
static void print_message(char *buf, const char *fmt, ...)
{
	va_list ap;

	va_start(ap, fmt);
	log_message(buf, fmt, ap);
	va_end(ap);
}

TEST(what_is_not_clean_text_is_replaced)
{
	static const struct {
		const char *in, *out;
	} cases[] = {
		{ "tab\tnewline\nescape\033[1m\177", "tab?newline?escape?[1m?" },
		{ "gr\xc3\xbc\xc3\x9f \xe2\x82\xac \xf0\x9f\x98\x80",
		  "gr\xc3\xbc\xc3\x9f \xe2\x82\xac \xf0\x9f\x98\x80" },
		{ "\xff\xfe", "??" },
		{ "lone \x80", "lone ?" },
		{ "cut \xe2\x82", "cut ??" },
		{ "cut \xf0\x9f\x98", "cut ???" },
		{ "overlong \xc0\xaf \xe0\x80\xaf", "overlong ?? ???" },
		{ "surrogate \xed\xa0\x80", "surrogate ???" },
		{ "too large \xf4\x90\x80\x80", "too large ????" },
		{ "c1 \xc2\x85", "c1 ??" },
		{ "separator \xe2\x80\xa8", "separator ???" },
		{ "override \xe2\x80\xae", "override ???" },
		{ "five \xf8\x88\x80\x80\x80", "five ?????" },
	};
	char buf[LOG_MESSAGE_MAX];

	for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
		print_message(buf, "%s", cases[i].in);
		cr_assert_str_eq(buf, cases[i].out);
	}
}

TEST(every_byte_value_yields_valid_json)
{
	char message[LOG_MESSAGE_MAX], line[LOG_LINE_MAX + 1];

	for (int a = 1; a < 256; a++) {
		for (int b = 1; b < 256; b += 3) {
			const char in[] = { 'k', '=', (char)a, (char)b, (char)a, '\0' };
			struct log_record r = { .topic = "t", .message = message };
			json_t *o;

			print_message(message, "%s", in);
			line[log_format_json(line, &r)] = '\0';
			o = json_loads(line, 0, NULL);
			cr_assert_not_null(o, "%s", line);
			json_decref(o);
		}
	}
}

/* Messages that grow most as JSON still fit a line. */
TEST(long_messages_are_cut_and_fit)
{
	static const char *const patterns[] = { "\"",   "\\", "a= ", "k=\"\" ", "\xf0\x9f\x98\x80",
						"x=\" " };
	char big[3 * LOG_MESSAGE_MAX], message[LOG_MESSAGE_MAX], line[LOG_LINE_MAX];

	for (size_t i = 0; i < sizeof(patterns) / sizeof(patterns[0]); i++) {
		struct log_record r = { .topic = "a topic that is much longer than topics are",
					.message = message };
		size_t n = strlen(patterns[i]), bytes;
		json_t *o;

		for (size_t k = 0; k + n < sizeof(big); k += n)
			memcpy(big + k, patterns[i], n + 1);
		print_message(message, "%s", big);
		cr_assert_eq(strlen(message), LOG_MESSAGE_MAX - 1);
		cr_assert_str_eq(message + LOG_MESSAGE_MAX - 4, "...");
		bytes = log_format_json(line, &r);
		cr_assert_leq(bytes, LOG_LINE_MAX);
		o = json_loadb(line, bytes, 0, NULL);
		cr_assert_not_null(o);
		json_decref(o);
		bytes = log_format_text(line, &r);
		cr_assert_eq(line[bytes - 1], '\n');
		message[LOG_MESSAGE_MAX - 4] = '\0'; /* nothing but pairs, without the dots */
		cr_assert_leq(log_format_json(line, &r), LOG_LINE_MAX);
	}
}

TEST(works_before_open_and_after_close)
{
	_cleanup_(freep) char *text = NULL;
	struct place p;
	int saved;

	place_init(&p);
	saved = stderr_into(p.file);
	log_info("main", "early");
	open_log(LOG_INFO, false, "");
	log_info("main", "middle");
	log_close();
	log_info("main", "late");
	log_close();
	restore_stderr(saved);
	text = slurp(p.file);
	cr_assert(matches(text, "main early\n.*main middle\n.*main late\n$"), "%s", text);
	place_deinit(&p);
}

TEST(keeps_errno)
{
	struct place p;

	place_init(&p);
	open_log(LOG_INFO, false, p.file);
	errno = EXDEV;
	log_info("a", "b");
	cr_assert_eq(errno, EXDEV);
	log_close();
	place_deinit(&p);
}

TEST(a_full_disk_only_counts)
{
	open_log(LOG_INFO, false, "/dev/full");
	for (int i = 0; i < 100; i++)
		log_info("a", "line=%d", i);
	log_close();
	cr_assert_eq(log_dropped(), 100);
}

TEST(a_pipe_without_reader_only_counts)
{
	int pair[2], saved;

	cr_assert_eq(pipe2(pair, O_CLOEXEC), 0);
	saved = replace_stderr(pair[1]);
	close(pair[0]);
	close(pair[1]);
	open_log(LOG_INFO, false, NULL);
	for (int i = 0; i < 50; i++)
		log_info("a", "line=%d", i);
	log_close();
	restore_stderr(saved);
	cr_assert_eq(log_dropped(), 50);
}

static unsigned drain(int fd)
{
	static char buf[1 << 16];
	unsigned lines = 0;
	ssize_t n;

	while ((n = read(fd, buf, sizeof(buf))) > 0)
		for (ssize_t i = 0; i < n; i++)
			lines += buf[i] == '\n';
	return lines;
}

/* Nobody reads: callers go on, the queue is bounded, closing takes a second at most,
 * and every line is either in the pipe or counted. */
TEST(a_stuck_pipe_holds_nobody_up)
{
	enum { LINES = 12000 };
	uint64_t start;
	int pair[2], saved;

	cr_assert_eq(pipe2(pair, O_CLOEXEC), 0);
	saved = replace_stderr(pair[1]);
	close(pair[1]);
	open_log(LOG_INFO, false, NULL);
	for (int i = 0; i < LINES; i++)
		log_info("a", "a line of some length, so that a pipe is full soon line=%d", i);
	cr_assert_gt(log_dropped(), 0);
	start = clock_now_us();
	log_close();
	cr_assert_lt(clock_now_us() - start, 2000000);
	restore_stderr(saved);
	cr_assert_eq(drain(pair[0]) + log_dropped(), LINES);
	close(pair[0]);
}

TEST(reopening_leads_away_from_a_stuck_pipe)
{
	_cleanup_(freep) char *text = NULL;
	struct log_options o;
	struct place p;
	int pair[2], saved;

	place_init(&p);
	cr_assert_eq(pipe2(pair, O_CLOEXEC), 0);
	saved = replace_stderr(pair[1]);
	close(pair[1]);
	open_log(LOG_INFO, false, NULL);
	for (int i = 0; i < 2000; i++)
		log_info("a", "a line of some length, so that a pipe is full soon line=%d", i);
	o = (struct log_options){ .level = LOG_INFO, .path = p.file };
	cr_assert_eq(log_reopen(&o), 0);
	log_info("a", "after");
	log_close();
	restore_stderr(saved);
	text = slurp(p.file);
	cr_assert_eq(count_lines(text), 1);
	cr_assert_not_null(strstr(text, "a after"));
	cr_assert_eq(drain(pair[0]) + log_dropped(), 2000);
	close(pair[0]);
	place_deinit(&p);
}

TEST(reopening_standard_error_loses_nothing)
{
	_cleanup_(freep) char *text = NULL;
	struct log_options o = { .level = LOG_INFO };
	struct place p;
	int saved;

	place_init(&p);
	saved = stderr_into(p.file);
	open_log(LOG_INFO, false, "");
	for (int i = 0; i < 100; i++) {
		log_info("a", "line=%d", i);
		cr_assert_eq(log_reopen(&o), 0);
	}
	log_close();
	restore_stderr(saved);
	text = slurp(p.file);
	cr_assert_eq(count_lines(text), 100);
	cr_assert_eq(log_dropped(), 0);
	place_deinit(&p);
}

/* ------------------------------------------------------------------- the journal */

/* A socket in the place of the journal's. */
static int journal_at(const char *path)
{
	struct sockaddr_un at = { .sun_family = AF_UNIX };
	int fd = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);

	snprintf(at.sun_path, sizeof(at.sun_path), "%s", path);
	cr_assert_geq(fd, 0);
	cr_assert_eq(bind(fd, (struct sockaddr *)&at, sizeof(at)), 0);
	return fd;
}

static void next_message(int fd, char *buf, size_t bytes)
{
	ssize_t n = recv(fd, buf, bytes - 1, 0);

	cr_assert_gt(n, 0);
	buf[n] = '\0';
}

TEST(the_journal_has_each_message_with_its_priority_and_fields)
{
	struct log_options o = { .level = LOG_INFO };
	char text[LOG_LINE_MAX + 1];
	struct place p;
	int fd;

	place_init(&p);
	fd = journal_at(p.file);
	o.journal = p.file;
	cr_assert_eq(log_open(&o), 0);
	log_warn("server", "stalled job=%s what=\"%s\"", "0/j", "rank 1 has not begun");
	next_message(fd, text, sizeof(text));
	cr_expect_str_eq(text, "PRIORITY=4\nSYSLOG_IDENTIFIER=shardd\nSHARDD_TOPIC=server\n"
			       "MESSAGE=server stalled job=0/j what=\"rank 1 has not begun\"\n"
			       "SHARDD_JOB=0/j\nSHARDD_WHAT=rank 1 has not begun\n");
	log_error("net", "no fields here\nPRIORITY=0");
	next_message(fd, text, sizeof(text));
	cr_expect_str_eq(text, "PRIORITY=3\nSYSLOG_IDENTIFIER=shardd\nSHARDD_TOPIC=net\n"
			       "MESSAGE=net no fields here?PRIORITY=0\n");
	cr_assert_eq(log_reopen(&o), 0);
	log_info("a", "again");
	next_message(fd, text, sizeof(text));
	cr_expect(strstr(text, "PRIORITY=6\n") && strstr(text, "MESSAGE=a again\n"), "%s", text);
	log_close();
	cr_expect_eq(log_dropped(), 0);
	close(fd);
	place_deinit(&p);
}

/* More fields than a datagram has room for: the message has them all. */
TEST(the_journal_has_fields_as_far_as_there_is_room)
{
	char message[LOG_MESSAGE_MAX], buf[LOG_LINE_MAX];
	const struct log_record r = { .level = LOG_INFO, .topic = "a", .message = message };
	size_t n = 0;

	for (size_t at = 0; at + 5 < sizeof(message); at += 4)
		memcpy(message + at, "a=b ", 5);
	n = log_format_journal(buf, &r);
	cr_expect_gt(n, LOG_LINE_MAX - 32);
	cr_expect_leq(n, LOG_LINE_MAX);
	cr_expect_eq(buf[n - 1], '\n');
}

/* JSON, and a journal that is not there: lines, with the priority that the journal takes off. */
TEST(lines_for_the_journal_have_their_priority_in_front)
{
	_cleanup_(freep) char *text = NULL;
	struct log_options o = { .level = LOG_INFO, .journal = "/nowhere/at/all" };
	struct place p;
	int saved;

	place_init(&p);
	saved = stderr_into(p.file);
	cr_assert_eq(log_open(&o), 0);
	log_warn("a", "one");
	o.json = true;
	cr_assert_eq(log_reopen(&o), 0);
	log_error("a", "two");
	log_close();
	log_error("a", "three");
	restore_stderr(saved);
	text = slurp(p.file);
	cr_expect(strncmp(text, "<4>a one\n<3>{\"time\":\"", 21) == 0, "%s", text);
	cr_expect(strstr(text, "\"message\":\"two\"}\n<3>{"), "%s", text);
	o = (struct log_options){ .level = LOG_INFO };
	cr_assert_eq(log_open(&o), 0);
	log_close();
	place_deinit(&p);
}

static bool is_journal(const char *stream)
{
	setenv("JOURNAL_STREAM", stream, 1);
	return log_journal_socket();
}

TEST(standard_error_is_the_journal_if_systemd_says_so)
{
	char own[64];
	struct stat s;

	cr_assert_eq(fstat(STDERR_FILENO, &s), 0);
	unsetenv("JOURNAL_STREAM");
	cr_expect_null(log_journal_socket());
	snprintf(own, sizeof(own), "%ju:%ju", (uintmax_t)s.st_dev, (uintmax_t)s.st_ino);
	cr_expect(is_journal(own));
	snprintf(own, sizeof(own), "%ju:%ju", (uintmax_t)s.st_dev, (uintmax_t)s.st_ino + 1);
	cr_expect_not(is_journal(own), "standard error was sent elsewhere since");
	cr_expect_not(is_journal("nonsense"));
	cr_expect_not(is_journal(""));
	unsetenv("JOURNAL_STREAM");
}

TEST(rotation_loses_nothing)
{
	_cleanup_(freep) char *before = NULL, *after = NULL;
	struct log_options o;
	struct place p;

	place_init(&p);
	open_log(LOG_INFO, false, p.file);
	for (int i = 0; i < 1000; i++)
		log_info("a", "old=%d", i);
	cr_assert_eq(rename(p.file, p.other), 0);
	o = (struct log_options){ .level = LOG_DEBUG, .json = true, .path = p.file };
	cr_assert_eq(log_reopen(&o), 0);
	for (int i = 0; i < 1000; i++)
		log_debug("a", "new=%d", i);
	log_close();
	before = slurp(p.other);
	after = slurp(p.file);
	cr_assert_eq(count_lines(before), 1000);
	cr_assert_eq(count_lines(after), 1000);
	cr_assert_null(strstr(before, "new"));
	cr_assert_eq(after[0], '{');
	cr_assert_eq(log_dropped(), 0);
	place_deinit(&p);
}

TEST(a_path_that_cannot_be_opened_is_refused)
{
	struct log_options o = { .level = LOG_INFO, .path = "/nonexistent/log" };

	cr_assert_eq(log_open(&o), -ENOENT);
}

TEST(a_path_is_checked_without_making_it)
{
	struct place p;
	struct stat s;

	place_init(&p);
	cr_expect_eq(log_check_path(NULL), 0);
	cr_expect_eq(log_check_path(""), 0);
	cr_expect_eq(log_check_path(p.file), 0);
	cr_expect_eq(stat(p.file, &s), -1, "it is not there");
	open_log(LOG_INFO, false, p.file);
	log_info("a", "x");
	log_close();
	cr_expect_eq(log_check_path(p.file), 0);
	cr_expect_eq(log_check_path(p.dir), -EISDIR);
	cr_expect_eq(log_check_path("/nowhere/at/all"), -ENOENT);
	cr_expect_eq(log_check_path("relative"), 0);
	place_deinit(&p);
}

TEST(a_fifo_without_reader_is_refused)
{
	struct log_options o = { .level = LOG_INFO };
	struct place p;

	place_init(&p);
	cr_assert_eq(mkfifo(p.file, 0600), 0);
	o.path = p.file;
	cr_assert_eq(log_open(&o), -ENXIO);
	place_deinit(&p);
}

TEST(a_failed_reopening_keeps_the_old_output)
{
	_cleanup_(freep) char *text = NULL;
	struct log_options o = { .level = LOG_ERROR, .json = true, .path = "/nonexistent/log" };
	struct place p;

	place_init(&p);
	open_log(LOG_INFO, false, p.file);
	cr_assert_eq(log_reopen(&o), -ENOENT);
	log_info("a", "still here");
	log_close();
	text = slurp(p.file);
	cr_assert(matches(text, "Z info  a still here\n$"), "%s", text);
	place_deinit(&p);
}

static void *log_many(void *arg)
{
	for (int i = 0; i < 500; i++)
		log_info("a", "thread=%d line=%d", *(int *)arg, i);
	return NULL;
}

TEST(lines_of_many_threads_stay_whole_and_in_order)
{
	_cleanup_(freep) char *text = NULL;
	int ids[] = { 0, 1, 2, 3 }, next[4] = { 0 };
	pthread_t threads[4];
	struct place p;

	place_init(&p);
	open_log(LOG_INFO, false, p.file);
	for (int i = 0; i < 4; i++)
		cr_assert_eq(pthread_create(&threads[i], NULL, log_many, &ids[i]), 0);
	for (int i = 0; i < 4; i++)
		pthread_join(threads[i], NULL);
	log_close();
	cr_assert_eq(log_dropped(), 0);
	text = slurp(p.file);
	cr_assert_eq(count_lines(text), 2000);
	for (char *save = NULL, *line = strtok_r(text, "\n", &save); line;
	     line = strtok_r(NULL, "\n", &save)) {
		int thread, number;

		cr_assert_eq(sscanf(line, "%*s info a thread=%d line=%d", &thread, &number), 2,
			     "%s", line);
		cr_assert_eq(number, next[thread]++);
	}
	place_deinit(&p);
}

TEST(levels_have_names)
{
	for (int i = 0; i < _LOG_N; i++)
		cr_assert_eq(log_level_parse(log_level_name((enum log_level)i)), i);
	cr_assert_eq(log_level_parse("loud"), -1);
	cr_assert_eq(log_level_parse(""), -1);
	cr_assert_str_eq(log_level_name(_LOG_N), "?");
}
