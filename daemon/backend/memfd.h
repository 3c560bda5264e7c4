/*
 * Host memory that can be handed to other processes: a sealed memfd and the
 * daemon's mapping of it.
 *
 * Sealed against growing and shrinking, so that no holder of a descriptor can
 * make the daemon fault with SIGBUS. Mode 0600, so that a process of another
 * user cannot open a read-only descriptor anew for writing through /proc.
 */
#ifndef SHARDD_BACKEND_MEMFD_H
#define SHARDD_BACKEND_MEMFD_H

#include "backend/backend_impl.h"
#include "core/list.h"

struct memfd {
	struct backend_mem mem; /* first: it is what users of the backend hold */
	int fd;
	struct list link;  /* of whoever frees it */
	struct fill *fill; /* host_fill.c's own */
};

/* Take @bytes, zero-filled, untouched. Any thread.
 * @ret: the caller's, memfd_free. Return: 0, BACKEND_E_FULL, or negative errno. */
int memfd_new(uint64_t bytes, struct memfd **ret);

/* Map memory that another process made with memfd_new. @fd: borrowed.
 * Return: 0, -EINVAL (no memfd, other size, not sealed, read-only), or negative
 * errno. */
int memfd_import(int fd, uint64_t bytes, struct memfd **ret);

/* @ret_fd: close-on-exec, the caller's. Return: 0 or negative errno. */
int memfd_export(const struct memfd *m, bool writable, int *ret_fd);

/* Unmap and close; takes long for large memory. NULL is allowed. Return: NULL. */
struct memfd *memfd_free(struct memfd *m);

#endif
