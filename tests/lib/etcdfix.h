/* An etcd of one member for a test, on ports of 127.0.0.1 and in a folder of its own. */
#ifndef SHARDD_TESTS_ETCDFIX_H
#define SHARDD_TESTS_ETCDFIX_H

#include <stdbool.h>
#include <stddef.h>
#include <sys/types.h>

struct etcdfix {
	pid_t pid;
	char dir[64], client[32], peer[32]; /* 127.0.0.1:PORT */
};

/* 127.0.0.1 and a port that is free, another one with each call. */
void etcdfix_port(char *ret, size_t bytes);
/* Start one, and wait until it accepts connections. Skips the test if there is no etcd. It ends with
 * the test's process. */
void etcdfix_begin(struct etcdfix *x);
/* The same folder and ports again, after etcdfix_kill. */
void etcdfix_again(struct etcdfix *x);
/* kill -9. Safe twice. */
void etcdfix_kill(struct etcdfix *x);
/* Kill it, and remove its folder. */
void etcdfix_end(struct etcdfix *x);

#endif
