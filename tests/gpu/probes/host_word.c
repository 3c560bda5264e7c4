/* P2b: a word in host memory that both processes map: does a CPU's store wake a stream? */
#include <errno.h>
#include <linux/memfd.h>
#include <sys/mman.h>
#include <unistd.h>

#include "stage.h"

#define TURNS      200u
#define SMALL      20u
#define TURN_LIMIT 2000u
#define PAGE       UINT64_C(65536)

enum { ARMED, STORED };

#define NAME_OF(name)  NAME_OF_(name)
#define NAME_OF_(name) #name

static _Atomic uint64_t *map(int fd)
{
	void *addr = mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);

	return addr == MAP_FAILED ? NULL : addr;
}

/* The device's address of the page, or 0: the actor has said why not. */
static CUdeviceptr registered(struct actor *a, void *page)
{
	__typeof__(&cuMemHostRegister) host_register;
	__typeof__(&cuMemHostGetDevicePointer) host_pointer;
	CUdeviceptr addr = 0;

	*(void **)&host_register = cuda_extra(NAME_OF(cuMemHostRegister));
	*(void **)&host_pointer = cuda_extra(NAME_OF(cuMemHostGetDevicePointer));
	if (!host_register || !host_pointer)
		actor_fail(a, -2, "this libcuda has no cuMemHostRegister");
	actor_must(a,
		   host_register(page, PAGE,
				 CU_MEMHOSTREGISTER_DEVICEMAP | CU_MEMHOSTREGISTER_PORTABLE),
		   "cuMemHostRegister");
	actor_must(a, host_pointer(&addr, page, 0), "cuMemHostGetDevicePointer");
	return addr;
}

/* Wait on its stream; the storer stores; how long until the stream is seen empty. */
static void waiter(struct actor *a)
{
	unsigned n = a->stage->small ? SMALL : TURNS;
	_Atomic uint64_t *page = map(a->order->fd);
	struct message m = MESSAGE_NULL;
	CUdeviceptr addr;
	double us[TURNS];

	actor_cuda(a);
	addr = registered(a, (void *)page);
	for (uint64_t turn = 1; turn <= n; turn++) {
		actor_must(a, word_wait(a, a->stream, addr, turn), "cuStreamWaitValue64");
		atomic_store(&a->stage->word[ARMED], turn);
		if (stream_spin(a, a->stream, TURN_LIMIT) != CUDA_SUCCESS)
			actor_fail(a, -3, "the store did not wake the stream in %u ms (turn %llu)",
				   TURN_LIMIT, (unsigned long long)turn);
		us[turn - 1] = (double)(now_ns() - atomic_load(&a->stage->word[STORED])) / 1e3;
	}
	m.value[0] = (uint64_t)(stage_quantile(us, n, 0.5) * 1000);
	m.value[1] = (uint64_t)(stage_quantile(us, n, 0.99) * 1000);
	actor_tell(a, &m);
}

/* Never touches CUDA. */
static void storer(struct actor *a)
{
	unsigned n = a->stage->small ? SMALL : TURNS;
	_Atomic uint64_t *page = map(a->order->fd);

	for (uint64_t turn = 1; turn <= n; turn++) {
		while (atomic_load(&a->stage->word[ARMED]) < turn)
			;
		for (uint64_t armed = now_ns(); now_ns() < armed + 50000;)
			; /* so that the wait has reached the device */
		atomic_store(&a->stage->word[STORED], now_ns());
		atomic_store(page, turn);
	}
	actor_hear(a, &(struct message){ 0 });
}

void probe_host_word(struct stage *s)
{
	struct message order = MESSAGE_NULL, m;
	struct role wait, store;
	int rc;

	stage_step(s, "starting");
	order.fd = memfd_create("probe", MFD_CLOEXEC);
	if (order.fd < 0 || ftruncate(order.fd, (off_t)PAGE) < 0)
		stage_fail(s, "no shared memory");
	wait = role_start(s, "the waiter", waiter, &order);
	store = role_start(s, "the storer", storer, &order);
	close(order.fd);
	stage_step(s, "a CPU stores, a stream waits");
	rc = role_hear(s, &wait, 30000, &m);
	role_kill(s, &store);
	role_kill(s, &wait);
	if (rc < 0)
		stage_answer(s, "The waiter %s.", rc == -ETIMEDOUT ? "hung" : "died");
	else if (m.status == -1)
		stage_fail(s, "%s", m.text);
	else if (m.status == -2)
		stage_skip(s, "%s", m.text);
	else if (m.status)
		stage_answer(s, "No: %s.", m.text);
	if (rc == 0 && m.status == 0) {
		stage_number(s, "cpu_store_median", "us", (double)m.value[0] / 1000);
		stage_number(s, "cpu_store_p99", "us", (double)m.value[1] / 1000);
		stage_answer(s, "Yes: a store of a process without CUDA wakes the stream.");
	}
}
