/*
 * What ran on the devices, for the flight recorder: whoever submits tasks for an op carries a
 * note of what they are. The tasks of one note stand one after the other in one queue; they
 * are one record. Loop thread only.
 */
#ifndef SHARDD_OP_DEVICE_NOTE_H
#define SHARDD_OP_DEVICE_NOTE_H

#include <stdint.h>

struct backend;
struct backend_task;
struct device_record;
struct job;
struct unit;

struct device_note {
	const char *name;             /* static; NULL: it is not recorded */
	const struct job *job;        /* borrowed, as is the unit, until the last is submitted */
	const struct unit *unit;      /* NULL: of several, or none */
	const char *what;             /* (optional) in place of the unit's name */
	uint64_t number;              /* of a collective; 0: it has none */
	struct device_record *record; /* NULL: nothing was submitted yet */
	uint64_t id;                  /* of @record, which another one has if it was overwritten */
};

/* @task is about to be submitted to @b for @n. Sets what it says to the recorder. */
void device_note_task(struct device_note *n, struct backend *b, struct backend_task *task);

#endif
