/*
 * What a node does not know of a step when its epoch has ended (docs/nodes.md): whether the commit that its
 * ranks had announced was decided, and whether the step that is prepared here was applied on another node.
 * Until the next epoch says so the step stays prepared, and the job is not rolled back.
 *
 *   epoch ends: OPEN --doubt_resolve--> dropped
 *                          '--> completes: the step is applied, the commit recorded
 *
 * Loop thread only.
 */
#ifndef SHARDD_STEP_DOUBT_H
#define SHARDD_STEP_DOUBT_H

#include <stdbool.h>
#include <stdint.h>

#include "job/job_types.h"

struct commit;

/* job_ops.epoch_ends. */
void doubt_epoch_ends(struct job *job);

/* A Step over several nodes is prepared: note it in the journal. Not where a successor could not apply it: with
 * gradients that end with the daemon. */
void doubt_note_prepared(struct job *job);
/* A Commit of the world, which all ranks here have announced, is about to be announced to the other nodes. */
void doubt_announces(struct job *job);
/* A commit of epoch @epoch that was decided cannot be completed now: it is in doubt. @c is taken. */
void doubt_keep(struct job *job, uint64_t epoch, struct commit *c);
/* job_ops.restored: as a predecessor has left it. */
void doubt_restored(struct job *job);
/* What it has prepared cannot be applied any more. */
void doubt_lost(struct job *job);

/* What is in doubt here. */
struct doubt_open {
	bool has_commit;
	uint64_t step, epoch; /* of that commit, and in which it was announced */
	bool has_prepared;
	struct job_step_id prepared;
};

void doubt_open_of(const struct job *job, struct doubt_open *ret);
/* At which step the parameters are if what is in doubt is dropped, or if the prepared step is applied. As
 * position_of without a doubt. Return: false: nobody knows. */
bool doubt_position_dropped(const struct job *job, uint64_t *ret);
bool doubt_position_applied(const struct job *job, uint64_t *ret);

/* What is known now. */
struct doubt_ruling {
	bool has_commit;
	uint64_t step, epoch; /* the last commit that was decided, and in which epoch */
	/* Of steps that some nodes have prepared: those that another one has applied. Of one group one at
	 * most. */
	const struct job_step_id *applied;
	size_t n_applied;
};

/* Is @step one of them? */
bool doubt_is_applied(const struct doubt_ruling *ruling, const struct job_step_id *step);

/* Of a job in which no rank is joined. What is completed is so soon: job_settle follows, and until then no
 * rank joins. Nothing in doubt: nothing to do. */
void doubt_resolve(struct job *job, const struct doubt_ruling *ruling);

/* job_ops.drop_doubt: nothing of it was decided. What is being completed goes on. */
void doubt_drop_all(struct job *job);

#endif
