#include "checkpoint/folder.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include "core/check.h"
#include "core/cleanup.h"

#define STEP     "step-"
#define SAVING   ".saving-"
#define REMOVING ".removing-"
#define NODES    ".nodes-"
#define TRIES    16 /* to find a name that nobody has */

static void folder_closedirp(DIR **d)
{
	if (*d)
		closedir(*d);
	*d = NULL;
}

void folder_step_name(uint64_t step, char ret[FOLDER_NAME_BYTES])
{
	snprintf(ret, FOLDER_NAME_BYTES, STEP "%012" PRIu64, step);
}

bool folder_step_of(const char *name, uint64_t *ret)
{
	char again[FOLDER_NAME_BYTES];
	uint64_t step;

	if (strncmp(name, STEP, strlen(STEP)) != 0)
		return false;
	errno = 0;
	step = strtoull(name + strlen(STEP), NULL, 10);
	folder_step_name(step, again);
	if (errno || strcmp(name, again) != 0)
		return false;
	*ret = step;
	return true;
}

static int folder_fault(struct fault *f, const char *doing, const char *name)
{
	char what[FOLDER_NAME_BYTES + 64];
	int error = -errno;

	snprintf(what, sizeof(what), "%s '%s'", doing, name);
	return fault_errno(f, error, what);
}

/* The names in @dir, read from its beginning. Return: NULL with @f filled. */
static DIR *folder_names(int dir, struct fault *f)
{
	int fd = openat(dir, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	DIR *names = fd >= 0 ? fdopendir(fd) : NULL;

	if (!names) {
		fault_errno(f, -errno, "reading the folder of checkpoints");
		fd_close(fd);
	}
	return names;
}

static int folder_enter(int dir, const char *name)
{
	return openat(dir, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
}

/* Remove folder @name with the files in it. Return: 0 or a fault code. */
static int folder_remove(int dir, const char *name, struct fault *f)
{
	_cleanup_(fd_closep) int fd = folder_enter(dir, name);
	_cleanup_(folder_closedirp) DIR *names = fd >= 0 ? folder_names(fd, f) : NULL;
	struct dirent *d;

	if (fd < 0 && errno == ENOENT)
		return 0; /* somebody else was faster */
	if (!names)
		return f->code ? (int)f->code : folder_fault(f, "opening", name);
	while ((d = readdir(names))) {
		if (strcmp(d->d_name, ".") == 0 || strcmp(d->d_name, "..") == 0)
			continue;
		if (unlinkat(fd, d->d_name, 0) < 0 && errno != ENOENT)
			return folder_fault(f, "removing a file of", name);
	}
	if (unlinkat(dir, name, AT_REMOVEDIR) < 0 && errno != ENOENT)
		return folder_fault(f, "removing", name);
	return 0;
}

/* The name goes first, so that no half of a checkpoint has one, nor gets one. */
static int folder_take_away(int dir, const char *name, struct fault *f)
{
	char to[2 * FOLDER_NAME_BYTES];
	uint32_t random = 0;

	if (getrandom(&random, sizeof(random), 0) != sizeof(random))
		return fault_errno(f, -EIO, "choosing a name");
	snprintf(to, sizeof(to), REMOVING "%s-%08" PRIx32, name, random);
	if (renameat(dir, name, dir, to) < 0)
		return errno == ENOENT ? 0 : folder_fault(f, "removing", name);
	if (fsync(dir) < 0)
		return folder_fault(f, "syncing the folder of", name);
	return folder_remove(dir, to, f);
}

/* ------------------------------------------------------------------------ making one */

/* Return: -errno; -EAGAIN: try again. */
static int folder_make_nodes(struct folder_new *n)
{
	uint32_t random;

	if (getrandom(&random, sizeof(random), 0) != sizeof(random))
		return -EIO;
	snprintf(n->name, sizeof(n->name), NODES "%012" PRIu64 "-%016" PRIx64 "-%08" PRIx32,
		 n->step, n->owner, random);
	if (mkdirat(n->dir, n->name, 0777) < 0)
		return errno == EEXIST ? -EAGAIN : -errno;
	n->fd = folder_enter(n->dir, n->name);
	return n->fd < 0 ? -errno : 0;
}

/* Make and lock a folder of a name that nobody has. A tidy that comes between the two removes it:
 * then the lock is on a folder without a name. Return: -errno; -EAGAIN: try again. */
static int folder_make(struct folder_new *n)
{
	struct stat named, own;
	uint32_t random;

	if (getrandom(&random, sizeof(random), 0) != sizeof(random))
		return -EIO;
	snprintf(n->name, sizeof(n->name), SAVING "%012" PRIu64 "-%08" PRIx32, n->step, random);
	if (mkdirat(n->dir, n->name, 0777) < 0)
		return errno == EEXIST ? -EAGAIN : -errno;
	n->fd = folder_enter(n->dir, n->name);
	if (n->fd >= 0 && flock(n->fd, LOCK_EX | LOCK_NB) == 0 && fstat(n->fd, &own) == 0 &&
	    fstatat(n->dir, n->name, &named, AT_SYMLINK_NOFOLLOW) == 0 &&
	    named.st_ino == own.st_ino && named.st_dev == own.st_dev)
		return 0;
	n->fd = fd_close(n->fd);
	return errno == ENOENT || errno == EWOULDBLOCK || errno == 0 ? -EAGAIN : -errno;
}

static int folder_exists(const char *name, struct fault *f)
{
	return fault_set(f, FAULT_STATE, NULL,
			 "there is a checkpoint '%s' already: remove it, or save into another "
			 "folder",
			 name);
}

int folder_begin(int dir, uint64_t step, struct folder_new *ret, struct fault *f)
{
	return folder_begin_nodes(dir, step, 0, ret, f);
}

int folder_begin_nodes(int dir, uint64_t step, uint64_t owner, struct folder_new *ret,
		       struct fault *f)
{
	struct folder_new n = { .dir = dir, .fd = -1, .step = step, .owner = owner };
	char name[FOLDER_NAME_BYTES];
	int r = -EAGAIN;

	folder_step_name(step, name);
	if (faccessat(dir, name, F_OK, AT_SYMLINK_NOFOLLOW) == 0)
		return folder_exists(name, f);
	for (int i = 0; r == -EAGAIN && i < TRIES; i++) {
		errno = 0;
		r = owner ? folder_make_nodes(&n) : folder_make(&n);
	}
	if (r)
		return fault_errno(f, r, "making a folder for the checkpoint");
	*ret = n;
	return 0;
}

/* A network file system may not know the flag. A folder is never renamed to one that is not empty. */
static int folder_name(int dir, const char *from, const char *to)
{
	int r = renameat2(dir, from, dir, to, RENAME_NOREPLACE);

	if (r < 0 && (errno == EINVAL || errno == ENOSYS))
		r = renameat(dir, from, dir, to);
	if (r < 0 && errno == ENOTEMPTY)
		errno = EEXIST;
	return r;
}

int folder_commit(struct folder_new *n, struct fault *f)
{
	char name[FOLDER_NAME_BYTES];

	CHECK(n->fd >= 0);
	folder_step_name(n->step, name);
	if (fsync(n->fd) < 0)
		return folder_fault(f, "syncing", n->name);
	if (folder_name(n->dir, n->name, name) < 0)
		return errno == EEXIST ? folder_exists(name, f) : folder_fault(f, "naming", name);
	n->fd = fd_close(n->fd); /* it is valid from here on, whatever happens */
	if (fsync(n->dir) < 0)
		return folder_fault(f, "syncing the folder of", name);
	return 0;
}

void folder_abandon(struct folder_new *n)
{
	struct fault f = FAULT_NULL;

	if (n->fd >= 0 && n->owner)
		folder_take_away(n->dir, n->name, &f); /* others may write in it still */
	else if (n->fd >= 0)
		folder_remove(n->dir, n->name, &f); /* else a tidy does it */
	n->fd = fd_close(n->fd);
}

/* ----------------------------------------------------------------------------- what there is */

static int folder_compare(const void *a, const void *b)
{
	const uint64_t *x = a, *y = b;

	return (*x > *y) - (*x < *y);
}

int folder_list(int dir, uint64_t **ret, size_t *ret_n, struct fault *f)
{
	_cleanup_(folder_closedirp) DIR *names = folder_names(dir, f);
	_cleanup_(freep) uint64_t *steps = NULL;
	struct dirent *d;
	uint64_t step, *more;
	size_t n = 0;

	if (!names)
		return f->code;
	while ((d = readdir(names))) {
		if (!folder_step_of(d->d_name, &step))
			continue;
		more = reallocarray(steps, n + 1, sizeof(*steps));
		if (!more)
			return fault_errno(f, -ENOMEM, "listing checkpoints");
		steps = more;
		steps[n++] = step;
	}
	if (n)
		qsort(steps, n, sizeof(*steps), folder_compare);
	*ret = STEAL_PTR(steps);
	*ret_n = n;
	return 0;
}

int folder_open(int dir, uint64_t step, struct fault *f)
{
	char name[FOLDER_NAME_BYTES];
	int fd;

	folder_step_name(step, name);
	fd = folder_enter(dir, name);
	if (fd < 0 && errno == ENOENT)
		fault_set(f, FAULT_NOT_FOUND, NULL, "there is no checkpoint '%s'", name);
	else if (fd < 0)
		folder_fault(f, "opening", name);
	return fd;
}

/* ---------------------------------------------------------------------------------- removing */

/* Is @name what a process has left that does not live any more? */
static bool folder_is_left(int dir, const char *name)
{
	_cleanup_(fd_closep) int fd = -1;

	if (strncmp(name, REMOVING, strlen(REMOVING)) == 0)
		return true;
	if (strncmp(name, SAVING, strlen(SAVING)) != 0)
		return false;
	fd = folder_enter(dir, name);
	return fd >= 0 && flock(fd, LOCK_EX | LOCK_NB) == 0;
}

int folder_tidy(int dir, size_t *ret_left, struct fault *f)
{
	_cleanup_(folder_closedirp) DIR *names = folder_names(dir, f);
	struct dirent *d;

	*ret_left = 0;
	if (!names)
		return f->code;
	while (!f->code && (d = readdir(names))) {
		if (!folder_is_left(dir, d->d_name))
			continue;
		if (folder_remove(dir, d->d_name, f) == 0)
			++*ret_left;
	}
	return f->code;
}

static int folder_remove_step(int dir, uint64_t step, struct fault *f)
{
	char name[FOLDER_NAME_BYTES];

	folder_step_name(step, name);
	return folder_take_away(dir, name, f);
}

/* Return: whether @name is that of a checkpoint that nodes make, of @owner. */
static bool folder_is_of_owner(const char *name, uint64_t owner)
{
	char of[32];
	const char *at = strchr(name + 1, '-');

	snprintf(of, sizeof(of), "-%016" PRIx64 "-", owner);
	at = at ? strchr(at + 1, '-') : NULL;
	return folder_is_of_nodes(name) && at && strncmp(at, of, strlen(of)) == 0;
}

bool folder_is_of_nodes(const char *name)
{
	return strncmp(name, NODES, strlen(NODES)) == 0 && !strchr(name, '/') &&
	       strlen(name) < FOLDER_NAME_BYTES;
}

int folder_tidy_nodes(int dir, uint64_t owner, struct fault *f)
{
	_cleanup_(folder_closedirp) DIR *names = folder_names(dir, f);
	struct dirent *d;

	while (names && !f->code && (d = readdir(names)))
		if (folder_is_of_owner(d->d_name, owner))
			folder_take_away(dir, d->d_name, f);
	return f->code;
}

int folder_enter_nodes(int dir, const char *name)
{
	int fd = folder_is_of_nodes(name) ? folder_enter(dir, name) : -1;

	return fd < 0 && folder_is_of_nodes(name) ? -errno : fd < 0 ? -EINVAL : fd;
}

int folder_prune(int dir, size_t keep, size_t *ret_removed, size_t *ret_left, struct fault *f)
{
	_cleanup_(freep) uint64_t *steps = NULL;
	size_t n;

	*ret_removed = 0;
	if (folder_tidy(dir, ret_left, f) || folder_list(dir, &steps, &n, f))
		return f->code;
	for (size_t i = 0; !f->code && i + keep < n; i++)
		if (folder_remove_step(dir, steps[i], f) == 0)
			++*ret_removed;
	return f->code;
}
