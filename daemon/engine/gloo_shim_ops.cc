/* The operations of a communicator over Gloo. */
#include "engine/gloo_shim.hh"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <stdexcept>

using std::chrono::milliseconds;
using Bytes = std::vector<uint64_t>;
using Unbound = gloo::transport::UnboundBuffer;

namespace
{

/* Gloo's own timeouts would close all connections before anybody could be told why. What waits is woken
 * when a connection ends, or the communicator is aborted. */
constexpr milliseconds FOREVER = std::chrono::hours(24 * 365 * 10);
constexpr uint64_t CHUNK = 1 << 20; /* of a reduction */
constexpr uint64_t CHUNK_MIN = 64 << 10;
/* Of what is received, and as much again of what is made: beyond it chunks become smaller. Two rows of each have room in
 * any case, so that it is twice as much with 1,024 members. */
constexpr uint64_t STAGING = 64 << 20;
constexpr uint64_t DIRECT = 256 << 10; /* up to here one round counts more than bytes */
/* Chunks offered to each member before they are taken, and asked of each before they are added. */
constexpr uint64_t ROWS_AHEAD = 4;

/* Memory of an operation. When it is destroyed Gloo no longer touches the memory. */
class Buffer
{
      public:
	Buffer(gloo_shim *shim, const void *p, uint64_t bytes)
	    : s(shim), b(s->mesh->buffer(const_cast<void *>(p), bytes))
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
			gloo_shim_throw_if_dead(s);
			if (!b->waitSend(nullptr, FOREVER))
				gloo_shim_throw_if_dead(s);
		}
	}

	void wait_recvs(uint64_t n)
	{
		while (n-- > 0) {
			gloo_shim_throw_if_dead(s);
			if (!b->waitRecv(nullptr, FOREVER))
				gloo_shim_throw_if_dead(s);
		}
	}

      private:
	gloo_shim *s;
	std::unique_ptr<Unbound> b;
};

/* Where each member's part begins, and the end of all. */
Bytes shim_offsets(const Bytes &bytes)
{
	Bytes at(bytes.size() + 1, 0);

	for (size_t i = 0; i < bytes.size(); i++)
		at[i + 1] = at[i] + bytes[i];
	return at;
}

/* The first message of each operation. Its size is always the same, so that members which execute different
 * operations find that out. */
struct Head {
	uint64_t place; /* of the order, where the member is that sends it */
	char data[56];  /* all of it, if it fits */
};

/* What travels in front of an operation's data. */
class Place
{
      public:
	explicit Place(gloo_shim *shim)
	    : s(shim), slot(++s->slot), own{ s->place, { 0 } }, theirs(s->options.size),
	      from(s, &own, sizeof(own)), to(s, theirs.data(), theirs.size() * sizeof(own))
	{
	}

	/* Before it is sent. */
	void put(const void *data, uint64_t bytes)
	{
		memcpy(own.data, data, bytes);
	}

	/* After check(). @member is not this one. */
	const char *data_of(int member) const
	{
		return theirs[member].data;
	}

	void expect(int member)
	{
		to.recv(member, slot, member * sizeof(own), sizeof(own));
		members.push_back(member);
	}

	void tell(int member)
	{
		from.send(member, slot, 0, sizeof(own));
		sends++;
	}

	void exchange()
	{
		for (int k = 1; k < s->options.size; k++)
			expect(gloo_shim_before(s, k));
		for (int k = 1; k < s->options.size; k++)
			tell(gloo_shim_after(s, k));
	}

	/* Before data is waited for. */
	void check()
	{
		to.wait_recvs(members.size());
		for (int member : members)
			if (theirs[member].place != own.place)
				refuse(member);
		from.wait_sends(sends);
	}

      private:
	/* Not the one or the other alone is wrong: nobody is blamed. */
	void refuse(int member)
	{
		char text[160];

		snprintf(text, sizeof(text),
			 "member %d is at another place of the order of operations than member %d "
			 "(%016llx, %016llx)",
			 member, s->options.rank, (unsigned long long)theirs[member].place,
			 (unsigned long long)own.place);
		gloo_shim_die(s, { text, -1 });
		throw std::runtime_error(text);
	}

	gloo_shim *s;
	const uint64_t slot;
	Head own;
	std::vector<Head> theirs;
	std::vector<int> members; /* that it is expected of */
	uint64_t sends = 0;
	Buffer from, to;
};

/* @place: exchanged, and not checked yet; NULL: it was. */
void shim_gather(gloo_shim *s, const void *send, void *recv, const Bytes &bytes, Place *place)
{
	const int n = s->options.size, rank = s->options.rank;
	const Bytes at = shim_offsets(bytes);
	char *own = static_cast<char *>(recv) + at[rank];
	const uint64_t slot = ++s->slot;
	uint64_t sends = 0, recvs = 0;
	Buffer to(s, recv, at[n]), from(s, send ? send : own, bytes[rank]);

	for (int k = 1; k < n; k++)
		if (bytes[gloo_shim_before(s, k)] > 0) {
			int peer = gloo_shim_before(s, k);

			to.recv(peer, slot, at[peer], bytes[peer]);
			recvs++;
		}
	for (int k = 1; k < n && bytes[rank] > 0; k++, sends++)
		from.send(gloo_shim_after(s, k), slot, 0, bytes[rank]);
	if (send && send != own)
		memcpy(own, send, bytes[rank]);
	if (place)
		place->check();
	to.wait_recvs(recvs);
	from.wait_sends(sends);
}

/* The data of all members, in their order. @recv may have that of this member at its place, or @send has it. */
void shim_all_gather(gloo_shim *s, const void *send, void *recv, uint64_t bytes)
{
	const int n = s->options.size, rank = s->options.rank;
	char *all = static_cast<char *>(recv), *own = all + rank * bytes;
	Place place(s);

	if (bytes > sizeof(Head::data)) {
		place.exchange();
		shim_gather(s, send, recv, Bytes(n, bytes), &place);
		return;
	}
	if (send && send != own)
		memcpy(own, send, bytes);
	place.put(own, bytes);
	place.exchange();
	place.check();
	for (int i = 0; i < n; i++)
		if (i != rank)
			memcpy(all + i * bytes, place.data_of(i), bytes);
}

/* What a member adds to a reduction: an array; or (@link) what is made when it is needed. */
struct Contribution {
	const char *data;
	const gloo_shim_link *link;
};

/* A reduce-scatter: the parts of all members, cut into chunks; row r is the r-th chunk of each. Of what
 * is made, the others' chunks of a row come first, and the own one when they are on their way. */
class Reduction
{
      public:
	Reduction(gloo_shim *shim, const Contribution &given, void *recv, const Bytes &parts,
		  const gloo_shim_fold *f)
	    : s(shim), n(s->options.size), rank(s->options.rank), own(given),
	      out(static_cast<char *>(recv)), bytes(parts), at(shim_offsets(parts)), fold(f),
	      chunk(size_chunk(n)),
	      widest(std::min(chunk, *std::max_element(parts.begin(), parts.end()))),
	      ahead(own.link ? size_ahead(made_bytes()) : ROWS_AHEAD),
	      depth(size_ahead(received_bytes())), slot(++s->slot)
	{
		make_room();
		for (uint64_t i = 0; i < depth; i++)
			stage[i] = std::make_unique<Buffer>(s, received(i), received_bytes());
		for (uint64_t i = 0; i < ahead; i++)
			source[i] = own.link ? std::make_unique<Buffer>(s, made(i), made_bytes())
					     : std::make_unique<Buffer>(s, own.data, at[n]);
	}

	/* @place: exchanged. */
	void run(Place &place)
	{
		const uint64_t most = *std::max_element(bytes.begin(), bytes.end());
		const uint64_t rows = (most + chunk - 1) / chunk;

		for (uint64_t row = 0; row < depth; row++)
			post_recvs(row);
		for (uint64_t row = 0; row < ahead; row++)
			post_sends(row);
		place.check();
		for (uint64_t row = 0; row < rows; row++) {
			if (piece(rank, row) > 0)
				add(row);
			post_recvs(row + depth);
			source[row % ahead]->wait_sends(sends[row % ahead]);
			post_sends(row + ahead);
		}
	}

      private:
	static uint64_t size_chunk(int n)
	{
		uint64_t fits = STAGING / (2 * static_cast<uint64_t>(n));

		return std::max(CHUNK_MIN, std::min(CHUNK, fits / CHUNK_MIN * CHUNK_MIN));
	}

	/* How many rows of @row bytes there is room for. */
	static uint64_t size_ahead(uint64_t row)
	{
		return std::max<uint64_t>(2, std::min(ROWS_AHEAD,
						      STAGING / std::max<uint64_t>(1, row)));
	}

	/* The staging: rows that are received, rows that are made, the own chunk of a row. */
	void make_room()
	{
		uint64_t room = depth * received_bytes();

		if (own.link)
			room += ahead * made_bytes() + stride();
		if (s->staging.size() < room)
			s->staging.resize(room);
	}

	/* No larger than what is received, so that small operations need little memory. */
	uint64_t stride() const
	{
		return std::min(chunk, bytes[rank]);
	}

	uint64_t received_bytes() const
	{
		return stride() * (n - 1);
	}

	char *received(uint64_t i) const
	{
		return s->staging.data() + i * received_bytes();
	}

	uint64_t made_bytes() const
	{
		return widest * (n - 1);
	}

	char *made(uint64_t i) const
	{
		return received(depth) + i * made_bytes();
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
			stage[row % depth]->recv(gloo_shim_before(s, k), slot,
						 place(gloo_shim_before(s, k)), piece(rank, row));
	}

	/* The place of the row's sends is free. */
	void post_sends(uint64_t row)
	{
		Buffer &from = *source[row % ahead];
		uint64_t &count = sends[row % ahead];

		count = 0;
		for (int k = 1; k < n; k++) {
			const int to = gloo_shim_after(s, k);
			const uint64_t in = own.link ? (k - 1) * widest : at[to] + row * chunk;

			if (piece(to, row) == 0)
				continue;
			if (own.link)
				make(to, row, made(row % ahead) + in);
			from.send(to, slot, in, piece(to, row));
			count++;
		}
	}

	void make(int member, uint64_t row, char *to)
	{
		own.link->fn(own.link->userdata, to, (at[member] + row * chunk) / own.link->element,
			     piece(member, row) / own.link->element, true);
	}

	/* The own chunk of a row, made while the others' arrive. */
	const char *mine(uint64_t row)
	{
		if (!own.link)
			return own.data + at[rank] + row * chunk;
		make(rank, row, made(ahead));
		return made(ahead);
	}

	void add(uint64_t row)
	{
		const char *const here = mine(row), *const staged = received(row % depth);
		std::vector<const void *> in(n);

		stage[row % depth]->wait_recvs(n - 1);
		for (int i = 0; i < n; i++)
			in[i] = i == rank ? here : staged + place(i);
		fold->fn(fold->userdata, out + row * chunk, in.data(),
			 piece(rank, row) / fold->element);
	}

	gloo_shim *s;
	const int n, rank;
	const Contribution own;
	char *out;
	const Bytes &bytes;
	const Bytes at;
	const gloo_shim_fold *fold;
	const uint64_t chunk, widest, ahead, depth, slot;
	uint64_t sends[ROWS_AHEAD];
	std::unique_ptr<Buffer> source[ROWS_AHEAD]; /* of each row that is offered */
	std::unique_ptr<Buffer> stage[ROWS_AHEAD];
};

/* A chain: the running values of one chunk after the other go from member to member, in their
 * order, and then to the owner of the part that the chunk is of. */
class Chain
{
      public:
	Chain(gloo_shim *shim, void *recv, const Bytes &parts, const gloo_shim_link *c)
	    : s(shim), n(s->options.size), rank(s->options.rank), chain(c), values(++s->slot),
	      results(++s->slot), own(s, recv, parts[rank]), out(static_cast<char *>(recv)),
	      stride(std::min(CHUNK, *std::max_element(parts.begin(), parts.end())))
	{
		cut(parts);
		if (s->staging.size() < DEPTH * stride)
			s->staging.resize(DEPTH * stride);
		for (uint64_t i = 0; i < DEPTH; i++)
			stages.push_back(std::make_unique<Buffer>(s, stage(i), stride));
	}

	/* @place: neither told nor expected. */
	void run(Place &place)
	{
		uint64_t expected = 0;

		meet(place);

		for (const Piece &p : pieces)
			if (rank < n - 1 && p.owner == rank) {
				own.recv(n - 1, results, p.place, p.bytes);
				expected++;
			}
		for (uint64_t i = 0; i < DEPTH; i++)
			post(i);
		for (uint64_t i = 0; i < pieces.size(); i++) {
			step(i);
			if (i > 0)
				recycle(i - 1);
		}
		if (!pieces.empty())
			recycle(pieces.size() - 1);
		own.wait_recvs(expected);
	}

      private:
	static constexpr uint64_t DEPTH = 4; /* chunks that are under way at a member */

	/* Values come from the member before, results from the last one. */
	void meet(Place &place)
	{
		if (rank > 0)
			place.expect(rank - 1);
		if (rank < n - 1)
			place.expect(n - 1);
		for (int i = 0; i < n - 1 && rank == n - 1; i++)
			place.tell(i);
		if (rank < n - 1)
			place.tell(rank + 1);
		place.check();
	}

	struct Piece {
		int owner;
		uint64_t at, place, bytes; /* in the whole; in the part of the owner */
	};

	void cut(const Bytes &parts)
	{
		const Bytes at = shim_offsets(parts);

		for (int i = 0; i < n; i++)
			for (uint64_t done = 0; done < parts[i]; done += CHUNK)
				pieces.push_back({ i, at[i] + done, done,
						   std::min(CHUNK, parts[i] - done) });
	}

	char *stage(uint64_t i)
	{
		return s->staging.data() + i % DEPTH * stride;
	}

	Buffer &buffer(uint64_t i)
	{
		return *stages[i % DEPTH];
	}

	/* The values of the members before; the place is free. */
	void post(uint64_t i)
	{
		if (rank > 0 && i < pieces.size())
			buffer(i).recv(rank - 1, values, 0, pieces[i].bytes);
	}

	void step(uint64_t i)
	{
		const Piece &p = pieces[i];

		if (rank > 0)
			buffer(i).wait_recvs(1);
		chain->fn(chain->userdata, stage(i), p.at / chain->element,
			  p.bytes / chain->element, rank == 0);
		if (rank < n - 1)
			buffer(i).send(rank + 1, values, 0, p.bytes);
		else if (p.owner != rank)
			buffer(i).send(p.owner, results, 0, p.bytes);
		else
			memcpy(out + p.place, stage(i), p.bytes);
	}

	/* The chunk has left, while the next one was folded. */
	void recycle(uint64_t i)
	{
		if (rank < n - 1 || pieces[i].owner != rank)
			buffer(i).wait_sends(1);
		post(i + DEPTH);
	}

	gloo_shim *s;
	const int n, rank;
	const gloo_shim_link *chain;
	const uint64_t values, results; /* slots */
	Buffer own;
	char *out;
	const uint64_t stride; /* of the chunks in the staging */
	std::vector<Piece> pieces;
	std::vector<std::unique_ptr<Buffer>> stages;
};

void shim_all_reduce_direct(gloo_shim *s, void *data, uint64_t count, const gloo_shim_fold *fold)
{
	const int n = s->options.size;
	const uint64_t bytes = count * fold->element;
	std::vector<char> all(n * bytes);
	std::vector<const void *> in(n);

	shim_all_gather(s, data, all.data(), bytes);
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

void shim_reduce(gloo_shim *s, const Contribution &own, void *recv, const Bytes &parts,
		 const gloo_shim_fold *fold)
{
	Place place(s);

	place.exchange();
	Reduction(s, own, recv, parts, fold).run(place);
}

/* The members' contributions, to @data, which may be the own one. */
void shim_all_reduce(gloo_shim *s, const Contribution &own, void *data, uint64_t count,
		     const gloo_shim_fold *fold)
{
	const Bytes parts = shim_cut(s, count, fold->element);

	if (count * fold->element * s->options.size <= DIRECT) {
		if (own.link)
			own.link->fn(own.link->userdata, data, 0, count, true);
		shim_all_reduce_direct(s, data, count, fold);
		return;
	}
	shim_reduce(s, own, static_cast<char *>(data) + shim_offsets(parts)[s->options.rank], parts,
		    fold);
	shim_gather(s, nullptr, data, parts, nullptr);
}

void shim_sum(gloo_shim *s, void *recv, uint64_t count, bool whole, const gloo_shim_link *link,
	      const gloo_shim_fold *fold)
{
	const Contribution own = { nullptr, link };

	if (whole)
		shim_all_reduce(s, own, recv, count, fold);
	else
		shim_reduce(s, own, recv, Bytes(s->options.size, count * fold->element), fold);
}

void shim_chain(gloo_shim *s, void *recv, uint64_t count, bool whole, const gloo_shim_link *chain)
{
	const uint64_t bytes = count * chain->element;
	const Bytes parts =
		whole ? shim_cut(s, count, chain->element) : Bytes(s->options.size, bytes);
	const uint64_t at = whole ? shim_offsets(parts)[s->options.rank] : 0;
	Place place(s);

	Chain(s, static_cast<char *>(recv) + at, parts, chain).run(place);
	if (whole)
		shim_gather(s, nullptr, recv, parts, nullptr);
}

/* The root gives each member its part, or each everything. */
void shim_scatter(gloo_shim *s, void *data, const Bytes &bytes, int root, bool whole)
{
	const Bytes at = shim_offsets(bytes);
	const int n = s->options.size, rank = s->options.rank;
	Place place(s);
	const uint64_t slot = ++s->slot;
	Buffer b(s, data, at[n]);
	uint64_t sends = 0;

	if (rank != root) {
		place.expect(root);
		if (whole || bytes[rank] > 0) {
			b.recv(root, slot, whole ? 0 : at[rank], whole ? at[n] : bytes[rank]);
			place.check();
			b.wait_recvs(1);
		} else {
			place.check();
		}
		return;
	}
	for (int k = 1; k < n; k++) {
		int to = gloo_shim_after(s, k);

		place.tell(to);
		if (!whole && bytes[to] == 0)
			continue;
		b.send(to, slot, whole ? 0 : at[to], whole ? at[n] : bytes[to]);
		sends++;
	}
	place.check();
	b.wait_sends(sends);
}

/* Large data: the root sends it once, in parts, and the members pass the parts on. */
void shim_broadcast(gloo_shim *s, void *data, uint64_t bytes, int root)
{
	const Bytes parts = shim_cut(s, bytes, 1);
	const bool whole = bytes <= DIRECT || s->options.size == 2;

	shim_scatter(s, data, parts, root, whole);
	if (!whole)
		shim_gather(s, nullptr, data, parts, nullptr);
}

} // namespace

void gloo_shim_set_place(struct gloo_shim *s, uint64_t place)
{
	s->place = place;
}

int gloo_shim_all_gather(struct gloo_shim *s, const void *send, void *recv, uint64_t bytes,
			 struct gloo_shim_error *error)
{
	return gloo_shim_guard(s, error, [=] { shim_all_gather(s, send, recv, bytes); });
}

int gloo_shim_reduce_scatter(struct gloo_shim *s, const void *send, void *recv, uint64_t count,
			     const struct gloo_shim_fold *fold, struct gloo_shim_error *error)
{
	return gloo_shim_guard(s, error, [=] {
		const Contribution own = { static_cast<const char *>(send), nullptr };

		shim_reduce(s, own, recv, Bytes(s->options.size, count * fold->element), fold);
	});
}

int gloo_shim_all_reduce(struct gloo_shim *s, void *data, uint64_t count,
			 const struct gloo_shim_fold *fold, struct gloo_shim_error *error)
{
	const Contribution own = { static_cast<const char *>(data), nullptr };

	return gloo_shim_guard(s, error, [=] { shim_all_reduce(s, own, data, count, fold); });
}

int gloo_shim_sum(struct gloo_shim *s, void *recv, uint64_t count, bool whole,
		  const struct gloo_shim_link *link, const struct gloo_shim_fold *fold,
		  struct gloo_shim_error *error)
{
	return gloo_shim_guard(s, error, [=] { shim_sum(s, recv, count, whole, link, fold); });
}

int gloo_shim_chain(struct gloo_shim *s, void *recv, uint64_t count, bool whole,
		    const struct gloo_shim_link *chain, struct gloo_shim_error *error)
{
	return gloo_shim_guard(s, error, [=] { shim_chain(s, recv, count, whole, chain); });
}

int gloo_shim_broadcast(struct gloo_shim *s, void *data, uint64_t bytes, int root,
			struct gloo_shim_error *error)
{
	return gloo_shim_guard(s, error, [=] { shim_broadcast(s, data, bytes, root); });
}
