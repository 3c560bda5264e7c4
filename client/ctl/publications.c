/* shardctl publications: generations of the weights of jobs, and who reads them. */
#include <stdio.h>
#include <string.h>

#include "core/check.h"
#include "core/cleanup.h"
#include "ctl/ctl.h"
#include "ctl/format.h"
#include "json/json.h"
#include "json/status_json.h"
#include "methods.h"
#include "publication.pb-c.h"

/* The newest one that readers can have. Return: NULL: there is none. */
static const Shardd__V1__GenerationStatus *publications_newest(
	const Shardd__V1__PublicationStatus *p)
{
	for (size_t i = 0; i < p->n_generations; i++)
		if (p->generations[i]->state ==
		    SHARDD__V1__GENERATION_STATE__GENERATION_STATE_READY)
			return p->generations[i];
	return NULL;
}

static void publications_row(struct table *t, const Shardd__V1__JobStatus *j,
			     const Shardd__V1__PublicationStatus *p)
{
	const Shardd__V1__GenerationStatus *g = publications_newest(p);
	size_t leases = 0;

	for (size_t i = 0; i < p->n_generations; i++)
		leases += p->generations[i]->n_leases;
	table_cell(t, "%s", j->name);
	table_cell(t, "%s", p->name);
	table_cell(t, "%u", p->tensors);
	table_cell(t, "%s", format_bytes(p->bytes).text);
	if (g) {
		table_cell(t, "%llu", (unsigned long long)g->number);
		table_cell(t, "%llu", (unsigned long long)g->step);
		table_cell(t, "%llu",
			   (unsigned long long)(j->step > g->step ? j->step - g->step : 0));
	} else {
		table_cell(t, "-");
		table_cell(t, "-");
		table_cell(t, "-");
	}
	table_cell(t, "%zu", leases);
	table_cell(t, "%llu", (unsigned long long)p->made);
	table_cell(t, "%llu", (unsigned long long)p->skipped);
	table_cell(t, "%llu", (unsigned long long)p->dropped);
	table_cell(t, "%s", p->buffer_waits ? format_us(p->buffer_waited_us).text : "-");
	table_cell(t, "%s", p->made ? format_us(p->made_us / p->made).text : "-");
	table_cell(t, "%s", *p->why ? p->why : "-");
}

static int publications_print(struct ctl *ctl, const Shardd__V1__GetStatusResponse *s)
{
	static const struct table_column columns[] = {
		{ "JOB", TABLE_KEY | TABLE_TEXT }, { "NAME", TABLE_KEY | TABLE_TEXT },
		{ "TENSORS", TABLE_NUMBER },       { "BYTES", TABLE_NUMBER },
		{ "NEWEST", TABLE_NUMBER },        { "STEP", TABLE_NUMBER },
		{ "LAG", TABLE_NUMBER },           { "LEASES", TABLE_NUMBER },
		{ "MADE", TABLE_NUMBER },          { "SKIPPED", TABLE_NUMBER },
		{ "DROPPED", TABLE_NUMBER },       { "WAITED", TABLE_NUMBER },
		{ "TIME", TABLE_NUMBER },          { "ERROR", TABLE_SENTENCE },
	};
	_cleanup_(table_freep) struct table *t = table_new(columns, ARRAY_SIZE(columns));

	for (size_t i = 0; t && i < s->n_jobs; i++)
		for (size_t k = 0; k < s->jobs[i]->n_publications; k++)
			publications_row(t, s->jobs[i], s->jobs[i]->publications[k]);
	return ctl_print_table(ctl, NULL, t);
}

static void publications_lease_rows(struct table *t, const Shardd__V1__JobStatus *j,
				    const Shardd__V1__PublicationStatus *p)
{
	for (size_t i = 0; i < p->n_generations; i++)
		for (size_t k = 0; k < p->generations[i]->n_leases; k++) {
			const Shardd__V1__LeaseStatus *l = p->generations[i]->leases[k];

			table_cell(t, "%s", j->name);
			table_cell(t, "%s", p->name);
			table_cell(t, "%llu", (unsigned long long)p->generations[i]->number);
			table_cell(t, "%llu", (unsigned long long)p->generations[i]->step);
			table_cell(t, "%d", l->pid);
			table_cell(t, "%s", format_us(l->held_ms * 1000).text);
			table_cell(t, "%s", l->streams ? format_bytes(l->sent_bytes).text : "-");
		}
}

static int publications_print_leases(struct ctl *ctl, const Shardd__V1__GetStatusResponse *s)
{
	static const struct table_column columns[] = {
		{ "JOB", TABLE_KEY | TABLE_TEXT }, { "NAME", TABLE_KEY | TABLE_TEXT },
		{ "GENERATION", TABLE_NUMBER },    { "STEP", TABLE_NUMBER },
		{ "PID", TABLE_NUMBER },           { "HELD", TABLE_NUMBER },
		{ "SENT", TABLE_NUMBER },
	};
	_cleanup_(table_freep) struct table *t = table_new(columns, ARRAY_SIZE(columns));

	for (size_t i = 0; t && i < s->n_jobs; i++)
		for (size_t k = 0; k < s->jobs[i]->n_publications; k++)
			publications_lease_rows(t, s->jobs[i], s->jobs[i]->publications[k]);
	return ctl_print_table(ctl, "Leases", t);
}

static void publications_delta_row(struct table *t, const Shardd__V1__JobStatus *j,
				   const Shardd__V1__PublicationStatus *p)
{
	table_cell(t, "%s", j->name);
	table_cell(t, "%s", p->name);
	table_cell(t, "%llu", (unsigned long long)p->deltas);
	table_cell(t, "%llu", (unsigned long long)p->not_deltas);
	if (p->deltas)
		table_cell(t, "%s", format_bytes(p->delta_bytes / p->deltas).text);
	else
		table_cell(t, "-");
	if (p->deltas)
		table_cell(t, "%s", format_us(p->delta_us / p->deltas).text);
	else
		table_cell(t, "-");
	if (p->compared)
		table_cell(t, "%.1f %%", 100.0 * (double)p->changed / (double)p->compared);
	else
		table_cell(t, "-");
}

/* Only if there are publications with deltas. */
static int publications_print_deltas(struct ctl *ctl, const Shardd__V1__GetStatusResponse *s)
{
	static const struct table_column columns[] = {
		{ "JOB", TABLE_KEY | TABLE_TEXT }, { "NAME", TABLE_KEY | TABLE_TEXT },
		{ "DELTAS", TABLE_NUMBER },        { "NOT MADE", TABLE_NUMBER },
		{ "BYTES", TABLE_NUMBER },         { "TIME", TABLE_NUMBER },
		{ "CHANGED", TABLE_NUMBER },
	};
	_cleanup_(table_freep) struct table *t = table_new(columns, ARRAY_SIZE(columns));
	bool some = false;

	for (size_t i = 0; t && i < s->n_jobs; i++)
		for (size_t k = 0; k < s->jobs[i]->n_publications; k++)
			if (s->jobs[i]->publications[k]->delta_percent) {
				publications_delta_row(t, s->jobs[i], s->jobs[i]->publications[k]);
				some = true;
			}
	return some || !t ? ctl_print_table(ctl, "Deltas", t) : CTL_OK;
}

/* --------------------------------------------------------------------------- readers */

/* The users or groups, as "30001, 30002". */
static void publications_numbers(const uint32_t *ids, size_t n, char *buf, size_t bytes)
{
	size_t at = 0;

	for (size_t i = 0; i < n && at < bytes; i++)
		at += (size_t)snprintf(buf + at, bytes - at, "%s%u", i ? ", " : "", ids[i]);
}

static int publications_print_readers(struct ctl *ctl, const Shardd__V1__GetStatusResponse *s)
{
	static const struct table_column columns[] = {
		{ "JOB", TABLE_KEY | TABLE_TEXT }, { "NAME", TABLE_KEY | TABLE_TEXT },
		{ "PUBLISH", TABLE_TEXT },         { "USERS", TABLE_SENTENCE },
		{ "GROUPS", TABLE_SENTENCE },
	};
	_cleanup_(table_freep) struct table *t = table_new(columns, ARRAY_SIZE(columns));
	bool any = false;

	for (size_t i = 0; t && i < s->n_jobs; i++)
		for (size_t k = 0; k < s->jobs[i]->n_publications; k++) {
			const Shardd__V1__PublicationStatus *p = s->jobs[i]->publications[k];
			char users[1024] = "-", groups[1024] = "-";

			if (!p->n_reader_users && !p->n_reader_groups)
				continue;
			any = true;
			publications_numbers(p->reader_users, p->n_reader_users, users,
					     sizeof(users));
			publications_numbers(p->reader_groups, p->n_reader_groups, groups,
					     sizeof(groups));
			table_cell(t, "%s", s->jobs[i]->name);
			table_cell(t, "%s", p->name);
			table_cell(t, "%s", p->readers_may_publish ? "yes" : "no");
			table_cell(t, "%s", users);
			table_cell(t, "%s", groups);
		}
	return any || !t ? ctl_print_table(ctl, "Readers", t) : CTL_OK;
}

/* Of a job of another user: what this user may read of it. */
static int publications_print_listed(struct ctl *ctl, const Shardd__V1__ListPublicationsResponse *r)
{
	static const struct table_column columns[] = {
		{ "NAME", TABLE_KEY | TABLE_TEXT }, { "TENSORS", TABLE_NUMBER },
		{ "BYTES", TABLE_NUMBER },          { "NEWEST", TABLE_NUMBER },
		{ "STEP", TABLE_NUMBER },           { "PUBLISH", TABLE_TEXT },
	};
	_cleanup_(table_freep) struct table *t = table_new(columns, ARRAY_SIZE(columns));

	for (size_t i = 0; t && i < r->n_publications; i++) {
		const Shardd__V1__ListedPublication *p = r->publications[i];

		table_cell(t, "%s", p->name);
		table_cell(t, "%u", p->tensors);
		table_cell(t, "%s", format_bytes(p->bytes).text);
		table_cell(t, p->number ? "%llu" : "-", (unsigned long long)p->number);
		table_cell(t, p->number ? "%llu" : "-", (unsigned long long)p->step);
		table_cell(t, "%s", p->may_publish ? "yes" : "no");
	}
	return ctl_print_table(ctl, NULL, t);
}

static int publications_list(struct ctl *ctl, char *job)
{
	Shardd__V1__ListPublicationsRequest request = SHARDD__V1__LIST_PUBLICATIONS_REQUEST__INIT;
	_cleanup_(ctl_messagep) ProtobufCMessage *reply = NULL;
	int r;

	request.job = job;
	r = ctl_call(ctl, METHOD_ListPublications, &request.base,
		     &shardd__v1__list_publications_response__descriptor, &reply);
	if (r != CTL_OK)
		return r;
	if (ctl->json)
		return ctl_print_json(json_from_message(reply));
	return publications_print_listed(ctl, (const Shardd__V1__ListPublicationsResponse *)reply);
}

int ctl_publications(struct ctl *ctl, int argc, char **argv)
{
	Shardd__V1__GetStatusRequest request = SHARDD__V1__GET_STATUS_REQUEST__INIT;
	_cleanup_(ctl_status_freep) Shardd__V1__GetStatusResponse *s = NULL;
	char name[CTL_JOB_MAX];
	bool missing = false;
	int r;

	r = ctl_optional_job(argc, argv, name, &request.job);
	if (r == CTL_OK)
		r = ctl_try_status(ctl, &request, &s, &missing);
	if (missing)
		return publications_list(ctl, request.job);
	if (r != CTL_OK)
		return r;
	if (ctl->json)
		return ctl_print_json(status_json_publications(s));
	r = publications_print(ctl, s);
	if (r == CTL_OK)
		r = publications_print_deltas(ctl, s);
	if (r == CTL_OK)
		r = publications_print_leases(ctl, s);
	return r == CTL_OK ? publications_print_readers(ctl, s) : r;
}
