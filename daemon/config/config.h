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

#include "config/config_secret.h"
#include "config/config_values.h"
#include "coord/seeds.h"
#include "core/fault.h"
#include "core/user.h"
#include "otlp/otlp_headers.h"

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

/* http_token_file. Blocks. Return: 0 (@ret is "" if the key is empty), or as config_secret. */
int config_http_token(const struct config *c, char ret[CONFIG_SECRET_BYTES], struct fault *f);

/* ------------------------------------------------------------- OpenTelemetry: config_otlp.c */

/* Rules between the keys otlp..., a part of config_check. Blocks. */
int config_otlp_check(const struct config *c, struct fault *f);
/* otlp_headers_file. Blocks. Return: 0 (@ret is empty if the key is), or as config_secret. */
int config_otlp_headers(const struct config *c, struct otlp_headers *ret, struct fault *f);

/* ------------------------------------------------------------- several nodes: config_nodes.c */

enum config_store { CONFIG_STORE_NONE, CONFIG_STORE_EMBEDDED, CONFIG_STORE_ETCD };

/* Rules between the keys of several nodes, a part of config_check. */
int config_nodes_check(const struct config *c, struct fault *f);
/* Which kind coord is. */
enum config_store config_store(const struct config *c);
/* node_name, or the host name up to its first dot.
 * Return: 0, or FAULT_INVALID: the host name is not a valid node name. */
int config_node_name(const struct config *c, char ret[NAME_BYTES], struct fault *f);

#define CONFIG_MAX_ENDPOINTS 16u

/* Those of coord: etcd://..., each HOST:PORT. */
struct config_endpoints {
	char text[512];
	const char *list[CONFIG_MAX_ENDPOINTS]; /* in @text: not to be copied by value */
	size_t n;
};

/* Return: 0 or FAULT_INVALID. */
int config_endpoints(const struct config *c, struct config_endpoints *ret, struct fault *f);
/* coord: embedded: the members of etcd. Return: 0 or FAULT_INVALID. */
int config_seeds(const struct config *c, struct seeds *ret, struct fault *f);

/* What is in coord_password_file. Blocks. Return: 0, or FAULT_NOT_FOUND, FAULT_DENIED, FAULT_INVALID (others
 * may read it, or it is not one line). */
int config_password(const struct config *c, char ret[CONFIG_SECRET_BYTES], struct fault *f);
/* Where other nodes reach this one. coord is not none. */
void config_peer_advertise(const struct config *c, struct hostport *ret);
/* Where the engine between nodes binds, unless data_interface is set. coord is not none. */
void config_data_address(const struct config *c, char ret[HOSTPORT_HOST_BYTES]);

/* Write every key with help, unit and default as a commented YAML file: a test compares
 * deploy/shardd.yaml.example with it. */
void config_write_example(FILE *out);

/* Write the effective values as YAML. */
void config_write(const struct config *c, FILE *out);

#endif
