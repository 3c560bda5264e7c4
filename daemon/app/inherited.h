/*
 * What the process that started the daemon passed to it as descriptors (sd_listen_fds(3)): the
 * listening socket, and what the previous daemon has left with the keeper (store/keeper.h).
 */
#ifndef SHARDD_APP_INHERITED_H
#define SHARDD_APP_INHERITED_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "core/fault.h"
#include "store/journal.h"

struct inherited_slab {
	uint32_t id;
	int fd; /* -1: taken */
};

/* Memory of a device that outlives the daemon beside the slabs. */
enum inherited_kind {
	INHERITED_READY, /* its ready page (backend_ready) */
	INHERITED_UNDO,  /* what its kernels keep (backend_redo_open) */
	_INHERITED_KINDS,
};

struct inherited_page {
	enum inherited_kind kind;
	uint64_t device; /* inherited_device_key */
	uint32_t number; /* no two pages of a kind have it */
	int fd;
};

struct inherited {
	int socket;                 /* -1: none */
	int journal[JOURNAL_FILES]; /* -1: none */
	int redo;                   /* -1: none */
	int history;                /* -1: none */
	struct inherited_slab *slabs;
	size_t n_slabs;
	struct inherited_page *pages;
	size_t n_pages;
};

#define INHERITED_NULL \
	((struct inherited){ .socket = -1, .journal = { -1, -1 }, .redo = -1, .history = -1 })

/* Was state passed to this process? From the environment, before inherited_take. */
bool inherited_is_announced(void);

#define INHERITED_REDO    "redo"
#define INHERITED_HISTORY "history"
/* The names of what else the daemon leaves. @ret: KEEPER_NAME_MAX + 1 bytes. */
void inherited_journal_name(unsigned file, char *ret);
void inherited_slab_name(uint32_t id, char *ret);
void inherited_page_name(const struct inherited_page *p, char *ret);
/* Stands for a device's lasting name, which is too long for that of a descriptor. */
uint64_t inherited_device_key(const char *name);

/* Take all descriptors that were passed. Once, before other threads exist.
 * Return: 0, FAULT_INVALID (one that is neither ours nor a listening Unix stream socket, or several
 * sockets), or another fault code. */
int inherited_take(struct inherited *ret, struct fault *f);
/* Close what nobody took. Safe to call twice. */
void inherited_deinit(struct inherited *in);

/* Is there state of a previous daemon? */
bool inherited_has_state(const struct inherited *in);
/* Is the journal there, all of it? */
bool inherited_has_journal(const struct inherited *in);
/* The descriptor of slab @id, the caller's; -1: there is none. */
int inherited_slab(struct inherited *in, uint32_t id);
/* The same, borrowed. */
int inherited_find_slab(const struct inherited *in, uint32_t id);

#endif
