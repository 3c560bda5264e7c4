/*
 * What the daemon says at one time, and what has changed since the time before: steps and ops in a
 * second, and the share of the time in which ranks waited. One thread.
 */
#ifndef SHARDD_CTL_TOP_SAMPLE_H
#define SHARDD_CTL_TOP_SAMPLE_H

#include <stdbool.h>
#include <stdint.h>

#include "rpc_client.h"
#include "status.pb-c.h"

#define TOP_UNKNOWN (-1.0)

struct top_rank {
	const Shardd__V1__RankStatus *status;
	double wait; /* share of the time; TOP_UNKNOWN */
};

struct top_job {
	const Shardd__V1__JobStatus *status;
	struct top_rank *ranks; /* owned; status->n_ranks */
	double steps, ops;      /* in a second; TOP_UNKNOWN */
	double wait;            /* mean of its ranks on this node; TOP_UNKNOWN */
};

struct top_sample {
	Shardd__V1__GetStatusResponse *status; /* owned; NULL: there is no sample */
	Shardd__V1__OpsResponse *ops;          /* owned */
	char health[24];
	uint64_t at_us; /* of this machine's clock, when it was asked for */
	struct top_job *jobs;
	size_t n_jobs;
	double ops_s; /* of all jobs, in a second; TOP_UNKNOWN */
};

#define TOP_SAMPLE_NULL ((struct top_sample){ 0 })

/* Calls that are under way. */
struct top_ask {
	struct rpc_pending *calls[3]; /* status, ops, health */
	uint64_t at_us;
};

#define TOP_ASK_NULL ((struct top_ask){ 0 })

/* Ask for @job (NULL: all). @ret: end with top_ask_deinit. Return: 0 or a negative shardd_code. */
int top_ask_begin(struct rpc_client *rpc, char *job, struct top_ask *ret, struct shardd_error *err);
bool top_ask_is_open(const struct top_ask *a);
/* Wait for the answers, at most @timeout_ms. Return: true if all are there, or have failed. */
bool top_ask_wait(struct top_ask *a, int timeout_ms);
/* Take the answers, with what has changed since @before. @window_us: for how long ranks are looked at
 * if @before is none. @ret: end with top_sample_deinit. Return: 0 or a negative shardd_code. */
int top_ask_take(struct top_ask *a, const struct top_sample *before, uint64_t window_us,
		 struct top_sample *ret, struct shardd_error *err);
void top_ask_deinit(struct top_ask *a);

/* Fill in jobs, with rates, from status and ops. Return: 0 or -SHARDD_RESOURCE_EXHAUSTED. */
int top_sample_compute(struct top_sample *s, const struct top_sample *before, uint64_t window_us);
void top_sample_deinit(struct top_sample *s);

#endif
