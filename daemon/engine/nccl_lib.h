/*
 * libnccl, loaded with dlopen: one table of what we call, so that the same binary runs
 * where there is no NCCL. Only the nccl engine uses it.
 *
 * NCCL reads its settings from the environment when it is first used. Before it is loaded these are
 * set, each only if it is not set already:
 *   NCCL_LAUNCH_ORDER_IMPLICIT=1  several communicators on one device start in the order in
 *                                 which we start them, whatever their streams
 *   NCCL_RAS_ENABLE=0             no port on localhost that nobody asked for, on which two
 *                                 daemons would meet; not set where NCCL_RAS_ADDR is
 *   NCCL_DEBUG=WARN               the reason of a failure is printed
 */
#ifndef SHARDD_NCCL_LIB_H
#define SHARDD_NCCL_LIB_H

#include <stdbool.h>
#include <stddef.h>

#include "engine/nccl_abi.h"

/* Set them now: before CUDA's threads exist, or our threads that call it, since they may read the
 * environment at any time. Later calls change nothing. */
void nccl_lib_environment(void);

/* The same for a node that is one of several:
 *   NCCL_RUNTIME_CONNECT=0  all connections are made with the communicator. Else the first large
 *                           operation of a kind would wait for other nodes in the thread that starts
 *                           those of all communicators
 *   NCCL_SOCKET_IFNAME      @iface, or (NULL) the interface that has @address, if there is one */
void nccl_lib_between_nodes(const char *iface, const char *address);

/* The minimum version, and the version from which an all-gather needs no multiprocessors. */
#define NCCL_LIB_MIN_VERSION  22700
#define NCCL_LIB_ZERO_VERSION 22800

#define NCCL_LIB_FUNCTIONS(X)     \
	X(ncclGetVersion)         \
	X(ncclGetUniqueId)        \
	X(ncclGetErrorString)     \
	X(ncclGetLastError)       \
	X(ncclCommInitRankConfig) \
	X(ncclCommFinalize)       \
	X(ncclCommDestroy)        \
	X(ncclCommAbort)          \
	X(ncclCommGetAsyncError)  \
	X(ncclGroupStart)         \
	X(ncclGroupEnd)           \
	X(ncclAllGather)          \
	X(ncclReduceScatter)      \
	X(ncclAllReduce)          \
	X(ncclBroadcast)

/* NULL if the library does not have them; see the capabilities. */
#define NCCL_LIB_OPTIONAL(X)        \
	X(ncclCommWindowRegister)   \
	X(ncclCommWindowDeregister) \
	X(ncclCommShrink)           \
	X(ncclCommRevoke)

struct nccl_lib {
#define NCCL_LIB_MEMBER(name) __typeof__(&name) name;
	NCCL_LIB_FUNCTIONS(NCCL_LIB_MEMBER)
	NCCL_LIB_OPTIONAL(NCCL_LIB_MEMBER)
#undef NCCL_LIB_MEMBER
	int version;      /* 22809 for 2.28.9 */
	bool windows;     /* memory can be registered for all members at once */
	bool zero_policy; /* NCCL_CTA_POLICY_ZERO is known */
	bool shrink;      /* survivors can continue without those that are gone */
	bool revoke;
};

/* Load the library (SHARDD_LIBNCCL in the environment, or libnccl.so.2), find every entry
 * and check its version. The first successful call counts, later ones give the same table;
 * it is never unloaded. Changes the environment, so call it at the start, before there are threads
 * that read it. Takes up to a second.
 * @why: one sentence if it fails: what is missing or too old.
 * Return: 0, -ENOENT (no library), -ENOSYS (an entry is missing), -EPROTO (too old, or
 * does not say). */
int nccl_lib_open(const struct nccl_lib **ret, char *why, size_t why_bytes);

/* "2.28.9". Return: @buf. */
const char *nccl_lib_version(const struct nccl_lib *lib, char *buf, size_t bytes);

/* A configuration in which nothing is set. */
void nccl_lib_config(ncclConfig_t *ret);

/* "unhandled system error (2): <NCCL's last error message>". Any thread. Return: @buf. */
const char *nccl_lib_text(const struct nccl_lib *lib, ncclResult_t r, char *buf, size_t bytes);

#endif
