/*
 * shardd-bench-scale [N...]: what daemons of one job say to each other, for 2, 10, 100 and 1,000 of them
 * by default, all in this process (scale.h). --meet: how communicators meet;
 * it fails if that is more than a message there and one back for each node and communicator.
 * --order: what the order of two nodes takes by itself.
 */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/log.h"
#include "scale.h"

static void main_head(void)
{
	printf("%6s  %-22s %9s %13s %9s %9s %6s %7s %9s %9s %11s %9s %10s\n", "nodes", "phase",
	       "messages", "bytes", "to lead", "of lead", "txns", "grants", "store B", "txn max",
	       "lead us/msg", "slowest", "memory B");
}

static void main_print(unsigned n, const char *phase, const struct scale_counts *c)
{
	printf("%6u  %-22s %9" PRIu64 " %13" PRIu64 " %9" PRIu64 " %9" PRIu64 " %6" PRIu64
	       " %7" PRIu64 " %9" PRIu64 " %9" PRIu64 " %11.1f %9.1f %10" PRId64 "\n",
	       n, phase, c->messages, c->bytes, c->to_leader, c->from_leader, c->txns, c->grants,
	       c->store_bytes, c->largest_txn,
	       c->to_leader ? (double)c->leader_ns / 1000 / (double)c->to_leader : 0,
	       (double)c->slowest_ns / 1000, c->leader_memory);
	fflush(stdout);
}

static void main_run(unsigned n)
{
	struct scale *s = scale_new(n, SCALE_AT_ONCE);
	struct scale_counts c = scale_members(s);
	unsigned steps;

	main_print(n, "members of the store", &c);
	c = scale_join(s);
	main_print(n, "join and begin", &c);
	c = scale_collective(s);
	main_print(n, "a collective", &c);
	c = scale_commit(s);
	main_print(n, "a commit", &c);
	c = scale_step(s);
	main_print(n, "a step: 4 and a commit", &c);
	steps = scale_record(s);
	c = scale_step(s);
	if (steps)
		main_print(n, "a recorded step", &c);
	c = scale_end(s);
	main_print(n, "end of the epoch", &c);
	scale_free(s);
}

/* Return: whether it has cost no more than it should. */
static bool main_meet(unsigned n)
{
	const uint64_t most = UINT64_C(2) * 2 * (n - 1);
	struct scale *s = scale_new(n, SCALE_GLOO);
	struct scale_counts c;

	(void)scale_join(s);
	c = scale_meet(s);
	main_print(n, "two communicators meet", &c);
	scale_free(s);
	if (c.messages > most)
		fprintf(stderr, "%u nodes meet with %" PRIu64 " messages, more than %" PRIu64 "\n",
			n, c.messages, most);
	return c.messages <= most;
}

static int main_order(void)
{
	for (unsigned i = 0; i < 3; i++)
		printf("an entry, on one of two nodes: %.2f us in a schedule, %.2f us by the "
		       "leader\n",
		       scale_order_ns(true) / 1000, scale_order_ns(false) / 1000);
	return 0;
}

int main(int argc, char **argv)
{
	static const unsigned usual[] = { 2, 10, 100, 1000 };
	unsigned n[64], count = 0;
	bool meets = false, good = true;

	if (argc == 2 && strcmp(argv[1], "--order") == 0)
		return main_order();
	for (int i = 1; i < argc; i++) {
		if (strcmp(argv[i], "--meet") == 0) {
			meets = true;
			continue;
		}
		n[count] = count < 64 ? (unsigned)strtoul(argv[i], NULL, 10) : 0;
		if (n[count] < 2 || n[count] > SCALE_MOST) {
			fprintf(stderr,
				"usage: %s --order | [--meet] [N...]: up to 64 numbers from 2 to "
				"%u\n",
				argv[0], SCALE_MOST);
			return 2;
		}
		count++;
	}
	if (log_open(&(struct log_options){ .level = LOG_ERROR }) < 0)
		return 1;
	main_head();
	for (unsigned i = 0; i < (count ? count : 4); i++) {
		unsigned nodes = count ? n[i] : usual[i];

		if (!meets)
			main_run(nodes);
		else
			good = main_meet(nodes) && good;
	}
	log_close();
	return good ? 0 : 1;
}
