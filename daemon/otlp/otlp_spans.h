/*
 * What is traced: of sampled steps each op that has ended, checkpoints, and the steps themselves.
 *
 * A step is what happens to a job between two commits. It is sampled by its number, so all nodes of a job choose the
 * same ones; its trace is known by what they all know of it. Spans are copied here when they end, into one of two
 * arrays of OTLP_SPANS places; the other one is on its way to the collector. What finds no place is counted and
 * dropped. Nothing is allocated after init. Loop thread only, but for the array that was taken.
 */
#ifndef SHARDD_OTLP_OTLP_SPANS_H
#define SHARDD_OTLP_OTLP_SPANS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#include "op/recorder.h"

/* Of each array. */
#define OTLP_SPANS 4096u
/* Sampled steps that have not been told, or have been lately, of all jobs. */
#define OTLP_SPANS_STEPS 64u
#define OTLP_TRACE_BYTES 16u

struct jobs;

enum otlp_span_kind { OTLP_SPAN_STEP, OTLP_SPAN_OP, OTLP_SPAN_CHECKPOINT };

/* One span. Times are clock_now_us. */
struct otlp_span {
	uint8_t kind;   /* enum otlp_span_kind */
	bool committed; /* of a step */
	uint8_t trace[OTLP_TRACE_BYTES];
	uint64_t id, parent; /* parent 0: it has none */
	uint64_t began_us, ended_us;
	uint64_t active_us, started_us; /* of an op, as in its record; 0: never */
	uint64_t step, epoch;
	uint64_t number, bytes; /* 0: none */
	uint32_t ops, failed;   /* of a step */
	uint32_t rank;          /* of an op */
	uint32_t last_rank;     /* of a collective: who came last, and 1; 0: not known */
	int pid;
	uid_t uid;
	const char *name; /* static; NULL: of a step */
	char job[65], unit[64], group[32];
	char error[160]; /* "": none */
};

/* A sampled step. */
struct otlp_step {
	uint32_t job; /* its number, which no other living job has; 0: the place is free */
	uint64_t base, epoch;
	uint64_t committed; /* 0: not yet */
	bool told;          /* its span was made */
	struct otlp_span span;
};

struct otlp_spans {
	const struct jobs *jobs; /* borrowed */
	struct otlp_span *filling, *taken;
	size_t n_filling, n_taken;
	struct otlp_step steps[OTLP_SPANS_STEPS];
	unsigned next;                     /* step to be overwritten */
	uint32_t every;                    /* 0: nothing is traced */
	uint64_t seed;                     /* of ids */
	uint64_t last_id;                  /* of those that are no op's */
	uint64_t n_dropped;                /* for want of a place */
	void (*half_full)(void *userdata); /* often */
	void *userdata;
};

/* Return: 0 or -ENOMEM. */
int otlp_spans_init(struct otlp_spans *s, const struct jobs *jobs,
		    void (*half_full)(void *userdata), void *userdata);
/* Safe twice, and after a failed init. */
void otlp_spans_deinit(struct otlp_spans *s);
/* Trace each @every-th step from now on; 0: none. */
void otlp_spans_sample(struct otlp_spans *s, uint32_t every);

/* Steps that are over become spans; @all: those that are not over, too. */
void otlp_spans_end_steps(struct otlp_spans *s, bool all);
/* What there is goes to s->taken, which is empty (otlp_spans_given). Return: how many. */
size_t otlp_spans_take(struct otlp_spans *s);
static inline void otlp_spans_given(struct otlp_spans *s)
{
	s->n_taken = 0;
}

#endif
