/* Streams: who has one, and what joins say about them. */
#include "stream.h"

#ifdef SHARDD_CUDA

#include <stdlib.h>

#include "client.h"
#include "client_error.h"
#include "core/cleanup.h"
#include "stream_impl.h"

/* ------------------------------------------------------------------- life */

struct streams *streams_new(struct shardd_client *c, struct cuda *cuda)
{
	struct streams *s = calloc(1, sizeof(*s));

	if (!s)
		return NULL;
	if (pthread_key_create(&s->key, NULL) != 0) {
		free(s);
		return NULL;
	}
	s->client = c;
	s->cuda = cuda;
	s->tell = stream_link_tell;
	cuda->streams = s;
	pthread_mutex_init(&s->setup, NULL);
	pthread_mutex_init(&s->lock, NULL);
	return s;
}

static void stream_set_free(const struct cuda *cuda, struct stream *x)
{
	for (uint32_t i = 0; x->ring && i < x->ring_size; i++)
		if (x->ring[i])
			cuda->lib->cuEventDestroy(x->ring[i]);
	if (x->mark)
		cuda->lib->cuEventDestroy(x->mark);
	if (x->raised)
		cuda->lib->cuEventDestroy(x->raised);
	free(x->ring);
	free(x->holders);
	free(x);
}

void streams_free(struct streams *s)
{
	_cleanup_(cuda_leave) struct cuda_scope scope = { 0 };

	if (!s)
		return;
	/* Where the device is lost its events are gone already. */
	cuda_enter(s->cuda, &scope, NULL);
	for (uint32_t i = 0; i < s->count; i++)
		stream_set_free(s->cuda, s->items[i]);
	while (s->link)
		s->link = stream_link_free(s->cuda, s->link);
	s->cuda->streams = NULL;
	free(s->items);
	pthread_key_delete(s->key);
	pthread_mutex_destroy(&s->setup);
	pthread_mutex_destroy(&s->lock);
	free(s);
}

/* ------------------------------------------------------------ this thread's */

bool streams_linked(struct streams *s)
{
	bool linked;

	pthread_mutex_lock(&s->lock);
	linked = stream_link_orders(s->link);
	pthread_mutex_unlock(&s->lock);
	return linked;
}

bool stream_of_thread(struct streams *s, CUstream *ret)
{
	const struct stream *x = s ? pthread_getspecific(s->key) : NULL;

	if (x)
		*ret = x->stream;
	return x != NULL;
}

/* Is it a stream of the context in which memory is mapped? The context is entered. */
static int stream_set_check_stream(const struct cuda *c, CUcontext before, CUstream stream,
				   struct shardd_error *err)
{
	CUcontext own = NULL;
	CUresult r;

	if (stream == CU_STREAM_PER_THREAD)
		return error_set(err, SHARDD_INVALID_ARGUMENT, "stream",
				 "the per-thread default stream differs between threads: create a "
				 "stream");
	if (!stream) {
		own = before ? before : c->context;
	} else {
		r = c->lib->cuStreamGetCtx(stream, &own);
		if (r != CUDA_SUCCESS) {
			cuda_error(c, r, err, "%p is not a CUDA stream", (void *)stream);
			if (err)
				err->code = SHARDD_INVALID_ARGUMENT;
			return -SHARDD_INVALID_ARGUMENT;
		}
	}
	if (own == c->context)
		return 0;
	return error_set(err, SHARDD_INVALID_ARGUMENT, "stream",
			 "the stream belongs to another CUDA context than the one in which this "
			 "client's memory is mapped, on GPU %s",
			 c->uuid);
}

static struct stream *stream_set_find(struct streams *s, CUstream stream)
{
	for (uint32_t i = 0; i < s->count; i++)
		if (s->items[i]->stream == stream)
			return s->items[i];
	return NULL;
}

/* The lock is for those who look whether a stream waits. */
static int stream_set_append(struct streams *s, struct stream *x, struct shardd_error *err)
{
	struct stream **bigger;

	pthread_mutex_lock(&s->lock);
	bigger = realloc(s->items, (s->count + 1) * sizeof(struct stream *));
	if (bigger) {
		s->items = bigger;
		s->items[s->count++] = x;
	}
	pthread_mutex_unlock(&s->lock);
	return bigger ? 0 : error_memory(err);
}

static int stream_set_prepare(struct streams *s, const struct stream_link *link, struct stream *x,
			      struct shardd_error *err)
{
	CUresult r = s->cuda->lib->cuEventCreate(&x->mark, CU_EVENT_DISABLE_TIMING);
	int shared;

	if (r == CUDA_SUCCESS)
		r = s->cuda->lib->cuEventCreate(&x->raised, CU_EVENT_DISABLE_TIMING);
	if (r != CUDA_SUCCESS)
		return cuda_error(s->cuda, r, err, "cannot create an event");
	shared = stream_link_share(s, link, x, err);
	return shared < 0 ? shared : stream_set_append(s, x, err);
}

/* Setup locked. */
static int stream_set_add(struct streams *s, const struct stream_link *link, CUstream stream,
			  struct stream **ret, struct shardd_error *err)
{
	struct stream *x;
	int r;

	if (s->count >= link->slots)
		return error_set(err, SHARDD_RESOURCE_EXHAUSTED, "stream",
				 "%u streams of this client are in use, which is the limit",
				 s->count);
	x = calloc(1, sizeof(*x));
	if (!x)
		return error_memory(err);
	x->stream = stream;
	x->slot = s->count;
	r = stream_set_prepare(s, link, x, err);
	if (r < 0)
		stream_set_free(s->cuda, x);
	else
		*ret = x;
	return r;
}

/* Setup locked, context entered. */
static int stream_set_entered(struct streams *s, CUstream stream, struct shardd_error *err)
{
	struct stream *x;
	int r;

	if (!stream_link_orders(s->link))
		return stream_link_refused(err);
	r = stream_link_open(s, s->link, err);
	if (r < 0)
		return r;
	x = stream_set_find(s, stream);
	if (!x)
		r = stream_set_add(s, s->link, stream, &x, err);
	if (r == 0 && pthread_setspecific(s->key, x) != 0)
		r = error_memory(err);
	return r;
}

int streams_set(struct streams *s, void *stream, struct shardd_error *err)
{
	_cleanup_(cuda_leave) struct cuda_scope scope = { 0 };
	CUstream cu = stream == CU_STREAM_LEGACY ? NULL : stream;
	struct shardd_error scratch;
	int r;

	err = err ? err : &scratch;
	r = cuda_enter(s->cuda, &scope, err);
	if (r == 0)
		r = stream_set_check_stream(s->cuda, scope.before, cu, err);
	if (r < 0)
		return r;
	pthread_mutex_lock(&s->setup);
	r = stream_set_entered(s, cu, err);
	pthread_mutex_unlock(&s->setup);
	return r;
}

void streams_clear(struct streams *s)
{
	pthread_setspecific(s->key, NULL);
}

/* --------------------------------------------------------------------- joins */

/* Setup locked, context entered. */
static int stream_set_join_entered(struct streams *s, const Shardd__V1__StreamLink *link,
				   struct shardd_error *err)
{
	struct stream_link *fresh;
	int r = stream_link_new(link, &fresh, err);

	if (r < 0)
		return r;
	if (s->link && !s->link->gone && stream_link_same(s->link, fresh)) {
		stream_link_free(s->cuda, fresh);
		return 0;
	}
	pthread_mutex_lock(&s->lock);
	fresh->older = s->link;
	s->link = fresh;
	pthread_mutex_unlock(&s->lock);
	/* Streams in use stay in use: their slots are the same. */
	if (s->count && stream_link_orders(fresh))
		r = stream_link_open(s, fresh, err);
	for (uint32_t i = 0; i < s->count && r == 0 && stream_link_orders(fresh); i++)
		r = stream_link_share(s, fresh, s->items[i], err);
	return r;
}

int streams_join(struct streams *s, const Shardd__V1__StreamLink *link, struct shardd_error *err)
{
	static const Shardd__V1__StreamLink none = SHARDD__V1__STREAM_LINK__INIT;
	_cleanup_(cuda_leave) struct cuda_scope scope = { 0 };
	int r = cuda_enter(s->cuda, &scope, err);

	if (r < 0)
		return r;
	pthread_mutex_lock(&s->setup);
	r = stream_set_join_entered(s, link ? link : &none, err);
	pthread_mutex_unlock(&s->setup);
	return r;
}

#endif
