#include "otlp/otlp_target.h"

#include <string.h>

#define OTLP_TARGET_PLAIN "http://"
#define OTLP_TARGET_TLS   "https://"

static int otlp_target_refuse(const char *url, const char *why, struct fault *f)
{
	return fault_set(f, FAULT_INVALID, "otlp",
			 "otlp is '%.200s'; %s: write http://HOST:PORT or https://HOST:PORT, such "
			 "as http://localhost:4317",
			 url, why);
}

int otlp_target_parse(const char *url, struct otlp_target *ret, struct fault *f)
{
	const size_t plain = strlen(OTLP_TARGET_PLAIN), tls = strlen(OTLP_TARGET_TLS);
	char text[HOSTPORT_TEXT_BYTES];
	struct otlp_target t = { .tls = strncmp(url, OTLP_TARGET_TLS, tls) == 0 };
	const char *at = url + (t.tls ? tls : plain);
	size_t n;

	if (!t.tls && strncmp(url, OTLP_TARGET_PLAIN, plain) != 0)
		return otlp_target_refuse(url, "it has neither http:// nor https://", f);
	n = strcspn(at, "/");
	if (at[n] && at[n + 1])
		return otlp_target_refuse(url, "gRPC has no path, and OTLP over HTTP is not spoken",
					  f);
	if (n >= sizeof(text))
		return otlp_target_refuse(url, "the host is too long", f);
	memcpy(text, at, n);
	text[n] = '\0';
	if (!hostport_parse(text, &t.at))
		return otlp_target_refuse(url, "it has no HOST:PORT", f);
	if (hostport_is_wildcard(t.at.host))
		return otlp_target_refuse(url, "nobody can connect to that address", f);
	*ret = t;
	return 0;
}
