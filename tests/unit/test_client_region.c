/* Regions: what stands for a unit's memory while it is released. */
#include <criterion/criterion.h>
#include <pthread.h>

#include "shardd/shardd.h"

#define READERS 4
#define ROUNDS  2000

TestSuite(client_region, .timeout = 60);

static pthread_barrier_t turn;
static volatile const char *volatile at; /* NULL: the end */

static void *read_it(void *arg)
{
	(void)arg;
	for (;;) {
		pthread_barrier_wait(&turn);
		if (!at)
			return NULL;
		(void)at[0];
		pthread_barrier_wait(&turn);
	}
}

/* As the threads of one operator do. */
Test(client_region, an_expected_read_by_several_threads_goes_on_in_all_of_them)
{
	static struct shardd_region_fault fault = { .expected = 1 };
	const struct shardd_region_options o = {
		.size = sizeof(o), .unit = "u", .bytes = 4096, .fault = &fault
	};
	pthread_t reader[READERS];
	struct shardd_error err;
	shardd_region *r;
	void *begin;

	pthread_barrier_init(&turn, NULL, READERS + 1);
	for (unsigned i = 0; i < READERS; i++)
		cr_assert_eq(pthread_create(&reader[i], NULL, read_it, NULL), 0);
	for (unsigned k = 0; k < ROUNDS; k++) {
		cr_assert_eq(shardd_region_new(&o, &r, &begin, &err), 0, "%s", err.text);
		at = begin;
		pthread_barrier_wait(&turn);
		pthread_barrier_wait(&turn);
		cr_assert(fault.happened);
		fault.happened = 0;
		shardd_region_set(r, SHARDD_REGION_ENDED, NULL);
	}
	at = NULL;
	pthread_barrier_wait(&turn);
	for (unsigned i = 0; i < READERS; i++)
		pthread_join(reader[i], NULL);
	pthread_barrier_destroy(&turn);
}
