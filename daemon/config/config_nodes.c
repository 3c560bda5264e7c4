/* The keys of several nodes: what they mean, and the rules between them. */
#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "config/config.h"
#include "config/config_keys.h"
#include "core/check.h"
#include "core/cleanup.h"
#include "core/pem.h"
#include "core/text.h"

#define STORE_ETCD "etcd://"

enum config_store config_store(const struct config *c)
{
	if (strcmp(c->coord.store, "none") == 0)
		return CONFIG_STORE_NONE;
	return strcmp(c->coord.store, "embedded") == 0 ? CONFIG_STORE_EMBEDDED : CONFIG_STORE_ETCD;
}

/* ------------------------------------------------------------------------------- the store */

static int config_nodes_refuse_store(const struct config *c, struct fault *f)
{
	return fault_set(f, FAULT_INVALID, "coord",
			 "coord is '%.100s'; it must be none, embedded, or "
			 "etcd://HOST:PORT,HOST:PORT with at most %u endpoints",
			 c->coord.store, CONFIG_MAX_ENDPOINTS);
}

int config_endpoints(const struct config *c, struct config_endpoints *ret, struct fault *f)
{
	size_t scheme = strlen(STORE_ETCD);
	struct hostport at;

	ret->n = 0;
	if (strncmp(c->coord.store, STORE_ETCD, scheme) != 0 || !c->coord.store[scheme])
		return config_nodes_refuse_store(c, f);
	text_copy(ret->text, sizeof(ret->text), c->coord.store + scheme);
	for (char *item = ret->text; item; ret->n++) {
		char *comma = strchr(item, ',');

		if (comma)
			*comma = '\0';
		if (ret->n == CONFIG_MAX_ENDPOINTS || !hostport_parse(item, &at) ||
		    hostport_is_wildcard(at.host))
			return config_nodes_refuse_store(c, f);
		ret->list[ret->n] = item;
		item = comma ? comma + 1 : NULL;
	}
	return 0;
}

static int config_nodes_check_store(const struct config *c, struct fault *f)
{
	struct config_endpoints endpoints;

	return config_store(c) == CONFIG_STORE_ETCD ? config_endpoints(c, &endpoints, f) : 0;
}

/* ------------------------------------------------------------------------------- the names */

static int config_nodes_check_name(const char *key, const char *value, struct fault *f)
{
	if (name_is_good(value))
		return 0;
	return fault_set(f, FAULT_INVALID, key, "%s is '%.80s'; it must be " NAME_RULE, key, value);
}

int config_node_name(const struct config *c, char ret[NAME_BYTES], struct fault *f)
{
	char host[HOSTPORT_HOST_BYTES] = "";

	if (*c->coord.node_name) {
		text_copy(ret, NAME_BYTES, c->coord.node_name);
		return config_nodes_check_name("node_name", ret, f);
	}
	if (gethostname(host, sizeof(host) - 1) < 0)
		return fault_errno(f, -errno, "the host name");
	host[strcspn(host, ".")] = '\0';
	if (!name_is_good(host))
		return fault_set(f, FAULT_INVALID, "node_name",
				 "node_name is empty, and the host name '%.80s' cannot stand for "
				 "it; it must be " NAME_RULE,
				 host);
	text_copy(ret, NAME_BYTES, host);
	return 0;
}

static int config_nodes_check_names(const struct config *c, struct fault *f)
{
	char name[NAME_BYTES];

	if (config_nodes_check_name("cluster", c->coord.cluster, f))
		return (int)f->code;
	if (*c->coord.node_name || config_store(c) != CONFIG_STORE_NONE)
		return config_node_name(c, name, f);
	return 0;
}

static int config_nodes_check_allow(const struct config *c, struct fault *f)
{
	for (const char *at = c->peer.allow; *at; at += strcspn(at, ","), at += *at == ',') {
		char name[NAME_BYTES + 1];
		size_t n = strcspn(at, ",");

		text_copy(name, n < sizeof(name) ? n + 1 : sizeof(name), at);
		if (!name_is_good(name))
			return fault_set(f, FAULT_INVALID, "peer_allow",
					 "peer_allow has '%.*s'; an entry must be the name of a "
					 "node: " NAME_RULE,
					 n < 80 ? (int)n : 80, at);
	}
	return 0;
}

/* ---------------------------------------------------------------------------- the password */

int config_password(const struct config *c, char ret[CONFIG_SECRET_BYTES], struct fault *f)
{
	return config_secret(c->coord.password_file, "coord_password_file", 1, ret, f);
}

/* ------------------------------------------------------------------- keys that go together */

static int config_nodes_together(const char *a, bool has_a, const char *b, bool has_b,
				 struct fault *f)
{
	if (has_a == has_b)
		return 0;
	return fault_set(f, FAULT_INVALID, has_a ? b : a,
			 "%s is set, and %s is not; it must be set, too, or neither of them",
			 has_a ? a : b, has_a ? b : a);
}

static int config_nodes_check_etcd(const struct config *c, struct fault *f)
{
	const struct config_coord *o = &c->coord;
	char password[CONFIG_SECRET_BYTES] = "";
	int r;

	if (config_nodes_together("coord_user", *o->user, "coord_password_file", *o->password_file,
				  f) ||
	    config_nodes_together("coord_cert", *o->cert, "coord_key", *o->key, f))
		return (int)f->code;
	if (*o->cert && !*o->ca)
		return config_nodes_together("coord_cert", true, "coord_ca", false, f);
	if (config_store(c) != CONFIG_STORE_ETCD)
		return 0;
	if ((*o->ca && pem_check_file(o->ca, "coord_ca", f)) ||
	    (*o->cert &&
	     (pem_check_file(o->cert, "coord_cert", f) || pem_check_file(o->key, "coord_key", f))))
		return (int)f->code;
	if (!*o->user)
		return 0;
	r = config_password(c, password, f);
	explicit_bzero(password, sizeof(password));
	return r;
}

/* ---------------------------------------------------------------- keys of one kind of store */

#define OF(store) (1u << (store))
#define OF_NODES  (OF(CONFIG_STORE_EMBEDDED) | OF(CONFIG_STORE_ETCD))

/* With another kind they would have no effect, unseen. Those that go with one of these are not here. */
static const struct config_nodes_key {
	const char *name;
	unsigned of; /* kinds */
} config_nodes_keys[] = {
	{ "coord_user", OF(CONFIG_STORE_ETCD) },
	{ "coord_ca", OF(CONFIG_STORE_ETCD) },
	{ "coord_seeds", OF(CONFIG_STORE_EMBEDDED) },
	{ "coord_nodes", OF(CONFIG_STORE_EMBEDDED) },
	{ "coord_dir", OF(CONFIG_STORE_EMBEDDED) },
	{ "coord_client_port", OF(CONFIG_STORE_EMBEDDED) },
	{ "coord_peer_port", OF(CONFIG_STORE_EMBEDDED) },
	{ "coord_etcd", OF(CONFIG_STORE_EMBEDDED) },
	{ "node_name", OF_NODES },
	{ "cluster", OF_NODES },
	{ "peer_listen", OF_NODES },
	{ "peer_advertise", OF_NODES },
	{ "peer_ca", OF_NODES },
	{ "peer_allow", OF_NODES },
	{ "peer_insecure", OF_NODES },
	{ "data_interface", OF_NODES },
	{ "data_address", OF_NODES },
	{ "recorded_order", OF_NODES },
	{ "replicas", OF_NODES },
	{ "order", OF_NODES },
};

static const char *config_nodes_kinds(unsigned of)
{
	if (of == OF_NODES)
		return "embedded or etcd://...";
	return of == OF(CONFIG_STORE_ETCD) ? "etcd://..." : "embedded";
}

static int config_nodes_refuse_kind(const struct config *c, const struct config_key *k, unsigned of,
				    struct fault *f)
{
	char value[CONFIG_VALUE_MAX];

	config_key_format(c, k, value);
	return fault_set(f, FAULT_INVALID, k->name,
			 "%s is '%.80s', and coord is %.80s; it must be %s unless coord is %s",
			 k->name, value, c->coord.store, *k->by_default ? k->by_default : "empty",
			 config_nodes_kinds(of));
}

static int config_nodes_check_kind(const struct config *c, struct fault *f)
{
	struct config defaults;

	config_default(&defaults);
	for (size_t i = 0; i < ARRAY_SIZE(config_nodes_keys); i++) {
		const struct config_key *k = config_key_find(config_nodes_keys[i].name);
		unsigned of = config_nodes_keys[i].of;

		if (!(of & OF(config_store(c))) && !config_key_equal(c, &defaults, k))
			return config_nodes_refuse_kind(c, k, of, f);
	}
	return 0;
}

int config_seeds(const struct config *c, struct seeds *ret, struct fault *f)
{
	char node[NAME_BYTES];
	struct seeds_options o = { .text = c->coord.seeds,
				   .node = node,
				   .nodes = c->coord.nodes,
				   .client_port = (uint16_t)c->coord.client_port,
				   .peer_port = (uint16_t)c->coord.peer_port };

	if (config_node_name(c, node, f))
		return (int)f->code;
	return seeds_read(&o, ret, f);
}

static int config_nodes_check_embedded(const struct config *c, struct fault *f)
{
	struct seeds seeds;

	if (c->coord.client_port == c->coord.peer_port)
		return fault_set(f, FAULT_INVALID, "coord_peer_port",
				 "coord_peer_port is %u, and coord_client_port, too; it must be "
				 "another port",
				 c->coord.peer_port);
	if (!*c->coord.seeds)
		return fault_set(f, FAULT_INVALID, "coord_seeds",
				 "coord is embedded, and coord_seeds is empty; it must list the "
				 "nodes that run etcd, such as a=10.0.0.1");
	return config_seeds(c, &seeds, f);
}

/* --------------------------------------------------------------------------- other nodes */

void config_peer_advertise(const struct config *c, struct hostport *ret)
{
	CHECK(hostport_parse(*c->peer.advertise ? c->peer.advertise : c->peer.listen, ret));
}

void config_data_address(const struct config *c, char ret[HOSTPORT_HOST_BYTES])
{
	struct hostport at;

	config_peer_advertise(c, &at);
	text_copy(ret, HOSTPORT_HOST_BYTES, *c->peer.data_address ? c->peer.data_address : at.host);
}

static int config_nodes_check_advertise(const struct config *c, struct fault *f)
{
	const char *at = *c->peer.advertise ? c->peer.advertise : c->peer.listen;
	struct hostport h;

	if (*c->peer.advertise && !hostport_parse(c->peer.advertise, &h))
		return fault_set(f, FAULT_INVALID, "peer_advertise",
				 "peer_advertise is '%.100s'; it must be HOST:PORT, IPv6 in "
				 "brackets",
				 c->peer.advertise);
	if (*at && hostport_parse(at, &h) && hostport_is_wildcard(h.host))
		return fault_set(f, FAULT_INVALID, "peer_advertise",
				 "peer_advertise %s '%.100s'; it must be HOST:PORT at which other "
				 "nodes reach this one",
				 *c->peer.advertise ? "is" : "is empty, and peer_listen is", at);
	return 0;
}

static int config_nodes_check_listen(const struct config *c, struct fault *f)
{
	struct hostport h;

	if (!*c->peer.listen)
		return fault_set(f, FAULT_INVALID, "peer_listen",
				 "coord is '%.80s', and peer_listen is empty; it must be "
				 "ADDRESS:PORT, such as 10.0.0.1:7400",
				 c->coord.store);
	if (!hostport_parse(c->peer.listen, &h) || !hostport_is_numeric(h.host))
		return fault_set(f, FAULT_INVALID, "peer_listen",
				 "peer_listen is '%.100s'; it must be ADDRESS:PORT with an IPv4 "
				 "address, or an IPv6 address in brackets",
				 c->peer.listen);
	if (!*c->peer.cert && !hostport_is_loopback(h.host) && strcmp(c->peer.insecure, "yes") != 0)
		return fault_set(f, FAULT_INVALID, "peer_cert",
				 "peer_listen is '%.100s', which other machines reach, and there "
				 "are no certificates; set peer_ca, peer_cert and peer_key, which "
				 "must be set unless peer_insecure is yes",
				 c->peer.listen);
	return 0;
}

static int config_nodes_check_tls(const struct config *c, struct fault *f)
{
	const struct config_peer *p = &c->peer;

	if (config_nodes_together("peer_cert", *p->cert, "peer_key", *p->key, f) ||
	    config_nodes_together("peer_ca", *p->ca, "peer_cert", *p->cert, f))
		return (int)f->code;
	if (*p->cert && strcmp(p->insecure, "yes") == 0)
		return fault_set(f, FAULT_INVALID, "peer_insecure",
				 "peer_insecure is yes, and peer_cert is set; it must be no with "
				 "certificates");
	if (*p->allow && !*p->cert)
		return fault_set(f, FAULT_INVALID, "peer_allow",
				 "peer_allow is set without certificates, which prove names; "
				 "peer_ca, peer_cert and peer_key must be set, too");
	return 0;
}

static int config_nodes_check_data(const struct config *c, struct fault *f)
{
	const char *at = c->peer.data_address;
	char host[HOSTPORT_HOST_BYTES];
	const char *rest;

	if (*at && *c->peer.data_interface)
		return fault_set(f, FAULT_INVALID, "data_interface",
				 "data_interface and data_address are set; one of them must be "
				 "empty");
	if (strpbrk(c->peer.data_interface, " /:"))
		return fault_set(f, FAULT_INVALID, "data_interface",
				 "data_interface is '%s'; it must be the name of a network "
				 "interface, such as eth0",
				 c->peer.data_interface);
	if (!*at || (hostport_is_numeric(at) && !hostport_is_wildcard(at)))
		return 0;
	rest = hostport_parse_host(at, host);
	if (!rest || *rest || *at == '[' || hostport_is_wildcard(at))
		return fault_set(f, FAULT_INVALID, "data_address",
				 "data_address is '%.100s'; it must be an address or a host name "
				 "of this node, without a port",
				 at);
	return 0;
}

static int config_nodes_check_peers(const struct config *c, struct fault *f)
{
	int r = config_nodes_check_tls(c, f);

	r = r ? r : config_nodes_check_allow(c, f);
	r = r ? r : config_nodes_check_advertise(c, f);
	return r ? r : config_nodes_check_data(c, f);
}

int config_nodes_check(const struct config *c, struct fault *f)
{
	int r = config_nodes_check_store(c, f);

	r = r ? r : config_nodes_check_names(c, f);
	r = r ? r : config_nodes_check_etcd(c, f);
	r = r ? r : config_nodes_check_peers(c, f);
	r = r ? r : config_nodes_check_kind(c, f);
	if (r || config_store(c) == CONFIG_STORE_NONE)
		return r;
	r = config_nodes_check_listen(c, f);
	if (r == 0 && config_store(c) == CONFIG_STORE_EMBEDDED)
		r = config_nodes_check_embedded(c, f);
	return r;
}
