/*
 * The client's connection after the daemon has died: it comes back by itself.
 *
 * The first call that finds the connection broken (error_is_lost) starts a thread, which connects
 * to the same path until a daemon with the same instance has attached this process. Waiting threads
 * sleep meanwhile: the next daemon may still read the gradient buffers of this process, to finish a step,
 * so no op ends before. The thread then puts the new link in the former one's place, and ends.
 *
 * On GPUs the streams of this process may wait for words of the dead daemon. The next one releases
 * them (backend_release); the join after the reconnection waits for that (streams_part).
 *
 * There is no reconnection if the daemon said that its jobs end with it, if it was turned off, with
 * CUDA IPC handles, and in debug mode.
 */
#ifndef SHARDD_CLIENT_RECONNECT_H
#define SHARDD_CLIENT_RECONNECT_H

#include <stdbool.h>
#include <stdint.h>

#include "reconnect_types.h"
#include "shardd/shardd.h"

struct shardd_client;

void reconnect_init(struct reconnect *r);
/* End the thread. No other thread may use the client. */
void reconnect_stop(struct shardd_client *c);
/* Free the former links, behind the tickets. */
void reconnect_deinit(struct shardd_client *c);

/* Does the client connect again when its connection breaks? */
bool reconnect_is_on(const struct shardd_client *c);

/* Link number @link is broken: begin, unless that was done. Sleep until another link is there or
 * none will come, at most @timeout_ms (-1: for ever). Not with shardd_client.order held. Return:
 * false: not yet. */
bool reconnect_wait(struct shardd_client *c, uint32_t link, int timeout_ms);

/* After that: why an op of @epoch, or a call (@epoch 0), was not answered. Return: -SHARDD_ABORTED,
 * or what the client gave up with. */
int reconnect_outcome(struct shardd_client *c, uint32_t link, uint64_t epoch,
		      struct shardd_error *err);

/* Free the former links that nothing uses. Called with shardd_client.order held. */
void reconnect_collect(struct shardd_client *c);

#endif
