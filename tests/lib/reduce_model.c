#include "core/check.h"
#include "reduce_model.h"

#include <math.h>
#include <string.h>

#include "convert.h"

enum { FAIRSCALE = 1, XLA, FSDP1, FSDP2, DDP, DDP_HOOK, DDP_VIEW };
enum { SHARD = 1, REPLICATE, HYBRID };

void model_world_init(struct model_world *w, uint32_t ranks, unsigned devices, bool nccl)
{
	*w = (struct model_world){ .ranks = ranks, .nccl = nccl };
	w->devices = devices < ranks ? devices : ranks;
	for (uint32_t r = 0; r < ranks; r++)
		w->device_of[r] = (uint32_t)((uint64_t)r * devices / ranks);
	if (devices > ranks) /* those without a rank do not count */
		for (uint32_t r = 0; r < ranks; r++)
			w->device_of[r] = r;
}

static float to(enum dtype t, float x)
{
	if (t == DTYPE_BF16)
		return bf16_to_f32(bf16_from_f32(x));
	if (t == DTYPE_FP16)
		return fp16_to_f32(fp16_from_f32(x));
	return x;
}

static enum dtype gradient_dtype(const struct model_unit *u)
{
	return u->gradient ? u->gradient : DTYPE_FP32;
}

static enum dtype reduce_dtype(const struct model_unit *u)
{
	if (u->reduce)
		return u->reduce;
	return u->profile == 0 || u->profile == FAIRSCALE ? DTYPE_FP32 : gradient_dtype(u);
}

static bool is_ddp(const struct model_unit *u)
{
	return u->profile >= DDP;
}

float model_number(const struct model_unit *u, uint32_t rank, unsigned pass, size_t i)
{
	uint64_t bits = (i * 2654435761u + rank * 40503u + pass * 9176u + 1) * 0x9e3779b97f4a7c15u;
	float x = (float)((double)(bits >> 40) / (1 << 23) - 1);

	switch (i) {
	case 0:
		x = ldexpf(1 + (float)rank, -148);
		break;
	case 1:
		x = 0x1.8p126f;
		break;
	case 2:
		x = rank == 0 ? INFINITY : x;
		break;
	case 3:
		x = rank == 1 ? NAN : x;
		break;
	case 4:
		x = rank % 2 ? -INFINITY : INFINITY;
		break;
	case 5:
		x = -0.0f;
		break;
	case 6:
		x = ldexpf(1, -24 + (int)rank % 3);
		break;
	case 7:
		x = 60000 - (float)pass;
		break;
	case 8:
		x = 1 + ldexpf((float)rank, -9);
		break;
	}
	return to(gradient_dtype(u), x);
}

/* The loop of fairscale, on any number. */
static double half_of(double w)
{
	double f = 1;

	while (fmod(w, f) == 0 && w / f > f)
		f *= 2;
	return f;
}

static double pre_of(const struct model_unit *u, uint32_t w)
{
	if (u->pre == 0 && u->post == 0)
		return half_of(w);
	return u->pre != 0 ? u->pre : 1;
}

static double post_of(const struct model_unit *u, uint32_t w)
{
	if (u->post == 0)
		return w / pre_of(u, w);
	return u->post;
}

/* tensor.div_(by) of a CPU, of a GPU, or of XLA. */
static float divide(const struct model_unit *u, const struct model_world *w, enum dtype t, float x,
		    double by)
{
	bool inverse = u->div_mode ? u->div_mode == 2 : w->nccl && u->profile != XLA;

	if (by == 1)
		return to(t, x);
	if (inverse)
		return to(t, to(t, x) * (float)(1.0 / (double)(float)by));
	return to(t, to(t, x) / (float)by);
}

/* gloo's AVG. */
static float average(enum dtype t, float x, double n)
{
	return n == 1 ? to(t, x) : to(t, to(t, x) / (float)n);
}

static float divide_above_one(const struct model_unit *u, const struct model_world *w, enum dtype t,
			      float x, double by)
{
	return divide(u, w, t, x, by > 1 ? by : 1);
}

static float multiply(enum dtype t, float x, double by)
{
	return by == 1 ? to(t, x) : to(t, to(t, x) * to(t, (float)by));
}

/* FSDP2: SUM with factors of its own, instead of AVG and PREMUL_SUM? */
static bool sums(const struct model_unit *u)
{
	return u->force || reduce_dtype(u) == DTYPE_FP16;
}

struct sizes {
	uint32_t w, shard, replicas;
};

static struct sizes sizes_of(const struct model_unit *u, const struct model_world *w)
{
	struct sizes s = { w->ranks, w->ranks, 1 };

	if (u->strategy == REPLICATE || is_ddp(u))
		s.shard = 1;
	if (u->strategy == HYBRID)
		s.shard = u->shard_ranks;
	CHECK(s.shard > 0);
	s.replicas = s.w / s.shard;
	return s;
}

/* Before it is sent. */
static float first(const struct model_unit *u, const struct model_world *w, float x)
{
	struct sizes s = sizes_of(u, w);
	enum dtype t = reduce_dtype(u), g = gradient_dtype(u);
	double factor = u->factor != 0 ? u->factor : s.w;

	switch (u->profile) {
	case XLA:
		return to(t, divide_above_one(u, w, g, x, pre_of(u, s.w)));
	case FSDP2:
		if (sums(u))
			return t == DTYPE_FP16 ? divide(u, w, t, x, half_of(factor)) : to(t, x);
		if (u->factor == 0 || u->factor == s.shard)
			return w->nccl ? multiply(t, x, 1.0 / s.shard) : to(t, x);
		return s.shard > 1 ? multiply(t, x, 1 / u->factor) : to(t, x);
	case DDP:
		return s.w == 1 ? x : to(g, x * (float)(1.0 / s.w));
	case DDP_HOOK:
		return divide(u, w, t, x, s.w);
	case DDP_VIEW:
		return divide(u, w, g, x, s.w);
	default:
		return divide_above_one(u, w, t, x, pre_of(u, s.w));
	}
}

/* What a reduce-scatter gives. */
static float scattered(const struct model_unit *u, const struct model_world *w, float x)
{
	struct sizes s = sizes_of(u, w);
	enum dtype t = reduce_dtype(u);

	if (u->profile != FSDP2)
		return x;
	if (s.shard == 1)
		return u->factor != 0 ? divide(u, w, t, x, u->factor) : x;
	if (sums(u) || w->nccl || (u->factor != 0 && u->factor != s.shard))
		return x;
	return average(t, x, s.shard);
}

static bool averages_replicas(const struct model_unit *u)
{
	return u->profile == FSDP2 && !sums(u) && u->factor == 0;
}

/* Before the all-reduce between replicas. */
static float between(const struct model_unit *u, const struct model_world *w, float x)
{
	struct sizes s = sizes_of(u, w);

	return averages_replicas(u) && w->nccl ? multiply(reduce_dtype(u), x, 1.0 / s.replicas) : x;
}

/* After all of them; fp32. */
static float last(const struct model_unit *u, const struct model_world *w, float x)
{
	struct sizes s = sizes_of(u, w);
	enum dtype t = reduce_dtype(u);
	double factor = u->factor != 0 ? u->factor : s.w;

	switch (u->profile) {
	case XLA:
		if (u->pre == 1 && u->post == 1)
			return multiply(t, x, 1.0 / s.w);
		return divide_above_one(u, w, DTYPE_FP32, x, post_of(u, s.w));
	case FSDP2:
		if (sums(u))
			return divide(u, w, t, x,
				      t == DTYPE_FP16 ? factor / half_of(factor) : factor);
		return averages_replicas(u) && !w->nccl ? average(t, x, s.replicas) : x;
	case DDP_HOOK: /* copied back into the bucket */
		return to(gradient_dtype(u), x);
	case DDP:
	case DDP_VIEW:
		return x;
	default:
		return divide_above_one(u, w, t, x, post_of(u, s.w));
	}
}

/* What one element has come to. */
struct state {
	bool adds_before; /* the reduced gradient is where autograd adds the next */
	bool has, has_sum[MODEL_MAX_RANKS], has_partial;
	float grad;
	float sum[MODEL_MAX_RANKS];     /* accumulated, by rank */
	float partial[MODEL_MAX_RANKS]; /* kept, by replica, or by device of one sum */
};

/* Autograd, or FSDP2, adds it to what there is. */
static void accumulate(const struct model_unit *u, struct state *s, uint32_t r, float x)
{
	enum dtype t = u->profile == FSDP2 ? reduce_dtype(u) : gradient_dtype(u);

	if (s->has_sum[r])
		s->sum[r] = to(t, s->sum[r] + x);
	else if (s->adds_before && s->has)
		s->sum[r] = to(t, s->grad + x);
	else
		s->sum[r] = to(t, x);
	s->has_sum[r] = true;
}

/* Are the ranks of every replica on one device? */
static bool is_whole(const struct model_world *w, uint32_t shard)
{
	for (uint32_t i = 0; i < w->ranks; i++)
		if (w->device_of[i] != w->device_of[i - i % shard])
			return false;
	return true;
}

/* Of those of @x that are in [begin, end) and on @device. Return: is there one? */
static bool add_on(enum dtype t, const struct model_world *w, const float *x, uint32_t begin,
		   uint32_t end, unsigned device, float *ret)
{
	bool any = false;

	for (uint32_t r = begin; r < end; r++) {
		if (w->device_of[r] != device)
			continue;
		*ret = any ? to(t, *ret + x[r]) : x[r];
		any = true;
	}
	return any;
}

/* @x, by rank: those in [begin, end) of each device, then over the devices. */
static float add_ranks(enum dtype t, const struct model_world *w, const float *x, uint32_t begin,
		       uint32_t end)
{
	float total = 0, on = 0;
	bool any = false;

	for (unsigned d = 0; d < w->devices; d++) {
		if (!add_on(t, w, x, begin, end, d, &on))
			continue;
		total = any ? to(t, total + on) : on;
		any = true;
	}
	return total;
}

/* @p, by replica. */
static float add_replicas(const struct model_unit *u, const struct model_world *w, const float *p)
{
	struct sizes s = sizes_of(u, w);
	enum dtype t = reduce_dtype(u);
	struct model_world like = { .ranks = s.replicas, .devices = w->devices };
	float x[MODEL_MAX_RANKS];

	for (uint32_t r = 0; r < s.replicas; r++) {
		x[r] = between(u, w, p[r]);
		like.device_of[r] = is_whole(w, s.shard) ? w->device_of[r * s.shard] : 0;
	}
	return add_ranks(t, &like, x, 0, s.replicas);
}

/* Has each replica a set of devices of its own, all of one size, one behind the other? */
static bool has_sets(const struct model_world *w, const struct sizes *s)
{
	unsigned each = w->devices / s->replicas;

	if (each < 2 || each * s->replicas != w->devices)
		return false;
	for (uint32_t r = 0; r < w->ranks; r++)
		if (w->device_of[r] / each != r / s->shard)
			return false;
	return true;
}

/* Does it matter which of a device's ranks are in which replica? Else NCCL adds them all as they
 * come: those of each device first. */
static bool is_one_sum(const struct model_unit *u, const struct model_world *w)
{
	struct sizes s = sizes_of(u, w);

	if (s.replicas == 1)
		return true;
	return !is_whole(w, s.shard) && !averages_replicas(u) && !has_sets(w, &s);
}

static void reduce(const struct model_unit *u, const struct model_world *w, struct state *s,
		   bool defer)
{
	uint32_t shard = sizes_of(u, w).shard, replicas = sizes_of(u, w).replicas;
	enum dtype t = reduce_dtype(u);
	bool one = is_one_sum(u, w);
	float x[MODEL_MAX_RANKS], p[MODEL_MAX_RANKS] = { 0 }, sum;
	uint32_t n = one ? w->devices : replicas;

	for (uint32_t r = 0; r < w->ranks; r++) {
		x[r] = first(u, w, s->sum[r]);
		s->has_sum[r] = false;
	}
	for (uint32_t i = 0; i < n; i++) {
		if (one)
			CHECK(add_on(t, w, x, 0, w->ranks, i, &p[i]));
		else
			p[i] = add_ranks(t, w, x, i * shard, (i + 1) * shard);
		p[i] = scattered(u, w, p[i]);
		p[i] = s->has_partial ? to(t, s->partial[i] + p[i]) : p[i];
	}
	s->has_partial = defer;
	memcpy(s->partial, p, sizeof(p));
	if (defer)
		return;
	sum = one ? p[0] : add_replicas(u, w, p);
	for (uint32_t i = 1; one && i < n; i++)
		sum = to(t, sum + p[i]);
	sum = last(u, w, sum);
	s->grad = s->has && !s->adds_before ? s->grad + sum : sum;
	s->has = true;
}

/* DDP, and FSDP1 and fairscale where they do not shard, in fp32. */
static bool adds_before(const struct model_unit *u, const struct model_world *w)
{
	bool whole = sizes_of(u, w).shard == 1 && gradient_dtype(u) == DTYPE_FP32;

	return is_ddp(u) || (whole && u->profile == FSDP1) ||
	       (whole && w->ranks == 1 && u->profile <= FAIRSCALE);
}

float model_gradient(const struct model_unit *u, const struct model_world *w, size_t i)
{
	struct state s = { .adds_before = adds_before(u, w) };
	unsigned pass = 0;

	for (const char *p = u->passes; *p; p++, pass++) {
		for (uint32_t r = 0; r < w->ranks; r++)
			if (*p != 'r' && (*p != 'm' || r % 2))
				accumulate(u, &s, r, model_number(u, r, pass, i));
		if (strchr("sdr", *p))
			reduce(u, w, &s, *p == 'd');
	}
	return s.grad;
}
