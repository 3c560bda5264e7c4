/* Names of users and groups in a declaration: the daemon takes numbers only, since a lookup may block
 * and its container may know other users. */
#include <errno.h>
#include <grp.h>
#include <jansson.h>
#include <pwd.h>
#include <stdlib.h>
#include <string.h>

#include "client_error.h"
#include "core/cleanup.h"
#include "publication.h"

#define PUBLICATION_READERS_ROOM (1u << 16)

static bool publication_readers_number(const char *text, json_int_t *ret)
{
	char *end;

	errno = 0;
	*ret = strtoll(text, &end, 10);
	return *text >= '0' && *text <= '9' && !*end && !errno;
}

/* The uid or gid of @name. Return: false: there is none. */
static bool publication_readers_find(const char *name, bool is_group, json_int_t *ret)
{
	_cleanup_(freep) char *room = malloc(PUBLICATION_READERS_ROOM);
	struct passwd pw, *user = NULL;
	struct group gr, *group = NULL;

	if (publication_readers_number(name, ret))
		return true;
	if (room && is_group)
		getgrnam_r(name, &gr, room, PUBLICATION_READERS_ROOM, &group);
	else if (room)
		getpwnam_r(name, &pw, room, PUBLICATION_READERS_ROOM, &user);
	*ret = group ? (json_int_t)group->gr_gid : user ? (json_int_t)user->pw_uid : 0;
	return group || user;
}

/* @ret_any: set if a name was replaced. */
static int publication_readers_list(json_t *readers, const char *key, bool is_group, bool *ret_any,
				    struct shardd_error *err)
{
	json_t *list = json_object_get(readers, key);

	for (size_t i = 0; i < json_array_size(list); i++) {
		const char *name = json_string_value(json_array_get(list, i));
		char field[64];
		json_int_t id;

		if (!name)
			continue;
		snprintf(field, sizeof(field), "readers.%s[%zu]", key, i);
		if (!publication_readers_find(name, is_group, &id))
			return error_set(err, SHARDD_INVALID_ARGUMENT, field,
					 "this machine has no %s '%.64s': give its number",
					 is_group ? "group" : "user", name);
		json_array_set_new(list, i, json_integer(id));
		*ret_any = true;
	}
	return 0;
}

int publication_readers_resolve(const char *json, char **ret, struct shardd_error *err)
{
	json_t *root = json_loads(json, JSON_REJECT_DUPLICATES, NULL);
	json_t *readers = json_object_get(root, "readers");
	bool any = false;
	int e = publication_readers_list(readers, "users", false, &any, err);

	if (e == 0)
		e = publication_readers_list(readers, "groups", true, &any, err);
	*ret = NULL;
	if (e == 0 && any) {
		*ret = json_dumps(root, JSON_COMPACT | JSON_REAL_PRECISION(17));
		e = *ret ? 0 : error_memory(err);
	}
	json_decref(root); /* what is no JSON is the daemon's to refuse */
	return e;
}
