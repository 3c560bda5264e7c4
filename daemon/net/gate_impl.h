/*
 * Shared by gate.c and gate_pipe.c. No other file includes this.
 *
 * A gate_conn has two owners, the loop and the thread, and a reference for each piece of
 * news on its way; the last one frees it. Fields marked (loop) belong to the loop thread,
 * (both) are atomic or fixed, all others belong to the thread from the first news on.
 */
#ifndef SHARDD_NET_GATE_IMPL_H
#define SHARDD_NET_GATE_IMPL_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#include "core/list.h"
#include "core/loopq.h"
#include "core/mpsc.h"
#include "net/gate.h"
#include "net/gate_flow.h"

#define GATE_MAGIC      0x47415445u
#define GATE_CONN_MAGIC 0x47434f4eu

/* Bytes that are read at once from one side of a connection; then the others have their turn. */
#define GATE_TURN_BYTES 65536u

/* Bytes that wait to be written. */
struct gate_buffer {
	uint8_t *data; /* owned; NULL: none */
	size_t at;     /* the first that was not written */
	size_t passed; /* behind the last that may be written */
	size_t end;
};

/* One of the two sockets. */
struct gate_side {
	struct gate_conn *gc;
	int fd;          /* owned; -1: closed */
	uint32_t events; /* what epoll looks for; 0: it is not in the set */
	bool ended;      /* it sends nothing more */
};

/* All connections of a user. */
struct gate_user {
	struct list link;
	uid_t uid;
	uint32_t n;
	struct gate_purse purse;
};

/* Requests of the loop to the thread; bits of gate_conn.asked. */
enum { GATE_ASK_ADD = 1, GATE_ASK_ATTACHED = 2, GATE_ASK_END = 4, GATE_ASK_LIMIT = 8 };

struct gate_conn {
	uint32_t magic;
	atomic_uint refs;   /* (both) */
	atomic_uint asked;  /* (both) */
	atomic_bool queued; /* (both) it is in gate.inbox */
	struct mpsc_node node;
	struct gate *gate;           /* (both) */
	uid_t uid;                   /* (both) */
	pid_t pid;                   /* (both) */
	_Atomic uint64_t user_bytes; /* (both) the limit of its user */
	_Atomic uint64_t held;       /* (both) flow.charged, as the loop may see it */
	struct conn *conn;           /* (loop) borrowed; NULL: ended */
	struct work broken;          /* the news of a breach */

	struct list link;    /* gate.conns */
	struct list waiting; /* gate.waiting or gate.paced while it stalls */
	struct gate_user *user;
	struct gate_side client, core;
	struct gate_buffer up, down;
	struct gate_flow flow;
	bool open; /* the thread has it */
	/* Core has sent its settings. The client is not read before: core reads what is there when
	 * it gets a connection on the loop's thread, later on threads of its own. */
	bool core_spoke;
	bool core_deaf;         /* core accepts no more data, and the client had not ended */
	bool closed;            /* nothing is moved any more; the loop closes it */
	uint64_t core_ended_us; /* since when the rest waits for the client */
	uint64_t linger_us;     /* when its next calls are ended; 0: it does not linger */
	uint64_t linger_end_us; /* when all that are left are ended at once */
};

/* One line of the log was written about it. */
struct gate_logged {
	uid_t uid;
	const char *limit;
	uint64_t at_us;
	uint64_t repeats;
};

#define GATE_LOGGED 64u

struct gate {
	uint32_t magic;
	struct loopq *loopq;
	pthread_t thread;
	int epoll_fd, wake_fd;
	struct mpsc inbox;
	atomic_bool stopping;
	_Atomic uint64_t heartbeat_us;
	_Atomic(struct gate_limits *) new_limits; /* passed on by the loop; owned */

	struct gate_limits limits;
	struct gate_purse total;
	struct list conns, waiting, users;
	struct list paced;     /* those that stall for a moment only */
	uint64_t returns_seen; /* of @total at the last retry of those that wait */
	uint8_t scratch[GATE_TURN_BYTES];

	struct gate_logged logged[GATE_LOGGED]; /* (loop) */
	unsigned n_logged;
};

/* --- gate_pipe.c, the thread --- */

/* Add both sockets to the epoll set. Return: 0 or negative errno. */
int gate_pipe_open(struct gate_conn *gc, uint64_t now_us);
/* Handle @events of epoll at @side. */
void gate_pipe_ready(struct gate_side *side, uint32_t events, uint64_t now_us);
/* Retry the connections that stalled. */
void gate_pipe_retry(struct gate_conn *gc, uint64_t now_us);
/* Deadlines. */
void gate_pipe_tick(struct gate_conn *gc, uint64_t now_us);
/* The client is gone. Return: true: gate_pipe_linger must end core's calls one by one
 * first; false: it may be closed. */
bool gate_pipe_end(struct gate_conn *gc, uint64_t now_us);
/* End some calls. Return: whether it is over. */
bool gate_pipe_linger(struct gate_conn *gc, uint64_t now_us);
/* Close both sockets, give everything back. */
void gate_pipe_close(struct gate_conn *gc);

/* --- gate.c --- */

/* gc->flow.breach happened: tell the loop. The thread. */
void gate_broken(struct gate_conn *gc);

#endif
