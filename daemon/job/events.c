#include "job/events.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/random.h>
#include <time.h>
#include <unistd.h>

#include "core/clock.h"
#include "core/text.h"
#include "job/job_types.h"
#include "job/member.h"

static struct {
	struct events_record *records; /* NULL: not begun */
	size_t size;
	uint64_t last; /* id */
	const struct events_record *newest;
	uint64_t run;
	struct condition changed;
} events;

int events_init(size_t size)
{
	events.records = calloc(size ? size : 1, sizeof(*events.records));
	if (!events.records)
		return -ENOMEM;
	events.size = size;
	events.last = 0;
	events.newest = NULL;
	/* as large as JSON can hold */
	if (getrandom(&events.run, sizeof(events.run), 0) != (ssize_t)sizeof(events.run))
		events.run = (uint64_t)getpid();
	events.run = (events.run & ((UINT64_C(1) << 53) - 1)) | 1;
	condition_init(&events.changed, "the next event");
	return 0;
}

void events_deinit(void)
{
	free(events.records);
	events.records = NULL;
	events.size = 0;
}

static uint64_t events_unix_ms(void)
{
	struct timespec now;

	clock_gettime(CLOCK_REALTIME, &now);
	return (uint64_t)now.tv_sec * 1000 + (uint64_t)now.tv_nsec / 1000000;
}

/* The next number of its owner. */
static uint64_t events_nth(uint32_t uid)
{
	uint64_t nth = 0;

	for (size_t i = 0; i < events.size; i++)
		if (events.records[i].head.id && events.records[i].head.uid == uid &&
		    events.records[i].nth > nth)
			nth = events.records[i].nth;
	return nth + 1;
}

static struct events_record *events_take(const struct job *job, enum events_kind kind)
{
	const state_job *rec = job->rec;
	uint64_t nth = events_nth(rec->uid);
	struct events_record *r =
		&events.records[shares_place(events.records, sizeof(*r), events.size, rec->uid)];

	*r = (struct events_record){ .head = { ++events.last, rec->uid },
				     .nth = nth,
				     .unix_ms = events_unix_ms(),
				     .epoch = rec->epoch,
				     .rank = EVENTS_NO_RANK,
				     .kind = (uint8_t)kind,
				     .is_private = rec->is_private };
	text_copy(r->job, sizeof(r->job), rec->name);
	events.newest = r;
	return r;
}

void events_add(const struct job *job, enum events_kind kind, const char *fmt, ...)
{
	struct events_record *r;
	va_list ap;

	if (!events.size)
		return;
	r = events_take(job, kind);
	va_start(ap, fmt);
	vsnprintf(r->text, sizeof(r->text), fmt, ap);
	va_end(ap);
	condition_signal(&events.changed);
}

void events_add_rank(const struct member *m, enum events_kind kind, const char *fmt, ...)
{
	struct events_record *r;
	va_list ap;

	if (!events.size)
		return;
	r = events_take(m->job, kind);
	r->rank = (int32_t)m->rank;
	r->pid = member_pid(m);
	va_start(ap, fmt);
	vsnprintf(r->text, sizeof(r->text), fmt, ap);
	va_end(ap);
	condition_signal(&events.changed);
}

void events_add_commit(struct job *job, uint64_t step)
{
	uint64_t now = clock_now_us();

	job->ops.commits++;
	if (job->ops.commit_told_us && now - job->ops.commit_told_us < EVENTS_COMMIT_US)
		return;
	job->ops.commit_told_us = now;
	if (job->ops.commits == 1)
		events_add(job, EVENTS_COMMIT, "step %llu", (unsigned long long)step);
	else
		events_add(job, EVENTS_COMMIT, "step %llu, %llu commits since the last event",
			   (unsigned long long)step, (unsigned long long)job->ops.commits);
	job->ops.commits = 0;
}

struct condition *events_changed(void)
{
	return &events.changed;
}

uint64_t events_last(void)
{
	return events.last;
}

const struct events_record *events_newest(void)
{
	return events.newest;
}

uint64_t events_run(void)
{
	return events.run;
}

size_t events_size(void)
{
	return events.size;
}

const struct events_record *events_at(size_t i)
{
	return events.records[i].head.id ? &events.records[i] : NULL;
}
