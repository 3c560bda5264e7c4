#include "attack.h"

#include <criterion/criterion.h>
#include <poll.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "core/check.h"
#include "core/clock.h"
#include "daemonwatch.h"
#include "local_abi.h"
#include "methods.h"
#include "rawcall.h"
#include "rawsock.h"
#include "trainfix.h"

/* Keeps what was freed, and is slow: memory and times are those of the plain build, which runs alone. */
#ifdef __SANITIZE_ADDRESS__
#define SANITIZED true
#else
#define SANITIZED false
#endif

enum {
	MOST_SAMPLES = 200000,
	WARM_UP = 100,
	PATIENCE_S = 30,
	TURN_MS = 2,
	PAUSE_US = 200,
	INTERVAL_US = 1000
};

struct attack_samples {
	_Atomic uint32_t n;
	uint32_t us[MOST_SAMPLES];
	uint32_t from; /* those before were measured before the attack */
};

struct attack_shared {
	_Atomic uint32_t stop;
	struct attack_samples status, ring, local;
};

/* --------------------------------------------------------------- bystander */

static void sample_add(struct attack_samples *s, uint64_t began_us)
{
	uint32_t n = atomic_load(&s->n);

	if (n >= MOST_SAMPLES)
		return;
	s->us[n] = (uint32_t)(clock_now_us() - began_us);
	atomic_store(&s->n, n + 1);
}

/* A pause between two rounds: two busy loops would leave an attack no processor. */
static void bystander_pause(void)
{
	struct timespec ts = { .tv_nsec = PAUSE_US * 1000 };

	nanosleep(&ts, NULL);
}

/* One frame there, one of @type back. */
static void local_ask(int fd, const void *frame, size_t bytes, unsigned type)
{
	struct shd1_header h;
	char rest[SHD1_MAX_FRAME];

	TRAINER_CHECK(rawsock_send(fd, frame, bytes) == bytes);
	TRAINER_CHECK(rawsock_read(fd, &h, sizeof(h), PATIENCE_S));
	TRAINER_CHECK(h.type == type && h.bytes <= SHD1_MAX_FRAME);
	TRAINER_CHECK(rawsock_read(fd, rest, h.bytes - sizeof(h), PATIENCE_S));
}

/* A local channel of a session of @c. Return: its descriptor. */
static int local_open(struct rpc_client *c, const char *path)
{
	struct shd1_hello hello = { .h = { SHD1_MAGIC, SHD1_HELLO, sizeof(hello), 1, 0 },
				    .version = SHD1_VERSION };
	int fd = rawsock_connect(path);

	TRAINER_CHECK(fd >= 0);
	raw_attach_token(c, hello.token);
	local_ask(fd, &hello, sizeof(hello), SHD1_WELCOME);
	return fd;
}

/* A slab that the session does not have: the daemon's loop looks it up and refuses it. */
static void local_round_trip(int fd)
{
	static const struct shd1_get_slab ask = {
		.h = { SHD1_MAGIC, SHD1_GET_SLAB, sizeof(ask), 1, 0 }, .slab = UINT32_MAX
	};

	local_ask(fd, &ask, sizeof(ask), SHD1_ERROR);
}

static int bystander_main(const struct trainer *t)
{
	struct attack_shared *shared = t->arg;
	Shardd__V1__GetStatusRequest status = SHARDD__V1__GET_STATUS_REQUEST__INIT;
	struct rpc_client *other = raw_connect(t->socket), *third = raw_connect(t->socket);
	shardd_client *c = train_join(t);
	int local = local_open(third, t->socket);

	while (!atomic_load(&shared->stop)) {
		uint64_t began = clock_now_us();

		TRAIN_OK(shardd_barrier(c, SHARDD_WORLD, &train_err));
		sample_add(&shared->ring, began);
		began = clock_now_us();
		raw_done(other, "Status/GetStatus", &status.base);
		sample_add(&shared->status, began);
		began = clock_now_us();
		local_round_trip(local);
		sample_add(&shared->local, began);
		bystander_pause();
	}
	train_leave(c);
	close(local);
	rpc_client_close(third);
	rpc_client_close(other);
	return 0;
}

static int by_size(const void *a, const void *b)
{
	uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;

	return x < y ? -1 : x > y;
}

/* A call that took long kept others from being made, which would have taken long, too: one
 * in each INTERVAL_US. How many of all these took longer than @us? */
static uint64_t samples_above(const struct attack_samples *s, uint32_t us)
{
	uint32_t n = atomic_load(&s->n);
	uint64_t above = 0;

	for (uint32_t i = s->from; i < n; i++)
		if (s->us[i] > us)
			above += 1 + (s->us[i] - us) / INTERVAL_US;
	return above;
}

static uint32_t samples_p99(const struct attack_samples *s)
{
	uint64_t all = atomic_load(&s->n) - s->from, allowed;
	uint32_t low = 0, high = UINT32_MAX;

	for (uint32_t i = s->from; i < s->from + all; i++)
		high = i == s->from || s->us[i] > high ? s->us[i] : high;
	all = samples_above(s, 0);
	allowed = all / 100;
	while (low < high) {
		uint32_t middle = low + (high - low) / 2;

		if (samples_above(s, middle) > allowed)
			low = middle + 1;
		else
			high = middle;
	}
	return low;
}

/* Of those since the attack began. Sorts them. */
static uint32_t samples_at(struct attack_samples *s, double share)
{
	uint32_t n = atomic_load(&s->n) - s->from;

	if (n == 0)
		return 0;
	qsort(s->us + s->from, n, sizeof(s->us[0]), by_size);
	return s->us[s->from + (uint32_t)((n - 1) * share)];
}

/* ------------------------------------------------------------- the daemon */

/* A line "@key:  number kB" of its status. */
static uint64_t proc_status(pid_t pid, const char *key)
{
	char path[64], line[256];
	unsigned long long value = 0;
	FILE *in;

	snprintf(path, sizeof(path), "/proc/%d/status", pid);
	in = fopen(path, "r");
	cr_assert(in, "the daemon is gone");
	while (fgets(line, sizeof(line), in))
		if (strncmp(line, key, strlen(key)) == 0)
			sscanf(line + strlen(key), ": %llu", &value);
	fclose(in);
	return value;
}

static uint64_t proc_cpu_us(pid_t pid)
{
	clockid_t clock;
	struct timespec ts;

	cr_assert_eq(clock_getcpuclockid(pid, &clock), 0);
	cr_assert_eq(clock_gettime(clock, &ts), 0);
	return (uint64_t)ts.tv_sec * 1000000u + (uint64_t)ts.tv_nsec / 1000u;
}

uint64_t attack_rss_kib(const struct attack *a)
{
	return proc_status(a->w.d.pid, "VmRSS");
}

/* ------------------------------------------------------------------ course */

void attack_await(struct attack *a, unsigned n)
{
	uint64_t deadline = clock_now_us() + 4 * PATIENCE_S * 1000000ull;
	uint32_t status = atomic_load(&a->shared->status.n), ring = atomic_load(&a->shared->ring.n);

	while (atomic_load(&a->shared->status.n) < status + n ||
	       atomic_load(&a->shared->ring.n) < ring + n) {
		cr_assert(clock_now_us() < deadline, "the bystander is not served");
		poll(NULL, 0, TURN_MS);
	}
}

bool attack_figures_only(void)
{
	const char *set = getenv("SHARDD_ATTACK_FIGURES");

	return set && *set == '1';
}

void attack_begin(struct attack *a, const char *name, const char *const *args)
{
	memset(a, 0, sizeof(*a));
	if (attack_figures_only())
		args = NULL; /* of keys that it may not know */
	a->name = name;
	witness_begin(&a->w, args);
	a->shared = trainer_shared(sizeof(*a->shared));
	a->bystander = trainer_start(&a->w.d, "bystander", 0, 1, bystander_main, a->shared);
	attack_await(a, WARM_UP);
	a->shared->status.from = atomic_load(&a->shared->status.n);
	a->shared->ring.from = atomic_load(&a->shared->ring.n);
	a->shared->local.from = atomic_load(&a->shared->local.n);
	a->rss_kib = attack_rss_kib(a);
	a->cpu_us = proc_cpu_us(a->w.d.pid);
	a->began_us = clock_now_us();
}

static void print_samples(const char *what, struct attack_samples *s, uint32_t p99_us)
{
	fprintf(stderr, "  %s p50 %u p99 %u max %u us (%u)", what, samples_at(s, 0.5), p99_us,
		samples_at(s, 1), s->n - s->from);
}

void attack_end(struct attack *a, unsigned ms, unsigned max_mib)
{
	uint64_t until = clock_now_us() + ms * 1000ull, peak;
	struct attack_shared *s = a->shared;
	uint32_t status_us, ring_us, local_us;
	double seconds;
	uint64_t mib;

	while (clock_now_us() < until)
		poll(NULL, 0, TURN_MS);
	attack_await(a, 20);
	seconds = (double)(clock_now_us() - a->began_us) / 1e6;
	atomic_store(&a->shared->stop, 1);
	cr_assert_eq(trainer_wait(a->bystander, 2 * PATIENCE_S), 0, "the bystander noticed");
	peak = proc_status(a->w.d.pid, "VmHWM");
	mib = peak > a->rss_kib ? (peak - a->rss_kib) >> 10 : 0;
	status_us = samples_p99(&s->status);
	ring_us = samples_p99(&s->ring);
	local_us = samples_p99(&s->local);
	fprintf(stderr, "# %-28s %5.1f s", a->name, seconds);
	print_samples("status", &s->status, status_us);
	print_samples("ring", &s->ring, ring_us);
	print_samples("local", &s->local, local_us);
	fprintf(stderr, "  daemon +%llu MiB, %.1f s of processor\n", (unsigned long long)mib,
		(double)(proc_cpu_us(a->w.d.pid) - a->cpu_us) / 1e6);
	if (!attack_figures_only() && !SANITIZED) {
		cr_expect(mib <= max_mib, "%llu MiB", (unsigned long long)mib);
		cr_expect_lt(status_us, ATTACK_P99_US);
		cr_expect_lt(ring_us, ATTACK_P99_US);
		cr_expect_lt(local_us, ATTACK_P99_US);
	}
	witness_end(&a->w);
}

/* --------------------------------------------------------------------- log */

static unsigned count_lines(const struct attack *a, const char *text)
{
	FILE *in = fopen(a->w.d.log, "r");
	unsigned n = 0;
	char line[1024];

	cr_assert(in);
	while (fgets(line, sizeof(line), in))
		n += strstr(line, text) != NULL;
	fclose(in);
	return n;
}

unsigned attack_log_lines(struct attack *a, const char *limit)
{
	char text[128];

	snprintf(text, sizeof(text), "connection closed limit=%s ", limit);
	return count_lines(a, text);
}

static bool line_is_ours(const struct attack *a, const char *limit)
{
	FILE *in = fopen(a->w.d.log, "r");
	char line[1024], who[64], text[128];
	bool found = false;

	cr_assert(in);
	snprintf(text, sizeof(text), "connection closed limit=%s value=", limit);
	snprintf(who, sizeof(who), " uid=%u pid=%d ", getuid(), getpid());
	while (fgets(line, sizeof(line), in))
		found = found || (strstr(line, text) && strstr(line, who));
	fclose(in);
	return found;
}

void attack_logged(struct attack *a, const char *limit)
{
	attack_logged_either(a, limit, limit);
}

void attack_logged_either(struct attack *a, const char *limit, const char *other)
{
	uint64_t deadline = clock_now_us() + PATIENCE_S * 1000000ull;

	while (!attack_figures_only() && !line_is_ours(a, limit) && !line_is_ours(a, other)) {
		if (clock_now_us() >= deadline)
			daemonwatch_print_log(a->w.d.log);
		cr_assert(clock_now_us() < deadline, "no line about %s", limit);
		poll(NULL, 0, TURN_MS);
	}
}

/* ------------------------------------------------------------------ frames */

void attack_put(struct attack_bytes *b, const void *data, size_t n)
{
	if (b->n + n > b->room) {
		b->room = 2 * (b->n + n);
		b->data = realloc(b->data, b->room);
		cr_assert(b->data);
	}
	if (n > 0)
		memcpy(b->data + b->n, data, n);
	b->n += n;
}

void attack_put_frame(struct attack_bytes *b, unsigned type, unsigned flags, uint32_t stream,
		      const void *data, size_t n)
{
	const uint8_t head[9] = {
		(uint8_t)(n >> 16),      (uint8_t)(n >> 8),      (uint8_t)n,
		(uint8_t)type,           (uint8_t)flags,         (uint8_t)(stream >> 24),
		(uint8_t)(stream >> 16), (uint8_t)(stream >> 8), (uint8_t)stream
	};

	attack_put(b, head, sizeof(head));
	attack_put(b, data, n);
}

void attack_put_headers(struct attack_bytes *b, uint32_t stream, const char *path)
{
	uint8_t block[512];

	attack_put_frame(b, H2_HEADERS, H2_END_HEADERS, stream, block,
			 rawsock_h2_block(block, path));
}

bool attack_flush(struct attack_bytes *b, int fd)
{
	uint64_t deadline = clock_now_us() + ATTACK_FLUSH_S * 1000000ull;
	struct pollfd p = { .fd = fd, .events = POLLOUT };
	size_t sent = 0;
	bool all;

	while (sent < b->n && clock_now_us() < deadline) {
		size_t n = rawsock_send(fd, b->data + sent, b->n - sent);

		sent += n;
		/* one that takes nothing for a moment may be busy; one that hung up is not */
		if (n == 0 && (poll(&p, 1, 0) < 0 || (p.revents & (POLLERR | POLLHUP))))
			break;
	}
	all = sent == b->n;
	free(b->data);
	*b = (struct attack_bytes){ .n = 0 };
	return all;
}

int attack_connect(struct attack *a, bool attach)
{
	Shardd__V1__AttachRequest r = SHARDD__V1__ATTACH_REQUEST__INIT;
	int fd = rawsock_connect(a->w.d.socket);

	cr_assert_geq(fd, 0);
	rawsock_h2_begin(fd);
	r.protocol = 1;
	if (!attach)
		return fd;
	cr_assert(rawsock_h2_call(fd, 1, METHOD_Attach, &r.base));
	/* the session is there before its answer */
	cr_assert(rawsock_h2_answered(fd, 1, PATIENCE_S));
	return fd;
}
