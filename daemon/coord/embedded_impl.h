/* The embedded etcd: what its files share. */
#ifndef SHARDD_COORD_EMBEDDED_IMPL_H
#define SHARDD_COORD_EMBEDDED_IMPL_H

#include "coord/embedded.h"
#include "coord/etcd_member.h"
#include "core/proc.h"

#define EMBEDDED_WHY_BYTES   400
#define EMBEDDED_LINE_BYTES  1024 /* of its log; the rest of a longer one is not kept */
#define EMBEDDED_READ_BYTES  4096
#define EMBEDDED_URL_BYTES   (HOSTPORT_TEXT_BYTES + 8)
#define EMBEDDED_TOKEN_BYTES (NAME_BYTES + 18)

/* The end of a pipe that etcd logs to. It frees itself when it is closed. */
struct embedded_log {
	struct embedded *e; /* NULL: closed */
	uv_poll_t poll;
	int fd;
	char line[EMBEDDED_LINE_BYTES * 4]; /* what has come of it, JSON */
	size_t n;
	char error[EMBEDDED_WHY_BYTES / 2]; /* the last that it has logged; "": none */
};

/* The options, copied. */
struct embedded_setup {
	char node[NAME_BYTES], cluster[NAME_BYTES];
	struct seeds seeds;
	const struct seed *own; /* in @seeds; NULL: none */
	char *etcd, *dir, *ca, *cert, *key;
	char listen[HOSTPORT_HOST_BYTES]; /* an address, from RESOLVING on */
	bool listen_given;
};

/* Of a seed's peer port. */
struct embedded_probe {
	uv_work_t work;
	struct embedded *e;
	const struct seed *seed;
	void (*done)(struct embedded *e, bool accepts);
	bool runs, accepts;
};

/* How a member without data comes to a store: it makes one, or joins one. */
struct embedded_join {
	struct coord *members; /* the client ports of all seeds; NULL: not needed now */
	struct embedded_probe probe;
	struct etcd_member_call call;
	size_t asked;               /* which of them; not this node's */
	const struct seed *learner; /* one that has answered as such; NULL: none */
	uint64_t former;            /* the member that this node was, and which is being removed */
	char why[EMBEDDED_WHY_BYTES / 2];
	/* what etcd is told at its start; it ignores all three if it has data */
	char *initial; /* NAME=URL,...; owned; NULL: not known yet */
	const char *state;
	char token[EMBEDDED_TOKEN_BYTES];
};

struct embedded {
	uint32_t magic;
	uint8_t state; /* enum embedded_state */
	char why[EMBEDDED_WHY_BYTES];
	uv_loop_t *loop;
	struct loopq *loopq;
	const struct embedded_ops *ops;
	void *userdata;
	struct embedded_setup setup;
	char texts[SEEDS_MEMBERS][HOSTPORT_TEXT_BYTES];
	const char *endpoints[SEEDS_MEMBERS];
	uv_timer_t timer;
	uv_getaddrinfo_t resolver;
	int daemon_lock;   /* -1: not ours yet */
	pid_t pid;         /* 0: none runs */
	struct proc *proc; /* of @pid */
	struct proc_watch gone;
	struct embedded_log *log;
	struct embedded_join join;
	bool has_vote;
	unsigned tries; /* that have failed since it served for a while */
	uint64_t began_us;
	void (*stopped)(void *userdata);
};

/* ---------------------------------------------------------------------------- embedded_child.c */

/* An etcd of an earlier daemon has the data. It was told to end, if it is known. */
#define EMBEDDED_E_HELD 1

/* Make and lock the folder, and start etcd: @e->pid and @e->log. @why: unless 0: one sentence.
 * Return: 0, EMBEDDED_E_HELD, or negative errno. */
int embedded_child_start(struct embedded *e, char why[EMBEDDED_WHY_BYTES]);
/* Make the folder and lock it, for as long as @e lives. @ret_data: it has a log of etcd: this is a member of a
 * store. Return: 0, or negative errno with @why: nothing is known. */
int embedded_child_own_data(struct embedded *e, bool *ret_data, char why[EMBEDDED_WHY_BYTES]);
/* The path of the program, owned. Return: 0 or FAULT_NOT_FOUND. */
int embedded_child_find(const char *etcd, char **ret, struct fault *f);

/* ----------------------------------------------------------------------------- embedded_join.c */

/* A new store, of this member alone. Return: 0 or negative errno. */
int embedded_join_found(struct embedded *e);
/* Ask the others, later embedded_on_joined or embedded_on_not_joined is called, from here only without
 * memory. Return: 0 or negative errno with @why. */
int embedded_join_begin(struct embedded *e, char why[EMBEDDED_WHY_BYTES]);
/* It serves: has it a vote? If not it is asked for. embedded_on_vote is called, perhaps from here. */
void embedded_join_look(struct embedded *e);
/* Nothing of these is told any more. */
void embedded_join_end(struct embedded *e);

/* ------------------------------------------------------------------------------ embedded_log.c */

/* Read lines from @fd, which it takes also on failure. Return: 0 or negative errno. */
int embedded_log_open(struct embedded *e, int fd, struct embedded_log **ret);
/* All that is left in the pipe. */
void embedded_log_drain(struct embedded_log *l);
/* Nothing more is told. Return: NULL. NULL is allowed. */
struct embedded_log *embedded_log_close(struct embedded_log *l);

/* embedded.c: it has logged a line; it says that it serves. */
void embedded_on_line(struct embedded *e, enum log_level level, const char *text);
void embedded_on_serving(struct embedded *e);

/* ---------------------------------------------------------------------------- embedded_probe.c */

/* Is there anybody at the peer port of @seed (borrowed)? @done is called later on the loop, in JOINING only.
 * Return: 0 or -ENOMEM. */
int embedded_probe_begin(struct embedded *e, const struct seed *seed,
			 void (*done)(struct embedded *e, bool accepts));
/* embedded.c: it is over. */
void embedded_on_probed(struct embedded *e);

/* embedded.c: etcd can be started: @e->join says how. */
void embedded_on_joined(struct embedded *e);
/* Try again after @ms. */
void embedded_on_not_joined(struct embedded *e, const char *why, uint64_t ms);
/* Unless it has a vote: what is in the way, and look again after @ms. */
void embedded_on_vote(struct embedded *e, bool has, const char *why, uint64_t ms);

#endif
