/*
 * libshardd: the client library for the shardd of the node.
 *
 * A client is one connection and one session. A trainer joins a job as a rank,
 * registers its units, and then, step by step, gathers full parameters, hands in
 * gradients and lets the daemon reduce them and step the optimizer. Memory is
 * mapped; it is never copied through the socket.
 *
 * An op is submitted by shardd_submit_VERB, which takes the verb's options and returns
 * at once with a ticket (shardd/ops.h, shardd/ddp.h). Ops that use the same unit run in
 * submission order; other ops run concurrently. A ticket ends with one shardd_wait
 * that neither times out nor is interrupted, or with shardd_detach. shardd/blocking.h has a
 * function for each verb that submits, waits and copies the result out.
 *
 * Structs that begin with a size may grow. The caller sets size to the sizeof of the
 * struct, which SHARDD_OPTIONS does; all fields that are 0 have their default. A
 * library that is older than the caller refuses fields that it does not know and that are
 * not 0.
 *
 * Threads: a client may be used by several threads at once; the order of ops is
 * the order in which their calls entered the library. shardd_close must be the
 * last call on a client. A child after fork without exec can use no client of its
 * parent (SHARDD_FAILED_PRECONDITION). It can connect only if the parent had no
 * connection when it forked, because gRPC core cannot be used on both sides of a fork.
 *
 * Errors: functions return 0 or a negative enum shardd_code. Where an argument
 * `struct shardd_error *err` is not NULL it is filled on failure. An op that is
 * refused, or that ends before its peers have called it, has changed nothing.
 *
 * Each size says whether it is in bytes or elements; shapes are row-major.
 *
 * This header includes the others: types.h (errors, handles), client.h (connection, job, units,
 * waits, device memory), ops.h and ddp.h (the verbs), blocking.h (their blocking forms),
 * publication.h, base.h and helpers.h.
 */
#ifndef SHARDD_SHARDD_H
#define SHARDD_SHARDD_H

#include "shardd/base.h"
#include "shardd/blocking.h"
#include "shardd/client.h"
#include "shardd/ddp.h"
#include "shardd/helpers.h"
#include "shardd/ops.h"
#include "shardd/publication.h"
#include "shardd/types.h"

#endif
