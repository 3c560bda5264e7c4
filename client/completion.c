#include "completion.h"

#include <errno.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "client.h"
#include "client_error.h"

static int completion_no_thread(int r, struct shardd_error *err)
{
	return error_os(err, SHARDD_RESOURCE_EXHAUSTED, -r,
			"cannot start the thread that receives completions");
}

/* A call over gRPC has ended. The ring's thread signals the descriptor; until it is there nobody has
 * drained it. */
static void completion_on_rpc(void *data)
{
	struct shardd_client *c = data;
	const uint64_t one = 1;
	int fd = atomic_load(&c->completion.fd);

	if (c->ring)
		ring_poke(c->ring);
	else if (fd >= 0)
		while (write(fd, &one, sizeof(one)) < 0 && errno == EINTR)
			;
}

int completion_serve_rpc(struct shardd_client *c, struct shardd_error *err)
{
	int r = rpc_client_serve(c->rpc, completion_on_rpc, c);

	return r < 0 ? completion_no_thread(r, err) : 0;
}

/* Lock held. What was made stays if the rest fails: a thread may use it. */
static int completion_start(struct shardd_client *c, struct shardd_error *err)
{
	int r;

	if (c->completion.fd < 0)
		c->completion.fd = eventfd(1, EFD_CLOEXEC | EFD_NONBLOCK);
	if (c->completion.fd < 0)
		return error_os(err, SHARDD_RESOURCE_EXHAUSTED, errno,
				"cannot make a descriptor for the ends of ops");
	r = completion_serve_rpc(c, err);
	if (r < 0 || !c->ring)
		return r;
	r = ring_serve(c->ring, c->completion.fd);
	return r < 0 ? completion_no_thread(r, err) : 0;
}

int shardd_completion_fd(shardd_client *c, int *ret, struct shardd_error *err)
{
	int r = client_check(c, err);

	if (r < 0)
		return r;
	if (!ret)
		return error_set(err, SHARDD_INVALID_ARGUMENT, "ret", "ret is NULL");
	pthread_mutex_lock(&c->completion.lock);
	r = completion_start(c, err);
	if (r == 0)
		*ret = c->completion.fd;
	pthread_mutex_unlock(&c->completion.lock);
	return r;
}

void completion_stop(struct shardd_client *c)
{
	if (c->rpc)
		rpc_client_stop_serving(c->rpc);
}

void completion_close(struct shardd_client *c)
{
	if (c->completion.fd >= 0)
		close(c->completion.fd);
	c->completion.fd = -1;
}
