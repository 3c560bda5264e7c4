/*
 * Fill: a thread makes the four elements of one Philox group. The numbers are those of
 * kernels/random.h, compiled from that very file: integer arithmetic, and fp64 operations
 * each rounded by itself, so that all kinds have ref's bits, NORMAL too.
 */
#include "device.cuh"
#include "random.h"

#define GROUP 4

static __device__ __forceinline__ void normals(const struct cuda_fill &a, const uint32_t w[GROUP],
					       float out[GROUP])
{
#pragma unroll
	for (int j = 0; j < GROUP; j += 2) {
		double z[2];

		random_normals(&w[j], z);
		out[j] = static_cast<float>(a.a + a.b * z[0]);
		out[j + 1] = static_cast<float>(a.a + a.b * z[1]);
	}
}

/* Elements 4*group to 4*group+3 of the tensor. */
static __device__ __forceinline__ void group_of(const struct cuda_fill &a, uint64_t group,
						float out[GROUP])
{
	uint32_t w[GROUP];

	random_words(a.seed, a.stream, group, w);
	if (a.kind == FILL_NORMAL) {
		normals(a, w, out);
		return;
	}
#pragma unroll
	for (int j = 0; j < GROUP; j++)
		out[j] = a.kind == FILL_CONSTANT
				 ? static_cast<float>(a.a)
				 : static_cast<float>(a.a + (a.b - a.a) * random_unit(w[j]));
}

KERNEL(3) shardd_fill(const __grid_constant__ struct cuda_fill a)
{
	using f32 = vec<DTYPE_FP32, GROUP>;
	const uint64_t first = a.first / GROUP, skip = a.first % GROUP;
	const uint64_t groups = a.n ? (skip + a.n + GROUP - 1) / GROUP : 0;
	const bool aligned = (a.dst - skip * sizeof(float)) % f32::BYTES == 0;

	for (uint64_t k = thread_index(); k < groups; k += thread_count()) {
		const uint64_t begin = k * GROUP - skip; /* wraps before 0 in group 0 */
		float out[GROUP];

		group_of(a, first + k, out);
		if (aligned && begin < a.n && a.n - begin >= GROUP) {
			f32::put(a.dst, begin, f32::narrow(out));
			continue;
		}
#pragma unroll
		for (int j = 0; j < GROUP; j++)
			if (begin + j < a.n)
				reinterpret_cast<float *>(a.dst)[begin + j] = out[j];
	}
}
