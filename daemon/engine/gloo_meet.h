/*
 * How the members of a communicator get connections to each other which nobody else has.
 *
 * Each member listens on a port of its own, and the members exchange their cards (gloo_card.h). A
 * member connects to the members below it and sends the token that follows from this member's
 * card for it. The member below checks it and sends the token that follows from the caller's card.
 * So each side knows that the other one reads the store, and who it is. The port is closed when all
 * have come.
 *
 * Anybody can connect to the port. Of what a stranger sends no more than a greeting is read, and
 * nothing but the token is compared. Only GLOO_MEET_GUESTS connections wait for their greeting; one
 * more ends the oldest. A member whose connection is ended so, or breaks, comes again.
 *
 * Tokens are not encrypted: who listens on the network sees them. They are of no use once the
 * member has come.
 */
#ifndef SHARDD_ENGINE_GLOO_MEET_H
#define SHARDD_ENGINE_GLOO_MEET_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/socket.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Connections that have not said who they are. */
#define GLOO_MEET_GUESTS 64

struct comm_store;

struct gloo_meet_options {
	const struct sockaddr *address; /* to listen on; the port is chosen */
	socklen_t address_bytes;
	const char *prefix; /* the key of the cards; never used before */
	int size;           /* 2 or more */
	int rank;
	unsigned timeout_ms;
	const struct comm_store *store;  /* engine.h */
	bool (*stopped)(void *userdata); /* asked several times a second: give up */
	void *userdata;
};

/* Blocks. ret_fds[i]: connected to member i, owned by the caller; -1 for the own one.
 * @why: in one sentence why it failed.
 * Return: 0, -ECANCELED (stopped) or another negative errno; *ret_fds is then unchanged. */
int gloo_meet(const struct gloo_meet_options *options, int *ret_fds, char *why, size_t why_bytes);

#ifdef __cplusplus
}
#endif

#endif
