/*
 * daemon/peer, without a network: the functions of peer/peer.h over queues in this process. A message is
 * packed when it is sent, as there, and unpacked when it arrives. Fetches are refused (scale_bulk.c).
 */
#include <malloc.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/check.h"
#include "core/list.h"
#include "core/text.h"
#include "peer/peer.h"
#include "scale.h"

struct peers {
	bool closed; /* nothing is told any more */
	unsigned node;
	char name[NAME_BYTES];
	const struct peers_ops *ops;
	void *userdata;
};

/* One end of a link. */
struct peer {
	struct list link; /* net.ends */
	struct peers *owner;
	struct peer *other;
	void *data;
	bool dialled, over;
};

enum net_what { NET_UP, NET_MESSAGE, NET_GONE };

struct net_news {
	struct list link;
	struct peer *to;
	enum net_what what;
	size_t bytes;
	uint8_t packed[];
};

static struct {
	struct peers *nodes[SCALE_MOST];
	unsigned n, begun;
	struct list under_way; /* of struct net_news */
	struct list ends;      /* of struct peer */
	void (*enter)(unsigned node, bool arrived);
	void (*leave)(void);
} net;

struct scale_counts scale_counts;

void scale_net_begin(unsigned n, void (*enter)(unsigned node, bool arrived), void (*leave)(void))
{
	CHECK(n <= SCALE_MOST && !net.n);
	net.n = n;
	net.begun = 0;
	net.enter = enter;
	net.leave = leave;
	list_init(&net.under_way);
	list_init(&net.ends);
}

void scale_net_end(void)
{
	while (!list_empty(&net.under_way)) {
		struct net_news *news = list_first(&net.under_way, struct net_news, link);

		list_unlink(&news->link);
		free(news);
	}
	while (!list_empty(&net.ends)) {
		struct peer *p = list_first(&net.ends, struct peer, link);

		list_unlink(&p->link);
		free(p);
	}
	for (unsigned i = 0; i < net.begun; i++)
		free(net.nodes[i]);
	net.n = 0;
}

static void net_post(struct peer *to, enum net_what what, const Shardd__V1__PeerMessage *m)
{
	size_t bytes = m ? shardd__v1__peer_message__get_packed_size(m) : 0;
	struct net_news *news = malloc(sizeof(*news) + bytes);

	CHECK(news);
	news->to = to;
	news->what = what;
	news->bytes = bytes;
	list_init(&news->link);
	list_append(&net.under_way, &news->link);
	if (!m)
		return;
	CHECK(bytes <= PEER_MESSAGE_BYTES);
	shardd__v1__peer_message__pack(m, news->packed);
	scale_counts.messages++;
	scale_counts.bytes += bytes;
	scale_counts.largest = bytes > scale_counts.largest ? bytes : scale_counts.largest;
	scale_counts.to_leader += to->owner->node == 0;
	scale_counts.from_leader += to->other->owner->node == 0;
	/* real links hold it outside of the daemon's loop, too */
	if (to->other->owner->node == 0)
		scale_counts.leader_memory -= (int64_t)malloc_usable_size(news) + 8;
}

static void net_tell(struct net_news *news)
{
	struct peer *p = news->to;
	const struct peers_ops *ops = p->owner->ops;
	Shardd__V1__PeerMessage *m = NULL;

	if (p->owner->closed || (p->over && news->what != NET_GONE))
		return;
	if (news->what == NET_MESSAGE) {
		m = shardd__v1__peer_message__unpack(NULL, news->bytes, news->packed);
		CHECK(m);
	}
	net.enter(p->owner->node, news->what == NET_MESSAGE);
	if (news->what == NET_UP)
		ops->up(p->owner->userdata, p);
	else if (news->what == NET_MESSAGE)
		ops->message(p->owner->userdata, p, m);
	else
		ops->gone(p->owner->userdata, p, "the connection was closed");
	net.leave();
	if (m)
		shardd__v1__peer_message__free_unpacked(m, NULL);
}

bool scale_net_deliver(void)
{
	bool any = false;

	while (!list_empty(&net.under_way)) {
		struct net_news *news = list_first(&net.under_way, struct net_news, link);

		list_unlink(&news->link);
		net_tell(news);
		free(news);
		any = true;
	}
	return any;
}

/* ------------------------------------------------------------------------ peer/peer.h */

int peers_new(struct loopq *loopq, const struct peers_options *o, const struct peers_ops *ops,
	      void *userdata, struct peers **ret, struct fault *f)
{
	struct peers *ps = calloc(1, sizeof(*ps));

	(void)loopq;
	(void)f;
	CHECK(ps && net.begun < net.n);
	ps->node = net.begun;
	text_copy(ps->name, sizeof(ps->name), o->node);
	ps->ops = ops;
	ps->userdata = userdata;
	net.nodes[net.begun++] = ps;
	*ret = ps;
	return 0;
}

uint16_t peers_port(const struct peers *ps)
{
	(void)ps;
	return 1;
}

static struct peer *net_peer_new(struct peers *owner)
{
	struct peer *p = calloc(1, sizeof(*p));

	CHECK(p);
	p->owner = owner;
	list_init(&p->link);
	list_append(&net.ends, &p->link);
	return p;
}

/* @at: "HOST:NUMBER OF THE NODE". */
int peers_connect(struct peers *ps, const char *name, const char *at, struct peer **ret,
		  struct fault *f)
{
	unsigned node = (unsigned)strtoul(strrchr(at, ':') + 1, NULL, 10);
	struct peer *here = net_peer_new(ps), *there;

	(void)name;
	(void)f;
	CHECK(node < net.begun);
	there = net_peer_new(net.nodes[node]);
	here->dialled = true;
	here->other = there;
	there->other = here;
	net_post(there, NET_UP, NULL);
	net_post(here, NET_UP, NULL);
	*ret = here;
	return 0;
}

void peers_tick(struct peers *ps, uint64_t now_us)
{
	(void)ps;
	(void)now_us;
}

void peers_close(struct peers *ps, peers_closed_cb done, void *userdata)
{
	ps->closed = true; /* the other ends are not told: all nodes end together */
	if (done)
		done(userdata);
}

void peer_send(struct peer *p, const Shardd__V1__PeerMessage *m)
{
	if (!p->over)
		net_post(p->other, NET_MESSAGE, m);
}

void peer_end(struct peer *p, const char *why)
{
	if (p->over)
		return;
	fprintf(stderr, "scale: node %u ends the link to node %u: %s\n", p->owner->node,
		p->other->owner->node, why);
	p->over = p->other->over = true;
	net_post(p->other, NET_GONE, NULL);
	net_post(p, NET_GONE, NULL);
}

struct peer *peers_find(struct peers *ps, const char *name)
{
	struct peer *p, *tmp;

	list_for_each (p, tmp, &net.ends, link)
		if (p->owner == ps && !p->over && strcmp(peer_name(p), name) == 0)
			return p;
	return NULL;
}

const char *peer_name(const struct peer *p)
{
	return p->other->owner->name;
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
