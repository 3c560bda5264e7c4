/* The host backend: memory that can be handed over safely, kernels on threads. */
#include <criterion/criterion.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "await.h"
#include "backend/backend_impl.h"
#include "backend/host_room.h"
#include "backend/host_topology.h"
#include "core/check.h"
#include "core/clock.h"
#include "fdcheck.h"
#include "looprun.h"
#include "ownfd.h"

TestSuite(backend_host, .init = fdcheck_begin, .fini = fdcheck_end, .timeout = 60);

#define MIB (UINT64_C(1) << 20)

struct fixture {
	struct looprun run;
	struct backend *b;
};

static void setup_filling(struct fixture *f, unsigned threads, uint64_t capacity, bool prefault)
{
	looprun_init(&f->run);
	cr_assert_eq(backend_host_new(&f->run.queue, threads, capacity, prefault, &f->b), 0);
}

static void setup(struct fixture *f, unsigned threads, uint64_t capacity)
{
	setup_filling(f, threads, capacity, false);
}

static void teardown(struct fixture *f)
{
	f->b = backend_close(f->b);
	looprun_deinit(&f->run);
}

static struct backend_mem *alloc(struct fixture *f, uint64_t bytes)
{
	struct backend_mem *mem;

	cr_assert_eq(backend_alloc(f->b, bytes, BACKEND_SHARE_FD, &mem), 0);
	return mem;
}

static int export(struct fixture *f, struct backend_mem *mem, bool writable)
{
	int fd;

	cr_assert_eq(backend_export(f->b, mem, writable, &fd), 0);
	cr_assert(fcntl(fd, F_GETFD) & FD_CLOEXEC);
	return fd;
}

/* A task that counts its callbacks. */
struct counted {
	struct backend_task task;
	unsigned done;
	int status;
};

static void on_done(struct backend_task *task, int status)
{
	struct counted *c = CONTAINER_OF(task, struct counted, task);

	c->done++;
	c->status = status;
}

static bool is_done(void *arg)
{
	return ((struct counted *)arg)->done > 0;
}

static void run_launches(struct fixture *f, struct launch *launches, unsigned n)
{
	struct counted c = { .task = { .launches = launches, .n_launches = n, .done = on_done } };

	backend_submit(f->b, &c.task);
	cr_assert_eq(c.done, 0, "the callback ran inside submit");
	cr_assert_eq(backend_in_flight(f->b), 1);
	looprun_until(&f->run, is_done, &c, 30);
	cr_assert_eq(c.done, 1);
	cr_assert_eq(c.status, 0);
	cr_assert_eq(backend_in_flight(f->b), 0);
}

Test(backend_host, info_describes_the_machine)
{
	struct fixture f;
	const struct backend_info *info;

	setup(&f, 0, 0);
	info = backend_info(f.b);
	cr_assert_str_eq(info->id, "host:0");
	cr_assert_str_eq(info->name, "host");
	cr_assert_eq(info->granularity, (uint64_t)sysconf(_SC_PAGESIZE));
	cr_assert_geq(info->threads, 1);
	cr_assert_geq(info->capacity_bytes, 16 * MIB);
	cr_assert_leq(info->capacity_bytes,
		      (uint64_t)sysconf(_SC_PHYS_PAGES) * (uint64_t)sysconf(_SC_PAGESIZE));
	cr_assert_str_eq(info->kernels, kernels_host()->name);
	cr_assert(strstr(info->detail, "NUMA nodes"), "%s", info->detail);
	teardown(&f);
}

/* tests/run says which variant of the kernels a suite runs with, and which is the fastest here. */
Test(backend_host, kernels_are_those_that_the_run_says)
{
	const char *told = getenv("SHARDD_KERNELS");
	const char *want = told ? told : getenv("SHARDD_TEST_KERNELS");

	if (!want)
		cr_skip_test("neither SHARDD_KERNELS nor SHARDD_TEST_KERNELS is set");
	cr_assert_str_eq(kernels_host()->name, want);
}

Test(backend_host, threads_and_capacity_are_as_asked)
{
	struct fixture f;
	struct backend_mem *a, *b;

	setup(&f, 3, 4 * MIB);
	cr_assert_eq(backend_info(f.b)->threads, 3);
	cr_assert_eq(backend_info(f.b)->capacity_bytes, 4 * MIB);
	cr_assert_eq(backend_alloc(f.b, 5 * MIB, BACKEND_SHARE_FD, &a), BACKEND_E_FULL);
	a = alloc(&f, 3 * MIB);
	cr_assert_eq(backend_alloc(f.b, 2 * MIB, BACKEND_SHARE_FD, &b), BACKEND_E_FULL);
	b = alloc(&f, 1 * MIB);
	backend_free(f.b, a);
	a = alloc(&f, 3 * MIB);
	backend_free(f.b, a);
	backend_free(f.b, b);
	backend_free(f.b, NULL);
	teardown(&f);
}

Test(backend_host, threads_have_names_and_block_signals)
{
	struct fixture f;
	DIR *dir;
	struct dirent *e;
	unsigned workers = 0;

	setup(&f, 2, 0);
	dir = opendir("/proc/self/task");
	cr_assert_not_null(dir);
	while ((e = readdir(dir))) {
		char path[320], line[256], name[64] = "";
		unsigned long long blocked = 0;
		FILE *status;

		if (e->d_name[0] == '.')
			continue;
		snprintf(path, sizeof(path), "/proc/self/task/%s/status", e->d_name);
		status = fopen(path, "re");
		cr_assert_not_null(status);
		while (fgets(line, sizeof(line), status)) {
			sscanf(line, "Name: %63s", name);
			sscanf(line, "SigBlk: %llx", &blocked);
		}
		fclose(status);
		if (strncmp(name, "shardd-", 7) != 0)
			continue;
		workers += strncmp(name, "shardd-w", 8) == 0;
		cr_assert(blocked & (1u << (SIGTERM - 1)), "%s takes SIGTERM", name);
		cr_assert(blocked & (1u << (SIGHUP - 1)), "%s takes SIGHUP", name);
	}
	closedir(dir);
	cr_assert_eq(workers, 2);
	teardown(&f);
}

Test(backend_host, memory_is_zero_and_shared_with_a_writable_descriptor)
{
	struct fixture f;
	struct backend_mem *mem;
	char *daemon_view, *client_view;
	int fd;

	setup(&f, 1, 0);
	mem = alloc(&f, 4 * MIB);
	daemon_view = backend_addr(mem);
	cr_assert_eq(backend_bytes(mem), 4 * MIB);
	for (uint64_t i = 0; i < 4 * MIB; i += 511)
		cr_assert_eq(daemon_view[i], 0);
	fd = export(&f, mem, true);
	client_view = mmap(NULL, 4 * MIB, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	cr_assert_neq(client_view, MAP_FAILED);
	client_view[12345] = 7;
	cr_assert_eq(daemon_view[12345], 7);
	munmap(client_view, 4 * MIB);
	close(fd);
	backend_free(f.b, mem);
	teardown(&f);
}

Test(backend_host, a_read_only_descriptor_cannot_be_mapped_for_writing)
{
	struct fixture f;
	struct backend_mem *mem;
	char *view;
	int fd;

	setup(&f, 1, 0);
	mem = alloc(&f, MIB);
	((char *)backend_addr(mem))[77] = 5;
	fd = export(&f, mem, false);
	cr_assert_eq(mmap(NULL, MIB, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0), MAP_FAILED);
	cr_assert_eq(errno, EACCES);
	view = mmap(NULL, MIB, PROT_READ, MAP_SHARED, fd, 0);
	cr_assert_neq(view, MAP_FAILED);
	cr_assert_eq(view[77], 5);
	cr_assert_eq(mprotect(view, MIB, PROT_READ | PROT_WRITE), -1);
	cr_assert_eq(write(fd, "x", 1), -1);
	munmap(view, MIB);
	close(fd);
	backend_free(f.b, mem);
	teardown(&f);
}

/* As another user: reopen @fd for writing. Return: exit status, 0: refused, 1:
 * not refused, 2: the attempt says nothing, since even @control could not be opened. */
static int try_reopen(int fd, int control)
{
	char path[64];

	if (setresgid(65534, 65534, 65534) < 0 || setresuid(65534, 65534, 65534) < 0)
		return 2;
	prctl(PR_SET_DUMPABLE, 1); /* else our own /proc is closed to us */
	snprintf(path, sizeof(path), "/proc/self/fd/%d", control);
	if (open(path, O_RDWR | O_CLOEXEC) < 0)
		return 2;
	snprintf(path, sizeof(path), "/proc/self/fd/%d", fd);
	return open(path, O_RDWR | O_CLOEXEC) >= 0 || errno != EACCES;
}

Test(backend_host, another_user_cannot_open_a_read_only_descriptor_for_writing)
{
	struct fixture f;
	struct backend_mem *mem;
	int fd, control, status;
	pid_t pid;

	if (geteuid() != 0)
		cr_skip_test("needs to become another user");
	setup(&f, 1, 0);
	mem = alloc(&f, MIB);
	fd = export(&f, mem, false);
	control = memfd_create("control", MFD_CLOEXEC);
	cr_assert_eq(fchmod(control, 0666), 0);
	pid = fork();
	if (pid == 0)
		_exit(try_reopen(fd, control));
	cr_assert_eq(waitpid(pid, &status, 0), pid);
	cr_assert(WIFEXITED(status));
	cr_assert_eq(WEXITSTATUS(status), 0, "result %d", WEXITSTATUS(status));
	close(control);
	close(fd);
	backend_free(f.b, mem);
	teardown(&f);
}

static uint64_t bytes_there(int fd)
{
	struct stat st;

	cr_assert_eq(fstat(fd, &st), 0);
	return (uint64_t)st.st_blocks * 512;
}

/* A process that still has it mapped reads zeros, is not killed by that, and keeps no memory. */
Test(backend_host, what_others_hold_is_empty_after_it_was_freed)
{
	struct fixture f;
	struct backend_mem *mem;
	volatile char *view;
	int fd;

	setup(&f, 1, 0);
	mem = alloc(&f, MIB);
	memset(backend_addr(mem), 0x5a, MIB);
	fd = export(&f, mem, false);
	view = mmap(NULL, MIB, PROT_READ, MAP_SHARED, fd, 0);
	cr_assert_neq(view, MAP_FAILED);
	backend_free(f.b, mem);
	AWAIT(!bytes_there(fd), 30);
	cr_assert_eq(view[0], 0);
	cr_assert_eq(view[MIB - 1], 0);
	if (memfd_knows_holders()) { /* a touch brought pages back */
		cr_assert_gt(bytes_there(fd), 0);
		AWAIT(!bytes_there(fd), 30); /* not for long */
	}
	teardown(&f); /* waits until it is unmapped */
	munmap((void *)view, MIB);
	close(fd);
}

Test(backend_host, memory_is_emptied_and_still_there)
{
	struct fixture f;
	struct backend_mem *mem;
	int fd;

	setup(&f, 1, 0);
	mem = alloc(&f, MIB);
	memset(backend_addr(mem), 0x5a, MIB);
	fd = export(&f, mem, true);
	cr_assert_eq(backend_is_held(f.b, mem), memfd_knows_holders());
	cr_assert_eq(backend_inode(mem), CONTAINER_OF(mem, struct memfd, mem)->mem.inode);
	backend_empty(f.b, mem);
	AWAIT(!bytes_there(fd), 30);
	close(fd);
	cr_assert_not(backend_is_held(f.b, mem));
	cr_assert_eq(((char *)backend_addr(mem))[5], 0);
	backend_empty(f.b, mem); /* in the queue twice at most */
	backend_free(f.b, mem);
	teardown(&f);
}

Test(backend_host, size_and_seals_cannot_be_changed)
{
	struct fixture f;
	struct backend_mem *mem;
	int fd;

	setup(&f, 1, 0);
	mem = alloc(&f, MIB);
	fd = export(&f, mem, true);
	cr_assert_eq(ftruncate(fd, 0), -1);
	cr_assert_eq(errno, EPERM);
	cr_assert_eq(ftruncate(fd, 2 * MIB), -1);
	cr_assert_eq(errno, EPERM);
	cr_assert_eq(fcntl(fd, F_ADD_SEALS, F_SEAL_FUTURE_WRITE), -1);
	cr_assert_eq(errno, EPERM);
	close(fd);
	backend_free(f.b, mem);
	teardown(&f);
}

Test(backend_host, import_takes_what_another_daemon_made)
{
	struct fixture f;
	struct backend_mem *old, *again;
	int fd;

	setup(&f, 1, 0);
	old = alloc(&f, MIB);
	((char *)backend_addr(old))[3] = 9;
	fd = own_fd(old);
	backend_free(f.b, old);
	cr_assert_eq(backend_import(f.b, fd, MIB, &again), 0);
	close(fd); /* was only borrowed */
	cr_assert_eq(backend_bytes(again), MIB);
	cr_assert_eq(((char *)backend_addr(again))[3], 9);
	((char *)backend_addr(again))[3] = 10;
	fd = export(&f, again, false);
	close(fd);
	backend_free(f.b, again);
	teardown(&f);
}

Test(backend_host, import_refuses_what_is_not_ours)
{
	struct fixture f;
	struct backend_mem *mem, *none = NULL;
	char path[] = "/tmp/shardd-test-XXXXXX";
	int fds[2], writable, readable, unsealed, file;

	setup(&f, 1, 0);
	mem = alloc(&f, MIB);
	writable = export(&f, mem, true);
	readable = export(&f, mem, false);
	unsealed = memfd_create("unsealed", MFD_CLOEXEC | MFD_ALLOW_SEALING);
	file = mkstemp(path);
	cr_assert_geq(file, 0);
	unlink(path);
	cr_assert_eq(ftruncate(unsealed, MIB), 0);
	cr_assert_eq(ftruncate(file, MIB), 0);
	cr_assert_eq(pipe2(fds, O_CLOEXEC), 0);

	cr_assert_eq(backend_import(f.b, writable, 2 * MIB, &none), -EINVAL);
	cr_assert_eq(backend_import(f.b, writable, 0, &none), -EINVAL);
	cr_assert_eq(backend_import(f.b, writable, MIB - 1, &none), -EINVAL);
	cr_assert_eq(backend_import(f.b, readable, MIB, &none), -EINVAL);
	cr_assert_eq(backend_import(f.b, unsealed, MIB, &none), -EINVAL);
	cr_assert_eq(backend_import(f.b, file, MIB, &none), -EINVAL);
	cr_assert_eq(backend_import(f.b, fds[0], MIB, &none), -EINVAL);
	cr_assert_null(none);

	close(writable);
	close(readable);
	close(unsealed);
	close(file);
	close(fds[0]);
	close(fds[1]);
	backend_free(f.b, mem);
	teardown(&f);
}

/* Sections of an arena, each of N floats; more than three chunks and a rest. */
#define N        (3 * 4 * KERNEL_NORM_BLOCK + 12345)
#define SECTIONS 4
#define BLOCKS   11 /* of LAUNCH_ASSEMBLE */
#define BLOCK    (KERNEL_ASSEMBLE_BYTES / 2u)

struct arena {
	float *s[SECTIONS];
	const void *in[SECTIONS];
	struct k_assemble_box box;
	struct k_assemble_tensor tensor;
	struct k_assemble_block blocks[BLOCKS];
};

static void arena_init(struct arena *a)
{
	uint32_t x = 12345;

	for (unsigned s = 0; s < SECTIONS; s++) {
		a->s[s] = malloc(N * sizeof(float));
		cr_assert_not_null(a->s[s]);
		a->in[s] = a->s[s];
		for (size_t i = 0; i < N; i++) {
			x = x * 1664525u + 1013904223u;
			a->s[s][i] = (float)(x >> 8) / 16777216.0f - (s == 3 ? 0.0f : 0.5f);
		}
	}
}

static void arena_deinit(struct arena *a)
{
	for (unsigned s = 0; s < SECTIONS; s++)
		free(a->s[s]);
}

/* Some twice, some of others, one that is none. */
static const int64_t rows[7] = { 1, 4, 0, 1, -1, 9, 3 };

/* A launch of @kind on @a; section 3 holds no negative numbers (second moments). */
static struct launch make_launch(enum launch_kind kind, struct arena *a)
{
	struct launch k = { .kind = kind, .n = N };

	switch (kind) {
	case LAUNCH_CAST:
		k.cast = (struct k_cast){ a->s[1], a->s[0], DTYPE_BF16, DTYPE_FP32, false };
		break;
	case LAUNCH_REDUCE:
		k.reduce = (struct k_reduce){ .out = a->s[0],
					      .in = a->in + 1,
					      .k = 3,
					      .in_dtype = DTYPE_FP32,
					      .out_dtype = DTYPE_FP32,
					      .sum_dtype = DTYPE_FP32,
					      .pre = k_divide_by(3, DTYPE_FP32),
					      .post = k_divide_by(2, DTYPE_FP32),
					      .accumulate = true };
		break;
	case LAUNCH_ALL_REDUCE:
		k.all_reduce = (struct k_all_reduce){ a->s[1], a->in, 4, DTYPE_FP32, REDUCE_AVG };
		break;
	case LAUNCH_ADAMW:
		k.adamw = (struct k_adamw){ .p = a->s[0],
					    .g = a->s[1],
					    .m = a->s[2],
					    .v = a->s[3],
					    .decay = 1.0f - 1e-5f,
					    .w1 = 0.1f,
					    .b2 = 0.999f,
					    .w2 = 0.001f,
					    .step_size = 1e-3f,
					    .sq = 0.03162f,
					    .eps = 1e-8f };
		break;
	case LAUNCH_ADAM:
		k.adam = (struct k_adam){ .p = a->s[0],
					  .g = a->s[1],
					  .m = a->s[2],
					  .v = a->s[3],
					  .wd = 0.01f,
					  .w1 = 0.1f,
					  .b2 = 0.999f,
					  .w2 = 0.001f,
					  .step_size = 1e-3f,
					  .sq = 0.03162f,
					  .eps = 1e-8f };
		break;
	case LAUNCH_SGD:
		k.sgd = (struct k_sgd){ .p = a->s[0],
					.g = a->s[1],
					.buf = a->s[2],
					.lr = 0.1f,
					.wd = 0.01f,
					.mu = 0.9f,
					.nesterov = true };
		break;
	case LAUNCH_NORM:
		k.norm = (struct k_norm){ a->s[0], (double *)(void *)a->s[1], 2 };
		break;
	case LAUNCH_SCALE:
		k.scale = (struct k_scale){ a->s[2], 0.37f, NULL };
		break;
	case LAUNCH_FOUND_INF:
		a->s[0][N - 1] = INFINITY;
		k.found_inf = (struct k_found_inf){ a->s[0], a->s[1], DTYPE_FP32 };
		break;
	case LAUNCH_CLAMP:
		k.clamp = (struct k_clamp){ a->s[2], -0.1f, 0.2f };
		break;
	case LAUNCH_UNSCALE:
		a->s[0][N - 1] = INFINITY;
		k.unscale = (struct k_unscale){ a->s[0], 0.3f, a->s[1] };
		break;
	case LAUNCH_ADD_ROWS:
		k.n = N / 8;
		k.add_rows = (struct k_add_rows){ .out = a->s[0],
						  .row_elements = k.n,
						  .rows = rows,
						  .n_rows = 7,
						  .values = a->s[1],
						  .dtype = DTYPE_FP32,
						  .pre = k_divide_by(3, DTYPE_FP32),
						  .first_row = 1,
						  .row_limit = 5 };
		break;
	case LAUNCH_REDUCE_STEP:
		k.reduce_step.reduce = (struct k_reduce){ .in = a->in + 1,
							  .k = 2,
							  .in_dtype = DTYPE_FP32,
							  .out_dtype = DTYPE_FP32,
							  .sum_dtype = DTYPE_FP32,
							  .pre = k_divide_by(3, DTYPE_FP32) };
		k.reduce_step.first = 1;
		k.reduce_step.step.sgd = (struct k_sgd){ .p = a->s[0],
							 .buf = a->s[3],
							 .lr = 0.1f,
							 .mu = 0.9f,
							 .tail_from = UINT64_MAX };
		k.n = N - 1;
		break;
	case LAUNCH_PACK:
		k.pack = (struct k_pack){ a->s[1], a->s[0], 5, 5, 7, DTYPE_BF16, DTYPE_FP32 };
		k.n = N / 7 * 5;
		break;
	case LAUNCH_ASSEMBLE:
		a->box = (struct k_assemble_box){ .src = a->s[0],
						  .src_dtype = DTYPE_FP32,
						  .n = { 1, 1, BLOCKS * BLOCK } };
		a->box.src_stride[2] = 1;
		a->tensor =
			(struct k_assemble_tensor){ a->s[1], DTYPE_BF16, false, &a->box, 1, NULL };
		for (unsigned b = 0; b < BLOCKS; b++)
			a->blocks[b] =
				(struct k_assemble_block){ 0, BLOCK, b * UINT64_C(1) * BLOCK };
		k.assemble = (struct k_assemble){ &a->tensor, a->blocks,       NULL, 6 * BLOCK,
						  NULL,       K_ASSEMBLE_MAKE, 0 };
		k.n = BLOCKS;
		break;
	case LAUNCH_FILL:
		k.fill = (struct k_fill){ a->s[3], 42, 7, 11, FILL_NORMAL, 0.0, 0.02 };
		break;
	default:
		k.copy = (struct k_copy){ a->s[1], a->s[0] };
		k.n = N * sizeof(float);
	}
	return k;
}

static void run_ref(const struct launch *k)
{
	const struct kernels *ref = kernels_ref();

	switch (k->kind) {
	case LAUNCH_CAST:
		return ref->cast(&k->cast, 0, k->n);
	case LAUNCH_REDUCE:
		return ref->reduce(&k->reduce, 0, k->n);
	case LAUNCH_ALL_REDUCE:
		return ref->all_reduce(&k->all_reduce, 0, k->n);
	case LAUNCH_ADAMW:
		return ref->adamw(&k->adamw, 0, k->n);
	case LAUNCH_ADAM:
		return ref->adam(&k->adam, 0, k->n);
	case LAUNCH_FOUND_INF:
		return ref->found_inf(&k->found_inf, 0, k->n);
	case LAUNCH_ASSEMBLE:
		return ref->assemble(&k->assemble, 0, k->n);
	case LAUNCH_PACK:
		return ref->pack(&k->pack, 0, k->n);
	case LAUNCH_CLAMP:
		return ref->clamp(&k->clamp, 0, k->n);
	case LAUNCH_UNSCALE:
		return ref->unscale(&k->unscale, 0, k->n);
	case LAUNCH_ADD_ROWS:
		return ref->add_rows(&k->add_rows, 0, k->n);
	case LAUNCH_REDUCE_STEP:
		return ref->reduce_step(&k->reduce_step, 0, k->n);
	case LAUNCH_SGD:
		return ref->sgd(&k->sgd, 0, k->n);
	case LAUNCH_NORM:
		return ref->norm(&k->norm, 0, k->n);
	case LAUNCH_SCALE:
		return ref->scale(&k->scale, 0, k->n);
	case LAUNCH_FILL:
		return ref->fill(&k->fill, 0, k->n);
	default:
		return ref->copy(&k->copy, 0, k->n);
	}
}

Test(backend_host, every_kernel_gives_the_reference_result_bit_for_bit)
{
	struct fixture f;

	setup(&f, 3, 0);
	for (int kind = 0; kind < _LAUNCH_N; kind++) {
		struct arena here, there, before;
		struct launch k, ref;
		bool changed = false;

		arena_init(&here);
		arena_init(&there);
		arena_init(&before);
		k = make_launch(kind, &here);
		ref = make_launch(kind, &there);
		run_launches(&f, &k, 1);
		run_ref(&ref);
		for (unsigned s = 0; s < SECTIONS; s++) {
			cr_assert_arr_eq(here.s[s], there.s[s], N * sizeof(float),
					 "kind %d, section %u", kind, s);
			changed |= memcmp(here.s[s], before.s[s], N * sizeof(float)) != 0;
		}
		cr_assert(changed, "kind %d did nothing", kind);
		arena_deinit(&here);
		arena_deinit(&there);
		arena_deinit(&before);
	}
	teardown(&f);
}

Test(backend_host, a_task_of_nothing_completes_later)
{
	struct fixture f;
	struct launch empty[3] = { { .kind = LAUNCH_COPY },
				   { .kind = LAUNCH_SCALE },
				   { .kind = LAUNCH_NORM } };

	setup(&f, 2, 0);
	run_launches(&f, NULL, 0);
	run_launches(&f, empty, 3);
	teardown(&f);
}

Test(backend_host, kernels_of_no_elements_between_others_are_passed_over)
{
	struct fixture f;
	float x[2] = { 1, 2 };
	struct launch launches[5] = {
		{ .kind = LAUNCH_SCALE, .n = 0 },
		{ .kind = LAUNCH_SCALE, .n = 1, .scale = { &x[0], 3, NULL } },
		{ .kind = LAUNCH_SCALE, .n = 0 },
		{ .kind = LAUNCH_SCALE, .n = 1, .scale = { &x[1], 5, NULL } },
		{ .kind = LAUNCH_COPY, .n = 0 },
	};

	setup(&f, 2, 0);
	run_launches(&f, launches, 5);
	cr_assert_eq(x[0], 3.0f);
	cr_assert_eq(x[1], 10.0f);
	teardown(&f);
}

#define TASKS 1000u

static bool all_done(void *arg)
{
	const struct counted *c = arg;

	for (unsigned i = 0; i < TASKS; i++)
		if (c[i].done == 0)
			return false;
	return true;
}

Test(backend_host, a_burst_of_tasks_completes_each_once)
{
	static struct counted c[TASKS];
	static struct launch launches[TASKS];
	static float x[TASKS];
	struct fixture f;

	setup(&f, 4, 0);
	for (unsigned i = 0; i < TASKS; i++) {
		x[i] = (float)i;
		launches[i] = (struct launch){ .kind = LAUNCH_SCALE, .n = i % 5 ? 1 : 0 };
		launches[i].scale = (struct k_scale){ &x[i], 2, NULL };
		c[i].task = (struct backend_task){ .launches = &launches[i],
						   .n_launches = 1,
						   .done = on_done };
		backend_submit(f.b, &c[i].task);
	}
	cr_assert_eq(backend_in_flight(f.b), TASKS);
	looprun_until(&f.run, all_done, c, 30);
	for (unsigned i = 0; i < TASKS; i++) {
		cr_assert_eq(c[i].done, 1);
		cr_assert_eq(x[i], i % 5 ? 2 * (float)i : (float)i);
	}
	teardown(&f);
}

#define HOG_TASKS 64u
#define HOG_N     (4u << 20)

static bool ours_is_done(void *arg)
{
	const struct counted *ours = arg;

	return ours->done > 0;
}

static bool hogs_are_done(void *arg)
{
	const struct counted *c = arg;

	for (unsigned i = 0; i < HOG_TASKS; i++)
		if (!c[i].done)
			return false;
	return true;
}

/* Tasks began in the order in which they came: a user's queue of large ones kept another user's
 * small one waiting for all of them. */
Test(backend_host, a_small_task_does_not_wait_for_the_large_ones_of_another_user)
{
	static struct counted hog[HOG_TASKS], ours;
	static struct launch launches[HOG_TASKS];
	float *x = calloc(HOG_N, sizeof(*x)), y = 3;
	struct launch launch = { .kind = LAUNCH_SCALE, .n = 1, .scale = { &y, 2, NULL } };
	struct fixture f;
	unsigned before = 0;

	setup(&f, 1, 0);
	for (unsigned i = 0; i < HOG_TASKS; i++) {
		launches[i] = (struct launch){ .kind = LAUNCH_SCALE,
					       .n = HOG_N,
					       .scale = { x, 1, NULL } };
		hog[i].task = (struct backend_task){ .launches = &launches[i],
						     .n_launches = 1,
						     .done = on_done,
						     .owner = { 1000, 1, 0 } };
		backend_submit(f.b, &hog[i].task);
	}
	ours.task = (struct backend_task){
		.launches = &launch, .n_launches = 1, .done = on_done, .owner = { 2000, 2, 0 }
	};
	backend_submit(f.b, &ours.task);
	looprun_until(&f.run, ours_is_done, &ours, 30);
	for (unsigned i = 0; i < HOG_TASKS; i++)
		before += hog[i].done > 0;
	cr_expect_lt(before, HOG_TASKS / 2, "%u of %u large ones came first", before, HOG_TASKS);
	cr_expect_eq(y, 6.0f);
	looprun_until(&f.run, hogs_are_done, hog, 60);
	free(x);
	teardown(&f);
}

Test(backend_host, threads_are_spread_over_numa_nodes)
{
	struct host_topology t;
	struct fixture f;
	float x = 2;
	struct launch launch = { .kind = LAUNCH_SCALE, .n = 1, .scale = { &x, 4, NULL } };

	setenv("HWLOC_SYNTHETIC", "numa:2 core:2 pu:1", 1);
	cr_assert_eq(host_topology_init(&t), 0);
	cr_assert_eq(t.n_nodes, 2);
	cr_assert_eq(t.cores, 4);
	cr_assert(CPU_ISSET(1, &t.node_cpus[0]) && !CPU_ISSET(2, &t.node_cpus[0]));
	cr_assert(CPU_ISSET(2, &t.node_cpus[1]) && !CPU_ISSET(1, &t.node_cpus[1]));
	host_topology_deinit(&t);
	host_topology_deinit(&t);
	setup(&f, 0, 0);
	cr_assert_eq(backend_info(f.b)->threads, 4);
	cr_assert(strstr(backend_info(f.b)->detail, "NUMA nodes 2"));
	run_launches(&f, &launch, 1);
	cr_assert_eq(x, 8.0f);
	teardown(&f);
}

static void on_seen(struct backend_task *task, int status)
{
	cr_expect_eq(status, 0);
	cr_expect_eq(CONTAINER_OF(task, struct counted, task)->done, 0, "before done");
	++*(unsigned *)task->record;
}

/* The second of two tasks that are submitted together begins when threads are free, not when
 * it was submitted; and the times of a task are not those of the one before in its place. */
Test(backend_host, a_task_says_when_its_kernels_began_and_ended)
{
	enum { ELEMENTS = 1 << 22 };
	float *x = calloc(ELEMENTS, sizeof(*x));
	struct launch launch[2] = {
		{ .kind = LAUNCH_SCALE, .n = ELEMENTS, .scale = { x, 2, NULL } },
		{ .kind = LAUNCH_SCALE, .n = 1, .scale = { x, 2, NULL } }
	};
	struct counted c[2] = { 0 };
	unsigned seen[2] = { 0 };
	struct fixture f;
	uint64_t before;

	cr_assert_not_null(x);
	setup(&f, 1, 0);
	before = clock_now_us();
	for (unsigned i = 0; i < 2; i++) {
		c[i].task = (struct backend_task){ .launches = &launch[i],
						   .n_launches = 1,
						   .done = on_done,
						   .seen = on_seen,
						   .record = &seen[i] };
		backend_submit(f.b, &c[i].task);
	}
	looprun_until(&f.run, is_done, &c[0], 30);
	looprun_until(&f.run, is_done, &c[1], 30);
	cr_expect_geq(c[0].task.began_us, before);
	cr_expect_geq(c[0].task.ended_us, c[0].task.began_us);
	cr_expect_geq(c[1].task.began_us, c[0].task.ended_us);
	cr_expect_geq(c[1].task.ended_us, c[1].task.began_us);
	cr_expect_leq(c[1].task.ended_us, clock_now_us());
	cr_expect_eq(seen[0], 1);
	c[1].done = 0;
	c[1].task.n_launches = 0;
	backend_submit(f.b, &c[1].task);
	looprun_until(&f.run, is_done, &c[1], 30);
	cr_expect_eq(c[1].task.began_us, 0, "it has none");
	teardown(&f);
	free(x);
}

/* ------------------------------------------------------------- pages made ahead */

Test(backend_host, pages_are_made_before_they_are_used)
{
	const uint64_t bytes = 37 * MIB;
	struct backend_mem *mem;
	struct fixture f;
	int fd;

	setup_filling(&f, 1, 0, true);
	if (strstr(backend_info(f.b)->detail, "advise"))
		cr_skip("huge pages come with the first touch here");
	mem = alloc(&f, bytes);
	fd = export(&f, mem, false);
	AWAIT(bytes_there(fd) >= bytes, 30);
	cr_assert_eq(bytes_there(fd), bytes);
	cr_assert_eq(((char *)backend_addr(mem))[bytes - 1], 0);
	close(fd);
	backend_free(f.b, mem);
	teardown(&f);
}

/* The helper makes pages in the order of the allocations: when those of the second are there, it is
 * through with the first. */
Test(backend_host, pages_of_emptied_memory_are_not_made)
{
	struct backend_mem *mem, *next;
	struct fixture f;
	int fd, last;

	setup_filling(&f, 1, 0, true);
	if (strstr(backend_info(f.b)->detail, "advise"))
		cr_skip("huge pages come with the first touch here");
	mem = alloc(&f, 256 * MIB);
	fd = export(&f, mem, false);
	AWAIT(bytes_there(fd) > 0, 30);
	backend_empty(f.b, mem);
	next = alloc(&f, MIB);
	last = export(&f, next, false);
	AWAIT(bytes_there(last) >= MIB && !bytes_there(fd), 30);
	cr_assert_eq(bytes_there(last), MIB);
	close(fd);
	close(last);
	backend_free(f.b, mem);
	backend_free(f.b, next);
	teardown(&f);
}

static unsigned n_threads_named(const char *wanted)
{
	DIR *dir = opendir("/proc/self/task");
	struct dirent *e;
	unsigned n = 0;

	cr_assert_not_null(dir);
	while ((e = readdir(dir))) {
		char path[320], name[64] = "";
		FILE *comm;

		snprintf(path, sizeof(path), "/proc/self/task/%s/comm", e->d_name);
		comm = e->d_name[0] == '.' ? NULL : fopen(path, "re");
		if (!comm)
			continue;
		if (fscanf(comm, "%63s", name) == 1)
			n += strcmp(name, wanted) == 0;
		fclose(comm);
	}
	closedir(dir);
	return n;
}

Test(backend_host, without_prefault_nobody_makes_pages)
{
	struct fixture f;

	setup(&f, 1, 0);
	cr_assert_eq(n_threads_named("shardd-fill"), 0);
	teardown(&f);
	setup_filling(&f, 1, 0, true);
	if (!strstr(backend_info(f.b)->detail, "advise"))
		cr_assert_eq(n_threads_named("shardd-fill"), 1);
	teardown(&f);
}

/* Freed while it waits, while it is at work, and with the backend: in turn N when the helper has made
 * pages of the first N. */
Test(backend_host, memory_is_freed_while_its_pages_are_made)
{
	struct backend_mem *mem[64];
	struct fixture f;
	bool fills;
	int fd;

	for (unsigned turn = 0; turn < 4; turn++) {
		setup_filling(&f, 1, 0, true);
		fills = !strstr(backend_info(f.b)->detail, "advise");
		for (unsigned i = 0; i < ARRAY_SIZE(mem); i++)
			mem[i] = alloc(&f, 8 * MIB);
		if (turn && fills) {
			fd = export(&f, mem[turn - 1], false);
			AWAIT(bytes_there(fd) > 0, 30);
			close(fd);
		}
		for (unsigned i = 0; i < ARRAY_SIZE(mem); i++)
			backend_free(f.b, mem[turn % 2 ? ARRAY_SIZE(mem) - 1 - i : i]);
		teardown(&f);
	}
}

/* What somebody else is about to write into files in memory is not there for allocations. */
Test(backend_host, promises_of_others_count)
{
	struct host_promise p = { .bytes = 30 * MIB };
	char path[64], why[192];
	struct backend_mem *mem;
	struct fixture f;
	FILE *file;

	snprintf(path, sizeof(path), "/tmp/shardd-room-%d", getpid());
	file = fopen(path, "we");
	cr_assert(file);
	fprintf(file, "MemTotal: 524288 kB\nMemAvailable: %u kB\n", (16 + 40) * 1024);
	fclose(file);
	setup(&f, 1, 0);
	backend_room(f.b)->place.meminfo = path;
	cr_assert(host_room_take(backend_room(f.b), p.bytes, why, sizeof(why)));
	host_room_promise(backend_room(f.b), &p);
	cr_expect_eq(backend_alloc(f.b, 20 * MIB, BACKEND_SHARE_FD, &mem), BACKEND_E_FULL);
	clock_fake(clock_now_us() + 1000000);
	cr_expect_eq(backend_alloc(f.b, 20 * MIB, BACKEND_SHARE_FD, &mem), BACKEND_E_FULL);
	list_unlink(&p.link);
	clock_fake(clock_now_us() + 1000000);
	backend_free(f.b, alloc(&f, 20 * MIB));
	clock_real();
	teardown(&f);
	unlink(path);
}
