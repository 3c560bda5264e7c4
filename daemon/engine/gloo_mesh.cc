#include "engine/gloo_mesh.hh"

#include <gloo/transport/tcp/context.h>
#include <gloo/transport/tcp/pair.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <condition_variable>
#include <cstring>
#include <mutex>
#include <stdexcept>
#include <system_error>
#include <utility>

namespace tcp = gloo::transport::tcp;

namespace
{

/* Of Gloo's pairs; they use it only in modes that are not used here. */
constexpr std::chrono::milliseconds PAIR_TIMEOUT(30000);

/* Descriptors that are closed at the end. */
class Fds
{
      public:
	explicit Fds(std::vector<int> descriptors) : fds(std::move(descriptors))
	{
	}

	Fds(const Fds &) = delete;
	Fds &operator=(const Fds &) = delete;

	~Fds()
	{
		for (int fd : fds)
			if (fd >= 0)
				::close(fd);
	}

	int operator*() const
	{
		return fds[0];
	}

	std::vector<int> &all()
	{
		return fds;
	}

      private:
	std::vector<int> fds;
};

int mesh_check(int r, const char *what)
{
	if (r < 0)
		throw std::system_error(errno, std::generic_category(), what);
	return r;
}

std::string mesh_why(const std::exception_ptr &cause)
{
	try {
		std::rethrow_exception(cause);
	} catch (const std::exception &e) {
		return gloo_mesh_text(e);
	} catch (...) {
		return "unknown exception";
	}
}

class MeshPair : public tcp::Pair
{
      public:
	/* On Gloo's thread; *fd is taken over. */
	MeshPair(tcp::Context *context, tcp::Device *device, int member, const gloo_mesh_events &e,
		 int *fd)
	    : tcp::Pair(context, device, member, PAIR_TIMEOUT), events(e)
	{
		std::lock_guard<std::mutex> guard(m_);

		leaving = fd_; /* where it listens */
		settle();
		fd_ = *fd;
		*fd = -1;
		try {
			handleConnected();
		} catch (...) {
			::close(fd_);
			fd_ = -1;
			throw;
		}
	}

	void handleEvents(int what) override
	{
		try {
			if (is_open()) {
				tcp::Pair::handleEvents(what);
				check_message();
			}
		} catch (const std::exception &e) {
			fail(e);
		} catch (...) {
			fail(std::runtime_error("unknown exception"));
		}
		report();
	}

	void close() override
	{
		std::lock_guard<std::mutex> guard(m_);

		if (state_ != CLOSED)
			changeState(CLOSED);
	}

	/* On Gloo's thread. */
	void end() noexcept
	{
		std::lock_guard<std::mutex> guard(m_);

		if (state_ != CLOSED)
			changeState(CLOSED);
		settle();
	}

	bool has_failed(std::string &why)
	{
		std::lock_guard<std::mutex> guard(m_);

		if (!ex_)
			return false;
		why = mesh_why(ex_);
		return true;
	}

      protected:
	/* The lock is held, and perhaps that of the context. The socket is shut down, so that
	 * Gloo's thread comes and takes it away. */
	void changeState(state next) noexcept override
	{
		if (next == CLOSED && fd_ >= 0) {
			leaving = fd_;
			fd_ = -1;
			::shutdown(leaving, SHUT_RDWR);
		}
		state_ = next;
		cv_.notify_all();
	}

      private:
	/* On Gloo's thread; the lock is held. */
	void settle() noexcept
	{
		if (leaving < 0)
			return;
		try {
			device_->unregisterDescriptor(leaving, this);
		} catch (...) {
			/* the kernel forgets it when it is closed */
		}
		::close(leaving);
		leaving = -1;
	}

	/* As in Gloo, Gloo's thread does not wait for the lock: it comes again. */
	bool is_open()
	{
		std::unique_lock<std::mutex> guard(m_, std::try_to_lock);

		if (!guard)
			return false;
		if (state_ == CLOSED)
			settle();
		return state_ != CLOSED;
	}

	/* What Gloo drops or would wait for: no member sends it. */
	void check_message()
	{
		std::lock_guard<std::mutex> guard(m_);

		if (state_ == CLOSED || rx_.nread < sizeof(rx_.preamble))
			return;
		if (rx_.getOpcode() != tcp::Op::SEND_UNBOUND_BUFFER)
			throw std::runtime_error("it sent a message of no known kind");
	}

	void fail(const std::exception &e) noexcept
	{
		std::lock_guard<std::mutex> guard(m_);

		if (state_ == CLOSED)
			return;
		try {
			signalException(gloo_mesh_text(e));
		} catch (...) {
			changeState(CLOSED); /* no memory for more */
		}
	}

	std::exception_ptr news()
	{
		std::lock_guard<std::mutex> guard(m_);

		if (state_ != CLOSED || !ex_ || reported)
			return nullptr;
		reported = true;
		return ex_;
	}

	void report() noexcept
	{
		const std::exception_ptr cause = news();

		if (!cause)
			return;
		try {
			events.broke(rank_, mesh_why(cause));
		} catch (...) {
			events.broke(rank_, ""); /* no memory for the text */
		}
	}

	const gloo_mesh_events events;
	int leaving = -1;      /* to be closed by Gloo's thread, which still watches it */
	bool reported = false; /* that it ended */
};

class MeshContext : public tcp::Context
{
      public:
	using tcp::Context::Context;

	/* On Gloo's thread. */
	void add(int member, int *fd, const gloo_mesh_events &events)
	{
		pairs_[member].reset(new MeshPair(this, device_.get(), member, events, fd));
	}

	template <typename Fn> void each(Fn fn)
	{
		for (auto &p : pairs_)
			if (p)
				fn(static_cast<MeshPair &>(*p));
	}

	int first_failed(std::string &why)
	{
		for (int i = 0; i < size; i++)
			if (pairs_[i] && static_cast<MeshPair &>(*pairs_[i]).has_failed(why))
				return i;
		return -1;
	}
};

MeshContext &mesh_context(const std::shared_ptr<tcp::Context> &context)
{
	return static_cast<MeshContext &>(*context);
}

void mesh_add_all(MeshContext &context, std::vector<int> &fds, const gloo_mesh_events &events)
{
	for (size_t i = 0; i < fds.size(); i++) {
		if (fds[i] < 0)
			continue;
		try {
			context.add(static_cast<int>(i), &fds[i], events);
		} catch (const std::exception &e) {
			throw std::runtime_error("member " + std::to_string(i) + ": " +
						 gloo_mesh_text(e));
		}
	}
}

} // namespace

/* A function that Gloo's thread runs when it is asked to; meanwhile it handles nothing else. */
class GlooMesh::Errand : public tcp::Handler
{
      public:
	explicit Errand(tcp::Device &device)
	    : wake({ mesh_check(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK), "eventfd") })
	{
		device.registerDescriptor(*wake, EPOLLIN, this);
	}

	/* Waits; throws what it throws. One thread at a time. */
	void run(const std::function<void()> &what)
	{
		const uint64_t one = 1;
		std::unique_lock<std::mutex> guard(lock);

		fn = &what;
		(void)!::write(*wake, &one, sizeof(one));
		changed.wait(guard, [this] { return !fn; });
		if (error)
			std::rethrow_exception(std::exchange(error, nullptr));
	}

	void handleEvents(int) override
	{
		uint64_t times;
		std::lock_guard<std::mutex> guard(lock);

		(void)!::read(*wake, &times, sizeof(times));
		if (!fn)
			return;
		try {
			(*fn)();
		} catch (...) {
			error = std::current_exception();
		}
		fn = nullptr;
		changed.notify_all();
	}

      private:
	const Fds wake;
	std::mutex lock;
	std::condition_variable changed;
	const std::function<void()> *fn = nullptr; /* until it was run */
	std::exception_ptr error;
};

GlooMesh::GlooMesh(int rank, int size, const tcp::attr &attr, const std::vector<int> &fds,
		   gloo_mesh_events events)
{
	Fds owned(fds);

	device = std::make_shared<tcp::Device>(attr);
	try {
		errand = std::make_unique<Errand>(*device);
		context = std::make_shared<MeshContext>(device, rank, size);
		errand->run([&] { mesh_add_all(mesh_context(context), owned.all(), events); });
	} catch (...) {
		end();
		throw;
	}
}

GlooMesh::~GlooMesh()
{
	end();
}

/* No pair is called after the second errand: what Gloo's thread took from the kernel before the
 * first one it has handled by then. Without a device the handlers are not called either. */
void GlooMesh::end() noexcept
{
	if (context) {
		errand->run([this] { mesh_context(context).each([](MeshPair &p) { p.end(); }); });
		errand->run([] {});
	}
	context.reset();
	device.reset();
}

std::unique_ptr<gloo::transport::UnboundBuffer> GlooMesh::buffer(void *p, size_t bytes)
{
	return context->createUnboundBuffer(p, bytes);
}

void GlooMesh::close() noexcept
{
	mesh_context(context).each([](MeshPair &p) { p.close(); });
}

int GlooMesh::broken(std::string &why)
{
	return mesh_context(context).first_failed(why);
}

void GlooMesh::fence()
{
	errand->run([] {});
}

std::string gloo_mesh_text(const std::exception &e)
{
	std::string text = e.what();
	size_t at = text.find("] ");

	if (text[0] == '[' && at != text.npos && text.find(".cc:") < at)
		text.erase(0, at + 2);
	at = text.find(" [");
	if (at != text.npos)
		text.erase(at, text.find_first_not_of("0123456789", text.find("]:", at) + 2) - at);
	return text;
}
