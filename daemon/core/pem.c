#include "core/pem.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "core/cleanup.h"

#define PEM_FILE_BYTES 65536

int pem_check_file(const char *path, const char *field, struct fault *f)
{
	_cleanup_(fd_closep) int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
	_cleanup_(freep) char *text = calloc(1, PEM_FILE_BYTES + 1);
	ssize_t n;

	if (!text)
		return fault_errno(f, -ENOMEM, "reading a certificate");
	if (fd < 0)
		return fault_set(
			f, FAULT_INVALID, field,
			"%s is '%.300s', which cannot be read: %s; write the path of a PEM "
			"file",
			field, path, strerror(errno));
	n = read(fd, text, PEM_FILE_BYTES);
	if (n < 0 || !strstr(text, "-----BEGIN "))
		return fault_set(
			f, FAULT_INVALID, field,
			"%s is '%.300s', which has no text in PEM form; write the path of a "
			"PEM file",
			field, path);
	return 0;
}
