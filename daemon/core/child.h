/*
 * A child process that ends with us, whatever ends us: the kernel kills it when the thread that began
 * it ends (PR_SET_PDEATHSIG). posix_spawn and uv_spawn cannot set that, and fork would copy the page
 * tables of the training state; so the child begins with clone, as posix_spawn's does: it shares our
 * memory, and we stand still until it executes its program.
 *
 * The end of a child is seen with core/proc.h; the caller reaps it with waitpid.
 */
#ifndef SHARDD_CORE_CHILD_H
#define SHARDD_CORE_CHILD_H

#include <sys/types.h>

/* Which descriptor the child has @keep as. */
#define CHILD_KEPT_FD 3

/* All is borrowed. */
struct child_options {
	const char *path; /* of the program */
	char *const *argv;
	char *const *envp;
	int output; /* becomes its standard output and error; its standard input is empty */
	int keep;   /* stays open in it, with no other; above 2 */
};

/* Begin it. The calling thread must live as long as the process should: the loop's. Blocks until the
 * program is loaded. @ret: its pid. Return: 0 or negative errno, also that of execve. */
int child_spawn(const struct child_options *o, pid_t *ret);

#endif
