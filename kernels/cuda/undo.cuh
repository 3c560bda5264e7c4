/*
 * Kernels whose launch can be completed by another process after theirs was killed.
 *
 * Each thread keeps, in memory that outlives the process, the old contents of the vectors that it is
 * about to change, and one word: the launch, and which of its calls is under way. Calls before are
 * done; those after have changed nothing. A process that launches the kernel again, with the same
 * number, arguments and blocks, continues: a thread passes over what is done, and takes the inputs of
 * the call that was under way from what it has kept.
 *
 * A thread's stores take effect in any order, and any of them may be missing when it is killed; a
 * fence orders those before it before those after it. So in each call: store the old contents;
 * fence; store the word; fence; store the new contents. The first fence is also the one after the
 * new contents of the call before. Old contents go to two places in turn, over launches, too, so that
 * those of the call that the word names are whole until the word names the next one.
 *
 * No thread waits for another one. The places of neighbouring threads lie side by side.
 */
#ifndef SHARDD_CUDA_UNDO_CUH
#define SHARDD_CUDA_UNDO_CUH

#include "device.cuh"

/* These stay in the second-level cache: no hint to evict them. */
template <int BYTES> static __device__ __forceinline__ void keep(uint64_t address, bits<BYTES> b)
{
	if constexpr (BYTES == 16)
		__stwb(reinterpret_cast<uint4 *>(address), make_uint4(b.w[0], b.w[1], b.w[2], b.w[3]));
	else
		__stwb(reinterpret_cast<uint32_t *>(address), b.w[0]);
}

/* For kernels that keep nothing: the compiler removes all of it. */
struct no_undo {
	static constexpr bool keeps = false;

	__device__ __forceinline__ bool passes()
	{
		return false;
	}
	__device__ __forceinline__ uint64_t from(int array, uint64_t address)
	{
		(void)array;
		return address;
	}
	template <int BYTES> __device__ __forceinline__ void save(int array, const bits<BYTES> &b)
	{
		(void)array, (void)b;
	}
	__device__ __forceinline__ void publish()
	{
	}
};

struct thread_undo {
	static constexpr bool keeps = true;

	uint64_t word, old; /* addresses of this thread's own */
	uint64_t launch;    /* its number, in the place that it has in the word */
	uint32_t apart;     /* bytes from one array's place to the next one's */
	uint32_t half;      /* which of the two places is the present call's, in the word's bit */
	uint32_t call;      /* number of the present one, from 1 on */
	uint32_t again;     /* of the one that was under way; 0: none */

	__device__ __forceinline__ explicit thread_undo(const struct cuda_undo &u)
	{
		uint64_t thread = thread_index(), was;

		word = u.words + thread * CUDA_UNDO_WORD;
		old = u.old + thread * CUDA_UNDO_VECTOR;
		launch = u.launch << CUDA_UNDO_LAUNCH_SHIFT;
		apart = u.room * CUDA_UNDO_VECTOR;
		call = 0;
		was = __ldcs(reinterpret_cast<const unsigned long long *>(word));
		half = static_cast<uint32_t>(was) & CUDA_UNDO_HALF;
		again = was >> CUDA_UNDO_LAUNCH_SHIFT == u.launch
				? static_cast<uint32_t>(was) & CUDA_UNDO_CALL_MASK
				: 0;
	}

	/* A call begins. Return: was it done before? */
	__device__ __forceinline__ bool passes()
	{
		call++;
		if (call > again)
			half ^= CUDA_UNDO_HALF;
		return call < again;
	}

	__device__ __forceinline__ uint64_t place(int array) const
	{
		uint32_t at = static_cast<uint32_t>(array) + (half ? CUDA_UNDO_ARRAYS : 0);

		return old + static_cast<uint64_t>(at) * apart;
	}

	/* Where the contents of @address before this call are. */
	__device__ __forceinline__ uint64_t from(int array, uint64_t address) const
	{
		return call == again ? place(array) : address;
	}

	template <int BYTES> __device__ __forceinline__ void save(int array, const bits<BYTES> &b) const
	{
		if (call != again)
			keep<BYTES>(place(array), b);
	}

	/* All of them are saved; from here on they may be changed. */
	__device__ __forceinline__ void publish() const
	{
		if (call == again)
			return;
		__threadfence();
		__stwb(reinterpret_cast<unsigned long long *>(word), launch | half | call);
		__threadfence();
	}
};

#endif
