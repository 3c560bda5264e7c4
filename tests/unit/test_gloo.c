/* The gloo engine between processes (gloofix.h). */
#include <criterion/criterion.h>
#include <errno.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "backend/backend_impl.h"
#include "core/check.h"
#include "engine/engine_impl.h"
#include "fdcheck.h"
#include "gloofix.h"
#include "longform.h"

TestSuite(gloo, .init = fdcheck_begin, .fini = fdcheck_end, .timeout = 120);

/* --------------------------------------------------------------- values and their sums */

/* The value of an element before it is rounded: sums of such depend on their order. */
static float value(unsigned member, uint64_t i)
{
	uint32_t x = (uint32_t)i * 2654435761u + member * 40503u + 12345u;

	x ^= x >> 15;
	x *= 2246822519u;
	x ^= x >> 13;
	return ((float)(x & 0xffff) - 32768.0f) / (float)(1u << (x >> 16 & 15));
}

static void convert(void *dst, enum dtype to, const void *src, enum dtype from, uint64_t n)
{
	const struct k_cast cast = { .dst = dst, .src = src, .dst_dtype = to, .src_dtype = from };

	kernels_host()->cast(&cast, 0, n);
}

/* @n elements of @member, from @first on. */
static void fill_from(void *data, enum dtype dtype, unsigned member, uint64_t first, uint64_t n)
{
	float *plain = malloc(n * sizeof(float) + 1);

	for (uint64_t i = 0; i < n; i++)
		plain[i] = value(member, first + i);
	convert(data, dtype, plain, DTYPE_FP32, n);
	free(plain);
}

static void fill(void *data, enum dtype dtype, unsigned member, uint64_t n)
{
	fill_from(data, dtype, member, 0, n);
}

/* A step of the left fold: @t = round(@t + @x), of @n values of @dtype; the first is @x itself. */
static void add_to(void *t, const void *x, enum dtype dtype, uint64_t n, bool first)
{
	float *a = malloc(n * sizeof(float) + 1), *b = malloc(n * sizeof(float) + 1);

	convert(a, DTYPE_FP32, t, dtype, n);
	convert(b, DTYPE_FP32, x, dtype, n);
	for (uint64_t i = 0; i < n; i++)
		a[i] = first ? b[i] : a[i] + b[i];
	convert(t, dtype, a, DTYPE_FP32, n);
	free(a);
	free(b);
}

/* The left fold of @members from @member on, one after the other. Of @n elements from @first on. */
static void sum_from(void *out, enum dtype dtype, unsigned member, unsigned members, uint64_t first,
		     uint64_t n)
{
	void *x = malloc(n * sizeof(float) + 1);

	memset(out, 0, n * dtype_size(dtype));
	for (unsigned m = 0; m < members; m++) {
		fill_from(x, dtype, member + m, first, n);
		add_to(out, x, dtype, n, m == 0);
	}
	free(x);
}

static void sum(void *out, enum dtype dtype, unsigned members, uint64_t first, uint64_t n)
{
	sum_from(out, dtype, 0, members, first, n);
}

#define LARGE (16u << 20)

#define SEND(...) ((const void *const[]){ __VA_ARGS__ })
#define RECV(...) ((void *const[]){ __VA_ARGS__ })

static void check_reduce_scatter(struct gloofix *m, enum dtype dtype, uint64_t count, bool in_place)
{
	const uint64_t all = count * m->size, bytes = count * dtype_size(dtype);
	char *data = malloc(all * 4 + 1), *want = malloc(count * 4 + 1), *own = malloc(bytes + 1);
	char *recv = in_place ? data + m->rank * bytes : own;
	struct waited w = gloofix_waited();

	fill(data, dtype, m->rank, all);
	sum(want, dtype, m->size, m->rank * count, count);
	comm_reduce_scatter(m->c, &w.op, SEND(data), RECV(recv), count, dtype);
	gloofix_expect(m, &w, 0);
	EXPECT(memcmp(recv, want, bytes) == 0);
	free(data);
	free(want);
	free(own);
}

#define RANKS 3 /* of a member, in a sum */

/* The ranks of a member. */
struct ranks {
	void *data[RANKS];
	enum dtype dtype;
	uint64_t calls, elements;
	uint64_t own, n_own; /* elements of the member's segment */
	uint64_t before_own; /* elements of others that were asked for before */
	bool begins;
};

static void fold_ranks(void *userdata, void *values, uint64_t first, uint64_t n, bool begin)
{
	struct ranks *r = userdata;
	const uint64_t at = first * dtype_size(r->dtype);
	const void *in[1 + RANKS] = { values };
	struct k_reduce sum_up = { .out = values,
				   .out_dtype = r->dtype,
				   .in = begin ? in + 1 : in,
				   .k = begin ? RANKS : RANKS + 1,
				   .in_dtype = r->dtype,
				   .sum_dtype = r->dtype };

	for (unsigned i = 0; i < RANKS; i++)
		in[1 + i] = (char *)r->data[i] + at;
	kernels_host()->reduce(&sum_up, 0, n);
	EXPECT(begin == r->begins);
	if (first - r->own < r->n_own && r->before_own == UINT64_MAX)
		r->before_own = r->elements;
	r->calls++;
	r->elements += n;
}

static struct ranks make_ranks(const struct gloofix *m, const struct comm_sum *sum)
{
	const uint64_t n = sum->count * (sum->whole ? 1 : m->size);
	struct ranks r = { .dtype = sum->dtype,
			   .own = m->rank * sum->count,
			   .n_own = sum->whole ? 0 : sum->count,
			   .before_own = UINT64_MAX,
			   .begins = m->rank == 0 || !sum->chained };

	for (unsigned i = 0; i < RANKS; i++) {
		r.data[i] = malloc(n * 4 + 1);
		fill(r.data[i], sum->dtype, m->rank * RANKS + i, n);
	}
	return r;
}

static void free_ranks(struct ranks *r)
{
	for (unsigned i = 0; i < RANKS; i++)
		free(r->data[i]);
}

/* Of all ranks, member by member, or of each member's own sum. */
static void sum_ranks(void *out, const struct gloofix *m, const struct comm_sum *how,
		      uint64_t first)
{
	void *of = malloc(how->count * 4 + 1);

	if (how->chained)
		sum(out, how->dtype, m->size * RANKS, first, how->count);
	for (unsigned i = 0; !how->chained && i < m->size; i++) {
		sum_from(of, how->dtype, i * RANKS, RANKS, first, how->count);
		memset(i ? of : out, 0, i ? 0 : how->count * dtype_size(how->dtype));
		add_to(out, of, how->dtype, how->count, i == 0);
	}
	free(of);
}

/* The bits are those of one fold over the ranks of all members, or over each member's own one. What the
 * others wait for is made before what only this member needs. */
static void check_sum(struct gloofix *m, const struct comm_sum *how)
{
	const uint64_t n = how->whole ? how->count : how->count * m->size;
	const uint64_t bytes = how->count * dtype_size(how->dtype);
	struct ranks r = make_ranks(m, how);
	struct comm_fold fold = { fold_ranks, &r };
	char *want = malloc(how->count * 4 + 1), *recv = malloc(bytes + 1);
	struct waited w = gloofix_waited();

	sum_ranks(want, m, how, how->whole ? 0 : m->rank * how->count);
	comm_sum(m->c, &w.op, how, &fold, RECV(recv));
	gloofix_expect(m, &w, 0);
	EXPECT(memcmp(recv, want, bytes) == 0);
	EXPECT(r.elements == n);
	EXPECT(!how->count || how->whole || how->chained || r.before_own >= how->count ||
	       r.before_own * dtype_size(how->dtype) >= (m->size - 1) * (2u << 20));
	free_ranks(&r);
	free(want);
	free(recv);
}

static void check_all_reduce(struct gloofix *m, enum dtype dtype, uint64_t count)
{
	const uint64_t bytes = count * dtype_size(dtype);
	char *data = malloc(bytes + 1), *want = malloc(bytes + 1);
	struct waited w = gloofix_waited();

	fill(data, dtype, m->rank, count);
	sum(want, dtype, m->size, 0, count);
	comm_all_reduce(m->c, &w.op, RECV(data), count, dtype, REDUCE_SUM);
	gloofix_expect(m, &w, 0);
	EXPECT(memcmp(data, want, bytes) == 0);
	free(data);
	free(want);
}

static void check_all_gather(struct gloofix *m, enum dtype dtype, uint64_t count, bool in_place)
{
	const uint64_t bytes = count * dtype_size(dtype);
	char *all = malloc(bytes * m->size + 1), *own = malloc(bytes + 1),
	     *want = malloc(bytes + 1);
	char *send = in_place ? all + m->rank * bytes : own;
	struct waited w = gloofix_waited();

	fill(send, dtype, m->rank, count);
	comm_all_gather(m->c, &w.op, SEND(send), RECV(all), count, dtype);
	gloofix_expect(m, &w, 0);
	for (unsigned i = 0; i < m->size; i++) {
		fill(want, dtype, i, count);
		EXPECT(memcmp(all + i * bytes, want, bytes) == 0);
	}
	free(all);
	free(own);
	free(want);
}

static void check_broadcast(struct gloofix *m, uint64_t count, unsigned root)
{
	float *data = malloc(count * 4 + 1), *want = malloc(count * 4 + 1);
	struct waited w = gloofix_waited();

	fill(data, DTYPE_FP32, m->rank, count);
	fill(want, DTYPE_FP32, root, count);
	comm_broadcast(m->c, &w.op, RECV(data), count * 4, root);
	gloofix_expect(m, &w, 0);
	EXPECT(memcmp(data, want, count * 4) == 0);
	free(data);
	free(want);
}

static void check_extremes(struct gloofix *m)
{
	float x[3] = { (float)m->rank, -(float)m->rank, 6 };
	struct waited w[3] = { gloofix_waited(), gloofix_waited(), gloofix_waited() };

	comm_all_reduce(m->c, &w[0].op, RECV(&x[0]), 1, DTYPE_FP32, REDUCE_MAX);
	comm_all_reduce(m->c, &w[1].op, RECV(&x[1]), 1, DTYPE_FP32, REDUCE_MIN);
	comm_all_reduce(m->c, &w[2].op, RECV(&x[2]), 1, DTYPE_FP32, REDUCE_AVG);
	for (unsigned i = 0; i < 3; i++)
		gloofix_expect(m, &w[i], 0);
	EXPECT(x[0] == (float)(m->size - 1) && x[1] == -x[0] && x[2] == 6);
}

/* Counts around the edges: none, below the number of members, odd; one of many chunks. */
static void scene_results(struct gloofix *m)
{
	/* the first message has room for 56 bytes */
	static const uint64_t counts[] = { 0, 1, 3, 14, 15, 28, 29, 1000, 65537 };
	static const enum dtype dtypes[] = { DTYPE_FP32, DTYPE_BF16, DTYPE_FP16 };

	gloofix_meet(m, "results", m->rank, m->size);
	for (unsigned i = 0; i < ARRAY_SIZE(counts) * ARRAY_SIZE(dtypes); i++) {
		uint64_t count = counts[i / ARRAY_SIZE(dtypes)];
		enum dtype dtype = dtypes[i % ARRAY_SIZE(dtypes)];

		check_reduce_scatter(m, dtype, count, i % 2);
		check_all_reduce(m, dtype, count);
		check_all_gather(m, dtype, count, i % 2);
		check_broadcast(m, count, i % m->size);
	}
	check_reduce_scatter(m, DTYPE_FP32, 1400001, true);
	check_extremes(m);
	m->c = comm_free(m->c);
}

Test(gloo, two_members_compute_the_left_fold)
{
	gloofix_play(scene_results, 2, false);
}

Test(gloo, three_members_compute_the_left_fold)
{
	gloofix_play(scene_results, 3, false);
}

Test(gloo, four_members_compute_the_left_fold)
{
	gloofix_play(scene_results, 4, false);
}

/* With the address sanitizer parts have two chunks at most. */
#define LARGEST (longform_cut() ? 300000u : UINT32_MAX)

/* Like scene_results: parts around the edges of chunks (1 MiB), and parts that are not equal. */
static void check_sums(struct gloofix *m, bool chained)
{
	static const uint64_t counts[] = { 0,      1,      3,      1000,    65537,  262143,
					   262144, 262145, 524288, 1048577, 1400001 };
	static const enum dtype dtypes[] = { DTYPE_FP32, DTYPE_BF16, DTYPE_FP16 };

	gloofix_meet(m, "sums", m->rank, m->size);
	EXPECT(comm_can_sum(m->c));
	for (unsigned i = 0; i < ARRAY_SIZE(counts) * ARRAY_SIZE(dtypes); i++) {
		struct comm_sum sum = { .count = counts[i / ARRAY_SIZE(dtypes)],
					.dtype = dtypes[i % ARRAY_SIZE(dtypes)],
					.chained = chained };

		if (sum.count > 100000 && sum.dtype == DTYPE_FP16)
			continue;
		if (sum.count > LARGEST)
			continue;
		check_sum(m, &sum);
		sum.whole = true;
		check_sum(m, &sum);
	}
	if (LARGEST > 3400001)
		check_sum(m, &(struct comm_sum){ .count = 3400001,
						 .dtype = DTYPE_BF16,
						 .whole = true,
						 .chained = chained });
	m->c = comm_free(m->c);
}

static void scene_chain(struct gloofix *m)
{
	check_sums(m, true);
}

static void scene_sums(struct gloofix *m)
{
	check_sums(m, false);
}

Test(gloo, a_chain_of_two_members_is_one_fold_over_all_ranks)
{
	gloofix_play(scene_chain, 2, false);
}

Test(gloo, a_chain_of_three_members_is_one_fold_over_all_ranks)
{
	gloofix_play(scene_chain, 3, false);
}

Test(gloo, a_chain_of_four_members_is_one_fold_over_all_ranks)
{
	gloofix_play(scene_chain, 4, false);
}

Test(gloo, a_sum_of_two_members_is_that_of_the_sums_of_each)
{
	gloofix_play(scene_sums, 2, false);
}

Test(gloo, a_sum_of_three_members_is_that_of_the_sums_of_each)
{
	gloofix_play(scene_sums, 3, false);
}

Test(gloo, a_sum_of_four_members_is_that_of_the_sums_of_each)
{
	gloofix_play(scene_sums, 4, false);
}

/* Its members make their part in different ways: the messages are the same. */
static void scene_mixed(struct gloofix *m)
{
	const struct comm_sum how = { .count = 700001, .dtype = DTYPE_FP32 };
	const uint64_t bytes = how.count * sizeof(float);
	struct ranks r = make_ranks(m, &how);
	struct comm_fold fold = { fold_ranks, &r };
	char *want = malloc(bytes), *recv = malloc(bytes), *all = malloc(m->size * bytes);
	struct waited w = gloofix_waited();

	gloofix_meet(m, "mixed", m->rank, m->size);
	sum_ranks(want, m, &how, m->rank * how.count);
	if (m->rank == 1) {
		fold_ranks(&r, all, 0, m->size * how.count, true);
		comm_reduce_scatter(m->c, &w.op, SEND(all), RECV(recv), how.count, DTYPE_FP32);
	} else {
		comm_sum(m->c, &w.op, &how, &fold, RECV(recv));
	}
	gloofix_expect(m, &w, 0);
	EXPECT(memcmp(recv, want, bytes) == 0);
	m->c = comm_free(m->c);
	free_ranks(&r);
	free(want);
	free(recv);
	free(all);
}

Test(gloo, what_is_made_meanwhile_goes_with_what_was_made_before)
{
	gloofix_play(scene_mixed, 3, false);
}

/* A member that makes its part slowly. */
struct slow {
	struct ranks ranks;
	atomic_uint calls; /* that have begun */
	atomic_bool inside;
	unsigned long pause_ns;
	unsigned dies_at; /* call; 0: it does not */
};

static void fold_slowly(void *userdata, void *values, uint64_t first, uint64_t n, bool begin)
{
	struct slow *s = userdata;
	const struct timespec pause = { 0, (long)s->pause_ns };

	s->inside = true;
	if (++s->calls == s->dies_at)
		kill(getpid(), SIGKILL);
	nanosleep(&pause, NULL);
	fold_ranks(&s->ranks, values, first, n, begin);
	s->inside = false;
}

static bool is_inside(void *arg)
{
	return ((struct slow *)arg)->calls > 2;
}

/* The operation ends; nobody makes anything of it any more, and what it was made of can go. */
static void expect_end(struct gloofix *m, struct waited *w, struct slow *s, char *recv)
{
	const struct timespec pause = { 0, 50000000 };
	unsigned calls;

	gloofix_expect(m, w, ENGINE_E_ABORTED);
	EXPECT(!s->inside);
	calls = s->calls;
	free_ranks(&s->ranks);
	free(recv);
	nanosleep(&pause, NULL);
	EXPECT(s->calls == calls && !s->inside);
}

/* The last member dies while all make their parts. */
static void scene_sum_killed(struct gloofix *m)
{
	const struct comm_sum how = { .count = LARGE / 4, .dtype = DTYPE_FP32 };
	struct slow s = { .ranks = make_ranks(m, &how),
			  .pause_ns = 2000000,
			  .dies_at = m->rank == m->size - 1 ? 9 : 0 };
	struct comm_fold fold = { fold_slowly, &s };
	struct waited w = gloofix_waited();
	char *recv = malloc(LARGE);

	gloofix_meet(m, "sum", m->rank, m->size);
	gloofix_sync(m);
	comm_sum(m->c, &w.op, &how, &fold, RECV(recv));
	expect_end(m, &w, &s, recv);
	EXPECT(s.ranks.elements < how.count * m->size && strstr(m->why, "member 2"));
	m->c = comm_free(m->c);
}

Test(gloo, a_sum_ends_with_a_member_that_is_killed_while_it_makes_its_part)
{
	gloofix_play(scene_sum_killed, 3, true);
}

/* Member 0 gives it up while it makes its part: the end comes when that is over. */
static void scene_sum_abort(struct gloofix *m)
{
	const struct comm_sum how = { .count = LARGE / 4, .dtype = DTYPE_FP32 };
	struct slow s = { .ranks = make_ranks(m, &how), .pause_ns = 20000000 };
	struct comm_fold fold = { fold_slowly, &s };
	struct waited w = gloofix_waited();
	char *recv = malloc(LARGE);

	gloofix_meet(m, "given up", m->rank, m->size);
	gloofix_sync(m);
	comm_sum(m->c, &w.op, &how, &fold, RECV(recv));
	if (m->rank == 0) {
		looprun_until(&m->run, is_inside, &s, 10);
		comm_abort(m->c);
	}
	expect_end(m, &w, &s, recv);
	m->c = comm_free(m->c);
}

Test(gloo, a_sum_that_is_given_up_ends_when_nobody_makes_its_parts_any_more)
{
	gloofix_play(scene_sum_abort, 2, false);
	gloofix_play(scene_sum_abort, 3, false);
}

static bool is_later(void *arg)
{
	return gloofix_now_s() - *(double *)arg > 0.3;
}

/* As the links do when a node does not answer. */
static void abort_later(struct gloofix *m)
{
	double begin = gloofix_now_s();

	looprun_until(&m->run, is_later, &begin, 5);
	comm_abort(m->c);
}

/* The last member stops within its part. */
static void scene_sum_stopped(struct gloofix *m)
{
	const struct comm_sum how = { .count = LARGE / 4, .dtype = DTYPE_FP32 };
	struct slow s = { .ranks = make_ranks(m, &how), .pause_ns = 1000000 };
	struct comm_fold fold = { fold_slowly, &s };
	struct waited w = gloofix_waited();
	char *recv = malloc(LARGE);

	gloofix_meet(m, "stopped", m->rank, m->size);
	gloofix_sync(m);
	comm_sum(m->c, &w.op, &how, &fold, RECV(recv));
	if (m->rank == m->size - 1) {
		looprun_until(&m->run, is_inside, &s, 10);
		raise(SIGSTOP);
		_exit(0);
	}
	abort_later(m);
	expect_end(m, &w, &s, recv);
	m->c = comm_free(m->c);
}

/* The last member dies on the way. */
static void scene_chain_killed(struct gloofix *m)
{
	const struct comm_sum how = {
		.count = LARGE / 4, .dtype = DTYPE_FP32, .whole = true, .chained = true
	};
	struct ranks r = make_ranks(m, &how);
	struct comm_fold fold = { fold_ranks, &r };
	struct waited w = gloofix_waited();
	char *recv = malloc(LARGE);

	gloofix_meet(m, "killed", m->rank, m->size);
	gloofix_sync(m);
	if (m->rank == m->size - 1)
		kill(getpid(), SIGKILL);
	comm_sum(m->c, &w.op, &how, &fold, RECV(recv));
	gloofix_expect(m, &w, ENGINE_E_ABORTED);
	EXPECT(r.elements < LARGE / 4 && strstr(m->why, "member 2"));
	m->c = comm_free(m->c);
	free_ranks(&r);
	free(recv);
}

Test(gloo, a_chain_ends_with_a_killed_member)
{
	gloofix_play(scene_chain_killed, 3, true);
}

static void scene_alone(struct gloofix *m)
{
	struct comm_info info;

	gloofix_meet(m, "alone", 0, 1);
	check_reduce_scatter(m, DTYPE_BF16, 5, false);
	check_all_gather(m, DTYPE_FP32, 5, false);
	check_all_reduce(m, DTYPE_FP32, 5);
	check_broadcast(m, 5, 0);
	check_sum(m, &(struct comm_sum){ .count = 5, .dtype = DTYPE_BF16, .chained = true });
	check_sum(m, &(struct comm_sum){ .count = 5, .dtype = DTYPE_BF16 });
	comm_info(m->c, &info);
	EXPECT(strcmp(info.engine, "gloo") == 0 && info.size == 1 && info.ops == 6);
	EXPECT(strcmp(info.detail, "Gloo over TCP, 127.0.0.1") == 0);
	m->c = comm_free(m->c);
}

Test(gloo, one_member_copies)
{
	gloofix_play(scene_alone, 1, false);
}

/* Many are started before the first has ended, on two communicators with other members' numbers. */
static void scene_two(struct gloofix *m)
{
	struct comm *c[2];
	struct waited w[20];
	float x[20];

	c[0] = gloofix_meet(m, "one", m->rank, m->size);
	c[1] = gloofix_meet(m, "other", m->size - 1 - m->rank, m->size);
	for (unsigned i = 0; i < 20; i++) {
		w[i] = gloofix_waited();
		x[i] = (float)(m->rank + i);
		comm_all_reduce(c[i % 2], &w[i].op, RECV(&x[i]), 1, DTYPE_FP32, REDUCE_SUM);
	}
	EXPECT(comm_in_flight(c[0]) == 10);
	for (unsigned i = 0; i < 20; i++) {
		gloofix_expect(m, &w[i], 0);
		EXPECT(x[i] == (float)(m->size * (m->size - 1) / 2 + i * m->size));
	}
	comm_free(c[0]);
	comm_free(c[1]);
}

Test(gloo, two_communicators_work_at_the_same_time)
{
	gloofix_play(scene_two, 3, false);
}

/* The last member dies in the middle of an operation. */
static void scene_killed(struct gloofix *m)
{
	const uint64_t count = LARGE / 4;
	char *send = calloc(m->size, LARGE), *recv = calloc(1, LARGE);
	struct waited w = gloofix_waited(), after = gloofix_waited();
	double begin;

	gloofix_meet(m, "before", m->rank, m->size);
	gloofix_sync(m);
	comm_reduce_scatter(m->c, &w.op, SEND(send), RECV(recv), count, DTYPE_FP32);
	if (m->rank == m->size - 1) {
		const struct timespec pause = { 0, 5000000 };

		nanosleep(&pause, NULL);
		kill(getpid(), SIGKILL);
	}
	begin = gloofix_now_s();
	comm_all_reduce(m->c, &after.op, RECV(recv), count, DTYPE_FP32, REDUCE_SUM);
	gloofix_expect(m, &w, ENGINE_E_ABORTED);
	gloofix_expect(m, &after, ENGINE_E_ABORTED);
	EXPECT(gloofix_now_s() - begin < 5);
	EXPECT(m->n_failed == 1);
	m->c = comm_free(m->c);
	m->size--;
	gloofix_meet(m, "after", m->rank, m->size);
	check_all_reduce(m, DTYPE_BF16, 300001);
	m->c = comm_free(m->c);
	free(send);
	free(recv);
}

Test(gloo, a_killed_member_ends_the_operation_and_the_others_meet_again)
{
	gloofix_play(scene_killed, 3, true);
}

/* A message of the killed member is under way: what Gloo itself does not notice. */
static void scene_killed_message(struct gloofix *m)
{
	char *all = calloc(m->size, LARGE);
	struct waited w = gloofix_waited();

	gloofix_meet(m, "message", m->rank, m->size);
	gloofix_sync(m);
	comm_all_gather(m->c, &w.op, SEND(all + m->rank * LARGE), RECV(all), LARGE / 4, DTYPE_FP32);
	if (m->rank == m->size - 1) {
		const struct timespec pause = { 0, 3000000 };

		nanosleep(&pause, NULL);
		kill(getpid(), SIGKILL);
	}
	looprun_flag(&m->run, &w.done, 5);
	looprun_flag(&m->run, &m->failed, 5);
	m->c = comm_free(m->c);
	free(all);
}

Test(gloo, a_member_killed_within_a_message_is_noticed)
{
	gloofix_play(scene_killed_message, 3, true);
}

/* Nothing runs; the owner is told all the same. */
static void scene_killed_idle(struct gloofix *m)
{
	struct waited w = gloofix_waited();
	float x = 1;

	gloofix_meet(m, "idle", m->rank, m->size);
	check_all_reduce(m, DTYPE_FP32, 1);
	gloofix_sync(m);
	if (m->rank == m->size - 1)
		kill(getpid(), SIGKILL);
	looprun_flag(&m->run, &m->failed, 5);
	comm_all_reduce(m->c, &w.op, RECV(&x), 1, DTYPE_FP32, REDUCE_SUM);
	gloofix_expect(m, &w, ENGINE_E_ABORTED);
	m->c = comm_free(m->c);
}

Test(gloo, a_member_killed_between_operations_is_reported)
{
	gloofix_play(scene_killed_idle, 3, true);
}

static bool is_told(void *arg)
{
	char text[8];

	(void)arg;
	return gloofix_get(NULL, "reason/told", 0, text, sizeof(text)) > 0;
}

/* The last member is killed. Member 0 has longer to find out why than member 1, which reports it. */
static void scene_reason(struct gloofix *m)
{
	struct waited w = gloofix_waited(), after = gloofix_waited();
	float x = 1;

	gloofix_meet(m, "reason", m->rank, m->size);
	check_all_reduce(m, DTYPE_FP32, 1);
	gloofix_sync(m);
	if (m->rank == m->size - 1)
		kill(getpid(), SIGKILL);
	comm_all_reduce(m->c, &w.op, RECV(&x), 1, DTYPE_FP32, REDUCE_SUM);
	comm_all_reduce(m->c, &after.op, RECV(&x), 1, DTYPE_FP32, REDUCE_SUM);
	if (m->rank == 1) {
		gloofix_expect(m, &w, ENGINE_E_ABORTED);
		EXPECT(m->n_failed == 1);
		gloofix_set(NULL, "reason/told", "x", 1);
	} else {
		looprun_until(&m->run, is_told, NULL, 10);
		EXPECT(!w.done && !after.done && !m->failed);
		comm_abort(m->c);
		gloofix_expect(m, &w, ENGINE_E_ABORTED);
		EXPECT(m->n_failed == 0);
	}
	gloofix_expect(m, &after, ENGINE_E_ABORTED);
	m->c = comm_free(m->c);
}

/* A connection closed before the owner had heard why: its operations named another member. */
Test(gloo, an_operation_that_fails_waits_for_the_owner_to_abort_it)
{
	gloofix_reason_ms[0] = 60000;
	gloofix_reason_ms[1] = 50;
	gloofix_play(scene_reason, 3, true);
}

/* Large operations, one after the other, so that a member can stop within one. */
#define STOP_OPS 40u

/* Some end as they should, and then one after the other does not. Return: how many. */
static unsigned stop_until_aborted(struct gloofix *m, struct waited *w)
{
	unsigned passed = 0;

	for (unsigned i = 0; i < STOP_OPS; i++) {
		looprun_flag(&m->run, &w[i].done, 20);
		EXPECT(w[i].status == ENGINE_E_ABORTED || (w[i].status == 0 && passed == i));
		passed += w[i].status == 0;
	}
	return passed;
}

/* The last member stops, as if its machine were very slow; its kernel still answers. @in_flight:
 * within an operation. */
static void stop(struct gloofix *m, bool in_flight)
{
	const uint64_t count = LARGE / 4;
	char *data = calloc(1, LARGE);
	struct waited w[STOP_OPS];
	double begin;

	gloofix_meet(m, "stopped", m->rank, m->size);
	check_all_reduce(m, DTYPE_FP32, 1000);
	gloofix_sync(m);
	for (unsigned i = 0; i < STOP_OPS; i++) {
		w[i] = gloofix_waited();
		if (in_flight || m->rank < m->size - 1)
			comm_all_reduce(m->c, &w[i].op, RECV(data), count, DTYPE_FP32, REDUCE_SUM);
	}
	if (m->rank == m->size - 1) {
		const struct timespec pause = { 0, in_flight ? 5000000 : 0 };

		nanosleep(&pause, NULL);
		raise(SIGSTOP);
		_exit(0);
	}
	abort_later(m);
	begin = gloofix_now_s();
	EXPECT(stop_until_aborted(m, w) < (in_flight ? STOP_OPS : 1));
	EXPECT(gloofix_now_s() - begin < 5);
	m->c = comm_free(m->c);
	free(data);
}

static void scene_stopped(struct gloofix *m)
{
	stop(m, false);
}

static void scene_stopped_within(struct gloofix *m)
{
	stop(m, true);
}

/* The others end in time; then the last member goes on, too. */
static void play_stopped(gloofix_scene scene, unsigned size)
{
	pid_t pids[GLOOFIX_MAX];

	gloofix_make_folder();
	for (unsigned i = 0; i < size; i++)
		pids[i] = gloofix_start(scene, i, size);
	for (unsigned i = 0; i < size - 1; i++)
		gloofix_join(pids[i], false);
	kill(pids[size - 1], SIGCONT);
	gloofix_join(pids[size - 1], false);
	gloofix_remove_folder();
}

Test(gloo, an_abort_ends_operations_that_wait_for_a_stopped_member)
{
	play_stopped(scene_stopped, 2);
	play_stopped(scene_stopped, 3);
}

Test(gloo, an_abort_ends_a_sum_whose_member_is_stopped_while_it_makes_its_part)
{
	play_stopped(scene_sum_stopped, 2);
	play_stopped(scene_sum_stopped, 3);
}

Test(gloo, an_abort_ends_operations_of_a_member_that_is_stopped_within_one)
{
	play_stopped(scene_stopped_within, 2);
	play_stopped(scene_stopped_within, 3);
}

/* The other members do not take part: only member 0's abort ends it, and they are told. */
static void scene_abort(struct gloofix *m)
{
	struct waited w[2] = { gloofix_waited(), gloofix_waited() };
	float x[2] = { 1, 2 };
	double begin;

	gloofix_meet(m, "abort", m->rank, m->size);
	check_all_reduce(m, DTYPE_FP32, 1);
	gloofix_sync(m);
	begin = gloofix_now_s();
	if (m->rank == 0) {
		comm_all_reduce(m->c, &w[0].op, RECV(&x[0]), 1, DTYPE_FP32, REDUCE_SUM);
		comm_all_reduce(m->c, &w[1].op, RECV(&x[1]), 1, DTYPE_FP32, REDUCE_SUM);
		comm_abort(m->c);
		gloofix_expect(m, &w[0], ENGINE_E_ABORTED);
		gloofix_expect(m, &w[1], ENGINE_E_ABORTED);
		EXPECT(m->n_failed == 0);
	} else {
		looprun_flag(&m->run, &m->failed, 5);
	}
	EXPECT(gloofix_now_s() - begin < 5);
	m->c = comm_free(m->c);
}

Test(gloo, an_abort_ends_an_operation_that_waits_for_a_member)
{
	gloofix_play(scene_abort, 3, false);
}

/* What it sends cannot be read: a send that fails, on the worker's thread or on Gloo's, which throws
 * there. */
static void scene_unreadable(struct gloofix *m)
{
	const size_t part = 1 << 20;
	char *all = mmap(NULL, part * m->size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS,
			 -1, 0);
	struct waited w = gloofix_waited();

	EXPECT(all != MAP_FAILED);
	gloofix_meet(m, "unreadable", m->rank, m->size);
	gloofix_sync(m);
	if (m->rank == 0)
		EXPECT(mprotect(all, part, PROT_NONE) == 0);
	comm_all_gather(m->c, &w.op, SEND(all + m->rank * part), RECV(all), part / 4, DTYPE_FP32);
	gloofix_expect(m, &w, ENGINE_E_ABORTED);
	EXPECT(m->n_failed == 1);
	m->c = comm_free(m->c);
	munmap(all, part * m->size);
}

Test(gloo, a_send_that_fails_ends_the_communicator)
{
	for (unsigned i = 0; i < 5; i++)
		gloofix_play(scene_unreadable, 3, false);
}

static unsigned count_threads(void)
{
	char line[128];
	unsigned n = 0;
	FILE *f = fopen("/proc/self/status", "re");

	EXPECT(f);
	while (fgets(line, sizeof(line), f))
		sscanf(line, "Threads: %u", &n);
	fclose(f);
	return n;
}

static bool has_threads(void *arg)
{
	return count_threads() == *(const unsigned *)arg;
}

/* Member 0 takes leave of one that goes on for a while. */
static void scene_closed(struct gloofix *m)
{
	unsigned threads = count_threads();
	double begin;

#ifdef __SANITIZE_THREAD__
	threads++; /* its own, which begins with the first one of ours */
#endif
	gloofix_meet(m, "closed", m->rank, m->size);
	check_all_reduce(m, DTYPE_FP32, 1);
	gloofix_sync(m);
	if (m->rank == 1) {
		looprun_flag(&m->run, &m->failed, 10); /* member 0 has left */
		EXPECT(strcmp(m->why, "member 0 has left") == 0);
		m->c = comm_free(m->c);
		return;
	}
	m->c = comm_free(m->c);
	EXPECT(engine_leaving(m->e) == 1);
	begin = gloofix_now_s();
	m->e = engine_close(m->e);
	EXPECT(gloofix_now_s() - begin < 0.5);
	looprun_until(&m->run, has_threads, &threads, 10);
	EXPECT(gloofix_now_s() - begin > 1);
}

/* The end of the engine used to wait for those that take leave. */
Test(gloo, an_engine_that_is_closed_does_not_wait_for_other_members)
{
	gloofix_play(scene_closed, 2, false);
}
