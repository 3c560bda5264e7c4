/*
 * The other nodes: the store (an etcd of its own, or an existing one), the engine between nodes, and the
 * cluster, as the configuration says. Nothing, if coord is none. Loop thread only.
 */
#ifndef SHARDD_APP_NODES_H
#define SHARDD_APP_NODES_H

#include <stdbool.h>
#include <uv.h>

#include "cluster/cluster.h"
#include "config/config.h"
#include "coord/embedded.h"

struct nodes {
	struct embedded *embedded; /* NULL: none */
	struct cluster *cluster;   /* NULL: none */
	unsigned stopping;         /* of these */
};

/* Return: 0 or a fault code; nodes_stop must follow in both cases. */
int nodes_start(struct nodes *n, uv_loop_t *loop, struct loopq *loopq, struct jobs *jobs,
		const struct config *config, struct fault *f);
/* Leave the others. Safe twice. */
void nodes_stop(struct nodes *n);
bool nodes_stopped(const struct nodes *n);
/* The engine between nodes is closed (devices_end): the rest. */
void nodes_end(struct nodes *n);

#endif
