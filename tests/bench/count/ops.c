/*
 * shardd-count-ops SOCKET nop|gather|reduce N: N ops of one kind, for tests/bench/instructions,
 * which counts the instructions of the daemon or of this program meanwhile. Nothing here may
 * depend on time: what is asked with shardd_poll is there, but for an unlucky one.
 */
#include <shardd/shardd.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define RANKS    2
#define BATCH    50u /* ops under way */
#define ELEMENTS 4096
#define PAUSE_MS 20 /* in which a batch is answered */

struct trainer {
	shardd_client *client[RANKS];
	shardd_unit unit;
};

static struct shardd_error err;

static void must(int rc, const char *what)
{
	if (rc >= 0)
		return;
	fprintf(stderr, "shardd-count-ops: %s: %s\n", what, err.text);
	exit(1);
}

static void wait_for(shardd_client *c, shardd_ticket t, const char *what)
{
	must(shardd_wait(c, t, -1, NULL, &err), what);
}

static void ops_begin(struct trainer *t, const char *socket)
{
	uint64_t shape = ELEMENTS;
	struct shardd_tensor w = { .name = "w", .shape = &shape, .dims = 1 };
	struct shardd_unit_spec spec = { .size = sizeof(spec),
					 .name = "layer",
					 .tensors = &w,
					 .n_tensors = 1,
					 .group = SHARDD_WORLD };
	struct shardd_options options = { .size = sizeof(options), .socket = socket };
	struct shardd_unit_info info;
	shardd_ticket ready[RANKS];

	for (unsigned i = 0; i < RANKS; i++) {
		struct shardd_job job = { .size = sizeof(job),
					  .name = "count",
					  .rank = (int)i,
					  .world_size = RANKS,
					  .lifetime = SHARDD_EPHEMERAL };

		must(shardd_connect(&options, &t->client[i], &err), "connect");
		must(shardd_join(t->client[i], &job, NULL, &err), "join");
		must(shardd_register(t->client[i], &spec, 1, &info, &err), "register");
	}
	t->unit = info.unit;
	for (unsigned i = 0; i < RANKS; i++)
		must(shardd_submit_init(t->client[i],
					SHARDD_OPTIONS(init, .unit = t->unit, .seed = 1,
						       .from = SHARDD_FROM_SEED),
					&ready[i], &err),
		     "initialise");
	for (unsigned i = 0; i < RANKS; i++)
		wait_for(t->client[i], ready[i], "initialise");
}

static void ops_end(struct trainer *t)
{
	for (unsigned i = 0; i < RANKS; i++) {
		must(shardd_leave(t->client[i], &err), "leave");
		shardd_close(t->client[i]);
	}
}

static void nap(void)
{
	struct timespec ts = { .tv_nsec = PAUSE_MS * 1000000L };

	nanosleep(&ts, NULL);
}

static int submit_nop(const struct trainer *t, shardd_ticket *ticket)
{
	return shardd_submit_nop(t->client[0], SHARDD_OPTIONS(nop), ticket, &err);
}

static int submit_gather(const struct trainer *t, shardd_ticket *ticket)
{
	return shardd_submit_gather(t->client[0], SHARDD_OPTIONS(gather, .unit = t->unit), ticket,
				    &err);
}

static void batch(const struct trainer *t, unsigned n,
		  int (*submit)(const struct trainer *t, shardd_ticket *ticket))
{
	shardd_ticket tickets[BATCH];

	for (unsigned i = 0; i < n; i++)
		must(submit(t, &tickets[i]), "submit");
	nap();
	for (unsigned i = 0; i < n; i++) {
		int r;

		while ((r = shardd_poll(t->client[0], tickets[i], NULL, &err)) == 0)
			nap();
		must(r, "poll");
	}
}

static void reduce_once(const struct trainer *t)
{
	shardd_ticket ticket[RANKS];

	for (unsigned i = 0; i < RANKS; i++) {
		must(shardd_submit_gradient(t->client[i], SHARDD_OPTIONS(gradient, .unit = t->unit),
					    &ticket[i], &err),
		     "gradient");
		wait_for(t->client[i], ticket[i], "gradient");
	}
	for (unsigned i = 0; i < RANKS; i++)
		must(shardd_submit_reduce(t->client[i], SHARDD_OPTIONS(reduce, .unit = t->unit),
					  &ticket[i], &err),
		     "reduce");
	for (unsigned i = 0; i < RANKS; i++)
		wait_for(t->client[i], ticket[i], "reduce");
}

static void run(const struct trainer *t, const char *what, unsigned n)
{
	for (unsigned done = 0; done < n; done += BATCH) {
		unsigned some = n - done < BATCH ? n - done : BATCH;

		if (strcmp(what, "nop") == 0)
			batch(t, some, submit_nop);
		else if (strcmp(what, "gather") == 0)
			batch(t, some, submit_gather);
		else
			for (unsigned i = 0; i < some; i++)
				reduce_once(t);
	}
}

int main(int argc, char **argv)
{
	struct trainer t = { 0 };

	if (argc != 4) {
		fputs("usage: shardd-count-ops SOCKET nop|gather|reduce N\n", stderr);
		return 2;
	}
	ops_begin(&t, argv[1]);
	run(&t, argv[2], (unsigned)strtoul(argv[3], NULL, 10));
	ops_end(&t);
	return 0;
}
