/* What the files of http/ share. */
#ifndef SHARDD_HTTP_HTTP_IMPL_H
#define SHARDD_HTTP_HTTP_IMPL_H

#include <microhttpd.h>

#include "core/list.h"
#include "http/http.h"
#include "http/http_listen.h"
#include "http/http_peer.h"
#include "net/admit.h"
#include "rpc/status_survey.h"

/* A connection. */
struct http_conn {
	struct list link;
	struct http *http;
	int fd; /* libmicrohttpd's; only the number is used */
	struct MHD_Connection
		*mhd; /* from its start to its end, while the descriptor is this one's; else NULL */
	struct http_peer peer;
	struct user *user;            /* a reference: who pays; of strangers, the daemon's own */
	struct user_charge charge;    /* a connection of that user */
	bool admitted;                /* by allow_uids and allow_gids, or as an observer */
	uint64_t since_us;            /* when it came, or its last request ended */
	struct http_request *request; /* NULL: none is under way */
};

struct http_request;

/* What a path may be followed by. */
enum {
	HTTP_PARAM_JOB = 1,
	HTTP_PARAM_LIMIT = 2,
	HTTP_PARAM_UNITS = 4,
	HTTP_PARAM_AFTER = 8,
	HTTP_PARAM_RUN = 16
};

#define HTTP_TYPE_JSON "application/json"

/* A path. */
struct http_route {
	const char *path;
	const char *type; /* of its content */
	bool open;        /* for everybody */
	unsigned params;  /* that it takes: HTTP_PARAM_... */
	/* Answer at once, if it is not data. Return: as http_answer. */
	enum MHD_Result (*answer)(struct http_request *r);
	/* Of data: collect it into the arena, in the loop. Return: 0 or a fault code. */
	int (*collect)(struct http_request *r, struct fault *f);
	/* Make the body of it: malloc'ed, the caller's. In a thread of the pool. Return: NULL without memory. */
	char *(*format)(struct http_request *r, size_t *ret_bytes);
	bool with_nodes; /* the other nodes are asked before */
	bool past;       /* its parameter job names one that may be gone */
};

/* What is asked for. */
struct http_params {
	unsigned seen;   /* HTTP_PARAM_... */
	const char *job; /* borrowed from libmicrohttpd; NULL: all */
	uint64_t limit, after, run;
	bool no_units;
};

struct http_request {
	struct list link;
	struct http *http;
	struct MHD_Connection *c; /* NULL: gone */
	struct http_conn *conn;
	const struct http_route *route;
	struct http_params params;
	struct status_scope scope;

	/* its data */
	bool suspended;
	bool ready; /* there is a body to be sent */
	struct status_turn turn;
	struct status_survey *survey; /* NULL: none is under way */
	uv_work_t work;
	bool in_pool;
	struct arena arena;
	Shardd__V1__GetStatusResponse status;
	Shardd__V1__OpsResponse ops;
	Shardd__V1__HistoryResponse history;
	Shardd__V1__EventsResponse events;
	struct metrics_counts *counts; /* in the arena */
	unsigned code;
	char *body; /* owned, until the client has read it */
	size_t bytes;
	struct user_charge call;   /* one of its user's status calls */
	struct user_charge memory; /* the body */
	uint64_t began_us;
};

struct http {
	uint32_t magic;
	uv_loop_t *loop;
	struct http_sources sources;
	char *address, *group; /* owned */
	char *token;           /* owned */
	struct http_listen listen;
	struct MHD_Daemon *mhd;
	uv_poll_t poll;
	uv_timer_t timer;
	bool running;           /* in MHD_run */
	bool again;             /* that was asked for meanwhile */
	uint64_t collected_us;  /* spent in it for what has turns of its own */
	uint64_t rest_until_us; /* it has used its share of the loop */
	uint64_t swept_us;
	uint64_t refused_us; /* when that was said last; 0: never */
	struct admit admit;
	struct list conns;
	unsigned n_conns, n_strangers; /* strangers: of users that are not known */
	struct list requests;          /* all of them */
	unsigned in_pool;              /* of them */
	uint64_t answered, refused;
	bool closing;
};

/* The paths of data (http_data.c) and of the page (http_page.c). */
const struct http_route *http_data_find(const char *path);
const struct http_route *http_page_find(const char *path);

/* Send a text: copied, unless it is the body of @r (http.c). */
enum MHD_Result http_answer(struct http_request *r, unsigned code, const char *type,
			    const void *body, size_t bytes);
/* What an error says: JSON, malloc'ed, the caller's. Return: NULL without memory. */
char *http_error_text(const char *name, const char *text);
/* The status of HTTP for it. */
unsigned http_code_of(enum fault_code code);

/* Begin to collect what @r asks for; it is suspended until http_resume. */
void http_data_begin(struct http_request *r);
/* Nothing of it goes on in the loop. */
void http_data_cancel(struct http_request *r);
/* It is ready, or its client is gone. */
void http_resume(struct http_request *r);
void http_request_free(struct http_request *r);

#endif
