#include "peerfix.h"

#include <criterion/criterion.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "core/check.h"
#include "core/clock.h"
#include "rpchost.h"

struct peerfix peerfix;

/* ---------------------------------------------------------------------------------- callbacks */

static void on_up(void *userdata, struct peer *p)
{
	struct peerfix_node *n = userdata;

	n->ups++;
	n->last = p;
}

static void on_message(void *userdata, struct peer *p, const Shardd__V1__PeerMessage *m)
{
	struct peerfix_node *n = userdata;
	uint64_t number = (uint64_t)(uintptr_t)peer_data(p);

	cr_assert_eq(m->body_case, SHARDD__V1__PEER_MESSAGE__BODY_JOB);
	n->disordered = n->disordered || m->job->epoch != number;
	peer_set_data(p, (void *)(uintptr_t)(number + 1));
	n->messages++;
}

static void on_gone(void *userdata, struct peer *p, const char *why)
{
	struct peerfix_node *n = userdata;

	n->gones++;
	if (n->last == p)
		n->last = NULL;
	snprintf(n->why, sizeof(n->why), "%s", why);
}

static void on_refused(void *userdata, const char *from, const char *why)
{
	struct peerfix_node *n = userdata;

	cr_expect(*from);
	n->refusals++;
	snprintf(n->refused, sizeof(n->refused), "%s", why);
}

static const struct peers_ops node_ops = { on_up, on_message, on_gone, on_refused };

static void on_closed(void *userdata)
{
	((struct peerfix_node *)userdata)->closed = true;
}

/* ------------------------------------------------------------------------------ begin and end */

static void on_timer(uv_timer_t *timer)
{
	(void)timer;
	for (size_t i = 0; !peerfix.held && i < ARRAY_SIZE(peerfix.nodes); i++)
		if (peerfix.nodes[i].ps)
			peers_tick(peerfix.nodes[i].ps, clock_now_us());
}

void peerfix_begin(void)
{
	peerfix = (struct peerfix){ .descriptors = rpchost_begin() };
	looprun_init(&peerfix.run);
	uv_timer_init(&peerfix.run.loop, &peerfix.timer);
	uv_timer_start(&peerfix.timer, on_timer, 20, 20);
}

void peerfix_close(struct peerfix_node *n)
{
	peers_close(n->ps, on_closed, n);
	n->ps = NULL;
	looprun_flag(&peerfix.run, &n->closed, 30);
}

void peerfix_end(void)
{
	clock_real();
	for (size_t i = 0; i < ARRAY_SIZE(peerfix.nodes); i++)
		if (peerfix.nodes[i].ps)
			peerfix_close(&peerfix.nodes[i]);
	uv_close((uv_handle_t *)&peerfix.timer, NULL);
	looprun_deinit(&peerfix.run);
	rpchost_descriptors(peerfix.descriptors);
}

static void begin_node(struct peerfix_node *n, struct loopq *queue, const char *name,
		       const struct peers_options *o)
{
	struct fault f = FAULT_NULL;

	if (o)
		n->o = *o;
	n->o.node = name;
	n->o.listen = n->o.listen ? n->o.listen : "127.0.0.1:0";
	n->o.cluster = n->o.cluster ? n->o.cluster : "test";
	if (!n->o.instance[0])
		snprintf((char *)n->o.instance, sizeof(n->o.instance), "of %s", name);
	cr_assert_eq(peers_new(queue, &n->o, &node_ops, n, &n->ps, &f), 0, "%s", f.text);
	cr_assert(peers_port(n->ps));
	snprintf(n->at, sizeof(n->at), "127.0.0.1:%u", peers_port(n->ps));
}

struct peerfix_node *peerfix_node(const char *name, const struct peers_options *o)
{
	struct peerfix_node *n = peerfix.nodes;

	while (n->ps || n->closed)
		n++;
	cr_assert_lt(n, peerfix.nodes + ARRAY_SIZE(peerfix.nodes));
	begin_node(n, &peerfix.run.queue, name, o);
	return n;
}

/* -------------------------------------------------------------------------------- to wait */

struct peer *peerfix_connect(struct peerfix_node *from, const char *name, const char *at)
{
	struct fault f = FAULT_NULL;
	struct peer *p;

	cr_assert_eq(peers_connect(from->ps, name, at, &p, &f), 0, "%s", f.text);
	cr_assert_str_eq(peer_name(p), name);
	cr_assert(peer_is_dialled(p));
	return p;
}

static bool reached(void *arg)
{
	const uint64_t *pair = arg;

	return *(const unsigned *)(uintptr_t)pair[0] >= pair[1];
}

static void await_count(const unsigned *count, unsigned n)
{
	uint64_t pair[] = { (uint64_t)(uintptr_t)count, n };

	looprun_until(&peerfix.run, reached, pair, 30);
}

void peerfix_await_up(struct peerfix_node *n, unsigned ups)
{
	await_count(&n->ups, ups);
}

void peerfix_await_gone(struct peerfix_node *n, unsigned gones)
{
	await_count(&n->gones, gones);
}

void peerfix_await_refused(struct peerfix_node *n, unsigned refusals)
{
	await_count(&n->refusals, refusals);
}

static bool received(void *arg)
{
	const uint64_t *pair = arg;

	return ((const struct peerfix_node *)(uintptr_t)pair[0])->messages >= pair[1];
}

void peerfix_await_messages(struct peerfix_node *n, uint64_t messages)
{
	uint64_t pair[] = { (uint64_t)(uintptr_t)n, messages };

	looprun_until(&peerfix.run, received, pair, 60);
}

static bool passed(void *arg)
{
	return clock_now_us() >= *(const uint64_t *)arg;
}

void peerfix_turn(unsigned ms)
{
	uint64_t until = clock_now_us() + ms * UINT64_C(1000);

	looprun_until(&peerfix.run, passed, &until, ms / 1000 + 30);
}

void peerfix_link(struct peerfix_node *from, struct peerfix_node *to)
{
	unsigned ups = to->ups;

	peerfix_connect(from, to->o.node, to->at);
	peerfix_await_up(from, from->ups + 1);
	peerfix_await_up(to, ups + 1);
}

void peerfix_send(struct peer *p, uint64_t number, size_t bytes)
{
	Shardd__V1__PeerMessage m = SHARDD__V1__PEER_MESSAGE__INIT;
	Shardd__V1__JobMessage job;
	uint8_t *order = calloc(1, bytes + 1);

	cr_assert(order);
	shardd__v1__job_message__init(&job); /* its initialiser lacks braces */
	m.body_case = SHARDD__V1__PEER_MESSAGE__BODY_JOB;
	m.job = &job;
	job.job = (char *)"1000/train";
	job.epoch = number;
	job.body_case = SHARDD__V1__JOB_MESSAGE__BODY_ORDER;
	job.order = (ProtobufCBinaryData){ bytes, order };
	peer_send(p, &m);
	free(order);
}

/* -------------------------------------------------------------------------- another process */

static void on_child_timer(uv_timer_t *timer)
{
	static uint64_t number;
	struct peerfix_node *n = timer->data;

	peers_tick(n->ps, clock_now_us());
	if (n->last)
		peerfix_send(n->last, number++, 8);
}

static void run_child(const char *name, int out)
{
	struct peerfix_node n = { .ups = 0 };

	prctl(PR_SET_PDEATHSIG, SIGKILL);
	looprun_init(&peerfix.run);
	begin_node(&n, &peerfix.run.queue, name, NULL);
	uv_timer_init(&peerfix.run.loop, &peerfix.timer);
	peerfix.timer.data = &n;
	uv_timer_start(&peerfix.timer, on_child_timer, 20, 20);
	if (write(out, n.at, sizeof(n.at)) == sizeof(n.at))
		uv_run(&peerfix.run.loop, UV_RUN_DEFAULT);
	_exit(1);
}

pid_t peerfix_fork(const char *name, char *at)
{
	int ends[2];
	pid_t pid;

	cr_assert_eq(pipe(ends), 0);
	pid = fork();
	cr_assert(pid >= 0);
	if (pid == 0)
		run_child(name, ends[1]);
	close(ends[1]);
	cr_assert_eq(read(ends[0], at, 32), 32, "the other process has ended");
	close(ends[0]);
	return pid;
}

void peerfix_reap(pid_t pid)
{
	kill(pid, SIGKILL);
	cr_assert_eq(waitpid(pid, NULL, 0), pid);
}
