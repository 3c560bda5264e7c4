/*
 * A RegisterUnitsResponse, packed unit by unit: it may have ten thousand units, for every rank, so no
 * message objects are built for it. Loop thread only.
 */
#ifndef SHARDD_RPC_REGISTER_REPLY_H
#define SHARDD_RPC_REGISTER_REPLY_H

#include <stdint.h>

#include "job/job.h"

struct register_reply {
	uint8_t *bytes; /* owned */
	size_t n;
	size_t room;
};

#define REGISTER_REPLY_NULL ((struct register_reply){ .bytes = NULL })

/* Append @u, as rank @rank of @job sees it. Return: 0 or -ENOMEM. */
int register_reply_add(struct register_reply *r, const struct job *job, const struct unit *u,
		       uint32_t rank);
/* The last field: the bytes that the call added to the job's account. Return: 0 or -ENOMEM. */
int register_reply_end(struct register_reply *r, uint64_t charged);

/* Safe to call twice. */
void register_reply_deinit(struct register_reply *r);

#endif
