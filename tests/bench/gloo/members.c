/*
 * What the gloo engine makes of a TCP connection: two members on loopback, beside two processes that
 * send each other the same bytes over plain sockets, and beside the fold alone.
 *
 * usage: shardd-bench-gloo [MIB [ROUNDS]]
 *
 * MIB: of each member's data, 64 by default. Prints the best and the median of ROUNDS (25), in ms, and
 * the best time of the plain sockets as a part of the operation's.
 */
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/tcp.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "backend/backend_impl.h"
#include "core/check.h"
#include "core/clock.h"
#include "engine/engine_impl.h"

#define MEMBERS    2
#define MAX_ROUNDS 1000
#define PIECE      (1 << 20)

/* Both processes: the store, and a barrier. */
struct shared {
	pthread_barrier_t barrier;
	pthread_mutex_t lock;
	bool given[MEMBERS];
	char value[MEMBERS][1024];
};

struct member {
	unsigned rank;
	struct shared *shared;
	uint64_t bytes;
	unsigned rounds;
	char *data, *out;
	int peer; /* plain socket */
	uv_loop_t loop;
	struct loopq queue;
	struct backend *b;
	struct engine *e;
	struct comm *c;
};

/* ------------------------------------------------------------------------ the store */

static int store_exchange(void *userdata, struct comm_exchange *x, unsigned timeout_ms)
{
	const struct timespec pause = { 0, 1000000 };
	struct shared *s = userdata;
	bool all = true;

	(void)timeout_ms;
	CHECK(x->size == MEMBERS && x->bytes <= sizeof(s->value[0]));
	pthread_mutex_lock(&s->lock);
	memcpy(s->value[x->member], x->value, x->bytes);
	s->given[x->member] = true;
	for (unsigned i = 0; i < MEMBERS; i++) {
		all = all && s->given[i];
		memcpy((char *)x->all + i * x->bytes, s->value[i], x->bytes);
	}
	pthread_mutex_unlock(&s->lock);
	if (all)
		return 0;
	nanosleep(&pause, NULL);
	return -ETIMEDOUT;
}

/* ----------------------------------------------------------------------- the engine */

static void on_ready(void *userdata, struct comm *comm, int status)
{
	struct member *m = userdata;

	CHECK(status == 0);
	m->c = comm;
}

static void engine_begin(struct member *m)
{
	const struct gloo_options gloo = { .address = "127.0.0.1" };
	const struct comm_store store = { .exchange = store_exchange, .userdata = m->shared };
	const struct comm_group group = {
		.size = MEMBERS, .member = m->rank, .prefix = "bench", .store = &store
	};
	const struct comm_options options = {
		.devices = &m->b, .n_devices = 1, .group = &group, .ready = on_ready, .userdata = m
	};

	CHECK(uv_loop_init(&m->loop) == 0 && loopq_init(&m->queue, &m->loop) == 0);
	CHECK(backend_fake_new(&m->queue, 0, &m->b) == 0);
	CHECK(engine_gloo_new(&m->queue, &gloo, &m->e) == 0);
	CHECK(engine_comm_new(m->e, &options) == 0);
	while (!m->c)
		uv_run(&m->loop, UV_RUN_ONCE);
}

static void engine_end(struct member *m)
{
	m->c = comm_free(m->c);
	while (engine_leaving(m->e))
		uv_run(&m->loop, UV_RUN_ONCE);
	m->e = engine_close(m->e);
	m->b = backend_close(m->b);
	loopq_close(&m->queue);
	uv_run(&m->loop, UV_RUN_DEFAULT);
	uv_loop_close(&m->loop);
}

static bool done;

static void on_done(struct comm_op *op, int status)
{
	(void)op;
	CHECK(status == 0);
	done = true;
}

static void await(struct member *m)
{
	while (!done)
		uv_run(&m->loop, UV_RUN_ONCE);
	done = false;
}

static void run_reduce_scatter(struct member *m)
{
	struct comm_op op = { .done = on_done };

	comm_reduce_scatter(m->c, &op, (const void *const[]){ m->data }, (void *const[]){ m->out },
			    m->bytes / MEMBERS / sizeof(float), DTYPE_FP32);
	await(m);
}

static void run_all_gather(struct member *m)
{
	struct comm_op op = { .done = on_done };

	comm_all_gather(m->c, &op, (const void *const[]){ m->data + m->rank * m->bytes / MEMBERS },
			(void *const[]){ m->data }, m->bytes / MEMBERS / sizeof(float), DTYPE_FP32);
	await(m);
}

static void fold(void *userdata, void *values, uint64_t first, uint64_t n, bool begin)
{
	const struct member *m = userdata;
	const void *in[] = { values, (const float *)m->data + first };
	const struct k_reduce sum = { .out = values,
				      .out_dtype = DTYPE_FP32,
				      .in = begin ? in + 1 : in,
				      .k = begin ? 1 : 2,
				      .in_dtype = DTYPE_FP32,
				      .sum_dtype = DTYPE_FP32 };

	kernels_host()->reduce(&sum, 0, n);
}

static void run_sum_as(struct member *m, bool chained)
{
	const struct comm_sum sum = { .count = m->bytes / MEMBERS / sizeof(float),
				      .dtype = DTYPE_FP32,
				      .chained = chained };
	struct comm_op op = { .done = on_done };
	struct comm_fold f = { fold, m };

	comm_sum(m->c, &op, &sum, &f, (void *const[]){ m->out });
	await(m);
}

static void run_sum(struct member *m)
{
	run_sum_as(m, false);
}

static void run_chain(struct member *m)
{
	run_sum_as(m, true);
}

/* ------------------------------------------------------------------- what there is */

/* As much as a reduce-scatter and the same fold, with nothing that overlaps. */
static void run_fold(struct member *m)
{
	const void *in[] = { m->data, m->data + m->bytes / MEMBERS };
	const struct k_reduce sum = { .out = m->out,
				      .out_dtype = DTYPE_FP32,
				      .in = in,
				      .k = MEMBERS,
				      .in_dtype = DTYPE_FP32,
				      .sum_dtype = DTYPE_FP32 };

	kernels_host()->reduce(&sum, 0, m->bytes / MEMBERS / sizeof(float));
}

static void *send_half(void *member)
{
	const struct member *m = member;

	for (uint64_t at = 0; at < m->bytes / MEMBERS;) {
		ssize_t n = send(m->peer, m->data + at, PIECE, MSG_NOSIGNAL);

		CHECK(n > 0);
		at += (uint64_t)n;
	}
	return NULL;
}

/* Each sends the other half of its data, at the same time. */
static void run_sockets(struct member *m)
{
	pthread_t sender;

	CHECK(pthread_create(&sender, NULL, send_half, m) == 0);
	for (uint64_t at = 0; at < m->bytes / MEMBERS;) {
		ssize_t n = recv(m->peer, m->out + at, PIECE, 0);

		CHECK(n > 0);
		at += (uint64_t)n;
	}
	pthread_join(sender, NULL);
}

/* -------------------------------------------------------------------------- figures */

static int compare(const void *a, const void *b)
{
	double x = *(const double *)a, y = *(const double *)b;

	return (x > y) - (x < y);
}

/* Return: the best; @ret_median: ms. */
static double time_rounds(struct member *m, void (*run)(struct member *m), double *ret_median)
{
	double ms[MAX_ROUNDS];

	run(m);
	for (unsigned i = 0; i < m->rounds; i++) {
		uint64_t begin;

		pthread_barrier_wait(&m->shared->barrier);
		begin = clock_now_us();
		run(m);
		pthread_barrier_wait(&m->shared->barrier);
		ms[i] = (double)(clock_now_us() - begin) / 1000;
	}
	qsort(ms, m->rounds, sizeof(ms[0]), compare);
	*ret_median = ms[m->rounds / 2];
	return ms[0];
}

static void measure(struct member *m)
{
	static const struct {
		const char *name;
		void (*run)(struct member *m);
	} cases[] = { { "fold alone", run_fold },
		      { "reduce-scatter", run_reduce_scatter },
		      { "all-gather", run_all_gather },
		      { "sum", run_sum },
		      { "chain", run_chain } };
	double sockets, median;

	m->data = calloc(1, m->bytes + PIECE);
	m->out = calloc(1, m->bytes + PIECE);
	CHECK(m->data && m->out);
	engine_begin(m);
	sockets = time_rounds(m, run_sockets, &median);
	if (m->rank == 0)
		printf("%-16s %8.2f %8.2f ms\n", "plain sockets", sockets, median);
	for (unsigned i = 0; i < ARRAY_SIZE(cases); i++) {
		double ms = time_rounds(m, cases[i].run, &median);

		if (m->rank == 0)
			printf("%-16s %8.2f %8.2f ms  %3.0f %%\n", cases[i].name, ms, median,
			       sockets / ms * 100);
	}
	engine_end(m);
	free(m->data);
	free(m->out);
}

/* The two ends of a TCP connection. */
static void connect_pair(int fds[2])
{
	struct sockaddr_in here = { .sin_family = AF_INET, .sin_addr = { htonl(INADDR_LOOPBACK) } };
	socklen_t bytes = sizeof(here);
	int listener = socket(AF_INET, SOCK_STREAM, 0), one = 1;

	CHECK(bind(listener, (struct sockaddr *)&here, bytes) == 0 && listen(listener, 1) == 0);
	CHECK(getsockname(listener, (struct sockaddr *)&here, &bytes) == 0);
	fds[0] = socket(AF_INET, SOCK_STREAM, 0);
	CHECK(connect(fds[0], (struct sockaddr *)&here, bytes) == 0);
	fds[1] = accept(listener, NULL, NULL);
	for (unsigned i = 0; i < 2; i++)
		setsockopt(fds[i], IPPROTO_TCP, TCP_NODELAY, &one, sizeof(one));
	close(listener);
}

static struct shared *share(void)
{
	struct shared *s =
		mmap(NULL, sizeof(*s), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	pthread_barrierattr_t barrier;
	pthread_mutexattr_t mutex;

	CHECK(s != MAP_FAILED);
	pthread_barrierattr_init(&barrier);
	pthread_barrierattr_setpshared(&barrier, PTHREAD_PROCESS_SHARED);
	pthread_barrier_init(&s->barrier, &barrier, MEMBERS);
	pthread_mutexattr_init(&mutex);
	pthread_mutexattr_setpshared(&mutex, PTHREAD_PROCESS_SHARED);
	pthread_mutex_init(&s->lock, &mutex);
	return s;
}

int main(int argc, char **argv)
{
	struct member m = { .bytes = (uint64_t)(argc > 1 ? atoi(argv[1]) : 64) << 20,
			    .rounds = argc > 2 ? (unsigned)atoi(argv[2]) : 25 };
	int fds[2], status = 0;
	pid_t pid;

	if (m.bytes == 0 || m.rounds == 0 || m.rounds > MAX_ROUNDS) {
		fprintf(stderr, "usage: shardd-bench-gloo [MIB [ROUNDS]]\n");
		return 2;
	}
	signal(SIGPIPE, SIG_IGN);
	m.shared = share();
	connect_pair(fds);
	pid = fork();
	m.rank = pid == 0;
	m.peer = fds[m.rank];
	measure(&m);
	if (pid > 0)
		waitpid(pid, &status, 0);
	return status != 0;
}
