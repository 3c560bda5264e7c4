/*
 * What the probes share: processes that talk, a device, and a place for the answer.
 *
 * A probe is an experiment about what the driver does. It runs in a process of its own
 * (the director), which never touches CUDA: it starts actors (further processes, which
 * do), tells them what to do and hears what came of it, with a time limit on every
 * answer, and writes figures and one sentence into the report, which it shares with the
 * program. So whatever hangs or dies is an answer and not the end of the program, and
 * whatever a probe started is killed when it is over.
 */
#ifndef SHARDD_TESTS_GPU_STAGE_H
#define SHARDD_TESTS_GPU_STAGE_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#include "core/cuda_lib.h"
#include "cuda_kernels.h"

#define MIB (UINT64_C(1) << 20)

/* ----------------------------------------------------------------- report */

#define STAGE_MAX_FIGURES 96

struct figure {
	char name[56];
	char unit[12];
	char text[112]; /* instead of a number, if not empty */
	double value;
};

enum stage_state { STAGE_RUNNING, STAGE_ANSWERED, STAGE_FAILED, STAGE_SKIPPED, STAGE_HUNG };

/* Shared between the program and one probe's processes; all zero at first. */
struct stage {
	bool small;                /* sizes for a simulator */
	_Atomic uint64_t word[16]; /* the actors': flags and times of one probe */
	char mps_dir[96];          /* not empty: an MPS control daemon of ours runs with it */
	enum stage_state state;
	char step[112]; /* what is being tried */
	char answer[640];
	unsigned n_figures;
	struct figure figures[STAGE_MAX_FIGURES];
};

/* What is tried from here on: said if it hangs. Director only, like all of this part. */
__attribute__((format(printf, 2, 3))) void stage_step(struct stage *s, const char *fmt, ...);
void stage_number(struct stage *s, const char *name, const char *unit, double value);
__attribute__((format(printf, 3, 4))) void stage_text(struct stage *s, const char *name,
						      const char *fmt, ...);
/* A part of the answer: a sentence, appended. */
__attribute__((format(printf, 2, 3))) void stage_answer(struct stage *s, const char *fmt, ...);
/* End the probe: it could not be carried out. */
__attribute__((format(printf, 2, 3), noreturn)) void stage_fail(struct stage *s, const char *fmt,
								...);
__attribute__((format(printf, 2, 3), noreturn)) void stage_skip(struct stage *s, const char *fmt,
								...);

/* The value below which @part of the @n values are; sorts them. */
double stage_quantile(double *values, size_t n, double part);
/* Median and 99th percentile as NAME_median and NAME_p99, in microseconds. */
void stage_times(struct stage *s, const char *name, double *us, size_t n);

uint64_t now_ns(void);
void pause_ms(unsigned ms);

/* ----------------------------------------------------------------- actors */

/* Large enough for any answer; a descriptor may go with it. */
struct message {
	int status;     /* 0, or what the actor says it is; a CUresult where it names one */
	char text[160]; /* why, if not 0 */
	uint64_t value[8];
	uint8_t handle[128];
	int fd; /* -1: none; the receiver's to close */
};

#define MESSAGE_NULL ((struct message){ .fd = -1 })

struct actor {
	struct stage *stage;
	const char *name;
	int sock;
	const struct message *order; /* what it was started with */
	/* after actor_cuda */
	const struct cuda_lib *cuda;
	CUdevice device;
	CUcontext context;
	CUstream stream;
	CUmodule module;
};

typedef void (*actor_fn)(struct actor *a);

struct role {
	pid_t pid; /* 0: it has ended */
	int sock;
	const char *name;
	int ended; /* its wait status, if pid is 0 */
};

/* Director: start @fn in a process of its own. @order: may be NULL; its fd is inherited. */
struct role role_start(struct stage *s, const char *name, actor_fn fn, const struct message *order);
/* Tell it to go on. Its fd, if any, is sent along and stays ours. */
void role_tell(struct stage *s, struct role *r, const struct message *m);
/* What it says next. Return: 0, -ETIMEDOUT (it says nothing), -EPIPE (it has ended). */
int role_hear(struct stage *s, struct role *r, unsigned ms, struct message *ret);
/* The same where anything but a message with status 0 is the end of the probe. */
void role_must(struct stage *s, struct role *r, unsigned ms, struct message *ret);
/* kill -9, and wait until it is gone. Return: milliseconds this took; below 0: it stays. */
double role_kill(struct stage *s, struct role *r);
/* Let it end by itself (its next actor_hear ends it). */
void role_end(struct stage *s, struct role *r);
/* "ended with signal 9"... of one that has ended. */
const char *role_how(const struct role *r, char *buf, size_t bytes);

/* Actor: to and from the director. Hearing waits; it ends the process when the director
 * has ended or wants no more. */
void actor_tell(struct actor *a, const struct message *m);
void actor_done(struct actor *a, uint64_t v0, uint64_t v1); /* a message with two values */
void actor_hear(struct actor *a, struct message *ret);
/* Say that it cannot go on, and end. */
__attribute__((format(printf, 3, 4), noreturn)) void actor_fail(struct actor *a, int status,
								const char *fmt, ...);
/* End with actor_fail unless @r is success. */
void actor_must(struct actor *a, CUresult r, const char *what);
/* "" for success. */
const char *actor_text(struct actor *a, CUresult r, char buf[160]);

/* ------------------------------------------------------------------ device */

struct vmm {
	CUmemGenericAllocationHandle handle;
	CUdeviceptr addr;
	size_t bytes;
};

/* The first device, its primary context and a stream; fails the actor. */
void actor_cuda(struct actor *a);
CUstream actor_stream(struct actor *a); /* one more */

void vmm_create(struct actor *a, size_t bytes, struct vmm *ret);
int vmm_export(struct actor *a, const struct vmm *v);
/* Return: what the driver says to the first step it refuses. */
CUresult vmm_import(struct actor *a, int fd, size_t bytes, bool writable, struct vmm *ret);
void vmm_map(struct actor *a, struct vmm *v, bool writable);
void vmm_free(struct actor *a, struct vmm *v);
size_t vmm_round(struct actor *a, size_t bytes);

/* Fill with, and compare with, a pattern that @seed decides. */
void pattern_write(struct actor *a, CUdeviceptr addr, size_t bytes, uint64_t seed);
/* Return: 0, or what the driver says. @ret_wrong: words that are not the pattern's. */
CUresult pattern_check(struct actor *a, CUdeviceptr addr, size_t bytes, uint64_t seed,
		       uint64_t *ret_wrong);

CUfunction kernel_get(struct actor *a, enum cuda_fn fn);
CUresult kernel_launch(struct actor *a, enum cuda_fn fn, CUfunction f, unsigned blocks,
		       const void *args, CUstream stream);
/* Blocks that fill the device. */
unsigned kernel_blocks(struct actor *a, enum cuda_fn fn, CUfunction f, uint64_t n);
/* Keep @blocks busy for a time. spin_prepare first: a first launch may load code, for
 * which the driver waits for the device. */
void spin_prepare(struct actor *a);
void spin(struct actor *a, uint64_t ns, unsigned blocks, CUstream stream);

CUresult word_write(struct actor *a, CUstream stream, CUdeviceptr addr, uint64_t value);
CUresult word_wait(struct actor *a, CUstream stream, CUdeviceptr addr, uint64_t value);
/* Wait, looking at the clock, until the stream is empty.
 * Return: CUDA_ERROR_NOT_READY after @ms. */
CUresult stream_spin(struct actor *a, CUstream stream, unsigned ms);

/* An entry that cuda_lib does not have, or NULL. @name: as the library spells it. */
void *cuda_extra(const char *name);

/* --------------------------------------------------------------------- MPS */

/* Start an MPS control daemon; mps_stop ends it and the servers it has started. The
 * environment of whoever called, and of the actors started then, names it.
 * Return: 0, or -1: it is not there, or does not start; @why says which. */
int mps_start(struct stage *s, char *why, size_t bytes);
void mps_stop(struct stage *s);
/* Actors started from here on use no MPS, even if one runs on this machine. */
void mps_avoid(void);

/* ------------------------------------------------------------------ probes */

struct probe {
	const char *id;
	const char *name;
	const char *question;
	unsigned limit_s;
	void (*run)(struct stage *s); /* the director */
};

extern const struct probe probes[]; /* ended by a NULL id */

void probe_survive(struct stage *s);
void probe_timeline(struct stage *s);
void probe_host_word(struct stage *s);
void probe_dead_writer(struct stage *s);
void probe_read_only(struct stage *s);
void probe_poll(struct stage *s);
void probe_overlap(struct stage *s);
void probe_nccl(struct stage *s);
void probe_nccl_abort(struct stage *s);
void probe_ipc(struct stage *s);
void probe_cost(struct stage *s);
void probe_attach(struct stage *s);

#endif
