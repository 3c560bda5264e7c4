#include "debug_view.h"

#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>

#include "core/check.h"

#define CHUNK_VIEWS 256u

/* Chunks are never freed: the handler may be reading them. */
struct chunk {
	struct chunk *next; /* set before the chunk is in the table */
	struct debug_view views[CHUNK_VIEWS];
};

static pthread_mutex_t debug_view_mutex = PTHREAD_MUTEX_INITIALIZER;
static _Atomic(struct chunk *) debug_view_chunks;
static struct list debug_view_lost = LIST_INIT(debug_view_lost);
static unsigned debug_view_n_lost;
static struct debug_view *debug_view_unused; /* linked by next */

/* What SIGSEGV did before. */
static struct sigaction debug_view_before;

void debug_view_lock(void)
{
	pthread_mutex_lock(&debug_view_mutex);
}

void debug_view_unlock(void)
{
	pthread_mutex_unlock(&debug_view_mutex);
}

/* ---------------------------------------------------------------- the handler */

/* Everything here may run in a signal handler. */
struct debug_view_text {
	char text[512];
	size_t n;
};

static void debug_view_add(struct debug_view_text *t, const char *s)
{
	while (*s && t->n < sizeof(t->text))
		t->text[t->n++] = *s++;
}

static void debug_view_add_number(struct debug_view_text *t, uint64_t x, unsigned base)
{
	char digits[24];
	size_t i = sizeof(digits) - 1;

	digits[i] = '\0';
	do {
		digits[--i] = "0123456789abcdef"[x % base];
		x /= base;
	} while (x);
	debug_view_add(t, digits + i);
}

enum debug_view_access { ACCESS_READ, ACCESS_WRITE, ACCESS_ANY };

static enum debug_view_access debug_view_access_of(const void *context)
{
#if defined(__x86_64__)
	const ucontext_t *u = context;

	return u->uc_mcontext.gregs[REG_ERR] & 2 ? ACCESS_WRITE : ACCESS_READ;
#else
	(void)context;
	return ACCESS_ANY;
#endif
}

static void debug_view_say(const struct debug_view *v, uintptr_t at, enum debug_view_access access)
{
	static const char *const verbs[] = { "read of 0x", "write to 0x", "access to 0x" };
	const char *by = atomic_load(&v->by);
	struct debug_view_text t = { .n = 0 };
	size_t done = 0;

	if (!by && (v->writable || access == ACCESS_READ))
		return; /* not by our doing */
	debug_view_add(&t, "shardd: ");
	debug_view_add(&t, verbs[access]);
	debug_view_add_number(&t, at, 16);
	debug_view_add(&t, " in ");
	debug_view_add(&t, v->what);
	debug_view_add(&t, by ? ", which " : ", which are read-only");
	debug_view_add(&t, by ? by : "");
	debug_view_add(&t, by ? " gave back (rank " : " (rank ");
	debug_view_add_number(&t, v->rank, 10);
	debug_view_add(&t, "): ");
	debug_view_add(&t, by ? v->advice : "change parameters between SummonFull and ReturnFull");
	debug_view_add(&t, "\n");
	while (done < t.n) {
		ssize_t r = write(STDERR_FILENO, t.text + done, t.n - done);

		if (r < 0 && errno == EINTR)
			continue;
		if (r <= 0)
			break;
		done += (size_t)r;
	}
}

/* The next view in use from @i on in the chunk at @c; moves both on. NULL: no more. */
static struct debug_view *debug_view_walk(struct chunk **c, size_t *i)
{
	for (; *c; *c = (*c)->next, *i = 0)
		while (*i < CHUNK_VIEWS) {
			struct debug_view *v = &(*c)->views[(*i)++];

			if (atomic_load_explicit(&v->from, memory_order_acquire))
				return v;
		}
	return NULL;
}

static struct debug_view *debug_view_mapped_at(uintptr_t at)
{
	struct chunk *c = atomic_load_explicit(&debug_view_chunks, memory_order_acquire);
	struct debug_view *v;
	size_t i = 0;

	while ((v = debug_view_walk(&c, &i)))
		if (at - atomic_load(&v->from) < v->length)
			return v;
	return NULL;
}

/* As the kernel would have called it: with its mask, and once if it wants to be called once. */
static void debug_view_call_before(int number, siginfo_t *info, void *context)
{
	const struct sigaction *b = &debug_view_before;
	struct sigaction once = { .sa_handler = SIG_DFL };
	sigset_t mask = b->sa_mask;

	if (b->sa_flags & (int)SA_RESETHAND)
		sigaction(number, &once, NULL);
	pthread_sigmask(SIG_BLOCK, &mask, NULL);
	if (b->sa_flags & SA_NODEFER) {
		sigemptyset(&mask);
		sigaddset(&mask, number);
		pthread_sigmask(SIG_UNBLOCK, &mask, NULL);
	}
	if (b->sa_flags & SA_SIGINFO)
		b->sa_sigaction(number, info, context);
	else
		b->sa_handler(number);
}

static void debug_view_on_fault(int number, siginfo_t *info, void *context)
{
	bool fault = info->si_code > 0; /* else kill() or the like */
	const struct debug_view *v = fault ? debug_view_mapped_at((uintptr_t)info->si_addr) : NULL;
	struct sigaction again = { .sa_handler = SIG_DFL };
	int saved = errno;

	if (v)
		debug_view_say(v, (uintptr_t)info->si_addr, debug_view_access_of(context));
	errno = saved;
	if (!(debug_view_before.sa_flags & SA_SIGINFO) && debug_view_before.sa_handler == SIG_IGN &&
	    !fault)
		return;
	if (!(debug_view_before.sa_flags & SA_SIGINFO) &&
	    (debug_view_before.sa_handler == SIG_DFL || debug_view_before.sa_handler == SIG_IGN)) {
		/* The same instruction faults again, now without this handler: the process ends,
		 * and its core file shows that instruction. */
		sigaction(number, &again, NULL);
		if (!fault)
			raise(number);
		return;
	}
	debug_view_call_before(number, info, context);
}

static void debug_view_install(void)
{
	struct sigaction ours = { .sa_sigaction = debug_view_on_fault,
				  .sa_flags = SA_SIGINFO | SA_ONSTACK };

	/* A child of a fork may connect a client of its own. */
	pthread_atfork(debug_view_lock, debug_view_unlock, debug_view_unlock);
	sigemptyset(&ours.sa_mask);
	CHECK(sigaction(SIGSEGV, NULL, &debug_view_before) == 0);
	CHECK(sigaction(SIGSEGV, &ours, NULL) == 0);
}

void debug_view_begin(void)
{
	static pthread_once_t once = PTHREAD_ONCE_INIT;

	pthread_once(&once, debug_view_install);
}

/* ----------------------------------------------------------------- the table */

static void debug_view_unlist(struct debug_view *v)
{
	struct debug_view **at = v->list;

	if (!at)
		return;
	while (*at != v)
		at = &(*at)->next;
	*at = v->next;
	v->list = NULL;
	v->next = NULL;
}

static void debug_view_not_lost(struct debug_view *v)
{
	if (list_empty(&v->lost))
		return;
	list_unlink(&v->lost);
	debug_view_n_lost--;
}

/* Give up the addresses of the view that was given back first. Return: was there one? */
static bool debug_view_evict(void)
{
	struct debug_view *v;
	uintptr_t from;

	if (list_empty(&debug_view_lost))
		return false;
	v = list_first(&debug_view_lost, struct debug_view, lost);
	debug_view_not_lost(v);
	debug_view_unlist(v);
	from = atomic_exchange(&v->from, 0);
	munmap((void *)from, v->length);
	v->next = debug_view_unused;
	debug_view_unused = v;
	return true;
}

/* Return: an unused view, or NULL: no memory. */
static struct debug_view *debug_view_take(void)
{
	struct debug_view *v = debug_view_unused;
	struct chunk *more;

	if (v) {
		debug_view_unused = v->next;
		return v;
	}
	more = calloc(1, sizeof(*more));
	if (!more)
		return NULL;
	for (size_t i = 0; i < CHUNK_VIEWS; i++) {
		list_init(&more->views[i].lost);
		more->views[i].next = i ? debug_view_unused : NULL;
		if (i)
			debug_view_unused = &more->views[i];
	}
	more->next = atomic_load(&debug_view_chunks);
	atomic_store_explicit(&debug_view_chunks, more, memory_order_release);
	return &more->views[0];
}

/* The pages at @page once more, at another address; a mapping of length 0 that grows shares the
 * pages instead of moving them (mremap(2)). */
static void *debug_view_map(const uint8_t *page, size_t length)
{
	void *at;

	do
		at = mremap((void *)page, 0, length, MREMAP_MAYMOVE);
	while (at == MAP_FAILED && debug_view_evict());
	return at == MAP_FAILED ? NULL : at;
}

struct debug_view *debug_view_new(struct debug_view **list, const uint8_t *under, uint64_t bytes,
				  bool writable, const char *what, const char *advice)
{
	size_t page = (size_t)sysconf(_SC_PAGESIZE), before = (uintptr_t)under % page;
	size_t length = (before + bytes + page - 1) / page * page;
	uint8_t *at = debug_view_map(under - before, length);
	struct debug_view *v = at ? debug_view_take() : NULL;

	if (!v) {
		if (at)
			munmap(at, length);
		return NULL;
	}
	v->length = length;
	v->at = at + before;
	v->bytes = bytes;
	v->under = under;
	v->writable = writable;
	v->advice = advice;
	snprintf(v->what, sizeof(v->what), "%s", what);
	atomic_store(&v->by, "nothing");
	v->list = list;
	v->next = *list;
	*list = v;
	atomic_store_explicit(&v->from, (uintptr_t)at, memory_order_release);
	return v;
}

int debug_view_lend(struct debug_view *v, uint32_t rank)
{
	int protection = PROT_READ | (v->writable ? PROT_WRITE : 0);

	v->rank = rank;
	if (!atomic_load(&v->by))
		return 0;
	if (mprotect((void *)atomic_load(&v->from), v->length, protection) < 0)
		return -errno;
	debug_view_not_lost(v);
	atomic_store(&v->by, NULL);
	return 0;
}

static void debug_view_note_lost(struct debug_view *v, const char *by)
{
	atomic_store(&v->by, by);
	debug_view_not_lost(v);
	list_append(&debug_view_lost, &v->lost);
	debug_view_n_lost++;
}

void debug_view_lose(struct debug_view *v, const char *by)
{
	debug_view_note_lost(v, by);
	if (mprotect((void *)atomic_load(&v->from), v->length, PROT_NONE) < 0)
		fprintf(stderr, "shardd: cannot protect %s, which %s gave back: %s\n", v->what, by,
			strerror(errno));
	while (debug_view_n_lost > DEBUG_VIEW_MAX_LOST)
		debug_view_evict();
}

void debug_view_orphan(struct debug_view *v, const char *by, const char *advice)
{
	debug_view_note_lost(v, by);
	debug_view_unlist(v);
	v->under = NULL;
	v->advice = advice;
	/* Nothing else would let go of the slab's memory. */
	CHECK(mmap((void *)atomic_load(&v->from), v->length, PROT_NONE,
		   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0) != MAP_FAILED);
	while (debug_view_n_lost > DEBUG_VIEW_MAX_LOST)
		debug_view_evict();
}

struct debug_view *debug_view_find(const void *at, size_t bytes)
{
	struct debug_view *v = debug_view_mapped_at((uintptr_t)at);

	if (!v || (const uint8_t *)at < v->at ||
	    (uint64_t)((const uint8_t *)at - v->at) > v->bytes ||
	    bytes > v->bytes - (uint64_t)((const uint8_t *)at - v->at))
		return NULL;
	return v;
}
