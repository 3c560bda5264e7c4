/*
 * Where checkpoints may be: folders below configured roots, opened with the rights of the owner of the
 * job. Blocks for the disk.
 */
#ifndef SHARDD_CHECKPOINT_PLACE_H
#define SHARDD_CHECKPOINT_PLACE_H

#include <stdint.h>
#include <sys/types.h>

#include "core/fault.h"

/* Is @path, by its name, below one of @roots (absolute paths, separated by colons)? @ret_root: the
 * length of the root, at @ret_at in @roots. Any thread, does not block.
 * Return: 0, FAULT_INVALID, or FAULT_STATE (there are no roots). */
int place_find(const char *roots, const char *path, const char **ret_at, size_t *ret_root,
	       struct fault *f);

/* The calling thread accesses files as user @uid and group @gid from here on, without supplementary
 * groups and without capabilities; nothing changes if the process is that user. Return: 0 or
 * FAULT_DENIED. */
int place_become(uid_t uid, gid_t gid, struct fault *f);

/* @f is about a checkpoint of @step in the folder @path: let its text say so. Its code stays. */
void place_tell(struct fault *f, const char *path, uint64_t step);

/* Open the folder @path below its root; no component behind the root may be a symbolic link or lead out
 * of it. Return: a descriptor, the caller's; -1: @f is filled. */
int place_open(const char *roots, const char *path, struct fault *f);

#endif
