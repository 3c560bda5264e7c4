/* What collectives compute: a left fold over the members, rounded to their type at every
 * addition, as NCCL does at every hop. */
#include <math.h>
#include <string.h>

#include "convert.h"
#include "nccl_impl.h"

static float load(ncclDataType_t type, const char *p, size_t i)
{
	uint16_t h;
	float f;

	if (type == ncclFloat32) {
		memcpy(&f, p + 4 * i, 4);
		return f;
	}
	memcpy(&h, p + 2 * i, 2);
	return type == ncclBfloat16 ? bf16_to_f32(h) : fp16_to_f32(h);
}

static void store(ncclDataType_t type, char *p, size_t i, float f)
{
	uint16_t h;

	if (type == ncclFloat32) {
		memcpy(p + 4 * i, &f, 4);
		return;
	}
	h = type == ncclBfloat16 ? bf16_from_f32(f) : fp16_from_f32(f);
	memcpy(p + 2 * i, &h, 2);
}

static float fold(ncclRedOp_t op, float t, float x)
{
	switch (op) {
	case ncclProd:
		return t * x;
	case ncclMax:
		return x > t || isnan(x) ? x : t;
	case ncclMin:
		return x < t || isnan(x) ? x : t;
	default:
		return t + x;
	}
}

/* ncclAvg multiplies every input by 1/n, rounded to the type of the elements. */
static float factor(ncclDataType_t type, ncclRedOp_t op, int n)
{
	char narrow[4];

	if (op != ncclAvg)
		return 1;
	store(type, narrow, 0, 1.0f / (float)n);
	return load(type, narrow, 0);
}

static float rounded(ncclDataType_t type, float f)
{
	char narrow[4];

	store(type, narrow, 0, f);
	return load(type, narrow, 0);
}

/* What member @j has, scaled in their type. */
static float term(const struct meeting *m, int j, size_t i, float scale)
{
	ncclDataType_t type = m->calls[0]->type;

	return rounded(type, load(type, m->calls[j]->in, i) * scale);
}

/* Elements [first, first+n) of all members into @out. In one go through a buffer, since
 * out may be one of the inputs. */
static void reduce(const struct meeting *m, size_t first, size_t n, char *out)
{
	const struct call *c = m->calls[0];
	float scale = factor(c->type, c->op, m->clique->size);

	for (size_t i = 0; i < n; i++) {
		float t = term(m, 0, first + i, scale);

		for (int j = 1; j < m->clique->size; j++)
			t = rounded(c->type, fold(c->op, t, term(m, j, first + i, scale)));
		store(c->type, out, i, t);
	}
}

static void gather(const struct meeting *m, size_t bytes)
{
	for (int to = 0; to < m->clique->size; to++)
		for (int from = 0; m->calls[to]->out && from < m->clique->size; from++)
			memmove(m->calls[to]->out + (size_t)from * bytes, m->calls[from]->in,
				bytes);
}

/* The first of this process. */
static const struct call *own(const struct meeting *m)
{
	int i = 0;

	while (!m->calls[i]->out)
		i++;
	return m->calls[i];
}

void compute(const struct meeting *m)
{
	const struct call *c = own(m);
	size_t bytes = c->count * (size_t)type_size(c->type);

	switch (c->kind) {
	case K_ALL_GATHER:
		gather(m, bytes);
		return;
	case K_REDUCE_SCATTER:
		for (int i = 0; i < m->clique->size; i++)
			if (m->calls[i]->out)
				reduce(m, (size_t)i * c->count, c->count, m->calls[i]->out);
		return;
	case K_ALL_REDUCE:
		reduce(m, 0, c->count, c->out);
		break;
	default:
		memmove(c->out, m->calls[c->root]->in, bytes);
		break;
	}
	for (int i = 0; i < m->clique->size; i++)
		if (m->calls[i]->out && m->calls[i] != c)
			memmove(m->calls[i]->out, c->out, bytes);
}
