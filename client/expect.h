/*
 * Which run of the daemon a process continues from. A restarted daemon has nothing of an earlier
 * run; a trainer that expects state must get an error, and must not begin at step 0.
 *
 * $SHARDD_INSTANCE names it for a process that was started again (shardctl run and the Python
 * guard set it). This file remembers what the process has joined itself. Any thread.
 */
#ifndef SHARDD_CLIENT_EXPECT_H
#define SHARDD_CLIENT_EXPECT_H

#include <stdbool.h>
#include <stdint.h>

#include "shardd/shardd.h"

#define EXPECT_BYTES 16u

/* The run of the daemon at @socket that job @job was on. @ret_any: false: none is expected.
 * Return: 0, or -SHARDD_INVALID_ARGUMENT: $SHARDD_INSTANCE is invalid. */
int expect_find(const char *socket, const char *job, uint8_t ret[EXPECT_BYTES], bool *ret_any,
		struct shardd_error *err);

/* This process has joined @job there. Without memory it is not remembered. */
void expect_note(const char *socket, const char *job, const uint8_t instance[EXPECT_BYTES]);

/* It has left, and the job need not be there any more. */
void expect_forget(const char *socket, const char *job);

#endif
