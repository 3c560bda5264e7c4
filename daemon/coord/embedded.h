/*
 * An embedded etcd: this node's member of the cluster's store, as a child of the daemon.
 *
 *   CLIENT: this node runs no member
 *
 *   PAUSED ----> RESOLVING: the host of this node's seed, if it is a name
 *    ^  |            |
 *    |  '----------->+--no data, other members--> JOINING: does it make a store, or join one?
 *    |               |                               |
 *    |               |<------------------------------'
 *    |               +--the data are in use--> WAITING: an etcd of an earlier daemon is being ended
 *    |               v                            |
 *    |           STARTING <-----------------------'
 *    |               |
 *    |               '--it serves--> SERVING, at first perhaps without a vote
 *    '--- it has ended, or the step before has failed: after 0.1 s, then longer, at most 10 s
 *
 *   any --embedded_stop--> STOPPING: SIGTERM, after 5 s SIGKILL --it has ended--> CLOSING
 *
 * Never two stores: only the first seed makes one, and only if no other member answers; all others join
 * it, one after the other (embedded_join.c). So the number of members may grow from one to three, and a
 * member that has lost its data joins again.
 *
 * Never two on one folder. The daemon holds a lock on DIR/daemon.lock. etcd inherits one on
 * DIR/etcd.lock, which goes with its process and says which one it is. So the next daemon knows whether
 * an etcd of its predecessor is left, and kills it: it is nobody's child any more. Usually there is
 * none: it ends with its daemon (core/child.h), also if that is killed. etcd writes to its log on disk
 * before it answers, so that nothing is lost by a SIGKILL.
 *
 * It is restarted rather than adopted: a child has an exit code, its log is ours, and it has the
 * arguments of this daemon's configuration. Its members elect another leader meanwhile, or one
 * member is back in about a second.
 *
 * Loop thread only. To start etcd blocks for some milliseconds: a lock, and the load of a program.
 */
#ifndef SHARDD_COORD_EMBEDDED_H
#define SHARDD_COORD_EMBEDDED_H

#include <uv.h>

#include "coord/seeds.h"
#include "core/fault.h"
#include "core/log_level.h"
#include "core/loopq.h"

struct embedded;

enum embedded_state {
	EMBEDDED_PAUSED,
	EMBEDDED_CLIENT,
	EMBEDDED_RESOLVING,
	EMBEDDED_JOINING,
	EMBEDDED_WAITING,
	EMBEDDED_STARTING,
	EMBEDDED_SERVING,
	EMBEDDED_STOPPING,
	EMBEDDED_CLOSING,
};

/* Not called from inside embedded_new. From inside these embedded_stop may be called. */
struct embedded_ops {
	/* It has another state, or another reason: embedded_state, embedded_why. */
	void (*changed)(struct embedded *e, void *userdata);
	/* (optional) A line that etcd has logged, without control characters, at most 1 KiB. @level: debug
	 * for what goes as it should, info for its warnings, warn for its errors. */
	void (*logged)(struct embedded *e, enum log_level level, const char *line, void *userdata);
};

/* All is copied. */
struct embedded_options {
	const char *node;    /* the name of this node */
	const char *cluster; /* its name: members of another one are refused */
	const struct seeds *seeds;
	const char *dir;    /* made if it does not exist; etcd has DIR/data */
	const char *etcd;   /* path of the program; NULL or "": in PATH */
	const char *listen; /* address for both ports; NULL or "": that of this node's seed */
	/* Paths of PEM files, all or none: mutual TLS on both ports. NULL or "": no TLS. */
	const char *ca, *cert, *key;
};

/* Begin it. Its first try is made by the loop. @loopq: borrowed, of @loop.
 * Return: 0 or a fault code: NOT_FOUND: there is no etcd. What fails later is embedded_why's. */
int embedded_new(uv_loop_t *loop, struct loopq *loopq, const struct embedded_options *o,
		 const struct embedded_ops *ops, void *userdata, struct embedded **ret,
		 struct fault *f);

/* End it, once. @stopped is called later, at the end of all, and @e is freed after it. */
void embedded_stop(struct embedded *e, void (*stopped)(void *userdata));

enum embedded_state embedded_state(const struct embedded *e);
/* "CLIENT", "PAUSED", ... */
const char *embedded_state_name(enum embedded_state s);
/* What it waits for, or why it has ended, one sentence; "": nothing. Of SERVING: that it has no vote yet. */
const char *embedded_why(const struct embedded *e);
/* Of STARTING, SERVING and STOPPING; else 0. */
pid_t embedded_pid(const struct embedded *e);
/* HOST:PORT of all members, for coord_etcd_new. Valid until it is freed. */
const char *const *embedded_endpoints(const struct embedded *e, size_t *ret_n);

#endif
