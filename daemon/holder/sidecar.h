/*
 * The keeper: shardd-holder --keep PATH, in a container of its own beside the daemon's. It has a copy
 * of each descriptor that the holder of the daemon's container keeps. When that container is
 * restarted (the kernel has killed it for its memory, or its image was changed), the next holder gets
 * them. It maps nothing, and starts nothing.
 */
#pragma once

/* Return: an exit code. */
int sidecar_keep(const char *path);

/* Tell the keeper at @path that the pod ends, so that the daemon lets its trainers commit. Return: an
 * exit code. */
int sidecar_end(const char *path);
