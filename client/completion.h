/*
 * What ends without anybody waiting for it: the descriptor of shardd_completion_fd, and what a wait for
 * ops in the ring and over gRPC needs. Nothing of it exists until one of them is asked for.
 */
#ifndef SHARDD_CLIENT_COMPLETION_H
#define SHARDD_CLIENT_COMPLETION_H

#include "shardd/shardd.h"

/* From now on gRPC calls that end poke the ring. Return: 0 or -SHARDD_RESOURCE_EXHAUSTED. Any
 * thread. */
int completion_serve_rpc(struct shardd_client *c, struct shardd_error *err);

/* The client has another link: its ops end in the same way. */
void completion_follow(struct shardd_client *c);

/* Signal the descriptor, if there is one. */
void completion_tell(struct shardd_client *c);

/* End the threads; before the ring, the tickets and the gRPC client. No other thread may use @c. */
void completion_stop(struct shardd_client *c);

/* Close the descriptor, behind the ring and the gRPC client. Safe without one. */
void completion_close(struct shardd_client *c);

#endif
