/*
 * Host memory that can be handed to other processes: a sealed memfd and the
 * daemon's mapping of it.
 *
 * Sealed against growing and shrinking, so that no holder of a descriptor can
 * make the daemon fault with SIGBUS. Mode 0600, so that a process of another user cannot reopen a
 * read-only descriptor for writing through /proc.
 *
 * Every descriptor that is handed out is an open file of its own. The kernel counts
 * open files, and a mapping keeps its file open, so a write lease on our own file is
 * granted if and only if no other process holds or maps the memory (memfd_is_held).
 */
#ifndef SHARDD_BACKEND_MEMFD_H
#define SHARDD_BACKEND_MEMFD_H

#include "backend/backend_impl.h"
#include "core/list.h"

struct memfd {
	struct backend_mem mem; /* first: it is what users of the backend hold */
	int fd;
	bool exported;     /* a descriptor was handed out */
	bool sealed;       /* against new writable mappings: keeps its pages */
	struct list link;  /* used by the thread that frees or empties it */
	struct list live;  /* used by the code that counts it */
	bool free;         /* host_unmap.c's own, under its lock */
	struct fill *fill; /* host_fill.c's own */
};

/* Take @bytes, zero-filled, untouched. Any thread.
 * @ret: the caller's, memfd_free. Return: 0, BACKEND_E_FULL, or negative errno. */
int memfd_new(uint64_t bytes, struct memfd **ret);

/* Map memory that another process made with memfd_new. @fd: borrowed.
 * Return: 0, -EINVAL (no memfd, other size, not sealed, sealed against writing,
 * read-only), or negative errno. */
int memfd_import(int fd, uint64_t bytes, struct memfd **ret);

/* From here on nobody can map or write it through a new mapping or descriptor, not even
 * root; the daemon's own mapping stays as it is. Before the first export.
 * Return: 0 or negative errno. */
int memfd_seal(struct memfd *m);

/* @ret_fd: close-on-exec, the caller's. Return: 0 or negative errno. */
int memfd_export(struct memfd *m, bool writable, int *ret_fd);

/* A duplicate of its own open file, which does not count as a holder. @ret_fd: close-on-exec, the
 * caller's. Return: 0 or negative errno. */
int memfd_store(const struct memfd *m, int *ret_fd);

/* Can this kernel tell whether another process holds a memfd? Tested once. Any thread. */
bool memfd_knows_holders(void);

/* Is it open or mapped anywhere besides the daemon's own file and mapping? False if this kernel
 * cannot tell. Any thread; does not block. */
bool memfd_is_held(const struct memfd *m);

/* Give its pages back although others hold it: it then reads as zeros. Does nothing if it has none.
 * Takes long for large memory. Return: 0 or -EPERM (sealed, or it lasts). */
int memfd_empty(const struct memfd *m);

/* Bytes of its allocated pages. Any thread; does not block. */
uint64_t memfd_resident(const struct memfd *m);

/* Unmap and close; processes that still hold it keep its contents. NULL is allowed.
 * Return: NULL. */
struct memfd *memfd_let_go(struct memfd *m);

/* Unmap and close; first its pages are given back, if another process may hold it. Takes
 * long for large memory. NULL is allowed. Return: NULL. */
struct memfd *memfd_free(struct memfd *m);

#endif
