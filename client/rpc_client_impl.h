/* What rpc_client.c, rpc_pending.c and rpc_error.c share. */
#ifndef SHARDD_CLIENT_RPC_CLIENT_IMPL_H
#define SHARDD_CLIENT_RPC_CLIENT_IMPL_H

#include <grpc/grpc.h>
#include <pthread.h>
#include <sys/types.h>
#include <time.h>

#include "rpc_client.h"

/* A point on CLOCK_MONOTONIC, or none. */
struct deadline {
	bool never;
	struct timespec at;
};

/* A thread that sleeps until @p has got on or until it is asked to drive. */
struct waiter {
	struct waiter *next;
	struct rpc_pending *p; /* NULL: any */
	pthread_cond_t wake;
};

/* The thread of rpc_client_serve. */
struct rpc_server_thread {
	pthread_t id;
	pthread_cond_t wake; /* a call was started, nobody drives any more, or @stop */
	bool runs, stop;
	void (*on_event)(void *data);
	void *data;
};

struct rpc_client {
	grpc_channel *channel;
	grpc_completion_queue *cq;
	uid_t uid; /* of this process when it connected: for sentences */
	char path[512];

	pthread_mutex_t lock; /* for all below and what pendings say about batches */
	bool driving;         /* a thread is in grpc_completion_queue_next */
	bool answered;        /* the daemon has answered some call */
	struct waiter *waiters;
	struct rpc_pending *pendings; /* not freed by the user yet, or with open batches */
	unsigned n_open;              /* batches under way, of all */
	struct rpc_server_thread server;
};

/* What completion-queue events carry. Called with the lock held. */
struct event {
	void (*fn)(struct rpc_pending *p);
	struct rpc_pending *p;
};

struct rpc_pending {
	struct rpc_client *c;             /* NULL: closed meanwhile */
	struct rpc_pending *next, **prev; /* c->pendings */
	grpc_call *call;
	const ProtobufCMessageDescriptor *reply;
	bool streaming;
	uint32_t timeout_ms;
	char method[128];

	struct event main_event, message_event, status_event;
	unsigned n_open; /* batches under way */
	bool done;       /* the status has come */
	bool message_ready;
	bool abandoned; /* freed by the last completion */

	grpc_byte_buffer *incoming;
	grpc_metadata_array initial, trailing;
	grpc_status_code status;
	grpc_slice status_text;
};

struct deadline deadline_in(int timeout_ms);
gpr_timespec deadline_gpr(struct deadline d);

typedef bool (*pending_test)(const struct rpc_pending *p);

/* Take events, or sleep while another thread does, until @test(@p) or the
 * deadline. Lock held before and after. */
void client_drive(struct rpc_client *c, struct rpc_pending *p, pending_test test,
		  struct deadline d);

/* The same until one of @n calls has ended. */
void client_drive_any(struct rpc_client *c, struct rpc_pending *const *p, size_t n,
		      pending_test test, struct deadline d);

/* A call was started: the thread of rpc_client_serve is to drive. Lock held. */
void client_started(struct rpc_client *c);

/* Take the events that are there. Lock held. */
void client_poll(struct rpc_client *c);

/* Put @p on the client's list. Lock held. */
void client_link(struct rpc_client *c, struct rpc_pending *p);

/* Unlink and free. Lock held, if there is a client. */
void pending_destroy(struct rpc_pending *p);

/* The outcome of a call that has ended. Return: 0 or a negative code with @err filled. */
int pending_error(struct rpc_pending *p, struct shardd_error *err);

#endif
