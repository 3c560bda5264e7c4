/*
 * Accounts of resources: one per user (uid), with a limit for each kind of resource that a client
 * can make the daemon spend.
 *
 * The charge is stored in the object that causes it (struct user_charge) and is returned with the
 * object. An account lives as long as it has a reference; every charge holds one, so an account
 * that is freed has all its counters at zero (CHECKed).
 *
 * A limit comes from the first of these that sets its kind: an override for the user; the most
 * generous override for one of the user's groups; the default. Root and the daemon's own user have
 * only the limits that an override for that user sets: so an operator can always connect, and in a
 * container where everything runs as one user only the limits of the whole daemon apply. Groups are
 * those of the peer's newest connection.
 *
 * Each group that an override names has an account, too: what its members use together, without the
 * administrators. A total is a limit of that account: a charge needs room in the user's account and
 * in those of all its groups: of each group that a connection of the user has had while its account
 * lives, so that a process with other groups does not take the user out. Loop thread only.
 */
#ifndef SHARDD_CORE_USER_H
#define SHARDD_CORE_USER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#include "core/check.h"
#include "core/fault.h"
#include "core/list.h"

enum user_kind {
	USER_CONNECTIONS,   /* sockets of either protocol */
	USER_UNATTACHED,    /* of these: neither a session's nor a channel of one */
	USER_SESSIONS,      /* attached processes */
	USER_JOBS,          /* owned, until their last byte is back */
	USER_SLABS,         /* of the owner's jobs: a descriptor and a mapping of ours each */
	USER_STATE,         /* bytes of these slabs */
	USER_MEMORY,        /* bytes of our own: rings, specs, settings, arrays, requests */
	USER_MESSAGE_BYTES, /* of gRPC messages that have not come in full */
	USER_FDS,           /* descriptors sent to a client that has not received them */
	USER_OPS,           /* unanswered, of all sessions */
	USER_STATUS_CALLS,  /* unanswered calls of service Status */
	_USER_KINDS,
	/* of overrides only: they are set, nothing is counted */
	USER_WORKER_WEIGHT = _USER_KINDS,
	USER_PRIORITY, /* the highest that a job of the user may have */
};

/* What takes the loop long, each with turns of its own, so that calls without end do not keep tables from being made. */
enum user_turn {
	USER_TURN_CALLS,  /* rpc/status_turns.h */
	USER_TURN_TABLES, /* of publications, when the units of a job have changed */
	USER_TURN_N,
};

/* A user's weight when users share the host's threads, as cgroup v2's cpu.weight. */
#define USER_WEIGHT_DEFAULT 100u
#define USER_WEIGHT_MAX     10000u
/* Priorities of jobs are from -USER_PRIORITY_MAX to USER_PRIORITY_MAX; without an override a user's are up
 * to 0, an administrator's up to the highest. */
#define USER_PRIORITY_MAX 100

struct user;
struct users;

/* A limit of one user or one group. */
struct user_override {
	bool group;
	bool total;  /* of the members of a group together */
	uint32_t id; /* a uid, or a gid */
	enum user_kind kind;
	uint64_t most; /* 0: no limit; USER_WORKER_WEIGHT: the weight, 1..USER_WEIGHT_MAX;
			* USER_PRIORITY: 0..USER_PRIORITY_MAX */
};

struct user_limits {
	uint64_t most[_USER_KINDS]; /* 0: no limit */
	const struct user_override *overrides;
	size_t n_overrides;
};

#define USERS_BUCKETS 64u
#define USER_GROUPS   64u /* groups with an account */

/* The account of a group. */
struct user_group {
	gid_t gid;
	uint32_t members; /* users who have an account now */
	uint64_t used[_USER_KINDS];
	uint64_t most[_USER_KINDS]; /* UINT64_MAX: no limit */
	uint64_t peak[_USER_KINDS];
	uint64_t refused[_USER_KINDS]; /* because of its own limits */
};

struct users {
	struct list buckets[USERS_BUCKETS]; /* of struct user, by uid */
	uint32_t count;
	uint64_t most[_USER_KINDS];
	struct user_override *overrides; /* owned */
	size_t n_overrides;
	struct user_group groups[USER_GROUPS]; /* that overrides name */
	unsigned n_groups;
	uint64_t refused[_USER_KINDS]; /* of all users, for status */
};

struct user {
	uint32_t magic;
	uint32_t refs;
	uid_t uid;
	struct users *users; /* borrowed */
	struct list link;
	gid_t *gids; /* owned: of the newest connection */
	size_t n_gids;
	uint64_t in_groups; /* a bit for each of users->groups */
	uint64_t used[_USER_KINDS];
	uint64_t most[_USER_KINDS]; /* UINT64_MAX: no limit */
	uint64_t peak[_USER_KINDS];
	uint64_t refused[_USER_KINDS];
	uint32_t worker_weight; /* 1..USER_WEIGHT_MAX */
	int32_t priority;       /* the highest of a job */
	uint32_t channels_due;  /* sessions that have no local channel yet; session/ counts */
	struct list unread;     /* net/local.c's: channels with descriptors on their way */
	uint64_t message_bytes; /* the last sample of USER_MESSAGE_BYTES */
	struct list waiting;    /* rpc/status_turns.c's: calls whose turn has not come */
	uint64_t turn_at_us[USER_TURN_N]; /* when that may begin again for this user */
};

/* What an object costs its user. Embed by value. */
struct user_charge {
	struct user *user; /* a reference; NULL: nothing is charged */
	enum user_kind kind;
	uint64_t n;
};

#define USER_CHARGE_NULL ((struct user_charge){ .user = NULL })

enum {
	USER_E_LIMIT = 1, /* the limit is reached; nothing is charged */
};

/* No limits yet. */
void users_init(struct users *us);
/* CHECKs that no account is left. Safe to call twice. */
void users_deinit(struct users *us);

/* New limits (start, SIGHUP), also for existing accounts. Existing charges stay. At most USER_GROUPS groups
 * (CHECKed). @limits: copied. Return: 0, or -ENOMEM: nothing changed. */
int users_configure(struct users *us, const struct user_limits *limits);

/* The account of @uid, made if it is not there. @gids: groups of the process that connects,
 * including its primary one; none: the known groups stay. Return: a reference, or NULL: no
 * memory. */
struct user *users_get(struct users *us, uid_t uid, const gid_t *gids, size_t n_gids);

/* Return: borrowed, or NULL: the user has no account. */
struct user *users_find(const struct users *us, uid_t uid);

struct user *user_ref(struct user *u);
/* Return: NULL. NULL is allowed. */
struct user *user_unref(struct user *u);

/* Root, or the daemon's own user. */
bool user_is_admin(uid_t uid);

/* Write the limit that leaves no room for @n more into @buf: max_jobs_per_user, or the entry of
 * user_limits. */
void user_limit_in_the_way(const struct user *u, enum user_kind kind, uint64_t n, char *buf,
			   size_t bytes);

/* Could @n more be charged? @u: NULL: yes. */
bool user_has_room(const struct user *u, enum user_kind kind, uint64_t n);

/* The limit of the user, or the smallest total of its groups, if that is less. UINT64_MAX: none. */
uint64_t user_limit(const struct user *u, enum user_kind kind);
/* How much more could be charged to the user and all its groups. */
uint64_t user_left(const struct user *u, enum user_kind kind);

/* Charge @n to @u (NULL: nobody) in @c, which is empty. @f (may be NULL): the sentence of
 * user_refuse. Return: 0 or USER_E_LIMIT. */
int user_charge(struct user_charge *c, struct user *u, enum user_kind kind, uint64_t n,
		struct fault *f);
/* Charge more, or give a part back. Return: 0, or USER_E_LIMIT: nothing changed. */
int user_charge_resize(struct user_charge *c, uint64_t n, struct fault *f);
/* Give it back. Safe after USER_CHARGE_NULL and twice. */
void user_charge_deinit(struct user_charge *c);

/* The limit of @kind is reached: count it and describe it in @f: FAULT_EXHAUSTED, the limit, its
 * value, the use, what to do. @n: the requested number. Return: FAULT_EXHAUSTED. */
int user_refuse(struct user *u, enum user_kind kind, uint64_t n, struct fault *f);

/* "sessions", "state_bytes", ... as in status and overrides (max_NAME). Return: static string. */
const char *user_kind_name(enum user_kind kind);
/* The key of the default, as refusals name it: "max_sessions_per_user". For tests. Return: static
 * string. */
const char *user_kind_key(enum user_kind kind);
bool user_kind_is_bytes(enum user_kind kind);
/* Is it counted in groups, so that they can have a total? Not what comes and goes with each call. */
bool user_kind_has_total(enum user_kind kind);

/* Iterates over all users: @u NULL: returns the first. Return: borrowed, or NULL. */
struct user *users_next(const struct users *us, const struct user *u);

/* Counting without a struct user_charge, for objects with their own counters. The caller holds a
 * reference to @u, returns what it took, and has checked for room before user_add. */
void user_add(struct user *u, enum user_kind kind, uint64_t n);
void user_sub(struct user *u, enum user_kind kind, uint64_t n);
/* USER_MESSAGE_BYTES is counted by the gate (net/gate.h): @n are used now. Nothing is charged;
 * the peak is that of these samples. */
void user_sample_messages(struct user *u, uint64_t n);

/* What takes the loop long is done for a user when its turn has come: the user gets at most a tenth of the loop's
 * time for each kind. @u: NULL: nobody's, whose turn it always is. */
bool user_turn_has_come(const struct user *u, enum user_turn kind, uint64_t now_us);
/* It has taken from @began_us to @now_us: the next turn comes after nine times as long, unless that was short. */
void user_turn_took(struct user *u, enum user_turn kind, uint64_t began_us, uint64_t now_us);

static inline void user_give_one(struct user *u, enum user_kind kind)
{
	CHECK(u->used[kind] > 0);
	u->used[kind]--;
}

#endif
