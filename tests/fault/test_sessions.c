/* Sessions when the N-th allocation fails: nothing is half-made. */
#include <criterion/criterion.h>
#include <errno.h>
#include <sys/socket.h>

#include "core/check.h"
#include "failmalloc.h"
#include "fdcheck.h"
#include "net/conn.h"
#include "nodefix.h"
#include "session/session.h"

TestSuite(fault_sessions, .init = fdcheck_begin, .fini = fdcheck_end, .timeout = 120);

struct world {
	struct nodefix n;
	struct sessions sessions;
	struct conn *conn;
	int peer;
	bool closed;
};

static void on_closed(struct conn *c, void *userdata)
{
	struct world *w = userdata;

	(void)c;
	w->closed = true;
}

static void test_sessions_begin(struct world *w)
{
	int fds[2];

	*w = (struct world){ 0 };
	nodefix_begin(&w->n, NULL);
	sessions_init(&w->sessions, &w->n.jobs);
	cr_assert_eq(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds), 0);
	w->peer = fds[1];
	cr_assert_eq(conn_new(&w->n.run.loop, CONN_GRPC, fds[0], w->n.proc, &w->conn), 0);
	conn_on_closed(w->conn, on_closed, w);
}

static void test_sessions_end(struct world *w)
{
	cr_assert_eq(w->sessions.count, 0);
	conn_close(w->conn);
	looprun_flag(&w->n.run, &w->closed, 5);
	close(w->peer);
	nodefix_end(&w->n);
}

/* Attach, make a job, join, leave: as far as it goes. Return: 0 or a fault code. */
static int live(struct world *w, struct session **s, struct fault *f)
{
	const struct job_spec spec = { .name = "job", .world_size = 2, .lifetime = JOB_KEEP };
	struct job *job = NULL;
	bool freed;

	if (session_new(&w->sessions, w->conn, "trainer", s, f) ||
	    job_open(&w->n.jobs, &spec, 0, 0, &job, NULL, f) ||
	    session_join(*s, job, &(struct job_joining){ .rank = 1, .device = "" }, f))
		return (int)f->code;
	cr_assert_neq(session_leave(*s, &freed, f), RES_WAIT);
	return (int)f->code;
}

Test(fault_sessions, any_allocation_may_fail)
{
	unsigned n = 0;
	bool hit = true;

	while (hit) {
		struct session *s = NULL;
		struct fault f = FAULT_NULL;
		struct world w;
		int r;

		test_sessions_begin(&w);
		failmalloc_in(++n);
		r = live(&w, &s, &f);
		hit = failmalloc_hit();
		failmalloc_in(0);
		cr_assert_eq(r != 0, hit, "%u: %s", n, f.text);
		cr_assert(!r || (f.code == FAULT_EXHAUSTED && f.text[0]), "%u: %s", n, f.text);
		cr_assert_eq(w.sessions.count, s ? 1 : 0);
		cr_assert_eq(conn_user(w.conn), s);
		if (s)
			session_end(s, "is gone");
		f = FAULT_NULL;
		s = NULL;
		cr_assert_eq(live(&w, &s, &f), 0, "again: %s", f.text);
		session_end(s, "is gone");
		test_sessions_end(&w);
	}
	cr_assert_gt(n, 8);
}

Test(fault_sessions, a_session_that_ends_takes_its_rank_with_it)
{
	const struct job_spec spec = { .name = "job", .world_size = 2, .lifetime = JOB_KEEP };
	struct session *s = NULL, *second = NULL;
	struct fault f = FAULT_NULL;
	struct job *job = NULL;
	struct world w;

	test_sessions_begin(&w);
	cr_assert_eq(session_new(&w.sessions, w.conn, "trainer", &s, &f), 0);
	cr_expect_eq(session_new(&w.sessions, w.conn, "twice", &second, &f), FAULT_STATE);
	f = FAULT_NULL;
	cr_expect_null(session_member(s, &f));
	cr_expect_eq(f.code, FAULT_STATE);
	f = FAULT_NULL;
	cr_assert_eq(job_open(&w.n.jobs, &spec, 0, 0, &job, NULL, &f), 0);
	cr_assert_eq(session_join(s, job, &(struct job_joining){ .rank = 1, .device = "" }, &f), 0);
	cr_expect_eq(session_member(s, &f), job->ranks[1]);
	cr_expect_eq(session_by_token(&w.sessions, s->token), s);
	session_end(s, "is gone");
	cr_expect_eq(job->ranks[1]->state, MEMBER_DEAD);
	cr_expect_eq(job->present, 0);
	test_sessions_end(&w);
}
