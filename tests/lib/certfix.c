#include "certfix.h"

#include <criterion/criterion.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

static void run(const char *const *argv)
{
	int status = 0;
	pid_t pid = fork();

	if (pid == 0) {
		int null = open("/dev/null", O_RDWR);

		dup2(null, 0);
		dup2(null, 1);
		dup2(null, 2);
		execvp(argv[0], (char **)argv);
		_exit(127);
	}
	cr_assert(pid > 0 && waitpid(pid, &status, 0) == pid);
	cr_assert_eq(status, 0, "%s %s failed", argv[0], argv[1]);
}

void certfix_begin(struct certfix *x)
{
	*x = (struct certfix){ .dir = "/tmp/shardd-cert-XXXXXX" };
	if (access("/usr/bin/openssl", X_OK) < 0)
		cr_skip_test("there is no openssl: install the package openssl");
	cr_assert(mkdtemp(x->dir));
}

void certfix_end(struct certfix *x)
{
	run((const char *const[]){ "rm", "-rf", x->dir, NULL });
}

const char *certfix_path(const struct certfix *x, const char *name, char *ret, unsigned bytes)
{
	snprintf(ret, bytes, "%s/%s", x->dir, name);
	return ret;
}

/* @ca: NULL: signed by itself. */
static void make(const struct certfix *x, const char *name, const char *ca, const char *extension)
{
	char pem[160], key[160], ca_pem[160], ca_key[160], subject[80];
	const char *argv[32] = { "openssl",
				 "req",
				 "-x509",
				 "-newkey",
				 "ec",
				 "-pkeyopt",
				 "ec_paramgen_curve:prime256v1",
				 "-nodes",
				 "-days",
				 "2",
				 "-keyout",
				 key,
				 "-out",
				 pem,
				 "-subj",
				 subject };
	unsigned n = 16;

	snprintf(pem, sizeof(pem), "%s/%s.pem", x->dir, name);
	snprintf(key, sizeof(key), "%s/%s.key", x->dir, name);
	snprintf(ca_pem, sizeof(ca_pem), "%s/%s.pem", x->dir, ca ? ca : name);
	snprintf(ca_key, sizeof(ca_key), "%s/%s.key", x->dir, ca ? ca : name);
	snprintf(subject, sizeof(subject), "/CN=%s", name);
	if (ca) {
		argv[n++] = "-CA";
		argv[n++] = ca_pem;
		argv[n++] = "-CAkey";
		argv[n++] = ca_key;
		argv[n++] = "-addext";
		argv[n++] = "basicConstraints=critical,CA:FALSE";
	}
	if (*extension) {
		argv[n++] = "-addext";
		argv[n++] = extension;
	}
	run(argv);
}

void certfix_ca(const struct certfix *x, const char *name)
{
	make(x, name, NULL, "");
}

void certfix_cert(const struct certfix *x, const char *ca, const char *name,
		  const char *alternative)
{
	char extension[200] = "";

	if (*alternative)
		snprintf(extension, sizeof(extension), "subjectAltName=%s", alternative);
	make(x, name, ca, extension);
}
