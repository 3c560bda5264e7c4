/*
 * Debug mode: memory that was handed out, each piece mapped at an address of its own.
 *
 * Pieces of several units share pages of a slab, and pages are what can be protected. So a piece
 * gets a second mapping of the slab's pages: the same bytes at another address, which no other
 * piece has. The mapping of a piece that was given back is made inaccessible and stays where it
 * is, so that nothing else comes to that address. A fault there is reported by a SIGSEGV handler,
 * which then does what the process had set for SIGSEGV before.
 *
 * The views of all clients of the process are in one table, since the handler knows no client. It
 * reads the table without a lock. All functions but debug_view_begin need debug_view_lock.
 */
#ifndef SHARDD_CLIENT_DEBUG_VIEW_H
#define SHARDD_CLIENT_DEBUG_VIEW_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "core/list.h"

#define DEBUG_VIEW_WHAT 160u

/* Views that were given back and keep their addresses; beyond it the oldest one loses them. */
#define DEBUG_VIEW_MAX_LOST 16384u

struct debug_view {
	atomic_uintptr_t from; /* of the mapping; 0: unused */
	size_t length;         /* of the mapping, whole pages */
	uint8_t *at;           /* what was handed out */
	uint64_t bytes;
	const uint8_t *under; /* the same bytes in the slab's own mapping, not protected */
	bool writable;
	_Atomic(const char *) by; /* the verb that gave it back, static; NULL: it is lent */
	const char *advice;       /* static */
	uint32_t rank;
	char what[DEBUG_VIEW_WHAT]; /* "the parameters of unit 'layer3'" */
	struct list lost;           /* in the order in which they were given back */
	struct debug_view **list;   /* (optional) the list that it is in */
	struct debug_view *next;    /* in that list */
};

/* Once per process: the handler. Any thread. */
void debug_view_begin(void);
void debug_view_lock(void);
void debug_view_unlock(void);

/* Map the @bytes at @under once more and put the view into @list. It is lost until
 * debug_view_lend. @what: copied. @advice: static. Return: NULL: no memory. */
struct debug_view *debug_view_new(struct debug_view **list, const uint8_t *under, uint64_t bytes,
				  bool writable, const char *what, const char *advice);

/* Make it accessible. Return: 0 or negative errno. */
int debug_view_lend(struct debug_view *v, uint32_t rank);
/* Make it inaccessible. @by: the verb, static. */
void debug_view_lose(struct debug_view *v, const char *by);
/* The same for a client that ends: the slab's memory is let go of, and the view leaves its list.
 * @advice: static; takes the place of the view's. */
void debug_view_orphan(struct debug_view *v, const char *by, const char *advice);

/* The view with all of [@at, @at + @bytes); NULL: none. */
struct debug_view *debug_view_find(const void *at, size_t bytes);

#endif
