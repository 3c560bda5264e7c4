/* shardctl publications: generations of the weights of jobs, and who reads them. */
#include <stdio.h>
#include <string.h>

#include "core/check.h"
#include "core/cleanup.h"
#include "ctl/ctl.h"
#include "ctl/format.h"
#include "json/json.h"
#include "json/status_json.h"

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
		{ "DROPPED", TABLE_NUMBER },       { "TIME", TABLE_NUMBER },
		{ "ERROR", TABLE_SENTENCE },
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
		}
}

static int publications_print_leases(struct ctl *ctl, const Shardd__V1__GetStatusResponse *s)
{
	static const struct table_column columns[] = {
		{ "JOB", TABLE_KEY | TABLE_TEXT }, { "NAME", TABLE_KEY | TABLE_TEXT },
		{ "GENERATION", TABLE_NUMBER },    { "STEP", TABLE_NUMBER },
		{ "PID", TABLE_NUMBER },           { "HELD", TABLE_NUMBER },
	};
	_cleanup_(table_freep) struct table *t = table_new(columns, ARRAY_SIZE(columns));

	for (size_t i = 0; t && i < s->n_jobs; i++)
		for (size_t k = 0; k < s->jobs[i]->n_publications; k++)
			publications_lease_rows(t, s->jobs[i], s->jobs[i]->publications[k]);
	return ctl_print_table(ctl, "Leases", t);
}

int ctl_publications(struct ctl *ctl, int argc, char **argv)
{
	Shardd__V1__GetStatusRequest request = SHARDD__V1__GET_STATUS_REQUEST__INIT;
	_cleanup_(ctl_status_freep) Shardd__V1__GetStatusResponse *s = NULL;
	char name[CTL_JOB_MAX];
	int r;

	if (argc > 2)
		return ctl_usage("publications takes the name of one job, or none");
	r = argc == 2 ? ctl_job_name(argv[1], name, &request.job) : CTL_OK;
	if (r == CTL_OK)
		r = ctl_get_status(ctl, &request, &s);
	if (r != CTL_OK)
		return r;
	if (argc == 2 && !s->n_jobs) {
		fprintf(stderr, "shardctl: NOT_FOUND: there is no job \"%s\"\n", argv[1]);
		return CTL_FAILED;
	}
	if (ctl->json)
		return ctl_print_json(status_json_publications(s));
	r = publications_print(ctl, s);
	return r == CTL_OK ? publications_print_leases(ctl, s) : r;
}
