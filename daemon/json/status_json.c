#include "json/status_json.h"

#include "core/check.h"
#include "core/cleanup.h"
#include "json/json.h"

json_t *status_json_status(const Shardd__V1__GetStatusResponse *s)
{
	json_t *j = json_from_message(&s->base);

	/* They were not asked for: an empty list would say that there are none. */
	if (j)
		json_object_del(j, "slabs");
	return j;
}

json_t *status_json_list(const Shardd__V1__GetStatusResponse *s, const char *key)
{
	_cleanup_(json_freep) json_t *all = json_from_message(&s->base);

	return json_pack("{s:O?}", key, json_object_get(all, key));
}

/* A JSON integer cannot hold the 2^64 - 1 of the message. */
static void status_json_limits(json_t *usage, Shardd__V1__UserUsage *const *from, size_t n)
{
	for (size_t k = 0; k < n; k++)
		if (from[k]->limit == UINT64_MAX)
			json_object_set_new(json_array_get(usage, k), "limit", json_null());
}

json_t *status_json_users(const Shardd__V1__GetStatusResponse *s)
{
	_cleanup_(json_freep) json_t *all = json_from_message(&s->base);
	json_t *users = json_object_get(all, "users"), *groups = json_object_get(all, "groups");

	for (size_t i = 0; i < s->n_users; i++)
		status_json_limits(json_object_get(json_array_get(users, i), "usage"),
				   s->users[i]->usage, s->users[i]->n_usage);
	for (size_t i = 0; i < s->n_groups; i++)
		status_json_limits(json_object_get(json_array_get(groups, i), "usage"),
				   s->groups[i]->usage, s->groups[i]->n_usage);
	return json_pack("{s:O?,s:O?}", "users", users, "groups", groups);
}

/* An object of the keys of @from that are in @keys. */
static json_t *status_json_pick(json_t *from, const char *const *keys, size_t n)
{
	json_t *to = json_object();

	for (size_t i = 0; i < n; i++)
		json_object_set(to, keys[i], json_object_get(from, keys[i]));
	return to;
}

/* The same with every object of the list @key, into a list of @to. */
static void status_json_pick_each(json_t *from, const char *key, const char *const *keys, size_t n,
				  json_t *to)
{
	json_t *list = json_array();
	json_t *item;
	size_t i;

	json_array_foreach(json_object_get(from, key), i, item)
		json_array_append_new(list, status_json_pick(item, keys, n));
	json_object_set_new(to, key, list);
}

json_t *status_json_memory(const Shardd__V1__GetStatusResponse *s, json_t *holders)
{
	static const char *const whole[] = { "devices", "slabs", "ring_bytes" };
	static const char *const job[] = { "name",       "quota_bytes",       "used_bytes",
					   "peak_bytes", "quarantined_bytes", "classes",
					   "memory" };
	static const char *const session[] = { "session", "pid",        "client_name", "job",
					       "rank",    "held_bytes", "ring" };
	_cleanup_(json_freep) json_t *all = json_from_message(&s->base);
	json_t *to;

	if (!all) {
		json_decref(holders);
		return NULL;
	}
	to = status_json_pick(all, whole, ARRAY_SIZE(whole));
	status_json_pick_each(all, "jobs", job, ARRAY_SIZE(job), to);
	status_json_pick_each(all, "sessions", session, ARRAY_SIZE(session), to);
	json_object_set_new(to, "holders", holders ? holders : json_null());
	return to;
}

json_t *status_json_units(const Shardd__V1__JobStatus *job)
{
	_cleanup_(json_freep) json_t *all = json_from_message(&job->base);

	return json_pack("{s:O?, s:O?, s:O?}", "job", json_object_get(all, "name"), "units",
			 json_object_get(all, "units"), "ranks", json_object_get(all, "ranks"));
}

json_t *status_json_publications(const Shardd__V1__GetStatusResponse *s)
{
	json_t *all = json_array();

	for (size_t i = 0; i < s->n_jobs; i++)
		for (size_t k = 0; k < s->jobs[i]->n_publications; k++) {
			json_t *one = json_from_message(&s->jobs[i]->publications[k]->base);

			json_object_set_new(one, "uid", json_integer(s->jobs[i]->uid));
			json_object_set_new(one, "job", json_from_text(s->jobs[i]->name));
			json_array_append_new(all, one);
		}
	return json_pack("{so}", "publications", all);
}

json_t *status_json_stalls(const Shardd__V1__GetStatusResponse *s)
{
	json_t *stalls = json_array();

	for (size_t i = 0; i < s->n_jobs; i++)
		if (s->jobs[i]->stall)
			json_array_append_new(
				stalls, json_pack("{si ss so}", "uid", (int)s->jobs[i]->uid, "job",
						  s->jobs[i]->name, "stall",
						  json_from_message(&s->jobs[i]->stall->base)));
	return stalls;
}
