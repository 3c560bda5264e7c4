/* What a client keeps for its reconnections (reconnect.h). */
#ifndef SHARDD_CLIENT_RECONNECT_TYPES_H
#define SHARDD_CLIENT_RECONNECT_TYPES_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "link.h"
#include "shardd/shardd.h"

enum reconnect_state {
	RECONNECT_IDLE,
	RECONNECT_RUNS,    /* the thread connects */
	RECONNECT_GAVE_UP, /* for good */
};

struct reconnect {
	uint32_t ms;                                                           /* 0: off */
	void (*call)(void *data, const struct shardd_connection_event *event); /* NULL: none */
	void *data;
	char *name;           /* of the session */
	atomic_bool stop;     /* the client is being closed */
	pthread_mutex_t lock; /* over what follows and over shardd_client.link; taken last */
	pthread_cond_t changed;
	enum reconnect_state state;
	bool made; /* @thread was started and not joined yet */
	pthread_t thread;
	struct link *former;
	struct shardd_error failed; /* with GAVE_UP */
	uint32_t took_ms;           /* the last reconnection */
	atomic_uint count;          /* of reconnections */
	atomic_bool outlives;       /* the daemon's jobs outlive it, as it said last */
};

#endif
