/* Verbs of shardctl checkpoint that have files of their own. */
#ifndef SHARDD_CTL_CHECKPOINT_VERBS_H
#define SHARDD_CTL_CHECKPOINT_VERBS_H

#include "ctl/ctl.h"

int checkpoint_import(struct ctl *ctl, int argc, char **argv);
int checkpoint_convert(struct ctl *ctl, int argc, char **argv);

#endif
