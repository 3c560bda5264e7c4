/*
 * Processes and ranks: a process is known by the number that it was started with, one of those that its
 * launcher started. As long as a job has not gone on with others than these (job/elastic.h), it is the rank
 * of that number. Loop thread only.
 */
#ifndef SHARDD_JOB_LAUNCHED_H
#define SHARDD_JOB_LAUNCHED_H

#include <stdbool.h>
#include <stdint.h>

struct job;

/* How many processes the launcher has started, as each of them says. */
uint32_t launched_world(const struct job *job);
/* As which of them rank @rank was started. */
uint32_t launched_number(const struct job *job, uint32_t rank);
/* The rank that process @number is. Return: false if there is none. */
bool launched_rank(const struct job *job, uint32_t number, uint32_t *ret);

#endif
