#include "complete.h"

#include <ctype.h>
#include <stdlib.h>
#include <string.h>

#include "core/check.h"
#include "core/cleanup.h"
#include "env.h"

#define TIMEOUT_MS 500u /* somebody has pressed a key and waits */

/* ------------------------------------------------------------- forms of a verb */

enum item_kind { ITEM_WORD, ITEM_VALUE, ITEM_OPTION };

/* "save", "DIR", "--rate BYTES". */
struct item {
	enum item_kind kind;
	char *text;  /* owned; alternatives have | between them */
	char *value; /* of an option; owned; NULL: it has none */
};

/* One way to write a verb. Words of it are items in their order, options can be anywhere. */
struct form {
	struct item items[64];
	size_t n;
};

static void complete_form_deinit(struct form *f)
{
	for (size_t i = 0; i < f->n; i++) {
		free(f->items[i].text);
		free(f->items[i].value);
	}
	f->n = 0;
}

/* The next word of a form. Return: where it begins; NULL: there is none. @n: its bytes, without
 * brackets. @closed: a bracket ends behind it. @rest: what is behind it. */
static const char *complete_token(const char *at, size_t *n, bool *closed, const char **rest)
{
	size_t all;

	at += strspn(at, " \n[");
	if (!*at)
		return NULL;
	all = strcspn(at, " \n");
	*rest = at + all;
	*n = strcspn(at, "] \n");
	*closed = *n < all;
	/* "CMD..." */
	if (*n > 3 && strncmp(at + *n - 3, "...", 3) == 0)
		*n -= 3;
	return at;
}

static bool complete_add(struct form *f, enum item_kind kind, const char *text, size_t n)
{
	if (f->n == ARRAY_SIZE(f->items))
		return false;
	f->items[f->n] = (struct item){ kind, strndup(text, n), NULL };
	return f->items[f->n].text && ++f->n;
}

/* @text: "create NAME --world-size N [--keep|--ephemeral]", up to @end. */
static void complete_parse_form(struct form *f, const char *text, const char *end)
{
	_cleanup_(freep) char *copy = strndup(text, (size_t)(end - text));
	const char *at = copy, *rest;
	bool closed, wants = false;
	size_t n;

	for (; at && (at = complete_token(at, &n, &closed, &rest)); at = rest) {
		bool option = *at == '-' && n > 1 && strncmp(at, "-- ", 3) != 0;

		if (strncmp(at, "...", 3) == 0 || (*at == '|' && n == 1))
			continue;
		if (wants && !option)
			f->items[f->n - 1].value = strndup(at, n);
		else if (!complete_add(f,
				       option                        ? ITEM_OPTION
				       : isupper((unsigned char)*at) ? ITEM_VALUE
								     : ITEM_WORD,
				       at, n))
			return;
		/* what follows an option in the same bracket is its value */
		wants = option && !closed;
	}
}

/* A form ends where a line begins that is indented as the first one is: by two blanks. */
static const char *complete_end_of_form(const char *at)
{
	for (const char *line = strchr(at, '\n'); line; line = strchr(line + 1, '\n'))
		if (strspn(line + 1, " ") <= 2)
			return line;
	return at + strlen(at);
}

/* --------------------------------------------------------------- what is typed */

struct typed {
	char *const *words; /* behind the verb */
	size_t n;           /* the last one is being typed */
	const char *last;
	const char *socket; /* NULL: the default */
	void (*jobs)(const char *socket, const char *typed, FILE *out);
	FILE *out;
};

static bool complete_begins(const char *text, const char *typed)
{
	return strncmp(text, typed, strlen(typed)) == 0;
}

static void complete_say(const struct typed *t, const char *text, size_t n, const char *help)
{
	if (n >= strlen(t->last) && strncmp(text, t->last, strlen(t->last)) == 0)
		fprintf(t->out, "%.*s%s%s\n", (int)n, text, *help ? "\t" : "", help);
}

/* One of "a|b". */
static bool complete_is_one(const char *alternatives, const char *word)
{
	size_t n = strlen(word);

	for (const char *a = alternatives; *a; a += strcspn(a, "|"), a += *a == '|')
		if (strcspn(a, "|") == n && strncmp(a, word, n) == 0)
			return true;
	return false;
}

static void complete_say_words(const struct typed *t, const char *alternatives)
{
	for (const char *a = alternatives; *a; a += strcspn(a, "|"), a += *a == '|')
		complete_say(t, a, strcspn(a, "|"), "");
}

/* What stands for a value, or the values themselves: "applied|committed". */
static void complete_say_value(const struct typed *t, const char *value)
{
	static const struct {
		const char *name, *line;
	} kinds[] = {
		{ "DIR", ":dir" },  { "FILE", ":file" }, { "FILE|-", ":file" }, { "PATH", ":file" },
		{ "SRC", ":file" }, { "DST", ":file" },  { "CMD", ":command" },
	};

	if (!isupper((unsigned char)*value)) {
		complete_say_words(t, value);
		return;
	}
	if (strcmp(value, "JOB") == 0)
		t->jobs(t->socket, t->last, t->out);
	for (size_t i = 0; i < ARRAY_SIZE(kinds); i++)
		if (strcmp(kinds[i].name, value) == 0)
			fprintf(t->out, "%s\n", kinds[i].line);
}

static const struct item *complete_find_option(const struct form *f, const char *word)
{
	for (size_t i = 0; i < f->n; i++)
		if (f->items[i].kind == ITEM_OPTION && complete_is_one(f->items[i].text, word))
			return &f->items[i];
	return NULL;
}

/* The item of @f that the word after the first @done ones is; NULL: none. */
static const struct item *complete_item(const struct form *f, size_t done)
{
	for (size_t i = 0; i < f->n; i++)
		if (f->items[i].kind != ITEM_OPTION && done-- == 0)
			return &f->items[i];
	return NULL;
}

static void complete_say_options(const struct typed *t, const struct form *f)
{
	for (size_t i = 0; i < f->n; i++)
		if (f->items[i].kind == ITEM_OPTION)
			complete_say_words(t, f->items[i].text);
}

/* A command of its own, with its own options: its name, then its files. */
static void complete_say_command(const struct typed *t, size_t words)
{
	fputs(words == 0 ? ":command\n" : ":file\n", t->out);
}

/* The last word, by form @f, if the words before it are of that form. */
static void complete_by_form(const struct typed *t, const struct form *f)
{
	const struct item *option = NULL, *item;
	size_t done = 0;

	for (size_t i = 0; i + 1 < t->n; i++) {
		const char *word = t->words[i];

		if (option) { /* this one is its value */
			option = NULL;
			continue;
		}
		item = complete_item(f, done);
		if (strcmp(word, "--") == 0 && item && complete_is_one(item->text, word)) {
			complete_say_command(t, t->n - 1 - (i + 1));
			return;
		}
		if (*word == '-' && word[1]) {
			option = strchr(word, '=') ? NULL : complete_find_option(f, word);
			option = option && option->value ? option : NULL;
			continue;
		}
		if (!item || (item->kind == ITEM_WORD && !complete_is_one(item->text, word)))
			return; /* another form */
		done++;
	}
	if (option) {
		complete_say_value(t, option->value);
		return;
	}
	item = complete_item(f, done);
	if (*t->last != '-' && item)
		complete_say_value(t, item->text);
	if (*t->last == '-' || !item || strcmp(item->text, "--") == 0)
		complete_say_options(t, f);
	if (*t->last == '-' && item && strcmp(item->text, "--") == 0)
		complete_say(t, "--", 2, "");
}

static int complete_by_text(const void *a, const void *b)
{
	return strcmp(*(char *const *)a, *(char *const *)b);
}

/* Each line once, sorted: forms share words and options. What begins with a colon comes last. */
static void complete_print_once(char *text, FILE *out)
{
	char *lines[512], *save = NULL;
	size_t n = 0;

	for (char *l = strtok_r(text, "\n", &save); l && n < ARRAY_SIZE(lines);
	     l = strtok_r(NULL, "\n", &save))
		lines[n++] = l;
	qsort(lines, n, sizeof(*lines), complete_by_text);
	for (int last = 0; last < 2; last++)
		for (size_t i = 0; i < n; i++)
			if ((*lines[i] == ':') == last &&
			    (!i || strcmp(lines[i], lines[i - 1]) != 0))
				fprintf(out, "%s\n", lines[i]);
}

/* Not among the options of a command that run starts. */
static void complete_say_help(const struct typed *t)
{
	bool own = *t->last == '-';

	for (size_t i = 0; i + 1 < t->n; i++)
		own = own && strcmp(t->words[i], "--") != 0;
	if (own)
		complete_say(t, "--help", 6, "");
}

/* The last word, which is behind @verb. */
static void complete_by_verb(struct typed *t, const struct ctl_verb *verb)
{
	_cleanup_(freep) char *usage = NULL;
	_cleanup_(freep) char *said = NULL;
	size_t bytes = 0;
	FILE *out = t->out, *memory = open_memstream(&said, &bytes);

	if (verb->usage)
		usage = strdup(verb->usage);
	else if (asprintf(&usage, "  %s %s\n", verb->name, verb->arguments) < 0)
		usage = NULL;
	t->out = memory;
	for (const char *at = usage, *end; memory && at && *at; at = end + (*end == '\n')) {
		struct form f = { .n = 0 };

		end = complete_end_of_form(at);
		complete_parse_form(&f, at + 2 + strlen(verb->name), end);
		complete_by_form(t, &f);
		complete_form_deinit(&f);
	}
	if (memory)
		complete_say_help(t);
	t->out = out;
	if (memory && fclose(memory) == 0)
		complete_print_once(said, out);
}

static void complete_verbs(const struct typed *t, const struct ctl_verb *verbs, size_t n)
{
	static const char *const options[] = { "--socket",   "--json", "--wide",
					       "--no-color", "--help", "--version" };

	for (size_t i = 0; i < n && *t->last != '-'; i++)
		complete_say(t, verbs[i].name, strlen(verbs[i].name), verbs[i].help);
	for (size_t i = 0; i < ARRAY_SIZE(options) && *t->last == '-'; i++)
		complete_say(t, options[i], strlen(options[i]), "");
}

void complete_print(const struct ctl_verb *verbs, size_t n_verbs, char *const *words, size_t n,
		    void (*jobs)(const char *socket, const char *typed, FILE *out), FILE *out)
{
	struct typed t = { .last = n ? words[n - 1] : "", .jobs = jobs, .out = out };
	size_t at = 0;

	for (; at + 1 < n && *words[at] == '-'; at++) {
		if (complete_begins(words[at], "--socket="))
			t.socket = words[at] + sizeof("--socket");
		if (strcmp(words[at], "--socket") != 0)
			continue;
		if (at + 2 == n) {
			fputs(":file\n", out);
			return;
		}
		t.socket = words[++at];
	}
	if (at + 1 >= n) {
		complete_verbs(&t, verbs, n_verbs);
		return;
	}
	t.words = words + at + 1;
	t.n = n - at - 1;
	for (size_t i = 0; i < n_verbs; i++)
		if (strcmp(verbs[i].name, words[at]) == 0)
			complete_by_verb(&t, &verbs[i]);
}

/* ------------------------------------------------------------------------ jobs */

/* Not as verbs do it: errors are not printed, because they would be in the middle
 * of the line that is being typed. */
void complete_jobs(const char *socket, const char *typed, FILE *out)
{
	Shardd__V1__GetStatusRequest all = SHARDD__V1__GET_STATUS_REQUEST__INIT;
	_cleanup_(ctl_messagep) ProtobufCMessage *reply = NULL;
	struct shardd_error err = { 0 };
	struct rpc_client *rpc;
	Shardd__V1__GetStatusResponse *s;

	if (rpc_client_connect(env_socket(socket), 0, &rpc, &err) < 0 ||
	    rpc_client_call(rpc, "/shardd.v1.StatusService/GetStatus", &all.base,
			    &shardd__v1__get_status_response__descriptor, TIMEOUT_MS, &reply,
			    &err) < 0)
		return;
	s = (Shardd__V1__GetStatusResponse *)reply;
	for (size_t i = 0; i < s->n_jobs; i++) {
		char name[CTL_JOB_MAX];

		if (!*s->jobs[i]->name)
			continue;
		ctl_job_text(s->jobs[i]->uid, s->jobs[i]->name, name);
		if (complete_begins(name, typed))
			fprintf(out, "%s\n", name);
	}
}
