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

static void completion_signal(int fd)
{
	const uint64_t one = 1;

	if (fd >= 0)
		while (write(fd, &one, sizeof(one)) < 0 && errno == EINTR)
			;
}

/* A call over gRPC has ended. The ring's thread signals the descriptor; until it is there nobody has
 * drained it. */
static void completion_on_rpc(void *data)
{
	const struct link *l = data;

	if (l->ring)
		ring_poke(l->ring);
	else
		completion_signal(atomic_load(l->told_fd));
}

static int completion_serve_link(struct shardd_client *c, struct link *l, struct shardd_error *err)
{
	int r;

	l->told_fd = &c->completion.fd;
	r = rpc_client_serve(l->rpc, completion_on_rpc, l);
	return r < 0 ? completion_no_thread(r, err) : 0;
}

int completion_serve_rpc(struct shardd_client *c, struct shardd_error *err)
{
	struct link *l = client_use_link(c);
	int r = completion_serve_link(c, l, err);

	client_unuse_link(c, l);
	return r;
}

void completion_tell(struct shardd_client *c)
{
	completion_signal(atomic_load(&c->completion.fd));
}

/* Lock held. What was made stays if the rest fails: a thread may use it. */
static int completion_start(struct shardd_client *c, struct link *l, struct shardd_error *err)
{
	int r;

	if (c->completion.fd < 0)
		c->completion.fd = eventfd(1, EFD_CLOEXEC | EFD_NONBLOCK);
	if (c->completion.fd < 0)
		return error_os(err, SHARDD_RESOURCE_EXHAUSTED, errno,
				"cannot make a descriptor for the ends of ops");
	r = completion_serve_link(c, l, err);
	if (r < 0 || !l->ring)
		return r;
	r = ring_serve(l->ring, c->completion.fd);
	return r < 0 ? completion_no_thread(r, err) : 0;
}

/* Out of threads, ops of the new link end when they are waited for. */
void completion_follow(struct shardd_client *c)
{
	struct link *l;

	pthread_mutex_lock(&c->completion.lock);
	l = client_use_link(c);
	if (c->completion.fd >= 0)
		(void)completion_start(c, l, NULL);
	client_unuse_link(c, l);
	pthread_mutex_unlock(&c->completion.lock);
}

int shardd_completion_fd(shardd_client *c, int *ret, struct shardd_error *err)
{
	struct link *l;
	int r = client_check(c, err);

	if (r < 0)
		return r;
	if (!ret)
		return error_set(err, SHARDD_INVALID_ARGUMENT, "ret", "ret is NULL");
	pthread_mutex_lock(&c->completion.lock);
	l = client_use_link(c); /* behind the lock: a later link is followed */
	r = completion_start(c, l, err);
	if (r == 0)
		*ret = c->completion.fd;
	client_unuse_link(c, l);
	pthread_mutex_unlock(&c->completion.lock);
	return r;
}

void completion_stop(struct shardd_client *c)
{
	if (c->link)
		rpc_client_stop_serving(c->link->rpc);
}

void completion_close(struct shardd_client *c)
{
	if (c->completion.fd >= 0)
		close(c->completion.fd);
	c->completion.fd = -1;
}
