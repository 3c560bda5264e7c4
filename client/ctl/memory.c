/* shardctl memory: who holds which bytes. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "core/check.h"
#include "core/cleanup.h"
#include "ctl/ctl.h"
#include "json/status_json.h"
#include "ctl/format.h"
#include "ctl/holders.h"

#define LARGEST 10u /* slabs that are shown */

static const char *const class_names[] = { "shard", "full", "grad", "control", "published" };

static void memory_class_cells(struct table *t, Shardd__V1__ClassBytes *const *classes, size_t n)
{
	for (size_t i = 0; i < ARRAY_SIZE(class_names); i++)
		table_cell(t, "%s", format_bytes(ctl_class(classes, n, class_names[i])).text);
}

static int memory_print_devices(struct ctl *ctl, const Shardd__V1__GetStatusResponse *s)
{
	static const struct table_column columns[] = {
		{ "DEVICE", TABLE_KEY | TABLE_TEXT },
		{ "CAPACITY", TABLE_NUMBER },
		{ "USED", TABLE_NUMBER },
		{ "USED%", TABLE_NUMBER },
		{ "SHARD", TABLE_NUMBER },
		{ "FULL", TABLE_NUMBER },
		{ "GRAD", TABLE_NUMBER },
		{ "CONTROL", TABLE_NUMBER },
		{ "PUBLISHED", TABLE_NUMBER },
		{ "QUARANTINED", TABLE_NUMBER },
		{ "OVERHEAD", TABLE_NUMBER },
	};
	_cleanup_(table_freep) struct table *t = table_new(columns, ARRAY_SIZE(columns));

	for (size_t i = 0; t && i < s->n_devices; i++) {
		const Shardd__V1__DeviceStatus *d = s->devices[i];

		table_cell(t, "%s", d->id);
		table_cell(t, "%s", format_bytes(d->capacity_bytes).text);
		table_cell(t, "%s", format_bytes(d->used_bytes).text);
		table_cell(t, "%s", format_percent(d->used_bytes, d->capacity_bytes).text);
		memory_class_cells(t, d->classes, d->n_classes);
		table_cell(t, "%s", format_bytes(d->quarantined_bytes).text);
		table_cell(t, "%s", format_bytes(d->overhead_bytes).text);
	}
	return ctl_print_table(ctl, "Devices", t);
}

static int memory_print_jobs(struct ctl *ctl, const Shardd__V1__GetStatusResponse *s)
{
	static const struct table_column columns[] = {
		{ "JOB", TABLE_KEY | TABLE_TEXT }, { "QUOTA", TABLE_NUMBER },
		{ "USED", TABLE_NUMBER },          { "USED%", TABLE_NUMBER },
		{ "SHARD", TABLE_NUMBER },         { "FULL", TABLE_NUMBER },
		{ "GRAD", TABLE_NUMBER },          { "CONTROL", TABLE_NUMBER },
		{ "PUBLISHED", TABLE_NUMBER },     { "QUARANTINED", TABLE_NUMBER },
	};
	_cleanup_(table_freep) struct table *t = table_new(columns, ARRAY_SIZE(columns));

	for (size_t i = 0; t && i < s->n_jobs; i++) {
		const Shardd__V1__JobStatus *j = s->jobs[i];

		ctl_job_cell(t, j->uid, j->name);
		if (j->quota_bytes && j->quota_bytes != UINT64_MAX)
			table_cell(t, "%s", format_bytes(j->quota_bytes).text);
		else
			table_cell(t, "-");
		table_cell(t, "%s", format_bytes(j->used_bytes).text);
		table_cell(t, "%s",
			   j->quota_bytes == UINT64_MAX
				   ? "-"
				   : format_percent(j->used_bytes, j->quota_bytes).text);
		memory_class_cells(t, j->classes, j->n_classes);
		table_cell(t, "%s", format_bytes(j->quarantined_bytes).text);
	}
	return ctl_print_table(ctl, "Jobs", t);
}

static void memory_class_row(struct table *t, const Shardd__V1__JobStatus *j,
			     const Shardd__V1__ClassMemory *c)
{
	ctl_job_cell(t, j->uid, j->name);
	table_cell(t, "%s", c->name);
	table_cell(t, "%s", format_bytes(c->formula_bytes).text);
	table_cell(t, "%s", format_bytes(c->used_bytes).text);
	table_cell(t, "%s", format_bytes(c->taken_bytes).text);
	table_cell(t, "%s", format_bytes(c->peak_bytes).text);
}

/* What should be there beside what is. */
static int memory_print_classes(struct ctl *ctl, const Shardd__V1__GetStatusResponse *s)
{
	static const struct table_column columns[] = {
		{ "JOB", TABLE_KEY | TABLE_TEXT }, { "CLASS", TABLE_KEY | TABLE_TEXT },
		{ "FORMULA", TABLE_NUMBER },       { "IN USE", TABLE_NUMBER },
		{ "TAKEN", TABLE_NUMBER },         { "PEAK", TABLE_NUMBER },
	};
	_cleanup_(table_freep) struct table *t = table_new(columns, ARRAY_SIZE(columns));

	for (size_t i = 0; t && i < s->n_jobs; i++)
		for (size_t k = 0; k < s->jobs[i]->n_memory; k++)
			if (s->jobs[i]->memory[k]->peak_bytes)
				memory_class_row(t, s->jobs[i], s->jobs[i]->memory[k]);
	return ctl_print_table(ctl, "Memory of jobs against their formulas", t);
}

static int memory_larger_slab(const void *a, const void *b)
{
	const Shardd__V1__SlabStatus *x = *(Shardd__V1__SlabStatus *const *)a;
	const Shardd__V1__SlabStatus *y = *(Shardd__V1__SlabStatus *const *)b;

	if (x->bytes != y->bytes)
		return x->bytes < y->bytes ? 1 : -1;
	return x->slab < y->slab ? -1 : x->slab > y->slab;
}

static void memory_slab_row(struct table *t, const Shardd__V1__SlabStatus *s)
{
	table_cell(t, "%u", s->slab);
	ctl_job_cell(t, s->uid, s->job);
	table_cell(t, "%s", s->class_);
	if (s->owner_rank < 0)
		table_cell(t, "all ranks");
	else
		table_cell(t, "rank %d", s->owner_rank);
	table_cell(t, "%s", format_bytes(s->bytes).text);
	table_cell(t, "%s", format_bytes(s->used_bytes).text);
	table_cell(t, "%s", format_bytes(s->quarantined_bytes).text);
	table_cell(t, "%u", s->exported);
}

static int memory_print_slabs(struct ctl *ctl, Shardd__V1__GetStatusResponse *s)
{
	static const struct table_column columns[] = {
		{ "SLAB", TABLE_KEY | TABLE_NUMBER },
		{ "JOB", TABLE_KEY | TABLE_TEXT },
		{ "CLASS", TABLE_KEY | TABLE_TEXT },
		{ "OWNER", TABLE_TEXT },
		{ "BYTES", TABLE_NUMBER },
		{ "USED", TABLE_NUMBER },
		{ "QUARANTINED", TABLE_NUMBER },
		{ "HANDED OUT", TABLE_NUMBER },
	};
	_cleanup_(table_freep) struct table *t = table_new(columns, ARRAY_SIZE(columns));
	char title[64];

	if (s->n_slabs)
		qsort(s->slabs, s->n_slabs, sizeof(*s->slabs), memory_larger_slab);
	for (size_t i = 0; t && i < s->n_slabs && i < LARGEST; i++)
		memory_slab_row(t, s->slabs[i]);
	snprintf(title, sizeof(title), s->n_slabs > LARGEST ? "Largest of %zu slabs" : "Slabs",
		 s->n_slabs);
	return ctl_print_table(ctl, title, t);
}

static int memory_larger_holder(const void *a, const void *b)
{
	const Shardd__V1__SessionStatus *x = *(Shardd__V1__SessionStatus *const *)a;
	const Shardd__V1__SessionStatus *y = *(Shardd__V1__SessionStatus *const *)b;

	if (x->held_bytes != y->held_bytes)
		return x->held_bytes < y->held_bytes ? 1 : -1;
	return x->session < y->session ? -1 : x->session > y->session;
}

/* Units that the session has gathered. They are shared and not part of its own bytes. */
static uint64_t memory_gathered(const Shardd__V1__GetStatusResponse *s, uint64_t session)
{
	for (size_t i = 0; i < s->n_jobs; i++)
		for (size_t k = 0; k < s->jobs[i]->n_ranks; k++)
			if (s->jobs[i]->ranks[k]->session == session)
				return s->jobs[i]->ranks[k]->gathered_units;
	return 0;
}

static int memory_print_holders(struct ctl *ctl, Shardd__V1__GetStatusResponse *s)
{
	static const struct table_column columns[] = {
		{ "SESSION", TABLE_KEY | TABLE_NUMBER },
		{ "PID", TABLE_KEY | TABLE_NUMBER },
		{ "CLIENT", TABLE_TEXT },
		{ "JOB", TABLE_KEY | TABLE_TEXT },
		{ "RANK", TABLE_NUMBER },
		{ "HOLDS", TABLE_NUMBER },
		{ "GATHERED UNITS", TABLE_NUMBER },
		{ "RING", TABLE_NUMBER },
	};
	_cleanup_(table_freep) struct table *t = table_new(columns, ARRAY_SIZE(columns));

	if (s->n_sessions)
		qsort(s->sessions, s->n_sessions, sizeof(*s->sessions), memory_larger_holder);
	for (size_t i = 0; t && i < s->n_sessions; i++) {
		const Shardd__V1__SessionStatus *x = s->sessions[i];

		table_cell(t, "%llu", (unsigned long long)x->session);
		table_cell(t, "%d", x->pid);
		table_cell(t, "%s", x->client_name);
		ctl_job_cell(t, x->job_uid, x->job);
		if (x->rank < 0)
			table_cell(t, "-");
		else
			table_cell(t, "%d", x->rank);
		table_cell(t, "%s", format_bytes(x->held_bytes).text);
		table_cell(t, "%llu", (unsigned long long)memory_gathered(s, x->session));
		table_cell(t, "%s", format_bytes(x->ring ? x->ring->bytes : 0).text);
	}
	return ctl_print_table(ctl, "Held by sessions", t);
}

/* ----------------------------------------- who keeps quarantined memory */

/* What waits for processes to end, or to let go of it. */
struct kept {
	const Shardd__V1__SlabStatus **slabs;
	uint64_t *inodes; /* of each */
	size_t n;
	struct holders holders;
};

static void memory_kept_deinit(struct kept *k)
{
	holders_deinit(&k->holders);
	free(k->slabs);
	free(k->inodes);
}

/* Return: 0 or negative errno. */
static int memory_kept_find(const Shardd__V1__GetStatusResponse *s, struct kept *ret)
{
	*ret = (struct kept){ .slabs = calloc(s->n_slabs + 1, sizeof(void *)),
			      .inodes = calloc(s->n_slabs + 1, sizeof(uint64_t)) };
	if (!ret->slabs || !ret->inodes)
		return -ENOMEM;
	for (size_t i = 0; i < s->n_slabs; i++) {
		if (!s->slabs[i]->quarantined_bytes || !s->slabs[i]->inode)
			continue;
		ret->slabs[ret->n] = s->slabs[i];
		ret->inodes[ret->n++] = s->slabs[i]->inode;
	}
	return ret->n ? holders_find(ret->inodes, ret->n, s->pid, &ret->holders) : 0;
}

static int memory_print_kept(struct ctl *ctl, const struct kept *k)
{
	static const struct table_column columns[] = {
		{ "PID", TABLE_KEY | TABLE_NUMBER },
		{ "COMMAND", TABLE_TEXT },
		{ "SLAB", TABLE_KEY | TABLE_NUMBER },
		{ "JOB", TABLE_KEY | TABLE_TEXT },
		{ "BYTES", TABLE_NUMBER },
	};
	_cleanup_(table_freep) struct table *t = table_new(columns, ARRAY_SIZE(columns));
	char title[128] = "Quarantined memory is held by";

	if (!k->n)
		return CTL_OK;
	for (size_t i = 0; t && i < k->holders.n; i++) {
		const struct holder *h = &k->holders.all[i];

		table_cell(t, "%d", h->pid);
		table_cell(t, "%s", h->command);
		table_cell(t, "%u", k->slabs[h->index]->slab);
		ctl_job_cell(t, k->slabs[h->index]->uid, k->slabs[h->index]->job);
		table_cell(t, "%s", format_bytes(k->slabs[h->index]->bytes).text);
	}
	if (k->holders.unseen)
		snprintf(
			title, sizeof(title),
			"Quarantined memory is held by (%u processes of other users not inspected)",
			k->holders.unseen);
	return ctl_print_table(ctl, title, t);
}

static json_t *memory_kept_json(const struct kept *k)
{
	json_t *list = json_array();

	for (size_t i = 0; i < k->holders.n; i++) {
		const struct holder *h = &k->holders.all[i];
		const Shardd__V1__SlabStatus *s = k->slabs[h->index];

		json_array_append_new(list,
				      json_pack("{s:i, s:s, s:I, s:s, s:I}", "pid", h->pid,
						"command", h->command, "slab", (json_int_t)s->slab,
						"job", s->job, "bytes", (json_int_t)s->bytes));
	}
	return list;
}

/* The keys of @from that are named, in a new object. */
static int memory_print_all(struct ctl *ctl, Shardd__V1__GetStatusResponse *s,
			    const struct kept *kept)
{
	int r = memory_print_devices(ctl, s);

	if (r == CTL_OK)
		r = memory_print_jobs(ctl, s);
	if (r == CTL_OK)
		r = memory_print_classes(ctl, s);
	if (r == CTL_OK)
		r = memory_print_slabs(ctl, s);
	if (r == CTL_OK)
		r = memory_print_kept(ctl, kept);
	return r == CTL_OK ? memory_print_holders(ctl, s) : r;
}

int ctl_memory(struct ctl *ctl, int argc, char **argv)
{
	Shardd__V1__GetStatusRequest request = SHARDD__V1__GET_STATUS_REQUEST__INIT;
	_cleanup_(ctl_status_freep) Shardd__V1__GetStatusResponse *s = NULL;
	struct kept kept = { 0 };
	int r = ctl_no_arguments(argc, argv);

	if (r != CTL_OK)
		return r;
	request.with_slabs = true;
	r = ctl_get_status(ctl, &request, &s);
	if (r != CTL_OK)
		return r;
	if (memory_kept_find(s, &kept) < 0)
		kept.holders = HOLDERS_NULL; /* what the daemon says is complete without */
	if (ctl->json)
		r = ctl_print_json(status_json_memory(s, memory_kept_json(&kept)));
	else
		r = memory_print_all(ctl, s, &kept);
	memory_kept_deinit(&kept);
	return r;
}
