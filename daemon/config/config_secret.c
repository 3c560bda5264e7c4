#include "config/config_secret.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "core/cleanup.h"

static int config_secret_refuse(const char *path, const char *key, enum fault_code code,
				const char *why, struct fault *f)
{
	return fault_set(f, code, key, "%s is '%.200s'; %s", key, path, why);
}

static int config_secret_open(const char *path, const char *key, int *ret_fd, struct fault *f)
{
	_cleanup_(fd_closep) int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
	struct stat st;

	if (fd < 0 || fstat(fd, &st) < 0)
		return config_secret_refuse(
			path, key, errno == EACCES ? FAULT_DENIED : FAULT_NOT_FOUND,
			errno == EACCES ? "the daemon may not read it" : "there is no such file",
			f);
	if (!S_ISREG(st.st_mode))
		return config_secret_refuse(path, key, FAULT_INVALID, "it must be a regular file",
					    f);
	if (st.st_mode & S_IRWXO)
		return config_secret_refuse(
			path, key, FAULT_INVALID,
			"other users have access to it, and must have none: chmod o= it", f);
	*ret_fd = STEAL_FD(fd);
	return 0;
}

int config_secret(const char *path, const char *key, unsigned least, char ret[CONFIG_SECRET_BYTES],
		  struct fault *f)
{
	char text[CONFIG_SECRET_BYTES + 2] = "", why[80];
	_cleanup_(fd_closep) int fd = -1;
	size_t n;

	if (config_secret_open(path, key, &fd, f))
		return (int)f->code;
	if (read(fd, text, sizeof(text) - 1) < 0)
		return fault_errno(f, -errno, key);
	n = strcspn(text, "\n");
	if (n < least || n >= CONFIG_SECRET_BYTES || (text[n] == '\n' && text[n + 1])) {
		explicit_bzero(text, sizeof(text));
		snprintf(why, sizeof(why), "it must have one line of %u to 255 characters", least);
		return config_secret_refuse(path, key, FAULT_INVALID, why, f);
	}
	text[n] = '\0';
	memcpy(ret, text, n + 1);
	explicit_bzero(text, sizeof(text));
	return 0;
}

int config_secret_text(const char *path, const char *key, char ret[CONFIG_SECRET_TEXT_BYTES],
		       struct fault *f)
{
	_cleanup_(fd_closep) int fd = -1;
	char why[80];
	ssize_t n;

	if (config_secret_open(path, key, &fd, f))
		return (int)f->code;
	n = read(fd, ret, CONFIG_SECRET_TEXT_BYTES);
	if (n < 0)
		return fault_errno(f, -errno, key);
	if (n < CONFIG_SECRET_TEXT_BYTES && !memchr(ret, '\0', (size_t)n)) {
		ret[n] = '\0';
		return 0;
	}
	explicit_bzero(ret, CONFIG_SECRET_TEXT_BYTES);
	snprintf(why, sizeof(why), "it must be a text of at most %d bytes",
		 CONFIG_SECRET_TEXT_BYTES - 1);
	return config_secret_refuse(path, key, FAULT_INVALID, why, f);
}
