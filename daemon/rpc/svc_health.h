/*
 * grpc.health.v1.Health: is the daemon taking work?
 *
 * Names: "" (the daemon) and each service of the server; all say the same. Embedded by value. Loop
 * thread only.
 */
#ifndef SHARDD_RPC_SVC_HEALTH_H
#define SHARDD_RPC_SVC_HEALTH_H

#include <stdbool.h>

#include "core/list.h"
#include "rpc/method.h"

struct health {
	bool serving;
	const struct rpc_service *services; /* borrowed */
	size_t n;
	struct list watchers;
	struct rpc_service service;
};

/* Not serving until health_set. @services: the server's, an array of @n in which this one may be
 * put later. @h must not move from here on. */
void health_init(struct health *h, const struct rpc_service *services, size_t n);

/* CHECKs that no Watch is open: after rpc_server_close. Safe to call twice. */
void health_deinit(struct health *h);

/* Notify the watches, if it is a change. */
void health_set(struct health *h, bool serving);

/* For rpc_server_new. Borrowed: lives in @h. */
const struct rpc_service *health_service(const struct health *h);

#endif
