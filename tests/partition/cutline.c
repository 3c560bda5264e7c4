#include "partition/cutline.h"

#include <stdbool.h>

#include "core/check.h"
#include "partition/cutfix.h"
#include "partition/cutinner.h"

#define COMMITS 4096
#define EPOCHS  512

struct commit {
	uint64_t step, epoch;
};

static struct {
	struct commit commits[COMMITS];
	unsigned n;
	uint64_t begun[CUTFIX_NODES][EPOCHS];
	unsigned n_begun[CUTFIX_NODES];
} line;

static unsigned epochs_of[CUTFIX_NODES + 1];

void cutline_begin(void)
{
	line.n = 0;
	for (unsigned i = 0; i < CUTFIX_NODES; i++)
		line.n_begun[i] = 0;
}

void cutline_begun(unsigned node, uint64_t epoch)
{
	unsigned n = line.n_begun[node];

	if (!epoch || (n && line.begun[node][n - 1] == epoch))
		return;
	CHECK(n < EPOCHS);
	line.begun[node][line.n_begun[node]++] = epoch;
}

void cutline_forgets(unsigned node)
{
	line.n_begun[node] = 0;
}

/* Has an epoch from @from on, and before @epoch, begun on a node before that one? */
static bool cutline_was_in(unsigned node, uint64_t from, uint64_t epoch)
{
	uint64_t before = 0;

	for (unsigned i = 0; i < line.n_begun[node]; i++) {
		if (line.begun[node][i] == epoch)
			return before >= from;
		before = line.begun[node][i];
	}
	return false;
}

static void cutline_check(const struct commit *before, const struct commit *c)
{
	unsigned nodes = 0;
	bool was_in = !before->step;

	for (unsigned i = 0; i < CUTFIX_NODES; i++) {
		was_in = was_in || cutline_was_in(i, before->epoch, c->epoch);
		nodes += cutline_was_in(i, 0, c->epoch);
	}
	if (!was_in || c->epoch < before->epoch)
		cutfix_say(
			"step %u is committed in epoch %u, of no node that was in epoch %u, which "
			"has committed step %u",
			(unsigned)c->step, (unsigned)c->epoch, (unsigned)before->epoch,
			(unsigned)before->step);
	epochs_of[nodes]++;
}

void cutline_decided(uint64_t step, uint64_t epoch)
{
	struct commit c = { step, epoch }, before = { 0 };

	if (line.n)
		before = line.commits[line.n - 1];
	if (!step || (step == before.step && epoch == before.epoch))
		return;
	if (epoch != before.epoch)
		cutline_check(&before, &c);
	else if (step != before.step + 1)
		cutfix_say("step %u is committed behind step %u of the same epoch", (unsigned)step,
			   (unsigned)before.step);
	CHECK(line.n < COMMITS);
	line.commits[line.n++] = c;
}

void cutline_has(unsigned node, uint64_t step, uint64_t epoch)
{
	if (!step)
		return; /* it is taking the state of another one */
	for (unsigned i = 0; i < line.n; i++)
		if (line.commits[i].step == step && (!epoch || line.commits[i].epoch == epoch))
			return;
	cutfix_say("node %u has committed step %u of epoch %u, and the store never has", node,
		   (unsigned)step, (unsigned)epoch);
}

unsigned cutline_epochs_of(unsigned nodes)
{
	return epochs_of[nodes];
}
