/*
 * The YAML file, read with libcyaml into text and from there through the same
 * parser as every other source. The schema is built from the table of keys.
 *
 * libcyaml reports errors only through its log, so we capture the log. Its positions are those of
 * the event before the offending one; if the key is known, its line is looked up in the text
 * instead.
 */
#include "config/config.h"

#include <cyaml/cyaml.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "config/config_keys.h"
#include "core/check.h"
#include "core/cleanup.h"

/* Far more than every key at its longest; a bound for the parser's work. */
#define FILE_MAX (256u * 1024)
#define KEYS_MAX 128

/* What libcyaml fills: a text or a list of texts per key, NULL if absent. */
struct slot {
	void *value; /* char *, or char **; libcyaml's */
	uint32_t items;
};

struct document {
	struct slot slots[KEYS_MAX];
};

/* Messages of libcyaml's log. */
struct complaint {
	char text[256]; /* the first message */
	char key[64];   /* the innermost mapping field, or the unknown key */
	unsigned line;  /* 0: unknown */
};

static const cyaml_schema_value_t list_item = {
	CYAML_VALUE_STRING(CYAML_FLAG_POINTER, char, 0, 256),
};

static void config_file_fill_field(cyaml_schema_field_t *field, const struct config_key *k,
				   size_t i)
{
	*field = (cyaml_schema_field_t){
		.key = k->name,
		.data_offset = (uint32_t)(offsetof(struct document, slots) +
					  i * sizeof(struct slot) + offsetof(struct slot, value)),
		.value = { CYAML_VALUE_STRING(CYAML_FLAG_POINTER | CYAML_FLAG_OPTIONAL, char, 0,
					      CONFIG_VALUE_MAX) },
	};
	if (!config_key_is_list(k))
		return;
	field->count_offset = (uint32_t)(offsetof(struct document, slots) +
					 i * sizeof(struct slot) + offsetof(struct slot, items));
	field->count_size = sizeof(uint32_t);
	field->value = (cyaml_schema_value_t){
		CYAML_VALUE_SEQUENCE(CYAML_FLAG_POINTER | CYAML_FLAG_OPTIONAL, char *, &list_item,
				     0, CONFIG_MAX_IDS),
	};
}

/* @fields: KEYS_MAX + 1 of them, the last one all 0. */
static void config_file_build_schema(cyaml_schema_field_t *fields)
{
	CHECK(config_n_keys <= KEYS_MAX);
	memset(fields, 0, (KEYS_MAX + 1) * sizeof(*fields));
	for (size_t i = 0; i < config_n_keys; i++)
		config_file_fill_field(&fields[i], &config_keys[i], i);
}

static void config_file_read_position(struct complaint *p, const char *message)
{
	const char *key = strstr(message, "in mapping field '");
	const char *line = strstr(message, "(line: ");

	if (key && !p->key[0])
		sscanf(key, "in mapping field '%63[^']'", p->key);
	if (line && !p->line)
		sscanf(line, "(line: %u", &p->line);
}

static char *config_file_skip(char *text, const char *prefix)
{
	size_t n = strlen(prefix);

	return strncmp(text, prefix, n) == 0 ? text + n : text;
}

__attribute__((format(printf, 3, 0))) static void on_log(cyaml_log_t level, void *ctx,
							 const char *fmt, va_list ap)
{
	struct complaint *p = ctx;
	char buf[256], *text = buf;

	(void)level;
	vsnprintf(buf, sizeof(buf), fmt, ap);
	buf[strcspn(buf, "\n")] = '\0';
	text = config_file_skip(text, "Load: ");
	text = config_file_skip(text, "libyaml: ");
	if (strncmp(text, "  in ", 5) == 0) {
		config_file_read_position(p, text);
	} else if (strncmp(text, "Backtrace", 9) != 0 && !p->text[0]) {
		snprintf(p->text, sizeof(p->text), "%s", text);
		sscanf(text, "Unexpected key: %63[^\n]", p->key);
	}
}

/* Does the line at @s, of @bytes, begin with the key? */
static bool config_file_line_has_key(const char *s, size_t bytes, const char *key)
{
	size_t n = strlen(key), i = 0;

	while (i < bytes && strchr(" {-?\"'", s[i]) && s[i] != '\0')
		i++;
	if (bytes - i < n || memcmp(s + i, key, n) != 0)
		return false;
	i += n;
	while (i < bytes && (s[i] == ' ' || s[i] == '"' || s[i] == '\''))
		i++;
	return i < bytes && s[i] == ':';
}

/* Return: the last line with the key (of two, the second is the wrong one), or 0. */
static unsigned config_file_find_line(const char *text, size_t bytes, const char *key)
{
	unsigned line = 1, found = 0;

	while (key[0] && bytes > 0) {
		const char *end = memchr(text, '\n', bytes);
		size_t n = end ? (size_t)(end - text) : bytes;

		if (config_file_line_has_key(text, n, key))
			found = line;
		n += end ? 1 : 0;
		text += n;
		bytes -= n;
		line++;
	}
	return found;
}

/* "name:line: text" as a fault. @line: 0 if not known. */
static int config_file_refuse(struct fault *f, const char *name, unsigned line, const char *key,
			      const char *text)
{
	if (line)
		return fault_set(f, FAULT_INVALID, key, "%.128s, line %u: %s", name, line, text);
	return fault_set(f, FAULT_INVALID, key, "%.128s: %s", name, text);
}

/* An entry of the list @k, for messages. */
static const char *config_file_entry(const struct config_key *k)
{
	if (k && k->type == CONFIG_LIMITS)
		return "\"alice:max_jobs=8\"";
	return k && k->type == CONFIG_WORDS ? "a, b" : "1000, 1001";
}

/* Turns libcyaml's message into one for people. */
static int config_file_refuse_yaml(struct fault *f, const char *name, const struct complaint *p,
				   cyaml_err_t err, unsigned line)
{
	const struct config_key *k = config_key_find(p->key);
	bool in_list = k && config_key_is_list(k);
	char text[320];

	if (err == CYAML_ERR_ALIAS)
		return config_file_refuse(f, name, line, p->key, "YAML aliases are not allowed");
	if (err == CYAML_ERR_INVALID_KEY) {
		snprintf(text, sizeof(text),
			 "unknown key '%s'; shardd --example-config prints all keys", p->key);
		return config_file_refuse(f, name, line, p->key, text);
	}
	if (strncmp(p->text, "Expecting SEQUENCE", 18) == 0) {
		snprintf(text, sizeof(text), "%s must be a list, such as [%s]", p->key,
			 config_file_entry(k));
		return config_file_refuse(f, name, line, p->key, text);
	}
	if (strncmp(p->text, "Expecting STRING", 16) == 0) {
		snprintf(text, sizeof(text), "%s%s must be one value, not a list or a mapping%s",
			 in_list ? "an entry of " : "", p->key,
			 in_list ? "; write it in quotation marks" : "");
		return config_file_refuse(f, name, line, p->key, text);
	}
	if (err == CYAML_ERR_LIBYAML_PARSER) { /* what is known is the last key before it */
		snprintf(text, sizeof(text), "YAML syntax error in or after this line: %s",
			 p->text);
		return config_file_refuse(f, name, line, p->key, text);
	}
	if (strncmp(p->text, "Expecting MAPPING", 17) == 0)
		return config_file_refuse(f, name, line, NULL,
					  "must hold lines such as 'key: value'");
	return config_file_refuse(f, name, line, p->key,
				  p->text[0] ? p->text : cyaml_strerror(err));
}

/* A list's items as the one text config_key_parse reads. */
static int config_file_join(const struct slot *s, char *buf, size_t bytes)
{
	char *const *items = s->value;
	size_t used = 0;

	buf[0] = '\0';
	for (uint32_t i = 0; i < s->items; i++) {
		/* an empty item or one with a separator would vanish or split unseen */
		if (items[i][0] == '\0' || strpbrk(items[i], ", "))
			return -EINVAL;
		used += (size_t)snprintf(buf + used, bytes - used, "%s%s", i ? "," : "", items[i]);
		if (used >= bytes)
			return -EINVAL;
	}
	return 0;
}

static int config_file_apply_slot(struct config *c, const struct config_key *k,
				  const struct slot *s, struct fault *f)
{
	char buf[CONFIG_MAX_IDS * 257];

	if (!config_key_is_list(k))
		return config_key_parse(c, k, s->value, f);
	if (config_file_join(s, buf, sizeof(buf)) < 0)
		return fault_set(f, FAULT_INVALID, k->name,
				 "%s has an entry that is empty or contains a blank or a comma; an "
				 "entry must be one %s",
				 k->name,
				 k->type == CONFIG_LIMITS ? "USER:LIMIT=VALUE or @GROUP:LIMIT=VALUE"
				 : k->type == CONFIG_WORDS ? "word"
							   : "name or number");
	return config_key_parse(c, k, buf, f);
}

static int config_file_apply_document(struct config *c, const struct document *d, const char *text,
				      size_t bytes, const char *name, struct fault *f)
{
	for (size_t i = 0; i < config_n_keys; i++) {
		const struct config_key *k = &config_keys[i];
		struct fault why = FAULT_NULL;

		if (d->slots[i].value && config_file_apply_slot(c, k, &d->slots[i], &why) != 0)
			return config_file_refuse(f, name,
						  config_file_find_line(text, bytes, k->name),
						  why.field, why.text);
	}
	return 0;
}

int config_load_text(struct config *c, const char *text, size_t bytes, const char *name,
		     struct fault *f)
{
	cyaml_schema_field_t fields[KEYS_MAX + 1];
	const cyaml_schema_value_t top = { CYAML_VALUE_MAPPING(CYAML_FLAG_POINTER, struct document,
							       fields) };
	struct complaint said = { .line = 0 };
	const cyaml_config_t options = { .log_fn = on_log,
					 .log_ctx = &said,
					 .mem_fn = cyaml_mem,
					 .log_level = CYAML_LOG_WARNING,
					 .flags = CYAML_CFG_NO_ALIAS };
	struct config copy = *c;
	cyaml_data_t *data = NULL;
	cyaml_err_t err;
	unsigned line;
	int r = 0;

	if (bytes > FILE_MAX)
		return fault_set(f, FAULT_INVALID, NULL, "%.128s is larger than %u KiB", name,
				 FILE_MAX / 1024);
	config_file_build_schema(fields);
	err = cyaml_load_data((const uint8_t *)text, bytes, &options, &top, &data, NULL);
	line = config_file_find_line(text, bytes, said.key);
	/* a warning is as bad: a second document would be ignored */
	if (err != CYAML_OK || said.text[0])
		r = config_file_refuse_yaml(f, name, &said, err, line ? line : said.line);
	else if (data)
		r = config_file_apply_document(&copy, data, text, bytes, name, f);
	cyaml_free(&options, &top, data, 0);
	if (r == 0)
		*c = copy;
	return r;
}

static int config_file_refuse_file(struct fault *f, const char *path, int e)
{
	char buf[128];

	return fault_set(f, e == EACCES || e == EPERM ? FAULT_DENIED : FAULT_NOT_FOUND, NULL,
			 "the configuration file %.256s cannot be read: %s", path,
			 strerror_r(e, buf, sizeof(buf)));
}

/* Read @fd into @buf. Return: bytes (more than FILE_MAX: too large), or negative errno. */
static ssize_t config_file_read_all(int fd, char *buf)
{
	size_t used = 0;

	while (used <= FILE_MAX) {
		ssize_t n = read(fd, buf + used, FILE_MAX + 1 - used);

		if (n < 0 && errno == EINTR)
			continue;
		if (n < 0)
			return -errno;
		if (n == 0)
			break;
		used += (size_t)n;
	}
	return (ssize_t)used;
}

int config_load_file(struct config *c, const char *path, struct fault *f)
{
	_cleanup_(fd_closep) int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
	_cleanup_(freep) char *buf = malloc(FILE_MAX + 1);
	struct stat st;
	ssize_t n;

	if (!buf)
		return fault_errno(f, -ENOMEM, path);
	if (fd < 0 || fstat(fd, &st) < 0)
		return config_file_refuse_file(f, path, errno);
	if (!S_ISREG(st.st_mode))
		return fault_set(f, FAULT_NOT_FOUND, NULL,
				 "the configuration file %.256s is not a regular file", path);
	n = config_file_read_all(fd, buf);
	if (n < 0)
		return config_file_refuse_file(f, path, (int)-n);
	return config_load_text(c, buf, (size_t)n, path, f);
}
