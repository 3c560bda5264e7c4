/*
 * Where members of communicators on several nodes meet: keys that are written once, kept by the leader
 * of a job for each epoch. Threads of an engine set and get them, and wait; the loop sends and receives.
 *
 * An exchange is a key with a value of each member. The leader collects them; when it has all of them, every
 * node gets them all at once.
 */
#ifndef SHARDD_CLUSTER_RENDEZVOUS_H
#define SHARDD_CLUSTER_RENDEZVOUS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "core/loopq.h"
#include "engine/engine.h"

/* Of a key, with the 0 at its end. */
#define RENDEZVOUS_KEY_BYTES 320u

/* An exchange has at most so many members, with values of so many bytes. */
#define RENDEZVOUS_MEMBERS     1024u
#define RENDEZVOUS_VALUE_BYTES 4096u

struct rendezvous;

/* A value of an exchange. */
struct rendezvous_gift {
	const char *key;
	unsigned size, member;
	const void *value;
	size_t bytes;
};

/* What is known of an exchange. */
struct rendezvous_all {
	unsigned size, n; /* members; those whose value is there */
	unsigned missing; /* the first one whose value is not; @size: none */
	size_t bytes;     /* of a value */
	const uint8_t *values;
};

enum {
	RENDEZVOUS_E_KNOWN = 1, /* the member has given that value before */
	RENDEZVOUS_E_WRONG = 2, /* too large, or it contradicts what is there */
};

/* On the loop, for what a thread has asked. */
struct rendezvous_ops {
	/* @key has this value: it goes to the leader. */
	void (*set)(void *userdata, const char *key, const void *value, size_t bytes);
	/* Somebody here waits for @key: rendezvous_put follows. */
	void (*get)(void *userdata, const char *key);
	/* A member here gives a value: it goes to the leader, and rendezvous_take follows. Again: which member
	 * is missing is asked for. */
	void (*give)(void *userdata, const struct rendezvous_gift *g);
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
/* Is there a value of @key, or an exchange, or does somebody wait for it? */
bool rendezvous_is_known(struct rendezvous *r, const char *key);
/* At the leader: node @node of the epoch waits for @key, until it is dropped. Return: 0, -ECANCELED: the epoch
 * is over, or -ENOMEM (also for a key that is too long). */
int rendezvous_await(struct rendezvous *r, const char *key, unsigned node);
/* One of those that wait for @key, in the order in which they came; it waits no more. Return: false: there is none. */
bool rendezvous_next_waiter(struct rendezvous *r, const char *key, unsigned *ret_node);

/* At the leader: node @node of the epoch has given a value.
 * Return: 0, RENDEZVOUS_E_KNOWN or _WRONG, -ECANCELED: the epoch is over, or -ENOMEM (also for a key that is too
 * long). */
int rendezvous_give(struct rendezvous *r, const struct rendezvous_gift *g, unsigned node);
/* What is there of the exchange @key; values that are there stay until it is dropped. Return: whether there is one. */
bool rendezvous_see(struct rendezvous *r, const char *key, struct rendezvous_all *ret);
/* The node that has given the value of @member; UINT_MAX: this one has, or there is none. */
unsigned rendezvous_from(struct rendezvous *r, const char *key, unsigned member);
/* At the leader: are all values there, and is it asked for the first time since? */
bool rendezvous_finish(struct rendezvous *r, const char *key);
/* From the leader: @bytes of values, those of member @first and the ones behind it. 0 bytes: the value of @first is
 * the one that is missing. Nothing happens if there is no such exchange here. Return: 0 or RENDEZVOUS_E_WRONG. */
int rendezvous_take(struct rendezvous *r, const char *key, unsigned size, unsigned first,
		    const void *values, size_t bytes);

/* No communicator is made any more whose keys begin with @prefix: waits for them end with an error. */
void rendezvous_drop(struct rendezvous *r, const char *prefix);

#endif
