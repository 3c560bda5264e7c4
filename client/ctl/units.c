/* shardctl units JOB: the units of a job. */
#include <stdio.h>
#include <string.h>

#include "core/check.h"
#include "core/cleanup.h"
#include "ctl/ctl.h"
#include "ctl/format.h"
#include "json/json.h"
#include "json/status_json.h"

/* "0 1 5"; "-" if there is none. */
static void units_ranks_cell(struct table *t, const uint32_t *ranks, size_t n)
{
	_cleanup_(freep) char *text = NULL;
	size_t bytes = 0;
	FILE *f = open_memstream(&text, &bytes);

	for (size_t i = 0; f && i < n; i++)
		fprintf(f, "%s%u", i ? " " : "", ranks[i]);
	if (f)
		fclose(f);
	table_cell(t, "%s", text && *text ? text : "-");
}

/* "0:FORWARD 1:BACKWARD_PRE"; "-" if there is none. */
static void units_passes_cell(struct table *t, const Shardd__V1__UnitStatus *u)
{
	_cleanup_(freep) char *text = NULL;
	size_t bytes = 0;
	FILE *f = open_memstream(&text, &bytes);

	for (size_t i = 0; f && i < u->n_passes; i++)
		fprintf(f, "%s%u:%s", i ? " " : "", u->passes[i]->rank,
			json_state(&shardd__v1__pass_state__descriptor, u->passes[i]->state));
	if (f)
		fclose(f);
	table_cell(t, "%s", text && *text ? text : "-");
}

static void units_unit_row(struct table *t, const Shardd__V1__UnitStatus *u)
{
	table_cell(t, "%u", u->unit);
	table_cell(t, "%s", u->name);
	table_cell(t, "%llu", (unsigned long long)u->elements);
	table_cell(t, "%llu", (unsigned long long)u->shard_elements);
	table_cell(t, "%s", u->compute_dtype);
	table_cell(t, "%s", u->gradient_dtype);
	table_cell(t, "%s", u->initialised ? "yes" : "no");
	table_cell(t, "%s", format_bytes(u->shard_bytes).text);
	table_cell(t, "%s", format_bytes(u->full_bytes).text);
	table_cell(t, "%s", u->has_gradient ? "yes" : "no");
	table_cell(t, "%llu", (unsigned long long)u->optimizer_steps);
	units_ranks_cell(t, u->gathered_by, u->n_gathered_by);
	table_cell(t, "%s", u->layout);
	if (strcmp(u->strategy, "hybrid") == 0)
		table_cell(t, "hybrid %u", u->shard_ranks);
	else
		table_cell(t, "%s", u->strategy);
	table_cell(t, "%s", u->buffer_bytes ? format_bytes(u->buffer_bytes).text : "-");
	table_cell(t, "%s", u->guarded ? u->reshard : "-");
	units_passes_cell(t, u);
}

static int units_print_units(struct ctl *ctl, const Shardd__V1__JobStatus *j)
{
	static const struct table_column columns[] = {
		{ "UNIT", TABLE_KEY | TABLE_NUMBER },
		{ "NAME", TABLE_KEY | TABLE_TEXT },
		{ "ELEMENTS", TABLE_NUMBER },
		{ "SHARD", TABLE_NUMBER },
		{ "COMPUTE", TABLE_TEXT },
		{ "GRADIENT", TABLE_TEXT },
		{ "INIT", TABLE_TEXT },
		{ "SHARD BYTES", TABLE_NUMBER },
		{ "FULL BYTES", TABLE_NUMBER },
		{ "HAS GRAD", TABLE_TEXT },
		{ "STEPS", TABLE_NUMBER },
		{ "GATHERED BY", TABLE_SENTENCE },
		{ "LAYOUT", TABLE_TEXT },
		{ "STRATEGY", TABLE_TEXT },
		{ "BUFFERS", TABLE_NUMBER },
		{ "RESHARD", TABLE_TEXT },
		{ "PASSES", TABLE_SENTENCE },
	};
	_cleanup_(table_freep) struct table *t = table_new(columns, ARRAY_SIZE(columns));

	for (size_t i = 0; t && i < j->n_units; i++)
		units_unit_row(t, j->units[i]);
	return ctl_print_table(ctl, NULL, t);
}

int ctl_units(struct ctl *ctl, int argc, char **argv)
{
	Shardd__V1__GetStatusRequest request = SHARDD__V1__GET_STATUS_REQUEST__INIT;
	_cleanup_(ctl_status_freep) Shardd__V1__GetStatusResponse *s = NULL;
	const Shardd__V1__JobStatus *job;
	char name[CTL_JOB_MAX];
	int r;

	r = ctl_optional_job(argc, argv, name, &request.job);
	if (r != CTL_OK)
		return r;
	if (!*request.job)
		return ctl_usage("units takes the name of one job");
	request.with_units = true;
	r = ctl_get_status(ctl, &request, &s);
	if (r != CTL_OK)
		return r;
	job = s->n_jobs ? s->jobs[0] : NULL; /* deleted ones of that name come last */
	if (!job) {
		fprintf(stderr, "shardctl: NOT_FOUND: there is no job \"%s\"\n", argv[1]);
		return CTL_FAILED;
	}
	if (!ctl->json && job->is_private && !job->lifetime[0])
		printf("job %s is private: only its owner sees its units\n", job->name);
	if (!ctl->json)
		return units_print_units(ctl, job);
	return ctl_print_json(status_json_units(job));
}
