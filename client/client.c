#include "client.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "client_error.h"
#include "core/check.h"
#include "options.h"

int client_check(const struct shardd_client *c, struct shardd_error *err)
{
	if (!c)
		return error_set(err, SHARDD_INVALID_ARGUMENT, "client", "the client is NULL");
	MAGIC_CHECK(c, CLIENT_MAGIC);
	if (c->here ? !*c->here : c->pid != getpid())
		return error_set(err, SHARDD_FAILED_PRECONDITION, NULL,
				 "this client was connected by process %d, and this process is a "
				 "fork of it: close it before the fork, or start this process with "
				 "exec (in Python: multiprocessing's spawn), and connect there",
				 (int)c->pid);
	return 0;
}

int client_check_size(const void *s, size_t bytes, const char *what, struct shardd_error *err)
{
	size_t size;

	memcpy(&size, s, sizeof(size));
	if (size < bytes || size > OPTIONS_MAX_BYTES)
		return error_set(err, SHARDD_INVALID_ARGUMENT, what,
				 "%s is %zu: set it to the size of the struct, at least %zu", what,
				 size, bytes);
	return options_check_tail(s, size, bytes, what, err);
}

int client_check_bytes(const struct shardd_client *c, size_t bytes, struct shardd_error *err)
{
	if (!c->daemon.max_message || bytes <= c->daemon.max_message)
		return 0;
	return error_set(
		err, SHARDD_RESOURCE_EXHAUSTED, NULL,
		"this request has %zu bytes, the daemon accepts at most %llu in one message", bytes,
		(unsigned long long)c->daemon.max_message);
}

int client_take_link(struct shardd_client *c, const struct link *l, struct shardd_error *err)
{
	struct client_version *now = atomic_load(&c->daemon.version);

	if (!now || strcmp(now->text, l->version) != 0) {
		struct client_version *v = malloc(sizeof(*v) + strlen(l->version) + 1);

		if (!v)
			return error_memory(err);
		strcpy(v->text, l->version);
		v->next = now;
		atomic_store(&c->daemon.version, v);
	}
	c->session = l->session;
	atomic_store(&c->draining, false);
	c->daemon.max_ops = l->max_ops;
	c->daemon.max_message = l->max_message;
	c->daemon.started_unix_s = l->started_unix_s;
	atomic_store(&c->reconnect.outlives, l->outlives);
	if (now && memcmp(c->daemon.instance, l->instance, EXPECT_BYTES) == 0)
		return 0; /* other threads may read it */
	memcpy(c->daemon.instance, l->instance, EXPECT_BYTES);
	for (unsigned i = 0; i < EXPECT_BYTES; i++)
		snprintf(c->daemon.instance_text + 2 * (size_t)i, 3, "%02x", l->instance[i]);
	return 0;
}

struct link *client_use_link(struct shardd_client *c)
{
	struct link *l;

	pthread_mutex_lock(&c->reconnect.lock);
	l = c->link;
	l->users++;
	pthread_mutex_unlock(&c->reconnect.lock);
	return l;
}

bool client_has_link(struct shardd_client *c, uint32_t number)
{
	bool is;

	pthread_mutex_lock(&c->reconnect.lock);
	is = c->link->number == number;
	pthread_mutex_unlock(&c->reconnect.lock);
	return is;
}

void client_unuse_link(struct shardd_client *c, struct link *l)
{
	pthread_mutex_lock(&c->reconnect.lock);
	CHECK(l->users > 0);
	l->users--;
	pthread_mutex_unlock(&c->reconnect.lock);
}
