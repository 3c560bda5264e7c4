/* Threads of the library. Any thread. */
#ifndef SHARDD_CLIENT_THREAD_H
#define SHARDD_CLIENT_THREAD_H

#include <pthread.h>

/* As pthread_create with default attributes; the thread takes no signals, which are the program's.
 * Return: 0 or an errno. */
int thread_start(pthread_t *ret, void *(*fn)(void *arg), void *arg);

#endif
