/* The device with this rank's memory: requested in a join and returned by it. */
#ifndef SHARDD_CLIENT_DEVICE_H
#define SHARDD_CLIENT_DEVICE_H

#include "client.h"
#include "shardd.pb-c.h"

/* Take the wanted device from the options of shardd_connect. @options: borrowed.
 * Return: 0 or a negative shardd_code. */
int device_choose(struct shardd_client *c, const struct shardd_options *options,
		  struct shardd_error *err);

/* Fill the device fields of @request, whose job is set. The strings belong to the
 * client. Called with c->order held. */
void device_ask(struct shardd_client *c, Shardd__V1__JoinRequest *request);

/* Before a join over another connection than the last one's: nothing of this process uses the former
 * daemon's words and memory on the GPU any more. Called with c->order held. Return: 0 or a negative
 * shardd_code. */
int device_part(struct shardd_client *c, struct shardd_error *err);

/* Start to use the device of a join's answer. Called with c->order held.
 * Return: 0 or a negative shardd_code: this process cannot use it. */
int device_take(struct shardd_client *c, const Shardd__V1__JoinResponse *reply,
		struct shardd_error *err);

/* The device as of the last join. Return: 0, or FAILED_PRECONDITION before the first. Any thread. */
int device_get(const struct shardd_client *c, struct shardd_device *ret, struct shardd_error *err);

/* Unmap all, and let go of the device. Ops have ended. */
void device_close(struct shardd_client *c);
/* Have GPU @uuid, or the one that the client was told to use, for memory that the daemon hands out beside a join.
 * A client has one GPU. Blocks. Return: 0 or a negative shardd_code. Any thread. */
int device_open(struct shardd_client *c, const char *uuid, struct shardd_error *err);
/* The GPU's UUID; "": it has none. Valid until the client is closed. */
const char *device_uuid(const struct shardd_client *c);
/* Wait until the GPU has done what the calling thread's stream holds; all of this process's, if it has none. On the
 * host: nothing to wait for. Return: 0 or a negative shardd_code. */
int device_wait(struct shardd_client *c, struct shardd_error *err);

#endif
