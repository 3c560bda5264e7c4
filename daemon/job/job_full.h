/* The memory of gathered copies. Loop thread only. */
#ifndef SHARDD_JOB_JOB_FULL_H
#define SHARDD_JOB_JOB_FULL_H

struct job;
struct unit;

/* Take memory for the gathered copies of @u on all its devices, or none of it. Return: as
 * pool_take. */
int job_take_full(struct job *job, struct unit *u);
/* Give it back; streams that may still read it are remembered. Safe if there is none. */
void job_give_full(struct job *job, struct unit *u);

/* No rank holds @u any more, or the making of its copy has ended: the copy stays until memory is
 * needed or the parameters change, or is freed at once (unit.drop). Does nothing if the copy is in
 * use. */
void job_full_unused(struct job *job, struct unit *u);

#endif
