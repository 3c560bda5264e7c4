/* The parts of a client, for the files of the library. */
#ifndef SHARDD_CLIENT_CLIENT_H
#define SHARDD_CLIENT_CLIENT_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

#include "cuda_context.h"
#include "debug.h"
#include "expect.h"
#include "map.h"
#include "link.h"
#include "places.h"
#include "reconnect_types.h"
#include "shardd/shardd.h"
#include "ticket.h"

struct streams;

#define CLIENT_MAGIC 0x53434c49u

/* Calls that are not ops do not have the job's deadline. A daemon that does not
 * answer within this time hangs. */
#define CLIENT_CALL_TIMEOUT_MS 60000u
#define CLIENT_LOAD_TIMEOUT_MS 3600000u

/* What ring_number said of an op last. */
#define CLIENT_NUMBERS 64u
struct op;
struct client_number {
	const struct op *op; /* NULL: not asked yet */
	uint16_t number;
};

/* The daemon's version. It is valid until the client is closed, and a new one may come. */
struct client_version {
	struct client_version *next;
	char text[];
};

struct shardd_client {
	uint32_t magic;
	pid_t pid;            /* whoever connected: a child after fork is turned away */
	const uint32_t *here; /* 1 in that process, 0 in a child; NULL: ask for the pid */
	struct link *link; /* read under @order or by client_use_link; changed under both locks */
	struct reconnect reconnect;
	struct client_number numbers[CLIENT_NUMBERS]; /* under @order */
	struct map map;
	struct debug *debug; /* NULL: no debug mode */
	struct tickets tickets;
	struct places places;
	_Atomic uint64_t session;
	char *socket; /* its path */
	struct {
		_Atomic(struct client_version *) version; /* and the earlier ones */
		uint8_t instance[EXPECT_BYTES];
		char instance_text[2 * EXPECT_BYTES + 1];
		/* each run of the daemon has its own */
		_Atomic uint64_t started_unix_s;
		_Atomic uint32_t max_ops;     /* a session may have unanswered; 0: no limit */
		_Atomic uint64_t max_message; /* bytes; 0: no limit */
	} daemon;                             /* as it said when the session began */
	atomic_bool draining;                 /* as of the last answer */
	_Atomic uint32_t timeout_ms;
	atomic_uint interrupts;       /* calls of shardd_interrupt */
	atomic_uint interrupts_taken; /* of them, those that have ended a wait */
	struct {
		void (*call)(void *data, uint64_t ticket, const char *text); /* NULL: none */
		void *data;
		uint32_t ms;
	} on_stall;
	struct {
		pthread_mutex_t lock; /* held while the descriptor is made */
		atomic_int fd;        /* of shardd_completion_fd; -1: none */
	} completion;
	struct {
		pthread_mutex_t lock;
		atomic_bool is_there;
		struct shardd_error first; /* under @lock */
	} failure;                         /* of a detached op, not told yet */

	enum shardd_handover handover;
	char wanted[CUDA_UUID_BYTES];      /* device, "": the daemon chooses */
	struct cuda *cuda;                 /* NULL: host memory, or before the first join */
	_Atomic(struct streams *) streams; /* with @cuda */
	pthread_mutex_t device_lock;       /* over @device; held for moments */
	struct shardd_device device;       /* as of the last join; id "" before the first */

	/* Held from the choice of a number until the op is sent, and over a join. */
	pthread_mutex_t order;
	bool joined;
	char *job; /* of the last join; NULL: none; changed under reconnect.lock, too */
	bool keep; /* that job stays when all have left */
	uint32_t wait_for_memory_ms; /* of that job: a registration may take so long, too */
	atomic_uint_least64_t epoch;
	uint64_t ended_epoch; /* the daemon ended in it, and this client has not joined since; 0 */
	uint32_t joined_link; /* number of the link of the last join; 0 before the first */
	uint64_t seq;         /* of the last op */
	void *blob;           /* of the last join */
};

/* May @c be used here? Return: 0, -SHARDD_INVALID_ARGUMENT (NULL),
 * -SHARDD_FAILED_PRECONDITION (a child after fork). */
int client_check(const struct shardd_client *c, struct shardd_error *err);

/* Check the size that the caller's struct @s begins with, @what in messages: @bytes in this library.
 * What a longer, newer struct has behind that must be 0. */
int client_check_size(const void *s, size_t bytes, const char *what, struct shardd_error *err);

/* Does the daemon take a message of @bytes? Return: 0 or -SHARDD_RESOURCE_EXHAUSTED. */
int client_check_bytes(const struct shardd_client *c, size_t bytes, struct shardd_error *err);

/* The daemon of @l is the client's. Return: 0 or a negative shardd_code. */
int client_take_link(struct shardd_client *c, const struct link *l, struct shardd_error *err);

/* The present link, for a call that goes over it, until client_unuse_link. Any thread. */
struct link *client_use_link(struct shardd_client *c);
void client_unuse_link(struct shardd_client *c, struct link *l);

/* Is the present link that of @number? Any thread. */
bool client_has_link(struct shardd_client *c, uint32_t number);

static inline void client_messagep(ProtobufCMessage **m)
{
	if (*m)
		protobuf_c_message_free_unpacked(*m, NULL);
	*m = NULL;
}

#endif
