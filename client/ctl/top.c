/*
 * shardctl top: what jobs and ranks do, again and again. On a terminal until a key ends it, or as
 * text (-b).
 */
#include <errno.h>
#include <getopt.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "core/check.h"
#include "core/cleanup.h"
#include "core/clock.h"
#include "ctl/ctl.h"
#include "ctl/format.h"
#include "ctl/top_frame.h"
#include "ctl/top_sample.h"
#include "ctl/top_screen.h"

#define DEFAULT_MS 2000u
#define FIRST_MS   500u /* from the first sample to the second, which has rates */
#define MIN_MS     100u
#define MAX_MS     3600000u
#define SLICE_MS   20 /* keys are looked for so often while calls are under way */

struct top {
	struct ctl *ctl;
	struct top_look look;
	char name[CTL_JOB_MAX];
	char *job; /* only this one; NULL: all */
	uint32_t delay_ms;
	uint64_t frames; /* to print; 0: no end */
	bool batch;

	struct top_ask ask;
	struct top_sample last; /* the newest one; none before the first */
	uint64_t samples;
	uint64_t next_us;        /* when to ask again */
	uint64_t lost_us;        /* since when the daemon does not answer; 0: it does */
	struct shardd_error err; /* of the last sample, if it has failed */
};

static volatile sig_atomic_t top_stopped;

/* ------------------------------------------------------------------- arguments */

static int top_parse_delay(struct top *t, const char *text)
{
	char *end;
	double s = strtod(text, &end);

	if (end == text || *end || !(s * 1000 >= MIN_MS && s * 1000 <= MAX_MS))
		return ctl_usage("-d \"%s\" is not a number of seconds from 0.1 to 3600", text);
	t->delay_ms = (uint32_t)(s * 1000 + 0.5);
	return CTL_OK;
}

static int top_parse_sort(struct top *t, const char *text)
{
	for (unsigned i = 0; top_frame_sort_name(i); i++) {
		if (strcmp(text, top_frame_sort_name(i)) != 0)
			continue;
		t->look.sort = (enum top_sort)i;
		return CTL_OK;
	}
	return ctl_usage("-s \"%s\" is not name, state, step, rate, wait or memory", text);
}

static int top_parse_option(struct top *t, int o)
{
	switch (o) {
	case 'd':
		return top_parse_delay(t, optarg);
	case 's':
		return top_parse_sort(t, optarg);
	case 'b':
		t->batch = true;
		return CTL_OK;
	case 'n':
		if (format_parse_number(optarg, UINT32_MAX, &t->frames) && t->frames)
			return CTL_OK;
		return ctl_usage("-n \"%s\" is not a whole number from 1 to %u", optarg,
				 UINT32_MAX);
	default:
		return CTL_USAGE;
	}
}

static int top_parse(struct top *t, int argc, char **argv)
{
	static const struct option none[] = { { 0 } };
	int o, r = CTL_OK;

	while (r == CTL_OK && (o = ctl_getopt(argc, argv, "bd:n:s:", none, NULL)) != -1)
		r = top_parse_option(t, o);
	if (r != CTL_OK)
		return r;
	if (argc - optind > 1)
		return ctl_usage("top takes the name of one job");
	if (argc - optind == 1)
		r = ctl_job_name(argv[optind], t->name, &t->job);
	if (r == CTL_OK && t->ctl->json)
		return ctl_usage("top prints no JSON: status and ops do");
	if (r == CTL_OK && !t->batch && !(isatty(STDIN_FILENO) && isatty(STDOUT_FILENO)))
		return ctl_usage("top needs a terminal; with -b it prints text");
	return r;
}

/* --------------------------------------------------------------------- samples */

static bool top_is_unreachable(int code)
{
	return code == SHARDD_UNAVAILABLE || code == SHARDD_DEADLINE_EXCEEDED;
}

/* The daemon has ended, or the next one has its place: the next sample needs a new connection. */
static void top_disconnect(struct top *t)
{
	top_ask_deinit(&t->ask);
	rpc_client_close(t->ctl->rpc);
	t->ctl->rpc = NULL;
}

/* What is in the way, as a line of the frame. */
static void top_note_trouble(struct top *t, uint64_t now)
{
	if (!t->err.code)
		*t->look.trouble = '\0';
	else if (t->lost_us)
		snprintf(t->look.trouble, sizeof(t->look.trouble),
			 "NO ANSWER from the daemon for %s (asks again): %s",
			 format_seconds((now - t->lost_us) / 1000000).text, t->err.text);
	else
		snprintf(t->look.trouble, sizeof(t->look.trouble), "%s: %s",
			 shardd_code_name(t->err.code), t->err.text);
}

static void top_failed(struct top *t)
{
	uint64_t now = clock_now_us();

	top_disconnect(t);
	if (top_is_unreachable(t->err.code) && !t->lost_us)
		t->lost_us = t->last.at_us ? t->last.at_us : now;
	else if (!top_is_unreachable(t->err.code))
		t->lost_us = 0;
	/* what was last known is no longer so */
	top_sample_deinit(&t->last);
	top_note_trouble(t, now);
}

static void top_begin(struct top *t)
{
	uint64_t now = clock_now_us();
	bool first = t->samples == 0 && !t->batch;

	t->err = (struct shardd_error){ 0 };
	t->next_us = now + (first ? FIRST_MS : t->delay_ms) * 1000ull;
	if (!t->ctl->rpc && rpc_client_connect(t->ctl->socket, 0, &t->ctl->rpc, &t->err) < 0)
		top_failed(t);
	else if (top_ask_begin(t->ctl->rpc, t->job, &t->ask, &t->err) < 0)
		top_failed(t);
}

/* All answers are there. */
static void top_take(struct top *t)
{
	struct top_sample s;

	if (top_ask_take(&t->ask, &t->last, t->delay_ms * 1000ull, &s, &t->err) < 0) {
		top_failed(t);
		return;
	}
	top_ask_deinit(&t->ask);
	top_sample_deinit(&t->last);
	t->last = s;
	t->samples++;
	t->lost_us = 0;
	top_note_trouble(t, 0);
	top_frame_arrange(&t->last, &t->look);
}

/* Without keys. Return: false if a signal came first. */
static bool top_await(struct top *t)
{
	while (top_ask_is_open(&t->ask) && !top_stopped && !top_ask_wait(&t->ask, SLICE_MS * 10))
		;
	if (top_ask_is_open(&t->ask) && top_stopped)
		return false;
	if (top_ask_is_open(&t->ask))
		top_take(t);
	return true;
}

/* ------------------------------------------------------------------------ text */

static int top_print(struct top *t)
{
	struct top_frame f;
	int r = top_frame_make(&t->last, &t->look, &f);

	for (size_t i = 0; r == 0 && i < f.n; i++)
		puts(f.all[i].text);
	top_frame_deinit(&f);
	return r == 0 && fflush(stdout) == 0 ? CTL_OK : ctl_broken();
}

static void top_sleep_until(uint64_t us)
{
	uint64_t now = clock_now_us();
	struct timespec left = { 0 };

	if (us <= now)
		return;
	left.tv_sec = (time_t)((us - now) / 1000000);
	left.tv_nsec = (long)((us - now) % 1000000 * 1000);
	nanosleep(&left, NULL); /* shorter with a signal, which ends it */
}

/* The first sample is not printed: only the second one has rates. */
static int top_run_batch(struct top *t)
{
	int r = CTL_OK;

	t->look.columns = t->ctl->width;
	t->look.all = true;
	for (uint64_t i = 0; r == CTL_OK && !top_stopped && (!t->frames || i <= t->frames); i++) {
		top_begin(t);
		if (!top_await(t))
			break;
		if (i == 0 && t->err.code)
			return ctl_error(&t->err);
		if (i > 1)
			putchar('\n');
		if (i > 0)
			r = top_print(t);
		if (i != t->frames || !t->frames)
			top_sleep_until(t->next_us);
	}
	if (r == CTL_OK && t->err.code)
		r = top_is_unreachable(t->err.code) ? CTL_UNREACHABLE : CTL_FAILED;
	return r;
}

/* -------------------------------------------------------------------- terminal */

static int top_draw(struct top *t)
{
	struct top_frame f;
	int r;

	top_screen_size(&t->look.columns, &t->look.lines);
	r = top_frame_make(&t->last, &t->look, &f);
	if (r == 0)
		top_screen_draw(&f);
	top_frame_deinit(&f);
	return r;
}

static void top_page(struct top *t, bool down)
{
	size_t page = t->look.lines > 8 ? t->look.lines / 2 - 2 : 2, n = 0;

	if (t->last.n_jobs)
		n = t->last.jobs[t->look.chosen].status->n_ranks;
	if (!down)
		t->look.first_rank -= t->look.first_rank < page ? t->look.first_rank : page;
	else if (t->look.first_rank + page < n)
		t->look.first_rank += page;
}

static bool top_key_sort(struct top *t, int key)
{
	static const char keys[] = "natrwm"; /* in the order of enum top_sort */
	const char *at = key > 0 && key < 128 ? strchr(keys, key) : NULL;

	if (!at)
		return false;
	t->look.sort = (enum top_sort)(at - keys);
	top_frame_arrange(&t->last, &t->look);
	return true;
}

/* Return: false to end. */
static bool top_key(struct top *t, int key)
{
	switch (key) {
	case 'q':
	case -EIO:
		return false;
	case TOP_KEY_UP:
	case 'k':
		top_frame_choose(&t->last, &t->look, -1);
		return true;
	case TOP_KEY_DOWN:
	case 'j':
		top_frame_choose(&t->last, &t->look, 1);
		return true;
	case TOP_KEY_PAGE_UP:
	case TOP_KEY_PAGE_DOWN:
		top_page(t, key == TOP_KEY_PAGE_DOWN);
		return true;
	case 'h':
	case '?':
		t->look.help = !t->look.help;
		return true;
	case ' ':
		t->next_us = 0;
		return true;
	default:
		top_key_sort(t, key);
		return true;
	}
}

/* Ask if it is time, wait for answers or for keys. Return: 1: something is new, 0: not. */
static int top_turn(struct top *t, int *key)
{
	uint64_t now = clock_now_us();
	uint64_t left = t->next_us > now ? (t->next_us - now) / 1000 + 1 : 0;

	if (top_ask_is_open(&t->ask)) {
		*key = top_screen_key(0);
		if (*key == TOP_KEY_NONE && top_ask_wait(&t->ask, SLICE_MS)) {
			top_take(t);
			return 1;
		}
		return 0;
	}
	if (!left) {
		top_begin(t);
		return t->err.code != 0;
	}
	*key = top_screen_key(left < 1000 ? (int)left : 1000);
	if (!t->lost_us)
		return 0;
	top_note_trouble(t, clock_now_us()); /* for how long */
	return 1;
}

static int top_run_screen(struct top *t)
{
	bool going = true;
	int r = 0;

	while (r == 0 && going && !top_stopped && (!t->frames || t->samples < t->frames)) {
		int key = TOP_KEY_NONE, news = top_turn(t, &key);

		if (t->err.code && !t->samples && !t->lost_us)
			break; /* the first one was refused */
		if (key != TOP_KEY_NONE)
			going = top_key(t, key);
		if (going && (news || key != TOP_KEY_NONE))
			r = top_draw(t);
	}
	top_screen_close();
	if (r < 0)
		return ctl_broken();
	return t->err.code && !t->samples ? ctl_error(&t->err) : CTL_OK;
}

/* ----------------------------------------------------------------------------- */

static void top_on_signal(int sig)
{
	(void)sig;
	top_stopped = 1;
}

/* The terminal gets its state back before the end. */
static void top_catch_signals(void)
{
	static const int signals[] = { SIGINT, SIGTERM, SIGHUP };
	struct sigaction stop = { .sa_handler = top_on_signal }, before;

	for (size_t i = 0; i < ARRAY_SIZE(signals); i++)
		if (sigaction(signals[i], NULL, &before) == 0 && before.sa_handler != SIG_IGN)
			sigaction(signals[i], &stop, NULL);
}

/* The first sample comes before the terminal is taken over: its error is printed as that of any
 * verb. */
static int top_run(struct top *t)
{
	if (t->batch)
		return top_run_batch(t);
	top_begin(t);
	if (!top_await(t))
		return CTL_OK;
	if (t->err.code)
		return ctl_error(&t->err);
	if (top_screen_open(t->ctl->color) < 0)
		return ctl_usage("%s%s is no terminal that top can use; with -b it prints text",
				 getenv("TERM") ? "TERM=" : "TERM is not set: this",
				 getenv("TERM") ? getenv("TERM") : "");
	if (top_draw(t) < 0) {
		top_screen_close();
		return ctl_broken();
	}
	return top_run_screen(t);
}

int ctl_top(struct ctl *ctl, int argc, char **argv)
{
	struct top t = { .ctl = ctl, .delay_ms = DEFAULT_MS, .look = { .socket = ctl->socket } };
	int r = top_parse(&t, argc, argv);

	if (r != CTL_OK)
		return r;
	top_catch_signals();
	r = top_run(&t);
	top_ask_deinit(&t.ask);
	top_sample_deinit(&t.last);
	return r;
}
