/*
 * One admitted connection: who is on the other side, and until when.
 *
 * Made by the listener once the first bytes said which protocol it is. Owns the
 * socket, and a duplicate to watch for the hang-up; the gate before gRPC core
 * (net/gate.h) has a duplicate of its own, so that a session ends with its connection
 * whatever the gate and core do.
 * Loop thread only.
 */
#ifndef SHARDD_NET_CONN_H
#define SHARDD_NET_CONN_H

#include <stdbool.h>
#include <stdint.h>

#include "core/list.h"
#include "core/proc.h"

enum conn_protocol { CONN_GRPC, CONN_LOCAL };

struct conn;
typedef void (*conn_closed_cb)(struct conn *c, void *userdata);

/* Takes @fd (always consumed). @proc: a reference is taken. Watches for hang-up
 * at once. Return: 0 or negative errno. */
int conn_new(uv_loop_t *loop, enum conn_protocol protocol, int fd, struct proc *proc,
	     struct conn **ret);

uint64_t conn_id(const struct conn *c);
enum conn_protocol conn_protocol(const struct conn *c);
struct proc *conn_proc(struct conn *c); /* borrowed */
int conn_fd(const struct conn *c);      /* borrowed */

/* A slot for whoever rides on the connection (the session). */
void conn_set_user(struct conn *c, void *user);
void *conn_user(const struct conn *c);

/* @fn is called when somebody begins to ride on it; NULL: nobody is told. */
typedef void (*conn_ridden_cb)(struct conn *c, void *userdata);
void conn_on_ridden(struct conn *c, conn_ridden_cb fn, void *userdata);

/* Has the peer hung up? True also before the closed callback. */
bool conn_hung_up(const struct conn *c);

/* @fn is called once, from the loop: the peer hung up, or the process is gone, or
 * conn_close was called. The conn is freed after it returns. */
void conn_on_closed(struct conn *c, conn_closed_cb fn, void *userdata);

/* Whoever has a duplicate of the socket passes on what is still to be said, and shuts it down
 * after the closed callback: conn_close does not. */
void conn_leave_shutdown(struct conn *c);

/* End it from our side: shuts the socket down, which ends gRPC's side too. The
 * closed callback follows from the loop. Safe twice. */
void conn_close(struct conn *c);

#endif
