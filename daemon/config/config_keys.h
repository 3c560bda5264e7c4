/*
 * The table of configuration keys and the conversion of one value from and to
 * text. For config*.c only.
 */
#ifndef SHARDD_CONFIG_KEYS_H
#define SHARDD_CONFIG_KEYS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#include "config/config_values.h"
#include "core/fault.h"

enum config_type {
	CONFIG_TEXT,    /* char[bytes] */
	CONFIG_PATH,    /* char[bytes]; absolute, or empty where min is 0 */
	CONFIG_CHOICE,  /* char[bytes]; one of @choices */
	CONFIG_COUNT,   /* uint32_t */
	CONFIG_MODE,    /* uint32_t; octal */
	CONFIG_BYTES,   /* uint64_t; 64MiB */
	CONFIG_MILLIS,  /* uint32_t of milliseconds; 500ms, 5s */
	CONFIG_SECONDS, /* uint32_t of seconds; 5s, 2h */
	CONFIG_UIDS,    /* uid_t[CONFIG_MAX_IDS] and a count */
	CONFIG_GIDS,    /* gid_t[CONFIG_MAX_IDS] and a count */
	CONFIG_LIMITS,  /* struct user_override[CONFIG_MAX_IDS] and a count */
	CONFIG_WORDS,   /* char[bytes]; at most CONFIG_MAX_IDS words, with commas; no count */
};

struct config_key {
	const char *name;
	enum config_type type;
	size_t offset;          /* in struct config */
	size_t count_offset;    /* of the count of a list; 0: it has none */
	size_t bytes;           /* of the field */
	uint64_t min, max;      /* value; of text: its length */
	bool zero;              /* 0 is allowed beside min..max, see @help */
	const char *choices;    /* separated by "|" */
	const char *by_default; /* as in the file; "" for an empty list */
	bool runtime;           /* may change with SIGHUP */
	const char *help;       /* lines of at most 90 characters */
};

extern const struct config_key config_keys[];
extern const size_t config_n_keys;

/* Longest value as text: a full list of limits, at most 64 bytes an entry. */
#define CONFIG_VALUE_MAX 4096

/* Return: the key, or NULL. */
const struct config_key *config_key_find(const char *name);

static inline bool config_key_is_list(const struct config_key *k)
{
	return k->type == CONFIG_UIDS || k->type == CONFIG_GIDS || k->type == CONFIG_LIMITS ||
	       k->type == CONFIG_WORDS;
}

/* The value of the key in @c. */
void *config_key_field(struct config *c, const struct config_key *k);
const void *config_key_value(const struct config *c, const struct config_key *k);

/* Set from text. Return: 0 or FAULT_INVALID; on error @c is unchanged. */
int config_key_parse(struct config *c, const struct config_key *k, const char *text,
		     struct fault *f);

/* A number within the limits of @k, with its units ("64MiB"). */
bool config_parse_amount(const struct config_key *k, const char *text, uint64_t *ret);
/* A user or group (@group) of this machine, by name or number. */
bool config_parse_id(bool group, const char *name, uint32_t *ret);

/* A list of limits of users (config_limits.c), as config_key_parse and _format. */
int config_limits_parse(struct config *c, const struct config_key *k, const char *text,
			struct fault *f);
void config_limits_format(const struct config *c, char *buf);

/* The value as config_key_parse reads it; list items separated by ",".
 * @buf: CONFIG_VALUE_MAX bytes. */
void config_key_format(const struct config *c, const struct config_key *k, char *buf);

/* Are the values of both the same? */
bool config_key_equal(const struct config *a, const struct config *b, const struct config_key *k);

#endif
