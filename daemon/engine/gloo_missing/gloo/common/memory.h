/*
 * Debian's libgloo-dev (20220518.5b14351) does not have this header, which those of its TCP transport
 * include. It stands for Gloo's: what they say of these types here is how large they are and what
 * to destroy. A libgloo-dev that has the header is preferred (-idirafter).
 */
#ifndef SHARDD_ENGINE_GLOO_MISSING_MEMORY_H
#define SHARDD_ENGINE_GLOO_MISSING_MEMORY_H

#include <memory>

namespace gloo
{

/* The owner of an object that others refer to weakly; only named here. */
template <typename T> class ShareableNonOwningPtr;

/* One who uses the object just now, and keeps it alive. */
template <typename T> class NonOwningPtr final
{
	std::shared_ptr<T> ptr_;
};

/* One who refers to it. */
template <typename T> class WeakNonOwningPtr final
{
	std::weak_ptr<T> ptr_;
};

} // namespace gloo

#endif
