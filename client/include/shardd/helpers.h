/*
 * Small functions around a client, its tickets and the scale of a loss. Part of shardd/shardd.h,
 * which includes it. Inline: nothing here is exported. Any thread, unless a comment says otherwise.
 */
#ifndef SHARDD_HELPERS_H
#define SHARDD_HELPERS_H

#include <errno.h>
#include <string.h>

#include "shardd/client.h"

/* -------------------------------------------------------------------- small */

/* The name of a code, such as "ABORTED". @code: positive or negative. Static string. */
static inline const char *shardd_code_name(int code)
{
	switch (code < 0 ? -code : code) {
	case SHARDD_OK:
		return "OK";
	case SHARDD_CANCELLED:
		return "CANCELLED";
	case SHARDD_UNKNOWN:
		return "UNKNOWN";
	case SHARDD_INVALID_ARGUMENT:
		return "INVALID_ARGUMENT";
	case SHARDD_DEADLINE_EXCEEDED:
		return "DEADLINE_EXCEEDED";
	case SHARDD_NOT_FOUND:
		return "NOT_FOUND";
	case SHARDD_ALREADY_EXISTS:
		return "ALREADY_EXISTS";
	case SHARDD_PERMISSION_DENIED:
		return "PERMISSION_DENIED";
	case SHARDD_RESOURCE_EXHAUSTED:
		return "RESOURCE_EXHAUSTED";
	case SHARDD_FAILED_PRECONDITION:
		return "FAILED_PRECONDITION";
	case SHARDD_ABORTED:
		return "ABORTED";
	case SHARDD_UNIMPLEMENTED:
		return "UNIMPLEMENTED";
	case SHARDD_INTERNAL:
		return "INTERNAL";
	case SHARDD_UNAVAILABLE:
		return "UNAVAILABLE";
	case SHARDD_DATA_LOSS:
		return "DATA_LOSS";
	case 11:
		return "OUT_OF_RANGE";
	case 16:
		return "UNAUTHENTICATED";
	default:
		return "UNKNOWN";
	}
}

/* Bytes per element; 0 if @dtype is not a value of the enum. */
static inline size_t shardd_dtype_size(enum shardd_dtype dtype)
{
	return dtype == SHARDD_FP32                           ? 4
	       : dtype == SHARDD_BF16 || dtype == SHARDD_FP16 ? 2
	       : dtype == SHARDD_E4M3                         ? 1
							      : 0;
}

static inline struct shardd_info shardd_info_(const shardd_client *c)
{
	struct shardd_info info;

	memset(&info, 0, sizeof(info));
	info.size = sizeof(info);
	if (shardd_get_info(c, &info, NULL) < 0)
		info.daemon_version = info.instance = "";
	return info;
}

/* Fields of struct shardd_info; "" or 0 if @c is NULL. */
static inline const char *shardd_daemon_version(const shardd_client *c)
{
	return shardd_info_(c).daemon_version;
}

static inline uint64_t shardd_session(const shardd_client *c)
{
	return shardd_info_(c).session;
}

static inline const char *shardd_instance(const shardd_client *c)
{
	return shardd_info_(c).instance;
}

static inline uint64_t shardd_daemon_started(const shardd_client *c)
{
	return shardd_info_(c).daemon_started;
}

static inline bool shardd_draining(const shardd_client *c)
{
	return shardd_info_(c).draining;
}

/* The scale of a loss, by the rule of PyTorch's GradScaler. Every rank has its own; they stay
 * equal, since found_inf is the same on all ranks. These functions make no call to the daemon. */
struct shardd_scaler {
	float scale; /* multiply the loss by it */
	double growth_factor;
	double backoff_factor;
	uint32_t growth_interval; /* steps without an infinity until the scale grows */
	uint32_t steps;           /* since the scale changed */
};

/* Set the defaults: scale 65536, factors 2 and 0.5, interval 2000. */
static inline void shardd_scaler_init(struct shardd_scaler *s)
{
	s->scale = 65536;
	s->growth_factor = 2;
	s->backoff_factor = 0.5;
	s->growth_interval = 2000;
	s->steps = 0;
}

/* The inverse of the scale, for shardd_unscale. */
static inline double shardd_scaler_inverse(const struct shardd_scaler *s)
{
	return (float)(1.0 / (double)s->scale);
}

/* Update the scale after a step. @found_inf: of that step. A scale that would no longer be finite
 * does not grow. One thread at a time. */
static inline void shardd_scaler_update(struct shardd_scaler *s, bool found_inf)
{
	double grown;

	if (found_inf) {
		s->scale = (float)(s->scale * s->backoff_factor);
		s->steps = 0;
		return;
	}
	if (++s->steps != s->growth_interval)
		return;
	grown = (double)s->scale * s->growth_factor;
	if (grown < 3.4028235677973366e38) /* what a float rounds to infinity */
		s->scale = (float)grown;
	s->steps = 0;
}

/* ----------------------------------------------------------------- waiting */

/* Check whether an op is done. Return: 1 (done: the ticket has ended and @ret, if not NULL, is
 * filled), 0 (not yet), or a negative code (the op failed and the ticket has ended;
 * INVALID_ARGUMENT with native EBADF: no such ticket). Never blocks. */
static inline int shardd_poll(shardd_client *c, shardd_ticket t, struct shardd_result *ret,
			      struct shardd_error *err)
{
	struct shardd_error e;
	int r = shardd_wait(c, t, 0, ret, &e);

	if (r == 0)
		return 1;
	if (r == -SHARDD_DEADLINE_EXCEEDED && e.native == EAGAIN)
		return 0;
	if (err)
		*err = e;
	return r;
}

/* Wait for @n tickets, in this order. Return: 0, or the code of the first op that failed, which
 * @err describes. All tickets have ended on return, unless a wait was interrupted: then the rest
 * are still valid, *@ret_n (if not NULL) says how many were waited for, and if no op has failed
 * before, the code is CANCELLED with native EINTR. */
static inline int shardd_wait_all(shardd_client *c, const shardd_ticket *tickets, size_t n,
				  size_t *ret_n, struct shardd_error *err)
{
	struct shardd_error e;
	int first = 0;
	size_t i;

	for (i = 0; i < n; i++) {
		int r = shardd_wait(c, tickets[i], -1, NULL, &e);

		if (r < 0 && first == 0) {
			first = r;
			if (err)
				*err = e;
		}
		if (r == -SHARDD_CANCELLED && e.native == EINTR)
			break;
	}
	if (ret_n)
		*ret_n = i;
	return first;
}

/* Train until the end, joining again when a peer dies. @enter joins the job, registers the units
 * and initialises them; @train trains from there. Both return 0, a negative code, or a positive
 * number, which also ends the loop. After ABORTED (a peer died or left), @enter is called again;
 * what was not committed is dropped. Return: what the last call returned, never ABORTED. */
static inline int shardd_rejoin(int (*enter)(void *data), int (*train)(void *data), void *data)
{
	int r;

	do {
		r = enter(data);
		if (r == 0)
			r = train(data);
	} while (r == -SHARDD_ABORTED);
	return r;
}

#endif
