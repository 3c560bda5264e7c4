/* The nccl engine on the simulator: devices with some memory, filled and compared. */
#ifndef SHARDD_TESTS_NCCLFIX_H
#define SHARDD_TESTS_NCCLFIX_H

#include "cudafix.h"
#include "engine/engine_impl.h"

#define NCCLFIX_WAIT_S    60u
#define NCCLFIX_MEM_BYTES (UINT64_C(2) << 20)
/* Where things are in each device's memory. */
#define NCCLFIX_SEND_AT 0u
#define NCCLFIX_RECV_AT (1u << 20)
/* Collectives of the warm-up of one communicator on BACKEND_Q_MAIN. */
#define NCCLFIX_WARM_MAIN 4u

struct ncclfix {
	struct cudafix c;
	struct engine *e;
	struct comm *comm;
	bool ready;
	int status; /* of ready */
	unsigned failed;
	char why[256];
	struct backend_mem *mem[CUDAFIX_DEVICES];
};

/* Start with @devices, their memory and the engine. Fails the test if it cannot. */
void ncclfix_init(struct ncclfix *f, unsigned devices);
void ncclfix_deinit(struct ncclfix *f);
/* An environment variable for the simulator; before ncclfix_init. */
void ncclfix_number(const char *name, unsigned n);

/* Of the first @n devices; what happens to it is seen in @f. */
struct comm_options ncclfix_options(struct ncclfix *f, unsigned n, enum backend_queue queue);
/* Return: the status; the communicator is f->comm. */
int ncclfix_make(struct ncclfix *f, unsigned n, enum backend_queue queue);

struct ncclfix_op {
	struct comm_op op;
	bool done;
	int status;
};

void ncclfix_on_done(struct comm_op *op, int status);
#define NCCLFIX_OP ((struct ncclfix_op){ .op = { .done = ncclfix_on_done } })
/* Return: its status. */
int ncclfix_wait(struct ncclfix *f, struct ncclfix_op *o);

/* The addresses of all devices. */
struct ncclfix_addresses {
	void *all[CUDAFIX_DEVICES];
};
#define NCCLFIX_CONST(a) ((const void *const *)(a).all)

void *ncclfix_address(struct ncclfix *f, unsigned device, uint64_t at);
/* Each @step further on than the one before. */
struct ncclfix_addresses ncclfix_all(struct ncclfix *f, uint64_t at, uint64_t step);
/* Host or device memory at both ends; waits. */
void ncclfix_copy(struct ncclfix *f, unsigned device, enum backend_queue queue, void *dst,
		  const void *src, uint64_t bytes);

/* What device @d is filled with: whole numbers whose sums are exact in every type. */
float ncclfix_value(unsigned d, uint64_t i);
void ncclfix_fill(struct ncclfix *f, enum dtype t, uint64_t at, uint64_t count);

/* Element @i of @device, of @n devices; @count is passed on. */
typedef float (*ncclfix_expected)(unsigned n, unsigned device, uint64_t i, uint64_t count);
void ncclfix_expect(struct ncclfix *f, enum dtype t, uint64_t at, uint64_t count,
		    ncclfix_expected fn, uint64_t of);

/* All-gather of @count elements, apart and in place, with its result. */
void ncclfix_check_gather(struct ncclfix *f, enum dtype t, uint64_t count);
/* A small one. */
void ncclfix_start_gather(struct ncclfix *f, struct ncclfix_op *op);

#endif
