/* The store in etcd: what its files share. */
#ifndef SHARDD_COORD_ETCD_IMPL_H
#define SHARDD_COORD_ETCD_IMPL_H

#include <grpc/grpc.h>
#include <pthread.h>
#include <stdatomic.h>

#include "coord/coord_impl.h"
#include "core/list.h"
#include "etcd.pb-c.h"

/* Calls and watches have connections of their own: a busy one holds watches of etcd 3.4 up. */
enum etcd_channel { ETCD_CALLS, ETCD_WATCHES, _ETCD_CHANNEL_N };

struct etcd_endpoint {
	char *target;
	grpc_channel *channels[_ETCD_CHANNEL_N];
	uint64_t cluster; /* the id in its last answer; 0: not known */
	bool asked;       /* for it; the answer has not come */
};

#define ETCD_WHY_BYTES 512

struct etcd {
	struct coord coord;
	struct loopq *loopq;
	grpc_completion_queue *cq;
	pthread_t thread;
	bool core;     /* grpc_init was called */
	bool plain;    /* without TLS */
	bool has_cert; /* to show to etcd */
	atomic_bool closing;
	struct list
		dead;  /* of struct etcd_batch: events after @closing; the thread's, then close's */
	unsigned refs; /* rpcs, and the owner; the loop's */
	struct etcd_endpoint *endpoints;
	size_t n_endpoints, current;
	uint64_t compare_us;        /* when all are asked again for their cluster */
	char split[ETCD_WHY_BYTES]; /* why nothing is asked of them; "": they are of one cluster */
	char *prefix;
	char *user, *password;
	char *token; /* NULL: to be asked for, if there is a user */
	struct etcd_rpc *login;
	struct list waiting; /* of struct etcd_rpc: for the token */
	struct list rpcs;    /* all others that run */
};

struct etcd_rpc;
struct etcd_member_call;

/* One batch of gRPC core. */
struct etcd_batch {
	struct work work;
	struct list link; /* e->dead */
	struct etcd_rpc *rpc;
	void (*fn)(struct etcd_rpc *r, bool ok); /* on the loop */
	bool ok;
};

/* One call of etcd, from its request to its status. */
struct etcd_rpc {
	struct list link;
	struct etcd *e;
	const char *method;
	enum etcd_channel kind;
	size_t endpoint;
	bool is_fixed;       /* to @endpoint, also if endpoints are of two clusters */
	uint32_t timeout_ms; /* 0: none */
	bool tried;          /* again, with another token */
	bool reads;          /* a transaction: the answer has a range */
	void (*done)(struct etcd_rpc *r, grpc_status_code status, const char *why);
	struct coord_call *owner;  /* NULL: cancelled */
	struct coord_watch *watch; /* NULL: ended */
	struct etcd_member_call *member_call;
	unsigned n_open; /* batches that were started and have not been seen by the loop */
	grpc_call *call;
	grpc_byte_buffer *request; /* of all tries */
	grpc_byte_buffer *sent;    /* of this one: core takes its contents */
	grpc_byte_buffer *reply;
	grpc_metadata metadata[2];
	grpc_slice token_text;
	grpc_metadata_array initial, trailing;
	grpc_status_code status;
	grpc_slice details;
	struct etcd_batch whole, message, ending;
};

/* ------------------------------------------------------------- etcd_rpc.c */

/* A call of @method with @request (borrowed), not begun. Return: NULL without memory. */
struct etcd_rpc *etcd_rpc_new(struct etcd *e, const char *method, const ProtobufCMessage *request);
/* Begin it: one request, one reply, and the status, with which @r->done is called on the loop, later; it
 * is freed then. With @r->message.fn: a stream that stays open, that function for each reply, and @r->done at
 * its end. @timeout_ms: 0: none. Return: 0, or -ENOMEM: @r is freed. */
int etcd_rpc_start(struct etcd_rpc *r, uint32_t timeout_ms);
/* Of a stream: the next reply. */
void etcd_rpc_next(struct etcd_rpc *r);
/* It ends soon, with CANCELLED. */
void etcd_rpc_cancel(struct etcd_rpc *r);
/* The reply, or NULL: there is none, or it is no such message. */
ProtobufCMessage *etcd_rpc_reply(struct etcd_rpc *r, const ProtobufCMessageDescriptor *type);
void *etcd_rpc_main(void *etcd);
void etcd_rpc_free_dead(struct etcd *e);
struct etcd *etcd_unref(struct etcd *e);

/* --------------------------------------------------------- etcd_cluster.c */

/* @endpoint has answered with the id of its cluster; 0: it does not answer. */
void etcd_cluster_heard(struct etcd *e, size_t endpoint, uint64_t cluster);
/* Ask all endpoints, unless that was done a short time ago. */
void etcd_cluster_ask(struct etcd *e);

/* ------------------------------------------------------------- etcd_txn.c */

/* Requests and replies of transactions. Return: 0 or a negative errno. */
int etcd_txn_start(struct coord *c, struct coord_call *call, const struct coord_txn *txn,
		   uint32_t timeout_ms);
/* @at + prefix of @e. Return: owned text, or NULL. */
char *etcd_txn_key(const struct etcd *e, const char *at);
/* The end of all keys that begin with @key: an array as long as @key, owned. Return: NULL: no memory. */
uint8_t *etcd_txn_range_end(const char *key);
/* @kv as text behind the prefix; @ret->key is owned by the caller. Return: 0 or -ENOMEM. */
int etcd_txn_kv(const struct etcd *e, const Shardd__Etcd__V1__KeyValue *kv, struct coord_kv *ret);
/* What a call that ended with @status is for its owner. */
enum coord_status etcd_txn_status(grpc_status_code status);

/* ----------------------------------------------------------- etcd_watch.c */

int etcd_watch_begin(struct coord *c, struct coord_watch *w, const char *prefix, int64_t from);
void etcd_watch_end(struct coord_watch *w);

#endif
