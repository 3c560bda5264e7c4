#include "partition/cutbulk.h"

#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/sendfile.h>
#include <unistd.h>

#include "core/check.h"
#include "core/text.h"
#include "partition/cutfix.h"
#include "partition/cutinner.h"
#include "partition/cutlinks.h"
#include "peer/bulk.h"

struct bulk_fetch {
	struct bulk_fetch *next;
	unsigned node, from;
	char key[BULK_KEY_BYTES];
	uint64_t bytes;
	int fd;
	bool cancelled;
	bulk_done_cb done;
	void *userdata;
};

static struct bulk_fetch *under_way;
static const struct bulk_ops *ops_of[CUTFIX_NODES];
static void *userdata_of[CUTFIX_NODES];

static unsigned cutbulk_node(const struct peers *ps)
{
	return peers_port(ps) - 1u;
}

void bulk_serve(struct peers *ps, const struct bulk_ops *ops, void *userdata)
{
	ops_of[cutbulk_node(ps)] = ops;
	userdata_of[cutbulk_node(ps)] = userdata;
}

/* @want->address: as peers_connect's. */
int bulk_fetch(struct peers *ps, const struct bulk_want *want, bulk_done_cb done, void *userdata,
	       struct bulk_fetch **ret, struct fault *f)
{
	struct bulk_fetch *x = calloc(1, sizeof(*x));

	(void)f;
	CHECK(x);
	x->node = cutbulk_node(ps);
	x->from = (unsigned)strtoul(strrchr(want->address, ':') + 1, NULL, 10);
	text_copy(x->key, sizeof(x->key), want->key);
	x->bytes = want->bytes;
	x->fd = want->fd;
	x->done = done;
	x->userdata = userdata;
	x->next = under_way;
	under_way = x;
	*ret = x;
	return 0;
}

void bulk_cancel(struct bulk_fetch *x)
{
	x->cancelled = true;
}

uint64_t bulk_bytes(const struct bulk_fetch *x)
{
	(void)x;
	return 0;
}

static int cutbulk_copy(struct bulk_fetch *x, struct fault *f)
{
	struct bulk_source from = { .fd = -1 };
	off_t at = 0;

	if (x->cancelled)
		return fault_set(f, FAULT_CANCELLED, NULL, "it was cancelled");
	if (cutlinks_is_cut(x->node, x->from) || cutlinks_is_dead(x->from) ||
	    cutlinks_is_dead(x->node))
		return fault_set(f, FAULT_UNAVAILABLE, NULL, "node %u cannot be reached", x->from);
	if (ops_of[x->from]->open(userdata_of[x->from], "", x->key, &from, f))
		return f->code;
	CHECK(from.size == x->bytes && lseek(x->fd, 0, SEEK_SET) == 0);
	while ((uint64_t)at < x->bytes)
		CHECK(sendfile(x->fd, from.fd, &at, x->bytes - (uint64_t)at) > 0);
	ops_of[x->from]->close(userdata_of[x->from], &from);
	return 0;
}

static struct bulk_fetch *cutbulk_take(unsigned node)
{
	for (struct bulk_fetch **at = &under_way; *at; at = &(*at)->next)
		if ((*at)->node == node) {
			struct bulk_fetch *x = *at;

			*at = x->next;
			return x;
		}
	return NULL;
}

void cutbulk_end(unsigned node)
{
	struct bulk_fetch *x;

	while ((x = cutbulk_take(node))) {
		struct fault f = FAULT_NULL;

		cutfix_event();
		(void)cutbulk_copy(x, &f);
		x->done(x->userdata, f.code ? &f : NULL, f.code ? 0 : x->bytes);
		free(x);
	}
}
