#include "bulkfix.h"

#include <criterion/criterion.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "core/check.h"
#include "core/memfile.h"

#define MIB (UINT64_C(1) << 20)

#define expect_text(text, part) \
	cr_expect(strstr((text), (part)), "'%s' does not say '%s'", (text), (part))

static int on_open(void *userdata, const char *node, const char *key, struct bulk_source *ret,
		   struct fault *f)
{
	struct bulkfix_owner *o = userdata;

	snprintf(o->node, sizeof(o->node), "%s", node);
	snprintf(o->key, sizeof(o->key), "%s", key);
	if (strcmp(key, "bytes") != 0)
		return fault_set(f, FAULT_NOT_FOUND, "peer", "there is no '%s' here", key);
	*ret = o->source;
	o->opens++;
	return 0;
}

static bool on_keeps(void *userdata, const struct bulk_source *source)
{
	const struct bulkfix_owner *o = userdata;

	cr_expect_eq(source->fd, o->source.fd);
	return !o->dropped;
}

static void on_close(void *userdata, struct bulk_source *source)
{
	struct bulkfix_owner *o = userdata;

	cr_expect_eq(source->fd, o->source.fd);
	o->closes++;
}

const struct bulk_ops bulkfix_ops = { on_open, on_keeps, on_close };

int bulkfix_file(uint64_t bytes, bool filled)
{
	uint64_t *at, words = (bytes + 7) / 8;
	int fd;

	cr_assert_eq(memfile_new("bulk", &fd), 0);
	cr_assert_eq(ftruncate(fd, (off_t)(words * 8)), 0);
	if (filled && words) {
		at = mmap(NULL, words * 8, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
		cr_assert_neq(at, MAP_FAILED);
		for (uint64_t i = 0; i < words; i++)
			at[i] = i * UINT64_C(0x9e3779b97f4a7c15) + 1;
		munmap(at, words * 8);
	}
	cr_assert_eq(ftruncate(fd, (off_t)bytes), 0);
	return fd;
}

bool bulkfix_same(int a, int b, uint64_t bytes)
{
	uint8_t *x = malloc(MIB), *y = malloc(MIB);
	bool same = true;

	CHECK(x && y);
	for (uint64_t i = 0; same && i < bytes; i += MIB) {
		size_t n = bytes - i < MIB ? (size_t)(bytes - i) : MIB;

		same = pread(a, x, n, (off_t)i) == (ssize_t)n &&
		       pread(b, y, n, (off_t)i) == (ssize_t)n && memcmp(x, y, n) == 0;
	}
	free(x);
	free(y);
	return same;
}

struct peerfix_node *bulkfix_server(struct bulkfix_owner *o, uint64_t bytes)
{
	struct peerfix_node *n = peerfix_node("b", NULL);

	*o = (struct bulkfix_owner){ .source = { .fd = bulkfix_file(bytes, bytes < BULKFIX_ENDLESS),
						 .size = bytes } };
	bulk_serve(n->ps, &bulkfix_ops, o);
	return n;
}

void bulkfix_on_done(void *userdata, const struct fault *f, uint64_t bytes)
{
	struct bulkfix_get *g = userdata;

	g->done++;
	g->ended = true;
	g->f = f ? *f : FAULT_NULL;
	g->bytes = bytes;
}

void bulkfix_begin(struct bulkfix_get *g, struct peerfix_node *from, const char *at,
		   const char *key, uint64_t bytes)
{
	struct bulk_want w = {
		.node = "b", .address = at, .key = key, .bytes = bytes, .idle_us = BULKFIX_IDLE_US
	};
	struct fault f = FAULT_NULL;

	*g = (struct bulkfix_get){ .fd = bytes < BULKFIX_ENDLESS
						 ? bulkfix_file(0, false)
						 : open("/dev/null", O_WRONLY | O_CLOEXEC) };
	w.fd = g->fd;
	cr_assert_eq(bulk_fetch(from->ps, &w, bulkfix_on_done, g, &g->x, &f), 0, "%s", f.text);
	cr_expect_eq(g->done, 0, "called from inside");
}

void bulkfix_end(struct bulkfix_get *g)
{
	looprun_flag(&peerfix.run, &g->ended, 60);
	cr_expect_eq(g->done, 1);
	close(g->fd);
}

static bool closed_all(void *arg)
{
	const struct bulkfix_owner *o = arg;

	return o->opens == o->closes;
}

void bulkfix_close(struct bulkfix_owner *o)
{
	looprun_until(&peerfix.run, closed_all, o, 30);
	close(o->source.fd);
}

void bulkfix_refused(struct bulkfix_get *g, enum fault_code code, const char *part)
{
	bulkfix_end(g);
	cr_expect_eq(g->f.code, code, "%s: %s", fault_code_name(g->f.code), g->f.text);
	expect_text(g->f.text, "of node 'b': ");
	expect_text(g->f.text, part);
	cr_expect_eq(g->bytes, 0);
}
