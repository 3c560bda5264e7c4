/*
 * Callers format; a writer thread writes. Between them is a bounded list under a
 * lock that nobody holds across a system call on the output. The output's
 * descriptor belongs to the writer; a new one travels through the same list, so
 * that lines logged before a reopening go to the old file.
 *
 * The writer asks poll before each write and gives a stuck output up as soon as
 * the log closes or another output waits, so it can always be joined, except while a disk write
 * hangs in the kernel: then the thread is left behind.
 */
#include "core/log.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "core/check.h"
#include "core/cleanup.h"
#include "core/clock.h"
#include "core/log_format.h"
#include "core/log_journal.h"

#define QUEUE_LINES    4096 /* waiting for the writer; more are dropped */
#define CLOSE_MS       900  /* for the writer to write the rest after log_close */
#define CLOSE_GRACE_MS 100  /* and then to notice that the time is up */
#define POLL_MS        50   /* how often a stuck output is reconsidered */

struct line {
	struct line *next;
	int new_fd; /* >= 0: no text, write to this from here on (owned) */
	size_t bytes;
	char text[];
};

static struct {
	pthread_mutex_t lock;
	pthread_cond_t wake;   /* the writer: something to do */
	pthread_cond_t ended;  /* log_close: the writer has ended */
	struct line *first;    /* oldest; owned */
	struct line **last;    /* where the next one is linked */
	unsigned lines;        /* in the list, text only */
	unsigned switches;     /* in the list, outputs only */
	bool open;             /* lines go to the list */
	bool running;          /* the writer has not ended */
	bool closing;          /* end when the list is empty or @deadline has passed */
	struct timespec until; /* CLOCK_MONOTONIC, with @closing */
	pthread_t writer;
} q = {
	.lock = PTHREAD_MUTEX_INITIALIZER,
	.last = &q.first,
};

/* What a line looks like. */
enum log_shape { LOG_TEXT, LOG_JSON, LOG_PREFIXED, LOG_PREFIXED_JSON, LOG_NATIVE };

/* Of the output that was opened last; used by log_open and log_reopen. */
static enum log_target { LOG_TO_FILE, LOG_TO_STDERR, LOG_TO_JOURNAL } target;
static _Atomic int max_level = LOG_INFO;
static _Atomic int shape = LOG_TEXT;
static _Atomic uint64_t dropped;

static void log_drop(uint64_t lines)
{
	atomic_fetch_add_explicit(&dropped, lines, memory_order_relaxed);
}

static bool log_is_past(const struct timespec *ts)
{
	struct timespec now = clock_in(0);

	return now.tv_sec > ts->tv_sec || (now.tv_sec == ts->tv_sec && now.tv_nsec >= ts->tv_nsec);
}

/* -- the writer ---------------------------------------------------------- */

/* Should the writer stop waiting for an output that takes nothing? */
static bool log_gives_up(void)
{
	bool r;

	pthread_mutex_lock(&q.lock);
	r = q.switches > 0 || (q.closing && log_is_past(&q.until));
	pthread_mutex_unlock(&q.lock);
	return r;
}

/* Return: may be written to now. */
static bool log_wait_writable(int fd)
{
	struct pollfd p = { .fd = fd, .events = POLLOUT };
	bool last;

	do {
		last = log_gives_up();
		if (poll(&p, 1, last ? 0 : POLL_MS) > 0)
			return true;
	} while (!last);
	return false;
}

/* Return: all of it was written. */
static bool log_write_line(int fd, const char *text, size_t bytes)
{
	while (bytes > 0) {
		ssize_t n;

		if (!log_wait_writable(fd))
			return false;
		n = write(fd, text, bytes);
		if (n < 0 && (errno == EINTR || errno == EAGAIN)) {
			if (log_gives_up())
				return false;
			continue;
		}
		if (n <= 0)
			return false;
		text += n;
		bytes -= (size_t)n;
	}
	return true;
}

static struct line *log_take_first(void)
{
	struct line *l = q.first;

	q.first = l->next;
	if (!q.first)
		q.last = &q.first;
	if (l->new_fd >= 0)
		q.switches--;
	else
		q.lines--;
	return l;
}

/* Return: the next line, owned; NULL: the writer must end. */
static struct line *log_next_line(void)
{
	struct line *l = NULL;

	pthread_mutex_lock(&q.lock);
	while (!q.first && !q.closing)
		pthread_cond_wait(&q.wake, &q.lock);
	if (q.first && !(q.closing && log_is_past(&q.until)))
		l = log_take_first();
	pthread_mutex_unlock(&q.lock);
	return l;
}

static void log_close_output(int fd)
{
	if (fd != STDERR_FILENO)
		fd_close(fd);
}

/* Drop the lines still queued at the end; close queued descriptors. */
static void log_empty_queue(void)
{
	while (q.first) {
		struct line *l = log_take_first();

		if (l->new_fd >= 0)
			log_close_output(l->new_fd);
		else
			log_drop(1);
		free(l);
	}
}

static void *log_run_writer(void *arg)
{
	struct line *l;
	int fd = STDERR_FILENO;

	(void)arg;
	while ((l = log_next_line())) {
		if (l->new_fd >= 0) {
			log_close_output(fd);
			fd = l->new_fd;
		} else if (!log_write_line(fd, l->text, l->bytes)) {
			log_drop(1);
		}
		free(l);
	}
	log_close_output(fd);
	pthread_mutex_lock(&q.lock);
	log_empty_queue();
	q.running = false;
	pthread_cond_signal(&q.ended);
	pthread_mutex_unlock(&q.lock);
	return NULL;
}

/* -- opening and closing ------------------------------------------------- */

/* Return: a descriptor (STDERR_FILENO: not owned) or negative errno. */
static int log_open_output(const struct log_options *options, enum log_target *ret)
{
	const char *path = options->path;
	int fd;

	if (!path || !*path) {
		fd = options->journal && !options->json ? log_journal_open(options->journal) : -1;
		*ret = fd < 0 ? LOG_TO_STDERR : LOG_TO_JOURNAL;
		return fd < 0 ? STDERR_FILENO : fd;
	}
	*ret = LOG_TO_FILE;
	/* O_NONBLOCK: a FIFO without a reader is an error, not a block */
	fd = open(path, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC | O_NOCTTY | O_NONBLOCK, 0640);
	return fd < 0 ? -errno : fd;
}

/* May a file be made there? */
static int log_check_folder(const char *path)
{
	const char *slash = strrchr(path, '/');
	char folder[PATH_MAX] = ".";

	if (slash && (size_t)(slash - path) >= sizeof(folder))
		return -ENAMETOOLONG;
	if (slash)
		snprintf(folder, sizeof(folder), "%.*s", slash == path ? 1 : (int)(slash - path),
			 path);
	return faccessat(AT_FDCWD, folder, W_OK | X_OK, AT_EACCESS) < 0 ? -errno : 0;
}

int log_check_path(const char *path)
{
	int fd;

	if (!path || !*path)
		return 0;
	fd = open(path, O_WRONLY | O_APPEND | O_CLOEXEC | O_NOCTTY | O_NONBLOCK);
	if (fd < 0)
		return errno == ENOENT ? log_check_folder(path) : -errno;
	fd_close(fd);
	return 0;
}

static void log_append(struct line *l)
{
	l->next = NULL;
	*q.last = l;
	q.last = &l->next;
	if (l->new_fd >= 0)
		q.switches++;
	else
		q.lines++;
	pthread_cond_signal(&q.wake);
}

/* Switch the writer to @fd (consumed, also on error). */
static int log_switch_output(int fd)
{
	struct line *l = malloc(sizeof(*l));

	if (!l) {
		log_close_output(fd);
		return -ENOMEM;
	}
	*l = (struct line){ .new_fd = fd };
	pthread_mutex_lock(&q.lock);
	log_append(l);
	pthread_mutex_unlock(&q.lock);
	return 0;
}

static enum log_shape log_shape_of(const struct log_options *options, enum log_target to)
{
	if (to == LOG_TO_JOURNAL)
		return LOG_NATIVE;
	if (to == LOG_TO_STDERR && options->journal)
		return options->json ? LOG_PREFIXED_JSON : LOG_PREFIXED;
	return options->json ? LOG_JSON : LOG_TEXT;
}

/* @to: where the log goes from now on. */
static void log_apply(const struct log_options *options, enum log_target to)
{
	target = to;
	CHECK(options->level < _LOG_N);
	atomic_store(&max_level, (int)options->level);
	atomic_store(&shape, (int)log_shape_of(options, to));
}

static void log_init_conditions(void)
{
	pthread_condattr_t attr;

	CHECK(pthread_condattr_init(&attr) == 0);
	CHECK(pthread_condattr_setclock(&attr, CLOCK_MONOTONIC) == 0);
	CHECK(pthread_cond_init(&q.wake, NULL) == 0);
	CHECK(pthread_cond_init(&q.ended, &attr) == 0);
	pthread_condattr_destroy(&attr);
}

/* Only the loop thread handles signals: the writer starts with all of them blocked, which also
 * turns SIGPIPE into EPIPE. */
static int log_start_writer(void)
{
	sigset_t all, old;
	int r;

	sigfillset(&all);
	pthread_sigmask(SIG_SETMASK, &all, &old);
	r = pthread_create(&q.writer, NULL, log_run_writer, NULL);
	pthread_sigmask(SIG_SETMASK, &old, NULL);
	return -r;
}

int log_open(const struct log_options *options)
{
	static pthread_once_t once = PTHREAD_ONCE_INIT;
	enum log_target to;
	int fd, r;

	pthread_once(&once, log_init_conditions);
	CHECK(!q.open && !q.running);
	fd = log_open_output(options, &to);
	if (fd < 0)
		return fd;
	r = log_switch_output(fd);
	if (r < 0)
		return r;
	q.running = true;
	q.closing = false;
	r = log_start_writer();
	if (r < 0) {
		log_empty_queue();
		q.running = false;
		return r;
	}
	atomic_store(&dropped, 0);
	log_apply(options, to);
	pthread_mutex_lock(&q.lock);
	q.open = true;
	pthread_mutex_unlock(&q.lock);
	return 0;
}

int log_reopen(const struct log_options *options)
{
	enum log_target to;
	int fd, r;

	CHECK(q.open);
	fd = log_open_output(options, &to);
	if (fd < 0)
		return fd;
	/* the same again: a switch would only make the writer give up early and lose lines */
	if (to == target && to != LOG_TO_FILE) {
		log_close_output(fd);
	} else {
		r = log_switch_output(fd);
		if (r < 0)
			return r;
	}
	log_apply(options, to);
	return 0;
}

void log_close(void)
{
	struct timespec until = clock_in(CLOSE_MS + CLOSE_GRACE_MS);
	bool running;
	int r = 0;

	pthread_mutex_lock(&q.lock);
	if (!q.open) {
		pthread_mutex_unlock(&q.lock);
		return;
	}
	q.open = false;
	q.closing = true;
	q.until = clock_in(CLOSE_MS);
	pthread_cond_signal(&q.wake);
	while (q.running && r == 0)
		r = pthread_cond_timedwait(&q.ended, &q.lock, &until);
	running = q.running;
	pthread_mutex_unlock(&q.lock);
	if (running)
		pthread_detach(q.writer);
	else
		pthread_join(q.writer, NULL);
}

/* -- writing ------------------------------------------------------------- */

/* @as: of the output; @buf: LOG_LINE_MAX bytes. */
static size_t log_format_line(char *buf, const struct log_record *r, enum log_shape as)
{
	switch (as) {
	case LOG_JSON:
		return log_format_json(buf, r);
	case LOG_PREFIXED:
		return log_format_prefixed(buf, r);
	case LOG_NATIVE:
		return log_format_journal(buf, r);
	case LOG_PREFIXED_JSON:
		memcpy(buf, log_format_priority(r->level), LOG_PRIORITY_BYTES);
		return LOG_PRIORITY_BYTES + log_format_json(buf + LOG_PRIORITY_BYTES, r);
	case LOG_TEXT:
		break;
	}
	return log_format_text(buf, r);
}

enum queued { QUEUED, QUEUE_FULL, QUEUE_CLOSED };

/* @l: consumed if QUEUED. */
static enum queued log_queue_line(struct line *l)
{
	enum queued r = QUEUED;

	pthread_mutex_lock(&q.lock);
	if (!q.open)
		r = QUEUE_CLOSED;
	else if (q.lines >= QUEUE_LINES)
		r = QUEUE_FULL;
	else
		log_append(l);
	pthread_mutex_unlock(&q.lock);
	return r;
}

/* Before log_open and after log_close: what the journal would take is a line then. */
static void log_write_now(const struct log_record *r, enum log_shape as)
{
	char buf[LOG_PRIORITY_BYTES + LOG_LINE_MAX];
	const size_t bytes = log_format_line(buf, r, as == LOG_NATIVE ? LOG_PREFIXED : as);
	ssize_t n;

	do
		n = write(STDERR_FILENO, buf, bytes);
	while (n < 0 && errno == EINTR);
	if (n != (ssize_t)bytes)
		log_drop(1);
}

static void log_hand_over(const struct log_record *r)
{
	const enum log_shape as =
		(enum log_shape)atomic_load_explicit(&shape, memory_order_relaxed);
	char buf[LOG_PRIORITY_BYTES + LOG_LINE_MAX];
	const size_t bytes = log_format_line(buf, r, as);
	_cleanup_(freep) struct line *l = malloc(sizeof(*l) + bytes);

	if (!l) {
		log_drop(1);
		return;
	}
	*l = (struct line){ .new_fd = -1, .bytes = bytes };
	memcpy(l->text, buf, bytes);
	switch (log_queue_line(l)) {
	case QUEUED:
		STEAL_PTR(l);
		break;
	case QUEUE_FULL:
		log_drop(1);
		break;
	case QUEUE_CLOSED:
		log_write_now(r, as);
		break;
	}
}

void log_write(enum log_level level, const char *topic, const char *fmt, ...)
{
	char message[LOG_MESSAGE_MAX];
	struct log_record r = { .level = level, .topic = topic, .message = message };
	int saved = errno;
	va_list ap;

	CHECK(level < _LOG_N);
	if ((int)level > atomic_load_explicit(&max_level, memory_order_relaxed))
		return;
	va_start(ap, fmt);
	log_message(message, fmt, ap);
	va_end(ap);
	clock_gettime(CLOCK_REALTIME, &r.time);
	log_hand_over(&r);
	errno = saved;
}

uint64_t log_dropped(void)
{
	return atomic_load_explicit(&dropped, memory_order_relaxed);
}
