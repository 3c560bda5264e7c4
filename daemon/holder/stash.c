#include "stash.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

#define STASH_OWN_FDS  16 /* descriptors that are not kept */
#define STASH_MOST_FDS 65536

void stash_say(const char *fmt, ...)
{
	va_list args;

	fputs("shardd-holder: ", stderr);
	va_start(args, fmt);
	vfprintf(stderr, fmt, args);
	va_end(args);
	fputc('\n', stderr);
}

void stash_limit(struct stash *k)
{
	struct rlimit limit = { 0 };

	getrlimit(RLIMIT_NOFILE, &limit);
	limit.rlim_cur = limit.rlim_max;
	setrlimit(RLIMIT_NOFILE, &limit);
	getrlimit(RLIMIT_NOFILE, &limit);
	k->most = limit.rlim_cur / 2 > STASH_OWN_FDS ? limit.rlim_cur / 2 - STASH_OWN_FDS : 0;
	if (k->most > STASH_MOST_FDS)
		k->most = STASH_MOST_FDS;
}

bool stash_add(struct stash *k, int fd, const char *name)
{
	struct stash_one *grown;
	char *copy;

	if (k->n >= k->most) {
		stash_say("descriptor '%s' is not kept: there is room for %zu", name, k->most);
		close(fd);
		return false;
	}
	copy = strdup(name);
	grown = realloc(k->all, (k->n + 1) * sizeof(*grown));
	if (grown)
		k->all = grown;
	if (!copy || !grown) {
		stash_say("descriptor '%s' is not kept: no memory", name);
		free(copy);
		close(fd);
		return false;
	}
	k->all[k->n++] = (struct stash_one){ fd, copy };
	return true;
}

static void stash_close(struct stash_one *one)
{
	close(one->fd);
	free(one->name);
}

void stash_drop(struct stash *k, const char *name)
{
	size_t left = 0;

	for (size_t i = 0; i < k->n; i++)
		if (strcmp(k->all[i].name, name) != 0)
			k->all[left++] = k->all[i];
		else
			stash_close(&k->all[i]);
	k->n = left;
}

void stash_clear(struct stash *k)
{
	for (size_t i = 0; i < k->n; i++)
		stash_close(&k->all[i]);
	k->n = 0;
}

bool stash_is_name(const char *name)
{
	size_t n = strlen(name);

	for (size_t i = 0; i < n; i++)
		if ((unsigned char)name[i] < ' ' || (unsigned char)name[i] > '~' || name[i] == ':')
			return false;
	return n > 0 && n <= STASH_NAME_MAX;
}

bool stash_value(const char *text, const char *key, char *ret)
{
	size_t n = strlen(key);

	for (const char *line = text; line; line = strchr(line, '\n')) {
		size_t bytes;

		line += *line == '\n';
		if (strncmp(line, key, n) != 0 || line[n] != '=')
			continue;
		bytes = strcspn(line + n + 1, "\n");
		if (bytes > STASH_NAME_MAX)
			return false;
		memcpy(ret, line + n + 1, bytes);
		ret[bytes] = '\0';
		return true;
	}
	return false;
}

bool stash_is_set(const char *text, const char *key)
{
	char value[STASH_NAME_MAX + 1];

	return stash_value(text, key, value) && strcmp(value, "1") == 0;
}
