#include "places.h"

#include <stdlib.h>
#include <string.h>

#include "client_error.h"

/* Ids come from the daemon: a wild one must not make us take wild amounts of memory. */
#define MAX_UNITS (1u << 24)

void places_init(struct places *p)
{
	*p = (struct places){ 0 };
	pthread_mutex_init(&p->lock, NULL);
}

static void places_unit_deinit(struct places_unit *u)
{
	free(u->tensors);
	free(u->pieces);
	free(u->unused);
	free(u->steps);
	*u = (struct places_unit){ 0 };
}

void places_deinit(struct places *p)
{
	for (size_t i = 0; i < p->n; i++)
		places_unit_deinit(&p->units[i]);
	free(p->units);
	p->units = NULL;
	p->n = 0;
	pthread_mutex_destroy(&p->lock);
}

static int places_grow(struct places *p, size_t n)
{
	struct places_unit *grown;

	if (n <= p->n)
		return 0;
	n = n < 2 * p->n ? 2 * p->n : n;
	grown = realloc(p->units, n * sizeof(*grown));
	if (!grown)
		return -1;
	memset(grown + p->n, 0, (n - p->n) * sizeof(*grown));
	p->units = grown;
	p->n = n;
	return 0;
}

static int places_fill(struct places_unit *u, const Shardd__V1__RegisteredUnit *m)
{
	u->tensors = malloc((m->n_tensors + 1) * sizeof(*u->tensors) +
			    m->n_buffers * sizeof(*u->buffers));
	if (!u->tensors)
		return -1;
	u->buffers = (struct shardd_buffer_place *)(u->tensors + m->n_tensors + 1);
	for (size_t i = 0; i < m->n_tensors; i++)
		u->tensors[i] = (struct shardd_tensor_place){
			.unit = m->tensors[i]->unit,
			.offset = m->tensors[i]->offset,
			.elements = m->tensors[i]->elements,
			.shard_offset = m->tensors[i]->shard_offset,
			.shard_elements = m->tensors[i]->shard_elements,
		};
	for (size_t i = 0; i < m->n_buffers; i++)
		u->buffers[i] =
			(struct shardd_buffer_place){ m->buffers[i]->offset, m->buffers[i]->bytes };
	u->n_tensors = m->n_tensors;
	u->n_buffers = m->n_buffers;
	return 0;
}

static int places_take_one(struct places *p, const Shardd__V1__RegisteredUnit *m)
{
	struct places_unit u = { 0 };

	if (!m->unit || m->unit > MAX_UNITS || places_grow(p, m->unit) < 0 ||
	    places_fill(&u, m) < 0) {
		places_unit_deinit(&u);
		return -1;
	}
	places_unit_deinit(&p->units[m->unit - 1]);
	p->units[m->unit - 1] = u;
	return 0;
}

int places_take(struct places *p, Shardd__V1__RegisteredUnit *const *units, size_t n,
		struct shardd_error *err)
{
	int r = 0;

	pthread_mutex_lock(&p->lock);
	for (size_t i = 0; r == 0 && i < n; i++)
		r = places_take_one(p, units[i]);
	pthread_mutex_unlock(&p->lock);
	return r < 0 ? error_memory(err) : 0;
}

/* Called with the lock held. Return: 0 or a negative shardd_code. */
static int places_find(struct places *p, shardd_unit u, const struct places_unit **ret,
		       struct shardd_error *err)
{
	if (!u || u > p->n || !p->units[u - 1].tensors)
		return error_set(err, SHARDD_NOT_FOUND, "unit",
				 "unit %u was not registered by this client", u);
	*ret = &p->units[u - 1];
	return 0;
}

/* Note of a unit what a reply says of it. Return: 0, or -1 for want of memory. */
typedef int (*fill_fn)(struct places_unit *u, const void *reply);

static int places_fill_pieces(struct places_unit *u, const void *data)
{
	const Shardd__V1__NextShardResponse *reply = data;
	struct shardd_shard_piece *pieces = calloc(reply->n_pieces + 1, sizeof(*pieces));

	if (!pieces)
		return -1;
	for (size_t i = 0; i < reply->n_pieces; i++)
		pieces[i] = (struct shardd_shard_piece){
			.tensor = reply->pieces[i]->tensor,
			.first = reply->pieces[i]->first,
			.elements = reply->pieces[i]->elements,
			.at = reply->pieces[i]->at,
		};
	free(u->pieces);
	u->pieces = pieces;
	u->n_pieces = reply->n_pieces;
	return 0;
}

/* A unit that another client registered needs no places here. */
static int places_take_reply(struct places *p, uint32_t unit, fill_fn note, const void *reply,
			     struct shardd_error *err)
{
	int r = 0;

	pthread_mutex_lock(&p->lock);
	if (unit && unit <= p->n && p->units[unit - 1].tensors)
		r = note(&p->units[unit - 1], reply);
	pthread_mutex_unlock(&p->lock);
	return r < 0 ? error_memory(err) : 0;
}

int places_take_pieces(struct places *p, const Shardd__V1__NextShardResponse *reply,
		       struct shardd_error *err)
{
	return places_take_reply(p, reply->unit, places_fill_pieces, reply, err);
}

/* Tensors for which a reply has a bit. */
#define BITS 4096u

static bool places_has_bit(const ProtobufCBinaryData *bits, size_t i)
{
	return i / 8 < bits->len && (bits->data[i / 8] >> i % 8 & 1);
}

/* Those behind the bits are only unused if all are. */
static int places_fill_unused(struct places_unit *u, const void *data)
{
	const Shardd__V1__ReduceResponse *reply = data;
	bool *unused = NULL;

	if (reply->unused_bits.len) {
		unused = calloc(u->n_tensors, sizeof(*unused));
		if (!unused)
			return -1;
	}
	for (size_t i = 0; unused && i < u->n_tensors; i++)
		unused[i] = i < BITS ? places_has_bit(&reply->unused_bits, i) : reply->unused;
	free(u->unused);
	u->unused = unused;
	return 0;
}

int places_take_unused(struct places *p, const Shardd__V1__ReduceResponse *reply,
		       struct shardd_error *err)
{
	return places_take_reply(p, reply->unit, places_fill_unused, reply, err);
}

static int places_fill_steps(struct places_unit *u, const void *data)
{
	const Shardd__V1__SummonFullResponse *reply = data;
	uint64_t *steps = calloc(u->n_tensors + 1, sizeof(*steps));

	if (!steps)
		return -1;
	for (size_t i = 0; i < u->n_tensors; i++)
		steps[i] =
			i < reply->n_tensor_steps ? reply->tensor_steps[i] : reply->optimizer_steps;
	free(u->steps);
	u->steps = steps;
	return 0;
}

int places_take_steps(struct places *p, const Shardd__V1__SummonFullResponse *reply,
		      struct shardd_error *err)
{
	return places_take_reply(p, reply->unit, places_fill_steps, reply, err);
}

/* A list of a unit, for the caller. */
struct list_of {
	const char *what;
	size_t size; /* of an entry */
	size_t n;
	const void *entries;
};

static struct list_of places_tensors_of(const struct places_unit *u)
{
	return (struct list_of){ "tensors", sizeof(*u->tensors), u->n_tensors, u->tensors };
}

static struct list_of places_buffers_of(const struct places_unit *u)
{
	return (struct list_of){ "buffers", sizeof(*u->buffers), u->n_buffers, u->buffers };
}

static struct list_of places_steps_of(const struct places_unit *u)
{
	return (struct list_of){ "tensors with steps", sizeof(*u->steps),
				 u->steps ? u->n_tensors : 0, u->steps };
}

static int places_copy(const struct list_of *from, void *ret, size_t n, struct shardd_error *err)
{
	if (n != from->n || (n && !ret))
		return error_set(err, SHARDD_INVALID_ARGUMENT, "n",
				 "there is room for %zu places: the unit has %zu %s", ret ? n : 0,
				 from->n, from->what);
	if (n)
		memcpy(ret, from->entries, n * from->size);
	return 0;
}

/* @of: which of its lists. */
static int places_give(struct places *p, shardd_unit u,
		       struct list_of (*of)(const struct places_unit *), void *ret, size_t n,
		       struct shardd_error *err)
{
	const struct places_unit *pu = NULL;
	int r;

	pthread_mutex_lock(&p->lock);
	r = places_find(p, u, &pu, err);
	if (r == 0) {
		struct list_of list = of(pu);

		r = places_copy(&list, ret, n, err);
	}
	pthread_mutex_unlock(&p->lock);
	return r;
}

int places_tensors(struct places *p, shardd_unit u, struct shardd_tensor_place *ret, size_t n,
		   struct shardd_error *err)
{
	return places_give(p, u, places_tensors_of, ret, n, err);
}

int places_buffers(struct places *p, shardd_unit u, struct shardd_buffer_place *ret, size_t n,
		   struct shardd_error *err)
{
	return places_give(p, u, places_buffers_of, ret, n, err);
}

int places_steps(struct places *p, shardd_unit u, uint64_t *ret, size_t n, struct shardd_error *err)
{
	return places_give(p, u, places_steps_of, ret, n, err);
}

int places_unused(struct places *p, shardd_unit u, bool *ret, size_t n, struct shardd_error *err)
{
	const struct places_unit *pu = NULL;
	int r;

	pthread_mutex_lock(&p->lock);
	r = places_find(p, u, &pu, err);
	if (r == 0 && (n != pu->n_tensors || !ret))
		r = error_set(err, SHARDD_INVALID_ARGUMENT, "n",
			      "there is room for %zu tensors: the unit has %zu", ret ? n : 0,
			      pu->n_tensors);
	for (size_t i = 0; r == 0 && i < n; i++)
		ret[i] = pu->unused && pu->unused[i];
	pthread_mutex_unlock(&p->lock);
	return r;
}

int places_pieces(struct places *p, shardd_unit u, struct shardd_shard_piece *ret, size_t n,
		  size_t *ret_n, struct shardd_error *err)
{
	const struct places_unit *pu = NULL;
	int r;

	if (n && !ret)
		return error_set(err, SHARDD_INVALID_ARGUMENT, "ret", "ret is NULL, but n is %zu",
				 n);
	pthread_mutex_lock(&p->lock);
	r = places_find(p, u, &pu, err);
	if (r == 0) {
		if (ret && pu->n_pieces)
			memcpy(ret, pu->pieces,
			       (n < pu->n_pieces ? n : pu->n_pieces) * sizeof(*ret));
		*ret_n = pu->n_pieces;
	}
	pthread_mutex_unlock(&p->lock);
	return r;
}
