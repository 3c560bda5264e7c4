/*
 * Links to the daemons of other nodes.
 *
 * A node listens for others, and dials those that it needs. A link is one stream of messages each way,
 * over TCP, with mutual TLS. It is up when both ends have said who they are and have accepted each
 * other; messages then come in the order in which they were sent, or the link ends. Each end pings twice
 * a second: a link whose other end has sent nothing for PEER_SILENCE_US is gone, and one whose connection
 * is closed is gone at once. Nobody dials again by itself.
 *
 * If a node connects again, its older links end: all of them if its daemon is another one, else those
 * that were dialled by the same end.
 *
 * Loop thread only. A callback runs on the loop, never inside a function that the owner calls.
 */
#ifndef SHARDD_PEER_H
#define SHARDD_PEER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "core/fault.h"
#include "core/loopq.h"
#include "core/name.h"
#include "peer.pb-c.h"

#define PEER_INSTANCE_BYTES 16
#define PEER_MESSAGE_BYTES  (UINT64_C(4) << 20) /* the largest one, packed */

#define PEER_PING_US    500000u
#define PEER_SILENCE_US 1250000u
#define PEER_GREET_US   5000000u /* from the connection until the link is up */

struct peers; /* this node's end of all links */
struct peer;  /* a link */

/* What a callback borrows is valid until it returns. */
struct peers_ops {
	/* Both ends have accepted each other. */
	void (*up)(void *userdata, struct peer *p);
	/* Neither hello, ping, nor bye. */
	void (*message)(void *userdata, struct peer *p, const Shardd__V1__PeerMessage *m);
	/* The link has ended; @p is freed then. Once for each link that was dialled, and for each other
	 * one that was up. @why: one sentence. */
	void (*gone)(void *userdata, struct peer *p, const char *why);
	/* (optional) A link that another node has begun, and that has never been up, has ended. @from: its
	 * address. What fails before there is a stream, as TLS, is not told. */
	void (*refused)(void *userdata, const char *from, const char *why);
};

struct peers_options {
	const char *listen;                    /* HOST:PORT; port 0: any that is free */
	const char *cluster;                   /* not empty */
	const char *node;                      /* the name of this one */
	uint8_t instance[PEER_INSTANCE_BYTES]; /* of this run of the daemon: random */
	/* Paths of PEM files: all, or none. They are read again when they change; links that are up stay.
	 * Another node's certificate must be signed by @ca, and have its name as a DNS name. */
	const char *ca, *cert, *key;
	uint32_t reload_s; /* how often it is looked whether they have changed; 0: 5 */
	/* Without certificates: other addresses than those of loopback are allowed, too. */
	bool insecure;
	/* The nodes that may connect. NULL: each one that says the cluster's name and that, if there are
	 * certificates, @ca has signed. */
	const char *const *allowed;
	size_t n_allowed;
	uint32_t max_links;  /* 0: 1024; of both directions, up or not */
	uint64_t max_queued; /* bytes that wait on one link; 0: 16 MiB */
};

/* Listen. It begins a thread, which packs and unpacks, and has no state. All of @o is copied; @loopq,
 * @ops: borrowed.
 * Return: 0 or a fault code: INVALID or DENIED with the option, INTERNAL (the address is in use). */
int peers_new(struct loopq *loopq, const struct peers_options *o, const struct peers_ops *ops,
	      void *userdata, struct peers **ret, struct fault *f);
/* The port that it listens on. */
uint16_t peers_port(const struct peers *ps);

/* Begin a link to node @name, which listens on @at (HOST:PORT); both copied. @ret: borrowed until
 * ops.gone, which comes also if it fails.
 * Return: 0 or a fault code: INVALID, DENIED (not among the allowed nodes; plaintext), EXHAUSTED. */
int peers_connect(struct peers *ps, const char *name, const char *at, struct peer **ret,
		  struct fault *f);

/* Ping, and end links that are silent or have not been up in time. Call it four times a second or more,
 * with clock_now_us. Time is counted only while it is called so often: when the loop was blocked, what
 * others have sent meanwhile is still waiting to be read, and their silence is not theirs. */
void peers_tick(struct peers *ps, uint64_t now_us);

/* A link to node @name that is up, borrowed until ops.gone; NULL: there is none. */
struct peer *peers_find(struct peers *ps, const char *name);

/* No callback comes any more, except @done (optional), soon. All links end. The memory is freed then. May
 * be called inside a callback. */
typedef void (*peers_closed_cb)(void *userdata);
void peers_close(struct peers *ps, peers_closed_cb done, void *userdata);

/* Send @m, which is packed at once: borrowed. In order. The link is up, or has ended: then nothing
 * happens. A message that is too large, or finds too many bytes waiting, ends the link. */
void peer_send(struct peer *p, const Shardd__V1__PeerMessage *m);
/* End it. @why is told to the other end, and here. ops.gone comes. What waits to be sent is dropped. */
void peer_end(struct peer *p, const char *why);

/* Of the node at the other end; of one that was dialled, from the beginning. */
const char *peer_name(const struct peer *p);
/* This end has dialled. */
bool peer_is_dialled(const struct peer *p);
/* The owner's own, NULL at first. */
void peer_set_data(struct peer *p, void *data);
void *peer_data(const struct peer *p);

#endif
