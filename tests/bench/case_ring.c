/* ring_rtt, ring_rtt_sleeping and submit: what the ring costs by itself. */
#include <linux/futex.h>
#include <poll.h>
#include <stdio.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "bench.h"

#define SMALL_ELEMENTS 1024
#define DEPTH          256 /* no-ops under way */

/* --------------------------------------------------------------- ring_rtt */

static void nop_main(struct trainer *t)
{
	trainer_connect(t);
	for (int i = 100 * TRAINER_WARM_UP; i < (int)t->crew->repeat; i++) {
		struct sample *s = trainer_sample(t, 0, i);
		struct shardd_error err;

		sample_begin(s);
		trainer_must(t, shardd_nop(t->client, &err), &err, "nop");
		sample_end(s);
	}
}

/* An eventfd one way and a futex the other, as the ring wakes who sleeps. */
struct ping {
	atomic_uint word; /* 1: asked, 0: answered; a futex */
	int event_fd;
};

static struct ping *ping;

static void answer_pings(struct crew *crew)
{
	struct pollfd p = { .fd = ping->event_fd, .events = POLLIN };
	uint64_t count;

	while (!atomic_load(&crew->stop)) {
		if (poll(&p, 1, 100) <= 0 ||
		    read(ping->event_fd, &count, sizeof(count)) != sizeof(count))
			continue;
		atomic_store(&ping->word, 0);
		syscall(SYS_futex, &ping->word, FUTEX_WAKE, 1, NULL, NULL, 0);
	}
}

static void one_ping(void)
{
	const uint64_t one = 1;

	atomic_store(&ping->word, 1);
	(void)!write(ping->event_fd, &one, sizeof(one));
	while (atomic_load(&ping->word))
		syscall(SYS_futex, &ping->word, FUTEX_WAIT, 1, NULL, NULL, 0);
}

static void ping_main(struct trainer *t)
{
	if (t->rank > 0) {
		answer_pings(t->crew);
		return;
	}
	for (int i = 100 * TRAINER_WARM_UP; i < (int)t->crew->repeat; i++) {
		struct sample *s = trainer_sample(t, 0, i);

		sample_begin(s);
		one_ping();
		sample_end(s);
	}
	atomic_store(&t->crew->stop, true);
}

static int ping_run(struct bench *b, unsigned repeat, struct figures *f)
{
	struct crew *crew = crew_new(b, 1, 1, 1, repeat, 1);
	int r = -1;

	ping = mmap(NULL, sizeof(*ping), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	if (ping == MAP_FAILED) {
		crew_free(crew);
		return -1;
	}
	ping->event_fd = eventfd(0, EFD_CLOEXEC);
	if (crew && ping->event_fd >= 0)
		r = crew_run(crew, ping_main);
	if (r == 0)
		figures_calls(f, crew, 0, 0, 1);
	if (ping->event_fd >= 0)
		close(ping->event_fd);
	munmap(ping, sizeof(*ping));
	crew_free(crew);
	return r;
}

static int nop_run(struct bench *b, const struct bench_case *c, struct figures *f)
{
	struct crew *crew = crew_new(b, 1, 0, 1, bench_repeat(b, c), SMALL_ELEMENTS);
	int r = crew ? crew_run(crew, nop_main) : -1;

	if (r == 0)
		figures_calls(f, crew, 0, 0, 1);
	f->name = c->name;
	f->ranks = 1;
	f->ran_us = -1;
	crew_free(crew);
	return r;
}

int case_ring_rtt(struct bench *b, const struct bench_case *c)
{
	struct figures f = FIGURES_NULL;
	int r = nop_run(b, c, &f);

	if (r == 0)
		figures_report(b, &f);
	return r;
}

/* A daemon of its own, whose clients do not spin either. */
static int sleeping_run(struct bench *b, const struct bench_case *c, struct figures *f)
{
	struct bench own = { .o = b->o, .no_spin = true };
	int r;

	own.o.socket = NULL;
	if (daemon_start(&own) < 0)
		return -1;
	r = nop_run(&own, c, f);
	return daemon_stop(&own) < 0 ? -1 : r;
}

int case_ring_rtt_sleeping(struct bench *b, const struct bench_case *c)
{
	struct figures f = FIGURES_NULL, bare = FIGURES_NULL;
	int r = sleeping_run(b, c, &f);

	if (r == 0)
		r = ping_run(b, bench_repeat(b, c), &bare);
	if (r < 0)
		return r;
	f.ratio = bare.p50_us / f.p50_us;
	figures_report(b, &f);
	bare.name = "eventfd_futex";
	bare.ranks = 1;
	bare.ran_us = -1;
	figures_report(b, &bare);
	return 0;
}

/* ----------------------------------------------------------------- submit */

/* A turn: DEPTH no-ops, each waited for when DEPTH others have been submitted. */
static void submit_main(struct trainer *t)
{
	static shardd_ticket tickets[DEPTH];
	struct shardd_error err;
	bool filled = false;

	trainer_connect(t);
	for (int i = 10 * TRAINER_WARM_UP; i < (int)t->crew->repeat; i++) {
		struct sample *s = trainer_sample(t, 0, i);

		sample_begin(s);
		for (unsigned k = 0; k < DEPTH; k++) {
			if (filled)
				trainer_must(t, shardd_wait(t->client, tickets[k], -1, NULL, &err),
					     &err, "wait");
			trainer_must(t,
				     shardd_submit_nop(t->client, SHARDD_OPTIONS(nop), &tickets[k],
						       &err),
				     &err, "submit");
		}
		filled = true;
		sample_end(s);
	}
	for (unsigned k = 0; k < DEPTH; k++)
		trainer_must(t, shardd_wait(t->client, tickets[k], -1, NULL, &err), &err, "wait");
}

int case_submit(struct bench *b, const struct bench_case *c)
{
	struct crew *crew = crew_new(b, 1, 0, 1, bench_repeat(b, c), SMALL_ELEMENTS);
	struct figures f = FIGURES_NULL;
	int r = crew ? crew_run(crew, submit_main) : -1;

	if (r == 0) {
		f.name = c->name;
		f.ranks = 1;
		figures_calls(&f, crew, 0, 0, 1);
		f.p50_us /= DEPTH;
		f.p99_us /= DEPTH;
		f.ran_us = -1;
		figures_report(b, &f);
	}
	crew_free(crew);
	return r;
}
