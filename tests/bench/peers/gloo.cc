/*
 * Gloo between processes of this machine, over TCP on the loopback, which is what it has
 * for processes: allgather (--bytes: of the result), reduce-scatter and all-reduce as a
 * ring and with its other algorithm (--bytes: of every rank's input), fp32. C++, since
 * that is the only interface of Gloo's.
 */
#include <gloo/allgather.h>
#include <gloo/allreduce.h>
#include <gloo/math.h>
#include <gloo/reduce_scatter.h>
#include <gloo/rendezvous/context.h>
#include <gloo/rendezvous/file_store.h>
#include <gloo/transport/tcp/device.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "peer.h"

namespace
{

struct meeting {
	pthread_barrier_t barrier;
};

struct rank_state {
	std::shared_ptr<gloo::Context> context;
	std::vector<float> in, out;
	size_t n, part;
	unsigned rank, ranks;
};

using step = std::function<void()>;

/* The call that is measured, and what must come out of it. */
struct collective {
	step run;
	float *in;
	size_t n_in;
	const float *out;
	size_t n_out;
	float want;
};

collective all_gather(rank_state &s)
{
	auto run = [&s] {
		gloo::AllgatherOptions o(s.context);

		o.setInput(s.in.data(), s.part);
		o.setOutput(s.out.data(), s.n);
		gloo::allgather(o);
	};

	return { run, s.in.data(), s.part, s.out.data(), s.n, 1 };
}

/* In place: the rank's part is where the algorithm leaves it, at the front. */
collective reduce_scatter(rank_state &s)
{
	auto algorithm = std::make_shared<gloo::ReduceScatterHalvingDoubling<float>>(
		s.context, std::vector<float *>{ s.in.data() }, static_cast<int>(s.n),
		std::vector<int>(s.ranks, static_cast<int>(s.part)));

	return { [algorithm] { algorithm->run(); }, s.in.data(), s.n, s.in.data(), s.part,
		 static_cast<float>(s.ranks) };
}

collective all_reduce(rank_state &s, gloo::AllreduceOptions::Algorithm algorithm)
{
	auto run = [&s, algorithm] {
		gloo::AllreduceOptions o(s.context);

		o.setAlgorithm(algorithm);
		o.setInput(s.in.data(), s.n);
		o.setOutput(s.out.data(), s.n);
		o.setReduceFunction(
			static_cast<void (*)(void *, const void *, const void *, size_t)>(
				&gloo::sum<float>));
		gloo::allreduce(o);
	};

	return { run, s.in.data(), s.n, s.out.data(), s.n, static_cast<float>(s.ranks) };
}

collective named(const std::string &name, rank_state &s)
{
	if (name == "gloo_all_gather")
		return all_gather(s);
	if (name == "gloo_reduce_scatter")
		return reduce_scatter(s);
	if (name == "gloo_all_reduce_ring")
		return all_reduce(s, gloo::AllreduceOptions::Algorithm::RING);
	if (name == "gloo_all_reduce_bcube")
		return all_reduce(s, gloo::AllreduceOptions::Algorithm::BCUBE);
	peer_die(name.c_str(), "there is no such case");
	return {};
}

void measure(const std::string &name, const peer_options &o, rank_state &s, meeting *m,
	     peer_sample *samples)
{
	collective c = named(name, s);

	for (unsigned i = 0; i < o.repeat + PEER_WARM_UP; i++) {
		peer_sample one;

		peer_fill(c.in, c.n_in, 1);
		pthread_barrier_wait(&m->barrier);
		one.begin_ns = peer_now_ns();
		c.run();
		one.end_ns = peer_now_ns();
		if (i >= PEER_WARM_UP)
			samples[static_cast<size_t>(s.rank) * o.repeat + i - PEER_WARM_UP] = one;
	}
	peer_check(name.c_str(), c.out, c.n_out, c.want);
	pthread_barrier_wait(&m->barrier);
	if (s.rank == 0)
		peer_report(name.c_str(), &o, samples);
	pthread_barrier_wait(&m->barrier);
}

void rank_main(unsigned rank, const peer_options &o, const char *folder, meeting *m,
	       peer_sample *samples, const std::vector<std::string> &names)
{
	gloo::transport::tcp::attr address("127.0.0.1");
	auto device = gloo::transport::tcp::CreateDevice(address);
	gloo::rendezvous::FileStore store(folder);
	auto context = std::make_shared<gloo::rendezvous::Context>(rank, o.ranks);
	rank_state s;

	context->connectFullMesh(store, device);
	s.context = context;
	s.rank = rank;
	s.ranks = o.ranks;
	s.n = o.bytes / sizeof(float);
	s.part = s.n / o.ranks;
	s.in.resize(s.n);
	s.out.resize(s.n);
	for (const std::string &name : names)
		measure(name, o, s, m, samples);
}

void *shared(size_t bytes)
{
	void *p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);

	if (p == MAP_FAILED)
		peer_die("gloo", "no memory");
	return p;
}

meeting *meeting_new(unsigned ranks)
{
	auto *m = static_cast<meeting *>(shared(sizeof(meeting)));
	pthread_barrierattr_t attr;

	pthread_barrierattr_init(&attr);
	pthread_barrierattr_setpshared(&attr, PTHREAD_PROCESS_SHARED);
	pthread_barrier_init(&m->barrier, &attr, ranks);
	return m;
}

/* When one fails the others would wait for it: all end. */
int reap(const std::vector<pid_t> &children)
{
	int failed = 0, status;

	while (wait(&status) > 0) {
		if (status == 0 || failed)
			continue;
		failed = 1;
		for (pid_t child : children)
			kill(child, SIGKILL);
	}
	return failed;
}

void child_main(unsigned rank, const peer_options &o, const char *folder, meeting *m,
		peer_sample *samples, const std::vector<std::string> &names)
{
	prctl(PR_SET_PDEATHSIG, SIGKILL);
	try {
		rank_main(rank, o, folder, m, samples, names);
	} catch (const std::exception &e) {
		peer_die("gloo", e.what());
	}
	_exit(0);
}

} // namespace

int main(int argc, char **argv)
{
	peer_options o = peer_parse(argc, argv);
	std::vector<std::string> names(argv + optind, argv + argc);
	std::string folder = std::filesystem::temp_directory_path() / "shardd-gloo-XXXXXX";
	auto *samples = static_cast<peer_sample *>(
		shared(static_cast<size_t>(o.ranks) * o.repeat * sizeof(peer_sample)));
	meeting *m = meeting_new(o.ranks);
	std::vector<pid_t> children;
	int failed;

	if (!mkdtemp(folder.data()))
		peer_die(argv[0], "cannot make a temporary folder");
	for (unsigned rank = 0; rank < o.ranks; rank++) {
		pid_t child = fork();

		if (child == 0)
			child_main(rank, o, folder.c_str(), m, samples, names);
		children.push_back(child);
	}
	failed = reap(children);
	std::filesystem::remove_all(folder);
	return failed;
}
