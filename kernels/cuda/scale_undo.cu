#include "undo.cuh"

struct scale_undo_body {
	uint64_t x;
	float factor;
	thread_undo undo;

	template <int V, int U> __device__ __forceinline__ void at(uint64_t i)
	{
		using f32 = vec<DTYPE_FP32, V>;
		typename f32::raw b;

		static_assert(U == 1, "one vector in a turn");
		if (undo.passes())
			return;
		b = load<f32::BYTES>(undo.from(0, x + i * 4));
		undo.save(0, b);
		undo.publish();
#pragma unroll
		for (int j = 0; j < V; j++)
			b.w[j] = EL_BITS(el_scale(EL_FLOAT(b.w[j]), factor));
		f32::put(x, i, b);
	}
};

KERNEL(6) shardd_scale_undo(const __grid_constant__ struct cuda_scale_undo a)
{
	scale_undo_body body = { a.a.x, a.a.factor, thread_undo(a.undo) };

	walk_any<LAUNCH_VECTOR, 1>(a.a.n, head_of<4, LAUNCH_VECTOR>(a.a.x), body);
}
