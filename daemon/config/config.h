/*
 * Configuration: a table of keys, each with name, default, unit and help; filled
 * from defaults, then the file, then the environment (SHARDD_<KEY>), then flags.
 * Loop thread only after start.
 */
#ifndef SHARDD_CONFIG_H
#define SHARDD_CONFIG_H

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>

#include "config/config_values.h"
#include "core/fault.h"
#include "core/user.h"

/* The defaults. */
void config_default(struct config *c);

/* Set one key from text, checked ("64MiB", "5s", lists with commas).
 * Return: 0 or FAULT_INVALID with field, value and what is allowed. */
int config_set(struct config *c, const char *key, const char *value, struct fault *f);

/* Read a YAML file over @c. Unknown keys and wrong values are FAULT_INVALID with
 * file, line and what is allowed; a missing or unreadable file FAULT_NOT_FOUND /
 * FAULT_DENIED. On error @c is unchanged. */
int config_load_file(struct config *c, const char *path, struct fault *f);

/* The same from memory; for tests and the fuzzer. */
int config_load_text(struct config *c, const char *text, size_t bytes, const char *name,
		     struct fault *f);

/* SHARDD_<KEY> for every key. */
int config_load_env(struct config *c, struct fault *f);

/* Rules between keys. */
int config_check(const struct config *c, struct fault *f);

/* Names of keys that differ and cannot change while running, comma-separated into
 * @buf. Return: how many. */
int config_fixed_changes(const struct config *old, const struct config *new, char *buf,
			 size_t bytes);

/* Give @c the values that @running has of the keys that cannot change while running. */
void config_keep_fixed(struct config *c, const struct config *running);

/* The limits of users in @c, whose overrides @ret borrows. */
void config_user_limits(const struct config *c, struct user_limits *ret);

/* Write every key with help, unit and default as a commented YAML file: a test compares
 * deploy/shardd.yaml.example with it. */
void config_write_example(FILE *out);

/* Write the effective values as YAML. */
void config_write(const struct config *c, FILE *out);

#endif
