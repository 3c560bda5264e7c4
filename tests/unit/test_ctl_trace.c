/* From records to slices: lanes, phases, what trainers do in between, limits, bad names. */
#include <criterion/criterion.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "core/check.h"
#include "ctl/trace_events.h"
#include "fdcheck.h"

TestSuite(ctl_trace, .timeout = 10, .init = fdcheck_begin, .fini = fdcheck_end);

#define SECOND UINT64_C(1000000)

static const struct trace_limits all;

/* ------------------------------------------------------------------- records */

#define MOST 8

struct records {
	Shardd__V1__OpRecord op[MOST];
	Shardd__V1__DeviceRecord device[MOST];
	Shardd__V1__OpRecord *ops[MOST];
	Shardd__V1__DeviceRecord *devices[MOST];
	Shardd__V1__PublicationRecord publication[16];
	Shardd__V1__PublicationRecord *publications[16];
	Shardd__V1__OpsResponse reply;
};

static void test_ctl_trace_begin(struct records *r, uint64_t now)
{
	shardd__v1__ops_response__init(&r->reply);
	r->reply.ops = r->ops;
	r->reply.devices = r->devices;
	r->reply.publications = r->publications;
	r->reply.now_us = now;
}

/* Times: came, active, began, ended; 0: not yet. */
static Shardd__V1__OpRecord *op(struct records *r, const char *job, uint32_t rank, const char *name,
				const char *unit, const uint64_t times[4])
{
	size_t i = r->reply.n_ops++;
	Shardd__V1__OpRecord *o = r->ops[i] = &r->op[i];

	shardd__v1__op_record__init(o);
	o->id = i + 1;
	o->job = (char *)job;
	o->uid = geteuid(); /* ours: else its name has the user's before it */
	o->rank = rank;
	o->pid = 100 + (int)rank;
	o->op = (char *)name;
	o->unit = (char *)unit;
	o->state = SHARDD__V1__OP_STATE__OP_STATE_DONE;
	o->announced_us = times[0];
	o->active_us = times[1];
	o->started_us = times[2];
	o->finished_us = times[3];
	return o;
}

#define TIMES(...) ((const uint64_t[4]){ __VA_ARGS__ })

/* Times: submitted, began, ended. */
static Shardd__V1__DeviceRecord *device(struct records *r, const char *queue, const char *name,
					const char *unit, const uint64_t times[4])
{
	size_t i = r->reply.n_devices++;
	Shardd__V1__DeviceRecord *d = r->devices[i] = &r->device[i];

	shardd__v1__device_record__init(d);
	d->id = i + 1;
	d->job = "job";
	d->uid = geteuid();
	d->device = "host:0";
	d->queue = (char *)queue;
	d->op = (char *)name;
	d->unit = (char *)unit;
	d->submitted_us = times[0];
	d->began_us = times[1];
	d->ended_us = times[2];
	return d;
}

/* -------------------------------------------------------------------- slices */

static json_t *events_of(const struct records *r, const struct trace_limits *limits, json_t **ret)
{
	json_t *events;

	*ret = trace_events(&r->reply, limits);
	cr_assert_not_null(*ret);
	events = json_object_get(*ret, "traceEvents");
	cr_assert(json_is_array(events));
	return events;
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

/* What the lane of @e is called. */
static const char *lane_of(const json_t *events, const json_t *e)
{
	const json_t *m;
	size_t i;

	json_array_foreach((json_t *)events, i, m)
	{
		if (strcmp(text(m, "ph"), "M") == 0 &&
		    strcmp(text(m, "name"), "thread_name") == 0 &&
		    number(m, "tid") == number(e, "tid") && number(m, "pid") == number(e, "pid"))
			return text(json_object_get(m, "args"), "name");
	}
	cr_assert(false, "a slice in a lane without a name");
	return "";
}

/* Slices as "lane|name|ts+dur", one a line, in the order of the file. */
static void expect_slices(const json_t *events, const char *wanted)
{
	char got[4096] = "", line[512];
	const json_t *e;
	size_t i;

	json_array_foreach((json_t *)events, i, e)
	{
		if (strcmp(text(e, "ph"), "X") != 0)
			continue;
		snprintf(line, sizeof(line), "%s|%s|%lld+%lld\n", lane_of(events, e),
			 text(e, "name"), (long long)number(e, "ts"), (long long)number(e, "dur"));
		strncat(got, line, sizeof(got) - strlen(got) - 1);
	}
	cr_expect_str_eq(got, wanted);
}

Test(ctl_trace, an_op_is_cut_into_what_it_waited_for_and_its_run)
{
	struct records r = { 0 };
	json_t *events, *j;

	test_ctl_trace_begin(&r, 1000);
	op(&r, "job", 0, "Reduce", "a", TIMES(100, 110, 130, 200))->number = 7;
	op(&r, "job", 0, "Gather", "a", TIMES(200, 200, 210, 215));
	op(&r, "job", 0, "Step", "", TIMES(300, 0, 0, 310))->error = "STATE: no";
	op(&r, "job", 0, "Barrier", "", TIMES(400, 420, 0, 0))->state =
		SHARDD__V1__OP_STATE__OP_STATE_WAIT;
	events = events_of(&r, &all, &j);
	expect_slices(events, "rank 0 trainer|trainer|215+85\n"
			      "rank 0 trainer|trainer|310+90\n"
			      "rank 0|Reduce a|100+100\n"
			      "rank 0|deps|100+10\n"
			      "rank 0|peers|110+20\n"
			      "rank 0|run|130+70\n"
			      "rank 0|Gather a|200+15\n"
			      "rank 0|blocked|200+10\n"
			      "rank 0|run|210+5\n"
			      "rank 0|Step|300+10\n"
			      "rank 0|deps|300+10\n"
			      "rank 0|Barrier|400+600\n"
			      "rank 0|deps|400+20\n"
			      "rank 0|blocked|420+580\n");
	json_decref(j);
}

Test(ctl_trace, arguments_say_what_is_known)
{
	struct records r = { 0 };
	json_t *events, *j, *args, *e;
	Shardd__V1__OpRecord *o;
	size_t i, found = 0;

	test_ctl_trace_begin(&r, 1000);
	o = op(&r, "job", 3, "Reduce", "a", TIMES(100, 100, 110, 120));
	o->number = 5;
	o->bytes = 4096;
	o->error = "ABORTED: rank 1 is gone";
	o->state = SHARDD__V1__OP_STATE__OP_STATE_FAILED;
	o->group = "world";
	device(&r, "main", "Reduce", "a", TIMES(100, 105, 0, 0))->bytes = 12;
	events = events_of(&r, &all, &j);
	json_array_foreach(events, i, e)
	{
		args = json_object_get(e, "args");
		if (strcmp(text(e, "name"), "Reduce a") != 0)
			continue;
		found++;
		if (strcmp(text(e, "cat"), "device") == 0) {
			cr_expect_str_eq(text(args, "state"), "RUN");
			cr_expect_eq(number(args, "bytes"), 12);
			cr_expect_str_eq(text(args, "job"), "job");
			continue;
		}
		cr_expect_eq(number(args, "number"), 5);
		cr_expect_eq(number(args, "bytes"), 4096);
		cr_expect_eq(number(args, "pid"), 103);
		cr_expect_str_eq(text(args, "fault"), "ABORTED: rank 1 is gone");
		cr_expect_str_eq(text(args, "state"), "FAILED");
		cr_expect_str_eq(text(args, "group"), "world");
	}
	cr_expect_eq(found, 2);
	json_decref(j);
}

/* Ops of a job that was deleted were those of the next job of its name. */
Test(ctl_trace, jobs_of_one_name_are_processes_of_their_own)
{
	struct records r = { 0 };
	json_t *events, *j, *e;
	unsigned latest = 0, earlier = 0;
	size_t i;

	test_ctl_trace_begin(&r, 1000);
	for (uint32_t n = 1; n <= 3; n++)
		for (uint32_t rank = 0; rank < 2; rank++)
			op(&r, "job", rank, "Reduce", "a",
			   TIMES(100 * n, 100 * n, 100 * n + 10, 100 * n + 20))
				->job_number = n;
	events = events_of(&r, &all, &j);
	json_array_foreach(events, i, e)
	{
		if (strcmp(text(e, "name"), "process_name") != 0)
			continue;
		latest += strcmp(text(json_object_get(e, "args"), "name"), "job job") == 0;
		earlier += strcmp(text(json_object_get(e, "args"), "name"),
				  "job job (an earlier one)") == 0;
	}
	cr_expect_eq(latest, 1);
	cr_expect_eq(earlier, 2);
	json_decref(j);
}

/* Ops in flight lie side by side; what the trainer does goes on beside them. */
Test(ctl_trace, the_trainer_goes_on_while_an_op_is_in_flight)
{
	struct records r = { 0 };
	json_t *events, *j;

	test_ctl_trace_begin(&r, 1000);
	op(&r, "job", 0, "Reduce", "a", TIMES(100, 100, 100, 500));
	op(&r, "job", 0, "Gather", "b", TIMES(110, 110, 110, 120));
	op(&r, "job", 0, "Reduce", "b", TIMES(300, 300, 300, 600));
	op(&r, "job", 0, "Step", "", TIMES(310, 600, 600, 610));
	events = events_of(&r, &all, &j);
	expect_slices(events, "rank 0 trainer|trainer|100+10\n"
			      "rank 0 trainer|trainer|120+180\n"
			      "rank 0 trainer|trainer|300+10\n"
			      "rank 0|Reduce a|100+400\n"
			      "rank 0|run|100+400\n"
			      "rank 0 (2)|Gather b|110+10\n"
			      "rank 0 (2)|run|110+10\n"
			      "rank 0 (2)|Reduce b|300+300\n"
			      "rank 0 (2)|run|300+300\n"
			      "rank 0 (3)|Step|310+300\n"
			      "rank 0 (3)|deps|310+290\n"
			      "rank 0 (3)|run|600+10\n");
	json_decref(j);
}

/* A rank that is another process now did nothing in between. */
Test(ctl_trace, a_restart_is_no_work_of_the_trainer)
{
	struct records r = { 0 };
	json_t *events, *j;

	test_ctl_trace_begin(&r, 1000);
	op(&r, "job", 0, "Gather", "a", TIMES(100, 100, 100, 110));
	op(&r, "job", 0, "Gather", "a", TIMES(500, 500, 500, 510))->pid = 4711;
	events = events_of(&r, &all, &j);
	expect_slices(events, "rank 0|Gather a|100+10\n"
			      "rank 0|run|100+10\n"
			      "rank 0|Gather a|500+10\n"
			      "rank 0|run|500+10\n");
	json_decref(j);
}

/* They were one process of the trace, since they have one name. */
Test(ctl_trace, jobs_of_one_name_and_two_users_are_apart)
{
	struct records r = { 0 };
	json_t *events, *j, *e;
	size_t i, n = 0;

	test_ctl_trace_begin(&r, 1000);
	op(&r, "a", 0, "Gather", "u", TIMES(100, 100, 100, 110));
	op(&r, "a", 0, "Gather", "u", TIMES(100, 100, 100, 110))->uid = 4000000000u;
	events = events_of(&r, &all, &j);
	json_array_foreach(events, i, e)
	{
		const char *name =
			json_string_value(json_object_get(json_object_get(e, "args"), "name"));

		n += name && (strcmp(name, "job a") == 0 || strcmp(name, "job 4000000000/a") == 0);
	}
	cr_expect_eq(n, 2);
	json_decref(j);
}

Test(ctl_trace, jobs_are_processes_and_devices_are_another)
{
	static const char *const processes[] = { "job a", "job b", "shardd" };
	struct records r = { 0 };
	json_t *events, *j, *e;
	size_t i, n = 0;

	test_ctl_trace_begin(&r, 1000);
	op(&r, "b", 1, "Gather", "u", TIMES(100, 100, 100, 110));
	op(&r, "a", 10, "Gather", "u", TIMES(101, 101, 101, 111));
	op(&r, "a", 2, "Gather", "u", TIMES(102, 102, 102, 112));
	device(&r, "gather", "Gather", "u", TIMES(100, 102, 110, 0));
	device(&r, "main", "Reduce", "u", TIMES(103, 0, 120, 0));
	device(&r, "main", "Step", "", TIMES(104, 120, 0, 0));
	events = events_of(&r, &all, &j);
	json_array_foreach(events, i, e)
	{
		if (strcmp(text(e, "name"), "process_name") != 0)
			continue;
		cr_assert_lt(n, ARRAY_SIZE(processes));
		cr_expect_str_eq(text(json_object_get(e, "args"), "name"), processes[n]);
		cr_expect_eq(number(e, "pid"), (json_int_t)++n);
	}
	cr_expect_eq(n, ARRAY_SIZE(processes));
	expect_slices(events, "rank 2|Gather u|102+10\n"
			      "rank 2|run|102+10\n"
			      "rank 10|Gather u|101+10\n"
			      "rank 10|run|101+10\n"
			      "rank 1|Gather u|100+10\n"
			      "rank 1|run|100+10\n"
			      "host:0 main|Reduce u|103+17\n" /* a GPU: it does not tell */
			      "host:0 main (2)|Step|104+896\n"
			      "host:0 main (2)|queue|104+16\n"
			      "host:0 main (2)|run|120+880\n"
			      "host:0 gather|Gather u|100+10\n"
			      "host:0 gather|queue|100+2\n"
			      "host:0 gather|run|102+8\n");
	json_decref(j);
}

Test(ctl_trace, limits_leave_out_what_is_older)
{
	const struct trace_limits one = { .last = 1 }, recent = { .seconds = 4 },
				  long_ago = { .seconds = 1000 };
	struct records r = { 0 };
	json_t *events, *j;

	test_ctl_trace_begin(&r, 10 * SECOND);
	op(&r, "job", 0, "Gather", "a", TIMES(1 * SECOND, 1 * SECOND, 1 * SECOND, 2 * SECOND));
	op(&r, "job", 0, "Gather", "b", TIMES(2 * SECOND, 2 * SECOND, 0, 0));
	r.ops[0] = &r.op[1]; /* what is pending comes first, and stays whatever the limit */
	r.ops[1] = &r.op[0];
	op(&r, "job", 0, "Gather", "c", TIMES(5 * SECOND, 5 * SECOND, 5 * SECOND, 7 * SECOND));
	device(&r, "gather", "Gather", "a", TIMES(1 * SECOND, 0, 1900000, 0));
	device(&r, "gather", "Gather", "c", TIMES(5 * SECOND, 0, 7 * SECOND, 0));
	events = events_of(&r, &one, &j);
	expect_slices(events, "rank 0 trainer|trainer|2000000+3000000\n"
			      "rank 0|Gather b|2000000+8000000\n"
			      "rank 0|blocked|2000000+8000000\n"
			      "rank 0 (2)|Gather c|5000000+2000000\n"
			      "rank 0 (2)|run|5000000+2000000\n"
			      "host:0 gather|Gather c|5000000+2000000\n");
	json_decref(j);
	events = events_of(&r, &recent, &j);
	expect_slices(events, "rank 0 trainer|trainer|2000000+3000000\n"
			      "rank 0|Gather b|2000000+8000000\n"
			      "rank 0|blocked|2000000+8000000\n"
			      "rank 0 (2)|Gather c|5000000+2000000\n"
			      "rank 0 (2)|run|5000000+2000000\n"
			      "host:0 gather|Gather c|5000000+2000000\n");
	json_decref(j);
	(void)events_of(&r, &long_ago, &j);
	json_decref(j);
	cr_expect_eq(r.reply.n_ops, 3, "the reply is as it was");
}

/* What is in names is not what is in the file: quotes, control characters, bytes that are no
 * UTF-8. The text is read again, so that a mistake in it would be seen. */
Test(ctl_trace, names_cannot_break_the_file)
{
	static const char bad[] = "\",\"ph\":\"X\"}\\\n\t\x01\x7f</script>\xff\xc3";
	struct records r = { 0 };
	json_t *events, *j, *again;
	json_error_t error;
	size_t i, found = 0;
	char *dumped;
	json_t *e;

	test_ctl_trace_begin(&r, 1000);
	op(&r, bad, 0, "Gather", bad, TIMES(100, 100, 100, 110))->error = (char *)bad;
	device(&r, bad, "Gather", bad, TIMES(100, 0, 110, 0))->device = (char *)bad;
	(void)events_of(&r, &all, &j);
	dumped = json_dumps(j, JSON_COMPACT);
	cr_assert_not_null(dumped);
	for (const char *c = dumped; *c; c++)
		cr_assert((unsigned char)*c >= 0x20, "a control character in the file");
	again = json_loads(dumped, 0, &error);
	cr_assert(again, "%s", error.text);
	cr_expect(json_equal(j, again));
	events = json_object_get(again, "traceEvents");
	json_array_foreach(events, i, e) found +=
		strcmp(text(e, "name"), "Gather \",\"ph\":\"X\"}\\\n\t\x01\x7f</script>??") == 0;
	cr_expect_eq(found, 2);
	free(dumped);
	json_decref(again);
	json_decref(j);
}

Test(ctl_trace, of_nothing_it_is_a_trace_all_the_same)
{
	struct records r = { 0 };
	json_t *events, *j;

	test_ctl_trace_begin(&r, 1000);
	events = events_of(&r, &all, &j);
	cr_expect_eq(json_array_size(events), 0);
	json_decref(j);
}

/* -------------------------------------------------------------- publications */

#define KIND(name)   SHARDD__V1__PUBLICATION_RECORD_KIND__PUBLICATION_RECORD_KIND_##name
#define SOURCE(name) SHARDD__V1__LEASE_RECORD_SOURCE__LEASE_RECORD_SOURCE_##name

/* Times: began, made, ended; 0: not yet. */
static Shardd__V1__PublicationRecord *published(struct records *r,
						Shardd__V1__PublicationRecordKind kind,
						uint64_t number_or_pid, uint64_t step,
						const uint64_t times[4])
{
	size_t i = r->reply.n_publications++;
	Shardd__V1__PublicationRecord *p = r->publications[i] = &r->publication[i];

	cr_assert_lt(i, ARRAY_SIZE(r->publication));
	shardd__v1__publication_record__init(p);
	p->job = "job";
	p->uid = geteuid();
	p->publication = "engine";
	p->kind = kind;
	p->pid = kind == KIND(READER) ? (int32_t)number_or_pid : 0;
	p->number = kind == KIND(READER) ? 0 : number_or_pid;
	p->step = step;
	p->began_us = times[0];
	p->made_us = times[1];
	p->ended_us = times[2];
	return p;
}

static Shardd__V1__PublicationRecord *lease(struct records *r, int pid, uint64_t generation,
					    const uint64_t times[4])
{
	Shardd__V1__PublicationRecord *p = published(r, KIND(LEASE), generation, generation, times);

	p->pid = pid;
	p->source = SOURCE(BOARD);
	return p;
}

/* A step each 100 us, of which each second one is published; two readers, of which one holds on. */
static void some_publications(struct records *r)
{
	test_ctl_trace_begin(r, 1000);
	for (uint64_t i = 1; i <= 4; i++)
		op(r, "job", 0, "Commit", "", TIMES(100 * i, 100 * i, 100 * i, 100 * i + 5))->step =
			i;
	op(r, "other", 0, "Commit", "", TIMES(100, 100, 100, 190))->step = 77;
	published(r, KIND(GENERATION), 1, 2, TIMES(204, 220, 500));
	published(r, KIND(GENERATION), 2, 4, TIMES(404, 430, 0))->was_used = true;
	published(r, KIND(SKIPPED), 0, 6, TIMES(600, 0, 600))->why = "all buffers are in use";
	published(r, KIND(FAILED), 0, 7, TIMES(700, 0, 700))->why = "no memory";
	published(r, KIND(READER), 31, 2, TIMES(210, 0, 0));
	lease(r, 31, 1, TIMES(230, 0, 440));
	lease(r, 31, 2, TIMES(440, 0, 0));
	lease(r, 32, 2, TIMES(450, 0, 480))->source = SOURCE(CALL);
	lease(r, 32, 2, TIMES(485, 0, 490))->source = SOURCE(BETWEEN_LOOKS);
}

/* Slices, marks and counters of publications, one a line, in the order of the file. */
static void expect_publications(const json_t *events, const char *wanted)
{
	char got[4096] = "", line[512];
	const char *unit;
	const json_t *e;
	json_t *value;
	size_t i;
	json_int_t of = 0; /* its process */

	json_array_foreach((json_t *)events, i, e)
	{
		const char *ph = text(e, "ph");

		if (strcmp(text(e, "name"), "process_name") == 0)
			of = strncmp(text(json_object_get(e, "args"), "name"), "publication", 11)
				     ? 0
				     : number(e, "pid");
		if (number(e, "pid") != of || *ph == 'M')
			continue;
		line[0] = '\0';
		if (*ph == 'X')
			snprintf(line, sizeof(line), "%s|%s|%lld+%lld\n", lane_of(events, e),
				 text(e, "name"), (long long)number(e, "ts"),
				 (long long)number(e, "dur"));
		if (*ph == 'i')
			snprintf(line, sizeof(line), "%s|%lld|%s\n", text(e, "name"),
				 (long long)number(e, "ts"),
				 json_object_get(json_object_get(e, "args"), "why")
					 ? text(json_object_get(e, "args"), "why")
					 : "");
		if (*ph == 'C')
			json_object_foreach(json_object_get(e, "args"), unit, value)
				snprintf(line, sizeof(line), "%s=%lld %s|%lld\n", text(e, "name"),
					 (long long)json_integer_value(value), unit,
					 (long long)number(e, "ts"));
		cr_expect(line[0], "an event of another kind: %s", ph);
		strncat(got, line, sizeof(got) - strlen(got) - 1);
	}
	cr_expect_str_eq(got, wanted);
}

Test(ctl_trace, publications_have_generations_readers_marks_and_counters)
{
	struct records r = { 0 };
	json_t *events, *j;

	some_publications(&r);
	events = events_of(&r, &all, &j);
	expect_publications(events, "made|220|\n"
				    "dropped|500|it made room, and nobody had leased it\n"
				    "made|430|\n"
				    "skipped|600|all buffers are in use\n"
				    "failed|700|no memory\n"
				    "generations|generation 1|204+296\n"
				    "generations|make|204+16\n"
				    "generations (2)|generation 2|404+596\n"
				    "generations (2)|make|404+26\n"
				    "process 31 reader|reader|210+790\n"
				    "process 31 leases|generation 1|230+210\n"
				    "process 31 leases|generation 2|440+560\n"
				    "process 32 leases|generation 2|450+30\n"
				    "process 32 leases|generation 2|485+5\n"
				    "lag=0 steps|220\n"
				    "lag=1 steps|305\n"
				    "lag=2 steps|404\n"
				    "lag=0 steps|430\n"
				    "lag=2 steps|600\n"
				    "lag=3 steps|700\n"
				    "leases=1 leases|230\n"
				    "leases=1 leases|440\n"
				    "leases=2 leases|450\n"
				    "leases=1 leases|480\n"
				    "readers=1 readers|210\n");
	json_decref(j);
}

/* What was over before counts in what is shown. */
Test(ctl_trace, publications_of_the_last_seconds)
{
	const struct trace_limits last = { .seconds = 1 };
	struct records r = { 0 };
	json_t *events, *j;

	some_publications(&r);
	r.reply.now_us = SECOND + 445;
	events = events_of(&r, &last, &j);
	expect_publications(events, "dropped|500|it made room, and nobody had leased it\n"
				    "skipped|600|all buffers are in use\n"
				    "failed|700|no memory\n"
				    "generations|generation 1|204+296\n"
				    "generations|make|204+16\n"
				    "generations (2)|generation 2|404+1000041\n"
				    "generations (2)|make|404+26\n"
				    "process 31 reader|reader|210+1000235\n"
				    "process 31 leases|generation 2|440+1000005\n"
				    "process 32 leases|generation 2|450+30\n"
				    "process 32 leases|generation 2|485+5\n"
				    "lag=0 steps|445\n"
				    "lag=2 steps|600\n"
				    "lag=3 steps|700\n"
				    "leases=1 leases|445\n"
				    "leases=2 leases|450\n"
				    "leases=1 leases|480\n"
				    "readers=1 readers|445\n");
	json_decref(j);
}

/* A publication is one of a job: the same name of another one, or of an earlier job, is a process of its own. */
Test(ctl_trace, publications_are_processes)
{
	struct records r = { 0 };
	json_t *events, *j, *e;
	unsigned n = 0;
	size_t i;

	test_ctl_trace_begin(&r, 1000);
	for (uint32_t k = 0; k < 8; k++) {
		Shardd__V1__PublicationRecord *p =
			published(&r, KIND(GENERATION), k, k, TIMES(100 + k, 101 + k, 200));

		p->job_number = k & 1;
		p->job = k & 2 ? "a" : "b";
		p->publication = k & 4 ? "x" : "y";
	}
	events = events_of(&r, &all, &j);
	json_array_foreach(events, i, e) n += strcmp(text(e, "name"), "process_name") == 0;
	cr_expect_eq(n, 8);
	json_decref(j);
}
