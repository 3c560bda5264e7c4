/*
 * One admitted connection: its peer, and its lifetime.
 *
 * Made by the listener once the first bytes said which protocol it is. Owns the
 * socket, and a duplicate to watch for the hang-up; the gate before gRPC core
 * (net/gate.h) has a duplicate of its own, so that a session ends with its connection regardless of
 * the gate and core. Loop thread only.
 */
#ifndef SHARDD_NET_CONN_H
#define SHARDD_NET_CONN_H

#include <stdbool.h>
#include <stdint.h>

#include "core/list.h"
#include "core/proc.h"
#include "core/user.h"

enum conn_protocol { CONN_GRPC, CONN_LOCAL };

/* What a socket costs its user, from accept to its end. */
struct conn_place {
	struct user_charge open;
	struct user_charge unattached; /* until it is a session's, or a channel of one */
};

#define CONN_PLACE_NULL ((struct conn_place){ .open = USER_CHARGE_NULL })

/* Charge a place to @u (NULL: nobody pays). @f may be NULL. Return: 0 or USER_E_LIMIT. */
int conn_place_take(struct conn_place *p, struct user *u, struct fault *f);
/* Safe after CONN_PLACE_NULL and twice. */
void conn_place_give(struct conn_place *p);

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
/* All groups of its process when it connected, as the kernel says, the primary one among them: malloc'ed,
 * the caller's. Return: NULL without memory. */
gid_t *conn_groups(struct conn *c, size_t *ret_n);

/* Move @p into the connection, which has none. */
void conn_set_place(struct conn *c, struct conn_place *p);
/* The user that pays. Return: borrowed, or NULL: nobody pays. */
struct user *conn_account(const struct conn *c);
/* It belongs to a session now, or is a channel of one. Safe to call twice. */
void conn_attached(struct conn *c);

/* A slot for the user of the connection (the session). */
void conn_set_user(struct conn *c, void *user);
void *conn_user(const struct conn *c);

/* @fn is called when conn_set_user gives the connection a user; NULL: no call. */
typedef void (*conn_ridden_cb)(struct conn *c, void *userdata);
void conn_on_ridden(struct conn *c, conn_ridden_cb fn, void *userdata);

/* Has the peer hung up? True also before the closed callback. */
bool conn_hung_up(const struct conn *c);

/* @fn is called once, from the loop: the peer hung up, or the process is gone, or
 * conn_close was called. The conn is freed after it returns. */
void conn_on_closed(struct conn *c, conn_closed_cb fn, void *userdata);

/* From now on the holder of a duplicate of the socket sends the rest and shuts the socket down
 * after the closed callback; conn_close does not. */
void conn_leave_shutdown(struct conn *c);

/* End it from our side: shuts the socket down, which ends gRPC's side too. The
 * closed callback follows from the loop. Safe to call twice. */
void conn_close(struct conn *c);

#endif
