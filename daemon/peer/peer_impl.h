/*
 * Links: what their files share.
 *
 *   ARMED --a stream--> GREETING --its hello--> AGREED --its first ping--> UP     the end that listens
 *            (dialled)  GREETING --its hello-----------------------------> UP     the one that dialled
 *   any but ARMED --refused, silent, closed, ended by its owner--> ENDED
 *
 * Threads: the loop starts batches of gRPC core and has all state. The thread takes the events of the
 * completion queue, unpacks what was received, and posts each event to the loop. A batch and what core
 * writes for it belong to core and the thread from its start to its post.
 *
 * A link is freed when its last reference is dropped: one until its end was told, one for each batch.
 */
#ifndef SHARDD_PEER_IMPL_H
#define SHARDD_PEER_IMPL_H

#include <grpc/grpc.h>
#include <grpc/grpc_security.h>
#include <pthread.h>
#include <stdarg.h>

#include "core/list.h"
#include "peer/peer.h"

#define PEER_PROTOCOL    1u
#define PEER_METHOD      "/shardd.v1.PeerService/Link"
#define PEER_MAGIC       0x70656572u
#define PEER_WHY_BYTES   400
#define PEER_PLACE_BYTES 128
/* With which an end says why. Other statuses are those of gRPC core. */
#define PEER_STATUS GRPC_STATUS_ABORTED

enum peer_state { PEER_ARMED, PEER_GREETING, PEER_AGREED, PEER_UP, PEER_ENDED };

/* What was received. */
enum peer_read { PEER_READ_END, PEER_READ_MESSAGE, PEER_READ_BAD };

/* A batch of gRPC core. */
struct peer_tag {
	struct work work;
	work_cb fn; /* on the loop */
	struct peer *peer;
	void (*then)(struct peer *p); /* the same, of a link */
	bool ok;
};

/* A packed message that waits to be sent. */
struct peer_out {
	struct list link;
	grpc_byte_buffer *buffer;
	uint64_t bytes; /* that are charged */
};

struct peer {
	uint32_t magic;
	unsigned refs;
	struct list link; /* ps->links */
	struct peers *ps;
	uint8_t state; /* enum peer_state */
	bool dialled;
	char name[NAME_BYTES];
	char at[PEER_PLACE_BYTES]; /* the other end's address */
	uint8_t instance[PEER_INSTANCE_BYTES];
	void *data;

	uint64_t begun_us, heard_us, pinged_us, ended_us;
	char why[PEER_WHY_BYTES]; /* of its end */
	struct work gone;         /* tells it, later */
	bool shown;               /* its owner knows it, or will */

	/* Core's. */
	grpc_channel *channel; /* of one that was dialled */
	grpc_call *call;
	grpc_metadata_array initial, trailing;
	grpc_call_details request;
	grpc_status_code status;
	grpc_slice details;
	int cancelled;
	grpc_byte_buffer *incoming;
	struct peer_tag requested, begun, received, sent, ended;

	/* The thread's, until the loop has @received. */
	enum peer_read read;
	Shardd__V1__PeerMessage *message;

	bool over;    /* the stream has ended */
	bool lingers; /* peer_stream_linger */

	struct {
		struct list waiting;      /* of struct peer_out */
		struct peer_out *sending; /* the one that is under way, in no list */
		uint64_t bytes;           /* of all of them */
		bool bye;                 /* it has to be said, when nothing is under way */
	} out;
};

struct bulk;

struct peers {
	struct loopq *loopq;
	const struct peers_ops *ops;
	void *userdata;
	char *cluster, *node;
	uint8_t instance[PEER_INSTANCE_BYTES];
	char **allowed; /* NULL: all */
	size_t n_allowed;
	uint32_t max_links;
	uint64_t max_queued;
	bool plain_anywhere; /* without certificates, too */

	grpc_completion_queue *cq;
	grpc_server *server;
	uint16_t port;
	pthread_t thread;
	/* TLS; NULL: plaintext */
	grpc_tls_certificate_provider *certs;
	grpc_channel_credentials *dial_creds;
	grpc_server_credentials *listen_creds;

	struct list links;
	unsigned n_links;
	unsigned n_armed;
	unsigned n_live;    /* struct peer, what fetches have, and 1 until the server is down */
	uint64_t looked_us; /* the last tick, or the begin */
	bool closing;
	struct bulk *bulk; /* fetches */
	struct peer_tag down;
	struct work over; /* the thread ends */
	peers_closed_cb closed;
	void *closed_data;
};

/* ----------------------------------------------------------------- peer.c */

/* A link with one reference, of its end, in no list. Return: NULL without memory. */
struct peer *peer_new(struct peers *ps);
void peer_unref(struct peer *p);
/* A stream is there, or is begun. */
void peer_begin(struct peer *p);
/* It has ended; it is told at once. Only in callbacks of the loop: @p may be used until they return. */
void peer_fail(struct peer *p, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
/* The same, in what an owner calls: it is told later. */
void peer_fail_later(struct peer *p, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
/* @m is owned by the caller. */
void peer_on_message(struct peer *p, const Shardd__V1__PeerMessage *m);
/* Another thing that must be gone before the queues are shut down. */
void peers_hold(struct peers *ps);
void peers_drop(struct peers *ps);
/* May this node dial @name at @at? Return: 0 or a fault code. */
int peers_check_connect(const struct peers *ps, const char *name, const char *at, struct fault *f);
/* To @name at @at. @more, @n: arguments besides those of all channels. */
grpc_channel *peers_channel_new(const struct peers *ps, const char *name, const char *at,
				const grpc_arg *more, size_t n);

/* ---------------------------------------------------------- peer_stream.c */

void *peer_stream_main(void *peers);
void peer_stream_init(struct peer *p);
/* Its channel cannot be destroyed yet: there is a reference again. Once. */
bool peer_stream_linger(struct peer *p);
void peer_stream_deinit(struct peer *p);
/* A batch; @p is referenced until it is over. */
void peer_stream_hold(struct peer *p);
/* @p->call is there: begin to receive. */
void peer_stream_begin(struct peer *p);
/* As peer_send, in any state. */
void peer_stream_send(struct peer *p, const Shardd__V1__PeerMessage *m);
/* The link has ended, and @p->why says why. @silent: the other end does not answer. */
void peer_stream_end(struct peer *p, bool silent);

/* ----------------------------------------------------------- peer_hello.c */

bool peer_hello_is_allowed(const struct peers *ps, const char *name);
void peer_hello_send(struct peer *p);
/* What this node says; it borrows of @ps. */
void peer_hello_fill(const struct peers *ps, Shardd__V1__PeerHello *ret);
/* May @p be a link with the node that says @h? Takes its name and instance. Return: 0, or -EPERM with the
 * reason in @why. */
int peer_hello_check(struct peer *p, const Shardd__V1__PeerHello *h, char *why, size_t bytes);
/* May the node that says @h talk with this one, in @call? @at: its address. @expected: its name, if this
 * node has dialled it; NULL: it has not. Return: as above. Any thread. */
int peer_hello_check_call(const struct peers *ps, grpc_call *call, const char *at,
			  const char *expected, const Shardd__V1__PeerHello *h, char *why,
			  size_t bytes);
/* Other's text: in place, printable ASCII and short. */
void peer_hello_clean(char *text);

/* ---------------------------------------------------------- peer_server.c */

/* Return: 0 or a fault code. */
int peer_server_listen(struct peers *ps, const char *at, struct fault *f);
/* Ask core for streams. */
void peer_server_arm(struct peers *ps);
/* The address of the other end of @call, of PEER_PLACE_BYTES. */
void peer_server_address(grpc_call *call, char *ret);

/* ------------------------------------------------------------- peer_tls.c */

/* The credentials, of certificates or without. Return: 0 or a fault code. */
int peer_tls_init(struct peers *ps, const struct peers_options *o, struct fault *f);
/* Safe twice. */
void peer_tls_deinit(struct peers *ps);
/* Does the other end's certificate have the DNS name @name? @ret_names: those that it has. */
bool peer_tls_has_name(grpc_call *call, const char *name, char *ret_names, size_t bytes);

/* --------------------------------------------------------- peer_address.c */

/* HOST:PORT, and allowed without certificates. @least: the smallest port. Return: 0 or a fault code. */
int peer_address_check(const struct peers *ps, const char *at, unsigned least, struct fault *f);
/* Why @at cannot be listened on, after core has failed to. Return: a fault code. */
int peer_address_why(const char *at, struct fault *f);

/* ----------------------------------------------------------- bulk_hands.c */

/* The queue of fetches. Nothing listens yet. Return: 0 or a fault code. */
int bulk_hands_new(struct peers *ps, struct fault *f);
/* Their method, of a server that has not started. */
void bulk_hands_register(struct peers *ps);
/* Their threads. Return: 0 or negative errno. */
int bulk_hands_start(struct peers *ps);
/* Ask core for streams. */
void bulk_hands_arm(struct peers *ps);
/* End what is late. @blocked_us: so long the loop has not looked. */
void bulk_hands_tick(struct peers *ps, uint64_t now_us, uint64_t blocked_us);
/* All of them end. */
void bulk_hands_close(struct peers *ps);
/* Nothing is left: the threads end. */
void bulk_hands_shutdown(struct peers *ps);
/* Behind it, or before they have started. */
void bulk_hands_free(struct peers *ps);

#endif
