/*
 * One rank of charlm: what training a step and joining an epoch share. One thread.
 */
#ifndef CHARLM_TRAINER_H
#define CHARLM_TRAINER_H

#include "charlm_data.h"
#include "charlm_model.h"
#include "charlm_options.h"

#include <shardd/shardd.h>

#include <stdbool.h>
#include <stdint.h>

enum { PASSES = 2 * LAYER_N };

/* One a pass or a layer, then the ops that come once a step. */
enum slot {
	SLOT_GATHER = 0,
	SLOT_RELEASE = SLOT_GATHER + PASSES,
	SLOT_GRADIENT = SLOT_RELEASE + PASSES,
	SLOT_REDUCE = SLOT_GRADIENT + LAYER_N,
	SLOT_LOSS = SLOT_REDUCE + LAYER_N,
	SLOT_CLIP,
	SLOT_STEP,
	SLOT_N
};

struct trainer {
	const struct train_options *options;
	struct text text;
	struct model *model;
	unsigned model_count; /* samples that it is for */
	float *params;        /* copies of what cannot be used in place: 16-bit, or a GPU's */
	float *gradient;      /* the same for gradients */
	void *staged;         /* 16-bit elements on their way from or to a GPU */

	shardd_client *client;
	struct shardd_membership me;
	struct shardd_error err;
	struct shardd_unit_info units[LAYER_N];
	struct shardd_device device; /* of the last epoch; id "" before the first */
	bool on_host;                /* its memory can be used in place */
	uint64_t buffer;             /* a slot per sample of the global batch, and one to stop */
	void *shared;                /* the buffer's memory */
	float *losses;               /* the same, or @losses_copy where that is a GPU's */
	float *losses_copy;
	unsigned first, count; /* this rank's samples of the global batch */
	bool may_die;          /* --kill-at applies to this life */
	bool entered;          /* trainer_enter has been called */
	bool unfinished;       /* it ends by a signal, before the last step */

	shardd_ticket tickets[SLOT_N];
	bool open[SLOT_N];
	double loss;            /* of the step that is about to be committed */
	bool stop;              /* a rank wants no step after it */
	unsigned held[LAYER_N]; /* gathers not yet released */
	uint64_t bytes_now, bytes_peak;
	uint64_t reported_step, reported_ns;
};

/* News for people; with --json, stdout is kept for the objects. */
void trainer_say(const struct trainer *t, const char *text, ...)
	__attribute__((format(printf, 2, 3)));

/* Put an error of our own into t->err, told as the library tells its errors.
 * Return: -@code. */
int trainer_fail(struct trainer *t, enum shardd_code code, const char *text, ...)
	__attribute__((format(printf, 3, 4)));

/* Note that @bytes of the daemon's memory were mapped, or (negative) given back. */
void trainer_count(struct trainer *t, int64_t bytes);

/* Join an epoch: initialise parameters, make buffers; t->me says where to continue.
 * Return: 0 or a negative shardd_code, with t->err. */
int trainer_enter(struct trainer *t);

/* Commit @step with what this rank needs to continue from it. Return: as above. */
int trainer_commit(struct trainer *t, uint64_t step);

/* Free what the rank owns except its connection; safe twice. */
void trainer_deinit(struct trainer *t);

#endif
