#include "otlp/otlp_metrics.h"

#include <string.h>

#include "core/check.h"

/* AGGREGATION_TEMPORALITY_CUMULATIVE */
#define OTLP_METRICS_CUMULATIVE 2

struct otlp_metrics {
	struct metrics_writer writer; /* first */
	struct otlp_packer packer;
	uint64_t start_ns, now_ns;
	struct metrics_family family; /* name NULL: none has begun */
	struct arena arena;           /* of its points */
	void **points;                /* in it: NumberDataPoint, or HistogramDataPoint */
	size_t n;
	double bounds[OP_STATS_BUCKETS - 1]; /* of histograms, in seconds */
};

/* Does @name end with @word, or with that and _total? */
static bool otlp_metrics_ends(const char *name, const char *word)
{
	const char *at = strstr(name, word);

	return at && (!at[strlen(word)] || strcmp(at + strlen(word), "_total") == 0);
}

const char *otlp_metrics_unit(const char *name)
{
	if (otlp_metrics_ends(name, "_bytes"))
		return "By";
	return otlp_metrics_ends(name, "_seconds") ? "s" : "";
}

/* -------------------------------------------------------------------------------- a family */

static void otlp_metrics_set_data(const struct otlp_metrics *m, Shardd__Otlp__V1__Metric *to,
				  Shardd__Otlp__V1__Gauge *gauge, Shardd__Otlp__V1__Sum *sum,
				  Shardd__Otlp__V1__Histogram *histogram)
{
	switch (m->family.kind) {
	case METRICS_GAUGE:
		gauge->n_data_points = m->n;
		gauge->data_points = (Shardd__Otlp__V1__NumberDataPoint **)m->points;
		to->data_case = SHARDD__OTLP__V1__METRIC__DATA_GAUGE;
		to->gauge = gauge;
		break;
	case METRICS_COUNTER:
		sum->n_data_points = m->n;
		sum->data_points = (Shardd__Otlp__V1__NumberDataPoint **)m->points;
		sum->aggregation_temporality = OTLP_METRICS_CUMULATIVE;
		sum->is_monotonic = true;
		to->data_case = SHARDD__OTLP__V1__METRIC__DATA_SUM;
		to->sum = sum;
		break;
	case METRICS_HISTOGRAM:
		histogram->n_data_points = m->n;
		histogram->data_points = (Shardd__Otlp__V1__HistogramDataPoint **)m->points;
		histogram->aggregation_temporality = OTLP_METRICS_CUMULATIVE;
		to->data_case = SHARDD__OTLP__V1__METRIC__DATA_HISTOGRAM;
		to->histogram = histogram;
		break;
	}
}

/* What there is of the family becomes an item; one without samples is left out. */
static void otlp_metrics_close(struct otlp_metrics *m)
{
	Shardd__Otlp__V1__Histogram histogram = SHARDD__OTLP__V1__HISTOGRAM__INIT;
	Shardd__Otlp__V1__Metric metric = SHARDD__OTLP__V1__METRIC__INIT;
	Shardd__Otlp__V1__Gauge gauge = SHARDD__OTLP__V1__GAUGE__INIT;
	Shardd__Otlp__V1__Sum sum = SHARDD__OTLP__V1__SUM__INIT;

	if (m->n && !m->arena.failed) {
		metric.name = (char *)(uintptr_t)m->family.name;
		metric.description = (char *)(uintptr_t)m->family.help;
		metric.unit = (char *)(uintptr_t)otlp_metrics_unit(m->family.name);
		otlp_metrics_set_data(m, &metric, &gauge, &sum, &histogram);
		otlp_packer_add(&m->packer, &metric.base, m->n);
	}
	m->packer.failed = m->packer.failed || m->arena.failed;
	arena_free(&m->arena);
	m->points = NULL;
	m->n = 0;
}

static void otlp_metrics_family(struct metrics_writer *w, const struct metrics_family *f)
{
	struct otlp_metrics *m = (struct otlp_metrics *)w;

	otlp_metrics_close(m);
	m->family = *f;
}

static void otlp_metrics_label(struct otlp_metrics *m, const struct metrics_sample *s,
			       size_t *ret_n, Shardd__Otlp__V1__KeyValue ***ret)
{
	struct otlp_attributes a;

	otlp_attributes_init(&a, &m->arena, s->n_labels);
	for (size_t i = 0; i < s->n_labels; i++)
		otlp_attributes_text(&a, s->labels[i].name, s->labels[i].value);
	*ret_n = a.n;
	*ret = a.list;
}

static void *otlp_metrics_number(struct otlp_metrics *m, const struct metrics_sample *s)
{
	Shardd__Otlp__V1__NumberDataPoint *p = arena_take(&m->arena, sizeof(*p));

	if (!p)
		return NULL;
	shardd__otlp__v1__number_data_point__init(p);
	if (m->family.kind == METRICS_COUNTER)
		p->start_time_unix_nano = s->since_unix_us ? s->since_unix_us * 1000u : m->start_ns;
	p->time_unix_nano = m->now_ns;
	if (s->micros) {
		p->value_case = SHARDD__OTLP__V1__NUMBER_DATA_POINT__VALUE_AS_DOUBLE;
		p->as_double = (double)s->value / METRICS_US_PER_S;
	} else {
		p->value_case = SHARDD__OTLP__V1__NUMBER_DATA_POINT__VALUE_AS_INT;
		p->as_int = s->value > INT64_MAX ? INT64_MAX : (int64_t)s->value;
	}
	otlp_metrics_label(m, s, &p->n_attributes, &p->attributes);
	return p;
}

static void *otlp_metrics_histogram(struct otlp_metrics *m, const struct metrics_sample *s)
{
	Shardd__Otlp__V1__HistogramDataPoint *p = arena_take(&m->arena, sizeof(*p));
	uint64_t *counts = arena_take(&m->arena, OP_STATS_BUCKETS * sizeof(*counts));

	if (!p || !counts)
		return NULL;
	shardd__otlp__v1__histogram_data_point__init(p);
	p->start_time_unix_nano = m->start_ns;
	p->time_unix_nano = m->now_ns;
	p->n_bucket_counts = OP_STATS_BUCKETS;
	p->bucket_counts = counts;
	for (size_t i = 0; i < OP_STATS_BUCKETS; i++)
		p->count += counts[i] = s->stats->buckets[i];
	p->optional_sum_case = SHARDD__OTLP__V1__HISTOGRAM_DATA_POINT__OPTIONAL_SUM_SUM;
	p->sum = (double)s->stats->us / METRICS_US_PER_S;
	p->n_explicit_bounds = OP_STATS_BUCKETS - 1;
	p->explicit_bounds = m->bounds;
	otlp_metrics_label(m, s, &p->n_attributes, &p->attributes);
	return p;
}

static void otlp_metrics_sample(struct metrics_writer *w, const struct metrics_sample *s)
{
	struct otlp_metrics *m = (struct otlp_metrics *)w;
	void *point;

	CHECK(m->family.name);
	if (m->n == OTLP_METRIC_POINTS)
		otlp_metrics_close(m);
	if (!m->points)
		m->points = arena_take(&m->arena, OTLP_METRIC_POINTS * sizeof(*m->points));
	point = s->stats ? otlp_metrics_histogram(m, s) : otlp_metrics_number(m, s);
	if (m->points && point)
		m->points[m->n++] = point;
}

bool otlp_metrics_pack(const Shardd__V1__GetStatusResponse *s, const struct metrics_counts *counts,
		       const struct otlp_self *self, uint64_t start_ns, uint64_t now_ns,
		       struct otlp_requests *ret)
{
	struct otlp_metrics m = { .writer = { .family = otlp_metrics_family,
					      .sample = otlp_metrics_sample },
				  .start_ns = start_ns,
				  .now_ns = now_ns,
				  .arena = ARENA_NULL };

	for (size_t i = 0; i < OP_STATS_BUCKETS - 1; i++)
		m.bounds[i] = (double)op_stats_bounds[i] / METRICS_US_PER_S;
	otlp_packer_init(&m.packer, self, ret);
	metrics_walk(s, counts, &m.writer);
	otlp_metrics_close(&m);
	return otlp_packer_end(&m.packer);
}
