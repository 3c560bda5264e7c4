/*
 * Two stores. Endpoints that belong to different etcd clusters would decide different things. Each answer
 * of etcd has the id of its cluster, and every now and then all endpoints are asked for theirs. While two
 * of them differ no other call is made, and no answer is believed.
 */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "coord/etcd_impl.h"
#include "core/check.h"
#include "core/clock.h"

#define CLUSTER_ASK_MS     2000u
#define CLUSTER_PAUSE_US   10000000u
#define CLUSTER_PAUSE_2_US 1000000u /* while two of them differ */

static void etcd_cluster_compare(struct etcd *e)
{
	const struct etcd_endpoint *a = NULL, *b = NULL;

	for (size_t i = 0; i < e->n_endpoints && !b; i++) {
		const struct etcd_endpoint *at = &e->endpoints[i];

		if (a && at->cluster && at->cluster != a->cluster)
			b = at;
		else if (!a && at->cluster)
			a = at;
	}
	*e->split = '\0';
	if (b)
		snprintf(e->split, sizeof(e->split),
			 "%.100s (cluster %" PRIx64 ") and %.100s (cluster %" PRIx64
			 ") are members of two etcd clusters (two stores): stop the etcd that "
			 "does not belong to this cluster, and remove its data",
			 a->target, a->cluster, b->target, b->cluster);
}

void etcd_cluster_heard(struct etcd *e, size_t endpoint, uint64_t cluster)
{
	struct etcd_endpoint *at = &e->endpoints[endpoint];

	if (at->cluster == cluster)
		return;
	at->cluster = cluster;
	etcd_cluster_compare(e);
}

/* What it has answered was heard before (etcd_rpc_on_status). */
static void etcd_cluster_on_asked(struct etcd_rpc *r, grpc_status_code status, const char *why)
{
	(void)why;
	r->e->endpoints[r->endpoint].asked = false;
	if (status != GRPC_STATUS_OK)
		etcd_cluster_heard(r->e, r->endpoint, 0);
}

static void etcd_cluster_ask_one(struct etcd *e, size_t endpoint)
{
	Shardd__Etcd__V1__RangeRequest q = SHARDD__ETCD__V1__RANGE_REQUEST__INIT;
	struct etcd_rpc *r;

	q.key = (ProtobufCBinaryData){ strlen(e->prefix), (uint8_t *)e->prefix };
	q.serializable = true;
	q.keys_only = true;
	r = etcd_rpc_new(e, "/etcdserverpb.KV/Range", &q.base);
	if (!r)
		return; /* later */
	r->is_fixed = true;
	r->endpoint = endpoint;
	r->done = etcd_cluster_on_asked;
	e->endpoints[endpoint].asked = etcd_rpc_start(r, CLUSTER_ASK_MS) == 0;
}

void etcd_cluster_ask(struct etcd *e)
{
	uint64_t now = clock_now_us();

	if (e->n_endpoints < 2 || now < e->compare_us)
		return;
	e->compare_us = now + (*e->split ? CLUSTER_PAUSE_2_US : CLUSTER_PAUSE_US);
	for (size_t i = 0; i < e->n_endpoints; i++)
		if (!e->endpoints[i].asked)
			etcd_cluster_ask_one(e, i);
}
