/*
 * Debug mode (SHARDD_DEBUG=1): a use of memory after it was given back ends with a sentence, and a
 * ticket that was never waited for is reported at close.
 *
 * The client calls these functions where an op is sent, where its memory is handed out, and where
 * its ticket ends. Memory is protected when the op that gives it back is sent, and becomes usable
 * again if that op fails. What only the daemon knows (has the end of a pass let go of a unit?) is
 * taken from the reply.
 *
 * Without debug mode shardd_client.debug is NULL, and nothing here is called. Any thread.
 */
#ifndef SHARDD_CLIENT_DEBUG_H
#define SHARDD_CLIENT_DEBUG_H

#include <protobuf-c/protobuf-c.h>
#include <stdbool.h>
#include <stdint.h>

#include "map.h"
#include "shardd/shardd.h"

struct debug;
struct debug_op;

/* @ret: NULL: SHARDD_DEBUG is not set, or 0. Return: 0 or a negative shardd_code. */
int debug_new(struct debug **ret, struct shardd_error *err);
/* The client ends: report the tickets that are left, protect all that was handed out. NULL is
 * allowed. Return: NULL. */
struct debug *debug_free(struct debug *d);

/* The session is in a new epoch as @rank. @gpu: is its memory that of a GPU? */
void debug_joined(struct debug *d, uint32_t rank, bool gpu);
/* The session has left its job. */
void debug_left(struct debug *d);
/* A unit was registered. @name: copied. */
void debug_unit(struct debug *d, shardd_unit u, const char *name, shardd_group group);

/* An op was sent as number @seq of the session. Called in the order of the numbers. Return: what
 * the ticket keeps, until debug_end; NULL: no memory. */
struct debug_op *debug_begin(struct debug *d, uint64_t seq, const ProtobufCMessage *request);
/* Its reply hands out @data, in @place. @data: becomes the address that the caller is given.
 * Return: 0 or a negative shardd_code. */
int debug_lend(struct debug *d, struct debug_op *op, const ProtobufCMessage *reply,
	       const struct map_place *place, void **data, struct shardd_error *err);
/* Its ticket was detached: it is not reported at close. */
void debug_detached(struct debug *d, struct debug_op *op);
/* Its ticket ends. @reply: NULL: it has failed. */
void debug_end(struct debug *d, struct debug_op *op, const ProtobufCMessage *reply);

/* If the @bytes at *@at are in memory that was handed out: where they are in the slab's own
 * mapping. Else @at stays as it is. @field: the caller's argument. Return: 0, or
 * -SHARDD_INVALID_ARGUMENT: the memory was given back, or is read-only and @write is set. */
int debug_under(struct debug *d, const void **at, size_t bytes, bool write, const char *field,
		struct shardd_error *err);

#endif
