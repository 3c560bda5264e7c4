#include "debug_view.h"

#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "core/check.h"
#include "fault.h"

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

void debug_view_lock(void)
{
	pthread_mutex_lock(&debug_view_mutex);
}

void debug_view_unlock(void)
{
	pthread_mutex_unlock(&debug_view_mutex);
}

/* -------------------------------------------------------------- explanations */

/* Everything here may run in a signal handler. */

static enum fault_answer debug_view_say(const struct debug_view *v, uintptr_t at,
					enum fault_access access, struct fault_text *t)
{
	const char *by = atomic_load(&v->by);

	if (!by && (v->writable || access == FAULT_READ))
		return FAULT_UNKNOWN; /* not by our doing */
	fault_add(t, "shardd: ");
	fault_add(t, fault_verb(access));
	fault_add_number(t, at, 16);
	fault_add(t, " in ");
	fault_add(t, v->what);
	fault_add(t, by ? ", which " : ", which are read-only");
	fault_add(t, by ? by : "");
	fault_add(t, by ? " gave back (rank " : " (rank ");
	fault_add_number(t, v->rank, 10);
	fault_add(t, "): ");
	fault_add(t, by ? v->advice : "change parameters between SummonFull and ReturnFull");
	fault_add(t, "\n");
	return FAULT_EXPLAINED;
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

static enum fault_answer debug_view_explain(uintptr_t at, enum fault_access access,
					    struct fault_text *t)
{
	const struct debug_view *v = debug_view_mapped_at(at);

	return v ? debug_view_say(v, at, access, t) : FAULT_UNKNOWN;
}

static void debug_view_install(void)
{
	/* A child of a fork may connect a client of its own. */
	pthread_atfork(debug_view_lock, debug_view_unlock, debug_view_unlock);
	fault_begin(debug_view_explain);
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
