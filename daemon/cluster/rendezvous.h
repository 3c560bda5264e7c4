/*
 * Where members of communicators on several nodes meet: keys that are written once, kept by the leader
 * of a job for each epoch. Threads of an engine set and get them, and wait; the loop sends and receives.
 */
#ifndef SHARDD_CLUSTER_RENDEZVOUS_H
#define SHARDD_CLUSTER_RENDEZVOUS_H

#include <stdbool.h>
#include <stddef.h>

#include "core/loopq.h"
#include "engine/engine.h"

/* Of a key, with the 0 at its end. */
#define RENDEZVOUS_KEY_BYTES 320u

struct rendezvous;

/* On the loop, for what a thread has asked. */
struct rendezvous_ops {
	/* @key has this value: it goes to the leader. */
	void (*set)(void *userdata, const char *key, const void *value, size_t bytes);
	/* Somebody here waits for @key: rendezvous_put follows. */
	void (*get)(void *userdata, const char *key);
};

/* @loopq: borrowed. Return: 0 or -ENOMEM. */
int rendezvous_new(struct loopq *loopq, const struct rendezvous_ops *ops, void *userdata,
		   struct rendezvous **ret);
/* No thread may use it any more (its engines are closed). NULL is allowed. Return: NULL. */
struct rendezvous *rendezvous_free(struct rendezvous *r);

/* For engines: valid as long as it is. */
struct comm_store rendezvous_store(struct rendezvous *r);

/* A value has arrived; the first one of a key stays. Loop thread, as all below. Return: 0, or -ENOMEM
 * (also for a key that is too long). */
int rendezvous_put(struct rendezvous *r, const char *key, const void *value, size_t bytes);
/* Return: the value of @key, borrowed until it is dropped, or NULL. */
const void *rendezvous_find(struct rendezvous *r, const char *key, size_t *ret_bytes);
/* Is there a value of @key, or does somebody wait for it? */
bool rendezvous_is_known(struct rendezvous *r, const char *key);
/* At the leader: node @node of the epoch waits for @key, until it is dropped. Return: 0, -ECANCELED: the epoch
 * is over, or -ENOMEM (also for a key that is too long). */
int rendezvous_await(struct rendezvous *r, const char *key, unsigned node);
/* One of those that wait for @key, in the order in which they came; it waits no more. Return: false: there is none. */
bool rendezvous_next_waiter(struct rendezvous *r, const char *key, unsigned *ret_node);
/* No communicator is made any more whose keys begin with @prefix: waits for them end with an error. */
void rendezvous_drop(struct rendezvous *r, const char *prefix);

#endif
