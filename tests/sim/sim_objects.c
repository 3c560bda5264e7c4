/* Objects that are never freed, so that using one after its end is recognised. */
#include <stdlib.h>

#include "sim_impl.h"

#define CHUNK 256u

void *objects_new(struct objects *o)
{
	uint32_t *p;

	if (!o->n_chunks || o->used == CHUNK) {
		o->chunks = realloc(o->chunks, (o->n_chunks + 1) * sizeof(*o->chunks));
		if (!o->chunks || !(o->chunks[o->n_chunks] = calloc(CHUNK, o->size)))
			sim_breach("out of memory");
		o->n_chunks++;
		o->used = 0;
	}
	p = (void *)(o->chunks[o->n_chunks - 1] + o->size * o->used++);
	*p = 1;
	return p;
}

static bool known(const struct objects *o, const char *p)
{
	for (unsigned i = 0; i < o->n_chunks; i++) {
		const char *c = o->chunks[i];

		if (p >= c && p < c + CHUNK * o->size)
			return (size_t)(p - c) % o->size == 0;
	}
	return false;
}

void *objects_get(const struct objects *o, const void *p, const char *function)
{
	if (!known(o, p))
		return NULL;
	if (!*(const uint32_t *)p)
		sim_breach("%s: the %s has ended already", function, o->what);
	return (void *)(uintptr_t)p;
}

void objects_each(const struct objects *o, void (*fn)(void *object, void *arg), void *arg)
{
	for (unsigned i = 0; i < o->n_chunks; i++) {
		unsigned n = i + 1 == o->n_chunks ? o->used : CHUNK;

		for (unsigned k = 0; k < n; k++) {
			uint32_t *p = (void *)(o->chunks[i] + o->size * k);

			if (*p)
				fn(p, arg);
		}
	}
}
