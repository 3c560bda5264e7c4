/*
 * Another process with CUDA of its own, which does on its one stream what it is told: the
 * other side of the backend's signals and ready words.
 *
 * Forked before the test loads CUDA, which does not live through a fork.
 */
#ifndef SHARDD_TESTS_CUDATRAINER_H
#define SHARDD_TESTS_CUDATRAINER_H

#include <stdint.h>
#include <sys/types.h>

struct cudatrainer {
	pid_t pid;
	int fd;
};

/* What it maps. */
enum cudatrainer_page { TRAINER_SIGNALS, TRAINER_READY, TRAINER_DATA, _TRAINER_PAGES };

/* Start it; cudafix_env must have been called. It loads CUDA when it is first told
 * something. */
struct cudatrainer cudatrainer_start(void);
/* End it. Fails the test if it ended badly. */
void cudatrainer_stop(struct cudatrainer *t);
/* kill -9. */
void cudatrainer_kill(struct cudatrainer *t);

/* All return when the trainer has done it; what fails there fails the test. */
void cudatrainer_map(struct cudatrainer *t, enum cudatrainer_page page, int fd, uint64_t bytes);
void cudatrainer_open(struct cudatrainer *t, enum cudatrainer_page page, const uint8_t *handle);
/* Slot of the signals becomes @value, behind all before. */
void cudatrainer_raise(struct cudatrainer *t, uint32_t slot, uint64_t value);
/* Write values below @value to the slot for a while, as fast as it can; does not wait. */
void cudatrainer_hammer(struct cudatrainer *t, uint32_t slot, uint64_t value);
/* Have its stream wait until a queue's ready word is @value; does not wait for it. */
void cudatrainer_await(struct cudatrainer *t, uint32_t queue, uint64_t value);
/* The word at @index of the data, when its stream has come so far. */
uint64_t cudatrainer_read(struct cudatrainer *t, uint64_t index);
/* Make event @i of @slot, of 16 a slot; record it; open one of the backend's and have the
 * stream wait for it. */
void cudatrainer_event(struct cudatrainer *t, uint32_t slot, uint32_t i, uint8_t ret_handle[64]);
void cudatrainer_record(struct cudatrainer *t, uint32_t slot, uint32_t i);
void cudatrainer_await_event(struct cudatrainer *t, const uint8_t handle[64]);

#endif
