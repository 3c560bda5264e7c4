/*
 * An upload: bytes that a thread reads from files, on their way to devices of a job. It reads into one
 * buffer while the devices copy what is in the other one.
 *
 *   buffer:  free --upload_room--> being filled --upload_put--> being copied --its device has it--> free
 *
 * Made and freed by the loop; a thread of the caller fills it.
 */
#ifndef SHARDD_JOB_UPLOAD_H
#define SHARDD_JOB_UPLOAD_H

#include <stddef.h>
#include <stdint.h>

struct device;
struct job;
struct upload;

/* Buffers of @room bytes, staging of the job (job/staging.h), are taken by upload_begin. Loop thread.
 * Return: NULL without memory. */
struct upload *upload_new(struct job *job, uint64_t room);
/* Add @bytes bytes at @at, memory of @device, behind the others. Return: 0 or -ENOMEM. */
int upload_add(struct upload *u, struct device *device, void *at, uint64_t bytes);
/* All that were added. */
uint64_t upload_bytes(const struct upload *u);
/* Nothing is added from here on. Return: 0, -EDQUOT or -ENOMEM. */
int upload_begin(struct upload *u);

/* Room for the next bytes: of one buffer, when it is free. The filling thread. */
void *upload_room(struct upload *u);
/* The first @bytes bytes of that room belong at @at, and also @apart bytes behind that, and so on: in
 * @times places. */
void upload_put(struct upload *u, uint64_t at, uint64_t bytes, unsigned times, uint64_t apart);
/* Wait until all of it is there. Once, at the end, also of an upload that is given up. Return: 0,
 * -ENOMEM, or the negative errno of a device that failed: then parts are missing. */
int upload_settle(struct upload *u);
/* Has anything failed? The filling thread. Return: as upload_settle, which must follow. */
int upload_status(const struct upload *u);

/* The thread is over. Loop thread. NULL is allowed. Return: NULL. */
struct upload *upload_free(struct upload *u);

#endif
