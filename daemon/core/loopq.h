/*
 * The way into the loop: other threads post work, the loop thread runs it.
 *
 * One loopq per loop. A work item is embedded in the object that it concerns; it belongs to the
 * queue from loopq_post until its function is called, on the loop thread.
 */
#ifndef SHARDD_CORE_LOOPQ_H
#define SHARDD_CORE_LOOPQ_H

#include <stdatomic.h>
#include <stdbool.h>
#include <uv.h>

#include "core/mpsc.h"

struct work;
typedef void (*work_cb)(struct work *work);

struct work {
	struct mpsc_node node;
	work_cb fn;
};

struct loopq {
	struct mpsc queue;
	uv_async_t async;
	bool open;
};

/* Attach to @loop (borrowed). Loop thread. Return: 0 or negative errno. */
int loopq_init(struct loopq *q, uv_loop_t *loop);

/* Run @fn on the loop thread, in posting order per thread. Any thread. The
 * queue must be open. */
void loopq_post(struct loopq *q, struct work *work, work_cb fn);

/* Run the items that are queued now. Loop thread. */
void loopq_drain(struct loopq *q);

/* Close the wake-up handle; no post may follow. The memory may be reused after
 * the loop has run the close callback. Loop thread. Safe to call twice. */
void loopq_close(struct loopq *q);

#endif
