/* The life of a communicator over Gloo: it meets, ends with a reason, and says good-bye. */
#include "engine/gloo_shim.hh"

#include "engine/gloo_meet.h"

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <stdexcept>

using std::chrono::milliseconds;

namespace
{

using Clock = std::chrono::steady_clock;

/* What a member says at last, into the others' sentinels. */
enum : uint32_t {
	MARK_NONE = 0,
	MARK_BYE = 1,
	MARK_BLAME = 2, /* it ends because of the member whose number is added to this */
};

/* The lock is held. */
void shim_wake_all(gloo_shim *s)
{
	for (auto *b : s->waiting) {
		b->abortWaitRecv();
		b->abortWaitSend();
	}
	if (s->sentinel)
		s->sentinel->abortWaitRecv();
}

/* To all members but one. Does not block; one that has left is not told, and does not keep it from
 * the others. Return: how many are told. */
int shim_send_mark(gloo_shim *s, uint32_t mark, int except)
{
	int sent = 0;

	s->mark = mark;
	for (int k = 1; k < s->options.size; k++) {
		if (gloo_shim_after(s, k) == except)
			continue;
		try {
			s->farewell->send(gloo_shim_after(s, k), GLOO_SHIM_SENTINEL, 0,
					  sizeof(s->mark));
			sent++;
		} catch (...) {
			/* it has left */
		}
	}
	return sent;
}

} // namespace

bool gloo_shim_die(gloo_shim *s, const gloo_shim_cause &cause)
{
	{
		std::lock_guard<std::mutex> guard(s->lock);

		if (s->dead)
			return false;
		s->dead = true;
		s->cause = cause.text;
		shim_wake_all(s);
		if (!s->mesh || s->closing)
			return true;
	}
	if (cause.member >= 0 && s->farewell)
		shim_send_mark(s, MARK_BLAME + cause.member, cause.member);
	s->mesh->close();
	return true;
}

void gloo_shim_throw_if_dead(gloo_shim *s)
{
	std::lock_guard<std::mutex> guard(s->lock);

	if (s->dead)
		throw std::runtime_error(s->cause);
}

namespace
{

/* The connection to @member ended. */
gloo_shim_cause shim_explain(const gloo_shim *s, int member, const std::string &why)
{
	const uint32_t mark = s->marks[member];
	const uint32_t blamed = mark - MARK_BLAME;

	if (mark == MARK_BYE)
		return { "member " + std::to_string(member) + " has left", member };
	if (mark != MARK_NONE && blamed < static_cast<uint32_t>(s->options.size))
		return { "member " + std::to_string(member) + " reports that member " +
				 std::to_string(blamed) + " is gone or does not answer",
			 static_cast<int>(blamed) };
	return { "member " + std::to_string(member) + ": " + why, member };
}

/* Return: whether the owner does not hear of it: the communicator is being freed. */
bool shim_is_expected(gloo_shim *s, int member)
{
	std::lock_guard<std::mutex> guard(s->lock);

	if (s->closing && s->marks[member] != MARK_BYE && s->sentinel)
		s->sentinel->abortWaitRecv(); /* its good-bye does not come any more */
	return s->closing;
}

/* Gloo's thread. */
void shim_on_broke(gloo_shim *s, int member, const std::string &why) noexcept
{
	try {
		if (shim_is_expected(s, member))
			return;
		const gloo_shim_cause cause = shim_explain(s, member, why);

		if (gloo_shim_die(s, cause) && s->options.died)
			s->options.died(s->options.userdata, cause.text.c_str());
	} catch (...) {
		gloo_shim_abort(s);
		if (s->options.died)
			s->options.died(s->options.userdata, "no memory");
	}
}

bool shim_is_stopped(void *userdata)
{
	auto *s = static_cast<gloo_shim *>(userdata);
	std::lock_guard<std::mutex> guard(s->lock);

	return s->dead;
}

std::vector<int> shim_meet(gloo_shim *s, const gloo::transport::tcp::attr &attr)
{
	gloo_meet_options options = {};
	std::vector<int> fds(s->options.size, -1);
	char why[256] = "";

	options.address = reinterpret_cast<const sockaddr *>(&attr.ai_addr);
	options.address_bytes = attr.ai_addrlen;
	options.prefix = s->prefix.c_str();
	options.size = s->options.size;
	options.rank = s->options.rank;
	options.timeout_ms = s->options.connect_ms;
	options.store = s->options.store;
	options.stopped = shim_is_stopped;
	options.userdata = s;
	if (s->options.meet(&options, fds.data(), why, sizeof(why))) {
		gloo_shim_throw_if_dead(s);
		throw std::runtime_error(why);
	}
	return fds;
}

void shim_open(gloo_shim *s)
{
	gloo::transport::tcp::attr wanted(s->address.c_str());

	wanted.iface = s->iface;
	const auto attr = gloo::transport::tcp::CreateDeviceAttr(wanted);
	const std::vector<int> fds = shim_meet(s, attr);
	s->marks.resize(s->options.size, MARK_NONE);
	auto mesh = std::make_unique<GlooMesh>(
		s->options.rank, s->options.size, attr, fds,
		gloo_mesh_events{ [s](int member, const std::string &why) {
			shim_on_broke(s, member, why);
		} });
	auto sentinel = mesh->buffer(s->marks.data(), s->marks.size() * sizeof(s->marks[0]));
	s->farewell = mesh->buffer(&s->mark, sizeof(s->mark));
	std::lock_guard<std::mutex> guard(s->lock);
	s->mesh = std::move(mesh);
	s->sentinel = std::move(sentinel);
	if (s->dead)
		throw std::runtime_error(s->cause);
}

void shim_connect(gloo_shim *s)
{
	if (s->options.size == 1)
		return;
	shim_open(s);
	for (int i = 0; i < s->options.size; i++)
		if (i != s->options.rank)
			s->sentinel->recv(i, GLOO_SHIM_SENTINEL, i * sizeof(s->marks[0]),
					  sizeof(s->marks[0]));
	s->connected = true;
}

/* No socket closes while a member still needs it: those that have said it do not. */
void shim_say_bye(gloo_shim *s, milliseconds grace)
{
	const Clock::time_point end = Clock::now() + grace;
	const auto rest = [=] {
		return std::max(std::chrono::duration_cast<milliseconds>(end - Clock::now()),
				milliseconds(1));
	};

	for (int sent = shim_send_mark(s, MARK_BYE, s->options.rank); sent > 0; sent--)
		s->farewell->waitSend(nullptr, rest());
	for (int i = 1; i < s->options.size; i++)
		if (!s->sentinel->waitRecv(nullptr, rest()))
			return;
}

/* Return: whether the others want to be told. */
bool shim_begin_close(gloo_shim *s)
{
	std::lock_guard<std::mutex> guard(s->lock);

	s->closing = true;
	return s->connected && !s->dead;
}

void shim_end(gloo_shim *s)
{
	if (!s->mesh)
		return;
	{
		std::lock_guard<std::mutex> guard(s->lock);

		s->sentinel.reset();
	}
	s->farewell.reset();
	s->mesh.reset();
}

/* A connection that ended says more than what it threw. */
gloo_shim_cause shim_cause(gloo_shim *s, const std::string &thrown)
{
	std::string why;
	const int member = s->mesh ? s->mesh->broken(why) : -1;

	return member < 0 ? gloo_shim_cause{ thrown, -1 } : shim_explain(s, member, why);
}

} // namespace

int gloo_shim_fail(gloo_shim *s, gloo_shim_error *error, const std::string &why, int code)
{
	gloo_shim_die(s, shim_cause(s, why));
	std::lock_guard<std::mutex> guard(s->lock);
	snprintf(error->text, sizeof(error->text), "%s", s->cause.c_str());
	return code;
}

int gloo_shim_new(const struct gloo_shim_options *options, struct gloo_shim **ret)
{
	try {
		auto s = std::make_unique<gloo_shim>();

		s->options = *options;
		s->iface = options->iface ? options->iface : "";
		s->address = options->address ? options->address : "";
		s->prefix = options->prefix;
		*ret = s.release();
		return 0;
	} catch (...) {
		return -ENOMEM;
	}
}

int gloo_shim_connect(struct gloo_shim *s, struct gloo_shim_error *error)
{
	return gloo_shim_guard(s, error, [=] { shim_connect(s); });
}

void gloo_shim_cancel(struct gloo_shim *s)
{
	try {
		std::lock_guard<std::mutex> guard(s->lock);

		if (s->dead || s->mesh)
			return;
		s->cause = "the communicator is not wanted any more";
		s->dead = true; /* nothing waits in a buffer: there is no mesh */
	} catch (...) {
		/* as in gloo_shim_abort; the members are met until it is late */
	}
}

void gloo_shim_abort(struct gloo_shim *s)
{
	try {
		gloo_shim_die(s, { "the communicator was aborted", -1 });
	} catch (...) {
		/* only a mutex or a string can throw here, and then nothing is left to do */
	}
}

void gloo_shim_free(struct gloo_shim *s, unsigned grace_ms)
{
	if (!s)
		return;
	try {
		const bool polite = shim_begin_close(s);

		if (s->mesh)
			s->mesh->fence(); /* who has not seen that it closes */
		if (polite)
			shim_say_bye(s, milliseconds(grace_ms));
	} catch (...) {
		/* somebody was faster: the connection has ended */
	}
	shim_end(s);
	delete s;
}
