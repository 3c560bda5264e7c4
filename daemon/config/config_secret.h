/* A secret in a file: one line, or a text, which nobody but the daemon's user and group may read. */
#ifndef SHARDD_CONFIG_SECRET_H
#define SHARDD_CONFIG_SECRET_H

#include "core/fault.h"

#define CONFIG_SECRET_BYTES 256
/* Of a secret text of several lines. */
#define CONFIG_SECRET_TEXT_BYTES 8192

/* What is in @path, of at least @least characters, which the key @key names. Blocks. The caller wipes @ret. Return: 0,
 * or FAULT_NOT_FOUND, FAULT_DENIED, FAULT_INVALID (others may read it, or it is not such a line). */
int config_secret(const char *path, const char *key, unsigned least, char ret[CONFIG_SECRET_BYTES],
		  struct fault *f);

/* The same for a text of several lines. */
int config_secret_text(const char *path, const char *key, char ret[CONFIG_SECRET_TEXT_BYTES],
		       struct fault *f);

#endif
