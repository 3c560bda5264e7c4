/* The command line, and the configuration that results from it, the environment and the file. */
#ifndef SHARDD_ARGS_H
#define SHARDD_ARGS_H

#include <stdbool.h>
#include <stddef.h>

#include "config/config.h"
#include "core/fault.h"

/* Exit codes of shardd; documented by --help and shardd(8). */
enum exit_code {
	EXIT_STOPPED = 0,
	EXIT_INTERNAL = 1,
	EXIT_CONFIG = 2,
	EXIT_IN_USE = 3,
	EXIT_SOCKET = 4,
	EXIT_BACKEND = 5,
	EXIT_STATE = 6, /* it cannot start, and the state of the previous daemon is kept for it */
	EXIT_HANDED_OVER = 7, /* as requested; the jobs are left to the next daemon: start it */
};

enum args_action {
	ARGS_RUN,
	ARGS_CHECK_CONFIG,
	ARGS_PRINT_CONFIG,
	ARGS_EXAMPLE_CONFIG,
	ARGS_VERSION,
	ARGS_HELP,
};

struct args_setting {
	const char *key;
	const char *value;
};

struct args {
	enum args_action action;
	const char *config_path;       /* NULL: the default path, if there is a file */
	struct args_setting *settings; /* owned; in the order given */
	size_t n_settings;
};

#define ARGS_NULL ((struct args){ .action = ARGS_RUN })

/* Read the command line. @args borrows @argv for its whole life and changes it: the '=' of a
 * setting becomes a 0. Return: 0 or FAULT_INVALID (FAULT_EXHAUSTED). */
int args_parse(struct args *args, int argc, char **argv, struct fault *f);

/* Free the settings; safe after ARGS_NULL and twice. */
void args_deinit(struct args *args);

/* Defaults, file, environment, flags, then the rules between keys.
 * Return: 0 or a fault code; on error @c is unchanged. */
int args_config(const struct args *args, struct config *c, struct fault *f);

/* The text of --help on standard output. */
void args_help(void);

#endif
