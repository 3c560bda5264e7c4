#include "kernel_bed.h"

#ifdef SHARDD_CUDA
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "convert.h"

#define ALIGN 256
#define GUARD 256 /* bytes between buffers, at least */

static const uint32_t specials[] = {
	0x00000000, 0x80000000, 0x7f800000, 0xff800000, /* zeros, infinities */
	0x7fc00000, 0xffc00001, 0x7f800001, 0x7fbfffff, /* NaN, quiet and signalling */
	0x00000001, 0x80000001, 0x007fffff, 0x00400000, /* subnormal in fp32 and bf16 */
	0x00800000, 0x7f7fffff, 0xff7fffff, 0x7f7f8000, /* smallest, largest, bf16's tie */
	0x477fefff, 0x477ff000, 0xc77ff000, 0x477fe000, /* around fp16's largest */
	0x33000000, 0x33000001, 0x33800000, 0xb3c00000, /* around fp16's smallest */
	0x387fffff, 0x38800000, 0x387fe000, 0x387ff000, /* fp16: last subnormal, first normal */
	0x3f808000, 0x3f818000, 0x3f801000, 0x3f803000, /* ties of bf16 and of fp16 */
};
#define N_SPECIALS (sizeof(specials) / sizeof(specials[0]))

uint64_t bed_random(struct bed *b)
{
	b->random ^= b->random << 13;
	b->random ^= b->random >> 7;
	b->random ^= b->random << 17;
	return b->random >> 16;
}

static uint32_t random_bits(struct bed *b, enum bed_data data)
{
	uint64_t r = bed_random(b);
	uint32_t plain = f32_bits((float)((double)(r >> 8 & 0xffffff) * 0x1p-21 - 4 + 0x1p-23));

	if (data == BED_FINITE)
		return (plain & 0x807fffff) | (uint32_t)(110 + (r >> 34) % 29) << 23;
	if (r % 16 == 0)
		plain = specials[(r >> 4) % N_SPECIALS];
	if (r % 16 == 1)
		plain = (uint32_t)(r >> 8);
	return data == BED_NOT_NEG ? plain & FP32_ABS : plain;
}

static void fill(struct bed *b, void *at, enum dtype t, size_t n, enum bed_data data)
{
	for (size_t e = 0; e < n; e++) {
		uint32_t u = random_bits(b, data);

		if (t == DTYPE_FP32)
			((uint32_t *)at)[e] = u;
		else if (t == DTYPE_BF16)
			((uint16_t *)at)[e] = (uint16_t)(u >> 16);
		else
			((uint16_t *)at)[e] = data == BED_FINITE || u % 8
						      ? fp16_from_f32(f32_from_bits(u))
						      : (uint16_t)(u >> 3);
	}
}

void bed_open(struct bed *b, const struct device *d, size_t capacity)
{
	*b = (struct bed){ .d = d, .capacity = capacity, .random = 88172645463325252u };
	b->before = malloc(capacity);
	b->want = malloc(capacity);
	b->got = malloc(capacity);
	if (!b->before || !b->want || !b->got) {
		fprintf(stderr, "no memory\n");
		exit(1);
	}
	b->device = device_alloc(d, capacity);
}

void bed_close(struct bed *b)
{
	device_free(b->d, b->device);
	free(b->before);
	free(b->want);
	free(b->got);
}

void bed_begin(struct bed *b)
{
	b->n_bufs = 0;
	b->used = 0;
}

size_t bed_bytes(enum dtype t, size_t n)
{
	return (n + 32) * dtype_size(t) + 2 * ALIGN + GUARD;
}

unsigned bed_add(struct bed *b, enum dtype t, size_t n, size_t shift, enum bed_data data)
{
	unsigned i = b->n_bufs++;
	size_t at = (b->used + GUARD + ALIGN - 1) / ALIGN * ALIGN + shift * dtype_size(t);
	size_t end = at + n * dtype_size(t);

	if (i >= BED_BUFS || end + GUARD > b->capacity) {
		fprintf(stderr, "a case needs more than the bed has\n");
		exit(1);
	}
	memset(b->want + b->used, (int)(0x5a + i), end + GUARD - b->used);
	fill(b, b->want + at, t, n, data);
	b->bufs[i].at = at;
	b->bufs[i].dtype = t;
	b->bufs[i].n = n;
	b->used = end + GUARD;
	return i;
}

void *bed_host(const struct bed *b, unsigned i)
{
	return b->want + b->bufs[i].at;
}

CUdeviceptr bed_device(const struct bed *b, unsigned i)
{
	return b->device + b->bufs[i].at;
}

void bed_upload(struct bed *b)
{
	memcpy(b->before, b->want, b->used);
	device_put(b->d, b->device, b->want, b->used);
}

void bed_fetch(struct bed *b)
{
	device_get(b->d, b->got, b->device, b->used);
}

static bool same_element(enum dtype t, const void *x, const void *y, size_t e)
{
	float fx, fy;

	if (t == DTYPE_FP32) {
		fx = ((const float *)x)[e];
		fy = ((const float *)y)[e];
		return f32_bits(fx) == f32_bits(fy) || (fx != fx && fy != fy);
	}
	if (((const uint16_t *)x)[e] == ((const uint16_t *)y)[e])
		return true;
	fx = t == DTYPE_BF16 ? bf16_to_f32(((const uint16_t *)x)[e])
			     : fp16_to_f32(((const uint16_t *)x)[e]);
	fy = t == DTYPE_BF16 ? bf16_to_f32(((const uint16_t *)y)[e])
			     : fp16_to_f32(((const uint16_t *)y)[e]);
	return fx != fx && fy != fy;
}

/* The bytes in front of buffer @i, or behind the last one. */
static bool same_gap(const struct bed *b, unsigned i)
{
	size_t from =
		i ? b->bufs[i - 1].at + b->bufs[i - 1].n * dtype_size(b->bufs[i - 1].dtype) : 0;
	size_t to = i < b->n_bufs ? b->bufs[i].at : b->used;

	return memcmp(b->got + from, b->before + from, to - from) == 0;
}

bool bed_same(struct bed *b, unsigned *ret_buf, size_t *ret_at)
{
	bed_fetch(b);
	for (unsigned i = 0; i <= b->n_bufs; i++) {
		*ret_buf = i;
		*ret_at = SIZE_MAX;
		if (!same_gap(b, i))
			return false;
		for (size_t e = 0; i < b->n_bufs && e < b->bufs[i].n; e++) {
			*ret_at = e;
			if (!same_element(b->bufs[i].dtype, b->want + b->bufs[i].at,
					  b->got + b->bufs[i].at, e))
				return false;
		}
	}
	return true;
}
#else
typedef int kernel_bed_not_empty;
#endif
