/*
 * The journal: what must outlive the daemon, in two memfds of its own.
 *
 * One of the two is valid. It begins with a base, the whole state as it was at some time, and
 * continues with the changes since, in order. Each entry has its length and a checksum. An entry
 * counts from the store of the new end in the header on, which is one aligned word, so that a
 * process that is killed at any instruction leaves the entries before. When the changes have become
 * long, the whole state is written to the other memfd, whose header becomes the valid one by one
 * store.
 *
 * The entries are bytes here; store/change.h says what they mean. Loop thread only.
 */
#ifndef SHARDD_STORE_JOURNAL_H
#define SHARDD_STORE_JOURNAL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "core/fault.h"

/* Of the layout of the files and the meaning of the entries: higher ones are refused. */
#ifndef JOURNAL_FORMAT /* a test sets it */
#define JOURNAL_FORMAT 3u
#endif
#define JOURNAL_FILES 2u

struct journal;

/* Without an entry. Return: 0 or negative errno. */
int journal_new(struct journal **ret);
/* What a predecessor left in @fds; they are duplicated. The record is as it left it: nothing is
 * written. Return: 0, FAULT_INVALID (a newer format, damage), or another fault code. */
int journal_open(const int fds[JOURNAL_FILES], struct journal **ret, struct fault *f);
/* NULL is allowed. Return: NULL. */
struct journal *journal_free(struct journal *r);

/* Borrowed. */
int journal_fd(const struct journal *r, unsigned file);
/* Bytes of memory that both files take. */
uint64_t journal_bytes(const struct journal *r);

/* Take memory, so that an entry of @bytes can be appended: journal_begin does not fail then.
 * Return: 0 or -ENOMEM. */
int journal_reserve(struct journal *r, size_t bytes);
/* Room for an entry of @bytes. Return: where to write it, until journal_end; or NULL without memory
 * that was not reserved. */
void *journal_begin(struct journal *r, size_t bytes);
/* The entry of @bytes is written: it counts. */
void journal_end(struct journal *r, size_t bytes);
/* The same for an entry, the whole state, that replaces all others. */
void *journal_base_begin(struct journal *r, size_t bytes);
void journal_base_end(struct journal *r, size_t bytes);
/* Would a new base be much shorter? */
bool journal_is_long(const struct journal *r);

/* Something was not recorded: what the journal says is not the state any more, until
 * journal_base_end. A successor refuses it. */
void journal_spoil(struct journal *r);
bool journal_is_spoiled(const struct journal *r);

/* One after the other, from *@at == 0 on. Return: false after the last. @ret: borrowed, until the
 * record changes. */
bool journal_next(const struct journal *r, uint64_t *at, const void **ret, size_t *ret_bytes);

#endif
