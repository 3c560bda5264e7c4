/* What the other end says of itself, and whether a link with it is allowed. */
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "core/check.h"
#include "core/text.h"
#include "peer/peer_impl.h"

#define PEER_TEXT_BYTES 300

bool peer_hello_is_allowed(const struct peers *ps, const char *name)
{
	for (size_t i = 0; i < ps->n_allowed; i++)
		if (strcmp(ps->allowed[i], name) == 0)
			return true;
	return !ps->allowed;
}

void peer_hello_clean(char *text)
{
	for (; *text; text++)
		if ((unsigned char)*text < ' ' || (unsigned char)*text > '~')
			*text = '?';
}

void peer_hello_fill(const struct peers *ps, Shardd__V1__PeerHello *ret)
{
	shardd__v1__peer_hello__init(ret);
	ret->protocol = PEER_PROTOCOL;
	ret->cluster = ps->cluster;
	ret->node = ps->node;
	ret->instance = (ProtobufCBinaryData){ PEER_INSTANCE_BYTES, (uint8_t *)ps->instance };
}

void peer_hello_send(struct peer *p)
{
	Shardd__V1__PeerMessage m = SHARDD__V1__PEER_MESSAGE__INIT;
	Shardd__V1__PeerHello h;

	peer_hello_fill(p->ps, &h);
	m.body_case = SHARDD__V1__PEER_MESSAGE__BODY_HELLO;
	m.hello = &h;
	peer_stream_send(p, &m);
}

/* What both nodes must have in common. The text is for both. */
static int peer_hello_check_common(const struct peers *ps, const char *at,
				   const Shardd__V1__PeerHello *h, char *why, size_t bytes)
{
	if (!name_is_good(h->node))
		snprintf(why, bytes, "the node at %s says no name that a node may have", at);
	else if (h->protocol != PEER_PROTOCOL)
		snprintf(why, bytes,
			 "node '%s' has version %u of the protocol between daemons, node '%s' has "
			 "version %u: install the same release of shardd on both",
			 h->node, h->protocol, ps->node, PEER_PROTOCOL);
	else if (strcmp(h->cluster, ps->cluster) != 0)
		snprintf(why, bytes,
			 "node '%s' is of cluster '%.63s', node '%s' is of cluster '%s': give both "
			 "the same name of a cluster",
			 h->node, h->cluster, ps->node, ps->cluster);
	else if (strcmp(h->node, ps->node) == 0)
		snprintf(why, bytes,
			 "the nodes at both ends have the name '%s': give each node its own",
			 ps->node);
	else if (h->instance.len != PEER_INSTANCE_BYTES)
		snprintf(why, bytes, "the instance of node '%s' has %zu bytes; it must have %d",
			 h->node, h->instance.len, PEER_INSTANCE_BYTES);
	else
		return 0;
	return -EPERM;
}

/* One that has connected: is it the one whose certificate it has? */
static int peer_hello_check_right(const struct peers *ps, grpc_call *call,
				  const Shardd__V1__PeerHello *h, char *why, size_t bytes)
{
	char names[PEER_TEXT_BYTES / 2];

	if (ps->certs && !peer_tls_has_name(call, h->node, names, sizeof(names)))
		snprintf(why, bytes,
			 "node '%s' has a certificate with the DNS names '%s': its own name must "
			 "be one of them",
			 h->node, names);
	else if (!peer_hello_is_allowed(ps, h->node))
		snprintf(why, bytes,
			 "node '%s' is not among the nodes that may connect to node '%s': add it "
			 "to them",
			 h->node, ps->node);
	else
		return 0;
	return -EPERM;
}

int peer_hello_check_call(const struct peers *ps, grpc_call *call, const char *at,
			  const char *expected, const Shardd__V1__PeerHello *h, char *why,
			  size_t bytes)
{
	int r = peer_hello_check_common(ps, at, h, why, bytes);

	if (r)
		return r;
	if (expected && strcmp(h->node, expected) != 0) {
		snprintf(why, bytes,
			 "the node at %s is '%s'; '%s' is expected there: correct the address of "
			 "'%s'",
			 at, h->node, expected, expected);
		return -EPERM;
	}
	return peer_hello_check_right(ps, call, h, why, bytes);
}

int peer_hello_check(struct peer *p, const Shardd__V1__PeerHello *h, char *why, size_t bytes)
{
	int r = peer_hello_check_call(p->ps, p->call, p->at, p->dialled ? p->name : NULL, h, why,
				      bytes);

	if (r)
		return r;
	text_copy(p->name, sizeof(p->name), h->node);
	memcpy(p->instance, h->instance.data, PEER_INSTANCE_BYTES);
	return 0;
}
