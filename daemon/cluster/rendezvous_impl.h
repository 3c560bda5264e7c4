/* Shared by the files of rendezvous. */
#ifndef SHARDD_CLUSTER_RENDEZVOUS_IMPL_H
#define SHARDD_CLUSTER_RENDEZVOUS_IMPL_H

#include <pthread.h>

#include "cluster/rendezvous.h"
#include "core/list.h"

struct rendezvous {
	struct loopq *loopq;
	const struct rendezvous_ops *ops;
	void *userdata;
	pthread_mutex_t lock;
	/* under the lock */
	pthread_cond_t news;
	struct list keys;
	struct list exchanges; /* of struct rendezvous_exchange */
	struct list over;      /* of struct rendezvous_over, the oldest first */
	unsigned n_over;
	struct work work;
	bool posted;
};

/* -- with the lock held */

bool rendezvous_is_over(struct rendezvous *r, const char *key);
/* The loop tells the leader what is new. */
void rendezvous_post(struct rendezvous *r);

/* Exchanges (rendezvous_exchange.c). */
struct rendezvous_exchange;
struct rendezvous_exchange *rendezvous_exchange_look(struct rendezvous *r, const char *key);
void rendezvous_exchanges_drop(struct rendezvous *r, const char *prefix);

/* -- without it */

/* The slot of struct comm_store. */
int rendezvous_exchange(void *userdata, struct comm_exchange *e, unsigned timeout_ms);
/* The loop: what is new of them goes to the leader. */
void rendezvous_exchanges_tell(struct rendezvous *r);

#endif
