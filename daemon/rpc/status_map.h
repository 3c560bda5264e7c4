/* Our result to the wire's: the only place that knows both. */
#ifndef SHARDD_RPC_STATUS_MAP_H
#define SHARDD_RPC_STATUS_MAP_H

#include <stddef.h>
#include <stdint.h>

#include "core/fault.h"

/* The gRPC status code of a fault. Any thread. */
int status_map_code(enum fault_code code);

/* Pack google.rpc.Status with one shardd.v1.ErrorInfo for grpc-status-details-bin.
 * @ret: malloc'ed, the caller's. Return: 0 or -ENOMEM. Any thread. */
int status_map_details(const struct fault *f, uint8_t **ret, size_t *ret_bytes);

/* Pack the same ErrorInfo by itself. @bytes: 1024 always are enough. Return: how many.
 * Any thread. */
uint32_t status_map_info(const struct fault *f, uint8_t *to, size_t bytes);

#endif
