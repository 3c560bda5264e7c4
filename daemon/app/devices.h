/*
 * The devices of this node and the engines that connect them: chosen by the configuration, started
 * before anything else, ended last. Part of the server; loop thread only.
 */
#ifndef SHARDD_DEVICES_H
#define SHARDD_DEVICES_H

#include "config/config.h"
#include "core/loopq.h"
#include "job/node.h"

/* Fill node->devices and its engines, and make the communicators of all devices, so that the
 * first job finds them warm. @lost: called when a device is lost. Runs the loop.
 * Return: 0 or a fault code (then devices_end still has to be called). */
int devices_start(struct node *node, struct loopq *loopq, const struct config *config,
		  void (*lost)(struct node *node, struct device *device), struct fault *f);

/* Now and then. */
void devices_tick(struct node *node, uint64_t now_us);

/* Is all the memory back that devices return asynchronously? */
bool devices_idle(const struct node *node);

/* Free everything. Nothing may run, and devices_idle. Safe if nothing was started. */
void devices_end(struct node *node);

#endif
