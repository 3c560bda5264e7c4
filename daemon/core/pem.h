/*
 * Files in PEM form: certificates and keys.
 */
#ifndef SHARDD_CORE_PEM_H
#define SHARDD_CORE_PEM_H

#include "core/fault.h"

/* gRPC core reads such files later, and says of one that it cannot use only in its log. @field: the name of
 * what the user has written. Return: 0, or FAULT_INVALID: @path cannot be read, or has no text in PEM
 * form. Any thread. */
int pem_check_file(const char *path, const char *field, struct fault *f);

#endif
