/*
 * Addresses as people write them: HOST:PORT, where HOST is a name, an IPv4 address, or an IPv6 address
 * in brackets. Nothing is resolved. No state, any thread.
 */
#ifndef SHARDD_CORE_HOSTPORT_H
#define SHARDD_CORE_HOSTPORT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define HOSTPORT_HOST_BYTES 256
/* With brackets, the colon, the port and the terminating 0. */
#define HOSTPORT_TEXT_BYTES (HOSTPORT_HOST_BYTES + 8)

struct hostport {
	char host[HOSTPORT_HOST_BYTES]; /* without brackets */
	uint16_t port;                  /* 1 to 65535; 0: hostport_parse_any only */
};

/* Return: @text is HOST:PORT; else @ret is unchanged. */
bool hostport_parse(const char *text, struct hostport *ret);
/* The same for an address to listen on, where port 0 stands for one that is free. */
bool hostport_parse_any(const char *text, struct hostport *ret);
/* The host that @text begins with, and what follows it. Return: what follows, or NULL: there is none. */
const char *hostport_parse_host(const char *text, char ret[HOSTPORT_HOST_BYTES]);
/* The port that @text begins with. Return: what follows, or NULL: there is none. */
const char *hostport_parse_port(const char *text, uint16_t *ret);
/* As hostport_parse reads it. @buf: HOSTPORT_TEXT_BYTES. */
void hostport_format(const char *host, uint16_t port, char *buf);

/* An IPv4 or IPv6 address, without brackets. */
bool hostport_is_numeric(const char *host);
/* 0.0.0.0 or ::, which nobody can connect to. */
bool hostport_is_wildcard(const char *host);
/* localhost, 127.0.0.0/8 or ::1, which no other machine can connect to. */
bool hostport_is_loopback(const char *host);

#endif
