#include "core/log_journal.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include "core/cleanup.h"

const char *log_journal_socket(void)
{
	const char *stream = getenv("JOURNAL_STREAM");
	uintmax_t dev, inode;
	struct stat s;

	if (!stream || sscanf(stream, "%" SCNuMAX ":%" SCNuMAX, &dev, &inode) != 2 ||
	    fstat(STDERR_FILENO, &s) < 0)
		return NULL;
	return s.st_dev == dev && s.st_ino == inode ? LOG_JOURNAL_SOCKET : NULL;
}

int log_journal_open(const char *path)
{
	struct sockaddr_un at = { .sun_family = AF_UNIX };
	int fd, r;

	if (strlen(path) >= sizeof(at.sun_path))
		return -ENAMETOOLONG;
	memcpy(at.sun_path, path, strlen(path) + 1);
	fd = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
	if (fd < 0)
		return -errno;
	if (connect(fd, (struct sockaddr *)&at, sizeof(at)) < 0) {
		r = -errno;
		fd_close(fd);
		return r;
	}
	return fd;
}
