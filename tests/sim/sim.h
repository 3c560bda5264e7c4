/*
 * What the software libcuda.so.1 gives to the software libnccl.so.2, beside the CUDA API.
 *
 * libnccl.so.2 is linked with libcuda.so.1 (same folder, $ORIGIN): the process has loaded
 * that one already, by path, and the loader recognises it by its soname. So these are
 * ordinary functions, and there is one simulator per process.
 *
 * A stream is a thread that executes its items in order. An item of NCCL is a step
 * function, which that thread calls again and again until it says that it is done; it
 * must not block and not call the CUDA API, only the functions below marked "stream
 * thread".
 */
#ifndef SHARDD_TESTS_SIM_H
#define SHARDD_TESTS_SIM_H

#include <cuda.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#pragma GCC visibility push(default)

/* Put an item at the end of @stream (NULL: the current context's default stream).
 * @step: called by the stream's thread until it returns nonzero, then never again. Between
 * two calls the thread sleeps up to half a millisecond, or until sim_kick. It is also
 * called when the context is broken: sim_step_error says so, and it should then end.
 * @arg: borrowed until @step returned nonzero; @step may free it then.
 * Any thread, with a current context. Return: CUDA_SUCCESS or what is wrong. */
CUresult sim_stream_enqueue(CUstream stream, int (*step)(void *arg), void *arg);

/* Call all steps that sleep again, now: something they wait for in this process
 * happened. Any thread. */
void sim_kick(void);

/* CPU address of device memory (or pinned host memory), or NULL when the stream's device
 * may not access all of it: then the context is broken (CUDA_ERROR_ILLEGAL_ADDRESS) and a
 * line was printed. Valid until the step returned nonzero, also if somebody unmaps it
 * meanwhile. @bytes 0: never NULL. Stream thread. */
void *sim_translate(CUdeviceptr addr, size_t bytes, int write);

/* As sim_translate, but looks only whether the memory is there and which device it is on
 * (CUdevice; -1: host), for checks when a call is made. Breaks nothing. Any thread.
 * Return: false if it is not there in full, or not accessible from @from. */
bool sim_range(CUdevice from, CUdeviceptr addr, size_t bytes, int write, int *ret_device);

/* The error of the context whose stream calls (the device is lost, an illegal address),
 * CUDA_SUCCESS while it works. Stream thread. */
CUresult sim_step_error(void);

/* Break the context of the stream that calls, as a fault of a kernel does. Stream thread. */
void sim_step_fail(CUresult error);

/* Device of @stream (CUdevice of this process), or -1 if it is no stream. Any thread. */
int sim_stream_device(CUstream stream);

/* Items enqueued on @stream and items executed so far. Any thread. */
void sim_stream_count(CUstream stream, uint64_t *ret_enqueued, uint64_t *ret_executed);

/* Does @stream wait for a value that was not there when it looked? It looks again when a stream
 * writes a value, not when the word changes in another way. Any thread. */
bool sim_stream_waits(CUstream stream);

/* A device's place in the machine: what CUDA_VISIBLE_DEVICES numbers from 0; the same in
 * all processes. Any thread. */
int sim_physical(CUdevice device);

/* The caller broke a rule: prints "sim: ..." and aborts the process. Any thread. */
_Noreturn void sim_breach(const char *fmt, ...) __attribute__((format(printf, 1, 2)));

/* Prints "sim: ..." as one line. Any thread. */
void sim_note(const char *fmt, ...) __attribute__((format(printf, 1, 2)));

/* Counts this call of @function, and says whether SHARDD_SIM_FAIL wants it to fail.
 * @ret_code: overwritten with the code that SHARDD_SIM_FAIL names, kept if it names none.
 * Any thread. */
bool sim_fail(const char *function, int *ret_code);

/* A number below @below (above 0), from SHARDD_SIM_SEED. Any thread. */
unsigned sim_random(unsigned below);

/* An integer from the environment, or @otherwise. Any thread. */
long long sim_env(const char *name, long long otherwise);

#pragma GCC visibility pop

#endif
