/*
 * A spool: a file that is written from its beginning to its end, while the caller makes what follows. A
 * thread of its own, with the rights of the one that opens it, writes large blocks, two of which there
 * are. They go past the page cache where the file system can do that (O_DIRECT): that takes a fraction
 * of the processor's time, which the trainers need, and leaves the cache to other files. Elsewhere the
 * pages are given back as they are written.
 *
 * Any thread but the loop's; one at a time.
 */
#ifndef SHARDD_CHECKPOINT_SPOOL_H
#define SHARDD_CHECKPOINT_SPOOL_H

#include <stddef.h>
#include <stdint.h>

#include "core/fault.h"

struct spool;

/* @fd: a new, empty file, open for writing; borrowed. @name: of it, for errors; borrowed. Return: 0 or a
 * fault code. */
int spool_open(int fd, const char *name, struct spool **ret, struct fault *f);
/* The same of a file in memory (memfd_create): without a thread and buffers. */
int spool_open_memory(int fd, const char *name, struct spool **ret, struct fault *f);
/* Add @bytes bytes. Return: 0, or a fault code, perhaps of bytes that were added before. */
int spool_add(struct spool *s, const void *data, size_t bytes, struct fault *f);
/* Added so far. */
uint64_t spool_bytes(const struct spool *s);
/* All is added: wait until it is on the disk. Return: 0 or a fault code. */
int spool_end(struct spool *s, struct fault *f);
/* Safe at any time; what was added and not ended may be in the file or not. NULL is allowed. Return:
 * NULL. */
struct spool *spool_free(struct spool *s);

#endif
