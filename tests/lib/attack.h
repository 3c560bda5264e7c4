/*
 * An attack on a daemon that others use: what they notice of it, in figures.
 *
 * A bystander is a process of its own that trains in a job of one rank: it measures the
 * round trip of Status over gRPC, of an op that does nothing over the ring, and of a frame
 * over the local channel. The attacker is the test process, with plain sockets.
 */
#ifndef SHARDD_TESTS_ATTACK_H
#define SHARDD_TESTS_ATTACK_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "witness.h"

/* The worst that a test accepts of a machine that does other things, too: without the gate
 * bystanders waited for 2 to 22 s. What counts are the figures that are printed. */
#define ATTACK_P99_US 1000000u

/* SHARDD_ATTACK_FIGURES=1: print the figures of a daemon that may have no gate, without a
 * verdict; with SHARDD_BIN_DIR for its directory. */
bool attack_figures_only(void);

/* How long attack_flush has patience with a daemon that takes nothing. */
#define ATTACK_FLUSH_S 20u

struct attack_shared;

struct attack {
	struct witness w;
	const char *name;
	struct attack_shared *shared; /* with the bystander */
	pid_t bystander;
	uint64_t rss_kib; /* of the daemon, before */
	uint64_t cpu_us;  /* the same, of all its threads */
	uint64_t began_us;
};

/* A daemon with @args (may be NULL) and a bystander that has measured a little. */
void attack_begin(struct attack *a, const char *name, const char *const *args);

/* Let the bystander go on for @ms more, then print the figures of the attack: each p99,
 * how much the daemon has grown at most, its processor time. Fails the test if a p99 is
 * above ATTACK_P99_US, if the daemon has grown by more than @max_mib, if the bystander
 * noticed an error, or if the daemon is not what it was. */
void attack_end(struct attack *a, unsigned ms, unsigned max_mib);

/* The bystander has done @n more of each, at most within 120 s: it is served. */
void attack_await(struct attack *a, unsigned n);

/* Wait until the daemon's log has a line with "connection closed limit=@limit ", this
 * process's uid and pid; fails the test after 30 s. */
void attack_logged(struct attack *a, const char *limit);

/* The same, or about @other. */
void attack_logged_either(struct attack *a, const char *limit, const char *other);

/* How often "connection closed limit=@limit " is in the log. */
unsigned attack_log_lines(struct attack *a, const char *limit);

/* Memory of the daemon that is in use, in KiB. */
uint64_t attack_rss_kib(const struct attack *a);

/* --- frames, many at a time --- */

/* Bytes to be sent; grows. */
struct attack_bytes {
	uint8_t *data; /* owned */
	size_t n, room;
};

void attack_put(struct attack_bytes *b, const void *data, size_t n);
void attack_put_frame(struct attack_bytes *b, unsigned type, unsigned flags, uint32_t stream,
		      const void *data, size_t n);
/* HEADERS of a call of @path, without END_STREAM. */
void attack_put_headers(struct attack_bytes *b, uint32_t stream, const char *path);
/* Send all of it as far as the daemon takes it, and forget it. Return: whether all was. */
bool attack_flush(struct attack_bytes *b, int fd);

/* Connect and begin HTTP/2. @attach: with a session; then the next stream is 3. */
int attack_connect(struct attack *a, bool attach);

#endif
