/*
 * The gate in front of gRPC core: it reads each gRPC connection itself, follows HTTP/2's
 * frames (net/gate_flow.h), and passes both directions on unchanged through a socket
 * pair whose other end core reads. Data that exceeds a limit never reaches core.
 *
 * One thread, "shardd-gate", moves the bytes: what gRPC clients send costs the loop no
 * turn. It owns the descriptors and the state of the connections that are open, and
 * knows nothing of sessions. It tells the loop through the loop's queue that a limit was exceeded;
 * the loop closes the connection and logs it.
 *
 * Each direction has one buffer. While it is not empty nothing more is read for it, so a side that
 * does not receive stops the other one. All functions: loop thread, unless stated otherwise.
 */
#ifndef SHARDD_NET_GATE_H
#define SHARDD_NET_GATE_H

#include <stdint.h>

#include "core/loopq.h"
#include "net/conn.h"
#include "net/gate_limits.h"

struct gate;
struct gate_conn;

/* Start the thread. @loopq: borrowed, open until gate_close. @limits: copied.
 * Return: 0 or negative errno. */
int gate_new(struct loopq *loopq, const struct gate_limits *limits, struct gate **ret);

/* New limits, for open connections too. Without memory the old ones stay. */
void gate_reconfigure(struct gate *g, const struct gate_limits *limits);

/* Put the gate before @c, of which it duplicates the socket. @c must outlive
 * gate_conn_end.
 * @user_bytes: how much the user's connections together may have in messages that are not
 * complete; UINT64_MAX: no limit.
 * @ret_fd: core's end of the pair, non-blocking; the caller's.
 * @ret: the caller ends it with gate_conn_end when @c has closed.
 * Return: 0 or negative errno. */
int gate_open(struct gate *g, struct conn *c, uint64_t user_bytes, int *ret_fd,
	      struct gate_conn **ret);

/* @gc has a session: the limits of attached connections hold. */
void gate_attached(struct gate_conn *gc);

/* The limit of the user has changed. It holds for all connections of the user. */
void gate_set_user_bytes(struct gate_conn *gc, uint64_t user_bytes);

/* Bytes of messages that @gc has begun to send and not finished. */
uint64_t gate_held_bytes(const struct gate_conn *gc);

/* The conn is about to be freed: it gets no more news. The thread soon passes on what core has sent
 * by now, then shuts the socket down and closes both descriptors. NULL is allowed. */
void gate_conn_end(struct gate_conn *gc);

/* The time when the thread was last alive, on the clock of clock_now_us; it wakes several times a
 * second. Any thread. */
uint64_t gate_heartbeat_us(const struct gate *g);

/* Stop the thread and wait for it; every gate_conn has been ended. NULL is allowed.
 * Return: NULL. */
struct gate *gate_close(struct gate *g);

#endif
