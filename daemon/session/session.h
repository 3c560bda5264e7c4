/*
 * A session: one connected trainer process. It begins with Attach on a gRPC connection and ends
 * with that connection; then everything that it held in a job is released. Local channels bind to
 * it by its token. Loop thread only.
 *
 *   ATTACHED --join--> member of a job --leave--> ATTACHED
 *       '--connection ends, process dies--> gone (a rank that had not left: DEAD)
 */
#ifndef SHARDD_SESSION_SESSION_H
#define SHARDD_SESSION_SESSION_H

#include <stdbool.h>
#include <stdint.h>

#include "core/fault.h"
#include "core/list.h"
#include "core/res.h"
#include "job/job.h"
#include "local_abi.h"
#include "net/conn.h"
#include "publish/publication.h"

#define SESSION_NAME_MAX 64
/* Each may keep hundreds of events waiting for a client that does not read. */
#define SESSION_MAX_WATCHES 16u
#define SESSION_MAX_LEASES  64u /* with readers that have a hold */
#define SESSION_MAX_BASES   16u

struct local;
struct ring;
struct session;
struct sessions;

/* News for one that watches; embedded by the watcher, unlinked by it. */
struct session_watch {
	struct list link;
	void (*fn)(struct session_watch *w, enum job_event_kind kind, uint64_t epoch,
		   const char *text);
	void (*ended)(struct session_watch *w); /* the session is gone */
};

/* Counters of a ring, as shown by status. */
struct session_ring_info {
	uint64_t bytes; /* of its memory */
	uint64_t submissions, completions;
	uint64_t wakes; /* of the client */
	uint64_t woken; /* of the daemon, by the client */
	uint64_t full;  /* checks of submissions whose completions had no room */
};

/* How sessions have rings: ring/ is above. */
struct session_rings {
	/* A descriptor of @part (enum shd1_ring_part) of the session's ring, which is made when
	 * its memory is asked for. Return: 0 or a fault code. */
	int (*get)(struct session *s, uint32_t part, int *ret_fd, uint64_t *ret_bytes,
		   struct fault *f);
	/* Take the session's submissions so far. The session must have a ring. */
	void (*catch_up)(struct session *s);
	/* End the ring. The session must have one. */
	void (*close)(struct session *s);
	/* It has one. */
	void (*info)(const struct session *s, struct session_ring_info *ret);
	/* Memory of all of them. */
	uint64_t (*bytes)(const struct sessions *s);
};

struct sessions {
	struct jobs *jobs;                 /* borrowed */
	const struct session_rings *rings; /* NULL: there are none */
	void *rings_data;
	struct list all;    /* of struct session */
	struct list locals; /* of all local channels, bound or not; session_local.c's */
	uint32_t count;
	uint64_t next_id;
};

struct session {
	uint32_t magic;
	struct sessions *sessions; /* borrowed */
	uint64_t id;
	uint8_t token[SHD1_TOKEN_BYTES];
	struct conn *conn;         /* borrowed; its user is this session */
	struct proc *proc;         /* borrowed from the connection */
	struct user_charge charge; /* one of its user's sessions */
	bool channel_due;          /* none of its channels has connected yet */
	char name[SESSION_NAME_MAX + 1];
	struct member *member; /* a reference; NULL: in no job */
	struct list leases;    /* of struct publication_lease, owned */
	struct list holds;     /* of struct board_reader, owned */
	struct list bases;     /* of struct base_reader, owned */
	uint64_t last_lease;   /* number, also of a hold */
	struct list locals;    /* of struct session_local */
	struct list watches;   /* of struct session_watch */
	uint64_t created_us;
	uint64_t ops_total;
	struct ring *ring; /* ring/'s; NULL: none */
	struct list link;
};

/* A bound local channel. */
struct session_local {
	struct list link;
	struct local *local;     /* borrowed */
	struct session *session; /* NULL: not bound yet, or the session is gone */
};

void sessions_init(struct sessions *s, struct jobs *jobs);

/* Begin a session on @c, which has none. @name: printable, at most SESSION_NAME_MAX
 * bytes. Return: 0 or a fault code. */
int session_new(struct sessions *s, struct conn *c, const char *name, struct session **ret,
		struct fault *f);

/* End it; @why for the peers: "died", "closed its connection". */
void session_end(struct session *s, const char *why);

struct session *session_by_token(struct sessions *s, const uint8_t token[SHD1_TOKEN_BYTES]);

/* The user that pays. Return: borrowed, or NULL: nobody pays. */
static inline struct user *session_account(const struct session *s)
{
	return s->charge.user;
}

/* A channel of it has connected, or none will. Safe to call twice. */
void session_channel_came(struct session *s);

/* Take its submissions on the ring before a request that it sends now by another way. */
static inline void session_catch_up(struct session *s)
{
	if (s->ring)
		s->sessions->rings->catch_up(s);
}

/* Join as job_join does. */
enum res session_join(struct session *s, struct job *job, const struct job_joining *how,
		      struct fault *f);
/* Leave as job_leave does. */
enum res session_leave(struct session *s, bool *ret_freed, struct fault *f);

/* Read the base @job from here on, until the session ends. Return: 0 or a fault code. */
int session_read_base(struct session *s, struct job *job, struct fault *f);

/* Lease @g. Return: the session's; NULL: @f is filled. */
struct publication_lease *session_lease(struct session *s, struct published *g, struct fault *f);
/* By number. Return: NULL: @f is filled. */
struct publication_lease *session_lease_find(struct session *s, uint64_t id, struct fault *f);

/* A reader of @p with a hold. Return: the session's; NULL: @f is filled. */
struct board_reader *session_open_reader(struct session *s, struct publication *p, struct fault *f);
/* By number. Return: NULL: @f is filled. */
struct board_reader *session_find_reader(struct session *s, uint64_t id, struct fault *f);

/* The member, or a fault that says to call Join. */
struct member *session_member(struct session *s, struct fault *f);

/* Return: 0, or a fault code: there are SESSION_MAX_WATCHES. */
int session_watch_add(struct session *s, struct session_watch *w, struct fault *f);
/* News from the job for the session behind @m. */
void session_event(struct member *m, enum job_event_kind kind, const char *text);

/* Take a local connection (session_local.c). Return: 0 or negative errno. */
int session_local_new(struct sessions *s, uv_loop_t *loop, struct conn *c,
		      uint64_t frame_timeout_us, void (*closed)(void *userdata), void *userdata);

/* End every local channel, also those that are bound to no session; the callback that was given as
 * @closed is called for each, later. */
void sessions_close_locals(struct sessions *s);

#endif
