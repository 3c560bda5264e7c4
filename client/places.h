/* The places of tensors and buffers of registered units, as the daemon last reported them. */
#ifndef SHARDD_CLIENT_PLACES_H
#define SHARDD_CLIENT_PLACES_H

#include <pthread.h>
#include <stddef.h>

#include "shardd.pb-c.h"
#include "shardd/shardd.h"

struct places_unit {
	struct shardd_tensor_place *tensors; /* owned, with the buffers behind them */
	struct shardd_buffer_place *buffers;
	struct shardd_shard_piece *pieces; /* owned: of the shard that was handed out last */
	/* owned: by tensor, did the last reduce leave it without a gradient? NULL: none */
	bool *unused;
	/* owned: by tensor, how many steps it had had when it was summoned last; NULL: never */
	uint64_t *steps;
	size_t n_tensors;
	size_t n_buffers;
	size_t n_pieces;
};

struct places {
	pthread_mutex_t lock;      /* over the rest; held for moments */
	struct places_unit *units; /* by id - 1, owned */
	size_t n;
};

void places_init(struct places *p);
void places_deinit(struct places *p);
/* Store the places of @n units. Any thread. Return: 0 or a negative shardd_code. */
int places_take(struct places *p, Shardd__V1__RegisteredUnit *const *units, size_t n,
		struct shardd_error *err);
/* The same of a shard for the trainer's own optimizer, of a unit that was noted before. */
int places_take_pieces(struct places *p, const Shardd__V1__NextShardResponse *reply,
		       struct shardd_error *err);
/* The same of what a reduce says of its unit's tensors. */
int places_take_unused(struct places *p, const Shardd__V1__ReduceResponse *reply,
		       struct shardd_error *err);
/* The same of what SummonFull says of them. */
int places_take_steps(struct places *p, const Shardd__V1__SummonFullResponse *reply,
		      struct shardd_error *err);

/* What is stored of a unit, as the functions of the API return it (unit.c). @n: entries of @ret.
 * Return: 0, -SHARDD_NOT_FOUND, or -SHARDD_INVALID_ARGUMENT. Any thread. */
int places_tensors(struct places *p, shardd_unit u, struct shardd_tensor_place *ret, size_t n,
		   struct shardd_error *err);
int places_buffers(struct places *p, shardd_unit u, struct shardd_buffer_place *ret, size_t n,
		   struct shardd_error *err);
int places_steps(struct places *p, shardd_unit u, uint64_t *ret, size_t n,
		 struct shardd_error *err);
int places_unused(struct places *p, shardd_unit u, bool *ret, size_t n, struct shardd_error *err);
int places_pieces(struct places *p, shardd_unit u, struct shardd_shard_piece *ret, size_t n,
		  size_t *ret_n, struct shardd_error *err);

#endif
