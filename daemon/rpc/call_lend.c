/*
 * Messages of which a part is lent to core: memory that is mapped for other reasons, such as a
 * generation's, and that a copy would double.
 *
 * Core writes to the socket on the thread that starts a batch, until the socket takes no more. For a
 * message of a MiB that is a copy of as much, so a thread of its own ("shardd-lend") starts it.
 *
 * Lent bytes go back when core has dropped its last slice of them, on any thread, which may be after
 * the call has ended. The server stays until then: a loan counts as a live call.
 */
#include <errno.h>
#include <grpc/byte_buffer.h>
#include <grpc/slice.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>

#include "core/check.h"
#include "rpc/rpc_server_impl.h"
#include "rpc/status_map.h"

struct call_loan {
	struct work work;
	struct rpc_server *server;
	rpc_returned_cb returned;
	void *userdata;
};

static void call_lend_on_returned(struct work *work)
{
	struct call_loan *l = CONTAINER_OF(work, struct call_loan, work);
	struct rpc_server *s = l->server;

	l->returned(l->userdata);
	free(l);
	if (atomic_fetch_sub(&s->n_live, 1) == 1)
		server_idle(s);
}

/* Any thread. */
static void call_lend_on_dropped(void *userdata)
{
	struct call_loan *l = userdata;

	loopq_post(l->server->loopq, &l->work, call_lend_on_returned);
}

/* Return: NULL without memory. */
static struct call_loan *call_lend_loan(struct rpc_server *s, rpc_returned_cb returned,
					void *userdata)
{
	struct call_loan *l = malloc(sizeof(*l));

	if (!l)
		return NULL;
	l->server = s;
	l->returned = returned;
	l->userdata = userdata;
	atomic_fetch_add(&s->n_live, 1);
	return l;
}

int rpc_call_send_lent(struct rpc_call *call, const struct rpc_piece *head,
		       const struct rpc_piece *rest, rpc_returned_cb returned, void *userdata)
{
	grpc_slice slices[2];
	struct call_loan *l;
	struct outgoing *o;

	MAGIC_CHECK(call, RPC_CALL_MAGIC);
	CHECK(call->slot->method->streaming && !call->ended && rest->n);
	if (call->cancelled)
		return -ECANCELED;
	l = call_lend_loan(call->server, returned, userdata);
	if (!l)
		return -ENOBUFS;
	o = call_outgoing_new(call);
	if (!o) {
		atomic_fetch_sub(&call->server->n_live, 1); /* not the last: the call has one */
		free(l);
		return -ENOBUFS;
	}
	o->lent = true;
	slices[0] = grpc_slice_from_copied_buffer((const char *)head->bytes, head->n);
	slices[1] = grpc_slice_new_with_user_data((void *)(uintptr_t)rest->bytes, rest->n,
						  call_lend_on_dropped, l);
	o->buffer = grpc_raw_byte_buffer_create(slices, ARRAY_SIZE(slices));
	grpc_slice_unref(slices[0]); /* the buffer has its own references */
	grpc_slice_unref(slices[1]);
	call_pump(call);
	return 0;
}

/* ------------------------------------------------------------------------------ the thread */

/* What core writes at once is written here. */
static void call_lend_begin(struct rpc_call *call)
{
	grpc_op ops[2] = { { .op = GRPC_OP_SEND_MESSAGE },
			   { .op = GRPC_OP_SEND_INITIAL_METADATA } };

	MAGIC_CHECK(call, RPC_CALL_MAGIC);
	ops[0].data.send_message.send_message = call->lent.message->buffer;
	CHECK(grpc_call_start_batch(call->core.call, ops, call->lent.headers ? 2 : 1,
				    &call->sent_tag, NULL) == GRPC_CALL_OK);
}

static void *call_lend_main(void *userdata)
{
	struct rpc_lender *l = userdata;

	pthread_mutex_lock(&l->mu);
	while (!l->stop) {
		struct rpc_call *call;

		if (list_empty(&l->calls)) {
			pthread_cond_wait(&l->more, &l->mu);
			continue;
		}
		call = list_first(&l->calls, struct rpc_call, lent.link);
		list_unlink(&call->lent.link);
		pthread_mutex_unlock(&l->mu);
		call_lend_begin(call);
		pthread_mutex_lock(&l->mu);
	}
	pthread_mutex_unlock(&l->mu);
	return NULL;
}

/* It is there from the first message on. Return: false: there can be none now. */
static bool call_lend_run(struct rpc_lender *l)
{
	sigset_t all, old;

	if (l->runs)
		return true;
	pthread_mutex_init(&l->mu, NULL);
	pthread_cond_init(&l->more, NULL);
	list_init(&l->calls);
	l->stop = false;
	sigfillset(&all); /* signals are the loop's */
	pthread_sigmask(SIG_SETMASK, &all, &old);
	l->runs = pthread_create(&l->thread, NULL, call_lend_main, l) == 0;
	pthread_sigmask(SIG_SETMASK, &old, NULL);
	if (l->runs)
		pthread_setname_np(l->thread, "shardd-lend");
	return l->runs;
}

void call_lend_stop(struct rpc_server *s)
{
	struct rpc_lender *l = &s->lender;

	if (!l->runs)
		return;
	pthread_mutex_lock(&l->mu);
	CHECK(list_empty(&l->calls));
	l->stop = true;
	pthread_cond_signal(&l->more);
	pthread_mutex_unlock(&l->mu);
	pthread_join(l->thread, NULL);
	pthread_cond_destroy(&l->more);
	pthread_mutex_destroy(&l->mu);
	l->runs = false;
}

/* ------------------------------------------------------------------------------ the loop */

void call_lend_start(struct rpc_call *call)
{
	struct rpc_lender *l = &call->server->lender;

	call->lent.message = list_first(&call->out.messages, struct outgoing, link);
	call->lent.headers = !call->out.headers_sent;
	call->out.headers_sent = true;
	atomic_fetch_add(&call->refs, 1); /* the batch's */
	if (!call_lend_run(l)) {
		call_lend_begin(call);
		return;
	}
	pthread_mutex_lock(&l->mu);
	list_append(&l->calls, &call->lent.link);
	pthread_cond_signal(&l->more);
	pthread_mutex_unlock(&l->mu);
}

void call_lend_told(struct rpc_call *call)
{
	if (call->lent.taken_fn && call->out.n == 0 && !call->ended && !call->cancelled)
		call->lent.taken_fn(call, call->lent.taken_data);
}

void rpc_call_on_taken(struct rpc_call *call, rpc_taken_cb fn, void *userdata)
{
	MAGIC_CHECK(call, RPC_CALL_MAGIC);
	CHECK(!call->ended);
	call->lent.taken_fn = fn;
	call->lent.taken_data = userdata;
}

void rpc_call_abort(struct rpc_call *call, const struct fault *fault)
{
	char text[sizeof(fault->text)];

	MAGIC_CHECK(call, RPC_CALL_MAGIC);
	CHECK(fault->code != FAULT_NONE && !call->ended);
	memcpy(text, fault->text, sizeof(text));
	codec_clean_text(text);
	grpc_call_cancel_with_status(call->core.call,
				     (grpc_status_code)status_map_code(fault->code), text, NULL);
}
