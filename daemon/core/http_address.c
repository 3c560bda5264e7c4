#include "core/http_address.h"

#include <string.h>

#include "core/hostport.h"

const char *http_address_path(const char *text)
{
	return strncmp(text, "unix:", 5) == 0 ? text + 5 : NULL;
}

int http_address_check(const char *text, struct fault *f)
{
	const char *path = http_address_path(text);
	struct hostport h;

	if (path && *path == '/')
		return 0;
	if (path || !hostport_parse_any(text, &h))
		return fault_set(
			f, FAULT_INVALID, "http",
			"http is '%.100s'; it must be HOST:PORT, or unix: and an absolute path",
			text);
	return 0;
}

bool http_address_is_public(const char *text)
{
	struct hostport h;

	return !http_address_path(text) && hostport_parse_any(text, &h) &&
	       !hostport_is_loopback(h.host);
}
