/*
 * shardctl trace: real trainers that compute (sleep) between their ops, and what the file
 * says of them. Nothing here depends on how fast anything is, but for the overlap, which has
 * several chances.
 */
#include <criterion/criterion.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "core/check.h"
#include "trainfix.h"

#define WORDS(...) ((const char *const[]){ __VA_ARGS__, NULL })

enum { WORLD = 2, STEPS = 4, UNITS = 2, SLEEP_MS = 60, ELEMENTS = 4 << 20 };

TestSuite(trace, .timeout = 120, .init = trainfix_begin, .fini = trainfix_end);

/* What a name may have: all that is printable. */
static const char hostile[] = "\"}],\"x\":[{'\\</script>\xc3\xa9";
static const char *const names[UNITS] = { "first", hostile };

/* ------------------------------------------------------------------- trainers */

/* What is computed between gather and reduce. */
static void compute(void)
{
	const struct timespec t = { .tv_nsec = SLEEP_MS * 1000000L };

	nanosleep(&t, NULL);
}

static shardd_ticket submit_reduce(shardd_client *c, shardd_unit u)
{
	shardd_ticket t;

	TRAIN_OK(shardd_submit_reduce(c, SHARDD_OPTIONS(reduce, .unit = u), &t, &train_err));
	return t;
}

/* The backward pass of one unit. Return: the ticket of its reduce; 0: it was waited for. */
static shardd_ticket backward(shardd_client *c, shardd_unit u, bool asynchronous)
{
	shardd_ticket t = 0;
	const void *params;
	void *gradient;

	TRAIN_OK(shardd_gather(c, u, &params, &train_err));
	compute();
	TRAIN_OK(shardd_gradient(c, u, &gradient, &train_err));
	if (asynchronous)
		t = submit_reduce(c, u);
	else
		TRAIN_OK(shardd_reduce(c, u, &train_err));
	TRAIN_OK(shardd_release(c, u, &train_err));
	return t;
}

/* Join, register and initialise both units, train, and count what was asked for. */
static int trainer(const struct trainer *t)
{
	const struct shardd_unit_spec spec = { .optimizer = { .kind = SHARDD_SGD, .lr = 0.1 } };
	bool asynchronous = *(const bool *)t->arg;
	shardd_client *c = train_join(t);
	shardd_ticket tickets[UNITS];
	shardd_unit units[UNITS];

	for (unsigned i = 0; i < UNITS; i++)
		units[i] = train_zero_unit(c, names[i], ELEMENTS, &spec);
	for (unsigned step = 1; step <= STEPS; step++) {
		for (unsigned i = UNITS; i-- > 0;)
			tickets[i] = backward(c, units[i], asynchronous);
		for (unsigned i = 0; i < UNITS; i++)
			if (tickets[i])
				TRAIN_OK(shardd_wait(c, tickets[i], -1, NULL, &train_err));
		TRAIN_OK(shardd_step(c, 0, NULL, &train_err));
		TRAIN_OK(shardd_commit(c, step, NULL, 0, &train_err));
	}
	train_leave(c);
	return 0;
}

/* ------------------------------------------------------------------ the trace */

static json_t *trace_of(const char *const *args, const char *file)
{
	json_error_t error;
	char out[4096];
	json_t *j;
	int code = daemonfix_ctl_text(&trainfix, args, out, sizeof(out));

	cr_assert_eq(code, 0, "%s", out);
	cr_assert_str_eq(out, "", "it says nothing");
	j = json_load_file(file, 0, &error);
	cr_assert(j, "%s", error.text);
	cr_assert_eq(unlink(file), 0);
	return j;
}

/* Run the trainers and take a trace of them. */
static json_t *train(bool asynchronous)
{
	bool *arg = trainer_shared(sizeof(*arg));
	char file[128];

	*arg = asynchronous;
	trainfix_run(WORLD, trainer, arg);
	snprintf(file, sizeof(file), "%s/trace.json", trainfix.dir);
	return trace_of(WORDS("trace", "-o", file), file);
}

static json_int_t number(const json_t *e, const char *key)
{
	cr_assert(json_is_integer(json_object_get(e, key)), "no number %s", key);
	return json_integer_value(json_object_get(e, key));
}

static const char *text(const json_t *e, const char *key)
{
	cr_assert(json_is_string(json_object_get(e, key)), "no text %s", key);
	return json_string_value(json_object_get(e, key));
}

/* One slice as the test needs it. */
struct slice {
	json_int_t pid, tid, ts, end;
	const char *name, *category, *lane;
	json_t *args;
};

struct slices {
	struct slice *at;
	size_t n;
};

static const char *lane_name(json_t *events, json_int_t tid)
{
	json_t *e;
	size_t i;

	json_array_foreach(events, i, e)
	{
		if (strcmp(text(e, "name"), "thread_name") == 0 && number(e, "tid") == tid)
			return text(json_object_get(e, "args"), "name");
	}
	cr_assert(false, "lane %lld has no name", (long long)tid);
	return "";
}

/* By lane and time, the longer first. */
static int compare(const void *a, const void *b)
{
	const struct slice *x = a, *y = b;

	if (x->tid != y->tid)
		return x->tid < y->tid ? -1 : 1;
	if (x->ts != y->ts)
		return x->ts < y->ts ? -1 : 1;
	return x->end > y->end ? -1 : x->end < y->end;
}

/* All slices of @trace; the list is the caller's to free. */
static struct slices slices_of(const json_t *trace)
{
	json_t *events = json_object_get(trace, "traceEvents"), *e;
	struct slices s = { 0 };
	size_t i;

	cr_assert(json_is_array(events));
	s.at = calloc(json_array_size(events) + 1, sizeof(*s.at));
	cr_assert_not_null(s.at);
	json_array_foreach(events, i, e)
	{
		if (strcmp(text(e, "ph"), "M") == 0)
			continue;
		cr_assert_str_eq(text(e, "ph"), "X");
		cr_assert_geq(number(e, "ts"), 0);
		cr_assert_geq(number(e, "dur"), 0);
		s.at[s.n++] = (struct slice){ .pid = number(e, "pid"),
					      .tid = number(e, "tid"),
					      .ts = number(e, "ts"),
					      .end = number(e, "ts") + number(e, "dur"),
					      .name = text(e, "name"),
					      .category = text(e, "cat"),
					      .lane = lane_name(events, number(e, "tid")),
					      .args = json_object_get(e, "args") };
	}
	qsort(s.at, s.n, sizeof(s.at[0]), compare);
	return s;
}

static bool is(const struct slice *s, const char *category)
{
	return strcmp(s->category, category) == 0;
}

/* ------------------------------------------------------------------ structure */

/* In each lane a slice ends before the next begins, or holds it; phases are held. */
static void check_nesting(const struct slices *s)
{
	const struct slice *outer = NULL, *inner = NULL;

	for (size_t i = 0; i < s->n; i++) {
		const struct slice *e = &s->at[i];

		if (is(e, "phase")) {
			cr_assert(outer && outer->tid == e->tid && e->ts >= outer->ts &&
					  e->end <= outer->end,
				  "%s: phase %s is in nothing", e->lane, e->name);
			cr_assert(!inner || inner->end <= e->ts, "%s: phases overlap", e->lane);
			inner = e;
			continue;
		}
		cr_assert(!outer || outer->tid != e->tid || outer->end <= e->ts,
			  "%s: %s overlaps %s", e->lane, outer ? outer->name : "", e->name);
		outer = e;
		inner = NULL;
	}
}

/* Slices of one rank of the job, of @category, called @name. */
static unsigned count(const struct slices *s, const char *category, unsigned rank, const char *name)
{
	char lane[32];
	unsigned n = 0;

	snprintf(lane, sizeof(lane), "rank %u", rank);
	for (size_t i = 0; i < s->n; i++)
		n += is(&s->at[i], category) && strcmp(s->at[i].name, name) == 0 &&
		     strncmp(s->at[i].lane, lane, strlen(lane)) == 0;
	return n;
}

/* What the trainer asked for, each once: its ops are numbered from 1 on. */
static void check_rank(const struct slices *s, unsigned rank)
{
	enum { PER_UNIT = 4, OPS = UNITS + STEPS * (UNITS * PER_UNIT + 2) };
	static const char *const ops[PER_UNIT] = { "Gather", "GradientBuffer", "Reduce",
						   "Release" };
	unsigned seen[OPS + 1] = { 0 };
	char name[128], lane[32];

	for (unsigned u = 0; u < UNITS; u++) {
		for (unsigned k = 0; k < PER_UNIT; k++) {
			snprintf(name, sizeof(name), "%s %s", ops[k], names[u]);
			cr_expect_eq(count(s, "op", rank, name), STEPS, "rank %u: %s", rank, name);
		}
	}
	cr_expect_eq(count(s, "op", rank, "Step"), STEPS);
	cr_expect_eq(count(s, "op", rank, "Commit"), STEPS);
	snprintf(lane, sizeof(lane), "rank %u", rank);
	for (size_t i = 0; i < s->n; i++) {
		const struct slice *e = &s->at[i];

		if (!is(e, "op") || strncmp(e->lane, lane, strlen(lane)) != 0)
			continue;
		cr_assert_leq(number(e->args, "seq"), OPS);
		seen[number(e->args, "seq")]++;
		cr_expect_str_eq(text(e->args, "state"), "DONE");
	}
	for (unsigned i = 1; i <= OPS; i++)
		cr_expect_eq(seen[i], 1, "rank %u: op %u is there %u times", rank, i, seen[i]);
}

/* Does the lane of @e belong to @queue of the device that @of's does? */
static bool is_on(const struct slice *e, const struct slice *of, const char *queue)
{
	size_t device = strcspn(of->lane, " ") + 1;

	return strncmp(e->lane, of->lane, device) == 0 &&
	       strncmp(e->lane + device, queue, strlen(queue)) == 0;
}

/* Slices of the device of @of. */
static unsigned count_device(const struct slices *s, const struct slice *of, const char *name)
{
	unsigned n = 0;

	for (size_t i = 0; i < s->n; i++)
		n += is(&s->at[i], "device") && is_on(&s->at[i], of, "main") &&
		     strcmp(s->at[i].name, name) == 0;
	return n;
}

/* On each device that has any: one for all ranks each, in the lanes of their queue. */
static void check_device(const struct slices *s, const struct slice *of)
{
	char name[128];

	for (unsigned u = 0; u < UNITS; u++) {
		snprintf(name, sizeof(name), "Reduce %s", names[u]);
		cr_expect_eq(count_device(s, of, name), STEPS, "%s: %s", of->lane, name);
	}
	cr_expect_eq(count_device(s, of, "Step"), STEPS, "%s", of->lane);
}

static void check_devices(const struct slices *s)
{
	bool first = false;

	for (size_t i = 0; i < s->n; i++) {
		const struct slice *e = &s->at[i];

		if (!is(e, "device"))
			continue;
		first = first ||
			strncmp(e->lane, daemonfix_device(), strlen(daemonfix_device())) == 0;
		check_device(s, e);
		cr_expect(is_on(e, e, strncmp(e->name, "Gather", 6) ? "main" : "gather"),
			  "%s is in %s", e->name, e->lane);
		cr_expect_str_eq(text(e->args, "state"), "DONE");
		/* on a GPU there may be two, which add their sums */
		if (train_on_host() && strncmp(e->name, "Reduce", 6) == 0)
			cr_expect_eq(number(e->args, "bytes"),
				     (WORLD + 1) * (json_int_t)(ELEMENTS * sizeof(float)));
	}
	cr_expect(first, "nothing ran on %s", daemonfix_device());
}

/* -------------------------------------------------------------------- overlap */

/* The sleeps, which nothing else can be as long as on purpose. */
static bool is_gap(const struct slice *e)
{
	return is(e, "trainer") && e->end - e->ts >= SLEEP_MS * 1000;
}

/* Reduces on the device that a gap of rank @rank overlaps in time. */
static unsigned overlaps(const struct slices *s, unsigned rank)
{
	char lane[32];
	unsigned n = 0;

	snprintf(lane, sizeof(lane), "rank %u trainer", rank);
	for (size_t i = 0; i < s->n; i++) {
		const struct slice *r = &s->at[i];

		if (!is(r, "device") || strncmp(r->name, "Reduce", 6) != 0)
			continue;
		for (size_t k = 0; k < s->n; k++) {
			const struct slice *gap = &s->at[k];

			if (is_gap(gap) && strcmp(gap->lane, lane) == 0 && gap->ts < r->end &&
			    r->ts < gap->end) {
				n++;
				break;
			}
		}
	}
	return n;
}

static unsigned gaps(const struct slices *s, unsigned rank)
{
	char lane[32];
	unsigned n = 0;

	snprintf(lane, sizeof(lane), "rank %u trainer", rank);
	for (size_t i = 0; i < s->n; i++)
		n += is_gap(&s->at[i]) && strcmp(s->at[i].lane, lane) == 0;
	return n;
}

Test(trace, shows_every_op_and_what_devices_did)
{
	json_t *j = train(true);
	struct slices s = slices_of(j);

	check_nesting(&s);
	for (unsigned rank = 0; rank < WORLD; rank++) {
		check_rank(&s, rank);
		cr_expect_geq(gaps(&s, rank), STEPS * UNITS, "each sleep is a gap");
	}
	check_devices(&s);
	free(s.at);
	json_decref(j);
}

/* The reduce of one unit runs while the trainers compute the next. */
Test(trace, shows_that_a_reduce_overlaps_the_next_computation)
{
	json_t *j = train(true);
	struct slices s = slices_of(j);

	for (unsigned rank = 0; rank < WORLD; rank++)
		cr_expect_geq(overlaps(&s, rank), 1, "rank %u", rank);
	free(s.at);
	json_decref(j);
}

/* A rank that waits for the reduce computes nothing: the trace must not show computing. */
Test(trace, shows_none_where_the_trainers_wait)
{
	json_t *j = train(false);
	struct slices s = slices_of(j);

	for (unsigned rank = 0; rank < WORLD; rank++) {
		cr_expect_eq(overlaps(&s, rank), 0, "rank %u", rank);
		cr_expect_geq(gaps(&s, rank), STEPS * UNITS);
	}
	free(s.at);
	json_decref(j);
}

/* --------------------------------------------------------------- publications */

/* Two buffers: with the first generation leased, the third is skipped, and the fourth takes its place. */
static int publishes(const struct trainer *t)
{
	const struct shardd_unit_spec spec = { .optimizer = { .kind = SHARDD_SGD, .lr = 0.1 } };
	shardd_client *c = train_connect(t), *reader = train_connect(t);
	struct shardd_generation g;
	shardd_live *l = NULL;
	shardd_unit u;
	void *gradient;

	train_join_as(c, t, SHARDD_KEEP);
	u = train_zero_unit(c, "unit", ELEMENTS, &spec);
	TRAIN_OK(shardd_publication_declare(c, "published",
					    "{\"name\": \"engine\", \"buffers\": 2, "
					    "\"when_full\": \"skip\"}",
					    NULL, &train_err));
	for (unsigned step = 1; step <= 4; step++) {
		TRAIN_OK(shardd_gradient(c, u, &gradient, &train_err));
		TRAIN_OK(shardd_reduce(c, u, &train_err));
		TRAIN_OK(shardd_step(c, 0, NULL, &train_err));
		TRAIN_OK(shardd_commit(c, step, NULL, 0, &train_err));
		if (step == 4)
			shardd_live_close(l);
		TRAINER_CHECK((shardd_publication_publish(c, "published", "engine", 0, NULL,
							  &train_err) == SHARDD_OK) == (step != 3));
		if (step > 1)
			continue;
		TRAIN_OK(shardd_live_open(reader, "published", "engine", 0, &l, &train_err));
		TRAIN_OK(shardd_live_acquire(l, 0, &g, &train_err));
	}
	shardd_close(reader);
	train_leave(c);
	return 0;
}

/* Events called @name that are of kind @ph, of the publication's process. */
static unsigned count_events(json_t *trace, const char *ph, const char *name)
{
	json_t *e;
	json_int_t of = -1;
	unsigned n = 0;
	size_t i;

	json_array_foreach(json_object_get(trace, "traceEvents"), i, e)
	{
		const char *process = strcmp(text(e, "name"), "process_name")
					      ? NULL
					      : text(json_object_get(e, "args"), "name");

		if (process)
			of = strcmp(process, "publication engine of job published")
				     ? -1
				     : number(e, "pid");
		n += number(e, "pid") == of && strcmp(text(e, "ph"), ph) == 0 &&
		     strcmp(text(e, "name"), name) == 0;
	}
	return n;
}

/* What comes of calls and of the reader's hold, which the daemon sees by itself. */
Test(trace, shows_generations_readers_and_leases)
{
	char out[8192];
	json_t *j;

	trainers_run(&trainfix, "published", 1, publishes, NULL, 60);
	j = daemonfix_ctl(&trainfix, WORDS("trace", "published", "-o", "-"));
	cr_expect_eq(count_events(j, "i", "made"), 3);
	cr_expect_eq(count_events(j, "i", "skipped"), 1);
	cr_expect_eq(count_events(j, "i", "failed"), 0);
	cr_expect_eq(count_events(j, "i", "dropped"), 0, "the first one was leased");
	cr_expect_eq(count_events(j, "X", "generation 1"), 2, "it was there, and was leased");
	cr_expect_eq(count_events(j, "X", "generation 2"), 1);
	cr_expect_eq(count_events(j, "X", "generation 3"), 1);
	cr_expect_eq(count_events(j, "X", "make"), 3);
	cr_expect_eq(count_events(j, "X", "reader"), 1);
	cr_expect_geq(count_events(j, "C", "lag"), 3);
	cr_expect_geq(count_events(j, "C", "leases"), 2);
	cr_expect_geq(count_events(j, "C", "readers"), 2);
	json_decref(j);
	j = daemonfix_ctl(&trainfix, WORDS("trace", "--all", "-o", "-", "--seconds", "1000"));
	cr_expect_eq(count_events(j, "i", "made"), 3);
	json_decref(j);
	cr_expect_eq(daemonfix_ctl_text(&trainfix, WORDS("job", "delete", "published"), out,
					sizeof(out)),
		     0, "%s", out);
	j = daemonfix_ctl(&trainfix, WORDS("trace", "--all", "-o", "-"));
	cr_expect_eq(count_events(j, "i", "made"), 3, "its job is gone");
	json_decref(j);
}

/* ------------------------------------------------------------------ arguments */

static size_t count_ops(const json_t *trace)
{
	struct slices s = slices_of(trace);
	size_t n = 0;

	for (size_t i = 0; i < s.n; i++)
		n += is(&s.at[i], "op");
	free(s.at);
	return n;
}

static int one_rank(const struct trainer *t)
{
	shardd_client *c = train_connect(t);
	shardd_unit u;

	train_join_as(c, t, SHARDD_KEEP);
	u = train_zero_unit(c, "unit", 1000, NULL);
	for (unsigned i = 0; i < 10; i++)
		train_params(c, u, NULL, 0);
	train_leave(c);
	return 0;
}

/* The names of processes of the trace, in their order. */
static void expect_processes(const json_t *trace, const char *const *expected)
{
	json_t *e;
	size_t i;

	json_array_foreach(json_object_get(trace, "traceEvents"), i, e)
	{
		const char *name;

		if (strcmp(json_string_value(json_object_get(e, "name")), "process_name") != 0)
			continue;
		name = json_string_value(json_object_get(json_object_get(e, "args"), "name"));
		cr_assert(*expected, "one process too many: %s", name);
		cr_expect_str_eq(name, *expected++);
	}
	cr_expect_null(*expected);
}

Test(trace, of_some_jobs_or_the_last_ops)
{
	char out[65536];
	json_t *j;

	trainers_run(&trainfix, "one", 1, one_rank, NULL, 60);
	trainers_run(&trainfix, "other", 1, one_rank, NULL, 60);
	j = daemonfix_ctl(&trainfix, WORDS("trace", "-o", "-"));
	cr_expect_eq(count_ops(j), 2 * (1 + 2 * 10));
	json_decref(j);
	j = daemonfix_ctl(&trainfix, WORDS("trace", "one", "-o", "-"));
	cr_expect_eq(count_ops(j), 1 + 2 * 10);
	json_decref(j);
	trainers_run(&trainfix, "third", 1, one_rank, NULL, 60);
	j = daemonfix_ctl(&trainfix, WORDS("trace", "one", "third", "-o", "-"));
	cr_expect_eq(count_ops(j), 2 * (1 + 2 * 10));
	expect_processes(j, WORDS("job one", "job third", "shardd"));
	json_decref(j);
	j = daemonfix_ctl(&trainfix, WORDS("trace", "one", "third", "-o", "-", "--last", "3"));
	expect_processes(j, WORDS("job third"));
	json_decref(j);
	j = daemonfix_ctl(&trainfix, WORDS("trace", "--all", "-o", "-"));
	cr_expect_eq(count_ops(j), 3 * (1 + 2 * 10));
	json_decref(j);
	cr_expect_eq(daemonfix_ctl_text(&trainfix, WORDS("job", "delete", "third"), out,
					sizeof(out)),
		     0, "%s", out);
	j = daemonfix_ctl(&trainfix, WORDS("trace", "-o", "-", "other", "--last", "5"));
	cr_expect_eq(count_ops(j), 5);
	json_decref(j);
	j = daemonfix_ctl(&trainfix, WORDS("trace", "-o", "-", "--seconds", "1000"));
	cr_expect_eq(count_ops(j), 3 * (1 + 2 * 10)); /* also of one that is deleted */
	json_decref(j);
	cr_expect_eq(daemonfix_ctl_text(&trainfix, WORDS("job", "delete", "one"), out, sizeof(out)),
		     0, "%s", out);
	cr_expect_eq(daemonfix_ctl_text(&trainfix, WORDS("job", "delete", "other"), out,
					sizeof(out)),
		     0, "%s", out);
}

Test(trace, refuses_what_it_cannot_do)
{
	static const struct {
		const char *args[8];
		int code;
		const char *words;
	} rows[] = {
		{ { "trace" }, 2, "-o" },
		{ { "trace", "-o", "-", "nobody", "none" }, 1, "NOT_FOUND" },
		{ { "trace", "-o", "-", "a", "--all" }, 2, "not both" },
		{ { "trace", "-o", "-", "--last", "few" }, 2, "few" },
		{ { "trace", "-o", "-", "--seconds", "0" }, 2, "\"0\"" },
		{ { "trace", "-o", "-", "nobody" }, 1, "NOT_FOUND" },
		{ { "trace", "-o", "/nonexistent/t" },
		  2,
		  "cannot write the file \"/nonexistent/t\"" },
		{ { "trace", "-o", "/" }, 2, "Is a directory" },
		{ { "trace", "-o", "/dev/full" }, 1, "No space left" },
	};
	char out[8192];

	for (size_t i = 0; i < ARRAY_SIZE(rows); i++) {
		int code = daemonfix_ctl_text(&trainfix, rows[i].args, out, sizeof(out));

		cr_expect_eq(code, rows[i].code, "row %zu: exit code %d: %s", i, code, out);
		cr_expect(strstr(out, rows[i].words), "row %zu: no '%s' in: %s", i, rows[i].words,
			  out);
	}
}
