#include "core/user.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "core/cleanup.h"

#define USER_MAGIC 0x55534552u

/* The names of a kind, and what a user can do at the limit. */
static const struct kind_text {
	const char *name, *key, *noun, *advice;
} user_kinds[_USER_KINDS] = {
	[USER_CONNECTIONS] = { "connections", "max_connections_per_user", "connections",
			       "close some" },
	[USER_UNATTACHED] = { "unattached", "max_unattached_per_user",
			      "connections without a session", "attach them or close some" },
	[USER_SESSIONS] = { "sessions", "max_sessions_per_user", "sessions",
			    "end some (shardctl sessions lists them)" },
	[USER_JOBS] = { "jobs", "max_jobs_per_user", "jobs",
			"delete some (shardctl jobs lists them)" },
	[USER_SLABS] = { "slabs", "max_slabs_per_user", "slabs of memory",
			 "register units in fewer calls, or delete a job (shardctl jobs)" },
	[USER_STATE] = { "state_bytes", "max_state_bytes_per_user", "bytes of training state",
			 "delete a job (shardctl jobs)" },
	[USER_MEMORY] = { "daemon_bytes", "max_daemon_bytes_per_user",
			  "bytes of the daemon's own memory",
			  "end sessions or delete jobs (shardctl sessions, shardctl jobs)" },
	[USER_MESSAGE_BYTES] = { "message_bytes", "max_message_bytes_per_user",
				 "bytes of incomplete messages", "send them one after the other" },
	[USER_FDS] = { "fds", "max_fds_per_user", "descriptors that wait to be received",
		       "receive them" },
	[USER_OPS] = { "ops", "max_ops_per_user", "unanswered ops",
		       "wait for some (shardctl ops lists them)" },
	[USER_STATUS_CALLS] = { "status_calls", "max_status_calls_per_user",
				"unanswered calls of Status", "wait for one" },
};

const char *user_kind_name(enum user_kind kind)
{
	return kind < _USER_KINDS ? user_kinds[kind].name : "?";
}

const char *user_kind_key(enum user_kind kind)
{
	return kind < _USER_KINDS ? user_kinds[kind].key : "?";
}

bool user_kind_is_bytes(enum user_kind kind)
{
	return kind == USER_STATE || kind == USER_MEMORY || kind == USER_MESSAGE_BYTES;
}

bool user_is_admin(uid_t uid)
{
	return uid == 0 || uid == geteuid();
}

/* ------------------------------------------------------------------- limits */

/* In a configuration 0 means no limit, so it is more than any other value. */
static uint64_t user_most(uint64_t configured)
{
	return configured ? configured : UINT64_MAX;
}

static bool user_has_gid(const struct user *u, gid_t gid)
{
	for (size_t i = 0; i < u->n_gids; i++)
		if (u->gids[i] == gid)
			return true;
	return false;
}

/* The override that applies to @u: its own, or the most generous of its groups. */
static const struct user_override *user_override_of(const struct user *u, enum user_kind kind)
{
	const struct users *us = u->users;
	const struct user_override *best = NULL;

	for (size_t i = 0; i < us->n_overrides; i++) {
		const struct user_override *o = &us->overrides[i];

		if (o->kind != kind)
			continue;
		if (!o->group && o->id == u->uid)
			return o;
		if (o->group && !user_is_admin(u->uid) && user_has_gid(u, o->id) &&
		    (!best || user_most(o->most) > user_most(best->most)))
			best = o;
	}
	return best;
}

static void user_find_limits(struct user *u)
{
	const struct user_override *weight = user_override_of(u, USER_WORKER_WEIGHT);

	u->worker_weight = weight ? (uint32_t)weight->most : USER_WEIGHT_DEFAULT;
	for (unsigned k = 0; k < _USER_KINDS; k++) {
		const struct user_override *o = user_override_of(u, k);

		if (o)
			u->most[k] = user_most(o->most);
		else
			u->most[k] =
				user_is_admin(u->uid) ? UINT64_MAX : user_most(u->users->most[k]);
	}
}

/* -------------------------------------------------------------------- users */

void users_init(struct users *us)
{
	*us = (struct users){ .count = 0 };
	for (unsigned i = 0; i < USERS_BUCKETS; i++)
		list_init(&us->buckets[i]);
}

void users_deinit(struct users *us)
{
	CHECK(us->count == 0);
	free(us->overrides);
	us->overrides = NULL;
	us->n_overrides = 0;
}

int users_configure(struct users *us, const struct user_limits *limits)
{
	size_t bytes = limits->n_overrides * sizeof(*limits->overrides);
	struct user_override *copy = malloc(bytes ? bytes : 1);

	if (!copy)
		return -ENOMEM;
	if (bytes)
		memcpy(copy, limits->overrides, bytes);
	free(us->overrides);
	us->overrides = copy;
	us->n_overrides = limits->n_overrides;
	memcpy(us->most, limits->most, sizeof(us->most));
	for (struct user *u = users_next(us, NULL); u; u = users_next(us, u))
		user_find_limits(u);
	return 0;
}

struct user *users_find(const struct users *us, uid_t uid)
{
	const struct list *bucket = &us->buckets[uid % USERS_BUCKETS];
	struct user *u, *tmp;

	list_for_each (u, tmp, bucket, link)
		if (u->uid == uid)
			return u;
	return NULL;
}

struct user *users_next(const struct users *us, const struct user *u)
{
	unsigned at = u ? u->uid % USERS_BUCKETS : 0;

	if (u && u->link.next != &us->buckets[at])
		return CONTAINER_OF(u->link.next, struct user, link);
	for (at += u ? 1 : 0; at < USERS_BUCKETS; at++)
		if (!list_empty(&us->buckets[at]))
			return list_first(&us->buckets[at], struct user, link);
	return NULL;
}

/* Without memory the groups of the previous connection stay. */
static void user_set_gids(struct user *u, const gid_t *gids, size_t n)
{
	gid_t *copy;

	if (!n || (n == u->n_gids && memcmp(gids, u->gids, n * sizeof(*gids)) == 0))
		return;
	copy = malloc(n * sizeof(*gids));
	if (!copy)
		return;
	memcpy(copy, gids, n * sizeof(*gids));
	free(u->gids);
	u->gids = copy;
	u->n_gids = n;
	user_find_limits(u);
}

static struct user *user_new(struct users *us, uid_t uid)
{
	struct user *u = calloc(1, sizeof(*u));

	if (!u)
		return NULL;
	u->magic = USER_MAGIC;
	u->uid = uid;
	u->users = us;
	list_init(&u->link);
	list_init(&u->unread);
	list_init(&u->waiting);
	list_append(&us->buckets[uid % USERS_BUCKETS], &u->link);
	us->count++;
	user_find_limits(u);
	return u;
}

struct user *users_get(struct users *us, uid_t uid, const gid_t *gids, size_t n_gids)
{
	struct user *u = users_find(us, uid);

	if (!u)
		u = user_new(us, uid);
	if (!u)
		return NULL;
	u->refs++;
	user_set_gids(u, gids, n_gids);
	return u;
}

struct user *user_ref(struct user *u)
{
	MAGIC_CHECK(u, USER_MAGIC);
	CHECK(u->refs > 0);
	u->refs++;
	return u;
}

struct user *user_unref(struct user *u)
{
	if (!u)
		return NULL;
	MAGIC_CHECK(u, USER_MAGIC);
	CHECK(u->refs > 0);
	if (--u->refs > 0)
		return NULL;
	for (unsigned k = 0; k < _USER_KINDS; k++)
		CHECK(u->used[k] == 0);
	CHECK(!u->channels_due && list_empty(&u->unread) && list_empty(&u->waiting));
	CHECK(u->users->count > 0);
	u->users->count--;
	list_unlink(&u->link);
	u->magic = 0;
	free(u->gids);
	free(u);
	return NULL;
}

/* ------------------------------------------------------------------ charges */

uint64_t user_left(const struct user *u, enum user_kind kind)
{
	return u->most[kind] > u->used[kind] ? u->most[kind] - u->used[kind] : 0;
}

bool user_has_room(const struct user *u, enum user_kind kind, uint64_t n)
{
	return !u || n <= user_left(u, kind);
}

void user_add(struct user *u, enum user_kind kind, uint64_t n)
{
	u->used[kind] += n;
	if (u->peak[kind] < u->used[kind])
		u->peak[kind] = u->used[kind];
}

void user_sub(struct user *u, enum user_kind kind, uint64_t n)
{
	CHECK(u->used[kind] >= n);
	u->used[kind] -= n;
}

void user_sample_messages(struct user *u, uint64_t n)
{
	u->message_bytes = n;
	if (u->peak[USER_MESSAGE_BYTES] < n)
		u->peak[USER_MESSAGE_BYTES] = n;
}

int user_charge(struct user_charge *c, struct user *u, enum user_kind kind, uint64_t n,
		struct fault *f)
{
	CHECK(!c->user && kind < _USER_KINDS);
	if (!u)
		return 0;
	if (!user_has_room(u, kind, n)) {
		user_refuse(u, kind, n, f);
		return USER_E_LIMIT;
	}
	*c = (struct user_charge){ user_ref(u), kind, n };
	user_add(u, kind, n);
	return 0;
}

int user_charge_resize(struct user_charge *c, uint64_t n, struct fault *f)
{
	if (!c->user)
		return 0;
	if (n > c->n && !user_has_room(c->user, c->kind, n - c->n)) {
		user_refuse(c->user, c->kind, n - c->n, f);
		return USER_E_LIMIT;
	}
	user_sub(c->user, c->kind, c->n);
	user_add(c->user, c->kind, n);
	c->n = n;
	return 0;
}

void user_charge_deinit(struct user_charge *c)
{
	if (!c->user)
		return;
	user_sub(c->user, c->kind, c->n);
	user_unref(c->user);
	*c = USER_CHARGE_NULL;
}

/* "max_sessions_per_user", or the entry of user_limits that applies instead. */
static void user_limit_text(const struct user *u, enum user_kind kind, char *buf, size_t bytes)
{
	const struct user_override *o = user_override_of(u, kind);

	if (o)
		snprintf(buf, bytes, "'%s%" PRIu32 ":max_%s' of user_limits", o->group ? "@" : "",
			 o->id, user_kinds[kind].name);
	else
		snprintf(buf, bytes, "%s", user_kinds[kind].key);
}

int user_refuse(struct user *u, enum user_kind kind, uint64_t n, struct fault *f)
{
	const struct kind_text *t = &user_kinds[kind];
	char limit[80];

	u->refused[kind]++;
	u->users->refused[kind]++;
	if (!f)
		return FAULT_EXHAUSTED;
	user_limit_text(u, kind, limit, sizeof(limit));
	if (n == 1 && u->used[kind] == u->most[kind])
		return fault_set(f, FAULT_EXHAUSTED, NULL,
				 "user %u has %" PRIu64 " %s, which is the limit (%s): %s, or "
				 "raise the limit in shardd.yaml",
				 (unsigned)u->uid, u->used[kind], t->noun, limit, t->advice);
	return fault_set(f, FAULT_EXHAUSTED, NULL,
			 "user %u has %" PRIu64 " %s and asks for %" PRIu64 " more: the limit is "
			 "%" PRIu64 " (%s): %s, or raise the limit in shardd.yaml",
			 (unsigned)u->uid, u->used[kind], t->noun, n, u->most[kind], limit,
			 t->advice);
}
