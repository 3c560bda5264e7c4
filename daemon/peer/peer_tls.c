/*
 * Mutual TLS between nodes.
 *
 * A provider of gRPC core reads the files again when they change; handshakes from then on use what they
 * say. Core checks what the CA has signed. The name is checked here, at both ends: it must be one of the
 * DNS names in the certificate as it is. Core's own check would take the common name and wildcards, too.
 */
#include <grpc/support/alloc.h>
#include <grpc/support/string_util.h>
#include <stdio.h>
#include <string.h>
#include <strings.h>

#include "core/check.h"
#include "core/pem.h"
#include "peer/peer_impl.h"

#define PEER_TLS_RELOAD_S 5u
#define PEER_TLS_NAMES    200

/* ------------------------------------------------------------------------------------ names */

/* Append @name to the list in @text. */
static void peer_tls_add_name(char *text, size_t bytes, const char *name)
{
	size_t n = strlen(text);

	snprintf(text + n, bytes - n, "%s%.64s", n ? "', '" : "", name);
}

/* Of a certificate of the node that was dialled. On a thread of core. */
static int peer_tls_verify(void *userdata, grpc_tls_custom_verification_check_request *r,
			   grpc_tls_on_custom_verification_check_done_cb done, void *done_data,
			   grpc_status_code *status, char **ret_why)
{
	char names[PEER_TLS_NAMES] = "", why[PEER_WHY_BYTES];

	(void)userdata;
	(void)done;
	(void)done_data;
	*status = GRPC_STATUS_OK;
	for (size_t i = 0; i < r->peer_info.san_names.dns_names_size; i++) {
		if (strcasecmp(r->peer_info.san_names.dns_names[i], r->target_name) == 0)
			return 1;
		peer_tls_add_name(names, sizeof(names), r->peer_info.san_names.dns_names[i]);
	}
	snprintf(why, sizeof(why),
		 "its certificate has the DNS names '%s': '%s' must be one of them", names,
		 r->target_name);
	*status = GRPC_STATUS_UNAUTHENTICATED;
	*ret_why = gpr_strdup(why);
	return 1;
}

static void peer_tls_verify_nothing(void *userdata)
{
	(void)userdata; /* it is static */
}

static void peer_tls_verify_cancel(void *userdata, grpc_tls_custom_verification_check_request *r)
{
	(void)userdata; /* it never waits */
	(void)r;
}

/* Core keeps a pointer to it, which is not const. */
static grpc_tls_certificate_verifier_external peer_tls_verifier = {
	.verify = peer_tls_verify,
	.cancel = peer_tls_verify_cancel,
	.destruct = peer_tls_verify_nothing,
};

bool peer_tls_has_name(grpc_call *call, const char *name, char *ret_names, size_t bytes)
{
	grpc_auth_context *context = grpc_call_auth_context(call);
	grpc_auth_property_iterator it;
	const grpc_auth_property *at;
	bool has = false;

	*ret_names = '\0';
	if (!context)
		return false;
	it = grpc_auth_context_find_properties_by_name(context, GRPC_PEER_DNS_PROPERTY_NAME);
	while ((at = grpc_auth_property_iterator_next(&it))) {
		has = has || (at->value_length == strlen(name) &&
			      strncasecmp(at->value, name, at->value_length) == 0);
		peer_tls_add_name(ret_names, bytes, at->value);
	}
	grpc_auth_context_release(context);
	return has;
}

/* ------------------------------------------------------------------------------ certificates */

static grpc_tls_credentials_options *peer_tls_options(const struct peers *ps)
{
	grpc_tls_credentials_options *o = grpc_tls_credentials_options_create();

	grpc_tls_credentials_options_set_certificate_provider(o, ps->certs);
	grpc_tls_credentials_options_watch_root_certs(o);
	grpc_tls_credentials_options_watch_identity_key_cert_pairs(o);
	return o;
}

static void peer_tls_make(struct peers *ps)
{
	grpc_tls_certificate_verifier *verifier =
		grpc_tls_certificate_verifier_external_create(&peer_tls_verifier);
	grpc_tls_credentials_options *dial = peer_tls_options(ps), *listen = peer_tls_options(ps);

	grpc_tls_credentials_options_set_certificate_verifier(dial, verifier);
	grpc_tls_certificate_verifier_release(verifier);
	grpc_tls_credentials_options_set_check_call_host(dial, 0); /* the verifier has checked it */
	ps->dial_creds = grpc_tls_credentials_create(dial);
	grpc_tls_credentials_options_set_cert_request_type(
		listen, GRPC_SSL_REQUEST_AND_REQUIRE_CLIENT_CERTIFICATE_AND_VERIFY);
	ps->listen_creds = grpc_tls_server_credentials_create(listen);
	CHECK(ps->dial_creds && ps->listen_creds);
}

static int peer_tls_check(const struct peers_options *o, struct fault *f)
{
	if (!o->ca || !o->cert || !o->key)
		return fault_set(f, FAULT_INVALID, "peer",
				 "the %s of this node is missing: set the CA, the certificate "
				 "and the key, or none of them",
				 !o->ca     ? "CA"
				 : !o->cert ? "certificate"
					    : "key");
	if (pem_check_file(o->ca, "peer_ca", f) || pem_check_file(o->cert, "peer_cert", f) ||
	    pem_check_file(o->key, "peer_key", f))
		return (int)f->code;
	return 0;
}

int peer_tls_init(struct peers *ps, const struct peers_options *o, struct fault *f)
{
	if (!o->ca && !o->cert && !o->key) {
		ps->dial_creds = grpc_insecure_credentials_create();
		ps->listen_creds = grpc_insecure_server_credentials_create();
		return 0;
	}
	if (peer_tls_check(o, f))
		return (int)f->code;
	ps->certs = grpc_tls_certificate_provider_file_watcher_create(
		o->key, o->cert, o->ca, o->reload_s ? o->reload_s : PEER_TLS_RELOAD_S);
	peer_tls_make(ps);
	return 0;
}

void peer_tls_deinit(struct peers *ps)
{
	if (ps->dial_creds)
		grpc_channel_credentials_release(ps->dial_creds);
	if (ps->listen_creds)
		grpc_server_credentials_release(ps->listen_creds);
	if (ps->certs)
		grpc_tls_certificate_provider_release(ps->certs);
	ps->dial_creds = NULL;
	ps->listen_creds = NULL;
	ps->certs = NULL;
}
