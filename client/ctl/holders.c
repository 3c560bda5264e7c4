#include "ctl/holders.h"

#include <ctype.h>
#include <dirent.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "core/cleanup.h"

#define NAME "/memfd:shardd"

/* A look into one process. */
struct look {
	const uint64_t *inodes;
	size_t n;
	bool *found; /* of each inode */
	bool denied;
};

static void holders_look_note(struct look *l, uint64_t inode)
{
	for (size_t i = 0; i < l->n; i++)
		if (l->inodes[i] == inode)
			l->found[i] = true;
}

/* Lines "7f00-7f10 r--s 00000000 00:01 1234   /memfd:shardd (deleted)". */
static void holders_look_at_mappings(struct look *l, const char *pid)
{
	_cleanup_(fclosep) FILE *f = NULL;
	char path[64], line[512];
	unsigned long long inode;

	snprintf(path, sizeof(path), "/proc/%.16s/maps", pid);
	f = fopen(path, "re");
	l->denied |= !f && errno == EACCES;
	while (f && fgets(line, sizeof(line), f))
		if (strstr(line, NAME) && sscanf(line, "%*s %*s %*s %*s %llu", &inode) == 1)
			holders_look_note(l, inode);
}

static void holders_look_at_descriptors(struct look *l, const char *pid)
{
	char path[64], file[400], target[64];
	struct dirent *e;
	struct stat st;
	DIR *dir;

	snprintf(path, sizeof(path), "/proc/%.16s/fd", pid);
	dir = opendir(path);
	l->denied |= !dir && errno == EACCES;
	while (dir && (e = readdir(dir))) {
		ssize_t len;

		snprintf(file, sizeof(file), "%s/%s", path, e->d_name);
		len = readlink(file, target, sizeof(target));
		if (len >= (ssize_t)strlen(NAME) && memcmp(target, NAME, strlen(NAME)) == 0 &&
		    stat(file, &st) == 0)
			holders_look_note(l, (uint64_t)st.st_ino);
	}
	if (dir)
		closedir(dir);
}

static void holders_read_command(const char *pid, char *buf, size_t bytes)
{
	_cleanup_(fclosep) FILE *f = NULL;
	char path[64];

	snprintf(path, sizeof(path), "/proc/%.16s/comm", pid);
	f = fopen(path, "re");
	if (!f || !fgets(buf, (int)bytes, f))
		snprintf(buf, bytes, "?");
	buf[strcspn(buf, "\n")] = '\0';
}

static int holders_add(struct holders *h, const char *pid, size_t index)
{
	struct holder *grown = realloc(h->all, (h->n + 1) * sizeof(*grown));
	struct holder *new;

	if (!grown)
		return -ENOMEM;
	h->all = grown;
	new = &h->all[h->n++];
	*new = (struct holder){ .pid = (pid_t)atol(pid), .index = index };
	holders_read_command(pid, new->command, sizeof(new->command));
	return 0;
}

static int holders_of_process(struct holders *h, struct look *l, const char *pid)
{
	int r = 0;

	memset(l->found, 0, l->n * sizeof(*l->found));
	l->denied = false;
	holders_look_at_mappings(l, pid);
	holders_look_at_descriptors(l, pid);
	h->unseen += l->denied;
	for (size_t i = 0; r == 0 && i < l->n; i++)
		if (l->found[i])
			r = holders_add(h, pid, i);
	return r;
}

int holders_find(const uint64_t *inodes, size_t n, pid_t daemon, struct holders *ret)
{
	struct look l = { .inodes = inodes, .n = n, .found = calloc(n ? n : 1, sizeof(bool)) };
	DIR *dir = opendir("/proc");
	struct holders h = HOLDERS_NULL;
	struct dirent *e;
	int r = !l.found || !dir ? -ENOMEM : 0;

	while (r == 0 && l.found && dir && (e = readdir(dir)))
		if (isdigit((unsigned char)e->d_name[0]) && atol(e->d_name) != daemon &&
		    atol(e->d_name) != getpid())
			r = holders_of_process(&h, &l, e->d_name);
	if (dir)
		closedir(dir);
	free(l.found);
	if (r == 0)
		*ret = h;
	else
		holders_deinit(&h);
	return r;
}

void holders_deinit(struct holders *h)
{
	free(h->all);
	*h = HOLDERS_NULL;
}
