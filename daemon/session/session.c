#include "session/session.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

#include "core/check.h"
#include "core/clock.h"
#include "job/base.h"
#include "net/local.h"

#define SESSION_MAGIC 0x53455353u

void sessions_init(struct sessions *s, struct jobs *jobs)
{
	*s = (struct sessions){ .jobs = jobs, .next_id = 1 };
	list_init(&s->all);
	list_init(&s->locals);
}

int session_new(struct sessions *all, struct conn *c, const char *name, struct session **ret,
		struct fault *f)
{
	struct session *s;

	if (conn_user(c))
		return fault_set(
			f, FAULT_STATE, NULL,
			"this connection already has a session, and it can have only one; channels "
			"of gRPC core (Python, C++, Ruby, PHP) with equal arguments share a "
			"connection, unless they are made with grpc.use_local_subchannel_pool=1 "
			"(docs/languages.md)");
	s = calloc(1, sizeof(*s));
	if (!s)
		return fault_errno(f, -ENOMEM, "making a session");
	if (user_charge(&s->charge, conn_account(c), USER_SESSIONS, 1, f)) {
		free(s);
		return f->code;
	}
	if (getrandom(s->token, sizeof(s->token), GRND_NONBLOCK) != (ssize_t)sizeof(s->token)) {
		user_charge_deinit(&s->charge);
		free(s);
		return fault_errno(f, -EAGAIN, "making a session token");
	}
	s->magic = SESSION_MAGIC;
	s->sessions = all;
	s->id = all->next_id++;
	s->conn = c;
	s->proc = conn_proc(c);
	s->created_us = clock_now_us();
	memcpy(s->name, name, strnlen(name, SESSION_NAME_MAX));
	list_init(&s->locals);
	list_init(&s->leases);
	list_init(&s->holds);
	list_init(&s->bases);
	list_init(&s->watches);
	list_init(&s->link);
	list_append(&all->all, &s->link);
	all->count++;
	conn_set_user(c, s);
	conn_attached(c);
	s->channel_due = s->charge.user != NULL;
	if (s->channel_due)
		s->charge.user->channels_due++;
	*ret = s;
	return 0;
}

void session_channel_came(struct session *s)
{
	if (!s->channel_due)
		return;
	s->channel_due = false;
	CHECK(s->charge.user->channels_due > 0);
	s->charge.user->channels_due--;
}

static void session_drop_member(struct session *s)
{
	struct job *job;

	if (!s->member)
		return;
	job = s->member->job;
	s->member->watcher = NULL;
	s->member = member_unref(s->member);
	if (job->life.deleted)
		job_settle(job);
}

/* Tell channels and watchers that the session is gone; they free themselves. */
static void session_tell_dependents(struct session *s)
{
	while (!list_empty(&s->locals)) {
		struct session_local *l = list_first(&s->locals, struct session_local, link);

		list_unlink(&l->link);
		l->session = NULL;
		local_close(l->local);
	}
	while (!list_empty(&s->watches)) {
		struct session_watch *w = list_first(&s->watches, struct session_watch, link);

		list_unlink(&w->link);
		w->ended(w);
	}
}

void session_end(struct session *s, const char *why)
{
	MAGIC_CHECK(s, SESSION_MAGIC);
	if (s->ring)
		s->sessions->rings->close(s);
	if (s->member) {
		s->member->watcher = NULL;
		job_lost(s->member, why);
		session_drop_member(s);
	}
	while (!list_empty(&s->leases))
		publication_release(list_first(&s->leases, struct publication_lease, held));
	while (!list_empty(&s->holds))
		publication_close_reader(list_first(&s->holds, struct board_reader, held));
	while (!list_empty(&s->bases))
		base_reader_free(list_first(&s->bases, struct base_reader, held));
	session_tell_dependents(s);
	conn_set_user(s->conn, NULL);
	list_unlink(&s->link);
	s->sessions->count--;
	explicit_bzero(s->token, sizeof(s->token));
	session_channel_came(s);
	user_charge_deinit(&s->charge);
	s->magic = 0;
	free(s);
}

/* In constant time: a token is a secret. */
static bool session_same_token(const uint8_t *a, const uint8_t *b)
{
	uint8_t diff = 0;

	for (unsigned i = 0; i < SHD1_TOKEN_BYTES; i++)
		diff |= a[i] ^ b[i];
	return diff == 0;
}

struct session *session_by_token(struct sessions *all, const uint8_t token[SHD1_TOKEN_BYTES])
{
	struct session *s, *tmp, *found = NULL;

	list_for_each (s, tmp, &all->all, link)
		if (session_same_token(s->token, token))
			found = s;
	return found;
}

enum res session_join(struct session *s, struct job *job, const struct job_joining *how,
		      struct fault *f)
{
	struct member *m = NULL;

	if (s->member && s->member->job != job && s->member->state != MEMBER_LEFT &&
	    !s->member->job->life.deleted)
		return res_of(fault_set(f, FAULT_STATE, NULL,
					"this session is rank %u of job '%s': leave it first",
					s->member->rank, s->member->job->rec->name));
	RES_TRY(job_join(job, how, s->proc, s->id, s->member, &m, f));
	if (m != s->member) {
		session_drop_member(s);
		s->member = m;
	}
	m->watcher = s;
	return RES_DONE;
}

enum res session_leave(struct session *s, bool *ret_freed, struct fault *f)
{
	struct member *m = session_member(s, f);

	if (!m)
		return RES_FAILED;
	if (m->state == MEMBER_LEFT)
		return res_of(fault_set(f, FAULT_STATE, NULL, "this session has already left"));
	if (m->state == MEMBER_DEAD) /* of a deleted job: there is nothing left to leave */
		return res_of(fault_set(f, FAULT_ABORTED, NULL, "%s", m->ended.text));
	return job_leave(m, ret_freed, f);
}

int session_read_base(struct session *s, struct job *job, struct fault *f)
{
	struct base_reader *r, *tmp;
	unsigned n = 0;

	if (base_check_read(job, f))
		return f->code;
	list_for_each (r, tmp, &s->bases, held) {
		if (r->job == job)
			return 0;
		n++;
	}
	if (n >= SESSION_MAX_BASES)
		return fault_set(f, FAULT_EXHAUSTED, NULL,
				 "this session reads %u bases, the most that are possible: open a "
				 "new connection to read another",
				 n);
	r = base_reader_new(job, s->id, (int)proc_pid(s->proc));
	if (!r)
		return fault_errno(f, -ENOMEM, "reading a base");
	list_append(&s->bases, &r->held);
	return 0;
}

static unsigned session_count_leases(const struct session *s)
{
	const struct publication_lease *l, *tmp;
	const struct board_reader *r, *tmp2;
	unsigned n = 0;

	list_for_each (l, tmp, (struct list *)(uintptr_t)&s->leases, held)
		n++;
	list_for_each (r, tmp2, (struct list *)(uintptr_t)&s->holds, held)
		n++;
	return n;
}

static int session_check_leases(const struct session *s, struct fault *f)
{
	return session_count_leases(s) < SESSION_MAX_LEASES
		       ? 0
		       : (int)fault_set(f, FAULT_EXHAUSTED, NULL,
					"this session has %u leases and readers, the most that are "
					"possible: release some",
					SESSION_MAX_LEASES);
}

struct publication_lease *session_lease(struct session *s, struct published *g, struct fault *f)
{
	struct publication_lease *l;

	if (session_check_leases(s, f))
		return NULL;
	l = publication_lease(g);
	if (!l) {
		fault_errno(f, -ENOMEM, "leasing a generation");
		return NULL;
	}
	l->id = ++s->last_lease;
	l->session = s->id;
	l->pid = (int)proc_pid(s->proc);
	list_append(&s->leases, &l->held);
	return l;
}

struct publication_lease *session_lease_find(struct session *s, uint64_t id, struct fault *f)
{
	struct publication_lease *l, *tmp;

	list_for_each (l, tmp, &s->leases, held)
		if (l->id == id)
			return l;
	fault_set(
		f, FAULT_NOT_FOUND, NULL,
		"this session has no lease %llu: it was released, or the connection was made again",
		(unsigned long long)id);
	return NULL;
}

struct board_reader *session_open_reader(struct session *s, struct publication *p, struct fault *f)
{
	struct board_reader *r;

	if (session_check_leases(s, f) ||
	    publication_open_reader(p, session_account(s), proc_uid(s->proc), &r, f))
		return NULL;
	r->id = ++s->last_lease;
	r->session = s->id;
	r->pid = (int)proc_pid(s->proc);
	list_append(&s->holds, &r->held);
	return r;
}

struct board_reader *session_find_reader(struct session *s, uint64_t id, struct fault *f)
{
	struct board_reader *r, *tmp;

	list_for_each (r, tmp, &s->holds, held)
		if (r->id == id)
			return r;
	fault_set(
		f, FAULT_NOT_FOUND, "reader",
		"this session has no reader %llu: it was closed, or the connection was made again",
		(unsigned long long)id);
	return NULL;
}

struct member *session_member(struct session *s, struct fault *f)
{
	if (s && s->member)
		return s->member;
	fault_set(f, FAULT_STATE, NULL,
		  s ? "this session is in no job: call Join"
		    : "there is no session on this connection: call Attach");
	return NULL;
}

int session_watch_add(struct session *s, struct session_watch *w, struct fault *f)
{
	struct session_watch *other, *tmp;
	unsigned n = 0;

	list_for_each (other, tmp, &s->watches, link)
		n++;
	if (n >= SESSION_MAX_WATCHES)
		return fault_set(f, FAULT_EXHAUSTED, NULL,
				 "this session has %u watches, the maximum", n);
	list_append(&s->watches, &w->link);
	return 0;
}

void session_event(struct member *m, enum job_event_kind kind, const char *text)
{
	struct session *s = m->watcher;
	struct session_watch *w, *tmp;

	if (!s)
		return;
	MAGIC_CHECK(s, SESSION_MAGIC);
	list_for_each (w, tmp, &s->watches, link)
		w->fn(w, kind, m->job->rec->epoch, text);
}
