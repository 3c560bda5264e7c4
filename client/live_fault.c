/* What a write to a generation says: it is read-only, and the process would end without a word. */
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>

#include "fault.h"
#include "live_impl.h"

#define LIVE_FAULT_NAME 120u

/* Memory of a reader. Never freed, but used again: the handler may be reading it. */
struct live_fault {
	struct live_fault *next; /* set before it is in the list */
	atomic_uintptr_t from;   /* 0: it is not used */
	atomic_uint_fast64_t bytes;
	char job[LIVE_FAULT_NAME], name[LIVE_FAULT_NAME];
};

static pthread_mutex_t live_fault_mutex = PTHREAD_MUTEX_INITIALIZER;
static _Atomic(struct live_fault *) live_fault_all;

/* Runs in a signal handler. */
static enum fault_answer live_fault_explain(uintptr_t at, enum fault_access access,
					    struct fault_text *t)
{
	struct live_fault *f = access == FAULT_READ ? NULL : atomic_load(&live_fault_all);
	uintptr_t from = 0;

	for (; f; f = f->next) {
		from = atomic_load(&f->from);
		if (from && at >= from && at - from < atomic_load(&f->bytes))
			break;
	}
	if (!f)
		return FAULT_UNKNOWN;
	fault_add(t, "shardd: ");
	fault_add(t, fault_verb(access));
	fault_add_number(t, at, 16);
	fault_add(t, ", in a generation of publication '");
	fault_add(t, f->name);
	fault_add(t, "' of job '");
	fault_add(t, f->job);
	fault_add(t, "', which is read-only: copy what you want to change (PyTorch: "
		     "tensor.clone())\n");
	return FAULT_EXPLAINED;
}

static void live_fault_begin(void)
{
	fault_begin(live_fault_explain);
}

/* One that is not used. Mutex held. Return: NULL: without memory. */
static struct live_fault *live_fault_free_one(void)
{
	struct live_fault *f = atomic_load(&live_fault_all);

	while (f && atomic_load(&f->from))
		f = f->next;
	if (f)
		return f;
	f = calloc(1, sizeof(*f));
	if (!f)
		return NULL;
	f->next = atomic_load(&live_fault_all);
	atomic_store(&live_fault_all, f);
	return f;
}

void live_fault_add(const struct shardd_live *l, const void *at, uint64_t bytes)
{
	static pthread_once_t once = PTHREAD_ONCE_INIT;
	struct live_fault *f;

	if (!(l->flags & SHARDD_LIVE_EXPLAIN))
		return;
	pthread_once(&once, live_fault_begin);
	pthread_mutex_lock(&live_fault_mutex);
	f = live_fault_free_one();
	if (f) {
		snprintf(f->job, sizeof(f->job), "%s", l->job);
		snprintf(f->name, sizeof(f->name), "%s", l->name);
		atomic_store(&f->bytes, bytes);
		atomic_store(&f->from, (uintptr_t)at);
	}
	pthread_mutex_unlock(&live_fault_mutex);
}

void live_fault_remove(const struct shardd_live *l, const void *at)
{
	struct live_fault *f;

	if (!at || !(l->flags & SHARDD_LIVE_EXPLAIN))
		return;
	pthread_mutex_lock(&live_fault_mutex);
	for (f = atomic_load(&live_fault_all); f; f = f->next)
		if (atomic_load(&f->from) == (uintptr_t)at)
			break;
	if (f)
		atomic_store(&f->from, 0);
	pthread_mutex_unlock(&live_fault_mutex);
}
