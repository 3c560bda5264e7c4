#include "checkpoint/place.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <limits.h>
#include <linux/capability.h>
#include <linux/openat2.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <sys/fsuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "core/cleanup.h"

/* Bytes of the first root of @roots, without slashes at its end. "/" has none. */
static size_t place_root_bytes(const char *roots)
{
	size_t n = strcspn(roots, ":");

	while (n && roots[n - 1] == '/')
		n--;
	return n;
}

static bool place_is_below(const char *root, size_t n, const char *path)
{
	return root[0] == '/' && strncmp(root, path, n) == 0 && (path[n] == '/' || !path[n]);
}

int place_find(const char *roots, const char *path, const char **ret_at, size_t *ret_root,
	       struct fault *f)
{
	if (!*roots)
		return fault_set(f, FAULT_STATE, NULL,
				 "the daemon writes no checkpoints: set checkpoint_roots in its "
				 "configuration to the folders below which it may");
	if (path[0] != '/' || strlen(path) >= PATH_MAX)
		return fault_set(f, FAULT_INVALID, "path",
				 "path '%.200s' is not an absolute path of less than %d bytes",
				 path, PATH_MAX);
	for (const char *at = roots; *at; at += strcspn(at, ":"), at += *at == ':') {
		size_t n = place_root_bytes(at);

		if (!place_is_below(at, n, path))
			continue;
		*ret_at = at;
		*ret_root = n;
		return 0;
	}
	return fault_set(f, FAULT_INVALID, "path",
			 "path '%.200s' is below none of the daemon's checkpoint_roots, '%.200s'",
			 path, roots);
}

/* ---------------------------------------------------------------------------- as the owner */

/* The calls of the C library would change all threads of the process. */
static bool place_switch(uid_t uid, gid_t gid)
{
	struct __user_cap_header_struct header = { .version = _LINUX_CAPABILITY_VERSION_3 };
	struct __user_cap_data_struct none[2] = { { 0 } };

	return syscall(SYS_setgroups, 0, NULL) == 0 &&
	       (syscall(SYS_setfsgid, gid), (gid_t)syscall(SYS_setfsgid, (gid_t)-1) == gid) &&
	       (syscall(SYS_setfsuid, uid), (uid_t)syscall(SYS_setfsuid, (uid_t)-1) == uid) &&
	       syscall(SYS_capset, &header, none) == 0;
}

int place_become(uid_t uid, gid_t gid, struct fault *f)
{
	if (uid == geteuid() || place_switch(uid, gid))
		return 0;
	return fault_set(f, FAULT_DENIED, NULL,
			 "the job belongs to user %u and the daemon runs as user %u, without the "
			 "capabilities CAP_SETUID and CAP_SETGID that it needs to write files as "
			 "the owner: give them to it, or run it as that user",
			 (unsigned)uid, (unsigned)geteuid());
}

static int place_fault(struct fault *f, const char *path)
{
	char what[320];
	int error = errno;

	snprintf(what, sizeof(what), "opening the folder of checkpoints '%.256s'", path);
	if (error == ENOENT || error == ENOTDIR)
		fault_set(f, FAULT_NOT_FOUND, NULL, "%s: there is no such folder: make it first",
			  what);
	else if (error == ELOOP || error == EXDEV)
		fault_set(f, FAULT_INVALID, "path",
			  "%s: behind the root of checkpoint_roots there must be no symbolic link "
			  "and "
			  "no way out of it",
			  what);
	else if (error == EACCES || error == EPERM)
		fault_set(f, FAULT_DENIED, NULL, "%s: the owner of the job may not use it", what);
	else if (error == ENOSYS)
		fault_set(f, FAULT_STATE, NULL,
			  "%s: a filter of system calls, or the kernel, refuses openat2: with "
			  "systemd install shardd-checkpoints.conf, which has RestrictSUIDSGID=no",
			  what);
	else
		(void)fault_errno(f, -error, what);
	return -1;
}

void place_tell(struct fault *f, const char *path, uint64_t step)
{
	struct fault was = *f;

	*f = FAULT_NULL;
	fault_set(f, was.code, was.field[0] ? was.field : NULL,
		  "checkpoint of step %" PRIu64 " in '%.160s': %s", step, path, was.text);
	f->domain = was.domain;
	f->native = was.native;
}

int place_open(const char *roots, const char *path, struct fault *f)
{
	struct open_how how = { .flags = O_RDONLY | O_DIRECTORY | O_CLOEXEC,
				.resolve = RESOLVE_BENEATH | RESOLVE_NO_SYMLINKS };
	_cleanup_(fd_closep) int root = -1;
	const char *at, *rest;
	char name[PATH_MAX];
	size_t n;
	int fd;

	if (place_find(roots, path, &at, &n, f))
		return -1;
	snprintf(name, sizeof(name), "%.*s/", (int)n, at);
	root = open(name, O_PATH | O_DIRECTORY | O_CLOEXEC);
	if (root < 0)
		return place_fault(f, name);
	rest = path + n + strspn(path + n, "/");
	fd = (int)syscall(SYS_openat2, root, *rest ? rest : ".", &how, sizeof(how));
	return fd < 0 ? place_fault(f, path) : fd;
}
