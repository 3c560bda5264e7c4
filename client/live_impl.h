/* Shared by the files of live: one thread at a time for each reader. */
#ifndef SHARDD_CLIENT_LIVE_IMPL_H
#define SHARDD_CLIENT_LIVE_IMPL_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "board_abi.h"
#include "client.h"
#include "publication.pb-c.h"

/* Names, types, shapes and offsets of the tensors of a generation. */
struct live_layout {
	uint64_t number;          /* the daemon's */
	uint64_t serial;          /* the reader's */
	ProtobufCMessage **pages; /* owned: names and shapes are theirs */
	size_t n_pages;
	uint32_t n_tensors;
	bool on_gpu; /* generations are in the memory of a GPU: addresses are of it */
};

/* A buffer, where it is mapped. */
struct live_place {
	uint32_t slab; /* 0: of a daemon that has ended */
	struct live_layout *layout;
	uint8_t *base; /* pinned */
	uint64_t bytes;
	/* Only with a window: another mapping of it, whose page table entries move into the window. */
	uint8_t *home;
	uint64_t home_bytes;
	struct shardd_published_tensor *tensors; /* owned; NULL: the window's */
};

/* Addresses at which the generation is that was acquired last (SHARDD_LIVE_FIXED). */
struct live_window {
	struct live_window *former; /* of another layout: readers may look at it until they close */
	struct map_window *gpu;     /* of a GPU's memory; NULL: the host's */
	uint8_t *at;
	uint64_t bytes; /* of addresses */
	uint64_t shows; /* bytes of the buffers that are shown in it */
	struct live_layout *layout;
	struct shardd_published_tensor *tensors; /* owned */
	struct live_place *shown; /* whose page table entries are here; NULL: none's */
};

/* The thread that makes a descriptor readable; NULL: nobody has asked for it. */
struct live_watch;

struct shardd_live {
	uint32_t magic;
	uint32_t flags;
	struct shardd_client *c; /* borrowed */
	char *job, *name;
	unsigned connection; /* of the client, by number, in which the reader was opened */
	uint64_t reader;     /* the daemon's number; 0: none is open */
	const struct board_page *board; /* pinned, as is the hold; NULL without a reader */
	struct board_hold *hold;
	unsigned slot; /* of the hold: the one that has @word */
	uint64_t word; /* as in the board: what it has; 0: nothing */
	uint64_t number, step, checksum;
	uint64_t beat, beat_us; /* when the board's beat was first seen to be that */
	uint64_t layouts;       /* that were fetched */
	struct live_place *places[BOARD_BUFFERS + 1];
	unsigned n_places;
	struct live_place *here; /* what it has, or had; one of them; NULL: nothing */
	const struct shardd_published_tensor *given; /* to the caller, last */
	const uint8_t *given_at;                     /* where its data was */
	struct live_window *window;
	void *delta; /* pinned: the one that was given last; NULL: none */
	struct live_watch *watch;
};

/* live_place.c: the place of generation @g, which the reader holds. Others are kept while they may come
 * again. @ret: borrowed until the next call. Return: 0 or a negative shardd_code. */
int live_place_of(struct shardd_live *l, const struct board_generation *g, struct live_place **ret,
		  struct shardd_error *err);
/* Slab numbers of the daemon mean nothing any more. */
void live_place_forget(struct shardd_live *l);
/* Let go of all. */
void live_place_drop_all(struct shardd_live *l);
/* Free @y if no place and no window has it. NULL is allowed. */
void live_place_put_layout(struct shardd_live *l, struct live_layout *y);
/* Tensors of @layout at @base. Return: the caller's; NULL: without memory, or one is not inside @bytes. */
struct shardd_published_tensor *live_place_tensors(const struct live_layout *layout,
						   const uint8_t *base, uint64_t bytes);

/* live_window.c: show @p in the window, which is made if need be. @ret: its tensors. Return: 0 or a
 * negative shardd_code. */
int live_window_show(struct shardd_live *l, struct live_place *p,
		     const struct shardd_published_tensor **ret, struct shardd_error *err);
/* Does a window show @p? */
bool live_window_shows(struct shardd_live *l, const struct live_place *p);
/* Its page table entries go back to @p, if they are that one's, which is let go of. */
void live_window_leave(struct shardd_live *l, struct live_place *p);
void live_window_free(struct shardd_live *l);

/* live_fault.c: with SHARDD_LIVE_EXPLAIN, a write to the @bytes at @at, which are the host's, is explained. Without
 * memory it is not. Any thread. */
void live_fault_add(const struct shardd_live *l, const void *at, uint64_t bytes);
/* No more, if it was, for @l. Before it is unmapped. Any thread. */
void live_fault_remove(const struct shardd_live *l, const void *at);

/* delta.c: the delta of what @l has, which is something. Return: 0 or a negative shardd_code. */
int live_delta(struct shardd_live *l, uint64_t base, struct shardd_delta *ret,
	       struct shardd_error *err);
void live_drop_delta(struct shardd_live *l);

/* live_watch.c: begin to watch. Return: 0 or a negative shardd_code. */
int live_watch_new(struct shardd_live *l, struct shardd_error *err);
/* Its descriptor, which it keeps. */
int live_watch_fd(const struct shardd_live *l);
/* The reader has another board, or another generation. */
void live_watch_tell(struct shardd_live *l);
void live_watch_free(struct shardd_live *l);

#endif
