/*
 * Where a job's ranks are, and have been, as the store knows: the value of its key "epoch",
 *
 *   EPOCH INCARNATION LEADER NODE:FIRST:RANKS...
 *
 * Nodes of earlier epochs that the last one has no rank on are behind the others, with no ranks: an elastic job goes
 * on without them, and they may have a part of it still, which goes when the job is deleted.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cluster/cluster_impl.h"
#include "core/log.h"

/* Room for what is not a name. */
#define PLACED_HEAD_BYTES 96u
#define PLACED_NODE_BYTES 32u

bool cluster_placed_next(const char **at, char name[SPAN_NAME_BYTES], uint32_t *ret_ranks)
{
	unsigned n;
	int bytes = 0;

	_Static_assert(SPAN_NAME_BYTES == 64, "as it is read here");
	if (sscanf(*at, " %63[^ :]:%*u:%u%n", name, &n, &bytes) != 2 || !bytes)
		return false;
	*at += bytes;
	*ret_ranks = n;
	return true;
}

const char *cluster_placed_begin(const char *value)
{
	int bytes = 0;

	(void)sscanf(value, "%*u %*x %*s%n", &bytes);
	return value + bytes;
}

void cluster_placed_set(struct cluster_job *cj, const void *value, size_t bytes)
{
	free(cj->placed);
	cj->placed = bytes ? strndup(value, bytes) : NULL;
	if (bytes && !cj->placed)
		log_error("cluster",
			  "no memory: nodes that a job has left are not asked to delete it job=%s",
			  cj->label);
}

static bool cluster_placed_is_in(const struct cluster_job *cj, const char *name)
{
	struct cluster_node *n, *tmp;

	list_for_each (n, tmp, (struct list *)&cj->nodes, link)
		if (strcmp(n->name, name) == 0)
			return true;
	return false;
}

/* Those that were in it before. */
static size_t cluster_placed_add_others(const struct cluster_job *cj, unsigned n, char *value,
					size_t bytes, size_t at)
{
	const char *next = cj->placed ? cluster_placed_begin(cj->placed) : "";
	char name[SPAN_NAME_BYTES];
	uint32_t ranks;

	while (n < SPAN_MAX_NODES && cluster_placed_next(&next, name, &ranks)) {
		if (cluster_placed_is_in(cj, name))
			continue;
		at += (size_t)snprintf(value + at, bytes - at, " %s:0:0", name);
		n++;
	}
	return at;
}

char *cluster_placed_new(const struct cluster_job *cj, uint64_t epoch)
{
	size_t bytes = PLACED_HEAD_BYTES + SPAN_NAME_BYTES +
		       (cj->placed ? strlen(cj->placed) + PLACED_NODE_BYTES : 0);
	struct cluster_node *n, *tmp;
	uint32_t first = 0;
	unsigned nodes = 0;
	char *value;
	size_t at;

	list_for_each (n, tmp, (struct list *)&cj->nodes, link)
		bytes += strlen(n->name) + PLACED_NODE_BYTES;
	value = malloc(bytes);
	if (!value)
		return NULL;
	at = (size_t)snprintf(value, bytes, "%llu %016llx %s", (unsigned long long)epoch,
			      (unsigned long long)cj->incarnation, cj->c->node);
	list_for_each (n, tmp, (struct list *)&cj->nodes, link) {
		at += (size_t)snprintf(value + at, bytes - at, " %s:%u:%u", n->name, first, n->n);
		first += n->n;
		nodes++;
	}
	(void)cluster_placed_add_others(cj, nodes, value, bytes, at);
	return value;
}

bool cluster_placed_is_true(const struct cluster_job *cj)
{
	char *value = cluster_placed_new(cj, cj->known.epoch);
	bool same = value && cj->placed && strcmp(value, cj->placed) == 0;

	free(value);
	return same;
}
