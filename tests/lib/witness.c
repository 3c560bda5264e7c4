#include "witness.h"

#include <criterion/criterion.h>
#include <string.h>

#include "core/clock.h"
#include "daemonwatch.h"

#define MOST_ARGS 16

/* Nothing comes and goes by itself: who makes pages ahead opens files of /proc for a moment. */
void witness_begin(struct witness *w, const char *const *args)
{
	const char *with[MOST_ARGS + 3] = { "--set", "prefault=no" };
	size_t n = 2;

	for (; args && *args; args++) {
		cr_assert(n < MOST_ARGS + 2);
		with[n++] = *args;
	}
	daemonfix_start(&w->d, with);
	w->fds = daemonfix_fds(&w->d);
	w->bytes = daemonfix_bytes(&w->d);
}

void witness_serves(struct witness *w, unsigned seconds)
{
	static const char *const health[] = { "health", NULL };
	uint64_t deadline = clock_now_us() + seconds * 1000000ull;
	char out[512];

	while (daemonfix_ctl_text(&w->d, health, out, sizeof(out)) != 0) {
		daemonwatch_look();
		cr_assert(clock_now_us() < deadline, "%s", out);
	}
}

void witness_end(struct witness *w)
{
	/* Connections that the test has closed may still wait to be accepted, and count until then. */
	witness_serves(w, 30);
	daemonfix_settles(&w->d, w->fds, w->bytes);
	daemonfix_stop(&w->d);
}

/* A job whose trainers went without leaving stays for those that come back. */
static void delete_job(struct witness *w, const char *job)
{
	const char *const args[] = { "job", "delete", "--force", job, NULL };
	char out[512];
	int code = daemonfix_ctl_text(&w->d, args, out, sizeof(out));

	cr_assert(code == 0 || strstr(out, "there is no job"), "%s", out);
}

void witness_trainer(const char *const *args, const char *job, trainer_fn fn, unsigned seconds)
{
	struct witness w;

	witness_begin(&w, args);
	cr_assert_eq(trainer_wait(trainer_start(&w.d, job, 0, 1, fn, NULL), seconds), 0);
	daemonfix_check_alive(&w.d);
	delete_job(&w, job);
	witness_end(&w);
}
