/* P2c: a stream that waits for a process which is killed; and what releases it. */
#include <errno.h>
#include <unistd.h>

#include "stage.h"

#define SPIN_NS UINT64_C(1000000000)

enum { QUERY = 1, POISON };

/* Owns the page; one stream waits, the other is never blocked. Answers QUERY with the
 * state of the waiting stream, and POISON with the nanoseconds until it was released. */
static void waiter(struct actor *a)
{
	struct message m = MESSAGE_NULL;
	CUstream free_stream;
	struct vmm page;
	uint64_t begin;
	CUresult r;

	actor_cuda(a);
	free_stream = actor_stream(a);
	vmm_create(a, 1, &page);
	actor_must(a, a->cuda->cuMemsetD8Async(page.addr, 0, page.bytes, a->stream), "memset");
	actor_must(a, a->cuda->cuStreamSynchronize(a->stream), "cuStreamSynchronize");
	m.fd = vmm_export(a, &page);
	m.value[0] = page.bytes;
	actor_tell(a, &m);
	close(m.fd);
	actor_must(a, word_wait(a, a->stream, page.addr, 1), "cuStreamWaitValue64");
	for (;;) {
		actor_hear(a, &m);
		if (m.value[0] == QUERY) {
			actor_done(a, (uint64_t)a->cuda->cuStreamQuery(a->stream), 0);
			continue;
		}
		begin = now_ns();
		actor_must(a, word_write(a, free_stream, page.addr, INT64_MAX), "poisoning");
		r = stream_spin(a, a->stream, 10000);
		actor_done(a, (uint64_t)r, now_ns() - begin);
	}
}

/* Puts a long kernel and then the write on its stream, and says so. */
static void writer(struct actor *a)
{
	struct message m = MESSAGE_NULL;
	struct vmm page;

	actor_cuda(a);
	spin_prepare(a);
	actor_must(a, vmm_import(a, a->order->fd, a->order->value[0], true, &page), "importing");
	spin(a, SPIN_NS, 1, a->stream);
	actor_must(a, word_write(a, a->stream, page.addr, 1), "cuStreamWriteValue64");
	actor_tell(a, &m);
	actor_hear(a, &m);
}

static uint64_t ask(struct stage *s, struct role *r, uint64_t what, uint64_t *ret_ns)
{
	struct message m = MESSAGE_NULL;

	m.value[0] = what;
	role_tell(s, r, &m);
	role_must(s, r, 20000, &m);
	if (ret_ns)
		*ret_ns = m.value[1];
	return m.value[0];
}

void probe_dead_writer(struct stage *s)
{
	struct role wait = role_start(s, "the waiter", waiter, NULL), write;
	uint64_t after_kill, after_poison, ns;
	struct message m;
	double ms;

	stage_step(s, "starting");
	role_must(s, &wait, 20000, &m);
	write = role_start(s, "the writer", writer, &m);
	close(m.fd);
	role_must(s, &write, 20000, NULL);
	stage_step(s, "killing the writer");
	ms = role_kill(s, &write);
	stage_number(s, "writer_gone_after_kill", "ms", ms);
	pause_ms(1500); /* longer than its kernel would have run */
	stage_step(s, "asking the waiter");
	after_kill = ask(s, &wait, QUERY, NULL);
	stage_text(s, "waiting_stream_after_kill", "%s",
		   after_kill == CUDA_ERROR_NOT_READY ? "still waiting"
		   : after_kill == CUDA_SUCCESS       ? "went on: the write was executed"
						      : "broken");
	stage_step(s, "poisoning");
	after_poison = ask(s, &wait, POISON, &ns);
	if (after_poison == CUDA_SUCCESS)
		stage_number(s, "released_after_poison", "us", (double)ns / 1e3);
	role_end(s, &wait);
	stage_answer(s, after_kill == CUDA_ERROR_NOT_READY
				? "A stream that waits for a killed process goes on waiting."
			: after_kill == CUDA_SUCCESS
				? "The killed process's write was still executed."
				: "The waiter's stream broke with its writer.");
	stage_answer(s, after_poison == CUDA_SUCCESS
				? "Writing INT64_MAX from another stream releases it."
				: "Writing INT64_MAX did not release it within 10 s.");
}
