/*
 * Norms: one partial for each block of threads.
 *
 * Sums of squares are fp64. A thread adds its elements to four sums, element j of a vector
 * to sum j; the sums of a thread, the threads of a warp (a tree) and the warps of a block
 * are added in a fixed order, so that the same n, address modulo 16 and launch give the
 * same bits again.
 *
 * Compared with kernels/ref, which uses another order: every square is exact in fp64 and none is
 * negative, so a sum of terms each of which goes through at most d additions has a relative error
 * of at most d * 2^-53. With b blocks a thread's sum takes n/(1024*b) + 4 additions, the tree 5,
 * the warps 8, the host b; ref's block 8192 + 8 and its blocks n/65536. The sums thus differ by at
 * most (n/(1024*b) + 17 + b + 8200 + n/65536) * 2^-53 relative, which is below 2^-38 for every n up
 * to 2^32 where a device is filled (b >= 512), and the norm, its root in fp32, by at most one ulp.
 * Maxima are exact. Other powers are CUDA's pow, which is within two units in the last place (2^-52
 * relative each) of |x|^p, as is the C library's: 2^-50 more.
 */
#include "device.cuh"

#define WARP       32
#define WARPS      (LAUNCH_THREADS / WARP)
#define ALL_LANES  0xffffffffu

struct squares_body {
	uint64_t x;
	double sum[LAUNCH_VECTOR];

	template <int V, int U> __device__ __forceinline__ void at(uint64_t i)
	{
		typename vec<DTYPE_FP32, V>::raw b[U];

#pragma unroll
		for (int u = 0; u < U; u++)
			b[u] = vec<DTYPE_FP32, V>::get(x, vector_at<V>(i, u));
#pragma unroll
		for (int u = 0; u < U; u++)
#pragma unroll
			for (int j = 0; j < V; j++)
				sum[j] = el_add_square(sum[j], EL_FLOAT(b[u].w[j]));
	}
};

struct max_body {
	uint64_t x;
	uint32_t max;

	template <int V, int U> __device__ __forceinline__ void at(uint64_t i)
	{
		typename vec<DTYPE_FP32, V>::raw b[U];

#pragma unroll
		for (int u = 0; u < U; u++)
			b[u] = vec<DTYPE_FP32, V>::get(x, vector_at<V>(i, u));
#pragma unroll
		for (int u = 0; u < U; u++)
#pragma unroll
			for (int j = 0; j < V; j++)
				max = el_max_abs(max, EL_FLOAT(b[u].w[j]));
	}
};

/* The partials of all warps in shared memory; @mine is lane 0's of its warp. */
static __device__ __forceinline__ void meet(double warp[WARPS], double mine)
{
	if (threadIdx.x % WARP == 0)
		warp[threadIdx.x / WARP] = mine;
	__syncthreads();
}

struct power_body {
	uint64_t x;
	double p;
	double sum[LAUNCH_VECTOR];

	template <int V, int U> __device__ __forceinline__ void at(uint64_t i)
	{
		typename vec<DTYPE_FP32, V>::raw b = vec<DTYPE_FP32, V>::get(x, i);

		static_assert(U == 1, "one vector in a turn");
#pragma unroll
		for (int j = 0; j < V; j++)
			sum[j] = el_add_power(sum[j], EL_FLOAT(b.w[j]), p);
	}
};

/* The sums of all threads of the block, in @partial. */
static __device__ __forceinline__ void add_block(const double sums[LAUNCH_VECTOR], uint64_t partial)
{
	__shared__ double warp[WARPS];
	double sum = sums[0];

	for (int j = 1; j < LAUNCH_VECTOR; j++)
		sum = EL_ADD64(sum, sums[j]);
	for (int step = WARP / 2; step > 0; step /= 2)
		sum = EL_ADD64(sum, __shfl_down_sync(ALL_LANES, sum, step));
	meet(warp, sum);
	if (threadIdx.x != 0)
		return;
	for (int w = 1; w < WARPS; w++)
		sum = EL_ADD64(sum, warp[w]);
	reinterpret_cast<double *>(partial)[blockIdx.x] = sum;
}

static __device__ __forceinline__ void norm_squares(const struct cuda_norm &a, uint64_t head)
{
	squares_body body = { a.x, {} };

	walk_any<LAUNCH_VECTOR, LAUNCH_NORM_UNROLL>(a.n, head, body);
	add_block(body.sum, a.partial);
}

static __device__ __forceinline__ void norm_max(const struct cuda_norm &a, uint64_t head)
{
	__shared__ uint32_t all;
	max_body body = { a.x, 0 };

	if (threadIdx.x == 0)
		all = 0;
	__syncthreads();
	walk_any<LAUNCH_VECTOR, LAUNCH_NORM_UNROLL>(a.n, head, body);
	body.max = __reduce_max_sync(ALL_LANES, body.max);
	if (threadIdx.x % WARP == 0)
		atomicMax(&all, body.max);
	__syncthreads();
	if (threadIdx.x == 0)
		reinterpret_cast<double *>(a.partial)[blockIdx.x] = EL_FLOAT(all);
}

KERNEL(6) shardd_norm(const __grid_constant__ struct cuda_norm a)
{
	uint64_t head = head_of<4, LAUNCH_VECTOR>(a.x);

	if (a.inf)
		norm_max(a, head);
	else
		norm_squares(a, head);
}

/* A power takes many registers, and far longer than the memory. */
KERNEL(2) shardd_norm_power(const __grid_constant__ struct cuda_norm_power a)
{
	power_body body = { a.x, a.p, {} };

	walk_any<LAUNCH_VECTOR, 1>(a.n, head_of<4, LAUNCH_VECTOR>(a.x), body);
	add_block(body.sum, a.partial);
}
