/*
 * P2: words in shared device memory as the order between two processes.
 *
 * The waiter puts a wait on its stream and looks at the stream's state; the writer puts
 * a write on its own. Latency is from the writer's call until the waiter's CPU sees its
 * stream empty: both ends of what a submission takes. The same with an interprocess
 * event: recorded, told over shared memory, waited for.
 */
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "stage.h"

#define TURNS      200u
#define SMALL      20u
#define SPIN_NS    200000u
#define TURN_LIMIT 5000u /* ms */

/* Words of the stage. */
enum {
	ARMED, /* the waiter's turn; its wait is on its stream */
	WROTE, /* when the writer called, ns */
	BEGUN, /* the writer's turn: WROTE is set */
	ENDED, /* when the writer's CPU saw its own stream empty, ns */
	OVER,  /* the writer's turn: ENDED is set */
};

static unsigned turns_of(const struct stage *s)
{
	return s->small ? SMALL : TURNS;
}

/* Spin until the other one has come so far: nothing may sleep while times are taken.
 * Return: false when it does not come. */
static bool await(struct stage *s, unsigned word, uint64_t at_least)
{
	uint64_t end = now_ns() + UINT64_C(1000000) * TURN_LIMIT;

	while (atomic_load(&s->word[word]) < at_least)
		if (now_ns() > end)
			return false;
	return true;
}

/* What an actor is started with. */
enum { WAITS, WRITES };
enum { BY_WORD, BY_EVENT };

struct link {
	struct vmm page;
	CUevent event;
	bool by_event;
	bool busy; /* a kernel runs before the write */
};

/* value: role, means, owner of the page, busy. The owner allocates and hands over, the
 * other one imports: for writing if it writes. */
static struct link link_up(struct actor *a)
{
	struct link l = { .by_event = a->order->value[1] == BY_EVENT,
			  .busy = a->order->value[3] != 0 };
	struct message m = MESSAGE_NULL;

	actor_cuda(a);
	spin_prepare(a);
	if (a->order->value[2]) {
		vmm_create(a, 1, &l.page);
		actor_must(a, a->cuda->cuMemsetD8Async(l.page.addr, 0, l.page.bytes, a->stream),
			   "cuMemsetD8Async");
		actor_must(a, a->cuda->cuStreamSynchronize(a->stream), "cuStreamSynchronize");
		m.fd = vmm_export(a, &l.page);
		m.value[0] = l.page.bytes;
		actor_tell(a, &m);
		close(m.fd);
	} else {
		actor_hear(a, &m);
		actor_must(a,
			   vmm_import(a, m.fd, m.value[0], a->order->value[0] == WRITES, &l.page),
			   "cuMemImportFromShareableHandle");
		close(m.fd);
	}
	return l;
}

/* The event is the writer's. */
static void link_event(struct actor *a, struct link *l)
{
	struct message m = MESSAGE_NULL;
	CUipcEventHandle handle;

	if (!l->by_event)
		return;
	if (a->order->value[0] == WRITES) {
		actor_must(a,
			   a->cuda->cuEventCreate(&l->event,
						  CU_EVENT_DISABLE_TIMING | CU_EVENT_INTERPROCESS),
			   "cuEventCreate");
		actor_must(a, a->cuda->cuIpcGetEventHandle(&handle, l->event),
			   "cuIpcGetEventHandle");
		memcpy(m.handle, &handle, sizeof(handle));
		actor_tell(a, &m);
	} else {
		actor_hear(a, &m);
		memcpy(&handle, m.handle, sizeof(handle));
		actor_must(a, a->cuda->cuIpcOpenEventHandle(&l->event, handle),
			   "cuIpcOpenEventHandle");
	}
}

static void writer_turn(struct actor *a, struct link *l, uint64_t turn)
{
	struct stage *s = a->stage;

	if (!await(s, ARMED, turn))
		actor_fail(a, -1, "the waiter did not come to turn %llu", (unsigned long long)turn);
	if (l->busy)
		spin(a, SPIN_NS, 1, a->stream);
	atomic_store(&s->word[WROTE], now_ns());
	if (l->by_event)
		actor_must(a, a->cuda->cuEventRecord(l->event, a->stream), "cuEventRecord");
	else
		actor_must(a, word_write(a, a->stream, l->page.addr, turn), "cuStreamWriteValue64");
	atomic_store(&s->word[BEGUN], turn);
	actor_must(a, stream_spin(a, a->stream, TURN_LIMIT), "the writer's stream");
	atomic_store(&s->word[ENDED], now_ns());
	atomic_store(&s->word[OVER], turn);
}

static void writer(struct actor *a)
{
	struct link l = link_up(a);

	link_event(a, &l);
	for (uint64_t turn = 1; turn <= turns_of(a->stage); turn++)
		writer_turn(a, &l, turn);
	actor_done(a, 0, 0);
	actor_hear(a, &(struct message){ 0 }); /* its memory is still in use */
}

/* Return: microseconds from the write to the wake-up. */
static double waiter_turn(struct actor *a, struct link *l, uint64_t turn)
{
	struct stage *s = a->stage;
	uint64_t woke;

	if (!l->by_event)
		actor_must(a, word_wait(a, a->stream, l->page.addr, turn), "cuStreamWaitValue64");
	atomic_store(&s->word[ARMED], turn);
	if (l->by_event) {
		if (!await(s, BEGUN, turn))
			actor_fail(a, -1, "the event was not recorded");
		actor_must(a, a->cuda->cuStreamWaitEvent(a->stream, l->event, 0),
			   "cuStreamWaitEvent");
	}
	actor_must(a, stream_spin(a, a->stream, TURN_LIMIT), "the waiter's stream");
	woke = now_ns();
	if (!await(s, BEGUN, turn))
		actor_fail(a, -1, "it woke before anything was written");
	if (!l->busy)
		return (double)(woke - atomic_load(&s->word[WROTE])) / 1e3;
	/* With a kernel before it: how much later than the writer's own CPU saw the end. */
	if (!await(s, OVER, turn))
		actor_fail(a, -1, "the writer's stream does not end");
	return (double)(int64_t)(woke - atomic_load(&s->word[ENDED])) / 1e3;
}

static void waiter(struct actor *a)
{
	struct link l = link_up(a);
	double us[TURNS];
	struct message m = MESSAGE_NULL;
	unsigned n = turns_of(a->stage);

	link_event(a, &l);
	for (uint64_t turn = 1; turn <= n; turn++)
		us[turn - 1] = waiter_turn(a, &l, turn);
	m.value[0] = (uint64_t)(int64_t)(stage_quantile(us, n, 0.5) * 1000);
	m.value[1] = (uint64_t)(int64_t)(stage_quantile(us, n, 0.99) * 1000);
	actor_tell(a, &m);
	actor_hear(a, &m);
}

/* Hand @m of @from on to @to. */
static void pass_on(struct stage *s, struct role *from, struct role *to)
{
	struct message m;

	role_must(s, from, 20000, &m);
	role_tell(s, to, &m);
	if (m.fd >= 0)
		close(m.fd);
}

static void figure_of(struct stage *s, const char *name, const struct message *m)
{
	char text[56];

	snprintf(text, sizeof(text), "%s_median", name);
	stage_number(s, text, "us", (double)(int64_t)m->value[0] / 1000);
	snprintf(text, sizeof(text), "%s_p99", name);
	stage_number(s, text, "us", (double)(int64_t)m->value[1] / 1000);
}

struct variant {
	const char *name;
	unsigned means;
	bool writer_owns, busy;
};

/* Return: it wakes. */
static bool try(struct stage *s, const struct variant *v)
{
	struct message order = MESSAGE_NULL, m;
	struct role wait, write;
	char how[64];
	int rc;

	stage_step(s, "%s", v->name);
	for (unsigned i = 0; i < 16; i++)
		atomic_store(&s->word[i], 0);
	order.value[1] = v->means;
	order.value[3] = v->busy;
	order.value[0] = WAITS;
	order.value[2] = !v->writer_owns;
	wait = role_start(s, "the waiter", waiter, &order);
	order.value[0] = WRITES;
	order.value[2] = v->writer_owns;
	write = role_start(s, "the writer", writer, &order);
	pass_on(s, v->writer_owns ? &write : &wait, v->writer_owns ? &wait : &write);
	if (v->means == BY_EVENT)
		pass_on(s, &write, &wait);
	rc = role_hear(s, &wait, 60000, &m);
	if (rc == 0 && m.status == 0)
		figure_of(s, v->name, &m);
	else if (rc == 0)
		stage_text(s, v->name, "%s", m.text);
	else
		stage_text(s, v->name, "%s",
			   rc == -ETIMEDOUT ? "hung" : role_how(&wait, how, sizeof(how)));
	role_kill(s, &wait);
	role_kill(s, &write);
	return rc == 0 && m.status == 0;
}

void probe_timeline(struct stage *s)
{
	static const struct variant variants[] = {
		{ "word_importer_writes", BY_WORD, false, false },
		{ "word_importer_waits_read_only", BY_WORD, true, false },
		{ "word_after_kernel", BY_WORD, false, true },
		{ "event", BY_EVENT, false, false },
		{ "event_after_kernel", BY_EVENT, false, true },
	};
	bool works[5];

	for (unsigned i = 0; i < 5; i++)
		works[i] = try(s, &variants[i]);
	stage_answer(s,
		     works[0] && works[1]
			     ? "Yes: a wait on shared memory is woken by another process's write, "
			       "in both directions, also through a read-only mapping."
			     : "Not in all directions: see the figures.");
	stage_answer(s, works[3] ? "Interprocess events work, too."
				 : "Interprocess events do not work here.");
}
