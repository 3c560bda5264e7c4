/* Transactions, as etcd's messages say them. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "coord/etcd_impl.h"
#include "core/check.h"

/* What they are numbered in etcd. */
enum { ETCD_EQUAL = 0, ETCD_CREATE = 1, ETCD_MOD = 2 };

char *etcd_txn_key(const struct etcd *e, const char *at)
{
	size_t n = strlen(e->prefix), bytes = strlen(at) + 1;
	char *key = malloc(n + bytes);

	if (!key)
		return NULL;
	memcpy(key, e->prefix, n);
	memcpy(key + n, at, bytes);
	return key;
}

uint8_t *etcd_txn_range_end(const char *key)
{
	uint8_t *end = (uint8_t *)strdup(key);

	if (end)
		end[strlen(key) - 1]++; /* text: it is not 255 */
	return end;
}

int etcd_txn_kv(const struct etcd *e, const Shardd__Etcd__V1__KeyValue *kv, struct coord_kv *ret)
{
	size_t n = strlen(e->prefix);
	char *key;

	if (kv->key.len < n)
		return -EPROTO;
	key = strndup((const char *)kv->key.data + n, kv->key.len - n);
	if (!key)
		return -ENOMEM;
	*ret = (struct coord_kv){ .key = key,
				  .value = kv->value.data,
				  .bytes = kv->value.len,
				  .created = kv->create_revision,
				  .modified = kv->mod_revision,
				  .lease = kv->lease };
	return 0;
}

enum coord_status etcd_txn_status(grpc_status_code status)
{
	switch (status) {
	case GRPC_STATUS_OK:
		return COORD_OK;
	case GRPC_STATUS_INVALID_ARGUMENT:
	case GRPC_STATUS_NOT_FOUND:
	case GRPC_STATUS_PERMISSION_DENIED:
	case GRPC_STATUS_FAILED_PRECONDITION:
	case GRPC_STATUS_OUT_OF_RANGE:
	case GRPC_STATUS_UNIMPLEMENTED:
	case GRPC_STATUS_UNAUTHENTICATED:
		return COORD_REFUSED;
	default:
		return COORD_DOUBT;
	}
}

/* ---------------------------------------------------------------------------------- a request */

/* The messages of one request, which point to each other. */
struct etcd_txn_parts {
	Shardd__Etcd__V1__TxnRequest txn;
	Shardd__Etcd__V1__Compare compare[COORD_MAX_OPS], *compares[COORD_MAX_OPS];
	Shardd__Etcd__V1__RequestOp op[COORD_MAX_OPS], *ops[COORD_MAX_OPS];
	Shardd__Etcd__V1__PutRequest put[COORD_MAX_OPS];
	Shardd__Etcd__V1__DeleteRangeRequest remove[COORD_MAX_OPS];
	Shardd__Etcd__V1__RangeRequest read;
	uint8_t *end;
	char *keys[2 * COORD_MAX_OPS]; /* owned */
	size_t n_keys;
	bool lacks; /* memory */
};

static ProtobufCBinaryData etcd_txn_add_key(struct etcd_txn_parts *p, const struct etcd *e,
					    const char *at)
{
	char *key = etcd_txn_key(e, at);

	p->lacks = p->lacks || !key;
	if (!key)
		return (ProtobufCBinaryData){ 0, NULL };
	p->keys[p->n_keys++] = key;
	return (ProtobufCBinaryData){ strlen(key), (uint8_t *)key };
}

static void etcd_txn_add_cond(struct etcd_txn_parts *p, const struct etcd *e,
			      const struct coord_cond *cond)
{
	size_t i = p->txn.n_compare++;
	Shardd__Etcd__V1__Compare *c = &p->compare[i];

	shardd__etcd__v1__compare__init(c);
	c->result = ETCD_EQUAL;
	c->target = cond->modified ? ETCD_MOD : ETCD_CREATE;
	c->key = etcd_txn_add_key(p, e, cond->key);
	if (cond->modified) {
		c->target_union_case = SHARDD__ETCD__V1__COMPARE__TARGET_UNION_MOD_REVISION;
		c->mod_revision = cond->revision;
	} else {
		c->target_union_case = SHARDD__ETCD__V1__COMPARE__TARGET_UNION_CREATE_REVISION;
		c->create_revision = cond->revision;
	}
	p->compares[i] = c;
}

static void etcd_txn_add_change(struct etcd_txn_parts *p, const struct etcd *e,
				const struct coord_change *change)
{
	size_t i = p->txn.n_success++;
	Shardd__Etcd__V1__RequestOp *op = &p->op[i];

	shardd__etcd__v1__request_op__init(op);
	p->ops[i] = op;
	if (change->remove) {
		shardd__etcd__v1__delete_range_request__init(&p->remove[i]);
		p->remove[i].key = etcd_txn_add_key(p, e, change->key);
		op->request_case = SHARDD__ETCD__V1__REQUEST_OP__REQUEST_REQUEST_DELETE_RANGE;
		op->request_delete_range = &p->remove[i];
		return;
	}
	shardd__etcd__v1__put_request__init(&p->put[i]);
	p->put[i].key = etcd_txn_add_key(p, e, change->key);
	p->put[i].value = (ProtobufCBinaryData){ change->bytes, (uint8_t *)change->value };
	p->put[i].lease = change->lease;
	op->request_case = SHARDD__ETCD__V1__REQUEST_OP__REQUEST_REQUEST_PUT;
	op->request_put = &p->put[i];
}

/* Behind the changes, and if there are none. */
static void etcd_txn_add_read(struct etcd_txn_parts *p, const struct etcd *e,
			      const struct coord_txn *t)
{
	Shardd__Etcd__V1__RequestOp *op = &p->op[p->txn.n_success];

	shardd__etcd__v1__range_request__init(&p->read);
	p->read.key = etcd_txn_add_key(p, e, t->read);
	if (t->prefix && !p->lacks) {
		p->end = etcd_txn_range_end((const char *)p->read.key.data);
		p->lacks = !p->end;
		p->read.range_end = (ProtobufCBinaryData){ p->read.key.len, p->end };
	}
	shardd__etcd__v1__request_op__init(op);
	op->request_case = SHARDD__ETCD__V1__REQUEST_OP__REQUEST_REQUEST_RANGE;
	op->request_range = &p->read;
	p->ops[p->txn.n_success] = op;
	p->txn.failure = &p->ops[p->txn.n_success++];
	p->txn.n_failure = 1;
}

static struct etcd_txn_parts *etcd_txn_parts_new(const struct etcd *e, const struct coord_txn *t)
{
	struct etcd_txn_parts *p = calloc(1, sizeof(*p));

	if (!p)
		return NULL;
	shardd__etcd__v1__txn_request__init(&p->txn);
	p->txn.compare = p->compares;
	p->txn.success = p->ops;
	for (size_t i = 0; i < t->n_conds; i++)
		etcd_txn_add_cond(p, e, &t->conds[i]);
	for (size_t i = 0; i < t->n_changes; i++)
		etcd_txn_add_change(p, e, &t->changes[i]);
	if (t->read)
		etcd_txn_add_read(p, e, t);
	return p;
}

static void etcd_txn_parts_free(struct etcd_txn_parts *p)
{
	for (size_t i = 0; i < p->n_keys; i++)
		free(p->keys[i]);
	free(p->end);
	free(p);
}

/* ------------------------------------------------------------------------------------ a reply */

static const Shardd__Etcd__V1__RangeResponse *etcd_txn_range_of(
	const Shardd__Etcd__V1__TxnResponse *reply)
{
	const Shardd__Etcd__V1__ResponseOp *last =
		reply->n_responses ? reply->responses[reply->n_responses - 1] : NULL;

	return last && last->response_case == SHARDD__ETCD__V1__RESPONSE_OP__RESPONSE_RESPONSE_RANGE
		       ? last->response_range
		       : NULL;
}

static void etcd_txn_answer(struct etcd_rpc *r, const Shardd__Etcd__V1__TxnResponse *reply)
{
	const Shardd__Etcd__V1__RangeResponse *range = etcd_txn_range_of(reply);
	size_t n = range ? range->n_kvs : 0;
	struct coord_kv *kvs = calloc(n + 1, sizeof(*kvs));
	struct coord_reply out = { .revision = reply->header ? reply->header->revision : 0,
				   .succeeded = reply->succeeded,
				   .kvs = kvs,
				   .n = n };
	int e = kvs ? 0 : -ENOMEM;

	for (size_t i = 0; e == 0 && i < n; i++)
		e = etcd_txn_kv(r->e, range->kvs[i], &kvs[i]);
	if (e)
		out = (struct coord_reply){ .status = COORD_DOUBT,
					    .why = "no memory for the answer" };
	coord_call_end(&r->e->coord, r->owner, &out);
	for (size_t i = 0; kvs && i < n; i++)
		free((char *)kvs[i].key);
	free(kvs);
}

static void etcd_txn_on_done(struct etcd_rpc *r, grpc_status_code status, const char *why)
{
	Shardd__Etcd__V1__TxnResponse *reply =
		(void *)etcd_rpc_reply(r, &shardd__etcd__v1__txn_response__descriptor);
	struct coord_reply bad = { .status = etcd_txn_status(status), .why = why };

	if (status == GRPC_STATUS_OK && (!reply || (r->reads && !etcd_txn_range_of(reply))))
		bad = (struct coord_reply){ .status = COORD_DOUBT,
					    .why = "etcd's answer cannot be read" };
	if (status == GRPC_STATUS_NOT_FOUND)
		bad.status = COORD_NO_LEASE; /* of a change */
	if (r->owner && bad.status == COORD_OK)
		etcd_txn_answer(r, reply);
	else if (r->owner)
		coord_call_end(&r->e->coord, r->owner, &bad);
	r->owner = NULL;
	if (reply)
		protobuf_c_message_free_unpacked(&reply->base, NULL);
}

int etcd_txn_start(struct coord *c, struct coord_call *call, const struct coord_txn *txn,
		   uint32_t timeout_ms)
{
	struct etcd *e = CONTAINER_OF(c, struct etcd, coord);
	struct etcd_txn_parts *p = etcd_txn_parts_new(e, txn);
	struct etcd_rpc *r = NULL;

	if (p && !p->lacks)
		r = etcd_rpc_new(e, "/etcdserverpb.KV/Txn", &p->txn.base);
	if (p)
		etcd_txn_parts_free(p);
	if (!r)
		return -ENOMEM;
	r->done = etcd_txn_on_done;
	r->reads = txn->read;
	r->owner = call;
	if (etcd_rpc_start(r, timeout_ms))
		return -ENOMEM;
	call->impl = r;
	return 0;
}
