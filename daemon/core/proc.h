/*
 * A process on the other side of a socket: its identity, and whether it has ended.
 *
 * The pidfd is the proof: it becomes readable when the process has ended, and from then on it
 * cannot write to memory that it had mapped. Code that must wait for that puts a watch on the proc.
 * Loop thread only.
 */
#ifndef SHARDD_CORE_PROC_H
#define SHARDD_CORE_PROC_H

#include <stdbool.h>
#include <sys/types.h>
#include <uv.h>

#include "core/list.h"

struct proc;
struct proc_watch;
typedef void (*proc_gone_cb)(struct proc_watch *watch);

/* Embed by value; list_init(&w.link) before use. */
struct proc_watch {
	struct list link;
	proc_gone_cb fn;
};

/* Open a pidfd for the peer of @sock (SO_PEERPIDFD where there is one, else
 * pidfd_open on SO_PEERCRED's pid) and watch it on @loop.
 * @ret: holds one reference. Return: 0 or negative errno (-ESRCH: gone already). */
int proc_new_peer(uv_loop_t *loop, int sock, struct proc **ret);

/* The same for a pid. For tests, and for our own children. */
int proc_new_pid(uv_loop_t *loop, pid_t pid, uid_t uid, gid_t gid, struct proc **ret);

struct proc *proc_ref(struct proc *p);
/* Return: NULL. NULL is allowed. */
struct proc *proc_unref(struct proc *p);

pid_t proc_pid(const struct proc *p);
uid_t proc_uid(const struct proc *p);
gid_t proc_gid(const struct proc *p);
bool proc_gone(const struct proc *p);
/* When it was started, in ticks since the boot: with the pid this names the process, also for another
 * process. Return: 0 if it is gone, or /proc does not show it. */
uint64_t proc_began(struct proc *p);

/* What the kernel says of it: R (running), S (sleeping), D (in a sleep that cannot be interrupted), T (stopped), t
 * (stopped by a debugger), or another letter of proc_pid_stat(5). Return: '\0' if it has ended, or /proc does not show
 * it. */
char proc_state(struct proc *p);

/* Call @fn once, from the loop, when the process is gone; at the next turn if
 * it is gone already. The watch holds no reference: unlink it (list_unlink on
 * its link) before the proc's last reference is dropped. */
void proc_watch(struct proc *p, struct proc_watch *w, proc_gone_cb fn);

#endif
