/*
 * Memory: blocks (memfds), addresses, and what is mapped where.
 *
 * The last page of a memfd is its head; what lies before it is the data. Fresh memory is
 * filled with 0xA5, since CUDA promises no zeros (large memory only in places, to stay
 * quick). Device addresses come from one region that no CPU can touch; the simulator has
 * its own mapping of each block (the shadow), which lives on while an item uses it.
 */
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "sim_impl.h"

#define PAGE      4096ull
#define MAGIC     "SIMcuMEM"
#define FILL_BYTE 0xA5
#define FILL_ALL  (1ull << 20) /* more than that is filled in places only */
#define PLACE     (64ull << 10)
#define GUARD     SIM_GRANULARITY /* between two allocations: an overrun hits nothing */

struct reservation {
	uint64_t addr, bytes;
};

static uint64_t region, region_bytes, region_next;
static struct reservation *reservations;
static unsigned n_reservations, max_reservations;
static struct range **ranges; /* sorted by address */
static unsigned n_ranges, max_ranges;
static uint64_t used[SIM_DEVICES];

/* -- blocks ------------------------------------------------------------------- */

static void fill(char *p, uint64_t bytes)
{
	if (bytes <= FILL_ALL) {
		memset(p, FILL_BYTE, bytes);
		return;
	}
	for (uint64_t at = 0; at < bytes; at += SIM_GRANULARITY)
		memset(p + at, FILL_BYTE, bytes - at < PLACE ? bytes - at : PLACE);
	memset(p + bytes - PLACE, FILL_BYTE, PLACE);
}

/* Takes @fd over. */
static CUresult block_map(int fd, uint64_t bytes, struct block **ret)
{
	struct block *b = calloc(1, sizeof(*b));
	char *p = mmap(NULL, bytes + PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);

	if (!b || p == MAP_FAILED) {
		sim_note("cannot map %llu bytes: %s", (unsigned long long)bytes, strerror(errno));
		free(b);
		close(fd);
		return CUDA_ERROR_OUT_OF_MEMORY;
	}
	*b = (struct block){ .refs = 1, .fd = fd, .bytes = bytes, .shadow = p, .charged = -1 };
	b->head = (void *)(p + bytes);
	*ret = b;
	return CUDA_SUCCESS;
}

static uint64_t page_up(uint64_t bytes)
{
	return (bytes + PAGE - 1) & ~(PAGE - 1);
}

CUresult block_new(enum block_kind kind, int device, uint64_t bytes, struct block **ret)
{
	uint64_t all = page_up(bytes);
	uint64_t capacity = (uint64_t)sim_env("SHARDD_SIM_MEMORY", 4ll << 30);
	CUresult r;
	int fd;

	if (kind != BLOCK_HOST && (all > capacity || used[device] > capacity - all))
		return CUDA_ERROR_OUT_OF_MEMORY;
	fd = memfd_create("sim-memory", MFD_CLOEXEC | MFD_ALLOW_SEALING);
	if (fd < 0 || ftruncate(fd, (off_t)(all + PAGE)) < 0 ||
	    fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW) < 0) {
		sim_note("cannot make memory: %s", strerror(errno));
		if (fd >= 0)
			close(fd);
		return CUDA_ERROR_OUT_OF_MEMORY;
	}
	r = block_map(fd, all, ret);
	if (r)
		return r;
	memcpy((*ret)->head->magic, MAGIC, 8);
	(*ret)->head->bytes = all;
	(*ret)->head->physical = kind == BLOCK_HOST ? -1 : sim_physical(device);
	(*ret)->head->kind = kind;
	fill((*ret)->shadow, all);
	if (kind != BLOCK_HOST) {
		(*ret)->charged = device;
		used[device] += all;
	}
	return CUDA_SUCCESS;
}

static bool is_memory(int fd, enum block_kind kind, uint64_t *ret_bytes)
{
	struct block_head head;
	struct stat st;

	if (fstat(fd, &st) < 0 || !S_ISREG(st.st_mode) || st.st_size <= (off_t)PAGE ||
	    fcntl(fd, F_GET_SEALS) != (F_SEAL_SHRINK | F_SEAL_GROW))
		return false;
	*ret_bytes = (uint64_t)st.st_size - PAGE;
	return pread(fd, &head, sizeof(head), (off_t)*ret_bytes) == sizeof(head) &&
	       memcmp(head.magic, MAGIC, 8) == 0 && head.bytes == *ret_bytes && head.kind == kind;
}

CUresult block_import(int fd, enum block_kind kind, struct block **ret)
{
	uint64_t bytes;
	int copy;

	if (!is_memory(fd, kind, &bytes))
		return CUDA_ERROR_INVALID_VALUE;
	copy = fcntl(fd, F_DUPFD_CLOEXEC, 3);
	return copy < 0 ? CUDA_ERROR_OPERATING_SYSTEM : block_map(copy, bytes, ret);
}

void block_unref(struct block *b)
{
	if (!b || --b->refs)
		return;
	if (b->charged >= 0)
		used[b->charged] -= b->bytes;
	munmap(b->shadow, b->bytes + PAGE);
	close(b->fd);
	free(b);
}

uint64_t block_used(int device)
{
	return used[device];
}

/* -- addresses ------------------------------------------------------------------ */

static bool region_make(void)
{
	for (region_bytes = 8ull << 40; region_bytes >= 1ull << 33; region_bytes /= 2) {
		void *p = mmap(NULL, region_bytes, PROT_NONE,
			       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);

		if (p == MAP_FAILED)
			continue;
		region = (uint64_t)(uintptr_t)p;
		region_next = region;
		return true;
	}
	return false;
}

static bool overlaps(uint64_t a, uint64_t a_bytes, uint64_t b, uint64_t b_bytes)
{
	return a < b + b_bytes && b < a + a_bytes;
}

/* Where what overlaps [addr, addr+bytes) ends; 0 if nothing does. */
static uint64_t taken_until(uint64_t addr, uint64_t bytes)
{
	struct range *r = range_next(addr);

	for (unsigned i = 0; i < n_reservations; i++)
		if (overlaps(addr, bytes, reservations[i].addr, reservations[i].bytes))
			return reservations[i].addr + reservations[i].bytes;
	return r && r->kind != RANGE_HOST && overlaps(addr, bytes, r->addr, r->bytes)
		       ? r->addr + r->bytes
		       : 0;
}

uint64_t addr_take(uint64_t bytes, uint64_t align)
{
	uint64_t end;
	bool again = false;

	if (align < SIM_GRANULARITY)
		align = SIM_GRANULARITY;
	if ((!region && !region_make()) || bytes > region_bytes / 2)
		return 0;
	for (uint64_t a = (region_next + align - 1) & ~(align - 1);;
	     a = (end + align - 1) & ~(align - 1)) {
		if (a + bytes + GUARD > region + region_bytes) {
			if (again)
				return 0;
			again = true;
			end = region;
			continue;
		}
		end = taken_until(a, bytes + GUARD);
		if (end)
			continue;
		region_next = a + bytes + GUARD;
		return a;
	}
}

bool addr_is_device(uint64_t addr)
{
	return region && addr >= region && addr < region + region_bytes;
}

void addr_reserve(uint64_t addr, uint64_t bytes)
{
	if (n_reservations == max_reservations) {
		max_reservations = max_reservations ? 2 * max_reservations : 64;
		reservations = realloc(reservations, max_reservations * sizeof(*reservations));
		if (!reservations)
			sim_breach("out of memory");
	}
	reservations[n_reservations++] = (struct reservation){ addr, bytes };
}

bool addr_reserved(uint64_t addr, uint64_t bytes)
{
	for (unsigned i = 0; i < n_reservations; i++) {
		const struct reservation *v = &reservations[i];

		if (addr >= v->addr && bytes <= v->bytes && addr - v->addr <= v->bytes - bytes)
			return true;
	}
	return false;
}

bool addr_unreserve(uint64_t addr, uint64_t bytes)
{
	for (unsigned i = 0; i < n_reservations; i++) {
		if (reservations[i].addr != addr || reservations[i].bytes != bytes)
			continue;
		reservations[i] = reservations[--n_reservations];
		return true;
	}
	return false;
}

/* -- ranges ----------------------------------------------------------------------- */

/* Index of the first one that ends behind @addr. */
static unsigned place(uint64_t addr)
{
	unsigned lo = 0, hi = n_ranges;

	while (lo < hi) {
		unsigned mid = (lo + hi) / 2;

		if (ranges[mid]->addr + ranges[mid]->bytes > addr)
			hi = mid;
		else
			lo = mid + 1;
	}
	return lo;
}

struct range *range_add(const struct range *r)
{
	unsigned at = place(r->addr);
	struct range *copy = malloc(sizeof(*copy));

	if (n_ranges == max_ranges) {
		max_ranges = max_ranges ? 2 * max_ranges : 64;
		ranges = realloc(ranges, max_ranges * sizeof(*ranges));
	}
	if (!ranges || !copy)
		sim_breach("out of memory");
	*copy = *r;
	memmove(&ranges[at + 1], &ranges[at], (n_ranges++ - at) * sizeof(*ranges));
	ranges[at] = copy;
	return copy;
}

struct range *range_next(uint64_t addr)
{
	unsigned at = place(addr);

	return at < n_ranges ? ranges[at] : NULL;
}

struct range *range_find(uint64_t addr)
{
	struct range *r = range_next(addr);

	return r && r->addr <= addr ? r : NULL;
}

struct range *range_first(void)
{
	return n_ranges ? ranges[0] : NULL;
}

struct range *range_after(const struct range *r)
{
	return range_next(r->addr + r->bytes);
}

void range_remove(struct range *r)
{
	unsigned at = place(r->addr);

	n_ranges--;
	memmove(&ranges[at], &ranges[at + 1], (n_ranges - at) * sizeof(*ranges));
	if (r->exported)
		ipc_withdraw(r->exported);
	block_unref(r->block);
	free(r);
}

/* A copy runs on the device that has the memory where the stream's own may not reach it. */
bool range_allows(const struct range *r, int device, bool write, bool copy)
{
	uint8_t wanted = write ? CU_MEM_ACCESS_FLAGS_PROT_READWRITE : CU_MEM_ACCESS_FLAGS_PROT_READ;

	if (r->kind == RANGE_HOST)
		return true;
	if (r->kind != RANGE_VMM)
		return copy || r->device == device;
	if (device >= 0 && (r->access[device] & wanted) == wanted)
		return true;
	return copy && r->device >= 0 && (r->access[r->device] & wanted) == wanted;
}

static const char *unusable(int device, uint64_t addr, uint64_t bytes, bool write, bool copy,
			    struct range **ret)
{
	struct range *r = range_find(addr);

	if (!r)
		return addr_is_device(addr) ? "nothing is mapped there (any more)"
					    : "that is not device memory";
	if (bytes > r->bytes || addr - r->addr > r->bytes - bytes)
		return "behind the end of what is mapped there";
	if (!range_allows(r, device, write, copy))
		return write ? "not mapped for writing" : "not mapped for this device";
	*ret = r;
	return NULL;
}

bool range_usable(int device, uint64_t addr, uint64_t bytes, bool write, bool copy)
{
	struct range *r;

	return !unusable(device, addr, bytes, write, copy, &r);
}

bool sim_range(CUdevice from, CUdeviceptr addr, size_t bytes, int write, int *ret_device)
{
	struct range *r;
	bool ok;

	pthread_mutex_lock(&sim_lock);
	ok = !unusable(from, addr, bytes, write, false, &r);
	if (ok && ret_device)
		*ret_device = r->kind == RANGE_HOST ? -1 : r->device;
	pthread_mutex_unlock(&sim_lock);
	return ok;
}

static void *translate(uint64_t addr, uint64_t bytes, bool write, bool copy,
		       _Atomic uint32_t **ret_bell)
{
	static char nothing[64];
	struct stream *s = stream_self();
	struct range *r = NULL;
	const char *why;
	void *p = NULL;

	if (!bytes)
		return nothing;
	pthread_mutex_lock(&sim_lock);
	why = unusable(s ? s->ctx->device : 0, addr, bytes, write, copy, &r);
	if (!why) {
		p = r->block->shadow + (addr - r->addr);
		if (ret_bell)
			*ret_bell = &r->block->head->bell;
		if (s)
			stream_pin(s, r->block);
	}
	pthread_mutex_unlock(&sim_lock);
	if (why)
		stream_fault(CUDA_ERROR_ILLEGAL_ADDRESS, "%s 0x%llx, %llu bytes: %s",
			     write ? "writes" : "reads", (unsigned long long)addr,
			     (unsigned long long)bytes, why);
	return p;
}

void *item_translate(uint64_t addr, uint64_t bytes, bool write, bool copy)
{
	return translate(addr, bytes, write, copy, NULL);
}

void *item_word(uint64_t addr, bool write, _Atomic uint32_t **ret_bell)
{
	return translate(addr, 8, write, false, ret_bell);
}

void *sim_translate(CUdeviceptr addr, size_t bytes, int write)
{
	return translate(addr, bytes, write, false, NULL);
}
