/* A build without the CUDA Toolkit: no GPU, and so no struct streams. */
#include "stream.h"

#ifndef SHARDD_CUDA

#include "client_error.h"
#include "core/check.h"

struct streams *streams_new(struct shardd_client *c, struct cuda *cuda)
{
	(void)c;
	(void)cuda;
	return NULL;
}

void streams_free(struct streams *s)
{
	CHECK(!s);
}

int streams_join(struct streams *s, const Shardd__V1__StreamLink *link, struct shardd_error *err)
{
	CHECK(!s);
	(void)link;
	(void)err;
	return 0;
}

bool streams_linked(struct streams *s)
{
	CHECK(!s);
	return false;
}

int streams_set(struct streams *s, void *stream, struct shardd_error *err)
{
	CHECK(!s);
	(void)stream;
	return error_set(err, SHARDD_FAILED_PRECONDITION, NULL, "libshardd was built without CUDA");
}

void streams_clear(struct streams *s)
{
	CHECK(!s);
}

int stream_begin(struct streams *s, uint64_t id, struct stream_ref *ret,
		 Shardd__V1__StreamPoint *ret_point, struct shardd_error *err)
{
	CHECK(!s);
	(void)id;
	(void)ret;
	(void)ret_point;
	(void)err;
	return 0;
}

int stream_end(struct streams *s, const struct stream_ref *ref,
	       const Shardd__V1__StreamPoint *ready, struct shardd_error *err)
{
	CHECK(!s);
	(void)ref;
	(void)ready;
	(void)err;
	return 0;
}

int streams_part(struct streams *s, int timeout_ms, struct shardd_error *err)
{
	CHECK(!s);
	(void)timeout_ms;
	(void)err;
	return 0;
}

bool streams_settle(struct streams *s, int timeout_ms)
{
	CHECK(!s);
	(void)timeout_ms;
	return true;
}

#endif
