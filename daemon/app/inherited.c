#include "app/inherited.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <systemd/sd-daemon.h>
#include <unistd.h>

#include "core/cleanup.h"
#include "core/fnv.h"
#include "store/keeper.h"

#define INHERITED_JOURNAL "journal."
#define INHERITED_SLAB    "slab."

void inherited_journal_name(unsigned file, char *ret)
{
	snprintf(ret, KEEPER_NAME_MAX + 1, INHERITED_JOURNAL "%u", file);
}

void inherited_slab_name(uint32_t id, char *ret)
{
	snprintf(ret, KEEPER_NAME_MAX + 1, INHERITED_SLAB "%" PRIu32, id);
}

static const char *const inherited_kinds[_INHERITED_KINDS] = {
	[INHERITED_READY] = "ready.",
	[INHERITED_UNDO] = "undo.",
};

/* Numbers go round. */
#define INHERITED_NUMBERS 100000000u

void inherited_page_name(const struct inherited_page *p, char *ret)
{
	snprintf(ret, KEEPER_NAME_MAX + 1, "%s%016" PRIx64 ".%" PRIu32, inherited_kinds[p->kind],
		 p->device, p->number % INHERITED_NUMBERS);
}

uint64_t inherited_device_key(const char *name)
{
	uint64_t key = FNV_BEGIN;

	for (; *name; name++)
		key = fnv_add(key, (unsigned char)*name);
	return key;
}

bool inherited_is_announced(void)
{
	const char *names = getenv("LISTEN_FDNAMES"), *pid = getenv("LISTEN_PID");

	return names && pid && strtoul(pid, NULL, 10) == (unsigned long)getpid() &&
	       strstr(names, INHERITED_JOURNAL);
}

/* The number behind @prefix. Return: whether @name is one. */
static bool inherited_number(const char *name, const char *prefix, uint32_t *ret)
{
	size_t n = strlen(prefix);
	unsigned long number;
	char *end;

	if (strncmp(name, prefix, n) != 0 || name[n] < '0' || name[n] > '9')
		return false;
	errno = 0;
	number = strtoul(name + n, &end, 10);
	if (*end || errno || number > UINT32_MAX)
		return false;
	*ret = (uint32_t)number;
	return true;
}

static int inherited_take_socket(struct inherited *in, int fd, const char *name, struct fault *f)
{
	if (in->socket >= 0)
		return fault_set(f, FAULT_INVALID, "LISTEN_FDS",
				 "the service manager passed several sockets; it must pass one, a "
				 "listening Unix stream socket");
	if (sd_is_socket(fd, AF_UNIX, SOCK_STREAM, 1) <= 0)
		return fault_set(f, FAULT_INVALID, "LISTEN_FDS",
				 "the descriptor '%.40s' passed by the service manager is not a "
				 "listening Unix stream socket, nor state that this version knows; "
				 "a newer shardd may have left it",
				 name);
	in->socket = fd;
	return 0;
}

static bool inherited_is_page(const char *name, struct inherited_page *ret)
{
	for (unsigned k = 0; k < _INHERITED_KINDS; k++) {
		size_t n = strlen(inherited_kinds[k]);
		char again[KEEPER_NAME_MAX + 1];

		*ret = (struct inherited_page){ .kind = (enum inherited_kind)k };
		if (strncmp(name, inherited_kinds[k], n) != 0 ||
		    sscanf(name + n, "%16" SCNx64 ".%8" SCNu32, &ret->device, &ret->number) != 2)
			continue;
		inherited_page_name(ret, again);
		if (strcmp(again, name) == 0)
			return true;
	}
	return false;
}

/* A descriptor that was stored twice under one name is the same one. */
static int inherited_take_one(struct inherited *in, int fd, const char *name, struct fault *f)
{
	struct inherited_page page;
	uint32_t number;

	if (inherited_number(name, INHERITED_JOURNAL, &number) && number < JOURNAL_FILES) {
		fd_close(in->journal[number]);
		in->journal[number] = fd;
	} else if (!strcmp(name, INHERITED_REDO)) {
		fd_close(in->redo);
		in->redo = fd;
	} else if (!strcmp(name, INHERITED_HISTORY)) {
		fd_close(in->history);
		in->history = fd;
	} else if (inherited_number(name, INHERITED_SLAB, &number)) {
		in->slabs[in->n_slabs++] = (struct inherited_slab){ number, fd };
	} else if (inherited_is_page(name, &page)) {
		page.fd = fd;
		in->pages[in->n_pages++] = page;
	} else {
		return inherited_take_socket(in, fd, name, f);
	}
	return 0;
}

int inherited_take(struct inherited *ret, struct fault *f)
{
	char **names = NULL;
	int n = sd_listen_fds_with_names(1, &names);

	*ret = INHERITED_NULL;
	if (n < 0)
		return fault_errno(f, n, "LISTEN_FDS");
	ret->slabs = calloc((size_t)n + 1, sizeof(*ret->slabs));
	ret->pages = calloc((size_t)n + 1, sizeof(*ret->pages));
	if (!ret->slabs || !ret->pages)
		fault_errno(f, -ENOMEM, "taking inherited descriptors");
	for (int i = 0; i < n; i++) {
		if (!f->code)
			inherited_take_one(ret, SD_LISTEN_FDS_START + i, names[i], f);
		free(names[i]);
	}
	free(names);
	return f->code;
}

void inherited_deinit(struct inherited *in)
{
	in->socket = fd_close(in->socket);
	in->redo = fd_close(in->redo);
	in->history = fd_close(in->history);
	for (unsigned i = 0; i < JOURNAL_FILES; i++)
		in->journal[i] = fd_close(in->journal[i]);
	for (size_t i = 0; i < in->n_slabs; i++)
		fd_close(in->slabs[i].fd);
	for (size_t i = 0; i < in->n_pages; i++)
		fd_close(in->pages[i].fd);
	free(in->slabs);
	free(in->pages);
	in->slabs = NULL;
	in->pages = NULL;
	in->n_slabs = 0;
	in->n_pages = 0;
}

bool inherited_has_state(const struct inherited *in)
{
	for (unsigned i = 0; i < JOURNAL_FILES; i++)
		if (in->journal[i] >= 0)
			return true;
	return in->n_slabs > 0;
}

bool inherited_has_journal(const struct inherited *in)
{
	for (unsigned i = 0; i < JOURNAL_FILES; i++)
		if (in->journal[i] < 0)
			return false;
	return true;
}

static struct inherited_slab *inherited_find(const struct inherited *in, uint32_t id)
{
	for (size_t i = 0; i < in->n_slabs; i++)
		if (in->slabs[i].id == id && in->slabs[i].fd >= 0)
			return &in->slabs[i];
	return NULL;
}

int inherited_slab(struct inherited *in, uint32_t id)
{
	struct inherited_slab *s = inherited_find(in, id);

	return s ? STEAL_FD(s->fd) : -1;
}

int inherited_find_slab(const struct inherited *in, uint32_t id)
{
	const struct inherited_slab *s = inherited_find(in, id);

	return s ? s->fd : -1;
}
