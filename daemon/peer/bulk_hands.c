/* The threads that move the bytes of fetches, and what both ends have in common. */
#include <errno.h>
#include <grpc/support/time.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>

#include "core/check.h"
#include "peer/bulk_impl.h"

/* ------------------------------------------------------------------------------- the threads */

void bulk_hands_submit(struct bulk_tag *t, atomic_uint *refs, grpc_call *call, const grpc_op *ops,
		       size_t n)
{
	atomic_fetch_add(refs, 1);
	CHECK(grpc_call_start_batch(call, ops, n, t, NULL) == GRPC_CALL_OK);
}

/* Several take events of one queue, so while one moves a chunk another one waits for the next. */
static void *bulk_hands_main(void *bulk)
{
	struct bulk *b = bulk;

	for (;;) {
		grpc_event ev = grpc_completion_queue_next(
			b->cq, gpr_inf_future(GPR_CLOCK_MONOTONIC), NULL);
		struct bulk_tag *t = ev.tag;

		if (ev.type == GRPC_QUEUE_SHUTDOWN)
			return NULL;
		if (ev.type == GRPC_OP_COMPLETE)
			t->fn(t->of, ev.success != 0);
	}
}

int bulk_hands_start(struct peers *ps)
{
	struct bulk *b = ps->bulk;
	sigset_t all, old;
	int r = 0;

	sigfillset(&all); /* signals are the loop's */
	pthread_sigmask(SIG_SETMASK, &all, &old);
	while (r == 0 && b->n_threads < BULK_HANDS) {
		r = pthread_create(&b->threads[b->n_threads], NULL, bulk_hands_main, b);
		if (r == 0)
			pthread_setname_np(b->threads[b->n_threads++], "shardd-bulk");
	}
	pthread_sigmask(SIG_SETMASK, &old, NULL);
	return -r;
}

/* ------------------------------------------------------------------------------ begin and end */

int bulk_hands_new(struct peers *ps, struct fault *f)
{
	struct bulk *b = calloc(1, sizeof(*b));

	if (!b)
		return fault_errno(f, -ENOMEM, "listening for other nodes");
	b->ps = ps;
	list_init(&b->served);
	list_init(&b->fetches);
	list_init(&b->channels);
	b->cq = grpc_completion_queue_create_for_next(NULL);
	ps->bulk = b;
	return 0;
}

void bulk_hands_register(struct peers *ps)
{
	struct bulk *b = ps->bulk;

	grpc_server_register_completion_queue(ps->server, b->cq, NULL);
	b->method = grpc_server_register_method(ps->server, BULK_METHOD, NULL,
						GRPC_SRM_PAYLOAD_NONE, 0);
	CHECK(b->method);
}

void bulk_hands_arm(struct peers *ps)
{
	bulk_serve_arm(ps->bulk);
}

void bulk_hands_tick(struct peers *ps, uint64_t now_us, uint64_t blocked_us)
{
	bulk_serve_arm(ps->bulk); /* there may be memory now */
	bulk_serve_tick(ps->bulk, now_us, blocked_us);
	bulk_fetch_tick(ps->bulk, now_us, blocked_us);
	bulk_dial_tick(ps->bulk, now_us);
}

void bulk_hands_close(struct peers *ps)
{
	bulk_serve_close(ps->bulk);
	bulk_fetch_close(ps->bulk);
	bulk_dial_close(ps->bulk);
}

void bulk_hands_shutdown(struct peers *ps)
{
	if (ps->bulk)
		grpc_completion_queue_shutdown(ps->bulk->cq);
}

void bulk_hands_free(struct peers *ps)
{
	struct bulk *b = ps->bulk;

	if (!b)
		return;
	CHECK(!b->n_open && !b->n_silent && !b->n_armed && !b->n_fetches &&
	      list_empty(&b->channels));
	for (unsigned i = 0; i < b->n_threads; i++)
		pthread_join(b->threads[i], NULL);
	if (!b->n_threads) /* nobody has taken it */
		CHECK(grpc_completion_queue_next(b->cq, gpr_inf_future(GPR_CLOCK_MONOTONIC), NULL)
			      .type == GRPC_QUEUE_SHUTDOWN);
	grpc_completion_queue_destroy(b->cq);
	free(b);
	ps->bulk = NULL;
}

/* ---------------------------------------------------------------------------- of both ends */

uint64_t bulk_hands_silent_us(struct bulk_watch *w, uint64_t moved, uint64_t now_us,
			      uint64_t blocked_us)
{
	if (moved != w->seen) {
		w->seen = moved;
		w->seen_us = now_us;
	}
	w->seen_us += blocked_us;
	if (w->seen_us > now_us)
		w->seen_us = now_us;
	return now_us - w->seen_us;
}

bool bulk_hands_key_is_good(const char *key)
{
	size_t n = strnlen(key, BULK_KEY_BYTES + 1);

	for (size_t i = 0; i < n; i++)
		if (key[i] < ' ' || key[i] > '~')
			return false;
	return n && n <= BULK_KEY_BYTES;
}

static const struct {
	enum fault_code code;
	grpc_status_code status;
} bulk_hands_codes[] = {
	{ FAULT_INVALID, GRPC_STATUS_INVALID_ARGUMENT },
	{ FAULT_STATE, GRPC_STATUS_FAILED_PRECONDITION },
	{ FAULT_NOT_FOUND, GRPC_STATUS_NOT_FOUND },
	{ FAULT_DENIED, GRPC_STATUS_PERMISSION_DENIED },
	{ FAULT_EXHAUSTED, GRPC_STATUS_RESOURCE_EXHAUSTED },
	{ FAULT_ABORTED, GRPC_STATUS_ABORTED },
	{ FAULT_DEADLINE, GRPC_STATUS_DEADLINE_EXCEEDED },
	{ FAULT_CANCELLED, GRPC_STATUS_CANCELLED },
	{ FAULT_UNAVAILABLE, GRPC_STATUS_UNAVAILABLE },
	{ FAULT_UNIMPLEMENTED, GRPC_STATUS_UNIMPLEMENTED },
	{ FAULT_LOST, GRPC_STATUS_DATA_LOSS },
};

grpc_status_code bulk_hands_status(enum fault_code code)
{
	for (size_t i = 0; i < ARRAY_SIZE(bulk_hands_codes); i++)
		if (bulk_hands_codes[i].code == code)
			return bulk_hands_codes[i].status;
	return GRPC_STATUS_INTERNAL;
}

enum fault_code bulk_hands_code(grpc_status_code status)
{
	for (size_t i = 0; i < ARRAY_SIZE(bulk_hands_codes); i++)
		if (bulk_hands_codes[i].status == status)
			return bulk_hands_codes[i].code;
	return FAULT_INTERNAL;
}
