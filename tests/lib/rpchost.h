/*
 * The daemon's side of gRPC for tests: a loop in a thread of its own, an
 * rpc_server on it, and a socket whose connections it adopts. The test itself is
 * the client and may block.
 */
#ifndef SHARDD_TESTS_RPCHOST_H
#define SHARDD_TESTS_RPCHOST_H

#include <pthread.h>
#include <semaphore.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <sys/un.h>
#include <uv.h>

#include "core/loopq.h"
#include "net/conn.h"
#include "rpc/rpc_server.h"

struct rpchost {
	char dir[32];
	char path[64]; /* of the socket */
	int listen_fd;
	pthread_t thread;
	sem_t ready;

	/* Loop thread. */
	uv_loop_t loop;
	struct loopq queue;
	uv_poll_t accepting;
	struct rpc_server *server;
	struct conn *conns[256];
	atomic_uint n_conns;
	atomic_bool refusing; /* close new connections at once */
};

/* Before all else: what core and libuv open once for a process they keep, so they do it
 * now; then fdcheck_begin. Return: descriptors that are open. */
unsigned rpchost_begin(void);

/* At the end of a test, with what rpchost_begin said: fails it if more are open. Core
 * closes some on threads of its own, a little later than it says: waits for them. */
void rpchost_descriptors(unsigned n);

/* Start it. @options: NULL: 64 MiB messages, 1024 calls. */
void rpchost_start(struct rpchost *h, const struct rpc_options *options,
		   const struct rpc_service *services, size_t n);

/* Run @fn(@arg) on the loop thread and wait for it. */
void rpchost_run(struct rpchost *h, void (*fn)(void *arg), void *arg);

/* Close every connection from our side. Asynchronous. */
void rpchost_cut(struct rpchost *h);

/* Close the server, then the connections, then the loop; wait for all of it. */
void rpchost_stop(struct rpchost *h);

/* Wait until *@counter is @value; fails the test after 10 s. */
void rpchost_await(atomic_uint *counter, unsigned value);

#endif
