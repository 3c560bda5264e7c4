/*
 * The arithmetic of charlm: see charlm_model.h. Loops run along the contiguous
 * dimension with one accumulator per output or eight per sum, so that a compiler
 * vectorises them without being allowed to reorder anything.
 */
#include "charlm_model.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

/* Values after a layer, and the gradient of the loss by them: [samples][width]. */
struct activation {
	float *value;
	float *slope;
	unsigned width;
};

struct model {
	struct model_shape shape;
	unsigned samples;
	unsigned char *contexts;          /* [samples][context] */
	unsigned char *targets;           /* [samples] */
	struct activation after[LAYER_N]; /* embedding, hidden, hidden, logits */
	double *sums;                     /* a row of a dense gradient, or all of the embedding's */
};

struct layer_shape layer_shape(const struct model_shape *s, enum layer layer)
{
	switch (layer) {
	case LAYER_EMBED:
		return (struct layer_shape){ s->vocab, s->embed };
	case LAYER_HIDDEN1:
		return (struct layer_shape){ s->context * s->embed, s->hidden };
	case LAYER_HIDDEN2:
		return (struct layer_shape){ s->hidden, s->hidden };
	default:
		return (struct layer_shape){ s->hidden, s->vocab };
	}
}

size_t layer_elements(const struct model_shape *s, enum layer layer)
{
	struct layer_shape l = layer_shape(s, layer);
	size_t weight = (size_t)l.in * l.out;

	return layer == LAYER_EMBED ? weight : weight + l.out;
}

const char *layer_name(enum layer layer)
{
	static const char *const names[LAYER_N] = { "embed", "hidden1", "hidden2", "out" };

	return names[layer];
}

static unsigned width_after(const struct model_shape *s, enum layer layer)
{
	return layer == LAYER_EMBED ? s->context * s->embed : layer_shape(s, layer).out;
}

static size_t max_size(size_t a, size_t b)
{
	return a > b ? a : b;
}

int model_new(const struct model_shape *s, unsigned samples, struct model **ret)
{
	struct model *m = calloc(1, sizeof(*m));
	size_t sums = max_size((size_t)s->vocab * s->embed, max_size(s->hidden, s->vocab));

	if (!m)
		return -ENOMEM;
	m->shape = *s;
	m->samples = samples;
	m->contexts = calloc(samples, s->context);
	m->targets = calloc(samples, 1);
	m->sums = calloc(sums, sizeof(*m->sums));
	for (int l = 0; l < LAYER_N; l++) {
		struct activation *a = &m->after[l];

		a->width = width_after(s, l);
		a->value = calloc((size_t)samples * a->width, sizeof(float));
		a->slope = calloc((size_t)samples * a->width, sizeof(float));
		if (!a->value || !a->slope)
			goto fail;
	}
	if (!m->contexts || !m->targets || !m->sums)
		goto fail;
	*ret = m;
	return 0;
fail:
	model_free(m);
	return -ENOMEM;
}

struct model *model_free(struct model *m)
{
	if (!m)
		return NULL;
	for (int l = 0; l < LAYER_N; l++) {
		free(m->after[l].value);
		free(m->after[l].slope);
	}
	free(m->contexts);
	free(m->targets);
	free(m->sums);
	free(m);
	return NULL;
}

unsigned char *model_context(struct model *m, unsigned i)
{
	return m->contexts + (size_t)i * m->shape.context;
}

unsigned char *model_target(struct model *m, unsigned i)
{
	return m->targets + i;
}

/* ----------------------------------------------------------------- forward */

static void embed_forward(struct model *m, const float *table)
{
	unsigned e = m->shape.embed, n = m->samples * m->shape.context;

	for (unsigned i = 0; i < n; i++)
		memcpy(m->after[LAYER_EMBED].value + (size_t)i * e,
		       table + (size_t)m->contexts[i] * e, e * sizeof(float));
}

/* y += a*x over n elements. */
static void add_scaled(float *restrict y, const float *restrict x, float a, unsigned n)
{
	for (unsigned j = 0; j < n; j++)
		y[j] += a * x[j];
}

static void dense_forward(const struct activation *from, struct activation *to, unsigned samples,
			  const float *params)
{
	const float *bias = params + (size_t)from->width * to->width;

	for (unsigned i = 0; i < samples; i++)
		memcpy(to->value + (size_t)i * to->width, bias, to->width * sizeof(float));
	/* Rows of the weight outside: each is loaded once for all samples. */
	for (unsigned k = 0; k < from->width; k++)
		for (unsigned i = 0; i < samples; i++)
			add_scaled(to->value + (size_t)i * to->width,
				   params + (size_t)k * to->width,
				   from->value[(size_t)i * from->width + k], to->width);
}

void model_forward(struct model *m, enum layer layer, const float *params)
{
	struct activation *to = &m->after[layer];

	if (layer == LAYER_EMBED) {
		embed_forward(m, params);
		return;
	}
	dense_forward(to - 1, to, m->samples, params);
	if (layer == LAYER_OUT)
		return;
	for (size_t i = 0; i < (size_t)m->samples * to->width; i++)
		to->value[i] = tanhf(to->value[i]);
}

/* -------------------------------------------------------------------- loss */

static float softmax_loss(const float *logits, float *ret_slope, unsigned n, unsigned target)
{
	float highest = logits[0];
	double sum = 0;

	for (unsigned j = 1; j < n; j++)
		highest = logits[j] > highest ? logits[j] : highest;
	for (unsigned j = 0; j < n; j++) {
		ret_slope[j] = expf(logits[j] - highest);
		sum += ret_slope[j];
	}
	for (unsigned j = 0; j < n; j++)
		ret_slope[j] = (float)(ret_slope[j] / sum);
	ret_slope[target] -= 1.0f;
	return (float)(log(sum) - ((double)logits[target] - highest));
}

void model_loss(struct model *m, float *ret_losses)
{
	struct activation *out = &m->after[LAYER_OUT];

	for (unsigned i = 0; i < m->samples; i++)
		ret_losses[i] = softmax_loss(out->value + (size_t)i * out->width,
					     out->slope + (size_t)i * out->width, out->width,
					     m->targets[i]);
}

/* ---------------------------------------------------------------- backward */

static float dot(const float *restrict a, const float *restrict b, unsigned n)
{
	float lanes[8] = { 0 }, sum = 0;
	unsigned j = 0;

	for (; j + 8 <= n; j += 8)
		for (unsigned k = 0; k < 8; k++)
			lanes[k] += a[j + k] * b[j + k];
	for (unsigned k = 0; k < 8; k++)
		sum += lanes[k];
	for (; j < n; j++)
		sum += a[j] * b[j];
	return sum;
}

/* sums += a*x over n elements. */
static void add_scaled_double(double *restrict sums, const float *restrict x, double a, unsigned n)
{
	for (unsigned j = 0; j < n; j++)
		sums[j] += a * x[j];
}

static void store_scaled(float *ret, const double *sums, double scale, size_t n)
{
	for (size_t j = 0; j < n; j++)
		ret[j] = (float)(sums[j] * scale);
}

/* Gradient of row @k of the weight: the sum over samples of input k times slope. */
static void dense_gradient_row(struct model *m, enum layer layer, unsigned k, double scale,
			       float *ret)
{
	const struct activation *to = &m->after[layer], *from = to - 1;

	memset(m->sums, 0, to->width * sizeof(*m->sums));
	for (unsigned i = 0; i < m->samples; i++)
		add_scaled_double(m->sums, to->slope + (size_t)i * to->width,
				  from->value[(size_t)i * from->width + k], to->width);
	store_scaled(ret, m->sums, scale, to->width);
}

static void bias_gradient(struct model *m, enum layer layer, double scale, float *ret)
{
	const struct activation *to = &m->after[layer];

	memset(m->sums, 0, to->width * sizeof(*m->sums));
	for (unsigned i = 0; i < m->samples; i++)
		add_scaled_double(m->sums, to->slope + (size_t)i * to->width, 1, to->width);
	store_scaled(ret, m->sums, scale, to->width);
}

/* The slope by a layer's input: through the weight, and through the tanh of the
 * layer below where there is one. */
static void dense_slope(struct model *m, enum layer layer, const float *weight)
{
	struct activation *to = &m->after[layer], *from = to - 1;

	for (unsigned k = 0; k < from->width; k++)
		for (unsigned i = 0; i < m->samples; i++)
			from->slope[(size_t)i * from->width + k] =
				dot(to->slope + (size_t)i * to->width,
				    weight + (size_t)k * to->width, to->width);
	if (layer == LAYER_HIDDEN1)
		return;
	for (size_t i = 0; i < (size_t)m->samples * from->width; i++)
		from->slope[i] *= 1.0f - from->value[i] * from->value[i];
}

static void embed_backward(struct model *m, double scale, float *ret_gradient)
{
	unsigned e = m->shape.embed, n = m->samples * m->shape.context;
	size_t elements = (size_t)m->shape.vocab * e;

	memset(m->sums, 0, elements * sizeof(*m->sums));
	for (unsigned i = 0; i < n; i++)
		add_scaled_double(m->sums + (size_t)m->contexts[i] * e,
				  m->after[LAYER_EMBED].slope + (size_t)i * e, 1, e);
	store_scaled(ret_gradient, m->sums, scale, elements);
}

void model_backward(struct model *m, enum layer layer, const float *params, double scale,
		    float *ret_gradient)
{
	struct layer_shape l = layer_shape(&m->shape, layer);

	if (layer == LAYER_EMBED) {
		embed_backward(m, scale, ret_gradient);
		return;
	}
	for (unsigned k = 0; k < l.in; k++)
		dense_gradient_row(m, layer, k, scale, ret_gradient + (size_t)k * l.out);
	bias_gradient(m, layer, scale, ret_gradient + (size_t)l.in * l.out);
	dense_slope(m, layer, params);
}
