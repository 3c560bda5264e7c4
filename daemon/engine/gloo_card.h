/*
 * The cards of the members of a communicator: what each publishes in the store before they meet
 * (gloo_meet.h).
 *
 *   byte 0   8     magic
 *        8   4     members; all numbers in network order
 *        12  2     4 or 6
 *        14  2     port that it listens on
 *        16  16    IP address
 *        32  32*n  a token for each member, which only this member sends here
 *
 * A process that can read the store can come as a member: others must not be able to.
 */
#ifndef SHARDD_ENGINE_GLOO_CARD_H
#define SHARDD_ENGINE_GLOO_CARD_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/socket.h>

#define GLOO_CARD_TOKEN 32

/* Bytes of a card among @size members. */
size_t gloo_card_bytes(int size);

/* Write the card of a member that listens on @address, with tokens from the kernel.
 * Return: 0 or negative errno. */
int gloo_card_make(uint8_t *card, int size, const struct sockaddr_storage *address);

/* Whether it is a card among @size members. */
bool gloo_card_check(const uint8_t *card, size_t bytes, int size);

/* Where its member listens. Return: bytes of *ret. */
socklen_t gloo_card_address(const uint8_t *card, struct sockaddr_storage *ret);

/* What its member expects from @member. */
const uint8_t *gloo_card_token(const uint8_t *card, int member);

/* In a time that does not depend on the bytes. */
bool gloo_card_is_token(const uint8_t *token, const uint8_t *other);

#endif
