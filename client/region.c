/*
 * Addresses that stand for a unit's memory while it is released, and what a fault in them says.
 */
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "client_error.h"
#include "fault.h"
#include "shardd/shardd.h"

#define MAX_NAME 120u
#define ADVICE_RELEASED                                                                    \
	"a parameter has its values only in forward and backward of its module; use "      \
	"summon_full_params elsewhere. If this was in backward, an input of the module's " \
	"forward is not among its arguments: wrap a module around both"
#define ADVICE_READ_ONLY "change values outside of forward and backward, in summon_full_params"

struct region_part {
	uint64_t offset, bytes;
	char name[MAX_NAME];
};

/* Never freed, but used again: the handler may be reading it. */
struct shardd_region {
	struct shardd_region *next; /* set before it is in the list */
	bool used;
	atomic_uintptr_t from; /* of the stand-in; 0: none */
	size_t length;         /* whole pages */
	uint64_t bytes;
	atomic_uintptr_t lent; /* 0: released */
	atomic_bool open;      /* the stand-in gives zeros */
	struct shardd_region_fault *fault;
	struct region_part *parts; /* never freed or moved, as the region */
	size_t max_parts;
	atomic_size_t n_parts;
	char unit[MAX_NAME];
};

static pthread_mutex_t region_mutex = PTHREAD_MUTEX_INITIALIZER;
static _Atomic(struct shardd_region *) region_all;

/* -------------------------------------------------------------- explanations */

/* Everything here may run in a signal handler. */

static const struct region_part *region_part_at(const struct shardd_region *r, uint64_t offset)
{
	size_t n = atomic_load(&r->n_parts);

	for (size_t i = 0; i < n; i++)
		if (offset - r->parts[i].offset < r->parts[i].bytes)
			return &r->parts[i];
	return NULL;
}

static void region_describe(const struct shardd_region *r, uint64_t offset, struct fault_text *t)
{
	const struct region_part *part = region_part_at(r, offset);

	if (part) {
		fault_add(t, "parameter '");
		fault_add(t, part->name);
		fault_add(t, "' of ");
	}
	fault_add(t, "unit '");
	fault_add(t, r->unit);
	fault_add(t, "'");
}

/* Let the program go on, and tell it. Return: is it possible? */
static bool region_repair(struct shardd_region *r, enum fault_access access,
			  const struct fault_text *t)
{
	struct shardd_region_fault *f = r->fault;

	if (!f || !f->expected || access == FAULT_WRITE)
		return false;
	/* Another thread opens it: read again, until it has. */
	if (atomic_exchange(&r->open, true))
		return access == FAULT_READ;
	if (mprotect((void *)atomic_load(&r->from), r->length, PROT_READ) < 0) {
		atomic_store(&r->open, false);
		return false;
	}
	if (!f->happened) {
		size_t n = t->n < sizeof(f->text) - 1 ? t->n : sizeof(f->text) - 1;

		memcpy(f->text, t->text, n);
		f->text[n] = '\0';
		f->happened = 1;
	}
	return true;
}

static enum fault_answer region_released(struct shardd_region *r, uintptr_t at,
					 enum fault_access access, struct fault_text *t)
{
	struct fault_text said = { .n = 0 };
	bool repaired;

	fault_add(&said, access == FAULT_WRITE ? "write to " : "read of ");
	region_describe(r, at - atomic_load(&r->from), &said);
	fault_add(&said, ", which is released: " ADVICE_RELEASED);
	repaired = region_repair(r, access, &said);
	fault_add(t, "shardd: ");
	said.text[said.n < sizeof(said.text) ? said.n : sizeof(said.text) - 1] = '\0';
	fault_add(t, said.text);
	fault_add(t, "\n");
	return repaired ? FAULT_REPAIRED : FAULT_EXPLAINED;
}

static enum fault_answer region_explain(uintptr_t at, enum fault_access access,
					struct fault_text *t)
{
	for (struct shardd_region *r = atomic_load(&region_all); r; r = r->next) {
		uintptr_t from = atomic_load(&r->from), lent = atomic_load(&r->lent);

		if (from && at - from < r->length)
			return region_released(r, at, access, t);
		if (!lent || at - lent >= r->bytes || access == FAULT_READ)
			continue;
		fault_add(t, "shardd: write to ");
		region_describe(r, at - lent, t);
		fault_add(t, ", which is read-only while it is gathered, since all ranks of the "
			     "machine share it: " ADVICE_READ_ONLY "\n");
		return FAULT_EXPLAINED;
	}
	return FAULT_UNKNOWN;
}

/* -------------------------------------------------------------------- regions */

static void region_install(void)
{
	fault_begin(region_explain);
}

static struct shardd_region *region_with_parts(size_t n)
{
	struct shardd_region *r = calloc(1, sizeof(*r));

	if (r)
		r->parts = calloc(n ? n : 1, sizeof(*r->parts));
	if (!r || !r->parts) {
		free(r);
		return NULL;
	}
	r->max_parts = n;
	return r;
}

/* One with room for @n_parts. Return: NULL: no memory. */
static struct shardd_region *region_take(size_t n_parts)
{
	struct shardd_region *r;

	pthread_mutex_lock(&region_mutex);
	for (r = atomic_load(&region_all); r && (r->used || r->max_parts < n_parts); r = r->next)
		;
	if (!r && (r = region_with_parts(n_parts))) {
		r->next = atomic_load(&region_all);
		atomic_store(&region_all, r);
	}
	if (r)
		r->used = true;
	pthread_mutex_unlock(&region_mutex);
	return r;
}

static void region_name(char *to, const char *from)
{
	size_t n = strlen(from);

	n = n < MAX_NAME - 1 ? n : MAX_NAME - 1;
	memcpy(to, from, n);
	to[n] = '\0';
}

static int region_fill(struct shardd_region *r, const struct shardd_region_options *options)
{
	size_t page = (size_t)sysconf(_SC_PAGESIZE);
	void *at;

	for (size_t i = 0; i < options->n_parts; i++) {
		r->parts[i].offset = options->parts[i].offset;
		r->parts[i].bytes = options->parts[i].bytes;
		region_name(r->parts[i].name, options->parts[i].name);
	}
	atomic_store(&r->n_parts, options->n_parts);
	r->bytes = options->bytes;
	r->length = (options->bytes + page - 1) / page * page;
	r->fault = options->fault;
	region_name(r->unit, options->unit);
	atomic_store(&r->open, false);
	at = mmap(NULL, r->length, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
	if (at == MAP_FAILED)
		return -1;
	atomic_store(&r->from, (uintptr_t)at);
	return 0;
}

static void region_end(struct shardd_region *r)
{
	uintptr_t from;

	if (!r)
		return;
	atomic_store(&r->n_parts, 0);
	atomic_store(&r->lent, 0);
	from = atomic_exchange(&r->from, 0);
	if (from)
		munmap((void *)from, r->length);
	pthread_mutex_lock(&region_mutex);
	r->used = false;
	pthread_mutex_unlock(&region_mutex);
}

int shardd_region_new(const struct shardd_region_options *options, shardd_region **ret,
		      void **ret_at, struct shardd_error *err)
{
	static pthread_once_t once = PTHREAD_ONCE_INIT;
	struct shardd_region *r;

	if (options->size != sizeof(*options))
		return error_set(err, SHARDD_INVALID_ARGUMENT, "size",
				 "size is %zu, must be sizeof(struct shardd_region_options), %zu",
				 options->size, sizeof(*options));
	if (!options->unit || !options->bytes || options->bytes > SIZE_MAX / 2)
		return error_set(err, SHARDD_INVALID_ARGUMENT, "bytes",
				 "a region needs a unit's name and its bytes; bytes is %llu",
				 (unsigned long long)options->bytes);
	pthread_once(&once, region_install);
	r = region_take(options->n_parts);
	if (!r || region_fill(r, options) < 0) {
		region_end(r);
		return error_memory(err);
	}
	*ret = r;
	*ret_at = (void *)atomic_load(&r->from);
	return 0;
}

void shardd_region_set(shardd_region *r, enum shardd_region_state state, const void *at)
{
	if (!r)
		return;
	if (state == SHARDD_REGION_ENDED) {
		region_end(r);
		return;
	}
	atomic_store(&r->lent, state == SHARDD_REGION_GATHERED ? (uintptr_t)at : 0);
	if (state == SHARDD_REGION_RELEASED && atomic_load(&r->open) &&
	    mprotect((void *)atomic_load(&r->from), r->length, PROT_NONE) == 0)
		atomic_store(&r->open, false);
}
