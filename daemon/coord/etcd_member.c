#include "coord/etcd_member.h"

#include <errno.h>

#include "coord/etcd_impl.h"
#include "core/check.h"

static void etcd_member_tell(struct etcd_rpc *r, const struct etcd_member_reply *reply)
{
	struct etcd_member_call *call = r->member_call;

	if (!call)
		return;
	r->member_call = NULL;
	call->rpc = NULL;
	call->done(call, reply);
}

static void etcd_member_tell_bad(struct etcd_rpc *r, grpc_status_code status, const char *why)
{
	struct etcd_member_reply bad = { .why = status == GRPC_STATUS_OK
							? "etcd's answer cannot be read"
							: why };

	etcd_member_tell(r, &bad);
}

static void etcd_member_on_done(struct etcd_rpc *r, grpc_status_code status, const char *why)
{
	Shardd__Etcd__V1__MemberListResponse *m =
		(void *)etcd_rpc_reply(r, &shardd__etcd__v1__member_list_response__descriptor);
	struct etcd_member_reply reply = { .ok = true };

	if (status == GRPC_STATUS_OK && m && m->header) {
		reply.answerer = m->header->member_id;
		reply.members = m->members;
		reply.n = m->n_members;
		etcd_member_tell(r, &reply);
	} else {
		etcd_member_tell_bad(r, status, why);
	}
	if (m)
		protobuf_c_message_free_unpacked(&m->base, NULL);
}

static void etcd_member_on_added(struct etcd_rpc *r, grpc_status_code status, const char *why)
{
	Shardd__Etcd__V1__MemberAddResponse *m =
		(void *)etcd_rpc_reply(r, &shardd__etcd__v1__member_add_response__descriptor);
	struct etcd_member_reply reply = { .ok = true };

	if (status == GRPC_STATUS_OK && m && m->header && m->member) {
		reply.answerer = m->header->member_id;
		reply.added = m->member->id;
		reply.members = m->members;
		reply.n = m->n_members;
		etcd_member_tell(r, &reply);
	} else {
		etcd_member_tell_bad(r, status, why);
	}
	if (m)
		protobuf_c_message_free_unpacked(&m->base, NULL);
}

static int etcd_member_begin(struct coord *c, struct etcd_member_call *call, size_t endpoint,
			     const char *method, const ProtobufCMessage *request,
			     void (*done)(struct etcd_rpc *r, grpc_status_code status,
					  const char *why),
			     uint32_t timeout_ms)
{
	struct etcd *e = CONTAINER_OF(c, struct etcd, coord);
	struct etcd_rpc *r;

	CHECK(!call->rpc && endpoint < e->n_endpoints && timeout_ms);
	r = etcd_rpc_new(e, method, request);
	if (!r)
		return -ENOMEM;
	r->is_fixed = true;
	r->endpoint = endpoint;
	r->done = done;
	r->member_call = call;
	if (etcd_rpc_start(r, timeout_ms))
		return -ENOMEM;
	call->rpc = r;
	return 0;
}

int etcd_member_list(struct coord *c, struct etcd_member_call *call, size_t endpoint,
		     uint32_t timeout_ms)
{
	Shardd__Etcd__V1__MemberListRequest q = SHARDD__ETCD__V1__MEMBER_LIST_REQUEST__INIT;

	return etcd_member_begin(c, call, endpoint, "/etcdserverpb.Cluster/MemberList", &q.base,
				 etcd_member_on_done, timeout_ms);
}

int etcd_member_add(struct coord *c, struct etcd_member_call *call, size_t endpoint,
		    const char *peer_url, uint32_t timeout_ms)
{
	Shardd__Etcd__V1__MemberAddRequest q = SHARDD__ETCD__V1__MEMBER_ADD_REQUEST__INIT;
	char *urls[] = { (char *)peer_url };

	q.peer_urls = urls;
	q.n_peer_urls = ARRAY_SIZE(urls);
	q.is_learner = true;
	return etcd_member_begin(c, call, endpoint, "/etcdserverpb.Cluster/MemberAdd", &q.base,
				 etcd_member_on_added, timeout_ms);
}

int etcd_member_remove(struct coord *c, struct etcd_member_call *call, size_t endpoint, uint64_t id,
		       uint32_t timeout_ms)
{
	Shardd__Etcd__V1__MemberRemoveRequest q = SHARDD__ETCD__V1__MEMBER_REMOVE_REQUEST__INIT;

	q.id = id;
	return etcd_member_begin(c, call, endpoint, "/etcdserverpb.Cluster/MemberRemove", &q.base,
				 etcd_member_on_done, timeout_ms);
}

int etcd_member_promote(struct coord *c, struct etcd_member_call *call, size_t endpoint,
			uint64_t id, uint32_t timeout_ms)
{
	Shardd__Etcd__V1__MemberPromoteRequest q = SHARDD__ETCD__V1__MEMBER_PROMOTE_REQUEST__INIT;

	q.id = id;
	return etcd_member_begin(c, call, endpoint, "/etcdserverpb.Cluster/MemberPromote", &q.base,
				 etcd_member_on_done, timeout_ms);
}

void etcd_member_cancel(struct etcd_member_call *call)
{
	struct etcd_rpc *r = call->rpc;

	if (!r)
		return;
	r->member_call = NULL;
	call->rpc = NULL;
	etcd_rpc_cancel(r);
}
