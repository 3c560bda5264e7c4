/*
 * A process that plays the daemon to the client library's parts, on the simulator: it
 * owns device memory, hands it out over SHD1 and as CUDA IPC handles, and runs ops that
 * wait for a stream's word and raise a word of their own.
 *
 * Forked before the test loads CUDA, which does not live through a fork. What goes wrong
 * in it aborts it, and then the test that asks it next fails.
 */
#ifndef SHARDD_TESTS_GPUPEER_H
#define SHARDD_TESTS_GPUPEER_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

#include "core/cuda_lib.h"
#include "local_abi.h"

#ifdef SHARDD_CUDA

#define GPUPEER_SLAB_BYTES (2u << 20)
#define GPUPEER_IPC_BYTES  (2u << 20)
#define GPUPEER_SESSION    77u
#define GPUPEER_STRIDE     64u
#define GPUPEER_RING       4u /* of events */
#define GPUPEER_HANDLE     64u

enum gpupeer_slab {
	GPUPEER_READ_ONLY = 1,
	GPUPEER_WRITABLE,
	GPUPEER_LATER, /* writable; for what is mapped late */
	GPUPEER_SIGNALS,
	GPUPEER_READY, /* read-only */
	GPUPEER_IPC,   /* by handle only */
	GPUPEER_SLABS, /* how many, and one */
};

extern const uint8_t gpupeer_token[SHD1_TOKEN_BYTES];

struct gpupeer {
	pid_t pid;
	int commands;
	char dir[32];
	char path[64]; /* of the SHD1 socket */
	char uuid[48];
	uint8_t ipc[GPUPEER_HANDLE];
	uint8_t ready_events[GPUPEER_RING][GPUPEER_HANDLE];
};

/* Set the environment for the simulator, and start the peer on device number @device of
 * it. @events: it orders with events. */
void gpupeer_start(struct gpupeer *p, unsigned device, bool events);
/* End it and see that it was well. */
void gpupeer_stop(struct gpupeer *p);

/* Fill a slab with @byte, and see whether all of it is @byte. */
void gpupeer_fill(struct gpupeer *p, enum gpupeer_slab slab, uint8_t byte);
bool gpupeer_holds(struct gpupeer *p, enum gpupeer_slab slab, uint8_t byte);

/* The session's events of @slot, GPUPEER_RING handles. */
void gpupeer_share(struct gpupeer *p, uint32_t slot, const uint8_t *handles);
/* An op: after (@slot, @value) copy slab @from to @to; then @ready is reached. Queued when
 * it returns. @held: only gpupeer_raise reaches it. */
void gpupeer_op(struct gpupeer *p, uint32_t slot, uint64_t value, enum gpupeer_slab from,
		enum gpupeer_slab to, uint64_t ready, bool held);
void gpupeer_raise(struct gpupeer *p, uint64_t ready);
/* Wait until all ops were executed. */
void gpupeer_drain(struct gpupeer *p);

#endif
#endif
