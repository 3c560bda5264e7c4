/* What a declaration says of generations: how many there are, and when they are made. Pure functions, any thread. */
#ifndef SHARDD_PUBLISH_PUBLISHED_POLICY_H
#define SHARDD_PUBLISH_PUBLISHED_POLICY_H

#include "core/fault.h"
#include "publish/view.h"

/* Without wait_ms. */
#define PUBLISHED_POLICY_WAIT_MS 60000u

/* Generations that stay. */
unsigned published_policy_keep(const view_declaration *d);
/* Generations that there may be memory for. */
unsigned published_policy_buffers(const view_declaration *d);
/* For how long a generation waits for a buffer, with the policy WAIT. */
uint64_t published_policy_wait_us(const view_declaration *d);
/* @most_bytes: of the declaration, packed; @most_buffers: of a publication. Return: 0 or FAULT_INVALID. */
int published_policy_check(const view_declaration *d, size_t most_bytes, unsigned most_buffers,
			   struct fault *f);

#endif
