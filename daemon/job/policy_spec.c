#include "job/policy_spec.h"

#include <stdbool.h>
#include <stdio.h>
#include <string.h>

#include "checkpoint/place.h"
#include "job/node.h"

int policy_spec_check(const struct node *node, const state_checkpoints *c, struct fault *f)
{
	const char *roots = node->checkpoint_roots, *at;
	size_t n;

	if (!c->every_steps && !c->every_s)
		return fault_set(f, FAULT_INVALID, "every_steps",
				 "every_steps and every_s are 0: give one of them, or both");
	if (c->every_s > UINT32_MAX)
		return fault_set(f, FAULT_INVALID, "every_s", "every_s is %llu; it must be 0 to %u",
				 (unsigned long long)c->every_s, UINT32_MAX);
	return place_find(roots ? roots : "", c->path, &at, &n, f);
}

static bool policy_spec_is_same(const state_checkpoints *a, const state_checkpoints *b)
{
	return strcmp(a->path, b->path) == 0 && a->every_steps == b->every_steps &&
	       a->every_s == b->every_s && a->keep == b->keep && a->bytes_per_s == b->bytes_per_s;
}

static void policy_spec_print(const state_checkpoints *c, char *buf, size_t bytes)
{
	snprintf(buf, bytes,
		 "every %llu steps and %llu s, the newest %u (0: all), %llu bytes/s, in "
		 "'%.100s'",
		 (unsigned long long)c->every_steps, (unsigned long long)c->every_s, c->keep,
		 (unsigned long long)c->bytes_per_s, c->path);
}

int policy_spec_check_same(const state_job *rec, const state_checkpoints *c, struct fault *f)
{
	char had[256], wanted[256];

	if (rec->said_checkpoints && policy_spec_is_same(rec->said_checkpoints, c))
		return 0;
	if (!rec->said_checkpoints)
		return fault_set(f, FAULT_STATE, NULL,
				 "job '%s' was created without a policy of checkpoints: its first "
				 "trainer decides that; leave it out, and set one with 'shardctl "
				 "checkpoint policy'",
				 rec->name);
	policy_spec_print(rec->said_checkpoints, had, sizeof(had));
	policy_spec_print(c, wanted, sizeof(wanted));
	return fault_set(
		f, FAULT_STATE, NULL,
		"job '%s' was created with checkpoints %s; not %s: its first trainer decides "
		"that; 'shardctl checkpoint policy' changes it",
		rec->name, had, wanted);
}
