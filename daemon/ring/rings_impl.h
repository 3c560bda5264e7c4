/* Shared by rings.c and ring_ops.c. */
#ifndef SHARDD_RING_RINGS_IMPL_H
#define SHARDD_RING_RINGS_IMPL_H

#include "ring/ring_queue.h"
#include "ring/rings.h"

#define RING_STRUCT_MAGIC 0x52494e47u

struct ring_call;

struct ring {
	uint32_t magic;
	struct rings *rings;
	struct session *session; /* borrowed; NULL: over */
	struct ring_queue q;
	struct user_charge charge; /* its memory */
	int event_fd;
	uv_poll_t poll;
	struct list link;  /* rings->all; over and held: rings->left */
	struct list hot;   /* rings->hot */
	struct list news;  /* rings->news */
	struct list calls; /* of struct ring_call: submissions whose ops are under way */
	/* Of q.entries calls under way, by tag: those that can be cancelled. Of several with one tag
	 * the first; a tag of q.entries or more has no place. */
	struct ring_call **by_tag;
	bool cancels; /* a bit was set for a tag that was not there, with submissions yet to take */
	bool taking;  /* its submissions are being taken now */
	uint64_t last_us; /* when there was a submission */
	uint64_t n_woken; /* by its eventfd */
	bool released;    /* its memory is freed */
	bool closed;      /* its handle is closed */
	bool broken;      /* nothing is taken any more: its session is about to end */
};

/* Do what was submitted; its completion may be posted before this returns. */
void ring_submit(struct ring *r, const struct ring_submission *s);

/* Cancel the ops whose bits are set. */
void ring_cancel(struct ring *r);

/* Completions go nowhere from here on. */
void ring_forget_calls(struct ring *r);

/* Post, and make sure that the client is woken. */
void ring_post(struct ring *r, uint64_t tag, uint16_t code, const void *data, uint32_t bytes);

#endif
