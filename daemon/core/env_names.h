/*
 * The names of environment variables. A misspelt SHARDD_ variable sets nothing. So at start each
 * program reports those that no part of shardd reads: the daemon in its log, shardctl and libshardd
 * on standard error. Any thread.
 */
#ifndef SHARDD_ENV_NAMES_H
#define SHARDD_ENV_NAMES_H

/* @name: of a variable that is not known. @nearest: a known one that looks like it, or NULL. */
typedef void (*env_names_cb)(const char *name, const char *nearest, void *userdata);

/* The variables of the daemon's configuration (SHARDD_<KEY>), in the order of its keys, ended by a
 * NULL. libshardd knows them too: a trainer may run in the environment of its daemon. */
extern const char *const env_names_config[];

/* Call @fn for each variable of the environment whose name begins with SHARDD_ and is not known. */
void env_names_unknown(env_names_cb fn, void *userdata);

#endif
