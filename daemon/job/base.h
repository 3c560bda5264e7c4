/*
 * Bases: jobs whose parameters are loaded once, and then only read.
 *
 * A job of lifetime BASE has one rank, which loads frozen parameters and commits. With its first commit
 * it is complete: no rank joins it, and nothing writes it. Readers map it, for as long as they want:
 * it is not deleted while a process has it mapped, unless by force, and then its memory keeps its
 * contents, charged, until the last of these processes has ended.
 *
 *   LOADING --its first commit--> COMPLETE --deleted--> gone, with the last process that has it mapped
 *      '--deleted, or not used for ttl_s-----------------^
 *
 * Which processes have it mapped is asked of the kernel (backend_is_held): a daemon that took the base
 * over does not know the readers of the one before. Loop thread only.
 */
#ifndef SHARDD_JOB_BASE_H
#define SHARDD_JOB_BASE_H

#include <stdbool.h>

#include "core/fault.h"
#include "core/list.h"
#include "job/job_types.h"

/* A session that reads a base. The session's; it ends with the session, and with the job. */
struct base_reader {
	struct list link; /* readers.of_base of the job */
	struct list held; /* the session's list */
	struct job *job;  /* borrowed */
	uint64_t session;
	int pid;
};

/* Is it a base that only readers use? */
bool base_is_complete(const struct job *job);
/* Does a process read it, or have its memory? */
bool base_is_used(const struct job *job);

/* Refuse @what ("no rank joins it") if it is complete. Return: 0 or FAULT_STATE. */
int base_check_change(const struct job *job, const char *what, struct fault *f);
/* Return: 0, or FAULT_STATE: it is a base that processes use. */
int base_check_delete(const struct job *job, bool force, struct fault *f);

/* May a session read it? Return: 0, or FAULT_STATE: it is no base, or not complete. */
int base_check_read(const struct job *job, struct fault *f);
/* A reader of a base that is complete; the caller puts it into the session's list.
 * Return: NULL: there is no memory. */
struct base_reader *base_reader_new(struct job *job, uint64_t session, int pid);
void base_reader_free(struct base_reader *r);
/* The slab of that number, if it has parameters of the base. Return: borrowed, or NULL. */
struct slab *base_slab(const struct job *job, uint32_t id);

/* A commit has taken effect, or the job was taken over: a base's memory keeps its contents from now on. */
void base_committed(struct job *job);

#endif
