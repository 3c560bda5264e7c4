/*
 * Coordination: what the daemons of several nodes agree on, in a store that decides (etcd).
 *
 * The store holds keys with values and revisions. Each change of the store has a revision, which grows.
 * A key has two: that of its creation and that of its last change. A transaction compares such
 * revisions, and changes keys only if all are as expected: so a decision is one transaction, and the
 * creation revision of the key that makes somebody the leader fences everything that it decides.
 * Keys may hang on a lease, and go with it. A watch says what has changed.
 *
 * Asynchronous: a call is started from the loop, and its callback runs on the loop, exactly once, never
 * inside the function that starts it. Keys are text under the prefix of the options. Loop thread only.
 */
#ifndef SHARDD_COORD_H
#define SHARDD_COORD_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "core/fault.h"
#include "core/loopq.h"

struct coord;

enum coord_status {
	COORD_OK,
	/* Nobody has answered in time, or the connection is lost. What was asked may have been done. */
	COORD_DOUBT,
	/* The store has refused it: nothing was done. */
	COORD_REFUSED,
	/* The lease is gone. Nothing was done. */
	COORD_NO_LEASE,
};

struct coord_kv {
	const char *key; /* behind the prefix of the options */
	const uint8_t *value;
	size_t bytes;
	int64_t created, modified; /* revisions */
	int64_t lease;             /* 0: none */
};

/* What the store has answered. All is borrowed during the callback. */
struct coord_reply {
	enum coord_status status;
	const char *why;            /* unless OK: one sentence */
	int64_t revision;           /* of the store, when it answered */
	bool succeeded;             /* a transaction: all conditions were true */
	const struct coord_kv *kvs; /* what was read, ordered by key */
	size_t n;
	int64_t lease; /* the new one, or that which was kept */
	int64_t ttl_s;
};

struct coord_call;
typedef void (*coord_done_cb)(struct coord_call *call, const struct coord_reply *reply);

/* One call, embedded by its owner, borrowed until the callback or coord_cancel. Zero at first. */
struct coord_call {
	coord_done_cb done;
	struct coord *owner; /* set by the function that starts it */
	void *impl;          /* the store's own; NULL: it does not run */
};

/* @created or @modified is the revision that the key must have: 0: the key does not exist. */
struct coord_cond {
	const char *key;
	bool modified;
	int64_t revision;
};

struct coord_change {
	const char *key;
	bool remove;
	const void *value;
	size_t bytes;
	int64_t lease; /* 0: none */
};

/* The arrays are borrowed by the function only. At most COORD_MAX_OPS conditions, changes and reads. */
struct coord_txn {
	const struct coord_cond *conds;
	size_t n_conds;
	const struct coord_change *changes; /* if all conditions are true; a key at most once */
	size_t n_changes;
	/* What is read, after the changes, whether they were made or not. NULL: nothing. */
	const char *read;
	bool prefix; /* all keys that begin with @read */
};

/* etcd allows 128 operations and 1.5 MiB a request, by default. */
#define COORD_MAX_OPS   120u
#define COORD_MAX_BYTES (UINT64_C(1) << 20)

/* Make a transaction. It takes effect at once or not at all; reads are linearizable. @timeout_ms: then
 * it ends with COORD_DOUBT. Return: 0, -EINVAL (too large), or -ENOMEM. */
int coord_txn(struct coord *c, struct coord_call *call, const struct coord_txn *txn,
	      uint32_t timeout_ms);
/* A new lease of @ttl_s seconds. */
int coord_grant(struct coord *c, struct coord_call *call, int64_t ttl_s, uint32_t timeout_ms);
/* It begins from its start. etcd 3.4 may say so of one that is gone: conditions decide, not this. */
int coord_keep(struct coord *c, struct coord_call *call, int64_t lease, uint32_t timeout_ms);
/* The lease ends, and its keys go. */
int coord_revoke(struct coord *c, struct coord_call *call, int64_t lease, uint32_t timeout_ms);
/* Its callback does not come any more. It may take effect. Safe if it does not run. */
void coord_cancel(struct coord_call *call);

struct coord_event {
	struct coord_kv kv; /* of a key that was removed: key and modified only */
	bool removed;
};

struct coord_watch;

/* Exactly one of these is called for each piece of news. @revision: all changes up to it were told. */
struct coord_watch_ops {
	void (*events)(struct coord_watch *w, const struct coord_event *events, size_t n,
		       int64_t revision);
	/* It is over, and may be begun again. @compacted: changes were missed: read all of it first. */
	void (*ended)(struct coord_watch *w, bool compacted, const char *why);
};

struct coord_watch {
	const struct coord_watch_ops *ops;
	struct coord *owner; /* set by coord_watch_begin */
	void *impl;          /* the store's own; NULL: it does not run */
};

/* Tell changes of keys that begin with @prefix, from revision @from on (included).
 * Return: 0 or -ENOMEM. */
int coord_watch_begin(struct coord *c, struct coord_watch *w, const char *prefix, int64_t from);
/* Nothing more is told. Safe if it does not run. */
void coord_watch_end(struct coord_watch *w);

/* All calls and watches must be over or cancelled. NULL is allowed. Return: NULL. */
struct coord *coord_close(struct coord *c);

struct coord_options {
	const char *const *endpoints; /* HOST:PORT (core/hostport.h) */
	size_t n_endpoints;
	const char *prefix;          /* of all keys: "/shardd/NAME/"; not empty */
	const char *user, *password; /* NULL: none */
	/* TLS: paths of PEM files, which are read again when they change. NULL: @ca: no TLS; @cert and
	 * @key, which need @ca: no certificate of our own. */
	const char *ca, *cert, *key;
};

/* A store in etcd, 3.4.23 or newer. It begins a thread; the connection is made when it is needed, and
 * again after it was lost; another endpoint is tried then. All of @o is copied. @loopq: borrowed.
 * Return: 0 or a fault code: INVALID_ARGUMENT with the endpoint. */
int coord_etcd_new(struct loopq *loopq, const struct coord_options *o, struct coord **ret,
		   struct fault *f);

#endif
