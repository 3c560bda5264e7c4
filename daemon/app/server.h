/*
 * The composition root: owns loop, listener, gRPC server, device, engine, jobs and
 * sessions; knows the order in which they start and stop. Loop thread only.
 */
#ifndef SHARDD_SERVER_H
#define SHARDD_SERVER_H

#include <uv.h>

#include "app/inherited.h"
#include "config/config.h"
#include "core/fault.h"

struct server;

typedef void (*server_stopped_cb)(void *userdata);

/* Build everything and listen. @config: copied. @in: borrowed; its socket (without one
 * config->socket is bound) and its slabs are taken out of it. Return: 0 or a fault code: then
 * nothing is left of the server, and what @in has is as it was. */
int server_new(uv_loop_t *loop, const struct config *config, struct inherited *in,
	       struct server **ret, struct fault *f);

/* Would a successor take the jobs over? */
bool server_can_hand_over(const struct server *s);

/* New limits (SIGHUP); keys that need a restart keep their values. */
void server_reconfigure(struct server *s, const struct config *config);

/* Where jobs outlive the daemon, and not @for_good: end the connections and leave the jobs to a
 * successor. Else stop admitting jobs and trainers, tell the present trainers to commit and leave, wait for them at
 * most @timeout_ms, then end the remaining ones; @done when no handle of the server is on the loop
 * any more and it has been freed. A second call ends the wait at once. */
void server_stop(struct server *s, bool for_good, uint32_t timeout_ms, server_stopped_cb done,
		 void *userdata);

/* Have the gRPC thread and its gate answered lately, or does the gRPC thread at least use the
 * processor? For the watchdog, which the loop itself feeds. */
bool server_healthy(struct server *s);

/* One line for STATUS=: jobs, trainers, bytes. */
void server_summary(const struct server *s, char *buf, size_t bytes);

/* Most threads that a daemon starts: for kernels, helpers, gRPC core and libuv. */
unsigned server_threads(const struct config *config);

#endif
