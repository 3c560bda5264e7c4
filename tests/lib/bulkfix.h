/* A node that serves a file to others, and fetches from it, on the nodes of peerfix. */
#ifndef SHARDD_TESTS_BULKFIX_H
#define SHARDD_TESTS_BULKFIX_H

#include "peer/bulk.h"
#include "peerfix.h"

#define BULKFIX_IDLE_US 20000000u
/* Of a file that no test fetches to its end; it is all zeros, and what comes is not kept. */
#define BULKFIX_ENDLESS (UINT64_C(1) << 40)

/* What a node serves: "bytes"; everything else is not there. */
struct bulkfix_owner {
	struct bulk_source source;
	unsigned opens, closes;
	bool dropped;                           /* it does not keep them */
	char node[64], key[BULK_KEY_BYTES + 1]; /* of the last one that asked */
};

extern const struct bulk_ops bulkfix_ops;

/* What has come of a fetch. */
struct bulkfix_get {
	struct bulk_fetch *x;
	int fd; /* it writes to this */
	unsigned done;
	struct fault f;
	uint64_t bytes;
	bool ended; /* done, for looprun_flag */
};

/* A file of @bytes, which differ if it is @filled. */
int bulkfix_file(uint64_t bytes, bool filled);
/* Are the first @bytes of both the same? */
bool bulkfix_same(int a, int b, uint64_t bytes);

/* Node "b", which serves a file of @bytes. */
struct peerfix_node *bulkfix_server(struct bulkfix_owner *o, uint64_t bytes);
/* Wait until nobody has the file any more, and close it. */
void bulkfix_close(struct bulkfix_owner *o);

/* @from begins to fetch from node "b" at @at. Fails the test on a fault. */
void bulkfix_begin(struct bulkfix_get *g, struct peerfix_node *from, const char *at,
		   const char *key, uint64_t bytes);
/* Its callback. */
void bulkfix_on_done(void *get, const struct fault *f, uint64_t bytes);
/* Wait for its end. */
void bulkfix_end(struct bulkfix_get *g);
/* The same, and it was refused with @code and a text that has @part. */
void bulkfix_refused(struct bulkfix_get *g, enum fault_code code, const char *part);

#endif
