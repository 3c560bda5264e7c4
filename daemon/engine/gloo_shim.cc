#include "engine/gloo_shim.h"

#include <gloo/context.h>
#include <gloo/transport/tcp/device.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstring>
#include <memory>
#include <mutex>
#include <set>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

using std::chrono::milliseconds;
using Bytes = std::vector<uint64_t>;
using Unbound = gloo::transport::UnboundBuffer;

namespace
{

constexpr milliseconds FOREVER = std::chrono::hours(24 * 365 * 10);
constexpr milliseconds SLICE(100);  /* of a wait for a key, to see an abort */
constexpr uint64_t CHUNK = 1 << 20; /* of a reduction */
constexpr uint64_t CHUNK_MIN = 64 << 10;
constexpr uint64_t STAGING = 64 << 20; /* beyond it chunks become smaller */
constexpr uint64_t DIRECT = 256 << 10; /* up to here one round counts more than bytes */
constexpr uint64_t ROWS_AHEAD = 4;     /* chunks offered to each member before they are taken */
constexpr uint64_t SENTINEL = 0;       /* slot; operations use those above */

/* One pair for each other member. */
class Mesh : public gloo::Context
{
      public:
	Mesh(int member, int members) : gloo::Context(member, members)
	{
	}

	void open(const std::string &iface, const std::string &address, milliseconds timeout)
	{
		gloo::transport::tcp::attr attr(address.c_str());

		attr.iface = iface;
		device_ = gloo::transport::tcp::CreateDevice(attr);
		transportContext_ = device_->createContext(rank, size);
		/* Gloo waits five times as long for a pair; 0 is for ever */
		transportContext_->setTimeout(std::max(timeout / 5, milliseconds(1)));
		for (int i = 0; i < size; i++)
			if (i != rank)
				transportContext_->createPair(i);
	}
};

} // namespace

struct gloo_shim {
	std::string iface, address, prefix;
	gloo_shim_options options;
	milliseconds wait;
	std::shared_ptr<Mesh> mesh;
	std::vector<uint8_t> marks; /* the sentinel receives into it */
	std::vector<char> staging;
	uint64_t slot = SENTINEL;
	std::thread watcher;
	bool connected = false;

	std::mutex lock;
	/* under the lock */
	std::condition_variable changed;
	std::unique_ptr<Unbound> sentinel;
	std::set<Unbound *> waiting; /* of the operation under way */
	std::string cause;           /* of the end */
	bool dead = false;
	bool closing = false;
	bool watched = true; /* the watcher has not ended */
	int byes = 0;
};

namespace
{

/* Without the place in Gloo's source, "[file.cc:line] ". */
std::string shim_text(const std::exception &e)
{
	const std::string text = e.what();
	const size_t at = text.find("] ");

	return text[0] == '[' && at != text.npos && text.find(".cc:") < at ? text.substr(at + 2)
									   : text;
}

/* The lock is held. */
void shim_wake_all(gloo_shim *s)
{
	for (Unbound *b : s->waiting) {
		b->abortWaitRecv();
		b->abortWaitSend();
	}
	if (s->sentinel)
		s->sentinel->abortWaitRecv();
	s->changed.notify_all();
}

/* Return: whether it lived until now. */
bool shim_die(gloo_shim *s, const std::string &cause)
{
	std::lock_guard<std::mutex> guard(s->lock);
	bool lived = !s->dead;

	s->dead = true;
	if (s->cause.empty())
		s->cause = cause;
	shim_wake_all(s);
	return lived;
}

void shim_throw_if_dead(gloo_shim *s)
{
	std::lock_guard<std::mutex> guard(s->lock);

	if (s->dead)
		throw std::runtime_error(s->cause);
}

/* Memory of an operation. When it is destroyed Gloo no longer touches the memory. */
class Buffer
{
      public:
	Buffer(gloo_shim *shim, const void *p, uint64_t bytes)
	    : s(shim), b(s->mesh->createUnboundBuffer(const_cast<void *>(p), bytes))
	{
		std::lock_guard<std::mutex> guard(s->lock);

		if (s->dead)
			throw std::runtime_error(s->cause);
		s->waiting.insert(b.get());
	}

	Buffer(const Buffer &) = delete;
	Buffer &operator=(const Buffer &) = delete;

	~Buffer()
	{
		std::lock_guard<std::mutex> guard(s->lock);

		s->waiting.erase(b.get());
	}

	void send(int to, uint64_t slot, uint64_t offset, uint64_t bytes)
	{
		b->send(to, slot, offset, bytes);
	}

	void recv(int from, uint64_t slot, uint64_t offset, uint64_t bytes)
	{
		b->recv(from, slot, offset, bytes);
	}

	void wait_sends(uint64_t n)
	{
		while (n-- > 0) {
			shim_throw_if_dead(s);
			if (!b->waitSend(nullptr, s->wait))
				shim_throw_if_dead(s);
		}
	}

	void wait_recvs(uint64_t n)
	{
		while (n-- > 0) {
			shim_throw_if_dead(s);
			if (!b->waitRecv(nullptr, s->wait))
				shim_throw_if_dead(s);
		}
	}

      private:
	gloo_shim *s;
	std::unique_ptr<Unbound> b;
};

/* The members after and before this one, so that not all turn to the same one at once. */
int shim_after(const gloo_shim *s, int k)
{
	return (s->options.rank + k) % s->options.size;
}

int shim_before(const gloo_shim *s, int k)
{
	return (s->options.rank + s->options.size - k) % s->options.size;
}

/* Where each member's part begins, and the end of all. */
Bytes shim_offsets(const Bytes &bytes)
{
	Bytes at(bytes.size() + 1, 0);

	for (size_t i = 0; i < bytes.size(); i++)
		at[i + 1] = at[i] + bytes[i];
	return at;
}

/* ------------------------------------------------------------------ operations */

void shim_gather(gloo_shim *s, const void *send, void *recv, const Bytes &bytes)
{
	const int n = s->options.size, rank = s->options.rank;
	const Bytes at = shim_offsets(bytes);
	char *own = static_cast<char *>(recv) + at[rank];
	const uint64_t slot = ++s->slot;
	uint64_t sends = 0, recvs = 0;
	Buffer to(s, recv, at[n]), from(s, send ? send : own, bytes[rank]);

	for (int k = 1; k < n; k++)
		if (bytes[shim_before(s, k)] > 0) {
			int peer = shim_before(s, k);

			to.recv(peer, slot, at[peer], bytes[peer]);
			recvs++;
		}
	for (int k = 1; k < n && bytes[rank] > 0; k++, sends++)
		from.send(shim_after(s, k), slot, 0, bytes[rank]);
	if (send && send != own)
		memcpy(own, send, bytes[rank]);
	to.wait_recvs(recvs);
	from.wait_sends(sends);
}

/* A reduce-scatter: the parts of all members, cut into chunks; row r is the r-th chunk of each. */
class Reduction
{
      public:
	Reduction(gloo_shim *shim, const void *send, void *recv, const Bytes &parts,
		  const gloo_shim_fold *f)
	    : s(shim), n(s->options.size), rank(s->options.rank),
	      data(static_cast<const char *>(send)), out(static_cast<char *>(recv)), bytes(parts),
	      at(shim_offsets(parts)), fold(f), chunk(size_chunk(n)), slot(++s->slot),
	      source(s, send, at[n]), stage{ stage_of(0), stage_of(1) }
	{
	}

	void run()
	{
		const uint64_t most = *std::max_element(bytes.begin(), bytes.end());
		const uint64_t rows = (most + chunk - 1) / chunk;

		post_recvs(0);
		post_recvs(1);
		for (uint64_t row = 0; row < ROWS_AHEAD; row++)
			post_sends(row);
		for (uint64_t row = 0; row < rows; row++) {
			if (piece(rank, row) > 0) {
				stage[row % 2]->wait_recvs(n - 1);
				add(row);
			}
			post_recvs(row + 2);
			source.wait_sends(sends[row % ROWS_AHEAD]);
			post_sends(row + ROWS_AHEAD);
		}
	}

      private:
	static uint64_t size_chunk(int n)
	{
		uint64_t fits = STAGING / (2 * static_cast<uint64_t>(n));

		return std::max(CHUNK_MIN, std::min(CHUNK, fits / CHUNK_MIN * CHUNK_MIN));
	}

	/* No larger than what is received, so that small operations need little memory. */
	uint64_t stride() const
	{
		return std::min(chunk, bytes[rank]);
	}

	std::unique_ptr<Buffer> stage_of(unsigned i)
	{
		const uint64_t half = stride() * (n - 1);

		if (s->staging.size() < 2 * half)
			s->staging.resize(2 * half);
		return std::make_unique<Buffer>(s, s->staging.data() + i * half, half);
	}

	uint64_t piece(int member, uint64_t row) const
	{
		const uint64_t begin = row * chunk;

		return begin < bytes[member] ? std::min(chunk, bytes[member] - begin) : 0;
	}

	/* Place of a member's chunk in the stage. */
	uint64_t place(int member) const
	{
		return (member < rank ? member : member - 1) * stride();
	}

	void post_recvs(uint64_t row)
	{
		if (piece(rank, row) == 0)
			return;
		for (int k = 1; k < n; k++)
			stage[row % 2]->recv(shim_before(s, k), slot, place(shim_before(s, k)),
					     piece(rank, row));
	}

	void post_sends(uint64_t row)
	{
		uint64_t &count = sends[row % ROWS_AHEAD];

		count = 0;
		for (int k = 1; k < n; k++) {
			int to = shim_after(s, k);

			if (piece(to, row) == 0)
				continue;
			source.send(to, slot, at[to] + row * chunk, piece(to, row));
			count++;
		}
	}

	void add(uint64_t row)
	{
		const char *staged = s->staging.data() + (row % 2) * stride() * (n - 1);
		std::vector<const void *> in(n);

		for (int i = 0; i < n; i++)
			in[i] = i == rank ? data + at[rank] + row * chunk : staged + place(i);
		fold->fn(fold->userdata, out + row * chunk, in.data(),
			 piece(rank, row) / fold->element);
	}

	gloo_shim *s;
	const int n, rank;
	const char *data;
	char *out;
	const Bytes &bytes;
	const Bytes at;
	const gloo_shim_fold *fold;
	const uint64_t chunk, slot;
	uint64_t sends[ROWS_AHEAD];
	Buffer source;
	std::unique_ptr<Buffer> stage[2];
};

void shim_all_reduce_direct(gloo_shim *s, void *data, uint64_t count, const gloo_shim_fold *fold)
{
	const int n = s->options.size;
	const uint64_t bytes = count * fold->element;
	std::vector<char> all(n * bytes);
	std::vector<const void *> in(n);

	shim_gather(s, data, all.data(), Bytes(n, bytes));
	for (int i = 0; i < n; i++)
		in[i] = all.data() + i * bytes;
	fold->fn(fold->userdata, data, in.data(), count);
}

/* @total units of @unit bytes, cut into a part for each member. */
Bytes shim_cut(const gloo_shim *s, uint64_t total, uint64_t unit)
{
	const int n = s->options.size;
	const uint64_t part = (total + n - 1) / n;
	Bytes bytes(n);

	for (int i = 0; i < n; i++)
		bytes[i] = std::min(part, total - std::min(total, i * part)) * unit;
	return bytes;
}

void shim_all_reduce(gloo_shim *s, void *data, uint64_t count, const gloo_shim_fold *fold)
{
	const Bytes parts = shim_cut(s, count, fold->element);

	if (count * fold->element * s->options.size <= DIRECT) {
		shim_all_reduce_direct(s, data, count, fold);
		return;
	}
	Reduction(s, data, static_cast<char *>(data) + shim_offsets(parts)[s->options.rank], parts,
		  fold)
		.run();
	shim_gather(s, nullptr, data, parts);
}

/* The root gives each member its part, or each everything. */
void shim_scatter(gloo_shim *s, void *data, const Bytes &bytes, int root, bool whole)
{
	const Bytes at = shim_offsets(bytes);
	const int n = s->options.size, rank = s->options.rank;
	const uint64_t slot = ++s->slot;
	Buffer b(s, data, at[n]);
	uint64_t sends = 0;

	if (rank != root) {
		if (whole || bytes[rank] > 0) {
			b.recv(root, slot, whole ? 0 : at[rank], whole ? at[n] : bytes[rank]);
			b.wait_recvs(1);
		}
		return;
	}
	for (int k = 1; k < n; k++) {
		int to = shim_after(s, k);

		if (!whole && bytes[to] == 0)
			continue;
		b.send(to, slot, whole ? 0 : at[to], whole ? at[n] : bytes[to]);
		sends++;
	}
	b.wait_sends(sends);
}

/* Large data: the root sends it once, in parts, and the members pass the parts on. */
void shim_broadcast(gloo_shim *s, void *data, uint64_t bytes, int root)
{
	const Bytes parts = shim_cut(s, bytes, 1);
	const bool whole = bytes <= DIRECT || s->options.size == 2;

	shim_scatter(s, data, parts, root, whole);
	if (!whole)
		shim_gather(s, nullptr, data, parts);
}

/* ---------------------------------------------------------------- life of a context */

void shim_close_pairs(gloo_shim *s)
{
	for (int i = 0; i < s->options.size; i++) {
		if (i == s->options.rank)
			continue;
		try {
			s->mesh->getPair(i)->close();
		} catch (...) {
			/* the others are closed all the same */
		}
	}
}

/* Return: why it ended; "": it was told to. */
std::string shim_wait_for_end(gloo_shim *s)
{
	try {
		while (s->sentinel->waitRecv(nullptr, FOREVER)) {
			std::lock_guard<std::mutex> guard(s->lock);

			s->byes++;
			s->changed.notify_all();
		}
		return "";
	} catch (const std::exception &e) {
		return shim_text(e);
	} catch (...) {
		return "unknown exception";
	}
}

bool shim_leave_watch(gloo_shim *s)
{
	std::lock_guard<std::mutex> guard(s->lock);

	if (s->dead || !s->closing)
		return false;
	s->watched = false;
	s->changed.notify_all();
	return true;
}

void shim_watch(gloo_shim *s)
{
	const std::string why = shim_wait_for_end(s);

	if (shim_leave_watch(s))
		return;
	const bool news = shim_die(s, why);
	shim_close_pairs(s);
	if (news && s->options.died)
		s->options.died(s->options.userdata, why.c_str());
}

std::string shim_key(const gloo_shim *s, int rank)
{
	return s->prefix + "/" + std::to_string(rank);
}

void shim_publish(gloo_shim *s)
{
	std::vector<char> all;
	int r;

	for (int i = 0; i < s->options.size; i++) {
		if (i == s->options.rank)
			continue;
		const std::vector<char> one = s->mesh->getPair(i)->address().bytes();

		all.insert(all.end(), one.begin(), one.end());
	}
	r = s->options.set(s->options.store, shim_key(s, s->options.rank).c_str(), all.data(),
			   all.size());
	if (r)
		throw std::runtime_error(std::string("the addresses cannot be published: ") +
					 strerror(-r));
}

using Deadline = std::chrono::steady_clock::time_point;

/* What member @peer has published for us. */
std::vector<char> shim_look_up(gloo_shim *s, int peer, Deadline end)
{
	const size_t one = gloo::transport::Address::kMaxByteSize;
	std::vector<char> all(one * s->options.size);
	const std::string key = shim_key(s, peer);
	long got = -ETIMEDOUT;

	while (got == -ETIMEDOUT) {
		shim_throw_if_dead(s);
		if (std::chrono::steady_clock::now() > end)
			throw std::runtime_error("member " + std::to_string(peer) +
						 " did not publish its addresses in time");
		got = s->options.get(s->options.store, key.c_str(),
				     static_cast<unsigned>(SLICE.count()), all.data(), all.size());
	}
	if (got < 0)
		throw std::runtime_error("the addresses of member " + std::to_string(peer) +
					 " cannot be read: " + strerror(static_cast<int>(-got)));
	if (got == 0 || got % (s->options.size - 1) != 0)
		throw std::runtime_error("the addresses of member " + std::to_string(peer) +
					 " are malformed");
	const size_t bytes = got / (s->options.size - 1);
	const size_t index = s->options.rank - (s->options.rank > peer);
	return std::vector<char>(all.begin() + index * bytes, all.begin() + (index + 1) * bytes);
}

void shim_open(gloo_shim *s)
{
	auto mesh = std::make_shared<Mesh>(s->options.rank, s->options.size);

	mesh->open(s->iface, s->address, milliseconds(s->options.connect_ms));
	std::lock_guard<std::mutex> guard(s->lock);
	if (s->dead)
		throw std::runtime_error(s->cause);
	s->mesh = mesh;
	s->marks.resize(s->options.size);
	s->sentinel = s->mesh->createUnboundBuffer(s->marks.data(), s->marks.size());
	s->watcher = std::thread(shim_watch, s);
}

void shim_connect(gloo_shim *s)
{
	const Deadline end = std::chrono::steady_clock::now() + milliseconds(s->options.connect_ms);
	const int n = s->options.size;

	if (n == 1)
		return;
	shim_open(s);
	shim_publish(s);
	for (int i = 0; i < n; i++)
		if (i != s->options.rank)
			s->mesh->getPair(i)->connect(shim_look_up(s, i, end));
	shim_throw_if_dead(s);
	for (int i = 0; i < n; i++)
		if (i != s->options.rank)
			s->sentinel->recv(i, SENTINEL, i, 1);
	s->connected = true;
}

/* Each member's mark goes to its place in the others' sentinels. One that has left is not told, and
 * does not keep it from the others. */
void shim_say_bye(gloo_shim *s, milliseconds grace)
{
	uint8_t mark = 1;
	auto b = s->mesh->createUnboundBuffer(&mark, 1);
	int sent = 0;

	for (int k = 1; k < s->options.size; k++) {
		try {
			b->send(shim_after(s, k), SENTINEL, 0, 1);
			sent++;
		} catch (...) {
			/* it has left */
		}
	}
	try {
		while (sent-- > 0)
			b->waitSend(nullptr, grace);
	} catch (...) {
		/* it leaves just now */
	}
	std::unique_lock<std::mutex> guard(s->lock);
	s->changed.wait_for(guard, grace, [s] {
		return s->byes >= s->options.size - 1 || !s->watched || s->dead;
	});
}

bool shim_begin_close(gloo_shim *s)
{
	std::lock_guard<std::mutex> guard(s->lock);

	s->closing = true;
	return s->connected && !s->dead;
}

void shim_end_watch(gloo_shim *s)
{
	{
		std::lock_guard<std::mutex> guard(s->lock);

		if (s->sentinel)
			s->sentinel->abortWaitRecv();
	}
	if (s->watcher.joinable())
		s->watcher.join();
}

int shim_fail(gloo_shim *s, gloo_shim_error *error, const std::string &why, int code)
{
	shim_die(s, why);
	std::lock_guard<std::mutex> guard(s->lock);
	snprintf(error->text, sizeof(error->text), "%s", s->cause.c_str());
	return code;
}

/* Run @fn; no exception leaves. */
template <typename Fn> int shim_guard(gloo_shim *s, gloo_shim_error *error, Fn fn) noexcept
{
	try {
		shim_throw_if_dead(s);
		fn();
		return 0;
	} catch (const std::bad_alloc &) {
		return shim_fail(s, error, "no memory", -ENOMEM);
	} catch (const std::exception &e) {
		return shim_fail(s, error, shim_text(e), -ECONNABORTED);
	} catch (...) {
		return shim_fail(s, error, "unknown exception", -ECONNABORTED);
	}
}

} // namespace

int gloo_shim_new(const struct gloo_shim_options *options, struct gloo_shim **ret)
{
	try {
		auto s = std::make_unique<gloo_shim>();

		s->options = *options;
		s->iface = options->iface ? options->iface : "";
		s->address = options->address ? options->address : "";
		s->prefix = options->prefix;
		s->wait = options->wait_ms ? milliseconds(options->wait_ms) : FOREVER;
		*ret = s.release();
		return 0;
	} catch (...) {
		return -ENOMEM;
	}
}

int gloo_shim_connect(struct gloo_shim *s, struct gloo_shim_error *error)
{
	return shim_guard(s, error, [=] { shim_connect(s); });
}

void gloo_shim_abort(struct gloo_shim *s)
{
	try {
		shim_die(s, "the communicator was aborted");
	} catch (...) {
		/* only a mutex or a string can throw here, and then nothing is left to do */
	}
}

void gloo_shim_free(struct gloo_shim *s, unsigned grace_ms)
{
	if (!s)
		return;
	try {
		if (shim_begin_close(s))
			shim_say_bye(s, milliseconds(grace_ms));
	} catch (...) {
		/* somebody was faster: its sockets are closed */
	}
	try {
		shim_end_watch(s);
		s->sentinel.reset();
		s->mesh.reset();
	} catch (...) {
		/* what could not be closed is lost */
	}
	delete s;
}

int gloo_shim_all_gather(struct gloo_shim *s, const void *send, void *recv, uint64_t bytes,
			 struct gloo_shim_error *error)
{
	return shim_guard(s, error,
			  [=] { shim_gather(s, send, recv, Bytes(s->options.size, bytes)); });
}

int gloo_shim_all_gather_v(struct gloo_shim *s, const void *send, void *recv, const uint64_t *bytes,
			   struct gloo_shim_error *error)
{
	return shim_guard(s, error, [=] {
		shim_gather(s, send, recv, Bytes(bytes, bytes + s->options.size));
	});
}

int gloo_shim_reduce_scatter(struct gloo_shim *s, const void *send, void *recv, uint64_t count,
			     const struct gloo_shim_fold *fold, struct gloo_shim_error *error)
{
	return shim_guard(s, error, [=] {
		const Bytes parts(s->options.size, count * fold->element);

		Reduction(s, send, recv, parts, fold).run();
	});
}

int gloo_shim_all_reduce(struct gloo_shim *s, void *data, uint64_t count,
			 const struct gloo_shim_fold *fold, struct gloo_shim_error *error)
{
	return shim_guard(s, error, [=] { shim_all_reduce(s, data, count, fold); });
}

int gloo_shim_broadcast(struct gloo_shim *s, void *data, uint64_t bytes, int root,
			struct gloo_shim_error *error)
{
	return shim_guard(s, error, [=] { shim_broadcast(s, data, bytes, root); });
}
