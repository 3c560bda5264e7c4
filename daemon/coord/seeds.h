/*
 * Seeds: the nodes that run the members of an embedded etcd (embedded.h), as the configuration lists
 * them, the same on all nodes.
 *
 *   NODE=HOST                       the ports are those of the options
 *   NODE=HOST:CLIENTPORT:PEERPORT
 *   dns:NAME                        alone: the nodes are PREFIX-0, PREFIX-1, ... at PREFIX-N.NAME, as a
 *                                   StatefulSet with the headless Service NAME has them. PREFIX is
 *                                   that of this node's own name.
 *
 * A cluster of one or two nodes has one member: a second one would only make it fail more often. One of
 * three or more has three. The members are the first seeds.
 */
#ifndef SHARDD_COORD_SEEDS_H
#define SHARDD_COORD_SEEDS_H

#include "core/fault.h"
#include "core/hostport.h"
#include "core/name.h"

#define SEEDS_MEMBERS 3u
#define SEEDS_MOST    64u

struct seed {
	char node[NAME_BYTES];
	char host[HOSTPORT_HOST_BYTES];
	uint16_t client_port, peer_port;
};

/* The members, in order. */
struct seeds {
	struct seed members[SEEDS_MEMBERS];
	size_t n;
};

struct seeds_options {
	const char *text; /* the list, with commas */
	const char *node; /* the name of this node */
	uint32_t nodes;   /* of the cluster; 0: as many as are listed */
	uint16_t client_port, peer_port;
};

/* The members among the seeds; all of the list is checked. Return: 0 or FAULT_INVALID, with the key and
 * what is allowed. Any thread. */
int seeds_read(const struct seeds_options *o, struct seeds *ret, struct fault *f);

/* Return: the member that @node runs, or NULL: none. */
const struct seed *seeds_find(const struct seeds *s, const char *node);

#endif
