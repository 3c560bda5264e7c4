/*
 * Calls of a collector with gRPC core. The loop starts them; a thread waits for the events of the completion queue and
 * posts each to the loop, where all state is.
 */
#ifndef SHARDD_OTLP_OTLP_RPC_H
#define SHARDD_OTLP_OTLP_RPC_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "core/fault.h"
#include "core/loopq.h"
#include "otlp/otlp_headers.h"
#include "otlp/otlp_target.h"

struct otlp_rpc;
struct otlp_call;

/* How a call has ended. */
struct otlp_answer {
	int status;          /* of gRPC; 0: good */
	const char *why;     /* a text behind its name; "" if it was good */
	bool again;          /* the same request may succeed later */
	uint64_t wait_ms;    /* then: not before; 0: the collector has not said */
	int64_t rejected;    /* of a good one: spans or points that the collector has not taken */
	const char *warning; /* of a good one: what it says of that; "" */
};

typedef void (*otlp_call_cb)(const struct otlp_answer *a, void *userdata);

/* Connect when there is something to send. @ca: a file, copied; NULL: the machine's. Loop thread, as all here.
 * Return: 0 or a fault code. */
int otlp_rpc_new(struct loopq *loopq, const struct otlp_target *target, const char *ca,
		 struct otlp_rpc **ret, struct fault *f);
/* For calls from now on. @h: taken, also if it fails. */
void otlp_rpc_set_headers(struct otlp_rpc *r, struct otlp_headers *h);
/* No call is under way. Waits for the thread, which ends at once. NULL is allowed. Return: NULL. */
struct otlp_rpc *otlp_rpc_free(struct otlp_rpc *r);

/* Call @method (static) with @data, which is copied. @done: once, from the loop, later.
 * Return: the call, until @done; NULL without memory. */
struct otlp_call *otlp_rpc_call(struct otlp_rpc *r, const char *method, const void *data,
				size_t bytes, uint32_t timeout_ms, otlp_call_cb done,
				void *userdata);
/* It ends soon. */
void otlp_call_cancel(struct otlp_call *c);

/* "UNAVAILABLE" */
const char *otlp_rpc_status_name(int status);

#endif
