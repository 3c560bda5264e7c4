/* shardctl drain: all jobs commit, and their trainers leave. */
#include <getopt.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>

#include "core/cleanup.h"
#include "core/clock.h"
#include "ctl/ctl.h"
#include "ctl/format.h"
#include "methods.h"
#include "shardd.pb-c.h"

#define DRAIN_AGAIN_MS 100
#define DRAIN_WAIT_S   60u

struct drain {
	bool wait;
	uint32_t timeout_s;
	uint32_t jobs, ranks; /* that were told to leave; ranks: again, if they have come again */
	bool again;           /* the jobs are counted */
	char last[256];       /* what it waits for, as printed */
};

static int drain_parse(struct drain *d, int argc, char **argv)
{
	static const struct option options[] = {
		{ "wait", no_argument, NULL, 'w' },
		{ "timeout", required_argument, NULL, 't' },
		{ 0 },
	};
	uint64_t number;
	int o;

	while ((o = ctl_getopt(argc, argv, "", options, NULL)) != -1) {
		if (o == 'w') {
			d->wait = true;
			continue;
		}
		if (o != 't')
			return CTL_USAGE;
		if (!format_parse_number(optarg, UINT32_MAX, &number))
			return ctl_usage("--timeout \"%s\" is not a whole number of seconds",
					 optarg);
		d->timeout_s = (uint32_t)number;
		d->wait = true;
	}
	if (optind < argc)
		return ctl_usage("drain takes no argument \"%s\": for one job there is job drain",
				 argv[optind]);
	return CTL_OK;
}

static unsigned drain_present(const Shardd__V1__JobStatus *j)
{
	unsigned n = 0;

	for (size_t i = 0; i < j->n_ranks; i++)
		n += j->ranks[i]->state == SHARDD__V1__RANK_STATE__RANK_STATE_JOINED ||
		     j->ranks[i]->state == SHARDD__V1__RANK_STATE__RANK_STATE_STALE;
	return n;
}

/* Return: CTL_OK also for a job that is gone: its trainers have left meanwhile. */
static int drain_tell(struct ctl *ctl, struct drain *d, const Shardd__V1__JobStatus *j)
{
	Shardd__V1__DrainJobRequest request = SHARDD__V1__DRAIN_JOB_REQUEST__INIT;
	_cleanup_(ctl_messagep) ProtobufCMessage *reply = NULL;
	struct shardd_error err = { 0 };
	char name[CTL_JOB_MAX];

	snprintf(name, sizeof(name), "%u/%.100s", j->uid, j->name);
	request.job = name;
	if (rpc_client_call(ctl->rpc, METHOD_DrainJob, &request.base,
			    &shardd__v1__drain_job_response__descriptor, 10000, &reply, &err) < 0)
		return err.code == SHARDD_NOT_FOUND ? CTL_OK : ctl_error(&err);
	d->jobs += !d->again;
	d->ranks += ((const Shardd__V1__DrainJobResponse *)reply)->ranks;
	return CTL_OK;
}

/* Tells jobs with trainers that do not drain. Adds to @waits who is still there. */
static int drain_look_at(struct ctl *ctl, struct drain *d, const Shardd__V1__JobStatus *j,
			 char *waits, size_t bytes)
{
	unsigned present = drain_present(j);
	char text[CTL_JOB_MAX];
	size_t used = strlen(waits);

	if (!present || j->state == SHARDD__V1__JOB_STATE__JOB_STATE_DELETED)
		return CTL_OK;
	ctl_job_text(j->uid, j->name, text);
	snprintf(waits + used, bytes - used, "%s%s (%u %s, step %llu)", used ? ", " : "", text,
		 present, present == 1 ? "rank" : "ranks", (unsigned long long)j->step);
	if (j->state == SHARDD__V1__JOB_STATE__JOB_STATE_DRAINING)
		return CTL_OK;
	return drain_tell(ctl, d, j);
}

/* @waits: who is still there, "" for nobody. */
static int drain_look(struct ctl *ctl, struct drain *d, char *waits, size_t bytes)
{
	Shardd__V1__GetStatusRequest request = SHARDD__V1__GET_STATUS_REQUEST__INIT;
	_cleanup_(ctl_status_freep) Shardd__V1__GetStatusResponse *s = NULL;
	int r = ctl_get_status(ctl, &request, &s);

	waits[0] = '\0';
	for (size_t i = 0; r == CTL_OK && i < s->n_jobs; i++)
		r = drain_look_at(ctl, d, s->jobs[i], waits, bytes);
	return r;
}

/* What changes is said, on stderr. */
static void drain_say(struct drain *d, const char *waits)
{
	if (strcmp(d->last, waits) == 0)
		return;
	snprintf(d->last, sizeof(d->last), "%s", waits);
	if (*waits)
		fprintf(stderr, "shardctl: waits for %s\n", waits);
}

/* Until nobody is there. */
static int drain_await(struct ctl *ctl, struct drain *d)
{
	uint64_t until = clock_now_us() + d->timeout_s * UINT64_C(1000000);
	char waits[sizeof(d->last)];
	int r = CTL_OK;

	while (*d->last) {
		if (clock_now_us() >= until) {
			fprintf(stderr,
				"shardctl: DEADLINE_EXCEEDED: after %u s there are still %s\n",
				d->timeout_s, d->last);
			return CTL_FAILED;
		}
		poll(NULL, 0, DRAIN_AGAIN_MS);
		d->again = true;
		r = drain_look(ctl, d, waits, sizeof(waits));
		if (r != CTL_OK)
			return r;
		drain_say(d, waits);
	}
	return CTL_OK;
}

/* Jobs without trainers, whose parameters were changed after their last commit. */
static int drain_check_committed(struct ctl *ctl)
{
	Shardd__V1__GetStatusRequest request = SHARDD__V1__GET_STATUS_REQUEST__INIT;
	_cleanup_(ctl_status_freep) Shardd__V1__GetStatusResponse *s = NULL;
	int r = ctl_get_status(ctl, &request, &s);
	char text[CTL_JOB_MAX];
	bool all = true;

	for (size_t i = 0; r == CTL_OK && i < s->n_jobs; i++) {
		if (!s->jobs[i]->uncommitted)
			continue;
		ctl_job_text(s->jobs[i]->uid, s->jobs[i]->name, text);
		fprintf(stderr,
			"shardctl: FAILED_PRECONDITION: job %s has %llu changes after its last "
			"commit (step %llu)\n",
			text, (unsigned long long)s->jobs[i]->uncommitted,
			(unsigned long long)s->jobs[i]->step);
		all = false;
	}
	return r != CTL_OK || all ? r : CTL_FAILED;
}

static int drain_print(struct ctl *ctl, const struct drain *d)
{
	if (ctl->json)
		return ctl_print_json(json_pack("{s:I, s:I, s:b}", "jobs", (json_int_t)d->jobs,
						"ranks", (json_int_t)d->ranks, "left", d->wait));
	printf("%u %s: %u %s told to commit and leave%s\n", d->jobs,
	       d->jobs == 1 ? "job is draining" : "jobs are draining", d->ranks,
	       d->ranks == 1 ? "trainer was" : "trainers were",
	       !d->wait        ? ""
	       : d->ranks == 1 ? ", and has left"
			       : ", and have left");
	return CTL_OK;
}

int ctl_drain(struct ctl *ctl, int argc, char **argv)
{
	struct drain d = { .timeout_s = DRAIN_WAIT_S };
	char waits[sizeof(d.last)];
	int r = drain_parse(&d, argc, argv);

	if (r == CTL_OK)
		r = drain_look(ctl, &d, waits, sizeof(waits));
	if (r == CTL_OK && d.wait) {
		drain_say(&d, waits);
		r = drain_await(ctl, &d);
	}
	if (r == CTL_OK && d.wait)
		r = drain_check_committed(ctl);
	return r == CTL_OK ? drain_print(ctl, &d) : r;
}
