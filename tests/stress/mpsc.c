/* Producers against one consumer, for the thread sanitizer: nothing lost, nothing
 * twice, each producer's order kept. */
#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>

#include "core/check.h"
#include "core/mpsc.h"

#define PRODUCERS 4
#define EACH      200000u

struct entry {
	struct mpsc_node node;
	unsigned producer, number; /* written before the push, read after the pop */
};

static struct mpsc queue;
static struct entry *entries[PRODUCERS];

static void *produce(void *arg)
{
	struct entry **mine = arg;
	unsigned producer = (unsigned)(mine - entries);

	for (unsigned i = 0; i < EACH; i++) {
		(*mine)[i].producer = producer;
		(*mine)[i].number = i;
		mpsc_push(&queue, &(*mine)[i].node);
	}
	return NULL;
}

static unsigned long consume(void)
{
	unsigned next[PRODUCERS] = { 0 };
	unsigned long waits = 0;

	for (unsigned n = 0; n < PRODUCERS * EACH;) {
		struct mpsc_node *node = mpsc_pop(&queue);
		struct entry *e;

		if (!node) {
			waits++;
			sched_yield();
			continue;
		}
		e = CONTAINER_OF(node, struct entry, node);
		CHECK(e->producer < PRODUCERS);
		CHECK(e->number == next[e->producer]);
		next[e->producer]++;
		n++;
	}
	CHECK(!mpsc_pop(&queue));
	return waits;
}

int main(void)
{
	pthread_t threads[PRODUCERS];
	unsigned long waits;

	mpsc_init(&queue);
	for (unsigned i = 0; i < PRODUCERS; i++) {
		entries[i] = calloc(EACH, sizeof(**entries));
		CHECK(entries[i]);
	}
	for (unsigned i = 0; i < PRODUCERS; i++)
		CHECK(pthread_create(&threads[i], NULL, produce, &entries[i]) == 0);
	waits = consume();
	for (unsigned i = 0; i < PRODUCERS; i++) {
		pthread_join(threads[i], NULL);
		free(entries[i]);
	}
	printf("mpsc ok producers=%d each=%u empty_looks=%lu\n", PRODUCERS, EACH, waits);
	return 0;
}
