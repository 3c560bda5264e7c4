/*
 * Shared by rpc_server.c, peers.c and call.c. No other file includes this.
 *
 * Threads: fields marked (cq) belong to the completion-queue thread, all others
 * to the loop thread; atomics to both. A call is handed from one to the other by
 * a post to the loop or by starting a batch.
 *
 * Life of a call: the thread makes it, armed, to receive a request. When one has
 * come it is posted to the loop, which dispatches it. It holds one reference until it has ended,
 * and one for each running batch; dropping the last one frees it. A call for which core has the
 * status and the close costs no further turn of the loop: the thread drops its last reference, or
 * batch_start does if the batch is over when it returns.
 */
#ifndef SHARDD_RPC_SERVER_IMPL_H
#define SHARDD_RPC_SERVER_IMPL_H

#include <grpc/grpc.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>

#include "core/list.h"
#include "core/loopq.h"
#include "rpc/codec.h"
#include "rpc/method.h"
#include "rpc/rpc_server.h"

#define RPC_CALL_MAGIC 0x72706363u
#define RPC_MAX_SEND   256u /* messages of one stream that wait */
/* Messages of one stream from the client. The gate charges what follows the first one until the
 * stream ends, each message as a frame of 4 KiB or more, and it paces calls, but not messages. */
#define RPC_MAX_RECEIVED 64u
#define RPC_METHOD_BYTES 128u
/* A request is kept until its call ends. When those of a connection take this many times
 * max_message_bytes, further ones are refused, except small ones: others may wait for one of
 * them. */
#define RPC_MAX_HELD    4u
#define RPC_SMALL_BYTES (128u << 10)

struct tag;
typedef void (*tag_cb)(struct tag *tag, bool ok);

/* The tag of a completion-queue event; @fn runs on the thread, or on the loop thread in
 * batch_start. */
struct tag {
	tag_cb fn;
};

/* A method known to core. @n_armed: calls that wait for a request of it. */
struct slot {
	struct rpc_server *server;
	const struct rpc_service *service;       /* NULL: for methods that are not registered */
	const struct rpc_method *method;         /* NULL likewise */
	const ProtobufCMessageDescriptor *input; /* NULL likewise */
	void *registered;                        /* core's name for it */
	atomic_uint n_armed;
	uint64_t calls, failed; /* the loop's */
	char path[RPC_METHOD_BYTES];
};

/* An adopted connection. */
struct peer {
	struct list link; /* rpc_server.peers */
	struct conn *conn;
	int fd; /* core's; only the number is used */
	struct list calls;
	uint32_t n_calls;
	uint64_t held; /* bytes of the requests of its calls, unpacked */
};

/* Descriptor number to peer, from @base on. */
struct peer_table {
	struct peer **by_fd;
	size_t n;
	int base;
	int hint; /* next number to try: fresh ones, so that a late call of an old
		   * connection is not taken for one of a new one */
};

/* Why a request does not reach its handler. */
enum refusal {
	REFUSAL_NONE = 0,
	REFUSAL_METHOD,     /* there is no such method */
	REFUSAL_EMPTY,      /* closed without a message */
	REFUSAL_COMPRESSED, /* a compressed message */
	REFUSAL_MALFORMED,
	REFUSAL_BUDGET,
};

/* A packed message that waits to be sent. */
struct outgoing {
	struct list link;
	grpc_byte_buffer *buffer;
	bool lent; /* with bytes that are not copied: call_lend_start */
};

struct rpc_call {
	uint32_t magic;
	atomic_uint refs;
	struct rpc_server *server;
	struct slot *slot;

	/* Filled by core: all but the last before the loop sees the call. */
	struct {
		grpc_call *call; /* NULL: still armed */
		gpr_timespec deadline;
		grpc_metadata_array metadata;
		grpc_call_details details;
		grpc_byte_buffer *payload;
		int cancelled;
	} core;

	/* Filled by the thread before the loop sees the call. */
	struct codec_message request;
	grpc_slice packed; /* the request as it came, of a packed method */
	uint64_t held;     /* what @peer is charged for both */
	enum refusal refusal;
	uint64_t deadline_us;
	int fd; /* of the connection, as core names it; -1: unknown */
	char unknown_method[RPC_METHOD_BYTES];

	struct tag request_tag, close_tag, sent_tag, final_tag;
	struct work arrived, closed, sent;

	/* Loop thread. */
	struct list link; /* peer.calls */
	struct peer *peer;
	struct user_charge charge; /* until it is freed, on the loop */
	struct work freed;
	rpc_cancelled_cb cancelled_fn;
	void *cancelled_data;
	bool ended;        /* the handler has ended the call */
	bool cancelled;    /* the caller is gone: sent messages are dropped */
	bool close_seen;   /* on_cancelled has run and is not posted again */
	bool dispatching;  /* the handler is on the stack for the first time */
	bool close_posted; /* RECV_CLOSE_ON_SERVER has been started */

	/* The next message of a stream from the client. */
	struct {
		struct tag tag;
		struct work work;
		rpc_next_cb fn; /* NULL: none is awaited */
		void *userdata;
		unsigned n;   /* that have come after the first one */
		bool running; /* its batch is under way: @request, @held, @refusal are the thread's */
	} next;

	/* What goes to the client. */
	struct {
		struct list messages; /* struct outgoing; the first one is under way if @sending */
		unsigned n;
		bool headers_sent; /* initial metadata has been started */
		bool sending;      /* a message batch is under way */
		bool sent_ok;      /* (cq until posted) outcome of the message batch */
		bool status_sent;  /* the final batch has been started */
	} out;

	/* Messages with lent bytes (call_lend.c). */
	struct {
		struct list link;         /* rpc_server.lender.calls */
		struct outgoing *message; /* to be started */
		bool headers;             /* with initial metadata */
		rpc_taken_cb taken_fn;
		void *taken_data;
	} lent;

	/* The status, kept until the final batch is done. */
	struct {
		int code;
		grpc_slice text;
		grpc_metadata trailer;
		bool has_trailer;
	} status;
};

/* The thread that starts messages with lent bytes. */
struct rpc_lender {
	pthread_t thread;
	pthread_mutex_t mu;
	pthread_cond_t more;
	struct list calls; /* by lent.link, under @mu */
	bool stop;         /* under @mu */
	bool runs;         /* the loop's */
};

struct rpc_server {
	struct loopq *loopq;
	uint64_t max_message_bytes;
	uint32_t max_calls_per_conn;
	struct fault refusal; /* of unknown methods; FAULT_NONE: UNIMPLEMENTED */
	grpc_completion_queue *cq;
	grpc_server *core;
	grpc_server_credentials *creds;
	pthread_t thread;
	_Atomic uint64_t heartbeat_us;
	atomic_size_t n_live;    /* calls that are allocated, and 1 until core is down */
	atomic_size_t n_answers; /* that core has not sent yet */
	pthread_mutex_t arm_lock;
	bool stopping;      /* under arm_lock: core is asked for no more requests */
	struct slot *slots; /* the last one takes what is not registered */
	size_t n_slots;
	struct list peers;
	struct peer_table table;
	size_t n_calls; /* not ended */
	bool closing;
	struct rpc_lender lender;
	struct tag down_tag;   /* core has shut down */
	struct work down_work; /* the same, on the loop */
	struct work over_work; /* the thread is about to return */
	rpc_server_closed_cb closed_fn;
	void *closed_data;
};

/* --- peers.c, loop thread --- */

/* Choose the range of numbers. */
void peer_table_init(struct peer_table *t);
void peer_table_deinit(struct peer_table *t);
/* Duplicate @fd to a fresh number. Return: it, or negative errno. */
int peer_table_dup(struct peer_table *t, int fd);
/* Make @p known under p->fd. Return: 0 or -ENOMEM. */
int peer_table_set(struct peer_table *t, struct peer *p);
/* Return: borrowed, or NULL. */
struct peer *peer_table_find(const struct peer_table *t, int fd);
/* Remove @p from the lookup. */
void peer_table_clear(struct peer_table *t, const struct peer *p);

/* --- request.c, the thread; a request may come in batch_start, too --- */

/* Make a call and ask core for a request of @slot. Return: 0, -ENOMEM, or -ESHUTDOWN. */
int call_arm(struct slot *slot);
/* The batch of call->next is over. */
void call_on_next_tag(struct tag *tag, bool ok);

/* --- call_lend.c --- */

/* Loop thread: have another thread start the first message, which is lent. */
void call_lend_start(struct rpc_call *call);
/* End that thread; no call is left. Safe without a thread. */
void call_lend_stop(struct rpc_server *s);
/* Loop thread: a message was sent, or was dropped. */
void call_lend_told(struct rpc_call *call);

/* --- call.c --- */

/* Loop thread. Room for one message more, whose buffer the caller fills. Return: it, or NULL. */
struct outgoing *call_outgoing_new(struct rpc_call *call);
/* Start the next batch, if there is something to send and none under way. */
void call_pump(struct rpc_call *call);

/* Requests of its calls now hold @bytes less. */
void peer_let_go(struct peer *p, uint64_t bytes);

/* Any thread. */
void call_unref(struct rpc_call *call);
/* Loop thread; work_cb of a request that has come, and of a further message. */
void call_arrived(struct work *work);
void call_next_arrived(struct work *work);
/* A call that the loop does not need to see: it has no message, or there is no such method. It is
 * answered on the thread where it arrives, so that a client that opens calls and ends them costs
 * the loop nothing. On the thread of on_request. */
void call_refuse_early(struct rpc_call *call);
/* The thread, or the loop thread in batch_start; completions. */
void call_tags_init(struct rpc_call *call);
/* The last call is freed and core is down. Any thread; implemented by rpc_server.c. */
void server_idle(struct rpc_server *s);

#endif
