/* The nodes that a job is on, from one epoch to the next. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/check.h"
#include "core/fnv.h"
#include "job/job.h"
#include "job/job_journal.h"
#include "job/launched.h"
#include "job/span.h"

bool job_is_across(const struct job *job)
{
	return job->across.span && job->across.span->n_nodes > 1;
}

bool job_is_alone(const struct job *job)
{
	return span_is_alone(job->across.span, job->rec->join_grace_ms);
}

uint64_t job_layout(const struct job *job)
{
	uint64_t h = span_layout(job->across.span);

	for (uint32_t r = 0; job->rec->join_grace_ms && r < job->rec->world_size; r++)
		h = fnv_add(h, launched_number(job, r));
	return h;
}

const char *job_on_node(const struct job *job, char buf[JOB_ON_NODE_BYTES])
{
	const struct span *s = job->across.span;

	*buf = '\0';
	if (job_is_across(job))
		snprintf(buf, JOB_ON_NODE_BYTES, " on node %s", s->nodes[s->self].name);
	return buf;
}

static bool job_span_is_on(const struct job *job, const struct device *d)
{
	const struct span *s = job->across.span;

	if (!job_is_across(job) || s->over)
		return false;
	for (uint32_t r = s->nodes[s->self].first;
	     r < s->nodes[s->self].first + s->nodes[s->self].n; r++)
		if (job->placed[r] == d)
			return true;
	return false;
}

/* Two jobs have two leaders, and so no common order. */
static int job_span_check_order(const struct job *job, const struct span *span, struct fault *f)
{
	const struct engine *e = job->node->nodes_engine;
	const struct span_node *here = &span->nodes[span->self];
	struct job *other, *tmp;

	if (span->n_nodes == 1 || !e || !engine_in_order(e))
		return 0;
	list_for_each (other, tmp, &job->jobs->all, link)
		for (uint32_t r = here->first; r < here->first + here->n; r++)
			if (other != job && job->placed[r] && job_span_is_on(other, job->placed[r]))
				return fault_set(
					f, FAULT_STATE, NULL,
					"job '%s' and job '%s' both have ranks of several nodes on "
					"%s: their collectives could wait for each other for ever; "
					"use other devices, or start it when that job has ended",
					job->rec->name, other->rec->name,
					backend_info(job->placed[r]->backend)->id);
	return 0;
}

/* Groups that have devices stay on them: memory of their units is there. */
static int job_span_check(const struct job *job, const struct span *span, uint64_t epoch,
			  struct fault *f)
{
	bool placed = false;

	if (job->joined || epoch <= job->rec->epoch)
		return fault_set(f, FAULT_INTERNAL, NULL,
				 "job '%s' is in epoch %llu with %u ranks: epoch %llu cannot begin",
				 job->rec->name, (unsigned long long)job->rec->epoch, job->joined,
				 (unsigned long long)epoch);
	if (span->world != job->rec->world_size)
		return fault_set(f, FAULT_INTERNAL, NULL,
				 "the nodes of job '%s' have %u ranks; it has %u", job->rec->name,
				 span->world, job->rec->world_size);
	if (job_span_check_order(job, span, f))
		return f->code;
	for (uint32_t i = 0; i < job->n_groups; i++)
		placed = placed || job->groups[i]->n_devices;
	if (!placed || (job->across.span && span_same(job->across.span, span)) ||
	    (!job_is_across(job) && span->n_nodes == 1))
		return 0;
	return fault_set(
		f, FAULT_STATE, NULL,
		"ranks of job '%s' are on other nodes or devices than its memory: start them "
		"where they were, or delete the job",
		job->rec->name);
}

static int job_span_record(struct job *job, struct fault *f)
{
	bool notes = job_is_across(job) || job_is_alone(job);
	char *text = notes ? span_format(job->across.span) : strdup("");
	int r = text ? state_job_set_span(job->rec, text) : -ENOMEM;

	free(text);
	job_journal_mark(job, JOB_JOURNAL_HEAD | JOB_JOURNAL_PROGRESS);
	job_journal_write(job);
	return r < 0 ? fault_errno(f, r, "noting a job's nodes") : 0;
}

int job_check_here(const struct job *job, const char *what, struct fault *f)
{
	if (job_is_alone(job))
		return fault_set(
			f, FAULT_UNIMPLEMENTED, NULL,
			"%s is not possible: job '%s' may have ranks on other nodes, although "
			"none is there now",
			what, job->rec->name);
	if (!job_is_across(job))
		return 0;
	return fault_set(f, FAULT_UNIMPLEMENTED, NULL,
			 "%s is not possible: job '%s' has ranks on %u nodes", what, job->rec->name,
			 job->across.span->n_nodes);
}

void job_span_failed(struct job *job, const struct fault *f)
{
	job->across.span->over = true;
	job->across.span->ended = *f;
}

/* Groups without devices: where their members are now. All: whether the nodes have an order. */
static int job_span_find_groups(struct job *job, struct fault *f)
{
	for (uint32_t i = 0; !f->code && i < job->n_groups; i++)
		if (job->groups[i]->n_devices)
			group_find_order(job->groups[i]);
		else if (group_find_again(job->groups[i]) < 0)
			fault_errno(f, -ENOMEM, "finding the ranks of a group");
	return f->code;
}

int job_install_span(struct job *job, struct span *span, struct fault *f)
{
	struct fault none = FAULT_NULL;

	CHECK(!job->joined && span->world == job->rec->world_size);
	fault_set(&none, FAULT_ABORTED, NULL, "no epoch has begun since");
	span_free(job->across.span);
	job->across.span = span;
	job_span_failed(job, &none);
	free(job->across.left);
	job->across.left = NULL;
	if (job_span_find_groups(job, f) == 0)
		(void)job_span_record(job, f);
	return f->code;
}

int job_set_span(struct job *job, struct span *span, uint64_t epoch, struct fault *f)
{
	if (job_span_check(job, span, epoch, f)) {
		span_free(span);
		return f->code;
	}
	span_free(job->across.span);
	job->across.span = span;
	free(job->across.left);
	job->across.left = NULL;
	if (job_span_find_groups(job, f) == 0) {
		job->rec->epoch = job->rec->begun = epoch;
		(void)job_span_record(job, f);
	}
	if (f->code)
		job_span_failed(job, f);
	return f->code;
}
