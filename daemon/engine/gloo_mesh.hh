/*
 * One Gloo context of connections that were made elsewhere (gloo_meet.h), on a thread of Gloo's.
 *
 * Gloo's own pairs are not fit for a daemon, so they are derived from here:
 *
 * - They listen on ports where the first who comes is taken for the member. Ours get a connected
 *   socket. The port that Gloo opens for each is closed on Gloo's thread, before it can look at it.
 * - What their thread throws (a member that does not keep to Gloo's protocol, a socket that fails
 *   just then, no memory) ends the process. Here it ends the pair.
 * - A thread that closes a pair waits for Gloo's thread while it holds the pair's lock and, if it
 *   closes because a send failed, that of the context. Gloo's thread may be waiting for that one.
 *   Here only Gloo's thread takes a socket away; others shut it down, which makes Gloo's thread
 *   come.
 * - A receive that is under way when its pair ends is forgotten. So the owner is told of the end.
 */
#ifndef SHARDD_ENGINE_GLOO_MESH_HH
#define SHARDD_ENGINE_GLOO_MESH_HH

#include <gloo/transport/tcp/context.h>
#include <gloo/transport/tcp/device.h>
#include <gloo/transport/unbound_buffer.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

/* What happens on Gloo's thread; it may neither block nor throw. */
struct gloo_mesh_events {
	/* The connection to @member has ended, and not by close: once. */
	std::function<void(int member, const std::string &why)> broke;
};

class GlooMesh
{
      public:
	/* @fds: to each member, -1 for the own one; they are the mesh's from now on, also if it
	 * throws. @attr: an address of this machine that gloo::...::CreateDeviceAttr has found. */
	GlooMesh(int rank, int size, const gloo::transport::tcp::attr &attr,
		 const std::vector<int> &fds, gloo_mesh_events events);
	/* Waits for Gloo's thread. Not on that thread; all buffers must be gone. */
	~GlooMesh();

	GlooMesh(const GlooMesh &) = delete;
	GlooMesh &operator=(const GlooMesh &) = delete;

	std::unique_ptr<gloo::transport::UnboundBuffer> buffer(void *p, size_t bytes);

	/* End all connections; what was written still arrives. Any thread; does not block. */
	void close() noexcept;

	/* A connection that has ended, and not by close. Return: its member, or -1. */
	int broken(std::string &why);

	/* What Gloo's thread does now it has done when this returns. Not on that thread. */
	void fence();

      private:
	class Errand;

	void end() noexcept;

	std::unique_ptr<Errand> errand;
	std::shared_ptr<gloo::transport::tcp::Device> device; /* Gloo's thread */
	std::shared_ptr<gloo::transport::tcp::Context> context;
};

/* Without the place in Gloo's source, "[file.cc:line] ", and the address (Gloo swaps the bytes of the
 * port). */
std::string gloo_mesh_text(const std::exception &e);

#endif
