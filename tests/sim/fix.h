/*
 * What the simulator's tests share: opening it, memory, messages between two processes,
 * and children that are expected to die of a breach.
 *
 * The library is loaded by the process that uses it and by nobody before: a test that
 * wants two processes forks first. NEED works in children too, where Criterion cannot.
 */
#ifndef SHARDD_TESTS_SIM_FIX_H
#define SHARDD_TESTS_SIM_FIX_H

#include <criterion/criterion.h>
#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

#include "core/cuda_lib.h"

#define MIB (1ull << 20)

/* The entries; NULL before fix_open. */
extern const struct cuda_lib *cu;

void fix_need(bool ok, const char *what, long got, const char *file, int line);
#define NEED(x) fix_need((x), #x, 0, __FILE__, __LINE__)
#define OK(x)   IS(x, CUDA_SUCCESS)
#define IS(x, wanted)                                                                          \
	do {                                                                                   \
		long got_ = (long)(x);                                                         \
		fix_need(got_ == (long)(wanted), #x " is " #wanted, got_, __FILE__, __LINE__); \
	} while (0)

/* For .init: the test's process, with the path of the library in the environment. */
void fix_init(void);
/* Load the simulator; the context of device 0 is current. */
void fix_open(void);
/* Load it without a context. */
void fix_load(void);

struct slab {
	CUmemGenericAllocationHandle handle;
	CUdeviceptr addr;
	size_t bytes;
};

/* Memory of device 0 that can be exported, mapped for reading and writing. */
struct slab slab_new(size_t bytes);
/* Map what @handle names, with these CUmemAccess_flags. */
struct slab slab_map(CUmemGenericAllocationHandle handle, size_t bytes, int flags);
struct slab slab_import(int fd, size_t bytes, int flags);
int slab_export(const struct slab *s);
void slab_free(struct slab *s);

CUstream stream_new(void);
/* Set and read device memory, and wait for it. */
void put32(CUdeviceptr addr, uint32_t value, size_t n);
uint32_t get32(CUdeviceptr addr);
uint64_t get64(CUdeviceptr addr);
void put64(CUdeviceptr addr, uint64_t value);
void put_bytes(CUdeviceptr addr, const void *src, size_t bytes);
void get_bytes(void *dst, CUdeviceptr addr, size_t bytes);

/* Run @fn in a child: it must break a rule, and the line must hold @text. */
void dies(void (*fn)(void), const char *text);

/* A child that runs @fn(its end of a socket pair) and exits. */
struct child {
	pid_t pid;
	int fd;
};
struct child child_start(void (*fn)(int fd));
/* It must have ended well. */
void child_end(struct child *c);
void child_kill(struct child *c);
/* Bytes over the pair, with a descriptor (-1: none); a wait of at most 10 seconds. */
void tell(int fd, const void *data, size_t bytes, int pass);
int hear(int fd, void *data, size_t bytes);

/* Open descriptors of this process. */
unsigned descriptors(void);

#endif
