/*
 * A daemon that cannot start tells it to the clients that wait at an inherited socket: they have started it through
 * the service manager, and would see nothing but a connection that nobody answers.
 */
#ifndef SHARDD_REFUSE_H
#define SHARDD_REFUSE_H

#include "config/config.h"
#include "core/fault.h"

/* Answer each call at @socket_fd (listening; consumed) with FAILED_PRECONDITION and the text of @why, until
 * its clients have gone and no other one has come for a moment. @config: whose allow_uids and allow_gids hold; NULL: it
 * cannot be read, and all who may open the socket are told. Blocks for three seconds; gRPC must not run. */
void refuse_clients(int socket_fd, const struct fault *why, const struct config *config);

#endif
