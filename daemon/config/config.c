#include "config/config.h"

#include <ctype.h>
#include <stdlib.h>
#include <string.h>

#include "config/config_keys.h"
#include "core/http_address.h"
#include "core/check.h"

#define ENV_PREFIX "SHARDD_"

void config_default(struct config *c)
{
	*c = (struct config){ 0 };
	for (size_t i = 0; i < config_n_keys; i++) {
		struct fault f = FAULT_NULL;

		CHECK(config_key_parse(c, &config_keys[i], config_keys[i].by_default, &f) == 0);
	}
}

int config_set(struct config *c, const char *key, const char *value, struct fault *f)
{
	const struct config_key *k = config_key_find(key);

	if (!k)
		return fault_set(f, FAULT_INVALID, key,
				 "unknown key '%.64s'; shardd --example-config prints all keys",
				 key);
	return config_key_parse(c, k, value, f);
}

/* SHARDD_LOG_LEVEL from log_level. */
static void config_env_name(const char *key, char *buf, size_t bytes)
{
	size_t n = (size_t)snprintf(buf, bytes, ENV_PREFIX "%s", key);

	CHECK(n < bytes);
	for (size_t i = 0; i < n; i++)
		buf[i] = (char)toupper((unsigned char)buf[i]);
}

int config_load_env(struct config *c, struct fault *f)
{
	for (size_t i = 0; i < config_n_keys; i++) {
		struct fault why = FAULT_NULL;
		char name[64];
		const char *value;

		config_env_name(config_keys[i].name, name, sizeof(name));
		value = getenv(name);
		if (value && config_key_parse(c, &config_keys[i], value, &why) != 0)
			return fault_set(f, why.code, why.field, "environment variable %s: %s",
					 name, why.text);
	}
	return 0;
}

/* Each item of a list with colons is an absolute path; empty ones do not count. */
static int config_check_roots(const char *roots, struct fault *f)
{
	for (const char *at = roots; *at; at += strcspn(at, ":"), at += *at == ':')
		if (*at != '/' && *at != ':')
			return fault_set(f, FAULT_INVALID, "checkpoint_roots",
					 "checkpoint_roots has '%.*s'; it must be absolute paths "
					 "separated by colons, or empty",
					 (int)strcspn(at, ":"), at);
	return 0;
}

int config_http_token(const struct config *c, char ret[CONFIG_SECRET_BYTES], struct fault *f)
{
	ret[0] = '\0';
	if (!*c->http.token_file)
		return 0;
	return config_secret(c->http.token_file, "http_token_file", 16, ret, f);
}

static int config_check_http(const struct config *c, struct fault *f)
{
	char token[CONFIG_SECRET_BYTES];
	int r;

	if (!*c->http.address && *c->http.token_file)
		return fault_set(
			f, FAULT_INVALID, "http_token_file",
			"http_token_file is set, and http is not; it has no effect without it");
	if (*c->http.address && http_address_check(c->http.address, f))
		return (int)f->code;
	if (*c->http.address && http_address_is_public(c->http.address) && !*c->http.token_file)
		return fault_set(
			f, FAULT_INVALID, "http_token_file",
			"http is '%.100s', which other machines reach, and http_token_file is "
			"empty; set it, or listen on localhost or unix:/PATH",
			c->http.address);
	r = config_http_token(c, token, f);
	explicit_bzero(token, sizeof(token));
	return r;
}

int config_check(const struct config *c, struct fault *f)
{
	if (config_check_roots(c->checkpoint_roots, f) || config_check_http(c, f) ||
	    config_otlp_check(c, f) || config_nodes_check(c, f))
		return f->code;
	if (c->memory_bytes && c->job_quota_bytes > c->memory_bytes)
		return fault_set(f, FAULT_INVALID, "job_quota_bytes",
				 "job_quota_bytes is larger than memory_bytes; it must be at most "
				 "memory_bytes");
	if (c->ttl.job_s > c->ttl.max_job_s)
		return fault_set(
			f, FAULT_INVALID, "job_ttl_s",
			"job_ttl_s is %u s; it must be at most max_job_ttl_s, which is %u s",
			c->ttl.job_s, c->ttl.max_job_s);
	return 0;
}

int config_fixed_changes(const struct config *old, const struct config *new, char *buf,
			 size_t bytes)
{
	size_t used = 0;
	int n = 0;

	CHECK(bytes > 0);
	buf[0] = '\0';
	for (size_t i = 0; i < config_n_keys; i++) {
		const struct config_key *k = &config_keys[i];

		if (k->runtime || config_key_equal(old, new, k))
			continue;
		if (used < bytes)
			used += (size_t)snprintf(buf + used, bytes - used, "%s%s", n ? "," : "",
						 k->name);
		n++;
	}
	return n;
}

void config_keep_fixed(struct config *c, const struct config *running)
{
	for (size_t i = 0; i < config_n_keys; i++) {
		const struct config_key *k = &config_keys[i];

		CHECK(k->runtime || !k->count_offset); /* such a list has its count elsewhere */
		if (!k->runtime)
			memcpy(config_key_field(c, k), config_key_value(running, k), k->bytes);
	}
}

/* YAML could read such an item as a mapping, or reject it for its @ or its brackets. */
static void config_write_quoted_items(FILE *out, const char *value)
{
	while (*value) {
		size_t n = strcspn(value, ",");

		fprintf(out, "\"%.*s\"%s", (int)n, value, value[n] ? ", " : "");
		value += n + (value[n] == ',');
	}
}

/* "key: value", quoted where YAML could take it for something else. */
static void config_write_value(FILE *out, const struct config_key *k, const char *value)
{
	fprintf(out, "%s: ", k->name);
	if (k->type == CONFIG_LIMITS || k->type == CONFIG_WORDS) {
		fputc('[', out);
		config_write_quoted_items(out, value);
		fputs("]\n", out);
	} else if (config_key_is_list(k)) {
		fprintf(out, "[%s]\n", value);
	} else if (k->type == CONFIG_TEXT || k->type == CONFIG_PATH) {
		fputc('"', out);
		for (; *value; value++)
			fprintf(out, *value == '"' || *value == '\\' ? "\\%c" : "%c", *value);
		fputs("\"\n", out);
	} else {
		fprintf(out, "%s\n", value);
	}
}

void config_write(const struct config *c, FILE *out)
{
	for (size_t i = 0; i < config_n_keys; i++) {
		char value[CONFIG_VALUE_MAX];

		config_key_format(c, &config_keys[i], value);
		config_write_value(out, &config_keys[i], value);
	}
}

/* Write every line of @text after "# ". */
static void config_write_comment(FILE *out, const char *text)
{
	while (*text) {
		size_t n = strcspn(text, "\n");

		fprintf(out, "# %.*s\n", (int)n, text);
		text += n;
		text += *text == '\n';
	}
}

static void config_write_allowed(FILE *out, const struct config_key *k)
{
	if (k->choices)
		fprintf(out, "# One of %s.", k->choices);
	else if (k->type == CONFIG_BYTES)
		fputs("# Bytes, or a size in KiB, MiB, GiB or TiB.", out);
	else if (k->type == CONFIG_MILLIS)
		fputs("# A time in ms, s, min, h or d; without a unit: ms.", out);
	else if (k->type == CONFIG_SECONDS)
		fputs("# A time in s, min, h or d; without a unit: s.", out);
	else if (k->type == CONFIG_COUNT)
		fprintf(out, "# A number, %s%llu to %llu.", k->zero && k->min > 1 ? "0 or " : "",
			(unsigned long long)(k->zero && k->min == 1 ? 0 : k->min),
			(unsigned long long)k->max);
	else if (config_key_is_list(k))
		fprintf(out, "# A list, at most %d entries.", CONFIG_MAX_IDS);
	else
		fputc('#', out);
	fprintf(out, " %s\n", k->runtime ? "Reread at SIGHUP." : "A change needs a restart.");
}

void config_write_example(FILE *out)
{
	fputs("# Configuration of shardd, see shardd(8). Every key with its default.\n"
	      "# Environment variables (SHARDD_ and the key in capitals) override this file, and\n"
	      "# options (shardd --set KEY=VALUE) override both. shardd --check-config reports\n"
	      "# errors.\n",
	      out);
	for (size_t i = 0; i < config_n_keys; i++) {
		const struct config_key *k = &config_keys[i];

		fputc('\n', out);
		config_write_comment(out, k->help);
		config_write_allowed(out, k);
		config_write_value(out, k, k->by_default);
	}
}
