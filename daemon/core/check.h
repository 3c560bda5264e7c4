/*
 * CHECK: states conditions that only a bug of ours can break; stays on in release builds. Input
 * from clients is never CHECKed; it gets an `if`.
 */
#ifndef SHARDD_CORE_CHECK_H
#define SHARDD_CORE_CHECK_H

#include <stddef.h>
#include <stdint.h>

#define CHECK(cond) ((cond) ? (void)0 : check_failed(#cond, __FILE__, __LINE__, __func__))

/* Behind a switch over all values of an enum. */
#define CHECK_NOT_REACHED() check_failed("not reached", __FILE__, __LINE__, __func__)

/* Print the broken condition to stderr and abort. Any thread. */
_Noreturn void check_failed(const char *cond, const char *file, int line, const char *func);

/* Objects that come back through a void pointer carry a magic number first. */
#define MAGIC_CHECK(ptr, number) CHECK((ptr) && (ptr)->magic == (number))

#define ARRAY_SIZE(a)                   (sizeof(a) / sizeof((a)[0]))
#define CONTAINER_OF(ptr, type, member) ((type *)((char *)(ptr)-offsetof(type, member)))

#endif
