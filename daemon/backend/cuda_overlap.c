/*
 * How kernels of several processes share the device: with MPS they overlap; without MPS they take
 * turns, in slices of milliseconds. Copy engines work concurrently in either case. The result is
 * one sentence, from what the driver reports and, if requested, from an experiment: a second
 * process (cuda_overlap_child.c) keeps one block busy, and we measure what that costs our work.
 *
 * Our work is many kernels that are much shorter than a slice, each of which ends at a set time:
 * the turn of the other process is hidden in at most one of them.
 */
#include "backend/cuda_impl.h"

#ifdef SHARDD_CUDA

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "core/cleanup.h"

#define SPIN_NS 50000u
#define SPINS   400u
/* A copy, and the intended time of all of them alone. */
#define COPY_BYTES  (UINT64_C(16) << 20)
#define COPY_MS     10.0f
#define MOST_COPIES 400u
/* Above this ratio the kernels do not overlap. */
#define TAKES_TURNS 1.3f
/* Milliseconds the other process has to start, and to end. */
#define START_MS 20000
#define END_MS   5000

struct overlap {
	struct cuda *c;
	CUevent begin, end;
	CUdeviceptr memory; /* two of COPY_BYTES */
	unsigned copies;
	pid_t pid;
	int to, from; /* the other process's standard input and output */
};

/* ------------------------------------------------------------------- our work */

static CUresult cuda_overlap_spin(const struct overlap *o)
{
	struct cuda *c = o->c;
	struct cuda_spin args = { .nanoseconds = SPIN_NS };
	void *params[1] = { &args };
	CUresult r = CUDA_SUCCESS;

	for (unsigned i = 0; r == CUDA_SUCCESS && i < SPINS; i++)
		r = c->lib->cuLaunchKernel(c->kernels.fn[CUDA_FN_SPIN], 1, 1, 1,
					   cuda_fn_threads(CUDA_FN_SPIN), 1, 1, 0,
					   c->queues[BACKEND_Q_MAIN].stream, params, NULL);
	return r;
}

static CUresult cuda_overlap_copy(const struct overlap *o)
{
	CUresult r = CUDA_SUCCESS;

	for (unsigned i = 0; r == CUDA_SUCCESS && i < o->copies; i++)
		r = o->c->lib->cuMemcpyDtoDAsync(o->memory + COPY_BYTES, o->memory, COPY_BYTES,
						 o->c->queues[BACKEND_Q_MAIN].stream);
	return r;
}

static CUresult cuda_overlap_measure(const struct overlap *o,
				     CUresult (*work)(const struct overlap *), float *ret_ms)
{
	const struct cuda_lib *lib = o->c->lib;
	CUstream stream = o->c->queues[BACKEND_Q_MAIN].stream;
	CUresult r = lib->cuEventRecord(o->begin, stream);

	if (r == CUDA_SUCCESS)
		r = work(o);
	if (r == CUDA_SUCCESS)
		r = lib->cuEventRecord(o->end, stream);
	if (r == CUDA_SUCCESS)
		r = lib->cuStreamSynchronize(stream);
	return r == CUDA_SUCCESS ? lib->cuEventElapsedTime(ret_ms, o->begin, o->end) : r;
}

static CUresult cuda_overlap_choose_copies(struct overlap *o)
{
	float ms = 0;
	CUresult r;

	o->copies = 1;
	r = cuda_overlap_measure(o, cuda_overlap_copy, &ms); /* the first is slower than the rest */
	if (r == CUDA_SUCCESS)
		r = cuda_overlap_measure(o, cuda_overlap_copy, &ms);
	if (ms > COPY_MS / MOST_COPIES)
		o->copies = ms < COPY_MS ? (unsigned)(COPY_MS / ms) : 1;
	else
		o->copies = MOST_COPIES;
	return r;
}

/* ---------------------------------------------------------- the other process */

static int cuda_overlap_spawn_into(const char *program, const char *uuid, const int in[2],
				   const int out[2], pid_t *ret)
{
	char flag[] = "--gpu-overlap-child", name[48], self[] = "shardd";
	char *argv[] = { self, flag, name, NULL };
	posix_spawn_file_actions_t actions;
	int r;

	snprintf(name, sizeof(name), "%s", uuid);
	posix_spawn_file_actions_init(&actions);
	posix_spawn_file_actions_adddup2(&actions, in[0], STDIN_FILENO);
	posix_spawn_file_actions_adddup2(&actions, out[1], STDOUT_FILENO);
	r = posix_spawn(ret, program, &actions, NULL, argv, environ);
	posix_spawn_file_actions_destroy(&actions);
	return -r;
}

static bool cuda_overlap_readable(int fd, int ms)
{
	struct pollfd p = { .fd = fd, .events = POLLIN };
	int r;

	do
		r = poll(&p, 1, ms);
	while (r < 0 && errno == EINTR);
	return r == 1;
}

/* Return: whether it runs and keeps the device busy. */
static bool cuda_overlap_start_other(struct overlap *o, const char *program)
{
	int in[2], out[2];
	char byte;
	int r;

	if (pipe2(in, O_CLOEXEC))
		return false;
	if (pipe2(out, O_CLOEXEC)) {
		close(in[0]);
		close(in[1]);
		return false;
	}
	r = cuda_overlap_spawn_into(program, o->c->backend.info.uuid, in, out, &o->pid);
	close(in[0]);
	close(out[1]);
	o->to = in[1];
	o->from = out[0];
	if (r)
		o->pid = 0;
	return r == 0 && cuda_overlap_readable(o->from, START_MS) && read(o->from, &byte, 1) == 1;
}

/* It ends when its standard input does. */
static void cuda_overlap_stop_other(struct overlap *o)
{
	o->to = fd_close(o->to);
	if (o->pid > 0 && !cuda_overlap_readable(o->from, END_MS))
		kill(o->pid, SIGKILL);
	o->from = fd_close(o->from);
	while (o->pid > 0 && waitpid(o->pid, NULL, 0) < 0 && errno == EINTR)
		;
	o->pid = 0;
}

/* ------------------------------------------------------------------ sentences */

static bool cuda_overlap_mps_runs(const struct cuda *c)
{
	const char *dir = getenv("CUDA_MPS_PIPE_DIRECTORY");
	char path[512];
	int on = 0;

	if (c->lib->cuDeviceGetAttribute(&on, CU_DEVICE_ATTRIBUTE_MPS_ENABLED, c->device) ==
	    CUDA_SUCCESS)
		return on;
	if (!dir || (size_t)snprintf(path, sizeof(path), "%s/control", dir) >= sizeof(path))
		return false;
	return access(path, F_OK) == 0;
}

static const char *cuda_overlap_how(float ratio)
{
	return ratio < TAKES_TURNS ? "overlap" : "take turns";
}

static void cuda_overlap_say_figures(struct cuda *c, bool mps, const float spin_ms[2],
				     const float copy_ms[2])
{
	float copies = copy_ms[0] > 0 ? copy_ms[1] / copy_ms[0] : 0;

	snprintf(c->backend.info.mode, sizeof(c->backend.info.mode),
		 "%s: kernels of two processes %s (measured: %.1f ms of work took %.1f ms beside "
		 "another process); copies %s (%.2f times)",
		 mps ? "MPS" : "no MPS", cuda_overlap_how(spin_ms[1] / spin_ms[0]),
		 (double)spin_ms[0], (double)spin_ms[1], cuda_overlap_how(copies), (double)copies);
}

static void cuda_overlap_say(struct cuda *c, bool mps, const char *why)
{
	snprintf(c->backend.info.mode, sizeof(c->backend.info.mode),
		 "%s: kernels of two processes %s (%s)", mps ? "MPS" : "no MPS",
		 mps ? "overlap" : "take turns", why);
}

/* ------------------------------------------------------------------- together */

static CUresult cuda_overlap_prepare(struct overlap *o)
{
	const struct cuda_lib *lib = o->c->lib;
	CUresult r = lib->cuEventCreate(&o->begin, CU_EVENT_DEFAULT);

	if (r == CUDA_SUCCESS)
		r = lib->cuEventCreate(&o->end, CU_EVENT_DEFAULT);
	if (r == CUDA_SUCCESS)
		r = lib->cuMemAlloc(&o->memory, 2 * COPY_BYTES);
	return r == CUDA_SUCCESS ? cuda_overlap_choose_copies(o) : r;
}

static void cuda_overlap_clean_up(struct overlap *o)
{
	cuda_overlap_stop_other(o);
	if (o->memory)
		o->c->lib->cuMemFree(o->memory);
	if (o->begin)
		o->c->lib->cuEventDestroy(o->begin);
	if (o->end)
		o->c->lib->cuEventDestroy(o->end);
}

/* Return: why there are no figures, or NULL. */
static const char *cuda_overlap_experiment(struct overlap *o, const char *program, float spin_ms[2],
					   float copy_ms[2])
{
	CUresult r = cuda_overlap_prepare(o);

	if (r == CUDA_SUCCESS)
		r = cuda_overlap_measure(o, cuda_overlap_spin, &spin_ms[0]);
	if (r == CUDA_SUCCESS)
		r = cuda_overlap_measure(o, cuda_overlap_copy, &copy_ms[0]);
	if (r == CUDA_SUCCESS && !cuda_overlap_start_other(o, program))
		return "not measured: the other process did not start";
	if (r == CUDA_SUCCESS)
		r = cuda_overlap_measure(o, cuda_overlap_spin, &spin_ms[1]);
	if (r == CUDA_SUCCESS)
		r = cuda_overlap_measure(o, cuda_overlap_copy, &copy_ms[1]);
	return r == CUDA_SUCCESS ? NULL : "not measured: the device refused";
}

void cuda_overlap(struct cuda *c, const char *program)
{
	struct overlap o = { .c = c, .to = -1, .from = -1 };
	float spin_ms[2] = { 0 }, copy_ms[2] = { 0 };
	bool mps = cuda_overlap_mps_runs(c);
	const char *why = "not measured";

	if (program) {
		why = cuda_overlap_experiment(&o, program, spin_ms, copy_ms);
		cuda_overlap_clean_up(&o);
	}
	if (why)
		cuda_overlap_say(c, mps, why);
	else
		cuda_overlap_say_figures(c, mps, spin_ms, copy_ms);
}

#endif
