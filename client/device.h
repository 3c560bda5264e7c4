/* The device on which this rank's memory is: asked for and learned by a join. */
#ifndef SHARDD_CLIENT_DEVICE_H
#define SHARDD_CLIENT_DEVICE_H

#include "client.h"
#include "shardd.pb-c.h"

/* What this client wants of devices, for shardd_connect. @options: borrowed.
 * Return: 0 or a negative shardd_code. */
int device_choose(struct shardd_client *c, const struct shardd_options *options,
		  struct shardd_error *err);

/* Put into @request, whose job is there, what a join says of devices. The strings are
 * the client's. Called with c->order held. */
void device_ask(struct shardd_client *c, Shardd__V1__JoinRequest *request);

/* Take the device of a join's answer into use. Called with c->order held.
 * Return: 0 or a negative shardd_code: this process cannot use it. */
int device_take(struct shardd_client *c, const Shardd__V1__JoinReply *reply,
		struct shardd_error *err);

/* Unmap all, and let go of the device. Ops have ended. */
void device_close(struct shardd_client *c);

#endif
