/*
 * How much one thread does in one turn of its loop: read by the kernels, and by cuda_fn_blocks,
 * which launches no block without work.
 *
 * A turn is UNROLL vectors: as many loads are in flight at once. An H200 needs at least about 4.8
 * TB/s * 700 ns = 3.4 MB, 25 KB on each multiprocessor; the numbers below give two to four times
 * that at the occupancy their registers allow. Plain numbers: no code, no types.
 */
#ifndef SHARDD_CUDA_LAUNCH_H
#define SHARDD_CUDA_LAUNCH_H

/* Threads of a block. */
#define LAUNCH_THREADS 256

/* Elements of a vector: 16 bytes of fp32 (and 8 of a 16-bit type that goes with it), or 16
 * bytes where all are 16-bit. So a warp reads and writes without gaps in every array. */
#define LAUNCH_VECTOR       4
#define LAUNCH_SHORT_VECTOR 8

/* Vectors of a turn. */
#define LAUNCH_CAST_UNROLL       4
#define LAUNCH_REDUCE_1_UNROLL   4 /* of each input: one, two, or groups of four */
#define LAUNCH_REDUCE_2_UNROLL   2
#define LAUNCH_REDUCE_UNROLL     2 /* of 16-bit inputs; of fp32 half as many */
#define LAUNCH_REDUCE_GROUP      4
#define LAUNCH_ALL_REDUCE_UNROLL 1 /* groups of four */
#define LAUNCH_OPTIMIZER_UNROLL  1 /* four arrays */
#define LAUNCH_NORM_UNROLL       4
#define LAUNCH_SCALE_UNROLL      1
#define LAUNCH_FOUND_INF_UNROLL  4
#define LAUNCH_PACK_UNROLL       4

#endif
