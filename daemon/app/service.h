/*
 * The daemon between start and exit: the loop, the signals, the service manager's
 * notifications. Loop thread only.
 */
#ifndef SHARDD_SERVICE_H
#define SHARDD_SERVICE_H

#include "app/inherited.h"
#include "config/args.h"
#include "config/config.h"
#include "core/log.h"

/* Serve until a signal ends it.
 * @args: borrowed; reread at SIGHUP. @in: borrowed; what is taken over is taken out of
 * it. The log is open. @f: why it has not started, if
 * so. Return: an exit code. */
int service_run(const struct args *args, const struct config *config, struct inherited *in,
		struct fault *f);

/* The log options of @c; the path is borrowed from it. */
struct log_options service_log_options(const struct config *c);

#endif
