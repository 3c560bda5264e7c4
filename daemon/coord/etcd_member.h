/*
 * The members of an etcd cluster: listed, added, removed and promoted. A learner has the data but no vote.
 *
 * Each call goes to one endpoint of the options, and to no other.
 *
 * Loop thread only. The callback runs on the loop, exactly once, never inside the function that starts
 * the call, and not after etcd_member_cancel or coord_close.
 */
#ifndef SHARDD_COORD_ETCD_MEMBER_H
#define SHARDD_COORD_ETCD_MEMBER_H

#include "coord/coord.h"
#include "etcd.pb-c.h"

struct etcd_rpc;
struct etcd_member_call;

/* Borrowed during the callback. */
struct etcd_member_reply {
	bool ok;
	const char *why;   /* unless @ok: one sentence */
	uint64_t answerer; /* the id of the member that has answered */
	uint64_t added;    /* the id of the new member; of etcd_member_add only */
	Shardd__Etcd__V1__Member *const *members;
	size_t n;
};

/* Embedded by its owner, borrowed until the callback. Zero at first. */
struct etcd_member_call {
	void (*done)(struct etcd_member_call *call, const struct etcd_member_reply *reply);
	struct etcd_rpc *rpc; /* NULL: it does not run */
};

/* @c: of coord_etcd_new. @endpoint: index in its options. Return of each: 0 or -ENOMEM. */
int etcd_member_list(struct coord *c, struct etcd_member_call *call, size_t endpoint,
		     uint32_t timeout_ms);
/* A learner at @peer_url. */
int etcd_member_add(struct coord *c, struct etcd_member_call *call, size_t endpoint,
		    const char *peer_url, uint32_t timeout_ms);
int etcd_member_remove(struct coord *c, struct etcd_member_call *call, size_t endpoint, uint64_t id,
		       uint32_t timeout_ms);
/* The learner gets a vote. etcd refuses it until the learner has nearly all data of the others. */
int etcd_member_promote(struct coord *c, struct etcd_member_call *call, size_t endpoint,
			uint64_t id, uint32_t timeout_ms);
/* Its callback does not come any more. It may take effect. Safe if it does not run. */
void etcd_member_cancel(struct etcd_member_call *call);

#endif
