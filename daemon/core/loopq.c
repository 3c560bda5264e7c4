#include "core/loopq.h"

#include "core/check.h"

static void loopq_on_wake(uv_async_t *handle)
{
	loopq_drain(handle->data);
}

int loopq_init(struct loopq *q, uv_loop_t *loop)
{
	int r;

	mpsc_init(&q->queue);
	r = uv_async_init(loop, &q->async, loopq_on_wake);
	q->async.data = q;
	q->open = r == 0;
	return r;
}

void loopq_post(struct loopq *q, struct work *work, work_cb fn)
{
	work->fn = fn;
	mpsc_push(&q->queue, &work->node);
	/* uv_async_send does nothing if it reads that a wake-up is pending. Without a full
	 * barrier that read may happen before other threads see our push: the loop takes that
	 * wake-up, finds the queue empty, and nothing wakes it again. Pairs with the exchange by
	 * which libuv takes it. */
	atomic_thread_fence(memory_order_seq_cst);
	uv_async_send(&q->async);
}

void loopq_drain(struct loopq *q)
{
	struct mpsc_node *node;

	while ((node = mpsc_pop(&q->queue))) {
		struct work *work = CONTAINER_OF(node, struct work, node);

		work->fn(work);
	}
}

void loopq_close(struct loopq *q)
{
	if (!q->open)
		return;
	q->open = false;
	loopq_drain(q);
	uv_close((uv_handle_t *)&q->async, NULL);
}
