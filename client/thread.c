#include "thread.h"

#include <signal.h>
#include <stddef.h>

int thread_start(pthread_t *ret, void *(*fn)(void *arg), void *arg)
{
	sigset_t all, own;
	int e;

	sigfillset(&all);
	pthread_sigmask(SIG_SETMASK, &all, &own);
	e = pthread_create(ret, NULL, fn, arg);
	pthread_sigmask(SIG_SETMASK, &own, NULL);
	return e;
}
