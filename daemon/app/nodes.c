#include "app/nodes.h"

#include <stdio.h>
#include <string.h>

#include "core/check.h"
#include "core/cleanup.h"
#include "core/log.h"
#include "engine/engine_impl.h"

/* A connection for data that closes may be faster than the link that brings the reason, through the
 * leader: so long its ops wait for that. */
#define NODES_REASON_MS 1000u

static void nodes_on_embedded(struct embedded *e, void *userdata)
{
	(void)userdata;
	log_info("etcd", "state=%s why=\"%s\"", embedded_state_name(embedded_state(e)),
		 embedded_why(e));
}

static void nodes_on_log(struct embedded *e, enum log_level level, const char *line, void *userdata)
{
	(void)e;
	(void)userdata;
	log_write(level, "etcd", "%s", line);
}

static const char *nodes_or_null(const char *text)
{
	return *text ? text : NULL;
}

/* ----------------------------------------------------------------------- the store */

static int nodes_start_embedded(struct nodes *n, uv_loop_t *loop, struct loopq *loopq,
				const struct config *c, const char *node, struct fault *f)
{
	static const struct embedded_ops ops = { .changed = nodes_on_embedded,
						 .logged = nodes_on_log };
	struct hostport at;
	struct seeds seeds;
	struct embedded_options o = { .node = node,
				      .cluster = c->coord.cluster,
				      .seeds = &seeds,
				      .dir = c->coord.dir,
				      .etcd = nodes_or_null(c->coord.etcd),
				      .ca = c->peer.ca,
				      .cert = c->peer.cert,
				      .key = c->peer.key };

	if (config_seeds(c, &seeds, f))
		return f->code;
	if (hostport_parse(c->peer.listen, &at))
		o.listen = at.host;
	return embedded_new(loop, loopq, &o, &ops, n, &n->embedded, f);
}

/* An embedded store has the certificates of the links. */
static void nodes_choose_tls(const struct config *c, struct coord_options *o)
{
	bool embedded = config_store(c) == CONFIG_STORE_EMBEDDED;

	o->ca = nodes_or_null(embedded ? c->peer.ca : c->coord.ca);
	o->cert = nodes_or_null(embedded ? c->peer.cert : c->coord.cert);
	o->key = nodes_or_null(embedded ? c->peer.key : c->coord.key);
}

static int nodes_open_store(struct nodes *n, struct loopq *loopq, const struct config *c,
			    struct coord **ret, struct fault *f)
{
	char prefix[96], password[CONFIG_SECRET_BYTES] = "";
	struct config_endpoints endpoints;
	struct coord_options o = { .prefix = prefix, .user = nodes_or_null(c->coord.user) };

	snprintf(prefix, sizeof(prefix), "/shardd/%s/", c->coord.cluster);
	if (n->embedded) {
		o.endpoints = embedded_endpoints(n->embedded, &o.n_endpoints);
	} else {
		if (config_endpoints(c, &endpoints, f))
			return f->code;
		o.endpoints = endpoints.list;
		o.n_endpoints = endpoints.n;
	}
	if (*c->coord.password_file && config_password(c, password, f))
		return f->code;
	o.password = nodes_or_null(password);
	nodes_choose_tls(c, &o);
	(void)coord_etcd_new(loopq, &o, ret, f);
	explicit_bzero(password, sizeof(password));
	return f->code;
}

/* ------------------------------------------------------------------------- the engine */

static bool nodes_is_host(const struct node *node)
{
	return strcmp(backend_info(node->devices[0].backend)->name, "host") == 0;
}

static int nodes_start_engine(struct node *node, struct loopq *loopq, const struct config *c,
			      struct fault *f)
{
	char address[HOSTPORT_HOST_BYTES];
	struct gloo_options o = { .iface = nodes_or_null(c->peer.data_interface),
				  .address = address,
				  .reason_ms = NODES_REASON_MS };
	int r;

	config_data_address(c, address);
	node->nodes_engine =
		node->engine; /* GPUs: of NULL group_comms says so when a job needs one */
	if (!nodes_is_host(node))
		return 0;
	r = engine_gloo_new(loopq, &o, &node->nodes_engine);
	return r < 0 ? fault_errno(f, r, "starting the engine between nodes") : 0;
}

/* ------------------------------------------------------------------------ the cluster */

/* Names with commas. @text is changed. Return: how many. */
static size_t nodes_split(char *text, const char **ret, size_t room)
{
	char *save = NULL;
	size_t n = 0;

	for (char *w = strtok_r(text, ", ", &save); w && n < room; w = strtok_r(NULL, ", ", &save))
		ret[n++] = w;
	return n;
}

static int nodes_start_cluster(struct nodes *n, uv_loop_t *loop, struct loopq *loopq,
			       struct jobs *jobs, const struct config *c, const char *node,
			       struct coord *coord, struct fault *f)
{
	char advertise[HOSTPORT_TEXT_BYTES], allow[sizeof(c->peer.allow)];
	const char *names[sizeof(c->peer.allow) / 2];
	struct cluster_options o = { .node = node,
				     .advertise = advertise,
				     .schedules = strcmp(c->peer.recorded_order, "yes") == 0,
				     .replicas = c->peer.replicas };
	struct hostport at;

	config_peer_advertise(c, &at);
	hostport_format(at.host, at.port, advertise);
	memcpy(allow, c->peer.allow, sizeof(allow));
	o.peers = (struct peers_options){ .listen = c->peer.listen,
					  .cluster = c->coord.cluster,
					  .ca = nodes_or_null(c->peer.ca),
					  .cert = nodes_or_null(c->peer.cert),
					  .key = nodes_or_null(c->peer.key),
					  .insecure = strcmp(c->peer.insecure, "yes") == 0 };
	o.peers.n_allowed = nodes_split(allow, names, ARRAY_SIZE(names));
	o.peers.allowed = o.peers.n_allowed ? names : NULL;
	return cluster_new(loop, loopq, jobs, coord, &o, &n->cluster, f);
}

int nodes_start(struct nodes *n, uv_loop_t *loop, struct loopq *loopq, struct jobs *jobs,
		const struct config *config, struct fault *f)
{
	char node[NAME_BYTES];
	struct coord *coord = NULL;

	*n = (struct nodes){ 0 };
	if (config_store(config) == CONFIG_STORE_NONE)
		return 0;
	if (config_node_name(config, node, f))
		return f->code;
	if (config_store(config) == CONFIG_STORE_EMBEDDED &&
	    nodes_start_embedded(n, loop, loopq, config, node, f))
		return f->code;
	if (nodes_open_store(n, loopq, config, &coord, f))
		return f->code;
	if (nodes_start_cluster(n, loop, loopq, jobs, config, node, coord, f))
		return f->code;
	return nodes_start_engine(jobs->node, loopq, config, f);
}

/* -------------------------------------------------------------------------- the end */

static void nodes_on_stopped(void *userdata)
{
	struct nodes *n = userdata;

	CHECK(n->stopping > 0);
	n->stopping--;
}

/* The store comes last: the cluster may still tell it something. */
static void nodes_on_cluster_stopped(void *userdata)
{
	struct nodes *n = userdata;

	if (n->embedded) {
		n->stopping++;
		embedded_stop(n->embedded, nodes_on_stopped);
		n->embedded = NULL;
	}
	nodes_on_stopped(n);
}

void nodes_stop(struct nodes *n)
{
	if (n->stopping)
		return;
	n->stopping++;
	if (n->cluster)
		cluster_stop(n->cluster, nodes_on_cluster_stopped, n);
	else
		nodes_on_cluster_stopped(n);
}

bool nodes_stopped(const struct nodes *n)
{
	return !n->stopping;
}

void nodes_end(struct nodes *n)
{
	n->cluster = cluster_free(n->cluster);
}
