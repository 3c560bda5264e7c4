/* Certificates for a test, made with the command openssl, as PEM files in a folder of their own. */
#ifndef SHARDD_TESTS_CERTFIX_H
#define SHARDD_TESTS_CERTFIX_H

struct certfix {
	char dir[64];
};

/* Skips the test if there is no openssl. */
void certfix_begin(struct certfix *x);
void certfix_end(struct certfix *x);
/* dir/@name */
const char *certfix_path(const struct certfix *x, const char *name, char *ret, unsigned bytes);
/* dir/@name.pem and @name.key: a CA. */
void certfix_ca(const struct certfix *x, const char *name);
/* The same, of @ca, with these alternative names: "DNS:a,DNS:b"; "": none. @name is its common name. What
 * was there is replaced. */
void certfix_cert(const struct certfix *x, const char *ca, const char *name,
		  const char *alternative);

#endif
