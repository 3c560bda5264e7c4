/*
 * Gloo for C: one context of one communicator between processes, over TCP. No exception leaves it.
 *
 * The connections are made in gloo_meet.c, with no part of Gloo: only members get one. Gloo's
 * transport works on them (gloo_mesh.hh): sends and receives of unbound buffers. The collectives on
 * it are ours, for two reasons:
 *
 * - The sum must be a left fold in member order, rounded at every addition. In a ring every segment
 *   begins its way at another member. Here the owner of a segment receives the contribution of
 *   every member and folds them in order, a chunk at a time, while the next chunk arrives. Each
 *   member sends (n-1)/n of its data, as in a ring, and there is one hop and not n-1.
 * - Everything that waits must end when a member is gone. Gloo forgets the receives that are under
 *   way when a pair breaks: they wait until their timeout. Here the pair tells, and all that waits
 *   is woken.
 *
 * A member's last word is a mark in the others' sentinels, a receive that is posted to every member
 * from the start: that it leaves, or because of which member it ends. So all others name the same
 * member.
 *
 * What travels is not encrypted, and a node between the members can change it: use a network that
 * is trusted. Members must agree on the order and sizes of operations; if one breaks Gloo's
 * protocol, the communicator ends.
 *
 * SIGPIPE must be ignored. All functions but gloo_shim_abort and gloo_shim_cancel: one thread at
 * a time, and all but these and gloo_shim_new block.
 */
#ifndef SHARDD_ENGINE_GLOO_SHIM_H
#define SHARDD_ENGINE_GLOO_SHIM_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

struct gloo_shim;
struct gloo_meet_options;
struct comm_store;

struct gloo_shim_options {
	const char *iface;   /* (optional) interface; else @address */
	const char *address; /* IP or host name to bind to; not a wildcard */
	const char *prefix;  /* where members meet in the store; never used before */
	int size;
	int rank;
	unsigned connect_ms; /* to meet the others; above 0 */
	/* gloo_meet; the C++ library cannot name what is in the daemon's */
	int (*meet)(const struct gloo_meet_options *options, int *ret_fds, char *why,
		    size_t why_bytes);
	const struct comm_store *store; /* borrowed; for @meet */
	/* A member is gone, and not by gloo_shim_abort: from a thread of the shim, once at most,
	 * before gloo_shim_free returns. */
	void (*died)(void *userdata, const char *why);
	void *userdata;
};

/* out[i] = in[0][i] + in[1][i] + ... in this order; @out may be one of the inputs. */
struct gloo_shim_fold {
	void (*fn)(void *userdata, void *out, const void *const *in, uint64_t count);
	void *userdata;
	uint64_t element; /* bytes */
};

/* As struct comm_fold in engine.h. */
struct gloo_shim_link {
	void (*fn)(void *userdata, void *values, uint64_t first, uint64_t n, bool begin);
	void *userdata;
	uint64_t element; /* bytes */
};

/* Where a failed call leaves its reason. */
struct gloo_shim_error {
	char text[256];
};

/* Copies the strings. Return: 0 or -ENOMEM. */
int gloo_shim_new(const struct gloo_shim_options *options, struct gloo_shim **ret);

/* Meet the other members. What follows fails after any error; so does this after an abort.
 * Return: 0, -ECONNABORTED or -ENOMEM. */
int gloo_shim_connect(struct gloo_shim *s, struct gloo_shim_error *error);

/* While it meets the other members: stop that within a moment. Else nothing. Any thread, until
 * gloo_shim_free begins; does not block. */
void gloo_shim_cancel(struct gloo_shim *s);
/* Whatever waits ends within a moment, here and, when the sockets close, at the others. Any
 * thread, until gloo_shim_free begins; does not block. */
void gloo_shim_abort(struct gloo_shim *s);

/* Says good-bye to the others and waits for theirs for @grace_ms, so that no socket closes while a
 * member still needs it. NULL is allowed. */
void gloo_shim_free(struct gloo_shim *s, unsigned grace_ms);

/* The place of the operations that follow: as struct comm_op in engine.h. It travels in front of the data
 * of each, and whoever receives data checks it. */
void gloo_shim_set_place(struct gloo_shim *s, uint64_t place);

/* The operations, as in engine.h, between two members or more, with the same results: 0,
 * -ECONNABORTED or -ENOMEM, after which everything else fails, too. */
int gloo_shim_all_gather(struct gloo_shim *s, const void *send, void *recv, uint64_t bytes,
			 struct gloo_shim_error *error);
int gloo_shim_reduce_scatter(struct gloo_shim *s, const void *send, void *recv, uint64_t count,
			     const struct gloo_shim_fold *fold, struct gloo_shim_error *error);
int gloo_shim_all_reduce(struct gloo_shim *s, void *data, uint64_t count,
			 const struct gloo_shim_fold *fold, struct gloo_shim_error *error);
int gloo_shim_chain(struct gloo_shim *s, void *recv, uint64_t count, bool whole,
		    const struct gloo_shim_link *chain, struct gloo_shim_error *error);
/* Without a chain: each member begins values of its own by @link; @fold adds them. */
int gloo_shim_sum(struct gloo_shim *s, void *recv, uint64_t count, bool whole,
		  const struct gloo_shim_link *link, const struct gloo_shim_fold *fold,
		  struct gloo_shim_error *error);
int gloo_shim_broadcast(struct gloo_shim *s, void *data, uint64_t bytes, int root,
			struct gloo_shim_error *error);

#ifdef __cplusplus
}
#endif

#endif
