/* Streams, as the API shows them: create, destroy, query, synchronise. */
#include "sim_impl.h"

CUresult cuStreamCreateWithPriority(CUstream *ret, unsigned int flags, int priority)
{
	struct ctx *c;
	struct stream *s = NULL;
	CUresult r = sim_enter(__func__, NEED_CTX, &c);

	if (r)
		return r;
	if (flags & ~(unsigned)CU_STREAM_NON_BLOCKING)
		return CUDA_ERROR_INVALID_VALUE;
	pthread_mutex_lock(&sim_lock);
	r = stream_new(c, flags, priority < -5 ? -5 : priority > 0 ? 0 : priority, false, &s);
	pthread_mutex_unlock(&sim_lock);
	if (r == CUDA_SUCCESS)
		*ret = (CUstream)s;
	return r;
}

/* What is in the queue is executed still. */
CUresult cuStreamDestroy(CUstream stream)
{
	struct ctx *c;
	CUresult r = sim_enter(__func__, NEED_END, &c);
	struct stream *s;

	if (r)
		return r;
	pthread_mutex_lock(&sim_lock);
	s = stream_get(stream, c, __func__);
	if (!s || s->legacy) {
		r = CUDA_ERROR_INVALID_HANDLE;
	} else {
		s->live = 0;
		s->ending = true;
		s->killed = s->killed || s->ctx->error;
		pthread_cond_signal(&s->work);
	}
	pthread_mutex_unlock(&sim_lock);
	return r ? r : sim_leave(c);
}

CUresult cuStreamQuery(CUstream stream)
{
	struct ctx *c;
	CUresult r = sim_enter(__func__, NEED_CTX, &c);
	struct stream *s;

	if (r)
		return r;
	pthread_mutex_lock(&sim_lock);
	s = stream_get(stream, c, __func__);
	if (!s)
		r = CUDA_ERROR_INVALID_HANDLE;
	else if (s->ctx->error)
		r = (CUresult)s->ctx->error;
	else if (s->executed < s->enqueued)
		r = CUDA_ERROR_NOT_READY;
	pthread_mutex_unlock(&sim_lock);
	return r;
}

struct sync_arg {
	struct ctx *ctx;
	struct stream *found;
};

CUresult cuStreamSynchronize(CUstream stream)
{
	struct ctx *c;
	CUresult r = sim_enter(__func__, NEED_CTX, &c);
	struct stream *s;

	if (r)
		return r;
	pthread_mutex_lock(&sim_lock);
	s = stream_get(stream, c, __func__);
	if (s)
		stream_wait(s, s->enqueued);
	r = s ? (CUresult)s->ctx->error : CUDA_ERROR_INVALID_HANDLE;
	pthread_mutex_unlock(&sim_lock);
	return r;
}

static void find_busy(void *object, void *arg)
{
	struct stream *s = object;
	struct sync_arg *a = arg;

	if (s->ctx == a->ctx && s->executed < s->enqueued)
		a->found = s;
}

CUresult cuCtxSynchronize(void)
{
	struct ctx *c;
	CUresult r = sim_enter(__func__, NEED_CTX, &c);
	struct sync_arg a = { .ctx = c };

	if (r)
		return r;
	pthread_mutex_lock(&sim_lock);
	do {
		a.found = NULL;
		objects_each(&stream_objects, find_busy, &a);
		if (a.found)
			stream_wait(a.found, a.found->enqueued);
	} while (a.found && !c->error);
	pthread_mutex_unlock(&sim_lock);
	return (CUresult)c->error;
}

CUresult cuStreamGetCtx(CUstream stream, CUcontext *ret)
{
	struct ctx *c;
	CUresult r = sim_enter(__func__, NEED_INIT, &c);
	struct stream *s;

	if (r)
		return r;
	pthread_mutex_lock(&sim_lock);
	s = stream_get(stream, c, __func__);
	if (s)
		*ret = (CUcontext)s->ctx;
	pthread_mutex_unlock(&sim_lock);
	return s ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}
