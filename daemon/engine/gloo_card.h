/*
 * The cards of the members of a communicator: what each publishes in the store before they meet
 * (gloo_meet.h).
 *
 *   byte 0   8   magic
 *        8   4   members; all numbers in network order
 *        12  2   4 or 6
 *        14  2   port that it listens on
 *        16  16  IP address
 *        32  16  secret, from the kernel
 *
 * From its secret and the number of a member follows the token that this member, and no other one,
 * sends here: an HMAC (RFC 2104) with SHA-256. So who hears one token knows no other one, and a card
 * has one size whatever the number of members.
 *
 * A process that can read the store can come as a member: others must not be able to.
 */
#ifndef SHARDD_ENGINE_GLOO_CARD_H
#define SHARDD_ENGINE_GLOO_CARD_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/socket.h>

#define GLOO_CARD_BYTES 48
#define GLOO_CARD_TOKEN 32

/* Write the card of a member that listens on @address, GLOO_CARD_BYTES, with a secret from the kernel.
 * Return: 0 or negative errno. */
int gloo_card_make(uint8_t *card, int size, const struct sockaddr_storage *address);

/* Whether it is a card among @size members. */
bool gloo_card_check(const uint8_t *card, int size);

/* Where its member listens. Return: bytes of *ret. */
socklen_t gloo_card_address(const uint8_t *card, struct sockaddr_storage *ret);

/* What its member expects from @member. Return: 0, or -EIO: the cryptographic library fails. */
int gloo_card_token(const uint8_t *card, int member, uint8_t ret[GLOO_CARD_TOKEN]);

/* In a time that does not depend on the bytes. */
bool gloo_card_is_token(const uint8_t *token, const uint8_t *other);

#endif
