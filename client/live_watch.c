/*
 * The descriptor of a reader: a thread sleeps on the board's futex, and makes an eventfd readable when the
 * board has another generation than the reader, or when only a call can tell.
 *
 *   WATCHES --another one, or the daemon does not run--> TOLD --the reader acquires--> WATCHES
 */
#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "client_error.h"
#include "core/check.h"
#include "core/cleanup.h"
#include "core/clock.h"
#include "live_impl.h"
#include "thread.h"

/* One sleep on the board: after it the daemon is looked for. */
#define LIVE_WATCH_SLEEP_MS 500

struct live_watch {
	pthread_t thread;
	int fd;
	_Atomic(bool) ends;
	_Atomic(uint32_t) turn; /* a futex: grows with each live_watch_tell */
	pthread_mutex_t lock;   /* over what follows, the reader's */
	const struct board_page *board;
	uint64_t word;
};

static void live_watch_sleep(const _Atomic(uint32_t) *at, uint32_t is, int ms)
{
	struct timespec ts = { ms / 1000, ms % 1000 * 1000000L };

	(void)syscall(SYS_futex, at, FUTEX_WAIT, is, ms ? &ts : NULL, NULL, 0);
}

/* What the thread has seen of the board. */
struct live_watch_seen {
	const struct board_page *board;
	uint64_t beat, beat_us;
};

/* Is there something to acquire? If not, @ret_changes is the futex's value to sleep on. */
static bool live_watch_is_due(struct live_watch *w, struct live_watch_seen *seen,
			      uint32_t *ret_changes)
{
	uint64_t now = clock_now_us(), newest, beat;
	bool due;

	pthread_mutex_lock(&w->lock);
	*ret_changes = atomic_load(&w->board->changes);
	newest = atomic_load(&w->board->newest);
	beat = atomic_load(&w->board->beat);
	if (seen->board != w->board || seen->beat != beat)
		*seen = (struct live_watch_seen){ w->board, beat, now };
	due = (newest != BOARD_NONE && newest != w->word) || atomic_load(&w->board->over) ||
	      now - seen->beat_us > BOARD_BEAT_MS * 1000u;
	pthread_mutex_unlock(&w->lock);
	return due;
}

static void *live_watch_run(void *arg)
{
	struct live_watch *w = arg;
	struct live_watch_seen seen = { 0 };

	while (!atomic_load(&w->ends)) {
		uint32_t turn = atomic_load(&w->turn), changes;
		const uint64_t one = 1;

		if (!live_watch_is_due(w, &seen, &changes)) {
			live_watch_sleep(&seen.board->changes, changes, LIVE_WATCH_SLEEP_MS);
			continue;
		}
		(void)!write(w->fd, &one, sizeof(one));
		while (atomic_load(&w->turn) == turn)
			live_watch_sleep(&w->turn, turn, 0);
		seen.board = NULL;
	}
	return NULL;
}

static void live_watch_wake(struct live_watch *w)
{
	atomic_fetch_add(&w->turn, 1);
	(void)syscall(SYS_futex, &w->turn, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
}

void live_watch_tell(struct shardd_live *l)
{
	struct live_watch *w = l->watch;
	uint64_t n;

	if (!w)
		return;
	pthread_mutex_lock(&w->lock);
	w->board = l->board;
	w->word = l->word;
	pthread_mutex_unlock(&w->lock);
	(void)!read(w->fd, &n, sizeof(n));
	live_watch_wake(w);
}

void live_watch_free(struct shardd_live *l)
{
	struct live_watch *w = l->watch;

	if (!w)
		return;
	l->watch = NULL;
	atomic_store(&w->ends, true);
	live_watch_wake(w);
	pthread_join(w->thread, NULL);
	fd_close(w->fd);
	pthread_mutex_destroy(&w->lock);
	free(w);
}

int live_watch_new(struct shardd_live *l, struct shardd_error *err)
{
	struct live_watch *w = calloc(1, sizeof(*w));
	int e = 0;

	if (!w)
		return error_memory(err);
	w->board = l->board;
	w->word = l->word;
	w->fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
	if (w->fd < 0)
		e = errno;
	pthread_mutex_init(&w->lock, NULL);
	if (!e)
		e = thread_start(&w->thread, live_watch_run, w);
	if (e) {
		fd_close(w->fd);
		pthread_mutex_destroy(&w->lock);
		free(w);
		return error_os(err, SHARDD_RESOURCE_EXHAUSTED, e,
				"cannot make a descriptor for a reader");
	}
	l->watch = w;
	return 0;
}

int live_watch_fd(const struct shardd_live *l)
{
	return l->watch->fd;
}
