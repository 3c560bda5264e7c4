/* A communicator over Gloo: what gloo_shim.cc, its life, and gloo_shim_ops.cc, its operations, share. */
#ifndef SHARDD_ENGINE_GLOO_SHIM_HH
#define SHARDD_ENGINE_GLOO_SHIM_HH

#include "engine/gloo_mesh.hh"
#include "engine/gloo_shim.h"

#include <cerrno>
#include <chrono>
#include <memory>
#include <mutex>
#include <new>
#include <set>
#include <string>
#include <vector>

constexpr uint64_t GLOO_SHIM_SENTINEL = 0; /* slot; operations use those above */

struct gloo_shim {
	std::string iface, address, prefix;
	gloo_shim_options options;
	std::unique_ptr<GlooMesh> mesh;
	std::vector<uint32_t> marks; /* the sentinel receives into it; Gloo's thread */
	uint32_t mark = 0;           /* that is sent: gloo_shim.cc */
	std::unique_ptr<gloo::transport::UnboundBuffer> farewell; /* of @mark */
	std::vector<char> staging;
	uint64_t slot = GLOO_SHIM_SENTINEL;
	uint64_t place = 0; /* of the next operation */
	bool connected = false;

	std::mutex lock;
	/* under the lock */
	std::unique_ptr<gloo::transport::UnboundBuffer> sentinel;
	std::set<gloo::transport::UnboundBuffer *> waiting; /* of the operation under way */
	std::string cause;                                  /* of the end */
	bool dead = false;
	bool closing = false;
};

/* The members after and before this one, so that not all turn to the same one at once. */
inline int gloo_shim_after(const gloo_shim *s, int k)
{
	return (s->options.rank + k) % s->options.size;
}

inline int gloo_shim_before(const gloo_shim *s, int k)
{
	return (s->options.rank + s->options.size - k) % s->options.size;
}

/* Why it ends. */
struct gloo_shim_cause {
	std::string text;
	int member = -1; /* whose fault it is; -1: nobody's */
};

/* Return: whether it lived until now. Any thread; does not block. */
bool gloo_shim_die(gloo_shim *s, const gloo_shim_cause &cause);
void gloo_shim_throw_if_dead(gloo_shim *s);
/* An operation of it has thrown @why: it dies, and @error says what of. Return: @code. */
int gloo_shim_fail(gloo_shim *s, gloo_shim_error *error, const std::string &why, int code);

/* Run @fn; no exception leaves. */
template <typename Fn> int gloo_shim_guard(gloo_shim *s, gloo_shim_error *error, Fn fn) noexcept
{
	try {
		gloo_shim_throw_if_dead(s);
		fn();
		return 0;
	} catch (const std::bad_alloc &) {
		return gloo_shim_fail(s, error, "no memory", -ENOMEM);
	} catch (const std::exception &e) {
		return gloo_shim_fail(s, error, gloo_mesh_text(e), -ECONNABORTED);
	} catch (...) {
		return gloo_shim_fail(s, error, "unknown exception", -ECONNABORTED);
	}
}

#endif
