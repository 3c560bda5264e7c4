/* A listener in a directory of its own, and clients of it in the same process. */
#ifndef SHARDD_TESTS_NETFIX_H
#define SHARDD_TESTS_NETFIX_H

#include <stdbool.h>

#include "looprun.h"
#include "net/listener.h"

enum { NETFIX_CONNS = 4096 };

struct netfix {
	struct looprun run;
	char dir[64];
	char path[128]; /* dir/s */
	struct listener_options options;
	struct listener *listener;        /* NULL: none */
	struct conn *conns[NETFIX_CONNS]; /* handed out, in order */
	unsigned n_conns;
	unsigned n_closed; /* of these */
};

extern struct netfix netfix;

/* .init and .fini, descriptor check included. Begin opens no listener. */
void netfix_begin(void);
void netfix_end(void);

/* Skip the running test unless it runs as root. */
void netfix_need_root(void);

/* Open the listener with netfix.options; fails the test on a fault. */
void netfix_listen(void);

/* What netfix_listen gives to the listener. */
void netfix_on_conn(struct conn *c, void *userdata);

/* A non-blocking socket, connected to @path; -1 and errno. */
int netfix_connect(const char *path);
/* The same to netfix.path; fails the test on an error. Sends @hello unless NULL. */
int netfix_client(const char *hello);

/* Turn the loop until so many were handed out, have ended, or are open. */
void netfix_await_conns(unsigned n);
void netfix_await_closed(unsigned n);
void netfix_await_open(unsigned n);
/* Turn it until @fd sees the end of its stream. */
void netfix_await_end(int fd);
/* Turn it @n times without waiting. */
void netfix_turn(unsigned n);

#endif
