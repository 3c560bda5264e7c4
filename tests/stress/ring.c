/*
 * Both ends of a ring, for the thread sanitizer: several threads submit and wait, one thread
 * is the daemon, which answers in another order, sleeps, and dies in the middle. Nothing is
 * lost, nothing answered twice, no answer is another's. The queues are the smallest there
 * are, so that they wrap around and are full often.
 */
#include <poll.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include "core/check.h"
#include "ring.h"
#include "ring/ring_queue.h"
#include "shardd.pb-c.h"

enum { CLIENTS = 3, EACH = 30000, DEPTH = 40, HELD = 16 };

static struct ring_queue queue;
static struct ring *ring;
static int event_fd;
static atomic_bool stop;
static atomic_ulong sleeps, answered;

struct held {
	uint64_t tag;
	uint32_t bytes;
	uint8_t data[RING_LONG_BYTES];
};

static unsigned draw(unsigned *state, unsigned below)
{
	*state = *state * 1103515245u + 12345u;
	return (*state >> 16) % below;
}

/* One of them, in no order. */
static void answer(struct held *held, unsigned *n, unsigned *random)
{
	unsigned i = draw(random, *n);

	ring_queue_post(&queue, held[i].tag, 0, held[i].data, held[i].bytes);
	held[i] = held[--*n];
	answered++;
}

static unsigned take(struct held *held, unsigned *n)
{
	static struct ring_submission s;
	int ready = ring_queue_ready(&queue);
	unsigned taken = 0;

	CHECK(ready >= 0);
	for (; ready > 0 && *n < HELD; ready--, taken++) {
		CHECK(ring_queue_take(&queue, &s) == 0);
		held[*n].tag = s.tag;
		held[*n].bytes = s.bytes;
		memcpy(held[(*n)++].data, s.data, s.bytes);
	}
	ring_queue_taken(&queue);
	return taken;
}

static void sleep_until_woken(void)
{
	struct pollfd p = { .fd = event_fd, .events = POLLIN };
	uint64_t count;

	if (!ring_queue_sleep(&queue))
		return;
	sleeps++;
	while (!atomic_load(&stop) && poll(&p, 1, 20) == 0)
		;
	CHECK(atomic_load(&stop) || read(event_fd, &count, sizeof(count)) == sizeof(count));
	ring_queue_awake(&queue);
}

/* What it was asked comes back; a few stay unanswered at the end. */
static void *daemon_thread(void *arg)
{
	static struct held held[HELD];
	unsigned n = 0, random = 1;

	(void)arg;
	while (!atomic_load(&stop)) {
		unsigned taken = take(held, &n);

		while (n > 0 && (n == HELD || draw(&random, 4)))
			answer(held, &n, &random);
		ring_queue_wake(&queue);
		if (!taken && !n)
			sleep_until_woken();
	}
	/* as ring_queue_deinit says it; the mapping is the client's too */
	atomic_store(&queue.shared->closed, 1);
	queue.posted = true;
	ring_queue_wake(&queue);
	return NULL;
}

static Shardd__V1__GatherResponse *request(unsigned number, unsigned client)
{
	static _Thread_local Shardd__V1__GatherResponse r;
	static _Thread_local Shardd__V1__Placement place;
	static _Thread_local uint8_t handle[300];

	shardd__v1__gather_response__init(&r);
	shardd__v1__placement__init(&place);
	r.references = number;
	r.place = &place;
	place.slab = client;
	place.ipc_handle.data = handle;
	place.ipc_handle.len = number % 3 ? 0 : number % sizeof(handle); /* longer than an entry */
	memset(handle, (int)(number % 251), sizeof(handle));
	return &r;
}

static void check_reply(const ProtobufCMessage *m, unsigned number, unsigned client)
{
	const Shardd__V1__GatherResponse *r = (const Shardd__V1__GatherResponse *)m;

	CHECK(r->references == number && r->place->slab == client);
	CHECK(r->place->ipc_handle.len == (number % 3 ? 0 : number % 300));
	for (size_t i = 0; i < r->place->ipc_handle.len; i++)
		CHECK(r->place->ipc_handle.data[i] == number % 251);
}

/* Return: false: the daemon is gone. */
static bool finish(struct ring_pending *p, unsigned number, unsigned client)
{
	ProtobufCMessage *reply = NULL;
	struct shardd_error err;
	int r;

	while (!ring_pending_wait(p, number % 5 ? -1 : 0))
		;
	r = ring_pending_result(p, &reply, &err);
	ring_pending_free(p);
	if (r < 0) {
		CHECK(r == -SHARDD_UNAVAILABLE && atomic_load(&stop));
		return false;
	}
	check_reply(reply, number, client);
	protobuf_c_message_free_unpacked(reply, NULL);
	return true;
}

static bool submit(struct ring_pending *p, unsigned number, unsigned client)
{
	return ring_start(ring, 1, &request(number, client)->base, "/Test",
			  &shardd__v1__gather_response__descriptor, 0, p) == 0;
}

static void *client_thread(void *arg)
{
	unsigned client = (unsigned)(uintptr_t)arg, random = client + 7;
	unsigned begun = 0, ended = 0, full = 0;
	static _Thread_local struct ring_pending p[DEPTH];
	bool there = true;

	while (there && ended < EACH) {
		while (begun < EACH && begun - ended < DEPTH && draw(&random, 50)) {
			if (!submit(&p[begun % DEPTH], begun, client)) {
				full++;
				break;
			}
			begun++;
		}
		if (ended < begun) {
			there = finish(&p[ended % DEPTH], ended, client);
			ended++;
		}
	}
	for (; ended < begun; ended++)
		finish(&p[ended % DEPTH], ended, client);
	return (void *)(uintptr_t)full;
}

/* What is begun when it dies is lost, and said to be. */
static void die_in_the_middle(pthread_t daemon)
{
	static struct ring_pending p[32];
	ProtobufCMessage *reply = NULL;
	unsigned lost = 0;

	for (unsigned i = 0; i < 32; i++)
		CHECK(submit(&p[i], i, 9));
	atomic_store(&stop, true);
	for (unsigned i = 0; i < 32; i++) {
		CHECK(ring_pending_wait(&p[i], 10000));
		if (ring_pending_result(&p[i], &reply, NULL) == -SHARDD_UNAVAILABLE)
			lost++;
		else
			protobuf_c_message_free_unpacked(reply, NULL);
		ring_pending_free(&p[i]);
	}
	pthread_join(daemon, NULL);
	printf("%u of 32 lost with the daemon\n", lost);
}

int main(void)
{
	pthread_t daemon, clients[CLIENTS];
	unsigned long full = 0;
	int fd, pair[2];
	void *result;

	CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, pair) == 0);
	CHECK(ring_queue_init(&queue, RING_MIN_ENTRIES, &fd) == 0);
	event_fd = eventfd(0, EFD_CLOEXEC);
	/* one mapping for both: else the sanitizer would not see that it is one memory */
	CHECK(ring_use(queue.shared, queue.bytes, dup(event_fd), pair[0], "test", &ring, NULL) ==
	      0);
	atomic_store(&queue.shared->spin_us, 5);
	CHECK(pthread_create(&daemon, NULL, daemon_thread, NULL) == 0);
	for (uintptr_t i = 0; i < CLIENTS; i++)
		CHECK(pthread_create(&clients[i], NULL, client_thread, (void *)i) == 0);
	for (unsigned i = 0; i < CLIENTS; i++) {
		pthread_join(clients[i], &result);
		full += (unsigned long)(uintptr_t)result;
	}
	printf("%lu answered, the daemon slept %lu times, the ring was full %lu times\n",
	       atomic_load(&answered), atomic_load(&sleeps), full);
	CHECK(answered == CLIENTS * EACH);
	die_in_the_middle(daemon);
	close(fd);
	close(pair[1]);
	return 0;
}
