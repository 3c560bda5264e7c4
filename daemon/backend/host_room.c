#include "backend/host_room.h"

#include <stdio.h>
#include <sys/stat.h>

#include "backend/host_unmap.h"
#include "backend/memfd.h"
#include "core/clock.h"

#define READ_EVERY_US 100000u
#define MIB(bytes)    ((unsigned long long)((bytes) >> 20))

void host_room_init(struct host_room *r, const struct host_memory_place *place)
{
	*r = (struct host_room){ .place = *place };
	list_init(&r->all);
	list_init(&r->promises);
}

static uint64_t host_room_less(uint64_t from, uint64_t bytes)
{
	return bytes < from ? from - bytes : 0;
}

uint64_t host_room_resident(const int *fds, unsigned n)
{
	uint64_t bytes = 0;
	struct stat st;

	for (unsigned i = 0; i < n; i++)
		if (fds[i] >= 0 && fstat(fds[i], &st) == 0)
			bytes += (uint64_t)st.st_blocks * 512;
	return bytes;
}

void host_room_promise(struct host_room *r, struct host_promise *p)
{
	list_init(&p->link);
	list_append(&r->promises, &p->link);
}

/* Bytes that were promised and have no pages yet. */
static uint64_t host_room_promised(const struct host_room *r)
{
	struct host_promise *p, *next;
	struct memfd *m, *tmp;
	uint64_t sum = 0;

	list_for_each (m, tmp, (struct list *)&r->all, live) {
		uint64_t there = memfd_resident(m);

		sum += host_room_less(m->mem.bytes, there);
	}
	list_for_each (p, next, (struct list *)&r->promises, link)
		sum += host_room_less(p->bytes, host_room_resident(p->fds, p->n_fds));
	return sum;
}

static bool host_room_read(struct host_room *r)
{
	uint64_t pending = r->unmapper ? unmapper_pending(r->unmapper) : 0;
	struct host_memory m;

	if (host_memory_read(&r->place, &m))
		return false;
	r->now = m;
	pending += atomic_load(&r->leaving);
	r->left = host_room_less(host_memory_left(&m) + pending, host_memory_reserve(&m));
	r->left = host_room_less(r->left, host_room_promised(r));
	r->read_at_us = clock_now_us();
	return true;
}

static void host_room_explain(const struct host_room *r, char *why, size_t bytes)
{
	const struct host_memory *m = &r->now;

	if (m->left < m->available)
		snprintf(why, bytes,
			 "the daemon's control group has %llu MiB left of its limit of %llu MiB, "
			 "of which %llu MiB are free for new memory",
			 MIB(m->left), MIB(m->limit), MIB(r->left));
	else
		snprintf(why, bytes,
			 "the machine has %llu MiB available of %llu MiB, of which %llu MiB are "
			 "free for new memory",
			 MIB(m->available), MIB(m->machine), MIB(r->left));
}

bool host_room_take(struct host_room *r, uint64_t bytes, char *why, size_t why_bytes)
{
	why[0] = '\0';
	if ((!r->read_at_us || clock_now_us() - r->read_at_us >= READ_EVERY_US) &&
	    !host_room_read(r))
		return true; /* not known without /proc */
	if (bytes > r->left) {
		host_room_explain(r, why, why_bytes);
		return false;
	}
	r->left -= bytes;
	return true;
}
