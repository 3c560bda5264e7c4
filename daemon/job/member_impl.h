/* Shared by member.c and member_link.c. */
#ifndef SHARDD_JOB_MEMBER_IMPL_H
#define SHARDD_JOB_MEMBER_IMPL_H

struct member;

/* Release its signals: their memory is freed when no queue waits on them and its process is gone.
 * Safe if there are none. */
void member_unlink(struct member *m);

#endif
