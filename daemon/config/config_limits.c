/* Limits of users: the list of exceptions from and to text, and all of them for core/user.h. */
#include "config/config_keys.h"

#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "config/config.h"
#include "core/check.h"
#include "core/cleanup.h"

#define ENTRY_MAX 64u /* bytes of one as text: "@4294967295:total_daemon_bytes=..." */

_Static_assert(CONFIG_MAX_IDS <= USER_GROUPS, "each entry may name a group of its own");
_Static_assert(ENTRY_MAX *CONFIG_MAX_IDS <= CONFIG_VALUE_MAX, "a full list fits as text");

static int config_limits_refuse(const struct config_key *k, const char *item, const char *why,
				struct fault *f)
{
	return fault_set(
		f, FAULT_INVALID, k->name,
		"%s has '%.64s': %s; write USER:LIMIT=VALUE or @GROUP:LIMIT=VALUE, such as "
		"alice:max_sessions=100, @ml:max_state_bytes=64GiB or @ml:total_state_bytes=1TiB",
		k->name, item, why);
}

#define WEIGHT_NAME   "worker_weight"
#define PRIORITY_NAME "priority"

/* "max_sessions", "total_sessions", "worker_weight" or "priority" to its kind. */
static bool config_limits_kind(const char *name, struct user_override *ret)
{
	const char *prefix = strncmp(name, "total_", 6) == 0 ? "total_" : "max_";

	if (strcmp(name, WEIGHT_NAME) == 0 || strcmp(name, PRIORITY_NAME) == 0) {
		ret->kind = *name == *WEIGHT_NAME ? USER_WORKER_WEIGHT : USER_PRIORITY;
		return true;
	}
	if (strncmp(name, prefix, strlen(prefix)) != 0)
		return false;
	ret->total = *prefix == 't';
	for (unsigned i = 0; i < _USER_KINDS; i++)
		if (strcmp(name + strlen(prefix), user_kind_name(i)) == 0) {
			ret->kind = i;
			return true;
		}
	return false;
}

static bool config_limits_amount(enum user_kind kind, const char *text, uint64_t *ret)
{
	static const struct config_key bytes = { .type = CONFIG_BYTES,
						 .max = INT64_MAX,
						 .zero = true };
	static const struct config_key count = { .type = CONFIG_COUNT,
						 .max = UINT32_MAX,
						 .zero = true };
	static const struct config_key weight = { .type = CONFIG_COUNT,
						  .min = 1,
						  .max = USER_WEIGHT_MAX };
	static const struct config_key priority = { .type = CONFIG_COUNT,
						    .max = USER_PRIORITY_MAX,
						    .zero = true };

	if (kind == USER_WORKER_WEIGHT)
		return config_parse_amount(&weight, text, ret);
	if (kind == USER_PRIORITY)
		return config_parse_amount(&priority, text, ret);
	return config_parse_amount(user_kind_is_bytes(kind) ? &bytes : &count, text, ret);
}

static const char *config_limits_allowed(enum user_kind kind)
{
	if (kind == USER_WORKER_WEIGHT)
		return "the value must be a whole number from 1 to 10000";
	if (kind == USER_PRIORITY)
		return "the value must be a whole number from 0 to 100";
	return user_kind_is_bytes(kind) ? "the value must be bytes, such as 64GiB, or 0"
					: "the value must be a whole number, or 0";
}

/* One entry, which is cut up. */
static int config_limits_item(const struct config_key *k, char *item, struct user_override *ret,
			      struct fault *f)
{
	_cleanup_(freep) char *whole = strdup(item);
	bool group = item[0] == '@';
	char *who = item + group, *limit = strchr(who, ':'), *value;

	if (!whole)
		return fault_errno(f, -ENOMEM, k->name);
	value = limit ? strchr(limit, '=') : NULL;
	if (!value)
		return config_limits_refuse(k, whole, "it has no ':' with a '=' after it", f);
	*limit++ = '\0';
	*value++ = '\0';
	ret->group = group;
	if (!config_parse_id(group, who, &ret->id))
		return config_limits_refuse(k, whole,
					    group ? "there is no such group on this machine"
						  : "there is no such user on this machine",
					    f);
	if (!config_limits_kind(limit, ret))
		return config_limits_refuse(k, whole,
					    "there is no such limit (a limit is the key "
					    "max_..._per_user without _per_user, the same with "
					    "total_ instead of max_, " WEIGHT_NAME
					    " or " PRIORITY_NAME ")",
					    f);
	if (ret->total && !group)
		return config_limits_refuse(k, whole,
					    "a total is a limit of a group, with an @ before it; "
					    "that of a user is max_...",
					    f);
	if (ret->total && !user_kind_has_total(ret->kind))
		return config_limits_refuse(
			k, whole,
			"there is no total of these (a total is of connections, unattached, "
			"sessions, jobs, slabs, state_bytes or daemon_bytes)",
			f);
	if (!config_limits_amount(ret->kind, value, &ret->most))
		return config_limits_refuse(k, whole, config_limits_allowed(ret->kind), f);
	return 0;
}

static bool config_limits_has(const struct user_override *list, size_t n,
			      const struct user_override *o)
{
	for (size_t i = 0; i < n; i++)
		if (list[i].group == o->group && list[i].id == o->id && list[i].kind == o->kind &&
		    list[i].total == o->total)
			return true;
	return false;
}

int config_limits_parse(struct config *c, const struct config_key *k, const char *text,
			struct fault *f)
{
	_cleanup_(freep) char *copy = strdup(text);
	struct user_override list[CONFIG_MAX_IDS] = { 0 };
	uint32_t n = 0;

	if (!copy)
		return fault_errno(f, -ENOMEM, k->name);
	for (char *save = NULL, *item = strtok_r(copy, ", ", &save); item;
	     item = strtok_r(NULL, ", ", &save), n++) {
		if (n == CONFIG_MAX_IDS)
			return fault_set(f, FAULT_INVALID, k->name, "%s has more than %d entries",
					 k->name, CONFIG_MAX_IDS);
		if (config_limits_item(k, item, &list[n], f))
			return f->code;
		if (config_limits_has(list, n, &list[n]))
			return config_limits_refuse(k, item,
						    "an entry before it sets the same limit", f);
	}
	memcpy(c->per_user.limits, list, sizeof(list));
	c->per_user.n_limits = n;
	return 0;
}

static void config_limits_name(const struct user_override *o, char *buf, size_t bytes)
{
	if (o->kind == USER_WORKER_WEIGHT)
		snprintf(buf, bytes, "%s", WEIGHT_NAME);
	else if (o->kind == USER_PRIORITY)
		snprintf(buf, bytes, "%s", PRIORITY_NAME);
	else
		snprintf(buf, bytes, "%s%s", o->total ? "total_" : "max_", user_kind_name(o->kind));
}

void config_limits_format(const struct config *c, char *buf)
{
	size_t used = 0;

	buf[0] = '\0';
	for (uint32_t i = 0; i < c->per_user.n_limits; i++) {
		const struct user_override *o = &c->per_user.limits[i];
		char name[40];

		config_limits_name(o, name, sizeof(name));
		used += (size_t)snprintf(buf + used, CONFIG_VALUE_MAX - used,
					 "%s%s%" PRIu32 ":%s=%" PRIu64, i ? "," : "",
					 o->group ? "@" : "", o->id, name, o->most);
		CHECK(used < CONFIG_VALUE_MAX);
	}
}

void config_user_limits(const struct config *c, struct user_limits *ret)
{
	*ret = (struct user_limits){
		.most = { [USER_CONNECTIONS] = c->per_user.max_connections,
			  [USER_UNATTACHED] = c->per_user.max_unattached,
			  [USER_SESSIONS] = c->per_user.max_sessions,
			  [USER_JOBS] = c->per_user.max_jobs,
			  [USER_SLABS] = c->per_user.max_slabs,
			  [USER_STATE] = c->per_user.max_state_bytes,
			  [USER_MEMORY] = c->per_user.max_daemon_bytes,
			  [USER_MESSAGE_BYTES] = c->per_user.max_message_bytes,
			  [USER_FDS] = c->per_user.max_fds,
			  [USER_OPS] = c->per_user.max_ops,
			  [USER_STATUS_CALLS] = c->per_user.max_status_calls },
		.overrides = c->per_user.limits,
		.n_overrides = c->per_user.n_limits,
	};
}
