#include "failfix.h"

#include <criterion/criterion.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "core/check.h"
#include "core/cleanup.h"
#include "fdcheck.h"

static unsigned fds_at_begin;
static uint64_t bytes_at_begin;

void failfix_begin(const char *const *args)
{
	fdcheck_begin();
	daemonfix_start(&trainfix, args);
	daemonfix_check_alive(&trainfix);
	fds_at_begin = daemonfix_fds(&trainfix);
	bytes_at_begin = daemonfix_bytes(&trainfix);
}

static bool all_sessions_ended(void)
{
	static const char *const args[] = { "status", NULL };
	json_t *s = daemonfix_ctl(&trainfix, args);
	/* shardctl's own connection is one, and no session */
	bool ended = json_array_size(json_object_get(s, "sessions")) == 0 &&
		     json_integer_value(json_object_get(s, "connections")) == 1;

	json_decref(s);
	return ended;
}

void failfix_again(void)
{
	AWAIT(all_sessions_ended() && daemonfix_bytes(&trainfix) == bytes_at_begin, 20);
	fds_at_begin = daemonfix_fds(&trainfix);
}

void failfix_end(void)
{
	if (trainfix.pid) {
		daemonfix_settles(&trainfix, fds_at_begin, bytes_at_begin);
		daemonfix_stop(&trainfix);
	}
	fdcheck_end();
}

int failfix_await_daemon(unsigned seconds)
{
	static const char *const defects[] = { "Sanitizer", "runtime error:", "broken invariant" };
	int code;

	daemonfix_may_end(&trainfix);
	code = trainer_wait(trainfix.pid, seconds);
	trainfix.pid = 0;
	for (size_t i = 0; i < ARRAY_SIZE(defects); i++)
		cr_assert(!fail_logged(&trainfix, defects[i]), "%s in the log", defects[i]);
	unlink(trainfix.log);
	unlink(trainfix.socket);
	rmdir(trainfix.dir);
	return code;
}

void told_note(struct told *t, int rc)
{
	t->at_us = clock_now_us();
	t->rc = rc;
	snprintf(t->text, sizeof(t->text), "%s", rc < 0 ? train_err.text : "");
	atomic_fetch_add(&t->n, 1);
}

void told_check(struct told *t, enum shardd_code code, const char *words)
{
	AWAIT(atomic_load(&t->n) > 0, 20);
	cr_assert_eq(t->rc, -(int)code, "%d instead of %d: %s", -t->rc, (int)code, t->text);
	cr_assert(strstr(t->text, words), "\"%s\" is not in \"%s\"", words, t->text);
}

void told_now(const char *words)
{
	if (!strstr(train_err.text, words))
		fprintf(stderr, "\"%s\" is not in \"%s\"\n", words, train_err.text);
	TRAINER_CHECK(strstr(train_err.text, words));
}

/* ------------------------------------------------------------------- shardctl */

static const char *text_of(json_t *object, const char *key)
{
	const char *s = json_string_value(json_object_get(object, key));

	return s ? s : "";
}

/* The last record of @op of that rank, or NULL. Borrowed from @all. */
static json_t *find_op(json_t *all, const char *job, uint32_t rank, const char *op)
{
	json_t *o, *found = NULL;
	json_int_t last = 0; /* those that are pending come first */
	size_t i;

	json_array_foreach(
		json_object_get(all, "ops"), i,
		o) if (strcmp(text_of(o, "job"), job) == 0 && strcmp(text_of(o, "op"), op) == 0 &&
		       json_integer_value(json_object_get(o, "rank")) == (json_int_t)rank &&
		       json_integer_value(json_object_get(o, "id")) > last)
	{
		last = json_integer_value(json_object_get(o, "id"));
		found = o;
	}
	return found;
}

bool fail_op_text(struct daemonfix *d, const char *job, uint32_t rank, const char *op,
		  const char *key, char *ret, size_t bytes)
{
	static const char *const args[] = { "ops", NULL };
	json_t *all = daemonfix_ctl(d, args);
	json_t *o = find_op(all, job, rank, op);

	snprintf(ret, bytes, "%s", o ? text_of(o, key) : "");
	json_decref(all);
	return o;
}

bool fail_has_op(struct daemonfix *d, const char *job, uint32_t rank, const char *op,
		 const char *state)
{
	char is[16];

	return fail_op_text(d, job, rank, op, "state", is, sizeof(is)) && strcmp(is, state) == 0;
}

/* A new reference to the job's status, or NULL. */
static json_t *get_job(struct daemonfix *d, const char *job)
{
	static const char *const args[] = { "status", NULL };
	json_t *all = daemonfix_ctl(d, args), *j, *found = NULL;
	size_t i;

	json_array_foreach(json_object_get(all, "jobs"), i,
			   j) if (strcmp(text_of(j, "name"), job) == 0) found = j;
	json_incref(found);
	json_decref(all);
	return found;
}

uint64_t fail_job_number(struct daemonfix *d, const char *job, const char *key)
{
	json_t *j = get_job(d, job), *n = json_object_get(j, key);
	uint64_t value = json_is_integer(n) ? (uint64_t)json_integer_value(n) : UINT64_MAX;

	json_decref(j);
	return value;
}

void fail_job_text(struct daemonfix *d, const char *job, const char *key, char *ret, size_t bytes)
{
	json_t *j = get_job(d, job);

	snprintf(ret, bytes, "%s", text_of(j, key));
	json_decref(j);
}

bool fail_job_is(struct daemonfix *d, const char *job, const char *state)
{
	char is[32];

	fail_job_text(d, job, "state", is, sizeof(is));
	return strcmp(is, state) == 0;
}

bool fail_has_job(struct daemonfix *d, const char *job)
{
	json_t *j = get_job(d, job);

	json_decref(j);
	return j;
}

bool fail_rank_is(struct daemonfix *d, const char *job, uint32_t rank, const char *state)
{
	json_t *j = get_job(d, job);
	bool is = strcmp(text_of(json_array_get(json_object_get(j, "ranks"), rank), "state"),
			 state) == 0;

	json_decref(j);
	return is;
}

uint64_t fail_quarantined(struct daemonfix *d)
{
	static const char *const args[] = { "status", NULL };
	json_t *all = daemonfix_ctl(d, args);
	json_t *device;
	uint64_t bytes = 0;
	size_t i;

	json_array_foreach(json_object_get(all, "devices"), i, device)
	{
		json_t *n = json_object_get(device, "quarantined_bytes");

		cr_assert(json_is_integer(n));
		bytes += (uint64_t)json_integer_value(n);
	}
	json_decref(all);
	return bytes;
}

unsigned fail_times_logged(struct daemonfix *d, const char *words)
{
	_cleanup_(fclosep) FILE *f = fopen(d->log, "re");
	char line[2048];
	unsigned n = 0;

	while (f && fgets(line, sizeof(line), f))
		n += strstr(line, words) != NULL;
	return n;
}

bool fail_logged(struct daemonfix *d, const char *words)
{
	return fail_times_logged(d, words) > 0;
}

void fail_kill(pid_t pid)
{
	cr_assert_eq(kill(pid, SIGKILL), 0);
	cr_assert_eq(waitpid(pid, NULL, 0), pid);
}
