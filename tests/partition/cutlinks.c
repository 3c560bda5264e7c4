#include "partition/cutlinks.h"

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/check.h"
#include "core/list.h"
#include "core/text.h"
#include "partition/cutfix.h"
#include "partition/cutinner.h"
#include "peer/peer.h"
#include "peer.pb-c.h"

#define NOTICE_US 1250000u
#define LATE_US   300000u

struct peers {
	unsigned node;
	bool closed;
	const struct peers_ops *ops;
	void *userdata;
};

struct peer {
	struct list link;
	struct peers *owner;
	struct peer *other;
	void *data;
	uint64_t gone_us; /* then this end notices; 0: it does not */
	bool dialled, over, told;
	char why[128];
};

/* CLOSED: the other end's daemon is dead. */
enum cutlinks_kind { CUTLINKS_UP, CUTLINKS_MESSAGE, CUTLINKS_CLOSED };

struct news {
	struct list link;
	struct peer *to;
	enum cutlinks_kind kind;
	size_t bytes;
	uint8_t packed[];
};

static struct {
	struct peers peers[CUTFIX_NODES];
	unsigned n, n_peers, apart;
	unsigned dead; /* nodes */
	struct list under_way, ends;
	uint64_t now_us, random;
	unsigned (*pick)(unsigned n); /* this or random, or what was sent first arrives first */
	bool turns;
} links;

bool cutlinks_is_cut(unsigned a, unsigned b)
{
	return (links.apart >> a & 1) != (links.apart >> b & 1);
}

bool cutlinks_is_dead(unsigned node)
{
	return links.dead >> node & 1;
}

static void cutlinks_post(struct peer *to, enum cutlinks_kind kind,
			  const Shardd__V1__PeerMessage *m)
{
	size_t bytes = m ? shardd__v1__peer_message__get_packed_size(m) : 0;
	struct news *news = malloc(sizeof(*news) + bytes);

	CHECK(news);
	news->to = to;
	news->kind = kind;
	news->bytes = bytes;
	list_init(&news->link);
	list_append(&links.under_way, &news->link);
	if (m)
		shardd__v1__peer_message__pack(m, news->packed);
}

int peers_new(struct loopq *loopq, const struct peers_options *o, const struct peers_ops *ops,
	      void *userdata, struct peers **ret, struct fault *f)
{
	unsigned node = 0;

	(void)loopq, (void)o, (void)f;
	if (links.n_peers < links.n)
		node = links.n_peers++;
	else
		while (!cutlinks_is_dead(node))
			node++; /* it comes back */
	CHECK(node < links.n);
	links.dead &= ~(1u << node);
	links.peers[node] = (struct peers){ .node = node, .ops = ops, .userdata = userdata };
	*ret = &links.peers[node];
	return 0;
}

uint16_t peers_port(const struct peers *ps)
{
	return (uint16_t)(ps->node + 1);
}

static struct peer *cutlinks_end_new(unsigned node)
{
	struct peer *p = calloc(1, sizeof(*p));

	CHECK(p);
	p->owner = &links.peers[node];
	list_init(&p->link);
	list_append(&links.ends, &p->link);
	return p;
}

/* @at: "HOST:NUMBER OF THE NODE" */
int peers_connect(struct peers *ps, const char *name, const char *at, struct peer **ret,
		  struct fault *f)
{
	unsigned node = (unsigned)strtoul(strrchr(at, ':') + 1, NULL, 10);
	struct peer *here = cutlinks_end_new(ps->node), *there = cutlinks_end_new(node);

	(void)name, (void)f;
	here->dialled = true;
	here->other = there;
	there->other = here;
	*ret = here;
	if (cutlinks_is_dead(ps->node)) { /* just now */
		here->told = here->over = there->told = there->over = true;
	} else if (cutlinks_is_cut(ps->node, node)) {
		there->told = here->over = there->over = true;
		here->gone_us = links.now_us + NOTICE_US;
		text_copy(here->why, sizeof(here->why), "it cannot be reached");
	} else if (cutlinks_is_dead(node)) {
		there->told = there->over = true;
		text_copy(here->why, sizeof(here->why), "nobody listens there");
		cutlinks_post(here, CUTLINKS_CLOSED, NULL);
	} else {
		cutlinks_post(there, CUTLINKS_UP, NULL);
		cutlinks_post(here, CUTLINKS_UP, NULL);
	}
	return 0;
}

void peers_tick(struct peers *ps, uint64_t now_us)
{
	(void)ps, (void)now_us;
}

void peers_close(struct peers *ps, peers_closed_cb done, void *userdata)
{
	ps->closed = true;
	if (done)
		done(userdata);
}

void peer_send(struct peer *p, const Shardd__V1__PeerMessage *m)
{
	if (!p->over && !cutlinks_is_cut(p->owner->node, p->other->owner->node))
		cutlinks_post(p->other, CUTLINKS_MESSAGE, m);
}

void peer_end(struct peer *p, const char *why)
{
	if (p->over)
		return;
	cutfix_say("node %u ends the link to node %u: %s", p->owner->node, p->other->owner->node,
		   why);
	p->over = p->other->over = true;
	p->gone_us = p->other->gone_us = links.now_us;
}

const char *peer_name(const struct peer *p)
{
	return cutfix_name(p->other->owner->node);
}

struct peer *peers_find(struct peers *ps, const char *name)
{
	struct peer *p, *tmp;

	list_for_each (p, tmp, &links.ends, link)
		if (p->owner == ps && !p->over && strcmp(peer_name(p), name) == 0)
			return p;
	return NULL;
}

bool peer_is_dialled(const struct peer *p)
{
	return p->dialled;
}

void peer_set_data(struct peer *p, void *data)
{
	p->data = data;
}

void *peer_data(const struct peer *p)
{
	return p->data;
}

static uint64_t cutlinks_random(uint64_t most)
{
	links.random ^= links.random << 13;
	links.random ^= links.random >> 7;
	links.random ^= links.random << 17;
	return (links.random >> 11) % most;
}

static bool cutlinks_is_first_of_its_link(const struct news *news)
{
	struct news *n, *tmp;

	list_for_each (n, tmp, &links.under_way, link) {
		if (n == news)
			return true;
		if (n->to == news->to)
			return false;
	}
	CHECK_NOT_REACHED();
}

static unsigned cutlinks_which(unsigned n)
{
	if (n > 1 && links.pick)
		return links.pick(n);
	return n > 1 && links.random ? (unsigned)cutlinks_random(n) : 0;
}

/* What arrives next: each link keeps its order. Return: NULL: nothing, since a node goes on instead, which is
 * *@ret_node, or since nothing is under way; then that is CUTFIX_NODES. */
static struct news *cutlinks_pick(unsigned *ret_node)
{
	struct news *news, *tmp, *first[2 * CUTFIX_NODES * CUTFIX_NODES];
	unsigned n = 0, which;

	*ret_node = links.n;
	list_for_each (news, tmp, &links.under_way, link)
		if (n < ARRAY_SIZE(first) && cutlinks_is_first_of_its_link(news))
			first[n++] = news;
	if (!n)
		return NULL;
	which = cutlinks_which(n + (links.turns ? links.n : 0));
	if (which < n)
		return first[which];
	*ret_node = which - n;
	return NULL;
}

static void cutlinks_arrive(struct news *news)
{
	Shardd__V1__PeerMessage *m = NULL;
	struct peer *p = news->to;

	list_unlink(&news->link);
	if (!p->over && !p->owner->closed) {
		cutfix_enter(p->owner->node);
		if (news->kind == CUTLINKS_UP) {
			p->owner->ops->up(p->owner->userdata, p);
		} else if (news->kind == CUTLINKS_CLOSED) {
			p->over = p->told = true;
			p->owner->ops->gone(p->owner->userdata, p, p->why);
		} else {
			m = shardd__v1__peer_message__unpack(NULL, news->bytes, news->packed);
			CHECK(m);
			p->owner->ops->message(p->owner->userdata, p, m);
			shardd__v1__peer_message__free_unpacked(m, NULL);
		}
	}
	free(news);
}

/* Return: false: nothing is under way. */
bool cutlinks_deliver(void)
{
	struct news *news;
	unsigned node;

	if (list_empty(&links.under_way))
		return false;
	cutfix_event();
	news = cutlinks_pick(&node);
	if (news)
		cutlinks_arrive(news);
	else if (node < links.n)
		cutfix_go_on(node);
	return true; /* without either it was lost at this moment */
}

/* Ends of links notice that they are. */
void cutlinks_notice(uint64_t now_us)
{
	struct peer *p, *tmp;

	links.now_us = now_us;
	list_for_each (p, tmp, &links.ends, link) {
		if (!p->gone_us || p->told || links.now_us < p->gone_us)
			continue;
		p->told = true;
		if (p->owner->closed)
			continue;
		cutfix_enter(p->owner->node);
		p->owner->ops->gone(p->owner->userdata, p, p->why);
	}
}

static void cutlinks_lose_news(void)
{
	struct news *news, *tmp;

	list_for_each (news, tmp, &links.under_way, link)
		if (cutlinks_is_cut(news->to->owner->node, news->to->other->owner->node)) {
			list_unlink(&news->link);
			free(news);
		}
}

void cutlinks_cut(unsigned apart, unsigned late)
{
	struct peer *p, *tmp;

	links.apart = apart;
	cutlinks_lose_news();
	list_for_each (p, tmp, &links.ends, link) {
		unsigned node = p->owner->node;

		if (p->over || !cutlinks_is_cut(node, p->other->owner->node))
			continue;
		p->over = true;
		p->gone_us = links.now_us + NOTICE_US + (late >> node & 1 ? LATE_US : 0);
		text_copy(p->why, sizeof(p->why), "nothing has come from it");
	}
}

static void cutlinks_lose_news_of(const struct peer *p)
{
	struct news *news, *tmp;

	list_for_each (news, tmp, &links.under_way, link)
		if (news->to == p) {
			list_unlink(&news->link);
			free(news);
		}
}

void cutlinks_die(unsigned node, bool loses)
{
	struct peer *p, *tmp;

	links.dead |= 1u << node;
	list_for_each (p, tmp, &links.ends, link) {
		if (p->owner->node != node || p->over)
			continue;
		p->over = p->told = true;
		cutlinks_lose_news_of(p);
		if (p->other->over)
			continue;
		if (loses)
			cutlinks_lose_news_of(p->other);
		text_copy(p->other->why, sizeof(p->other->why), "its daemon is dead");
		cutlinks_post(p->other, CUTLINKS_CLOSED, NULL);
	}
}

void cutlinks_heal(void)
{
	links.apart = 0;
}

void cutlinks_begin(unsigned nodes, const struct cutfix_options *o)
{
	memset(&links, 0, sizeof(links));
	links.n = nodes;
	links.random = o->random;
	links.pick = o->pick;
	links.turns = o->turns;
	list_init(&links.under_way);
	list_init(&links.ends);
}

void cutlinks_end(void)
{
	while (!list_empty(&links.under_way)) {
		struct news *news = list_first(&links.under_way, struct news, link);

		list_unlink(&news->link);
		free(news);
	}
	while (!list_empty(&links.ends)) {
		struct peer *p = list_first(&links.ends, struct peer, link);

		list_unlink(&p->link);
		free(p);
	}
}
