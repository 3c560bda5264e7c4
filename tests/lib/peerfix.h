/*
 * Nodes with links between them, on one loop of the test's process, and one in a process of its own that
 * can be killed. They listen on ports of 127.0.0.1.
 */
#ifndef SHARDD_TESTS_PEERFIX_H
#define SHARDD_TESTS_PEERFIX_H

#include <sys/types.h>

#include "looprun.h"
#include "peer/peer.h"

struct peerfix_node {
	struct peers *ps; /* NULL: not begun, or closed */
	struct peers_options o;
	struct peer *last; /* that came up last; NULL: it is gone */
	unsigned ups, gones, refusals;
	char why[512];     /* of the last one that is gone */
	char refused[512]; /* of the last one that was refused */
	uint64_t messages;
	bool disordered; /* peerfix_send counts; these did not come so */
	bool closed;
	char at[32]; /* 127.0.0.1:PORT */
};

struct peerfix {
	struct looprun run;
	uv_timer_t timer; /* ticks all of them */
	bool held;        /* it does not */
	unsigned descriptors;
	struct peerfix_node nodes[4];
};

extern struct peerfix peerfix;

/* .init and .fini, with a check of descriptors. */
void peerfix_begin(void);
void peerfix_end(void);

/* Node @name, of cluster "test"; @o: other options, NULL: none. Fails the test on a fault. */
struct peerfix_node *peerfix_node(const char *name, const struct peers_options *o);
void peerfix_close(struct peerfix_node *n);

/* Fails the test on a fault. Return: a link that has begun. */
struct peer *peerfix_connect(struct peerfix_node *from, const char *name, const char *at);
/* And wait until it is up on both sides. */
void peerfix_link(struct peerfix_node *from, struct peerfix_node *to);
/* Until so many are up, gone, or refused, since its begin. */
void peerfix_await_up(struct peerfix_node *n, unsigned ups);
void peerfix_await_gone(struct peerfix_node *n, unsigned gones);
void peerfix_await_refused(struct peerfix_node *n, unsigned refusals);
void peerfix_await_messages(struct peerfix_node *n, uint64_t messages);
/* Turn the loop for a while, to see that something does not happen. */
void peerfix_turn(unsigned ms);

/* A message about a job that has @number as its epoch, and an order of @bytes. */
void peerfix_send(struct peer *p, uint64_t number, size_t bytes);

/* Node @name in a process of its own, which sends a message each 20 ms to whoever connects. Before
 * peerfix_begin: a process with gRPC core cannot be forked. @at: 32 bytes. Return: its pid. */
pid_t peerfix_fork(const char *name, char *at);
void peerfix_reap(pid_t pid);

#endif
