#include "unit/reads.h"

#include <errno.h>
#include <stdlib.h>

static struct backend_wait *reads_find(struct reads *r, const struct backend_wait *w)
{
	for (unsigned i = 0; i < r->n; i++)
		if (r->waits[i].signals == w->signals && r->waits[i].slot == w->slot)
			return &r->waits[i];
	return NULL;
}

int reads_add(struct reads *r, const struct backend_wait *w)
{
	struct backend_wait *there = reads_find(r, w);

	if (there) {
		if (w->value > there->value)
			there->value = w->value;
		return 0;
	}
	if (r->n == r->room) {
		unsigned room = r->room ? 2 * r->room : 4;
		struct backend_wait *grown = realloc(r->waits, room * sizeof(*grown));

		if (!grown)
			return -ENOMEM;
		r->waits = grown;
		r->room = room;
	}
	r->waits[r->n++] = *w;
	return 0;
}

int reads_move(struct reads *r, struct reads *from)
{
	for (unsigned i = 0; i < from->n; i++)
		if (reads_add(r, &from->waits[i]) < 0)
			return -ENOMEM; /* entries that are there twice now do no harm */
	reads_deinit(from);
	return 0;
}

void reads_forget(struct reads *r, const struct backend_signals *signals)
{
	unsigned kept = 0;

	for (unsigned i = 0; i < r->n; i++)
		if (r->waits[i].signals != signals)
			r->waits[kept++] = r->waits[i];
	r->n = kept;
}

void reads_deinit(struct reads *r)
{
	free(r->waits);
	*r = (struct reads){ 0 };
}
