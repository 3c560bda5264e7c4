#include "rpchost.h"

#include <criterion/criterion.h>
#include <errno.h>
#include <grpc/grpc.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include "core/check.h"
#include "core/proc.h"
#include "fdcheck.h"

static void on_conn_closed(struct conn *c, void *userdata)
{
	struct rpchost *h = userdata;

	if (h->server)
		rpc_server_forget(h->server, c);
	for (size_t i = 0; i < ARRAY_SIZE(h->conns); i++)
		if (h->conns[i] == c)
			h->conns[i] = NULL;
	atomic_fetch_sub(&h->n_conns, 1);
}

static void add_conn(struct rpchost *h, int fd)
{
	struct proc *proc;
	struct conn *c;
	size_t i = 0;

	CHECK(proc_new_peer(&h->loop, fd, &proc) == 0);
	CHECK(conn_new(&h->loop, CONN_GRPC, fd, proc, &c) == 0);
	proc_unref(proc);
	conn_on_closed(c, on_conn_closed, h);
	while (h->conns[i])
		CHECK(++i < ARRAY_SIZE(h->conns));
	h->conns[i] = c;
	atomic_fetch_add(&h->n_conns, 1);
	if (!h->server || rpc_server_adopt(h->server, c, conn_fd(c)) != 0)
		conn_close(c); /* the server is closing */
}

static void on_accept(uv_poll_t *poll, int status, int events)
{
	struct rpchost *h = poll->data;
	int fd;

	CHECK(status == 0 && events == UV_READABLE);
	fd = accept4(h->listen_fd, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
	if (fd < 0)
		CHECK(errno == EAGAIN || errno == EINTR);
	else if (atomic_load(&h->refusing))
		close(fd);
	else
		add_conn(h, fd);
}

static void *loop_main(void *arg)
{
	struct rpchost *h = arg;

	sem_post(&h->ready);
	uv_run(&h->loop, UV_RUN_DEFAULT);
	CHECK(uv_loop_close(&h->loop) == 0);
	return NULL;
}

static void make_socket(struct rpchost *h)
{
	struct sockaddr_un addr = { .sun_family = AF_UNIX };

	snprintf(h->dir, sizeof(h->dir), "/tmp/rpchost-XXXXXX");
	cr_assert(mkdtemp(h->dir));
	snprintf(h->path, sizeof(h->path), "%s/s", h->dir);
	snprintf(addr.sun_path, sizeof(addr.sun_path), "%s", h->path);
	h->listen_fd = socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
	cr_assert_geq(h->listen_fd, 0);
	cr_assert_eq(bind(h->listen_fd, (struct sockaddr *)&addr, sizeof(addr)), 0);
	cr_assert_eq(listen(h->listen_fd, 128), 0);
}

unsigned rpchost_begin(void)
{
	uv_loop_t loop;

	grpc_init();
	grpc_shutdown();
	cr_assert_eq(uv_loop_init(&loop), 0);
	cr_assert_eq(uv_loop_close(&loop), 0);
	fdcheck_begin();
	return fdcheck_count();
}

void rpchost_start(struct rpchost *h, const struct rpc_options *options,
		   const struct rpc_service *services, size_t n)
{
	static const struct rpc_options defaults = { .max_message_bytes = 64u << 20,
						     .max_calls_per_conn = 1024 };

	*h = (struct rpchost){ .listen_fd = -1 };
	make_socket(h);
	sem_init(&h->ready, 0, 0);
	cr_assert_eq(uv_loop_init(&h->loop), 0);
	cr_assert_eq(loopq_init(&h->queue, &h->loop), 0);
	cr_assert_eq(rpc_server_new(&h->queue, options ? options : &defaults, services, n,
				    &h->server),
		     0);
	cr_assert_eq(uv_poll_init(&h->loop, &h->accepting, h->listen_fd), 0);
	h->accepting.data = h;
	cr_assert_eq(uv_poll_start(&h->accepting, UV_READABLE, on_accept), 0);
	cr_assert_eq(pthread_create(&h->thread, NULL, loop_main, h), 0);
	sem_wait(&h->ready);
}

struct job {
	struct work work;
	void (*fn)(void *arg);
	void *arg;
	sem_t done;
};

static void run_job(struct work *work)
{
	struct job *job = CONTAINER_OF(work, struct job, work);

	job->fn(job->arg);
	sem_post(&job->done);
}

void rpchost_run(struct rpchost *h, void (*fn)(void *arg), void *arg)
{
	struct job job = { .fn = fn, .arg = arg };

	sem_init(&job.done, 0, 0);
	loopq_post(&h->queue, &job.work, run_job);
	while (sem_wait(&job.done) != 0)
		;
	sem_destroy(&job.done);
}

static void cut(void *arg)
{
	struct rpchost *h = arg;

	for (size_t i = 0; i < ARRAY_SIZE(h->conns); i++)
		if (h->conns[i])
			conn_close(h->conns[i]);
}

void rpchost_cut(struct rpchost *h)
{
	rpchost_run(h, cut, h);
}

static void on_server_closed(void *userdata)
{
	struct rpchost *h = userdata;

	h->server = NULL;
	cut(h);
	uv_close((uv_handle_t *)&h->accepting, NULL);
	loopq_close(&h->queue);
}

static void stop(void *arg)
{
	struct rpchost *h = arg;

	rpc_server_close(h->server, on_server_closed, h);
}

void rpchost_stop(struct rpchost *h)
{
	rpchost_run(h, stop, h);
	pthread_join(h->thread, NULL);
	cr_assert_eq(atomic_load(&h->n_conns), 0);
	close(h->listen_fd);
	unlink(h->path);
	rmdir(h->dir);
	sem_destroy(&h->ready);
}

void rpchost_descriptors(unsigned n)
{
	struct timespec pause = { .tv_nsec = 1000000 };

	for (int i = 0; i < 5000 && fdcheck_count() > n; i++)
		nanosleep(&pause, NULL);
	fdcheck_end();
}

void rpchost_await(atomic_uint *counter, unsigned value)
{
	struct timespec pause = { .tv_nsec = 1000000 };
	unsigned tries = 10000;

	while (atomic_load(counter) != value) {
		cr_assert_gt(tries--, 0, "%u, not %u, after 10 s", atomic_load(counter), value);
		nanosleep(&pause, NULL);
	}
}
