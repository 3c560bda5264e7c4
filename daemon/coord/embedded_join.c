/*
 * The embedded etcd without data: does it make a new store, or join one?
 *
 *   ask the others for their members ---one answers---> is this node among them?
 *      |                                                   |no: add it as a learner --> start
 *      |nobody answers                                     |yes, never started --> start
 *      v                                                   '-yes, it has lost its data: remove it,
 *   the first seed: make a new store; start                      and add it
 *   others: ask again, later
 *
 * Only the first seed makes a store, so that there are never two. It does so only if no other member of
 * etcd runs. One that has data, but no leader, or begins, does not serve its clients; so a seed that does not
 * answer is silent only if nothing accepts connections at its peer port. The store has an id of its own
 * each time, so that members of an earlier one are refused, and noticed (etcd_cluster.c).
 *
 * A member is removed only if its folder is ours, and nothing runs at its address.
 *
 * A learner has no vote: if it dies before it has the data, the others go on as before. When it serves
 * they are asked to promote it, until its own etcd answers as a member with a vote.
 */
#include <errno.h>
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <unistd.h>

#include "coord/embedded_impl.h"
#include "core/check.h"
#include "core/cleanup.h"

#define JOIN_ASK_MS    1500u
#define JOIN_CHANGE_MS 2000u
#define JOIN_AGAIN_MS  300u

#define JOIN_LEARNS "etcd serves, and has no vote until it has the data of the other members"

/* ------------------------------------------------------------------------------ the members */

static void embedded_join_url(const struct embedded *e, const struct seed *s,
			      char ret[EMBEDDED_URL_BYTES])
{
	char at[HOSTPORT_TEXT_BYTES];

	hostport_format(s->host, s->peer_port, at);
	snprintf(ret, EMBEDDED_URL_BYTES, "%s://%s", e->setup.cert ? "https" : "http", at);
}

static int embedded_join_open(struct embedded *e, char why[EMBEDDED_WHY_BYTES])
{
	struct coord_options o = { .endpoints = e->endpoints,
				   .n_endpoints = e->setup.seeds.n,
				   .prefix = "/",
				   .ca = e->setup.ca,
				   .cert = e->setup.cert,
				   .key = e->setup.key };
	struct fault f = FAULT_NULL;

	if (e->join.members || coord_etcd_new(e->loopq, &o, &e->join.members, &f) == 0)
		return 0;
	snprintf(why, EMBEDDED_WHY_BYTES, "the members of etcd cannot be asked: %.300s", f.text);
	return -ENOMEM;
}

static size_t embedded_join_own_place(const struct embedded *e)
{
	return (size_t)(e->setup.own - e->setup.seeds.members);
}

/* The next one that is not this node's. Return: false: there is none; the first of them is next. */
static bool embedded_join_next(struct embedded *e)
{
	size_t own = embedded_join_own_place(e);

	e->join.asked++;
	if (e->join.asked == own)
		e->join.asked++;
	if (e->join.asked < e->setup.seeds.n)
		return true;
	e->join.asked = own == 0;
	return false;
}

void embedded_join_end(struct embedded *e)
{
	etcd_member_cancel(&e->join.call);
	e->join.members = coord_close(e->join.members);
}

/* -------------------------------------------------------------------------- how it is started */

/* What etcd is told of its cluster. */
static int embedded_join_begins(struct embedded *e, const char *state, const char *token,
				const char *members)
{
	struct embedded_join *j = &e->join;

	free(j->initial);
	j->initial = strdup(members);
	j->state = state;
	snprintf(j->token, sizeof(j->token), "%s", token);
	return j->initial ? 0 : -ENOMEM;
}

int embedded_join_found(struct embedded *e)
{
	char url[EMBEDDED_URL_BYTES], members[EMBEDDED_URL_BYTES + NAME_BYTES + 2];
	char token[EMBEDDED_TOKEN_BYTES];
	uint64_t id = 0;

	if (getrandom(&id, sizeof(id), 0) != sizeof(id))
		return -EIO;
	embedded_join_url(e, e->setup.own, url);
	snprintf(members, sizeof(members), "%s=%s", e->setup.node, url);
	snprintf(token, sizeof(token), "%s-%016" PRIx64, e->setup.cluster, id);
	return embedded_join_begins(e, "new", token, members);
}

/* All members, as etcd wants them; those that were never started have no name. */
static char *embedded_join_members(const struct embedded *e, const char *own,
				   const struct etcd_member_reply *reply)
{
	size_t bytes = 0;
	char *text = NULL;
	FILE *f = open_memstream(&text, &bytes);

	if (!f)
		return NULL;
	for (size_t i = 0, k = 0; i < reply->n; i++) {
		const Shardd__Etcd__V1__Member *m = reply->members[i];

		for (size_t u = 0; u < m->n_peer_urls; u++, k++) {
			fprintf(f, "%s", k ? "," : "");
			if (strcmp(m->peer_urls[u], own) == 0)
				fprintf(f, "%s=", e->setup.node);
			else if (*m->name)
				fprintf(f, "%s=", m->name);
			else
				fprintf(f, "member.%" PRIx64 "=", m->id);
			fprintf(f, "%s", m->peer_urls[u]);
		}
	}
	if (fclose(f) == 0)
		return text;
	free(text);
	return NULL;
}

static void embedded_join_start(struct embedded *e, const struct etcd_member_reply *reply)
{
	char url[EMBEDDED_URL_BYTES];
	_cleanup_(freep) char *members = NULL;

	embedded_join_url(e, e->setup.own, url);
	members = embedded_join_members(e, url, reply);
	if (members && embedded_join_begins(e, "existing", e->setup.cluster, members) == 0)
		embedded_on_joined(e);
	else
		embedded_on_not_joined(e, "there is no memory to start etcd", 0);
}

/* -------------------------------------------------------------------------- another one answers */

static void embedded_join_fail(struct embedded *e, const char *fmt, ...)
	__attribute__((format(printf, 2, 3)));
static void embedded_join_fail(struct embedded *e, const char *fmt, ...)
{
	char why[EMBEDDED_WHY_BYTES];
	va_list args;

	va_start(args, fmt);
	vsnprintf(why, sizeof(why), fmt, args);
	va_end(args);
	embedded_on_not_joined(e, why, JOIN_AGAIN_MS);
}

static void embedded_join_on_added(struct etcd_member_call *call,
				   const struct etcd_member_reply *reply)
{
	struct embedded *e = CONTAINER_OF(call, struct embedded, join.call);

	if (reply->ok)
		embedded_join_start(e, reply);
	else
		embedded_join_fail(e, "etcd refused to add this node as a member: %s", reply->why);
}

static void embedded_join_add(struct embedded *e)
{
	char url[EMBEDDED_URL_BYTES];

	embedded_join_url(e, e->setup.own, url);
	e->join.call.done = embedded_join_on_added;
	if (etcd_member_add(e->join.members, &e->join.call, e->join.asked, url, JOIN_CHANGE_MS) < 0)
		embedded_join_fail(e, "there is no memory to join etcd");
}

static void embedded_join_on_removed(struct etcd_member_call *call,
				     const struct etcd_member_reply *reply)
{
	struct embedded *e = CONTAINER_OF(call, struct embedded, join.call);

	if (reply->ok)
		embedded_join_add(e);
	else
		embedded_join_fail(e,
				   "this node has lost its etcd data and cannot join again, "
				   "because etcd refused to remove the earlier member: %s",
				   reply->why);
}

/* Its folder is ours, and empty. Another daemon with this name may have its data elsewhere. */
static void embedded_join_on_own_probed(struct embedded *e, bool accepts)
{
	e->join.call.done = embedded_join_on_removed;
	if (accepts)
		embedded_join_fail(e,
				   "etcd lists this node as a member, but coord_dir has no data, "
				   "and another process accepts connections at its peer port %u: "
				   "stop that process, or set another node_name",
				   e->setup.own->peer_port);
	else if (etcd_member_remove(e->join.members, &e->join.call, e->join.asked, e->join.former,
				    JOIN_CHANGE_MS) < 0)
		embedded_join_fail(e, "there is no memory to join etcd");
}

static void embedded_join_remove(struct embedded *e, uint64_t id)
{
	e->join.former = id;
	if (embedded_probe_begin(e, e->setup.own, embedded_join_on_own_probed) < 0)
		embedded_join_fail(e, "there is no memory to join etcd");
}

static bool embedded_join_has_url(const Shardd__Etcd__V1__Member *m, const char *url)
{
	for (size_t i = 0; i < m->n_peer_urls; i++)
		if (strcmp(m->peer_urls[i], url) == 0)
			return true;
	return false;
}

static bool embedded_join_is_seed(const struct embedded *e, const Shardd__Etcd__V1__Member *m)
{
	char url[EMBEDDED_URL_BYTES];

	for (size_t i = 0; i < e->setup.seeds.n; i++) {
		embedded_join_url(e, &e->setup.seeds.members[i], url);
		if (embedded_join_has_url(m, url))
			return true;
	}
	return false;
}

static const Shardd__Etcd__V1__Member *embedded_join_own(const struct embedded *e,
							 const struct etcd_member_reply *reply)
{
	char url[EMBEDDED_URL_BYTES];

	embedded_join_url(e, e->setup.own, url);
	for (size_t i = 0; i < reply->n; i++)
		if (embedded_join_has_url(reply->members[i], url))
			return reply->members[i];
	return NULL;
}

/* One that nobody would start again. Another place in its stead is the administrator's decision. */
static const Shardd__Etcd__V1__Member *embedded_join_stranger(const struct embedded *e,
							      const struct etcd_member_reply *reply)
{
	for (size_t i = 0; i < reply->n; i++)
		if (!embedded_join_is_seed(e, reply->members[i]))
			return reply->members[i];
	return NULL;
}

/* etcd has one at a time. */
static bool embedded_join_has_learner(const struct etcd_member_reply *reply)
{
	for (size_t i = 0; i < reply->n; i++)
		if (reply->members[i]->is_learner)
			return true;
	return false;
}

static void embedded_join_decide(struct embedded *e, const struct etcd_member_reply *reply)
{
	const Shardd__Etcd__V1__Member *own = embedded_join_own(e, reply);
	const Shardd__Etcd__V1__Member *stranger = embedded_join_stranger(e, reply);

	if (own && !*own->name)
		embedded_join_start(e, reply);
	else if (own)
		embedded_join_remove(e, own->id);
	else if (stranger)
		embedded_join_fail(e,
				   "etcd has a member '%.63s' at %.100s that coord_seeds does not "
				   "list: remove it (etcdctl member remove %" PRIx64
				   "), or add it to coord_seeds; this node then joins",
				   stranger->name,
				   stranger->n_peer_urls ? stranger->peer_urls[0] : "?",
				   stranger->id);
	else if (embedded_join_has_learner(reply))
		embedded_join_fail(e, "another node joins etcd before this one");
	else
		embedded_join_add(e);
}

/* ----------------------------------------------------------------------------------- ask */

static void embedded_join_ask(struct embedded *e);

static bool embedded_join_is_learner(const char *why)
{
	return strstr(why, "not supported for learner") != NULL;
}

static void embedded_join_found_one(struct embedded *e)
{
	if (embedded_join_found(e) < 0)
		embedded_join_fail(e,
				   "cannot create an etcd store: the kernel gave no random number");
	else
		embedded_on_joined(e);
}

/* Of all seeds none has named the members. */
static void embedded_join_give_up(struct embedded *e)
{
	const struct seed *first = &e->setup.seeds.members[0];

	if (e->join.learner)
		embedded_join_fail(e,
				   "node '%s' has a learner of etcd, and the members with a vote "
				   "do not answer",
				   e->join.learner->node);
	else if (e->setup.own != first)
		embedded_join_fail(e,
				   "no other member of etcd answers; node '%s', the first of "
				   "coord_seeds, makes the store if there is none: %s",
				   first->node, e->join.why);
	else
		embedded_join_found_one(e);
}

static void embedded_join_ask_next(struct embedded *e)
{
	if (embedded_join_next(e))
		embedded_join_ask(e);
	else
		embedded_join_give_up(e);
}

static void embedded_join_on_probed(struct embedded *e, bool accepts)
{
	if (accepts)
		embedded_join_fail(e,
				   "an etcd runs on node '%s', but does not name its members: %s",
				   e->setup.seeds.members[e->join.asked].node, e->join.why);
	else
		embedded_join_ask_next(e);
}

/* It does not name the members. */
static void embedded_join_on_other(struct embedded *e, const char *why)
{
	const struct seed *seed = &e->setup.seeds.members[e->join.asked];

	snprintf(e->join.why, sizeof(e->join.why), "%s", why);
	if (embedded_join_is_learner(why)) {
		e->join.learner = seed;
		embedded_join_ask_next(e);
	} else if (embedded_probe_begin(e, seed, embedded_join_on_probed) < 0) {
		embedded_join_fail(e, "there is no memory to ask the members of etcd");
	}
}

static void embedded_join_on_listed(struct etcd_member_call *call,
				    const struct etcd_member_reply *reply)
{
	struct embedded *e = CONTAINER_OF(call, struct embedded, join.call);

	if (reply->ok)
		embedded_join_decide(e, reply);
	else
		embedded_join_on_other(e, reply->why);
}

static void embedded_join_ask(struct embedded *e)
{
	e->join.call.done = embedded_join_on_listed;
	if (etcd_member_list(e->join.members, &e->join.call, e->join.asked, JOIN_ASK_MS) < 0)
		embedded_join_fail(e, "there is no memory to ask the members of etcd");
}

int embedded_join_begin(struct embedded *e, char why[EMBEDDED_WHY_BYTES])
{
	int r;

	embedded_join_end(e); /* connections that have failed fail faster, and otherwise */
	r = embedded_join_open(e, why);
	e->join.learner = NULL;
	e->join.asked = embedded_join_own_place(e) == 0;
	if (r == 0)
		embedded_join_ask(e);
	return r;
}

/* ------------------------------------------------------------------------------------ a vote */

static void embedded_join_on_promoted(struct etcd_member_call *call,
				      const struct etcd_member_reply *reply)
{
	struct embedded *e = CONTAINER_OF(call, struct embedded, join.call);

	if (!reply->ok) /* it has not all data yet, or this one has no leader */
		embedded_join_next(e);
	embedded_on_vote(e, false, JOIN_LEARNS, JOIN_AGAIN_MS);
}

/* A member with a vote has named all. */
static void embedded_join_on_found(struct etcd_member_call *call,
				   const struct etcd_member_reply *reply)
{
	struct embedded *e = CONTAINER_OF(call, struct embedded, join.call);
	const Shardd__Etcd__V1__Member *own = reply->ok ? embedded_join_own(e, reply) : NULL;

	e->join.call.done = embedded_join_on_promoted;
	if (own && etcd_member_promote(e->join.members, &e->join.call, e->join.asked, own->id,
				       JOIN_CHANGE_MS) == 0)
		return;
	embedded_join_next(e);
	embedded_on_vote(e, false, JOIN_LEARNS, JOIN_AGAIN_MS);
}

static void embedded_join_promote(struct embedded *e)
{
	e->join.call.done = embedded_join_on_found;
	if (etcd_member_list(e->join.members, &e->join.call, e->join.asked, JOIN_ASK_MS) < 0)
		embedded_on_vote(e, false, JOIN_LEARNS, JOIN_AGAIN_MS);
}

/* Its own etcd has answered; a learner does not name the members. */
static void embedded_join_on_seen(struct etcd_member_call *call,
				  const struct etcd_member_reply *reply)
{
	struct embedded *e = CONTAINER_OF(call, struct embedded, join.call);

	if (!reply->ok && embedded_join_is_learner(reply->why))
		embedded_join_promote(e);
	else
		embedded_on_vote(e, reply->ok, "", JOIN_AGAIN_MS);
}

void embedded_join_look(struct embedded *e)
{
	char why[EMBEDDED_WHY_BYTES];

	e->join.call.done = embedded_join_on_seen;
	if (embedded_join_open(e, why) < 0 ||
	    etcd_member_list(e->join.members, &e->join.call, embedded_join_own_place(e),
			     JOIN_ASK_MS) < 0)
		embedded_on_vote(e, false, "", JOIN_AGAIN_MS);
}
