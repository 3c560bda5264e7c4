/*
 * A reaper: waits for the marks of one queue, in their order, and completes the items that end with
 * them.
 */
#include "backend/cuda_impl.h"

#ifdef SHARDD_CUDA

#include <errno.h>

#include "core/check.h"

/* Return: 0, or -EIO if what was before the mark has failed. */
static int cuda_reap_reach(struct cuda *c, struct cuda_queue *q, const struct cuda_mark *m)
{
	if (m->recorded &&
	    cuda_result(c, c->lib->cuEventSynchronize(m->event), "waiting for an event") == 0)
		return 0;
	/* waits for more than necessary, but for everything that is necessary */
	return atomic_load(&c->lost) ? -EIO : cuda_drain(c, q->stream);
}

/* Everything before @m is over. */
static void cuda_reap_pass(struct cuda *c, struct cuda_queue *q, const struct cuda_mark *m)
{
	pthread_mutex_lock(&c->lock);
	CHECK(c->foreign >= m->foreign);
	c->foreign -= m->foreign;
	q->executed = m->launched;
	atomic_store_explicit(&q->stage.tail, m->stage, memory_order_release);
	q->marks_tail++;
	q->starved = false;
	pthread_cond_signal(&c->work);
	if (m->foreign > 0) {
		pthread_cond_signal(&c->setup);
		cuda_tick(c); /* signals may be free now */
	}
	pthread_mutex_unlock(&c->lock);
}

void *cuda_reap_main(void *queue)
{
	struct cuda_queue *q = queue;
	struct cuda *c = q->cuda;

	cuda_result(c, c->lib->cuCtxSetCurrent(c->context), "cuCtxSetCurrent");
	for (;;) {
		struct cuda_mark m;
		int r;

		pthread_mutex_lock(&c->lock);
		while (q->marks_tail == q->marks_head && !c->threads.stop_reap)
			pthread_cond_wait(&q->reap, &c->lock);
		if (q->marks_tail == q->marks_head) {
			pthread_mutex_unlock(&c->lock);
			return NULL;
		}
		m = q->marks[q->marks_tail % CUDA_MARKS];
		pthread_mutex_unlock(&c->lock);
		r = cuda_reap_reach(c, q, &m);
		cuda_stage_settle(&q->stage, m.stage, r == 0);
		cuda_reap_pass(c, q, &m);
		if (!m.item)
			continue;
		m.item->status = m.item->status ? m.item->status : r;
		loopq_post(c->backend.loopq, &m.item->ended, cuda_exec_ended);
	}
}

#endif
