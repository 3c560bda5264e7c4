/* shardctl slow: which rank is late in the collectives of a job. */
#include <getopt.h>
#include <stdio.h>
#include <unistd.h>

#include "core/check.h"
#include "core/cleanup.h"
#include "ctl/ctl.h"
#include "ctl/format.h"
#include "json/json.h"
#include "ctl/late.h"

#define SLOW_TEXT_MAX 512

static void slow_steps(const struct late *l, char *buf, size_t bytes)
{
	buf[0] = '\0';
	if (l->steps)
		snprintf(buf, bytes, " in %llu step%s", (unsigned long long)l->steps,
			 l->steps == 1 ? "" : "s");
}

/* One sentence. */
static void slow_conclude(const struct late *l, char *buf, size_t bytes)
{
	const struct late_rank *r = l->ranks;
	struct format time = format_percent(l->waited_us, l->span_us);
	char steps[48];

	slow_steps(l, steps, sizeof(steps));
	switch (l->verdict) {
	case LATE_UNKNOWN:
		snprintf(buf, bytes,
			 "nothing to compare: the flight recorder of this node, which begins with "
			 "the daemon, has no collective in which two ranks of the job have met "
			 "since they joined");
		return;
	case LATE_NONE:
		snprintf(buf, bytes,
			 "no rank is late: in %llu collectives%s the ranks waited for each other "
			 "%s of the time",
			 (unsigned long long)l->collectives, steps, time.text);
		return;
	case LATE_MANY:
		snprintf(buf, bytes,
			 "no single rank is late: the ranks waited for each other %s of the "
			 "time%s, %s of that for rank %u (pid %d)",
			 time.text, steps, format_percent(r->waited_us, l->waited_us).text, r->rank,
			 r->pid);
		return;
	case LATE_ONE:
		snprintf(buf, bytes,
			 "rank %u (pid %d) is last in %s of %llu collectives, by %s at the median; "
			 "the others waited %s for it%s",
			 r->rank, r->pid, format_percent(r->last, r->collectives).text,
			 (unsigned long long)r->collectives, format_us(r->median_us).text,
			 format_us(r->waited_us).text, steps);
		return;
	}
}

static void slow_row(struct table *t, const struct late *l, const struct late_rank *r)
{
	bool is_late = l->verdict == LATE_ONE && r == l->ranks;

	table_color_cell(t, is_late ? TABLE_BAD : TABLE_PLAIN, "%u", r->rank);
	table_cell(t, "%d", r->pid);
	table_cell(t, "%llu", (unsigned long long)r->collectives);
	table_cell(t, "%s", format_percent(r->last, r->collectives).text);
	table_cell(t, "%s", r->last ? format_us(r->median_us).text : "-");
	table_cell(t, "%s", r->last ? format_us(r->p95_us).text : "-");
	table_cell(t, "%s", r->last ? format_us(r->worst_us).text : "-");
	table_cell(t, "%s", r->last ? format_us(r->waited_us).text : "-");
}

/* What the table is not about. */
static void slow_print_nodes(struct ctl *ctl, const Shardd__V1__JobStatus *j)
{
	for (size_t i = 0; i < j->n_nodes; i++) {
		const Shardd__V1__JobNodeStatus *n = j->nodes[i];

		if (n->here && n->ranks)
			ctl_print_sentence(
				ctl, 0, "read: the records of node %.64s, which has ranks %u to %u",
				n->name, n->first, n->first + n->ranks - 1);
		else if (n->ranks)
			ctl_print_sentence(
				ctl, 0,
				"not read: those of node %.64s (ranks %u to %u); run shardctl slow "
				"there",
				n->name, n->first, n->first + n->ranks - 1);
	}
}

static int slow_print(struct ctl *ctl, const Shardd__V1__JobStatus *j, const struct late *l,
		      const char *text)
{
	static const struct table_column columns[] = {
		{ "RANK", true },  { "PID", true },        { "COLLECTIVES", true },
		{ "LAST", true },  { "MEDIAN", true },     { "P95", true },
		{ "WORST", true }, { "WAITED FOR", true },
	};
	_cleanup_(table_freep) struct table *t = table_new(columns, ARRAY_SIZE(columns));
	int r = CTL_OK;

	ctl_print_sentence(ctl, 0, "%s", text);
	slow_print_nodes(ctl, j);
	for (size_t i = 0; t && i < l->n; i++)
		slow_row(t, l, &l->ranks[i]);
	if (l->n || !t)
		r = ctl_print_table(ctl, NULL, t);
	if (r == CTL_OK && l->incomplete)
		ctl_print_sentence(
			ctl, 0,
			"%llu more collectives left out: they have not ended well on all ranks, or "
			"their records are gone",
			(unsigned long long)l->incomplete);
	return r;
}

static json_t *slow_json_ranks(const struct late *l)
{
	json_t *all = json_array();

	for (size_t i = 0; i < l->n; i++) {
		const struct late_rank *r = &l->ranks[i];

		json_array_append_new(all, json_pack("{s:I,s:I,s:I,s:I,s:I,s:I,s:I,s:I}", "rank",
						     (json_int_t)r->rank, "pid", (json_int_t)r->pid,
						     "collectives", (json_int_t)r->collectives,
						     "last", (json_int_t)r->last, "median_us",
						     (json_int_t)r->median_us, "p95_us",
						     (json_int_t)r->p95_us, "worst_us",
						     (json_int_t)r->worst_us, "waited_us",
						     (json_int_t)r->waited_us));
	}
	return all;
}

/* @here: those whose records were read. A job of one node has no list. */
static json_t *slow_json_nodes(const Shardd__V1__JobStatus *j, bool here)
{
	json_t *all = json_array();

	for (size_t i = 0; i < j->n_nodes; i++)
		if (j->nodes[i]->here == here)
			json_array_append_new(all, json_from_message(&j->nodes[i]->base));
	return all;
}

static int slow_print_json(const Shardd__V1__JobStatus *j, const struct late *l, const char *text)
{
	json_int_t late = l->verdict == LATE_ONE ? (json_int_t)l->ranks[0].rank : -1;

	return ctl_print_json(json_pack(
		"{s:o?,s:I,s:o?,s:I,s:I,s:I,s:I,s:I,s:I,s:o?,s:o?,s:o?}", "job",
		json_from_text(j->name), "uid", (json_int_t)j->uid, "conclusion",
		json_from_text(text), "late_rank", late, "collectives", (json_int_t)l->collectives,
		"incomplete", (json_int_t)l->incomplete, "steps", (json_int_t)l->steps, "span_us",
		(json_int_t)l->span_us, "waited_us", (json_int_t)l->waited_us, "nodes_read",
		slow_json_nodes(j, true), "nodes_not_read", slow_json_nodes(j, false), "ranks",
		slow_json_ranks(l)));
}

static int slow_parse(int argc, char **argv, char name[CTL_JOB_MAX], char **ret_job,
		      uint64_t *ret_steps)
{
	static const struct option options[] = {
		{ "steps", required_argument, NULL, 'n' },
		{ 0 },
	};
	int o;

	while ((o = ctl_getopt(argc, argv, "n:", options, NULL)) != -1) {
		if (o != 'n')
			return CTL_USAGE;
		if (!format_parse_number(optarg, UINT32_MAX, ret_steps) || !*ret_steps)
			return ctl_usage("-n \"%s\" is not a whole number from 1 to %u", optarg,
					 UINT32_MAX);
	}
	if (argc - optind != 1)
		return ctl_usage("slow takes the name of one job");
	return ctl_job_name(argv[optind], name, ret_job);
}

static int slow_report(struct ctl *ctl, const Shardd__V1__JobStatus *j,
		       const Shardd__V1__OpsResponse *ops, uint64_t steps)
{
	char text[SLOW_TEXT_MAX];
	struct late l;
	int r;

	if (late_find(ops, steps, &l) < 0)
		return ctl_broken();
	slow_conclude(&l, text, sizeof(text));
	if (l.verdict == LATE_UNKNOWN && j->is_private && j->uid != geteuid())
		snprintf(text, sizeof(text),
			 "nothing to compare: ops of a private job are shown "
			 "to its owner only");
	r = ctl->json ? slow_print_json(j, &l, text) : slow_print(ctl, j, &l, text);
	late_deinit(&l);
	return r;
}

int ctl_slow(struct ctl *ctl, int argc, char **argv)
{
	Shardd__V1__GetStatusRequest about = SHARDD__V1__GET_STATUS_REQUEST__INIT;
	Shardd__V1__OpsRequest request = SHARDD__V1__OPS_REQUEST__INIT;
	_cleanup_(ctl_status_freep) Shardd__V1__GetStatusResponse *s = NULL;
	_cleanup_(ctl_messagep) ProtobufCMessage *reply = NULL;
	char name[CTL_JOB_MAX];
	uint64_t steps = 0;
	int r = slow_parse(argc, argv, name, &request.job, &steps);

	about.job = request.job;
	if (r == CTL_OK)
		r = ctl_get_status(ctl, &about, &s);
	if (r == CTL_OK)
		r = ctl_call(ctl, "/shardd.v1.StatusService/Ops", &request.base,
			     &shardd__v1__ops_response__descriptor, &reply);
	if (r != CTL_OK)
		return r;
	if (!s->n_jobs)
		return ctl_broken();
	return slow_report(ctl, s->jobs[0], (const Shardd__V1__OpsResponse *)reply, steps);
}
