/* The keys of the exporter to OpenTelemetry: the rules between them. */
#include <string.h>

#include "config/config.h"
#include "core/check.h"
#include "core/pem.h"
#include "otlp/otlp_target.h"

int config_otlp_headers(const struct config *c, struct otlp_headers *ret, struct fault *f)
{
	char text[CONFIG_SECRET_TEXT_BYTES];
	int r;

	*ret = OTLP_HEADERS_NULL;
	if (!*c->otlp.headers_file)
		return 0;
	if (config_secret_text(c->otlp.headers_file, "otlp_headers_file", text, f))
		return (int)f->code;
	r = otlp_headers_parse(text, ret, f);
	explicit_bzero(text, sizeof(text));
	return r;
}

/* A key that has no effect without another one. */
static int config_otlp_refuse_lone(const char *key, struct fault *f)
{
	return fault_set(f, FAULT_INVALID, key,
			 "%s is set, and otlp is not; it has no effect without it", key);
}

static int config_otlp_check_tls(const struct config *c, const struct otlp_target *at,
				 struct fault *f)
{
	if (*c->otlp.ca && !at->tls)
		return fault_set(
			f, FAULT_INVALID, "otlp_ca",
			"otlp_ca is set, and otlp is '%.200s', which is not encrypted; write "
			"https:// there, or leave otlp_ca empty",
			c->otlp.url);
	if (*c->otlp.ca)
		return pem_check_file(c->otlp.ca, "otlp_ca", f);
	return 0;
}

int config_otlp_check(const struct config *c, struct fault *f)
{
	struct otlp_headers headers = OTLP_HEADERS_NULL;
	struct otlp_target at;
	int r;

	if (!*c->otlp.url && *c->otlp.ca)
		return config_otlp_refuse_lone("otlp_ca", f);
	if (!*c->otlp.url && *c->otlp.headers_file)
		return config_otlp_refuse_lone("otlp_headers_file", f);
	if (!*c->otlp.url)
		return 0;
	if (otlp_target_parse(c->otlp.url, &at, f) || config_otlp_check_tls(c, &at, f))
		return (int)f->code;
	if (*c->otlp.headers_file && !otlp_target_is_safe(&at))
		return fault_set(
			f, FAULT_INVALID, "otlp_headers_file",
			"otlp is '%.200s', which would send the headers of otlp_headers_file in "
			"clear to another machine; write https:// there, or leave "
			"otlp_headers_file empty",
			c->otlp.url);
	r = config_otlp_headers(c, &headers, f);
	otlp_headers_deinit(&headers);
	return r;
}
