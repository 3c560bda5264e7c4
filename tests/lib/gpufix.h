/*
 * What the tests on GPUs have in common: a daemon with so many devices, trainers that
 * are placed on them, and what a trainer does with CUDA itself.
 *
 * They run where SHARDD_TEST_BACKEND is cuda, else every one is skipped. The devices are
 * the simulator's if SHARDD_LIBCUDA names a library: then a test chooses how many there
 * are and what goes wrong with them. Else they are those of the machine, and tests that
 * need more of them, or failures, are skipped. The test process itself never loads CUDA,
 * which does not live through a fork; trainers do.
 */
#ifndef SHARDD_TESTS_GPUFIX_H
#define SHARDD_TESTS_GPUFIX_H

#include "core/cuda_lib.h"
#include "failfix.h"

/* ------------------------------------------------------------------- the test */

/* Are the devices the simulator's? */
bool gpu_simulated(void);

/* A setting of the simulator ("SHARDD_SIM_LOSE") for the daemon and the trainers that are
 * started from here on; @value NULL: none. Before gpu_begin; skips the test on a machine's
 * own devices, which take no settings. */
void gpu_set(const char *name, const char *value);

/* As failfix_begin, with @devices devices or more; skips the test where it must be.
 * In the test's body, not in .init: what is skipped there would still be ended. */
void gpu_begin(unsigned devices, const char *const *args);
/* As failfix_end. */
void gpu_end(void);

/* How many devices the daemon has; on the host, too. */
unsigned gpu_count(void);

/* UUID of the daemon's device number @device, as it says itself. */
void gpu_uuid(unsigned device, char ret[48]);

/* Where the ranks of a job are: side by side, or in turn. */
struct gpu_layout {
	unsigned devices, world;
	bool in_turn;
};
unsigned gpu_of(const struct gpu_layout *l, uint32_t rank);

/* --------------------------------------------------------------- in a trainer */

/* As train_connect and train_join, on the daemon's device number @device. */
shardd_client *gpu_connect(const struct trainer *t, unsigned device);
shardd_client *gpu_join(const struct trainer *t, unsigned device);

#ifdef SHARDD_CUDA

/* This process's CUDA, on one device. */
struct gpu {
	const struct cuda_lib *cu;
	CUdevice device;
	CUcontext context;
	CUfunction spin;
};

/* Load libcuda, make the primary context of device number @device current. Before any
 * stream of this process waits for anything: modules are loaded here. */
void gpu_open(struct gpu *g, unsigned device);

/* The call must succeed, else the trainer ends with 1. */
#define GPU_OK(g, call) gpu_ok((g), (call), #call, __FILE__, __LINE__)
void gpu_ok(const struct gpu *g, CUresult r, const char *call, const char *file, int line);

/* A stream that is not synchronised with the default one. */
CUstream gpu_stream(const struct gpu *g);
/* Keep @stream busy for @us microseconds. */
void gpu_spin(const struct gpu *g, CUstream stream, unsigned us);
/* Pinned memory, zeroed: copies from and to it take place when the stream gets there. */
void *gpu_pinned(const struct gpu *g, size_t bytes);
/* Late copies on @stream between pinned memory and what an op handed out. */
void gpu_put(const struct gpu *g, CUstream stream, void *dst, const void *pinned, size_t bytes);
void gpu_get(const struct gpu *g, CUstream stream, void *pinned, const void *src, size_t bytes);
/* From here on nothing on @stream is executed: it waits for a word that nobody writes. */
void gpu_block(const struct gpu *g, CUstream stream);
/* Wait for all of @stream, at most 60 s. */
void gpu_drain(const struct gpu *g, CUstream stream);

#endif
#endif
