/*
 * Buffers for one case of kernel_test: the same bytes on the host, where kernels/ref works,
 * and on the device. Everything is compared afterwards, what lies between the buffers too,
 * so that a kernel that writes outside its range is found.
 */
#ifndef SHARDD_TESTS_KERNEL_BED_H
#define SHARDD_TESTS_KERNEL_BED_H

#include "kernel_device.h"

#ifdef SHARDD_CUDA
#define BED_BUFS 24

/* What is in a buffer at first; never zeros. */
enum bed_data {
	BED_ANY,     /* numbers, some special ones of every kind, some of any bits */
	BED_NOT_NEG, /* as ANY without a sign: second moments */
	BED_FINITE,  /* finite numbers of many sizes */
};

struct bed {
	const struct device *d;
	unsigned char *before, *want, *got; /* capacity bytes each */
	CUdeviceptr device;
	size_t capacity, used;
	uint64_t random;
	unsigned n_bufs;
	struct {
		size_t at; /* bytes from the beginning */
		enum dtype dtype;
		size_t n;
	} bufs[BED_BUFS];
};

void bed_open(struct bed *b, const struct device *d, size_t capacity);
void bed_close(struct bed *b);

/* Forget all buffers. */
void bed_begin(struct bed *b);
/* A buffer of @n elements that begins @shift elements after a multiple of 256 bytes.
 * Return: its number. */
unsigned bed_add(struct bed *b, enum dtype t, size_t n, size_t shift, enum bed_data data);
/* Its place on the host (for ref) and on the device. */
void *bed_host(const struct bed *b, unsigned i);
CUdeviceptr bed_device(const struct bed *b, unsigned i);
/* Both begin with the same bytes: after the last bed_add, and after changes to bed_host. */
void bed_upload(struct bed *b);
/* Fetch what the device has made of it. */
void bed_fetch(struct bed *b);
/* bed_fetch, and everything is bit for bit as on the host (a NaN is a NaN).
 * @ret_at: where it is not. */
bool bed_same(struct bed *b, unsigned *ret_buf, size_t *ret_at);

uint64_t bed_random(struct bed *b);
/* Bytes that a case may use for one buffer of @n elements. */
size_t bed_bytes(enum dtype t, size_t n);
#endif

#endif
