/*
 * The executor: takes tasks in the order of each queue and puts them on its stream. Also
 * the loop's side of tasks.
 *
 * An item that lacks room (staging, launches ahead, marks) stays the first of its queue, and
 * continues where it stopped when the reaper has made room.
 */
#include "backend/cuda_impl.h"
#include "backend/cuda_nvtx.h"

#ifdef SHARDD_CUDA

#include <errno.h>

#include "core/check.h"
#include "core/cleanup.h"

/* ---------------------------------------------------------------- loop thread */

static void cuda_exec_start_waiting(struct cuda_queue *q)
{
	struct cuda *c = q->cuda;

	while (q->waiting && !list_empty(&q->free)) {
		struct cuda_item *item = list_first(&q->free, struct cuda_item, link);
		struct backend_task *task = q->waiting;

		q->waiting = STEAL_PTR(task->impl);
		*item = (struct cuda_item){ .link = item->link, .queue = q, .task = task };
		list_unlink(&item->link);
		pthread_mutex_lock(&c->lock);
		list_append(&q->todo, &item->link);
		pthread_cond_signal(&c->work);
		pthread_mutex_unlock(&c->lock);
	}
}

void cuda_exec_submit(struct backend *b, struct backend_task *task)
{
	struct cuda_queue *q = &cuda_of(b)->queues[task->queue];

	for (unsigned i = 0; i < task->n_waits; i++)
		cuda_signals_of(&task->waits[i])->pending++;
	task->impl = NULL;
	if (q->waiting)
		q->waiting_last->impl = task;
	else
		q->waiting = task;
	q->waiting_last = task;
	cuda_exec_start_waiting(q);
}

void cuda_exec_ended(struct work *work)
{
	struct cuda_item *item = CONTAINER_OF(work, struct cuda_item, ended);
	struct backend_task *task = STEAL_PTR(item->task);
	struct cuda_queue *q = item->queue;
	int status = item->status;

	for (unsigned i = 0; i < task->n_waits; i++) {
		struct cuda_signals *s = cuda_signals_of(&task->waits[i]);

		CHECK(s->pending > 0);
		s->pending--;
	}
	list_append(&q->free, &item->link);
	cuda_exec_start_waiting(q);
	cuda_signals_collect(q->cuda);
	backend_complete(&q->cuda->backend, task, status);
}

static void cuda_exec_on_told(struct work *work)
{
	struct cuda_item *item = CONTAINER_OF(work, struct cuda_item, told);
	bool ends = item->ends; /* else it may end while we still use it */

	if (item->tell)
		backend_issued(&item->queue->cuda->backend, item->task, item->ready);
	if (ends)
		cuda_exec_ended(&item->ended);
}

void cuda_exec_init(struct cuda *c)
{
	for (unsigned i = 0; i < _BACKEND_Q_N; i++) {
		struct cuda_queue *q = &c->queues[i];

		q->cuda = c;
		q->which = i;
		list_init(&q->free);
		list_init(&q->todo);
		for (unsigned k = 0; k < CUDA_ITEMS; k++) {
			list_init(&q->items[k].link);
			list_append(&q->free, &q->items[k].link);
		}
	}
}

/* ------------------------------------------------------------------- executor */

static bool cuda_exec_must_wait(const struct cuda_item *item)
{
	for (unsigned i = 0; i < item->task->n_waits; i++)
		if (!atomic_load(&cuda_signals_of(&item->task->waits[i])->poisoned))
			return true;
	return false;
}

/* With the lock held, as all up to take_item. */
static bool cuda_exec_is_runnable(const struct cuda *c, const struct cuda_queue *q)
{
	const struct cuda_item *item;

	if (list_empty(&q->todo) || q->holds > 0 || q->marks_head - q->marks_tail == CUDA_MARKS)
		return false;
	if (atomic_load(&c->lost))
		return true;
	if (q->starved)
		return false;
	item = list_first(&q->todo, struct cuda_item, link);
	return item->begun || !c->gate || !cuda_exec_must_wait(item);
}

/* From here on its waits count as open, and poison is also written to their slots. */
static void cuda_exec_begin(struct cuda *c, struct cuda_queue *q, struct cuda_item *item)
{
	item->begun = true;
	for (unsigned i = 0; i < item->task->n_waits; i++) {
		const struct backend_wait *w = &item->task->waits[i];
		struct cuda_signals *s = cuda_signals_of(w);

		s->waited[w->slot / 8] |= (uint8_t)(1u << w->slot % 8);
		s->until[q->which] = UINT64_MAX;
		c->foreign++;
		q->open++;
	}
}

/* Take turns between the queues. @turn: which queue was last. */
static struct cuda_item *cuda_exec_take_item(struct cuda *c, unsigned *turn)
{
	struct cuda_item *item;

	for (unsigned i = 1; i <= _BACKEND_Q_N; i++) {
		struct cuda_queue *q = &c->queues[(*turn + i) % _BACKEND_Q_N];

		if (!cuda_exec_is_runnable(c, q))
			continue;
		*turn = q->which;
		item = list_first(&q->todo, struct cuda_item, link);
		q->issuing = true;
		if (!item->begun && !atomic_load(&c->lost))
			cuda_exec_begin(c, q, item);
		return item;
	}
	return NULL;
}

/* An event after everything issued so far. */
static struct cuda_mark *cuda_exec_record(struct cuda *c, struct cuda_queue *q)
{
	struct cuda_mark *m = &q->marks[q->marks_head % CUDA_MARKS];

	m->item = NULL;
	m->stage = q->stage.head;
	m->launched = q->launched;
	m->recorded =
		cuda_result(c, c->lib->cuEventRecord(m->event, q->stream), "cuEventRecord") == 0;
	q->marked = q->launched;
	q->stage_marked = q->stage.head;
	return m;
}

/* With the lock held. */
static void cuda_exec_publish(struct cuda_queue *q, struct cuda_mark *m)
{
	m->foreign = q->open;
	q->open = 0;
	q->marks_head++;
	pthread_cond_signal(&q->reap);
}

/* The item continues when a mark is reached: make sure that there is one. @starved: it cannot
 * continue before. @tail: marks reached when the item was taken. */
static void cuda_exec_pause_item(struct cuda *c, struct cuda_queue *q, bool starved, uint64_t tail)
{
	struct cuda_mark *m = NULL;

	if (q->marked != q->launched || q->stage_marked != q->stage.head)
		m = cuda_exec_record(c, q);
	pthread_mutex_lock(&c->lock);
	if (m)
		cuda_exec_publish(q, m);
	/* if one was reached since the item was taken, nothing else will wake it */
	q->starved = starved && q->marks_tail == tail && q->marks_head != tail;
	pthread_mutex_unlock(&c->lock);
}

static CUresult cuda_exec_enqueue_waits(struct cuda *c, struct cuda_queue *q,
					struct cuda_item *item)
{
	CUresult r = CUDA_SUCCESS;

	item->waited = true;
	for (unsigned i = 0; r == CUDA_SUCCESS && i < item->task->n_waits; i++)
		if (!atomic_load(&cuda_signals_of(&item->task->waits[i])->poisoned))
			r = cuda_order_wait(c, q, &item->task->waits[i]);
	return r;
}

/* Return: the step that the kernels reached. */
static enum cuda_step cuda_exec_issue(struct cuda *c, struct cuda_queue *q, struct cuda_item *item)
{
	enum cuda_step step = CUDA_STEP_DONE;
	bool last;

	if (atomic_load(&c->lost))
		item->status = -EIO;
	else if (!item->waited)
		item->status = cuda_result(c, cuda_exec_enqueue_waits(c, q, item), "a wait");
	if (item->status == 0) {
		cuda_nvtx_begin(item->task);
		step = cuda_launch(c, q, item);
		cuda_nvtx_end(item->task);
	}
	last = step == CUDA_STEP_DONE && item->status == 0;
	if (last && item->task->issued) {
		q->ready++;
		item->status = cuda_result(c, cuda_order_raise(c, q), "a write");
	}
	return step;
}

/* Whether the end of the item has to wait until the device has executed it; and whether that of
 * another item does. */
static bool cuda_exec_ends_late(const struct cuda_item *item)
{
	return item->begun && (item->task->sync || item->results || item->status);
}

static bool cuda_exec_needs_mark(const struct cuda_queue *q, const struct cuda_item *item)
{
	return cuda_exec_ends_late(item) || q->open > 0 || q->stage_marked != q->stage.head ||
	       q->launched - q->marked >= CUDA_MARK_EVERY;
}

static void cuda_exec_set_until(const struct cuda_queue *q, const struct cuda_item *item,
				uint64_t mark)
{
	for (unsigned i = 0; i < item->task->n_waits; i++)
		cuda_signals_of(&item->task->waits[i])->until[q->which] = mark;
}

/* All of it is on the stream, or never will be. Once the loop has been told, the item may be gone,
 * unless it ends late. */
static void cuda_exec_finish_item(struct cuda *c, struct cuda_queue *q, struct cuda_item *item)
{
	struct cuda_mark *m = cuda_exec_needs_mark(q, item) ? cuda_exec_record(c, q) : NULL;
	bool late = cuda_exec_ends_late(item), tell;

	item->ready = q->ready;
	item->ends = !late;
	item->tell = tell = item->task->issued && item->status == 0;
	if (m && late)
		m->item = item;
	pthread_mutex_lock(&c->lock);
	list_unlink(&item->link);
	if (item->begun)
		cuda_exec_set_until(q, item, q->marks_head + (m ? 1 : 0));
	pthread_mutex_unlock(&c->lock);
	if (tell || !late)
		loopq_post(c->backend.loopq, &item->told, cuda_exec_on_told);
	if (!m)
		return;
	pthread_mutex_lock(&c->lock);
	cuda_exec_publish(q, m);
	pthread_mutex_unlock(&c->lock);
}

static void cuda_exec_run_item(struct cuda *c, struct cuda_item *item, uint64_t tail)
{
	struct cuda_queue *q = item->queue;

	enum cuda_step step = cuda_exec_issue(c, q, item);

	if (item->status == 0 && step != CUDA_STEP_DONE)
		cuda_exec_pause_item(c, q, step == CUDA_STEP_FULL, tail);
	else
		cuda_exec_finish_item(c, q, item);
	pthread_mutex_lock(&c->lock);
	q->issuing = false;
	pthread_cond_broadcast(&c->calm);
	pthread_mutex_unlock(&c->lock);
}

void *cuda_exec_main(void *cuda)
{
	struct cuda *c = cuda;
	unsigned turn = 0;
	struct cuda_item *item;
	uint64_t tail;

	cuda_result(c, c->lib->cuCtxSetCurrent(c->context), "cuCtxSetCurrent");
	cuda_nvtx_open();
	for (;;) {
		pthread_mutex_lock(&c->lock);
		while (!(item = cuda_exec_take_item(c, &turn)) && !c->threads.stop_exec)
			pthread_cond_wait(&c->work, &c->lock);
		tail = item ? item->queue->marks_tail : 0;
		pthread_mutex_unlock(&c->lock);
		if (!item)
			return NULL;
		cuda_exec_run_item(c, item, tail);
	}
}

#endif
