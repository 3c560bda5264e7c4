/*
 * grpc.reflection.v1 and v1alpha: the services on the socket and their messages, for clients that
 * have no .proto files. All of it is known when the program is built, and is the same for every
 * caller. Embedded by value. Loop thread only.
 */
#ifndef SHARDD_RPC_SVC_REFLECTION_H
#define SHARDD_RPC_SVC_REFLECTION_H

#include "rpc/descriptors.h"
#include "rpc/method.h"

#define SVC_REFLECTION_SERVICES 2u

struct svc_reflection {
	struct descriptors *descriptors;    /* owned */
	const struct rpc_service *services; /* borrowed: what the server has */
	size_t n;
	ProtobufCServiceDescriptor alpha; /* v1's, with the name of v1alpha */
	struct rpc_service own[SVC_REFLECTION_SERVICES];
};

/* @services: those of the server, an array of @n in which the two of reflection may be put later;
 * read when the first request comes. @svc must not move from here on. Return: 0 or -ENOMEM. */
int svc_reflection_init(struct svc_reflection *svc, const struct rpc_service *services, size_t n);

/* After rpc_server_close. Safe to call twice, and if it was never begun. */
void svc_reflection_deinit(struct svc_reflection *svc);

#endif
