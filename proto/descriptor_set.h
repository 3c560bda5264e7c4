/*
 * The descriptors of all services on the socket, as protoc writes them: a
 * google.protobuf.FileDescriptorSet. The build makes it of the .proto files (embed.cmake).
 */
#ifndef SHARDD_DESCRIPTOR_SET_H
#define SHARDD_DESCRIPTOR_SET_H

#include <stddef.h>
#include <stdint.h>

extern const uint8_t descriptor_set[];
extern const size_t descriptor_set_bytes;

#endif
