/*
 * The slabs of a client: how they come here and where they are mapped.
 *
 * A slab is mapped once, at the first op that names it, and stays mapped until the client is
 * closed or the last unit in it is dropped: addresses that were handed out do not change. Its descriptor comes over the local
 * channel, or its handle in the op's reply.
 *
 * struct map_ops hides whether a mapping is host or GPU memory.
 */
#ifndef SHARDD_CLIENT_MAP_H
#define SHARDD_CLIENT_MAP_H

#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "channel.h"
#include "shardd/shardd.h"

#define MAP_IPC_BYTES 64u /* of a CUDA IPC handle */

struct mapping {
	uint32_t slab;
	bool writable;
	uint8_t *base; /* unmapped by map_deinit */
	uint64_t bytes;
	bool ipc; /* opened with a handle */
	/* Another daemon has come since: is its slab of this number this memory? */
	bool unchecked;
	uint64_t file; /* host memory: the identity of its file */
	bool lasts;    /* the next daemon has the same memory under this number */
	unsigned pins; /* map_pin */
	const struct map_ops *ops;
	void *device;
};

/* What a slab is mapped with. */
struct map_source {
	uint32_t slab;
	bool writable;
	uint64_t bytes;     /* of the slab */
	int fd;             /* borrowed; -1: none */
	uint8_t *over;      /* (optional, host) put it here, in place of what is mapped there */
	const uint8_t *ipc; /* MAP_IPC_BYTES; NULL: with the descriptor */
	bool lasts;         /* as in struct mapping */
	bool pages;         /* of the host, whatever other slabs are */
};

/* A kind of memory. @device: what map_use was given. */
struct map_ops {
	/* @timeout_ms: -1: none; 0: do not block.
	 * Return: 0, -SHARDD_DEADLINE_EXCEEDED with native EAGAIN (not now: again later),
	 * or another negative shardd_code. */
	int (*map)(void *device, const struct map_source *s, int timeout_ms, uint8_t **ret,
		   struct shardd_error *err);
	void (*unmap)(void *device, const struct mapping *m);
	/* Copy, and return when it is done. One of the two is in a mapping. */
	int (*copy_in)(void *device, void *dst, const void *src, size_t bytes,
		       struct shardd_error *err);
	int (*copy_out)(void *device, void *dst, const void *src, size_t bytes,
			struct shardd_error *err);
	/* The descriptor of GPU memory does not show which memory it is of. So there a slab is
	 * recognised by its number, if that lasts, and what is not recognised is unmapped by the
	 * next map_check, because memory of a device is scarce. */
	bool by_number;
	/* (optional) struct map_window's. Return: 0 or a negative shardd_code. @ret: window_free. */
	int (*window_new)(void *device, uint64_t bytes, uint8_t **ret, struct shardd_error *err);
	/* Show the mapping at @base (NULL: none) at @at. @shows: what it shows, before and after; if this fails, what it
	 * did, or NULL. Nothing on the device may use the window meanwhile. Blocks. */
	int (*window_show)(void *device, uint8_t *at, uint64_t bytes, const uint8_t **shows,
			   const uint8_t *base, struct shardd_error *err);
	/* It shows nothing. */
	void (*window_free)(void *device, uint8_t *at, uint64_t bytes);
};

extern const struct map_ops map_host_ops; /* its device is NULL */
/* A place of @bytes bytes for a mapping, whose pages cannot be used yet; the caller's. Return: MAP_FAILED with
 * errno. */
void *map_host_reserve(uint64_t bytes);
/* The identity of the file behind a descriptor, as long as something has it; 0: none. */
uint64_t map_host_file(int fd);

struct map {
	const struct map_ops *ops; /* of slabs that are no pages of the host */
	void *device;              /* borrowed */
	pthread_mutex_t lock;
	struct channel channel; /* under the lock */

	pthread_mutex_t table; /* over what follows; taken last */
	size_t count;          /* of @items, which are in the order of their slabs */
	size_t room;
	struct mapping *items;
	/* Slabs of earlier daemons, which are still at addresses that were handed out. On the host
	 * the next slabs of these sizes take the places of those that are not pinned. */
	struct mapping *former;
	size_t n_former;
	struct map_window *windows;
};

/* Where something is, as the daemon said. */
struct map_place {
	uint32_t slab;
	uint64_t offset; /* bytes */
	uint64_t bytes;
	bool writable;       /* must the client be able to write? */
	const uint8_t *ipc;  /* (optional) the slab's handle, MAP_IPC_BYTES; borrowed */
	uint64_t slab_bytes; /* with @ipc */
};

/* The daemon has let go of @slab: unmap it, if it is host memory that was handed out for reading. */
void map_forget(struct map *m, uint32_t slab);
/* No channel yet, host memory; map_deinit is safe from here on. */
void map_init(struct map *m);

/* Connect to @path and bind the channel to the session of @token. Blocks at most
 * 10 s. Return: 0 or a negative shardd_code. */
int map_open(struct map *m, const char *path, const uint8_t token[SHD1_TOKEN_BYTES],
	     uint64_t session, struct shardd_error *err);

/* Work without a channel: a slab that needs one is an error. */
void map_without_channel(struct map *m);

/* The client's channel from now on. @channel: consumed. */
void map_take_channel(struct map *m, struct channel *channel);

/* The same, for the channel to the next daemon. Mapped slabs stay where they are; each is checked
 * when it is named again, or by map_check. Any thread. */
void map_reconnected(struct map *m, struct channel *channel);

/* Compare all mapped slabs with the daemon's of the same numbers, after a reconnection and a join. On
 * GPUs, those of earlier daemons are unmapped: nothing on the device may use them any more.
 * Return: 0 or a negative shardd_code. */
int map_check(struct map *m, struct shardd_error *err);

/* Slabs are this kind of memory from here on. @device: borrowed until map_deinit.
 * Before the first map_address. */
void map_use(struct map *m, const struct map_ops *ops, void *device);

/* The address of @p, fetching and mapping its slab if it is not there yet.
 * @timeout_ms: -1: as long as the channel may take (10 s); 0: do not block.
 * @ret: valid until map_deinit.
 * Return: 0, -SHARDD_DEADLINE_EXCEEDED with native EAGAIN (not yet: ask again), or
 * another negative shardd_code. Any thread. */
int map_address(struct map *m, const struct map_place *p, int timeout_ms, void **ret,
		struct shardd_error *err);

/* What is mapped at @base stays there until map_unpin, whatever daemons come meanwhile: somebody reads it.
 * @base: of a slab. Return: its bytes; 0: it is not mapped any more. Any thread. */
uint64_t map_pin(struct map *m, const void *base);
/* Safe if it is not mapped. Any thread. */
void map_unpin(struct map *m, const void *base);
/* The same for what nobody else looks for or has pinned: it is unmapped, if it is host memory. Any thread. */
void map_drop(struct map *m, const void *base);

/* Copy into or out of mapped memory, which must be in one slab.
 * Return: 0, -SHARDD_INVALID_ARGUMENT, or what the device says. Any thread. */
int map_write(struct map *m, void *dst, const void *src, size_t bytes, struct shardd_error *err);
int map_read(struct map *m, void *dst, const void *src, size_t bytes, struct shardd_error *err);

/* map_window.c: addresses of a GPU that show one mapping after another, for reading. One thread at a time for each
 * window, copies from it included. */
struct map_window {
	struct map_window *next;
	uint8_t *at;
	uint64_t bytes;
	const uint8_t *shows; /* the base of a mapping; NULL: nothing may use the addresses */
};

/* A window for slabs of @bytes. @ret: map_window_free. Return: 0 or a negative shardd_code. */
int map_window_new(struct map *m, uint64_t bytes, struct map_window **ret,
		   struct shardd_error *err);
/* Show the mapping at @base, which came with a descriptor; NULL: nothing. Nothing on the device may use the window
 * meanwhile. Blocks. Return: 0, or a negative shardd_code: it shows what it did, or nothing if that fails, too. */
int map_window_show(struct map *m, struct map_window *w, const uint8_t *base,
		    struct shardd_error *err);
/* NULL is allowed. */
void map_window_free(struct map *m, struct map_window *w);

/* Leave everything mapped until the process ends: something still uses it. */
void map_abandon(struct map *m);

/* Close the channel and unmap all. Safe twice. No other thread may be using it. */
void map_deinit(struct map *m);

#endif
