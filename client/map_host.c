/* Slabs of host memory: a descriptor is mapped as any file is. */
#include <errno.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "client_error.h"
#include "map.h"

uint64_t map_host_file(int fd)
{
	struct stat st;

	return fd >= 0 && fstat(fd, &st) == 0 ? st.st_ino : 0;
}

/* Whole entries of the upper levels of the page table are moved at once: shardd_live moves mappings. */
#define MAP_HOST_BIG  (2ull << 20)
#define MAP_HOST_HUGE (1ull << 30)

void *map_host_reserve(uint64_t bytes)
{
	uint64_t align = bytes >= MAP_HOST_HUGE  ? MAP_HOST_HUGE
			 : bytes >= MAP_HOST_BIG ? MAP_HOST_BIG
						 : 0;
	uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE), skip;
	uint8_t *at;

	bytes = (bytes + page - 1) / page * page;
	at = mmap(NULL, bytes + align, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1,
		  0);
	if (at == MAP_FAILED || !align)
		return at;
	skip = (align - (uintptr_t)at % align) % align;
	if (skip)
		munmap(at, skip);
	if (align - skip)
		munmap(at + skip + bytes, align - skip);
	return at + skip;
}

static int map_host_map(void *device, const struct map_source *s, int timeout_ms, uint8_t **ret,
			struct shardd_error *err)
{
	int protection = PROT_READ | (s->writable ? PROT_WRITE : 0);
	struct stat st;
	void *at, *base;

	(void)device;
	(void)timeout_ms;
	if (s->ipc)
		return error_set(err, SHARDD_INTERNAL, NULL,
				 "slab %u came with a CUDA IPC handle, but this rank's memory is "
				 "the host's",
				 s->slab);
	/* Behind the end of the file every access would be a SIGBUS. */
	if (s->fd < 0 || fstat(s->fd, &st) < 0 || !s->bytes || (uint64_t)st.st_size < s->bytes)
		return error_set(err, SHARDD_INTERNAL, NULL,
				 "slab %u came without its %llu bytes of memory", s->slab,
				 (unsigned long long)s->bytes);
	at = s->over ? s->over : map_host_reserve(s->bytes);
	if (at == MAP_FAILED) /* a limit of addresses: it needs no place of its own */
		at = NULL;
	base = mmap(at, s->bytes, protection, MAP_SHARED | (at ? MAP_FIXED : 0), s->fd, 0);
	if (base == MAP_FAILED) {
		int e = errno;

		if (at && !s->over)
			munmap(at, s->bytes);
		return error_os(err, SHARDD_RESOURCE_EXHAUSTED, e,
				"cannot map slab %u of %llu bytes", s->slab,
				(unsigned long long)s->bytes);
	}
	*ret = base;
	return 0;
}

static void map_host_unmap(void *device, const struct mapping *m)
{
	(void)device;
	munmap(m->base, m->bytes);
}

static int map_host_copy(void *device, void *dst, const void *src, size_t bytes,
			 struct shardd_error *err)
{
	(void)device;
	(void)err;
	memcpy(dst, src, bytes);
	return 0;
}

const struct map_ops map_host_ops = {
	.map = map_host_map,
	.unmap = map_host_unmap,
	.copy_in = map_host_copy,
	.copy_out = map_host_copy,
};
