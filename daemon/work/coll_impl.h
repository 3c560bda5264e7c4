/* Shared by the files of coll. */
#ifndef SHARDD_WORK_COLL_IMPL_H
#define SHARDD_WORK_COLL_IMPL_H

#include "work/coll.h"

/* An operation between devices is over. */
void coll_talked(struct coll *c, int status);
/* Of the op that waits least. */
uint64_t coll_deadline(const struct coll *c);

/* Tick a collective that was started for the first time: now, or when it is its turn in the job's line
 * (job/line.h). */
void coll_line_enter(struct coll *c);
/* It has nothing more to do between nodes; or is over. Safe twice. */
void coll_line_leave(struct coll *c);

#endif
