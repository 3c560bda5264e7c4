/*
 * Training charlm data-parallel through shardd: joins the job of the environment,
 * one unit a layer, and goes from step to step until the last one is committed,
 * through as many epochs as that takes.
 */
#ifndef CHARLM_TRAIN_H
#define CHARLM_TRAIN_H

#include "charlm_options.h"

/* A signal or a drain ended it before the last step. After a signal the job stays. */
#define TRAIN_UNFINISHED 3

/* Train. Prints to stdout, errors as one sentence to stderr.
 * Return: 0 (the last step is committed), 1 if the training could not be done, or TRAIN_UNFINISHED. Blocks until the end. */
int train_run(const struct train_options *options);

#endif
