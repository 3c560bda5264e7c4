/* shardctl events: what has happened to jobs, and, with -f, what happens. */
#include <getopt.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "core/check.h"
#include "core/cleanup.h"
#include "ctl/ctl.h"
#include "ctl/format.h"
#include "json/json.h"

#define METHOD_EVENTS  "/shardd.v1.StatusService/Events"
#define EVENTS_LIMIT   20u
#define EVENTS_WAIT_MS 5000u /* below the time limit of a call */
#define EVENTS_USERS   64u

struct events_ask {
	char *job; /* as given to the daemon; "": all */
	uint64_t number;
	bool follows, commits;
};

/* The number of each user's newest event that was seen. */
struct events_seen {
	struct {
		uint32_t uid;
		uint64_t nth;
	} users[EVENTS_USERS];
	size_t n;
};

/* Events of @e's owner between the last one that was seen and @e. */
static uint64_t events_lost(struct events_seen *s, const Shardd__V1__Event *e)
{
	uint64_t lost;
	size_t i = 0;

	while (i < s->n && s->users[i].uid != e->uid)
		i++;
	if (i == s->n) {
		if (s->n < EVENTS_USERS)
			s->n++;
		else
			i = 0; /* of so many users one is forgotten */
		s->users[i].uid = e->uid;
		s->users[i].nth = e->nth;
		return 0;
	}
	lost = e->nth > s->users[i].nth + 1 ? e->nth - s->users[i].nth - 1 : 0;
	s->users[i].nth = e->nth;
	return lost;
}

/* One line, or on a narrow terminal several. The text may have a path in it, which its user has chosen: what would
 * control a terminal is replaced. */
static int events_print_line(struct ctl *ctl, const Shardd__V1__Event *e)
{
	const char *kind = json_state(&shardd__v1__event_kind__descriptor, e->kind);
	time_t at = (time_t)(e->unix_ms / 1000);
	char when[32] = "-", job[CTL_JOB_MAX], who[48] = "";
	struct tm tm;

	if (localtime_r(&at, &tm))
		strftime(when, sizeof(when), "%Y-%m-%d %H:%M:%S", &tm);
	ctl_job_text(e->uid, e->job, job);
	if (e->rank >= 0)
		snprintf(who, sizeof(who), " rank %d", e->rank);
	if (e->pid > 0)
		snprintf(who + strlen(who), sizeof(who) - strlen(who), " (pid %d)", e->pid);
	return ctl_print_sentence(ctl, 0, "%s.%03u %s %s%s%s%s", when,
				  (unsigned)(e->unix_ms % 1000), job, *kind ? kind : "?", who,
				  *e->text ? ": " : "", e->text);
}

static int events_print_json(const Shardd__V1__Event *e)
{
	json_t *j = json_from_message(&e->base);
	int r = j ? json_dumpf(j, stdout, JSON_COMPACT) : -1;

	json_decref(j);
	putchar('\n');
	return r < 0 ? ctl_broken() : CTL_OK;
}

static int events_print_lost(const struct ctl *ctl, uint64_t lost)
{
	if (!lost)
		return CTL_OK;
	if (ctl->json)
		printf("{\"lost\":%llu}\n", (unsigned long long)lost);
	else
		printf("%llu events were lost\n", (unsigned long long)lost);
	return CTL_OK;
}

/* Does the job of that name interest? What the daemon has chosen does. */
static bool events_is_of(const struct events_ask *a, const Shardd__V1__Event *e)
{
	const char *slash = strchr(a->job, '/');
	uint32_t uid = slash ? (uint32_t)strtoul(a->job, NULL, 10) : geteuid();

	return !*a->job || (e->uid == uid && strcmp(e->job, slash ? slash + 1 : a->job) == 0);
}

static bool events_wanted(const struct events_ask *a, const Shardd__V1__Event *e)
{
	return events_is_of(a, e) &&
	       (a->commits || e->kind != SHARDD__V1__EVENT_KIND__EVENT_KIND_COMMIT);
}

/* @first: of those that are kept already, at most a->number are printed, the latest. */
static int events_print(struct ctl *ctl, const struct events_ask *a,
			const Shardd__V1__EventsResponse *reply, struct events_seen *seen,
			bool first)
{
	size_t wanted = 0;
	int r = CTL_OK;

	for (size_t i = 0; first && i < reply->n_events; i++)
		wanted += events_wanted(a, reply->events[i]);
	for (size_t i = 0; r == CTL_OK && i < reply->n_events; i++) {
		const Shardd__V1__Event *e = reply->events[i];
		uint64_t lost = events_lost(seen, e);

		if (!first)
			events_print_lost(ctl, lost);
		if (!events_wanted(a, e) || (first && wanted-- > a->number))
			continue;
		r = ctl->json ? events_print_json(e) : events_print_line(ctl, e);
	}
	return r == CTL_OK && (fflush(stdout) != 0 || ferror(stdout)) ? ctl_broken() : r;
}

/* Where the next answer goes on. */
struct events_last {
	uint64_t last, run;
};

static int events_ask(struct ctl *ctl, const struct events_ask *a,
		      const Shardd__V1__EventsRequest *request, struct events_seen *seen,
		      struct events_last *last)
{
	bool first = !last->run;
	_cleanup_(ctl_messagep) ProtobufCMessage *reply = NULL;
	const Shardd__V1__EventsResponse *events;
	int r = ctl_call(ctl, METHOD_EVENTS, &request->base,
			 &shardd__v1__events_response__descriptor, &reply);

	if (r != CTL_OK)
		return r;
	events = (const Shardd__V1__EventsResponse *)reply;
	if (!a->follows && !events->n_events && *a->job)
		r = ctl_must_exist(ctl, a->job, "no event of one is kept");
	if (r != CTL_OK)
		return r;
	*last = (struct events_last){ events->last, events->run };
	return events_print(ctl, a, events, seen, first);
}

/* Would the daemon take the name of the job? Whether there is one does not matter: it may come. */
static int events_check_job(struct ctl *ctl, const struct events_ask *a)
{
	Shardd__V1__EventsRequest request = SHARDD__V1__EVENTS_REQUEST__INIT;
	_cleanup_(ctl_messagep) ProtobufCMessage *reply = NULL;

	request.job = a->job;
	request.limit = 1;
	return ctl_call(ctl, METHOD_EVENTS, &request.base, &shardd__v1__events_response__descriptor,
			&reply);
}

/* Until the daemon or the output ends. All events are asked for: gaps in their numbers are losses. */
static int events_follow(struct ctl *ctl, const struct events_ask *a)
{
	Shardd__V1__EventsRequest request = SHARDD__V1__EVENTS_REQUEST__INIT;
	struct events_seen seen = { .n = 0 };
	struct events_last last = { 0 };
	int r = events_check_job(ctl, a);

	request.with_commits = true;
	while (r == CTL_OK) {
		request.after = last.last;
		request.run = last.run;
		r = events_ask(ctl, a, &request, &seen, &last);
		request.wait_ms = EVENTS_WAIT_MS;
	}
	return r;
}

static int events_parse(struct events_ask *a, char name[CTL_JOB_MAX], int argc, char **argv)
{
	static const struct option options[] = {
		{ "follow", no_argument, NULL, 'f' },
		{ "number", required_argument, NULL, 'n' },
		{ "commits", no_argument, NULL, 'c' },
		{ 0 },
	};
	int o;

	while ((o = ctl_getopt(argc, argv, "fn:", options, NULL)) != -1) {
		if (o == 'f')
			a->follows = true;
		else if (o == 'c')
			a->commits = true;
		else if (o != 'n')
			return CTL_USAGE;
		else if (!format_parse_number(optarg, 1000, &a->number) || !a->number)
			return ctl_usage("-n \"%s\" is not a whole number from 1 to 1000", optarg);
	}
	if (argc - optind > 1)
		return ctl_usage("events takes the name of one job");
	return argc - optind == 1 ? ctl_job_name(argv[optind], name, &a->job) : CTL_OK;
}

int ctl_events(struct ctl *ctl, int argc, char **argv)
{
	Shardd__V1__EventsRequest request = SHARDD__V1__EVENTS_REQUEST__INIT;
	struct events_ask ask = { .job = (char *)"", .number = EVENTS_LIMIT };
	char name[CTL_JOB_MAX];
	struct events_last last = { 0 };
	struct events_seen seen = { .n = 0 };
	int r = events_parse(&ask, name, argc, argv);

	if (r != CTL_OK)
		return r;
	if (ask.follows)
		return events_follow(ctl, &ask);
	request.job = ask.job;
	request.limit = (uint32_t)ask.number;
	request.with_commits = ask.commits;
	return events_ask(ctl, &ask, &request, &seen, &last);
}
