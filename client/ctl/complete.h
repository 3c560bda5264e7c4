/*
 * What a word on shardctl's command line may become, for the completion of shells.
 *
 * It is read from the forms that --help prints of each verb, so a verb and its options need no second
 * list: words in capitals stand for a value, all others are written as they are. One thread.
 */
#ifndef SHARDD_CTL_COMPLETE_H
#define SHARDD_CTL_COMPLETE_H

#include <stddef.h>
#include <stdio.h>

#include "ctl/ctl.h"

/* Print a line for each thing that the last of @words may become: a word, and behind a tab what it
 * means, if there is something to say. The last line may be ":file", ":dir" or ":command": the shell
 * then completes names of files, of folders or of programs. @words: those behind "shardctl"; the last
 * one is what has been typed of it, perhaps "". @jobs: prints the names of jobs that begin with
 * @typed, of the daemon at @socket (NULL: the default), and nothing if it does not answer. */
void complete_print(const struct ctl_verb *verbs, size_t n_verbs, char *const *words, size_t n,
		    void (*jobs)(const char *socket, const char *typed, FILE *out), FILE *out);

/* The names of the jobs of a daemon, as @jobs above. */
void complete_jobs(const char *socket, const char *typed, FILE *out);

#endif
