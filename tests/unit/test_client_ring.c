/* The client's side of a ring, with a daemon's side that does what the test says. */
#include <criterion/criterion.h>
#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include "methods.h"
#include "ring.h"
#include "ring/ring_queue.h"
#include "shardd.pb-c.h"

#define METHOD METHOD_Gather

static struct ring_queue daemon_side;
static struct ring *ring;
static int pair[2];

static void test_client_ring_begin(void)
{
	int fd;
	void *memory;

	cr_assert_eq(socketpair(AF_UNIX, SOCK_STREAM, 0, pair), 0);
	cr_assert_eq(ring_queue_init(&daemon_side, RING_MIN_ENTRIES, &fd), 0);
	memory = mmap(NULL, daemon_side.bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	cr_assert_neq(memory, MAP_FAILED);
	close(fd);
	cr_assert_eq(ring_use(memory, daemon_side.bytes, eventfd(0, EFD_CLOEXEC), pair[0], "path",
			      &ring, NULL),
		     0);
}

static void test_client_ring_end(void)
{
	ring_close(ring);
	ring_queue_deinit(&daemon_side);
	close(pair[1]);
}

TestSuite(client_ring, .init = test_client_ring_begin, .fini = test_client_ring_end, .timeout = 30);

static int start(struct ring_pending *p, uint32_t timeout_ms)
{
	Shardd__V1__GatherRequest q = SHARDD__V1__GATHER_REQUEST__INIT;

	q.unit = 3;
	return ring_start(ring, ring_number(METHOD), &q.base, METHOD,
			  &shardd__v1__gather_response__descriptor, timeout_ms, p);
}

/* All that is there is answered with @code. */
static unsigned answer(uint16_t code, const void *message, uint32_t bytes)
{
	struct ring_submission s;
	int ready = ring_queue_ready(&daemon_side);

	for (int i = 0; i < ready; i++) {
		cr_assert_eq(ring_queue_take(&daemon_side, &s), 0);
		ring_queue_post(&daemon_side, s.tag, code, message, bytes);
	}
	ring_queue_taken(&daemon_side);
	ring_queue_wake(&daemon_side);
	return (unsigned)ready;
}

Test(client_ring, a_reply_is_that_of_the_method)
{
	Shardd__V1__GatherResponse reply = SHARDD__V1__GATHER_RESPONSE__INIT;
	ProtobufCMessage *got = NULL;
	struct ring_pending p;
	uint8_t bytes[64];

	reply.references = 7;
	cr_assert_eq(start(&p, 0), 0);
	cr_assert(!ring_pending_wait(&p, 0));
	cr_assert_eq(answer(0, bytes, (uint32_t)protobuf_c_message_pack(&reply.base, bytes)), 1);
	cr_assert(ring_pending_wait(&p, -1));
	cr_assert_eq(ring_pending_result(&p, &got, NULL), 0);
	cr_assert_eq(((Shardd__V1__GatherResponse *)got)->references, 7);
	protobuf_c_message_free_unpacked(got, NULL);
	ring_pending_free(&p);
	ring_pending_free(&p);
}

Test(client_ring, an_error_has_its_text)
{
	Shardd__V1__ErrorInfo info = SHARDD__V1__ERROR_INFO__INIT;
	struct shardd_error err = { 0 };
	ProtobufCMessage *got = NULL;
	struct ring_pending p;
	uint8_t bytes[256];

	info.text = (char *)"no such unit, and a text that is longer than an entry has room for";
	info.native = 5;
	cr_assert_eq(start(&p, 0), 0);
	answer(5, bytes, (uint32_t)protobuf_c_message_pack(&info.base, bytes));
	cr_assert(ring_pending_wait(&p, -1));
	cr_assert_eq(ring_pending_result(&p, &got, &err), -SHARDD_NOT_FOUND);
	cr_assert_str_eq(err.text, info.text);
	cr_assert_eq(err.native, 5);
	ring_pending_free(&p);
}

Test(client_ring, who_is_not_answered_in_time_hears_so)
{
	struct shardd_error err = { 0 };
	ProtobufCMessage *got = NULL;
	struct ring_pending p;

	cr_assert_eq(start(&p, 20), 0);
	cr_assert(ring_pending_wait(&p, -1));
	cr_assert_eq(ring_pending_result(&p, &got, &err), -SHARDD_DEADLINE_EXCEEDED);
	cr_assert(strstr(err.text, "within 20 ms"), "%s", err.text);
	ring_pending_free(&p);
}

/* What nobody waits for any more makes room when it is answered, whoever comes next. */
Test(client_ring, abandoned_submissions_make_room)
{
	struct ring_pending p;

	for (unsigned turn = 0; turn < 3; turn++) {
		for (unsigned i = 0; i < RING_MIN_ENTRIES; i++) {
			cr_assert_eq(start(&p, 0), 0, "turn %u, %u", turn, i);
			ring_pending_free(&p);
		}
		cr_assert_eq(start(&p, 0), RING_E_FULL);
		cr_assert_eq(answer(13, NULL, 0), RING_MIN_ENTRIES);
	}
}

/* Nothing is put into the ring of a daemon that is gone, and nobody waits for it. */
Test(client_ring, a_daemon_that_is_gone)
{
	struct shardd_error err = { 0 };
	ProtobufCMessage *got = NULL;
	struct ring_pending p, late;
	uint32_t tail;

	cr_assert_eq(start(&p, 0), 0);
	close(pair[1]);
	pair[1] = -1;
	cr_assert(ring_pending_wait(&p, -1));
	cr_assert_eq(ring_pending_result(&p, &got, &err), -SHARDD_UNAVAILABLE);
	cr_assert(strstr(err.text, METHOD), "%s", err.text);
	ring_pending_free(&p);
	tail = atomic_load(&daemon_side.shared->sq_tail);
	for (unsigned i = 0; i < 2 * RING_MIN_ENTRIES; i++)
		cr_assert_eq(start(&late, 0), RING_E_LOST);
	cr_assert_eq(atomic_load(&daemon_side.shared->sq_tail), tail);
}

static uint64_t cancels(void)
{
	uint64_t all = 0;

	for (unsigned i = 0; i < RING_MAX_ENTRIES / 64; i++)
		all |= atomic_load(&daemon_side.shared->cancels[i]);
	return all;
}

/* The bit is gone before the slot is another op's, also if nobody waits for the op any more. */
Test(client_ring, a_late_cancel_reaches_no_other_op)
{
	struct ring_pending p, last;

	for (unsigned i = 0; i < 2; i++) {
		cr_assert_eq(start(&p, 0), 0);
		cr_assert_eq(cancels(), 0);
		ring_pending_cancel(&p);
		ring_pending_cancel(&p);
		cr_assert_eq(cancels(), UINT64_C(1) << p.slot % 64);
		if (i)
			ring_pending_free(&p);
		answer(1, NULL, 0);
		cr_assert_eq(start(&last, 0), 0);
		answer(1, NULL, 0);
		cr_assert(ring_pending_wait(&last, -1));
		cr_assert_eq(cancels(), 0);
		ring_pending_cancel(&last);
		cr_assert_eq(cancels(), 0, "it has ended");
		ring_pending_free(&last);
		ring_pending_free(&p);
	}
}

/* As many as there are slots, none of which is left. */
Test(client_ring, a_cancel_needs_no_slot)
{
	struct ring_pending p[RING_MIN_ENTRIES], more;

	for (unsigned i = 0; i < RING_MIN_ENTRIES; i++)
		cr_assert_eq(start(&p[i], 0), 0);
	cr_assert_eq(start(&more, 0), RING_E_FULL);
	for (unsigned i = 0; i < RING_MIN_ENTRIES; i++)
		ring_pending_cancel(&p[i]);
	cr_assert_eq(cancels(), UINT64_MAX);
	answer(1, NULL, 0);
	for (unsigned i = 0; i < RING_MIN_ENTRIES; i++) {
		cr_assert(ring_pending_wait(&p[i], -1));
		ring_pending_free(&p[i]);
	}
	cr_assert_eq(cancels(), 0);
}

static void *poke_ring(void *arg)
{
	atomic_bool *stop = arg;

	while (!atomic_load(stop))
		ring_poke(ring);
	return NULL;
}

Test(client_ring, one_of_several)
{
	struct ring_pending p[3], *list[] = { &p[0], &p[1], &p[2] };
	atomic_bool stop = false;
	pthread_t thread;

	for (unsigned i = 0; i < 3; i++)
		cr_assert_eq(start(&p[i], i == 2 ? 50 : 0), 0);
	cr_assert(!ring_wait_any(ring, list, 2, ring_pokes(ring), 0));
	cr_assert(!ring_wait_any(ring, list, 2, ring_pokes(ring), 1));
	cr_assert(!ring_wait_any(ring, list, 2, ring_pokes(ring) - 1, -1), "there was a poke");
	cr_assert_eq(pthread_create(&thread, NULL, poke_ring, &stop), 0);
	for (unsigned i = 0; i < 100; i++)
		cr_assert(!ring_wait_any(ring, list, 2, ring_pokes(ring), -1));
	atomic_store(&stop, true);
	pthread_join(thread, NULL);
	cr_assert(ring_wait_any(ring, list, 3, ring_pokes(ring), -1), "the last one is late");
	cr_assert(ring_pending_ended(&p[2]) && !ring_pending_ended(&p[1]));
	answer(13, NULL, 0);
	cr_assert(ring_wait_any(ring, list, 2, ring_pokes(ring), -1));
	for (unsigned i = 0; i < 3; i++)
		ring_pending_free(&p[i]);
}

static bool is_told(int fd, int timeout_ms)
{
	struct pollfd p = { .fd = fd, .events = POLLIN };
	uint64_t n;

	return poll(&p, 1, timeout_ms) == 1 && read(fd, &n, sizeof(n)) == sizeof(n);
}

/* An answer, a deadline that passes, and a daemon that goes: nobody waits for any of them. */
Test(client_ring, a_descriptor_tells_what_has_ended)
{
	int fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
	struct ring_pending p[3];

	cr_assert_eq(ring_serve(ring, fd), 0);
	cr_assert_eq(ring_serve(ring, fd), 0);
	for (unsigned i = 0; i < 3; i++) {
		cr_assert_eq(start(&p[i], i == 1 ? 20 : 0), 0);
		if (i == 0)
			answer(13, NULL, 0);
		if (i == 2) {
			atomic_store(&daemon_side.shared->closed, 1);
			shutdown(pair[1], SHUT_RDWR);
		}
		cr_assert(is_told(fd, 5000), "%u", i);
		cr_assert(ring_pending_ended(&p[i]));
		cr_assert(!is_told(fd, 0));
	}
	for (unsigned i = 0; i < 3; i++)
		ring_pending_free(&p[i]);
	ring_close(ring);
	ring = NULL;
	close(fd);
}

Test(client_ring, what_goes_over_it)
{
	cr_assert_neq(ring_number(METHOD), 0);
	cr_assert_neq(ring_number(METHOD_Reduce), 0);
	cr_assert_eq(ring_number(METHOD_ConvertUnits), 0, "its reply has lists");
	cr_assert_eq(ring_number("/shardd.v1.TrainingService/None"), 0);
}

Test(client_ring, memory_that_makes_no_sense)
{
	struct shardd_error err = { 0 };
	struct ring *none = NULL;
	struct ring_shared *s =
		mmap(NULL, 1 << 20, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

	cr_assert_neq(s, MAP_FAILED);
	s->magic = RING_MAGIC;
	s->entries = 100;
	s->bytes = 1 << 20;
	cr_assert_eq(ring_use(s, 1 << 20, -1, -1, "path", &none, &err), -SHARDD_INTERNAL);
	cr_assert_null(none);
}
