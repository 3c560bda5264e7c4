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

bool user_kind_has_total(enum user_kind kind)
{
	return kind <= USER_MEMORY;
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

/* For comparing those of one kind. */
static uint64_t user_override_most(const struct user_override *o)
{
	return o->kind == USER_PRIORITY ? o->most : user_most(o->most);
}

/* The override that applies to @u: its own, or the most generous of its groups. */
static const struct user_override *user_override_of(const struct user *u, enum user_kind kind)
{
	const struct users *us = u->users;
	const struct user_override *best = NULL;

	for (size_t i = 0; i < us->n_overrides; i++) {
		const struct user_override *o = &us->overrides[i];

		if (o->kind != kind || o->total)
			continue;
		if (!o->group && o->id == u->uid)
			return o;
		if (o->group && !user_is_admin(u->uid) && user_has_gid(u, o->id) &&
		    (!best || user_override_most(o) > user_override_most(best)))
			best = o;
	}
	return best;
}

static void user_find_limits(struct user *u)
{
	const struct user_override *weight = user_override_of(u, USER_WORKER_WEIGHT);
	const struct user_override *priority = user_override_of(u, USER_PRIORITY);

	u->worker_weight = weight ? (uint32_t)weight->most : USER_WEIGHT_DEFAULT;
	u->priority = user_is_admin(u->uid) ? USER_PRIORITY_MAX : 0;
	if (priority)
		u->priority = (int32_t)priority->most;
	for (unsigned k = 0; k < _USER_KINDS; k++) {
		const struct user_override *o = user_override_of(u, k);

		if (o)
			u->most[k] = user_most(o->most);
		else
			u->most[k] =
				user_is_admin(u->uid) ? UINT64_MAX : user_most(u->users->most[k]);
	}
}

/* ------------------------------------------------------------------- groups */

/* For each group of @u, with an account. */
#define USER_EACH_GROUP(u, g)                 \
	for (uint64_t left_ = (u)->in_groups; \
	     left_ && ((g) = &(u)->users->groups[__builtin_ctzll(left_)]); left_ &= left_ - 1)

static void user_group_add(struct user_group *g, enum user_kind kind, uint64_t n)
{
	g->used[kind] += n;
	if (g->peak[kind] < g->used[kind])
		g->peak[kind] = g->used[kind];
}

static void user_group_sub(struct user_group *g, enum user_kind kind, uint64_t n)
{
	CHECK(g->used[kind] >= n);
	g->used[kind] -= n;
}

/* What it uses is its groups' no more. */
static void user_leave_groups(struct user *u)
{
	struct user_group *g;

	USER_EACH_GROUP(u, g)
	{
		g->members--;
		for (unsigned k = 0; user_kind_has_total(k); k++)
			user_group_sub(g, k, u->used[k]);
	}
	u->in_groups = 0;
}

static void user_join_group(struct user *u, unsigned i)
{
	struct user_group *g = &u->users->groups[i];

	u->in_groups |= UINT64_C(1) << i;
	g->members++;
	for (unsigned k = 0; user_kind_has_total(k); k++)
		user_group_add(g, k, u->used[k]);
}

/* Those that its gids name, and that it is not in. */
static void user_join_groups(struct user *u)
{
	for (unsigned i = 0; !user_is_admin(u->uid) && i < u->users->n_groups; i++)
		if (!(u->in_groups >> i & 1) && user_has_gid(u, u->users->groups[i].gid))
			user_join_group(u, i);
}

/* The account of @gid, made if it is not there. */
static struct user_group *users_make_group(struct users *us, gid_t gid)
{
	struct user_group *g = us->groups;

	while (g < us->groups + us->n_groups && g->gid != gid)
		g++;
	if (g < us->groups + us->n_groups)
		return g;
	CHECK(us->n_groups < USER_GROUPS);
	us->n_groups++;
	*g = (struct user_group){ .gid = gid };
	return g;
}

/* A group that has been there has its peaks and refusals still. */
static void users_keep_past(struct user_group *g, const struct user_group *before)
{
	memcpy(g->peak, before->peak, sizeof(g->peak));
	memcpy(g->refused, before->refused, sizeof(g->refused));
}

/* The accounts of the groups that the overrides name; users are in those that they were in. */
static void users_make_groups(struct users *us)
{
	struct user_group before[USER_GROUPS];
	unsigned n_before = us->n_groups;

	memcpy(before, us->groups, sizeof(before));
	us->n_groups = 0;
	for (size_t i = 0; i < us->n_overrides; i++)
		if (us->overrides[i].group)
			memset(users_make_group(us, us->overrides[i].id)->most, 0xff,
			       sizeof(us->groups[0].most));
	for (size_t i = 0; i < us->n_overrides; i++)
		if (us->overrides[i].total)
			users_make_group(us, us->overrides[i].id)->most[us->overrides[i].kind] =
				user_most(us->overrides[i].most);
	for (unsigned i = 0; i < us->n_groups; i++)
		for (unsigned k = 0; k < n_before; k++)
			if (before[k].gid == us->groups[i].gid)
				users_keep_past(&us->groups[i], &before[k]);
	for (struct user *u = users_next(us, NULL); u; u = users_next(us, u)) {
		uint64_t was = u->in_groups;

		u->in_groups = 0;
		for (unsigned i = 0; i < us->n_groups; i++)
			for (unsigned k = 0; k < n_before; k++)
				if (was >> k & 1 && before[k].gid == us->groups[i].gid)
					user_join_group(u, i);
		user_join_groups(u);
	}
}

/* The group of @u that has no room for @n more; NULL: none. */
static struct user_group *user_full_group(const struct user *u, enum user_kind kind, uint64_t n)
{
	struct user_group *g;

	USER_EACH_GROUP(u, g)
	if (g->used[kind] > g->most[kind] || n > g->most[kind] - g->used[kind])
		return g;
	return NULL;
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
	users_make_groups(us);
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
	user_join_groups(u);
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
	user_leave_groups(u);
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

static uint64_t user_own_left(const struct user *u, enum user_kind kind)
{
	return u->most[kind] > u->used[kind] ? u->most[kind] - u->used[kind] : 0;
}

uint64_t user_limit(const struct user *u, enum user_kind kind)
{
	uint64_t limit = u->most[kind];
	struct user_group *g;

	USER_EACH_GROUP(u, g)
	limit = g->most[kind] < limit ? g->most[kind] : limit;
	return limit;
}

uint64_t user_left(const struct user *u, enum user_kind kind)
{
	uint64_t left = user_own_left(u, kind);
	struct user_group *g;

	USER_EACH_GROUP(u, g)
	{
		uint64_t here = g->most[kind] > g->used[kind] ? g->most[kind] - g->used[kind] : 0;

		left = here < left ? here : left;
	}
	return left;
}

bool user_has_room(const struct user *u, enum user_kind kind, uint64_t n)
{
	return !u || n <= user_left(u, kind);
}

void user_add(struct user *u, enum user_kind kind, uint64_t n)
{
	struct user_group *g;

	u->used[kind] += n;
	if (u->peak[kind] < u->used[kind])
		u->peak[kind] = u->used[kind];
	if (user_kind_has_total(kind))
		USER_EACH_GROUP(u, g)
	user_group_add(g, kind, n);
}

void user_sub(struct user *u, enum user_kind kind, uint64_t n)
{
	struct user_group *g;

	CHECK(u->used[kind] >= n);
	u->used[kind] -= n;
	if (user_kind_has_total(kind))
		USER_EACH_GROUP(u, g)
	user_group_sub(g, kind, n);
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

/* A turn that takes less than this delays no later one. */
#define USER_TURN_FREE_US 500u
/* The pause before a user's next turn: this many times what the last one took. */
#define USER_TURN_PAUSE 9u

bool user_turn_has_come(const struct user *u, enum user_turn kind, uint64_t now_us)
{
	return !u || now_us >= u->turn_at_us[kind];
}

void user_turn_took(struct user *u, enum user_turn kind, uint64_t began_us, uint64_t now_us)
{
	uint64_t took = now_us - began_us;

	if (u && took > USER_TURN_FREE_US)
		u->turn_at_us[kind] = now_us + took * USER_TURN_PAUSE;
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

void user_limit_in_the_way(const struct user *u, enum user_kind kind, uint64_t n, char *buf,
			   size_t bytes)
{
	const struct user_group *g = user_full_group(u, kind, n);

	if (n > user_own_left(u, kind) || !g)
		user_limit_text(u, kind, buf, bytes);
	else
		snprintf(buf, bytes, "'@%u:total_%s' of user_limits", (unsigned)g->gid,
			 user_kinds[kind].name);
}

static int user_refuse_group(struct user_group *g, enum user_kind kind, uint64_t n, struct fault *f)
{
	g->refused[kind]++;
	return fault_set(f, FAULT_EXHAUSTED, NULL,
			 "the members of group %u have %" PRIu64 " %s together and one asks for "
			 "%" PRIu64 " more: the limit is %" PRIu64 " ('@%u:total_%s' of "
			 "user_limits): %s, or raise the limit in shardd.yaml",
			 (unsigned)g->gid, g->used[kind], user_kinds[kind].noun, n, g->most[kind],
			 (unsigned)g->gid, user_kinds[kind].name, user_kinds[kind].advice);
}

int user_refuse(struct user *u, enum user_kind kind, uint64_t n, struct fault *f)
{
	const struct kind_text *t = &user_kinds[kind];
	struct fault unused = FAULT_NULL;
	char limit[80];

	u->refused[kind]++;
	u->users->refused[kind]++;
	if (n <= user_own_left(u, kind) && user_kind_has_total(kind)) {
		struct user_group *g = user_full_group(u, kind, n);

		if (g)
			return user_refuse_group(g, kind, n, f ? f : &unused);
	}
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
