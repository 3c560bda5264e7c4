/*
 * Tensors that are made of boxes of others (k_assemble). The threads of a block make one block of the
 * operation after the other, in the destination: neighbours write neighbouring elements. They read what they
 * have written for its checksum, while it is in the second-level cache.
 */
#include "device.cuh"

#define WARP          32
#define CRC_POLYNOMIAL 0x82f63b78u /* CRC-32C, reflected: bit 31 is x^0 */
#define CRC_ONE        0x80000000u
#define CRC_WORD       32 /* bits */

/* --------------------------------------------------------------------------- checksums */

/* A checksum c is a polynomial over GF(2), and the zero bits behind what it is of multiply it by a power of x. A
 * thread takes every LAUNCH_THREADS-th word, so its sum moves by that many words each time; at the end each
 * sum moves over the words that other threads have behind its last one, and all are added. */
struct crc_tables {
	uint32_t move[4][256];         /* [k][b]: c = b << 8k, moved by a turn */
	uint32_t rest[LAUNCH_THREADS]; /* x to the bits from a thread's word to the end of a turn */
};

static __device__ uint32_t crc_multiply(uint32_t a, uint32_t b)
{
	uint32_t product = 0;

	for (int i = 0; i < 32; i++) {
		product ^= a >> 31 ? b : 0;
		a <<= 1;
		b = b & 1 ? b >> 1 ^ CRC_POLYNOMIAL : b >> 1;
	}
	return product;
}

/* x^n */
static __device__ uint32_t crc_power(uint32_t n)
{
	uint32_t square = CRC_ONE >> 1, power = CRC_ONE;

	for (; n; n >>= 1) {
		if (n & 1)
			power = crc_multiply(power, square);
		square = crc_multiply(square, square);
	}
	return power;
}

/* All threads. */
static __device__ void crc_begin(struct crc_tables &t)
{
	const uint32_t turn = crc_power(LAUNCH_THREADS * CRC_WORD);

	for (uint32_t k = 0; k < 4; k++)
		t.move[k][threadIdx.x] = crc_multiply(turn, threadIdx.x << 8 * k);
	t.rest[threadIdx.x] = crc_power((LAUNCH_THREADS - threadIdx.x) * CRC_WORD);
	__syncthreads();
}

static __device__ __forceinline__ uint32_t crc_move(const struct crc_tables &t, uint32_t c)
{
	return t.move[0][c & 0xff] ^ t.move[1][c >> 8 & 0xff] ^ t.move[2][c >> 16 & 0xff] ^
	       t.move[3][c >> 24];
}

static __device__ uint32_t crc_bytes(uint32_t c, uint64_t at, uint32_t bytes)
{
	for (uint32_t i = 0; i < bytes; i++) {
		c ^= reinterpret_cast<const uint8_t *>(at)[i];
		for (int bit = 0; bit < 8; bit++)
			c = c & 1 ? c >> 1 ^ CRC_POLYNOMIAL : c >> 1;
	}
	return c;
}

/* Of @bytes at @at, a multiple of 4, which the block of threads has written. The words end with a turn, so the first
 * one may have fewer. To begin with ones is to flip the first word. All threads. */
static __device__ void crc_write(const struct crc_tables &t, uint64_t at, uint32_t bytes, uint32_t *ret)
{
	__shared__ uint32_t sum;
	const uint32_t words = bytes / 4, turns = (words + LAUNCH_THREADS - 1) / LAUNCH_THREADS;
	const uint32_t missing = turns * LAUNCH_THREADS - words;
	uint32_t c = 0;

	__syncthreads();
	if (threadIdx.x == 0)
		sum = 0;
	__syncthreads();
	for (uint32_t i = threadIdx.x; i < turns * LAUNCH_THREADS; i += LAUNCH_THREADS) {
		c = crc_move(t, c);
		if (i >= missing)
			c ^= load<4>(at + 4 * static_cast<uint64_t>(i - missing)).w[0];
		if (i == missing)
			c = ~c;
	}
	if (turns)
		atomicXor(&sum, crc_multiply(c, t.rest[threadIdx.x]));
	__syncthreads();
	if (threadIdx.x == 0)
		*ret = ~crc_bytes(turns ? sum : UINT32_MAX, at + 4 * static_cast<uint64_t>(words), bytes % 4);
}

/* ------------------------------------------------------------------------------- boxes */

/* Element number @column of row @row of a box. */
struct at {
	uint64_t row, column;
};

/* @by: less than a row, and some rows, of @columns. */
static __device__ __forceinline__ void at_move(struct at *p, const struct at &by, uint64_t columns)
{
	p->row += by.row;
	p->column += by.column;
	if (p->column >= columns) {
		p->column -= columns;
		p->row++;
	}
}

/* Rows are in two dimensions. */
static __device__ __forceinline__ uint64_t box_offset(const struct k_assemble_box &x, uint64_t row,
						      const uint64_t stride[2])
{
	if (x.n[1] == 1)
		return row * stride[0];
	if (x.n[0] == 1)
		return row * stride[1];
	return row / x.n[1] * stride[0] + row % x.n[1] * stride[1];
}

static __device__ __forceinline__ uint64_t box_row_at(const struct k_assemble_box &x, uint64_t row)
{
	return x.at + box_offset(x, row, x.dst_stride);
}

/* The first row of which something is at or behind @place, which ascends with rows. */
static __device__ uint64_t box_first_row(const struct k_assemble_box &x, uint64_t place)
{
	uint64_t lo = 0, hi = x.n[0] * x.n[1];

	while (lo < hi) {
		uint64_t middle = lo + (hi - lo) / 2;

		if (box_row_at(x, middle) + x.n[2] > place)
			hi = middle;
		else
			lo = middle + 1;
	}
	return lo;
}

/* Elements of the box that are in [first, first + n) of the tensor: they follow each other in the box.
 * Return: how many; 0: none. */
static __device__ uint64_t box_part(const struct k_assemble_box &x, uint64_t first, uint64_t n, struct at *ret)
{
	const uint64_t rows = x.n[0] * x.n[1], end = first + n;
	uint64_t row, last, at, from, to;

	if (x.at >= end || box_row_at(x, rows - 1) + x.n[2] <= first)
		return 0;
	row = box_first_row(x, first);
	at = box_row_at(x, row);
	if (at >= end)
		return 0;
	from = at < first ? first - at : 0;
	last = box_first_row(x, end); /* ends behind it, if it is there */
	to = 0;
	if (last < rows && box_row_at(x, last) < end)
		to = end - box_row_at(x, last);
	*ret = { row, from };
	return (last - row) * x.n[2] + to - from;
}

/* V neighbouring elements, as fp32, at @to of the tensor. */
template <int T> struct box_put {
	uint64_t dst;

	template <int V> __device__ __forceinline__ void put(uint64_t to, const float f[V])
	{
		vec<T, V>::put(dst, to, vec<T, V>::narrow(f));
	}

	template <int S, int V>
	__device__ __forceinline__ void take(uint64_t to, const typename vec<S, V>::raw &raw)
	{
		float f[V];

		if constexpr (S == T) {
			vec<T, V>::put(dst, to, raw);
		} else {
#pragma unroll
			for (int j = 0; j < V; j++)
				f[j] = vec<S, V>::widen(raw, j);
			put<V>(to, f);
		}
	}
};

/* The tile of an element of a tensor with scales. */
static __device__ __forceinline__ uint64_t tile_of(const struct k_assemble_scales &s, uint64_t e)
{
	const uint64_t down = (s.rows + s.tile_rows - 1) / s.tile_rows;
	const uint64_t across = (s.columns + s.tile_columns - 1) / s.tile_columns;
	const uint64_t row = e / s.columns % s.rows, matrix = e / s.columns / s.rows;

	return (matrix * down + row / s.tile_rows) * across + e % s.columns / s.tile_columns;
}

struct box_quantise {
	uint64_t dst;
	const struct k_assemble_scales *s;

	template <int S, int V>
	__device__ __forceinline__ void take(uint64_t to, const typename vec<S, V>::raw &raw)
	{
#pragma unroll
		for (int j = 0; j < V; j++) {
			float scale = el_e4m3_scale(s->amax[tile_of(*s, to + j)]);

			float f = vec<S, V>::widen(raw, j);

			reinterpret_cast<uint8_t *>(dst)[to + j] = el_e4m3_divided(f, scale);
		}
	}
};

/* The largest of a tile is told when the next one begins. */
struct box_measure {
	const struct k_assemble_scales *s;
	uint64_t tile;
	uint32_t most;

	__device__ __forceinline__ void tell()
	{
		if (most)
			atomicMax(&s->amax[tile], most);
		most = 0;
	}

	template <int S, int V>
	__device__ __forceinline__ void take(uint64_t to, const typename vec<S, V>::raw &raw)
	{
#pragma unroll
		for (int j = 0; j < V; j++) {
			const uint64_t now = tile_of(*s, to + j);
			const float f = vec<S, V>::widen(raw, j);
			const uint32_t abs = EL_BITS(f) & EL_ABS_MASK;

			if (now != tile)
				tell();
			tile = now;
			most = abs > most ? abs : most;
		}
	}
};

template <int S, int V, class B>
static __device__ __forceinline__ void box_walk(const struct k_assemble_box &x, struct at p, uint64_t n,
						B &body)
{
	const uint64_t src = reinterpret_cast<uint64_t>(x.src), step = LAUNCH_THREADS * V;
	const struct at by = { step / x.n[2], step % x.n[2] };
	uint64_t i = static_cast<uint64_t>(threadIdx.x) * V;

	at_move(&p, { i / x.n[2], i % x.n[2] }, x.n[2]);
	for (; i < n; i += step) {
		const uint64_t from = box_offset(x, p.row, x.src_stride) + p.column * x.src_stride[2];

		body.template take<S, V>(box_row_at(x, p.row) + p.column, vec<S, V>::get(src, from));
		at_move(&p, by, x.n[2]);
	}
}

/* Do all rows, and the part of the box, begin and end at whole vectors? */
template <int S, int V>
static __device__ __forceinline__ bool box_fits(const struct k_assemble_box &x, const struct at &p, uint64_t n,
						uint64_t dst)
{
	const uint64_t odd = x.n[2] | x.at | x.src_stride[0] | x.src_stride[1] | x.dst_stride[0] |
			     x.dst_stride[1] | p.column | n;

	return x.src_stride[2] == 1 && odd % V == 0 && dst % (4 * V) == 0 &&
	       reinterpret_cast<uint64_t>(x.src) % (size_of<S> * V) == 0;
}

template <int S, class B>
static __device__ __forceinline__ void box_from(const struct k_assemble_box &x, const struct at &p, uint64_t n,
						uint64_t dst, B &body)
{
	if (box_fits<S, LAUNCH_VECTOR>(x, p, n, dst))
		box_walk<S, LAUNCH_VECTOR>(x, p, n, body);
	else
		box_walk<S, 1>(x, p, n, body);
}

/* @dst: of the tensor, for its alignment. */
template <class B>
static __device__ void boxes(const struct k_assemble_tensor &t, const struct k_assemble_block &b, uint64_t dst,
			     B &body)
{
	for (unsigned i = 0; i < t.n_boxes; i++) {
		const struct k_assemble_box &x = t.boxes[i];
		struct at p = { 0, 0 };
		const uint64_t n = box_part(x, b.first, b.n, &p);

		if (!n)
			continue;
		if (x.src_dtype == DTYPE_FP32)
			box_from<DTYPE_FP32>(x, p, n, dst, body);
		else if (x.src_dtype == DTYPE_BF16)
			box_from<DTYPE_BF16>(x, p, n, dst, body);
		else
			box_from<DTYPE_FP16>(x, p, n, dst, body);
	}
}

/* ------------------------------------------------------------------------------- passes */

/* Bytes of an element that is made. */
static __device__ __forceinline__ uint32_t made_size(uint32_t dtype)
{
	return dtype == DTYPE_FP32 ? 4 : dtype == DTYPE_E4M3 ? 1 : 2;
}

/* What no box has. */
static __device__ void make_gaps(const struct k_assemble_tensor &t, const struct k_assemble_block &b,
				 uint64_t dst)
{
	const uint32_t size = made_size(t.dst_dtype);

	for (uint32_t i = threadIdx.x; i < b.n; i += LAUNCH_THREADS) {
		const uint64_t e = b.first + i;

		if (t.dst_dtype == DTYPE_E4M3)
			reinterpret_cast<uint8_t *>(dst)[e] = el_e4m3_divided(
				0, el_e4m3_scale(t.scales->amax[tile_of(*t.scales, e)]));
		else if (size == 4)
			reinterpret_cast<uint32_t *>(dst)[e] = 0;
		else
			reinterpret_cast<uint16_t *>(dst)[e] = 0;
	}
	__syncthreads();
}

static __device__ void make_scales(const struct k_assemble_tensor &t, const struct k_assemble_block &b,
				   uint64_t dst)
{
	for (uint32_t i = threadIdx.x; i < b.n; i += LAUNCH_THREADS)
		reinterpret_cast<float *>(dst)[b.first + i] = el_e4m3_scale(t.scales->amax[b.first + i]);
}

template <int T>
static __device__ void make_boxes(const struct k_assemble_tensor &t, const struct k_assemble_block &b,
				  uint64_t dst)
{
	box_put<T> body = { dst };

	boxes(t, b, dst, body);
}

static __device__ void make(const struct k_assemble_tensor &t, const struct k_assemble_block &b, uint64_t dst)
{
	box_quantise quantise = { dst, t.scales };

	if (t.gaps)
		make_gaps(t, b, dst);
	if (t.dst_dtype == DTYPE_E4M3)
		boxes(t, b, dst, quantise);
	else if (t.scales)
		make_scales(t, b, dst);
	else if (t.dst_dtype == DTYPE_FP32)
		make_boxes<DTYPE_FP32>(t, b, dst);
	else if (t.dst_dtype == DTYPE_BF16)
		make_boxes<DTYPE_BF16>(t, b, dst);
	else
		make_boxes<DTYPE_FP16>(t, b, dst);
}

static __device__ void prepare(const struct k_assemble_tensor &t, const struct k_assemble_block &b, bool clears)
{
	box_measure measure = { t.scales, 0, 0 };

	if (clears)
		for (uint32_t i = threadIdx.x; i < b.n; i += LAUNCH_THREADS)
			t.scales->amax[b.first + i] = 0;
	else
		boxes(t, b, 0, measure);
	measure.tell();
}

/* ------------------------------------------------------------------------------- deltas */

/* Of a block of @n elements of @size bytes, as in k_delta_block. */
struct delta_form {
	uint32_t n, size;

	__device__ __forceinline__ uint64_t padded(uint64_t bytes) const
	{
		return (bytes + 7) / 8 * 8;
	}

	__device__ __forceinline__ bool dense(uint32_t changed) const
	{
		return static_cast<uint64_t>(changed) * (2 + size) >= static_cast<uint64_t>(n) * size;
	}

	__device__ __forceinline__ uint64_t bytes(uint32_t changed) const
	{
		return dense(changed) ? padded(static_cast<uint64_t>(n) * size)
				      : padded(2ull * changed) + padded(static_cast<uint64_t>(changed) * size);
	}
};

static __device__ __forceinline__ uint32_t delta_get(uint64_t at, uint32_t i, uint32_t size)
{
	return size == 4   ? reinterpret_cast<const uint32_t *>(at)[i]
	       : size == 2 ? reinterpret_cast<const uint16_t *>(at)[i]
			   : reinterpret_cast<const uint8_t *>(at)[i];
}

static __device__ __forceinline__ void delta_put(uint64_t at, uint32_t i, uint32_t size, uint32_t value)
{
	if (size == 4)
		reinterpret_cast<uint32_t *>(at)[i] = value;
	else if (size == 2)
		reinterpret_cast<uint16_t *>(at)[i] = static_cast<uint16_t>(value);
	else
		reinterpret_cast<uint8_t *>(at)[i] = static_cast<uint8_t>(value);
}

/* Zeros behind @bytes. */
static __device__ __forceinline__ void delta_pad(const struct delta_form &f, uint64_t at, uint64_t bytes)
{
	for (uint64_t i = bytes; i < f.padded(bytes); i++)
		reinterpret_cast<uint8_t *>(at)[i] = 0;
}

/* All values. */
static __device__ void delta_write_dense(const struct delta_form &f, uint64_t made, uint64_t to)
{
	for (uint32_t i = threadIdx.x; i < f.n; i += LAUNCH_THREADS)
		delta_put(to, i, f.size, delta_get(made, i, f.size));
	if (threadIdx.x == 0)
		delta_pad(f, to, static_cast<uint64_t>(f.n) * f.size);
}

/* What the block of threads shares. */
struct delta_shared {
	uint32_t before[LAUNCH_THREADS + 1]; /* changes in the parts of threads before */
	uint64_t at;
	bool fits;
};

/* Room for the changes, and what is known of them. One thread. */
static __device__ void delta_take(const struct cuda_assemble &a, uint64_t e, const struct delta_form &f,
				  struct delta_shared &s)
{
	struct k_delta_block *ret = reinterpret_cast<struct k_delta_block *>(a.deltas) + e;
	uint32_t changed = 0;
	uint64_t bytes;

	for (uint32_t i = 0; i < LAUNCH_THREADS; i++) {
		const uint32_t own = s.before[i];

		s.before[i] = changed;
		changed += own;
	}
	s.before[LAUNCH_THREADS] = changed;
	bytes = f.bytes(changed);
	s.at = atomicAdd(reinterpret_cast<unsigned long long *>(a.used), static_cast<unsigned long long>(bytes));
	s.fits = s.at <= a.room && bytes <= a.room - s.at;
	ret->at = s.fits ? s.at : KERNEL_DELTA_NONE;
	ret->changed = changed;
	ret->crc = 0;
	ret->dense = f.dense(changed);
	ret->zero = 0;
}

/* The elements of block @e at @made that differ from the base. Each thread has a part of them, one part behind the
 * other, so that positions ascend. All threads. */
static __device__ void delta_write(const struct cuda_assemble &a, const struct crc_tables &crc, uint64_t e,
				   uint64_t made, const struct delta_form &f)
{
	__shared__ struct delta_shared s;
	const uint32_t each = (f.n + LAUNCH_THREADS - 1) / LAUNCH_THREADS;
	const uint32_t begin = threadIdx.x * each < f.n ? threadIdx.x * each : f.n;
	const uint32_t end = begin + each < f.n ? begin + each : f.n;
	const uint64_t base = made + a.shift;
	uint32_t changed = 0, total;
	uint64_t to;

	__syncthreads();
	for (uint32_t i = begin; i < end; i++)
		changed += delta_get(made, i, f.size) != delta_get(base, i, f.size);
	s.before[threadIdx.x] = changed;
	__syncthreads();
	if (threadIdx.x == 0)
		delta_take(a, e, f, s);
	__syncthreads();
	total = s.before[LAUNCH_THREADS];
	to = a.out + s.at;
	if (!s.fits)
		return;
	if (f.dense(total)) {
		delta_write_dense(f, made, to);
	} else {
		const uint64_t values = to + f.padded(2ull * total);
		uint32_t k = s.before[threadIdx.x];

		for (uint32_t i = begin; i < end; i++) {
			const uint32_t value = delta_get(made, i, f.size);

			if (value == delta_get(base, i, f.size))
				continue;
			delta_put(to, k, 2, i);
			delta_put(values, k++, f.size, value);
		}
		if (threadIdx.x == 0) {
			delta_pad(f, to, 2ull * total);
			delta_pad(f, values, static_cast<uint64_t>(total) * f.size);
		}
	}
	crc_write(crc, to, static_cast<uint32_t>(f.bytes(total)),
		  &reinterpret_cast<struct k_delta_block *>(a.deltas)[e].crc);
}

KERNEL(2) shardd_assemble(const __grid_constant__ struct cuda_assemble a)
{
	const struct k_assemble_block *blocks = reinterpret_cast<const struct k_assemble_block *>(a.blocks);
	const struct k_assemble_tensor *tensors = reinterpret_cast<const struct k_assemble_tensor *>(a.tensors);
	__shared__ struct crc_tables crc;

	if (a.pass == K_ASSEMBLE_MAKE)
		crc_begin(crc);
	for (uint64_t e = blockIdx.x; e < a.n; e += gridDim.x) {
		const struct k_assemble_block b = blocks[e];
		const struct k_assemble_tensor &t = tensors[b.tensor];
		const uint64_t dst = a.base + reinterpret_cast<uint64_t>(t.dst);
		const uint32_t size = made_size(t.dst_dtype);

		if (a.pass != K_ASSEMBLE_MAKE) {
			prepare(t, b, a.pass == K_ASSEMBLE_CLEAR);
			continue;
		}
		make(t, b, dst);
		crc_write(crc, dst + b.first * size, b.n * size, reinterpret_cast<uint32_t *>(a.crc) + e);
		if (a.deltas)
			delta_write(a, crc, e, dst + b.first * size, { b.n, size });
	}
}
