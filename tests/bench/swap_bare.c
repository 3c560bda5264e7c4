/*
 * What the kernel needs for a swap at fixed addresses, without libshardd: page table entries move out of a window and
 * others into it, as client/live_window.c moves them. After a reader has read its generation, the caches have nothing
 * of the kernel's code and tables.
 */
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#include "bench.h"

#ifndef MREMAP_DONTUNMAP
#define MREMAP_DONTUNMAP 4
#endif

#define BARE_GIB (UINT64_C(1) << 30) /* an entry of the page table that is moved as a whole */

struct bare {
	uint64_t bytes, room; /* of a generation; of addresses for it */
	uint8_t *window, *home[2];
	unsigned shown; /* of these, in the window */
};

static void bare_failed(const char *what)
{
	fprintf(stderr, "shardd-bench: a bare swap: cannot %s\n", what);
	_exit(1);
}

static uint8_t *bare_reserve(uint64_t room)
{
	uint8_t *at = mmap(NULL, room + BARE_GIB, PROT_NONE,
			   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);

	if (at == MAP_FAILED)
		bare_failed("reserve addresses");
	return at + (BARE_GIB - (uintptr_t)at % BARE_GIB) % BARE_GIB;
}

static uint64_t bare_read(const uint8_t *at, uint64_t bytes)
{
	uint64_t sum = 0;

	for (uint64_t i = 0; i < bytes; i += 64)
		sum += ((const volatile uint8_t *)at)[i];
	return sum;
}

static uint8_t *bare_map(const struct bare *b)
{
	int fd = memfd_create("shardd-bench", MFD_CLOEXEC);
	uint8_t *at = bare_reserve(b->room);

	if (fd < 0 || ftruncate(fd, (off_t)b->bytes) < 0 ||
	    posix_fallocate(fd, 0, (off_t)b->bytes) != 0 ||
	    mmap(at, b->room, PROT_READ, MAP_SHARED | MAP_FIXED, fd, 0) == MAP_FAILED)
		bare_failed("map memory");
	close(fd);
	(void)bare_read(at, b->bytes);
	return at;
}

static void bare_move(const struct bare *b, uint8_t *from, uint8_t *to)
{
	if (mremap(from, b->room, b->room, MREMAP_MAYMOVE | MREMAP_FIXED | MREMAP_DONTUNMAP, to) !=
	    to)
		bare_failed("move a mapping");
}

static void bare_swap(struct trainer *t, struct bare *b, unsigned out, unsigned in, int i)
{
	struct sample *s = trainer_sample(t, out, i);

	sample_begin(s);
	bare_move(b, b->window, b->home[b->shown]);
	sample_end(s);
	s = trainer_sample(t, in, i);
	sample_begin(s);
	bare_move(b, b->home[1 - b->shown], b->window);
	sample_end(s);
	b->shown = 1 - b->shown;
}

struct bare *swap_bare_new(uint64_t bytes)
{
	struct bare *b = calloc(1, sizeof(*b));

	if (!b)
		bare_failed("have memory");
	b->bytes = bytes;
	b->room = (bytes + BARE_GIB - 1) / BARE_GIB * BARE_GIB;
	b->home[0] = bare_map(b);
	b->home[1] = bare_map(b);
	b->window = bare_reserve(b->room);
	bare_move(b, b->home[0], b->window);
	return b;
}

void swap_bare(struct trainer *t, struct bare *b, unsigned series, int i)
{
	(void)bare_read(b->window, b->bytes);
	bare_swap(t, b, series + SWAP_BARE_OUT, series + SWAP_BARE_IN, i);
	bare_swap(t, b, series + SWAP_BARE_OUT_AGAIN, series + SWAP_BARE_IN_AGAIN, i);
}
