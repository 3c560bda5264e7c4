/*
 * A process that is killed at any instruction of a step leaves what a successor completes: the
 * result is bit for bit that of a step that nobody disturbed. The process is executed instruction
 * by instruction; after each, a copy of what it shares is completed.
 */
#include <criterion/criterion.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/ptrace.h>
#include <sys/wait.h>
#include <unistd.h>

#include "backend/launch.h"
#include "backend/redo_impl.h"
#include "core/check.h"
#include "fdcheck.h"
#include "longform.h"

TestSuite(redo, .init = fdcheck_begin, .fini = fdcheck_end, .timeout = 300);

enum { ARRAYS = 5, MOST = KERNEL_NORM_BLOCK + 1000 };

/* p, m, v, vmax, g: the slabs 1 to 5 of a process. */
struct arrays {
	float a[ARRAYS][MOST];
};

struct redo_case {
	const char *name;
	const char *kernels;
	struct launch launch; /* its arrays are set by place_launch */
	uint64_t n;
	bool max;
	unsigned every; /* instruction is looked at */
};

/* The address sanitizer's own instructions are looked at, too, and there are five times as many. Of
 * the data's moments every third is looked at then. */
#define MORE_RARELY 15u

static const struct k_adam_f64 f64 = { .decay = 0.99,
				       .wd = 0.1,
				       .b1 = 0.9,
				       .w1 = 0.1,
				       .b2 = 0.99,
				       .w2 = 0.01,
				       .step_size = 0.05,
				       .sq = 0.3,
				       .eps = 1e-8 };

#define ADAM_CASE                                                                           \
	.w1 = 0.1f, .b2 = 0.99f, .w2 = 0.01f, .step_size = 0.05f, .sq = 0.3f, .eps = 1e-8f, \
	.tail_from = UINT64_MAX, .f64 = f64

/* @at: of this process. */
static void place_launch(struct launch *l, struct arrays *at, bool max)
{
	void **arrays[REDO_ARRAYS];
	unsigned n = redo_arrays(l, arrays);

	for (unsigned i = 0; i < n; i++)
		*arrays[i] = at->a[i];
	if (l->kind == LAUNCH_SGD) /* p, buf, g */
		*arrays[2] = at->a[4];
	if (l->kind == LAUNCH_SGD && l->sgd.mu == 0)
		*arrays[1] = NULL;
	if (n == 5 && !max)
		*arrays[3] = NULL;
}

static struct redo_place find_place(void *arg, const void *at)
{
	struct arrays *all = arg;

	for (unsigned i = 0; i < ARRAYS; i++)
		if ((const float *)at == all->a[i])
			return (struct redo_place){ 0, i + 1 };
	cr_assert_fail("a pointer to no array");
	return (struct redo_place){ 0 };
}

static void *find_addr(void *arg, struct redo_place place, uint64_t bytes)
{
	struct arrays *all = arg;

	if (place.slab > ARRAYS || place.offset + bytes > sizeof(all->a[0]))
		return NULL;
	return (char *)all->a[place.slab - 1] + place.offset;
}

static void *shared(size_t bytes)
{
	void *at = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);

	cr_assert(at != MAP_FAILED);
	return at;
}

static void fill(struct arrays *all, uint64_t n)
{
	uint64_t x = 88172645463325252u;

	for (unsigned a = 0; a < ARRAYS; a++)
		for (uint64_t i = 0; i < n; i++) {
			x ^= x << 13, x ^= x >> 7, x ^= x << 17;
			all->a[a][i] = (float)(x >> 40) * 0x1p-24f + (a == 0 || a == 4 ? -0.5f : 0);
		}
}

/* One process's state. */
struct scene {
	const struct redo_case *c;
	const struct kernels *k;
	struct redo *redo;
	struct arrays *at;
	uint64_t number;
	uint64_t begin; /* of its step: cells before it are done */
};

static bool same(const struct arrays *a, const struct arrays *b, uint64_t n)
{
	for (unsigned i = 0; i < ARRAYS; i++)
		if (memcmp(a->a[i], b->a[i], n * sizeof(float)) != 0)
			return false;
	return true;
}

/* The state of @from, as it is just now, in @to, whose memfd has the same size. */
static void copy_scene(struct scene *to, const struct scene *from)
{
	size_t bytes = REDO_FRONT + REDO_WINDOW;
	char *a = mmap(NULL, bytes, PROT_READ, MAP_SHARED, redo_fd(from->redo), 0);
	char *b = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, redo_fd(to->redo), 0);

	cr_assert(a != MAP_FAILED && b != MAP_FAILED);
	memcpy(b, a, REDO_SLOT_AT(2));
	memcpy(b + REDO_FRONT, a + REDO_FRONT, REDO_WINDOW);
	munmap(a, bytes);
	munmap(b, bytes);
	for (unsigned i = 0; i < ARRAYS; i++)
		memcpy(to->at->a[i], from->at->a[i], from->c->n * sizeof(float));
}

/* As a successor finds it. */
static void complete(const struct scene *s, unsigned threads)
{
	struct fault f = FAULT_NULL;
	struct redo *r = NULL;

	cr_assert_eq(redo_open(redo_fd(s->redo), threads, &r, &f), 0, "%s", f.text);
	if (redo_has(r, s->number))
		cr_assert_eq(redo_complete(r, s->number, s->k, threads, find_addr, s->at, &f), 0,
			     "%s", f.text);
	redo_free(r);
}

static void step(struct scene *s, struct redo_task *t)
{
	struct launch l = s->c->launch;

	place_launch(&l, s->at, s->c->max);
	for (uint64_t at = s->begin; at < l.n; at += KERNEL_NORM_BLOCK)
		redo_run(t, 0, 0, s->k, &l, at,
			 l.n - at < KERNEL_NORM_BLOCK ? l.n : at + KERNEL_NORM_BLOCK);
	redo_task_free(t);
}

static struct redo_task *write_down(struct scene *s)
{
	struct redo_task *t = redo_task_new(s->redo, 1, redo_cells(s->c->n));
	struct launch l = s->c->launch;

	cr_assert(t);
	place_launch(&l, s->at, s->c->max);
	redo_task_add(t, 0, &l, find_place, s->at);
	s->number = redo_task_publish(t);
	return t;
}

static struct scene scene_new(const struct redo_case *c)
{
	struct scene s = { .c = c,
			   .k = kernels_named(c->kernels),
			   .at = shared(sizeof(struct arrays)) };

	cr_assert_eq(redo_new(2, &s.redo), 0);
	return s;
}

static void scene_free(struct scene *s)
{
	s->redo = redo_free(s->redo);
	munmap(s->at, sizeof(*s->at));
}

static pid_t start_traced(struct scene *s, struct redo_task *t)
{
	pid_t pid = fork();
	int status;

	cr_assert(pid >= 0);
	if (pid == 0) {
		CHECK(ptrace(PTRACE_TRACEME, 0, NULL, NULL) == 0);
		raise(SIGSTOP);
		if (t)
			step(s, t);
		else
			complete(s, 1);
		raise(SIGSTOP);
		_exit(0);
	}
	cr_assert_eq(waitpid(pid, &status, 0), pid);
	cr_assert(WIFSTOPPED(status), "cannot trace: status %x", (unsigned)status);
	return pid;
}

/* Return: false: it has ended its work. */
static bool one_instruction(pid_t pid)
{
	int status;

	cr_assert_eq(ptrace(PTRACE_SINGLESTEP, pid, NULL, NULL), 0);
	cr_assert_eq(waitpid(pid, &status, 0), pid);
	cr_assert(WIFSTOPPED(status), "status %x", (unsigned)status);
	return WSTOPSIG(status) == SIGTRAP;
}

static void end_traced(pid_t pid)
{
	kill(pid, SIGKILL);
	waitpid(pid, NULL, 0);
}

/* Execute @s to its end, with @t or as a successor; complete a copy of it after each instruction.
 * Return: instructions that were looked at. */
static unsigned watch(struct scene *s, struct redo_task *t, const struct arrays *want)
{
	struct scene copy = scene_new(s->c);
	pid_t pid = start_traced(s, t);
	unsigned looks = 0, wrong = 0, every = s->c->every * (longform_cut() ? MORE_RARELY : 1);
	uint64_t i = 0;

	copy.number = s->number;
	cr_assert_eq(ftruncate(redo_fd(copy.redo), REDO_FRONT + REDO_WINDOW), 0);
	for (; one_instruction(pid); i++) {
		if (i % every)
			continue;
		looks++;
		copy_scene(&copy, s);
		if (i % 3 == 0) /* the successor's successor, too, and with more threads */
			complete(&copy, 2);
		complete(&copy, 1);
		/* without a number the step is over or, for others than us, never began */
		wrong += !same(copy.at, want, s->c->n);
	}
	end_traced(pid);
	cr_expect_eq(wrong, 0, "%s %s: %u of %u instants", s->c->name, s->c->kernels, wrong, looks);
	scene_free(&copy);
	return looks;
}

static void run_first_cell(struct scene *s, struct redo_task *t)
{
	struct launch l = s->c->launch;

	place_launch(&l, s->at, s->c->max);
	redo_run(t, 0, 1, s->k, &l, 0, KERNEL_NORM_BLOCK);
}

static void check_case(const struct redo_case *c)
{
	struct arrays *want = shared(sizeof(*want));
	struct scene s = scene_new(c);
	struct launch l = c->launch;
	struct redo_task *t;
	unsigned looks;

	cr_log_info("%s %s", c->name, c->kernels);
	fill(s.at, c->n);
	fill(want, c->n);
	place_launch(&l, want, c->max);
	launch_run(s.k, &l, 0, l.n);
	cr_assert_not(same(s.at, want, c->n), "the step changes nothing");
	t = write_down(&s);
	s.begin = c->n > KERNEL_NORM_BLOCK ? KERNEL_NORM_BLOCK : 0;
	if (s.begin)
		run_first_cell(&s, t);
	looks = watch(&s, t, want);
	cr_expect(same(s.at, want, c->n));
	cr_expect_gt(looks, 50);
	redo_task_free(t);
	scene_free(&s);
	munmap(want, sizeof(*want));
}

#define ADAMW_LAUNCH(elements, prof)                            \
	{                                                       \
		.kind = LAUNCH_ADAMW, .n = elements, .adamw = { \
			ADAM_CASE,                              \
			.decay = 0.99f,                         \
			.b1 = 0.9f,                             \
			.profile = prof                         \
		}                                               \
	}

static const char *const variants[] = { "ref", "portable", "avx2", "avx512" };

static void check_variants(struct redo_case c)
{
	c.launch.n = c.n;
	for (unsigned i = 0; i < ARRAY_SIZE(variants); i++) {
		c.kernels = variants[i];
		if (kernels_named(c.kernels))
			check_case(&c);
	}
}

Test(redo, adamw_is_completed_from_any_instruction)
{
	check_variants((struct redo_case){
		.name = "adamw", .n = 130, .every = 5, .launch = ADAMW_LAUNCH(200, K_FOREACH) });
}

Test(redo, amsgrad_is_completed_from_any_instruction)
{
	check_variants((struct redo_case){ .name = "amsgrad",
					   .n = 130,
					   .every = 13,
					   .max = true,
					   .launch = ADAMW_LAUNCH(130, K_FOREACH) });
}

Test(redo, fused_adamw_with_a_tail_is_completed_from_any_instruction)
{
	struct redo_case c = {
		.name = "fused adamw", .n = 133, .every = 13, .launch = ADAMW_LAUNCH(133, K_FUSED)
	};

	c.launch.adamw.tail_from = 128;
	check_variants(c);
}

Test(redo, adam_in_double_is_completed_from_any_instruction)
{
	check_variants((struct redo_case){
		.name = "adam f64",
		.n = 100,
		.every = 13,
		.launch = { .kind = LAUNCH_ADAM,
			    .adam = { ADAM_CASE, .wd = 0.1f, .profile = K_REFERENCE_F64 } } });
}

Test(redo, sgd_is_completed_from_any_instruction)
{
	struct redo_case c = { .name = "sgd",
			       .n = 300,
			       .every = 13,
			       .launch = { .kind = LAUNCH_SGD,
					   .sgd = { .lr = 0.1f,
						    .wd = 0.01f,
						    .tail_from = UINT64_MAX,
						    .profile = K_FOREACH } } };

	check_variants(c);
	c.name = "sgd with momentum";
	c.launch.sgd.mu = 0.9f;
	c.launch.sgd.nesterov = true;
	check_variants(c);
}

Test(redo, a_factor_is_multiplied_once)
{
	check_variants((struct redo_case){
		.name = "scale",
		.n = 300,
		.every = 13,
		.launch = { .kind = LAUNCH_SCALE, .scale = { .factor = 0.3f } } });
}

Test(redo, cells_that_are_done_are_not_done_again)
{
	struct redo_case c = { .name = "two cells",
			       .kernels = "portable",
			       .n = KERNEL_NORM_BLOCK + 777,
			       .every = 53,
			       .launch = ADAMW_LAUNCH(KERNEL_NORM_BLOCK + 777, K_FOREACH) };

	check_case(&c);
}

/* The process that completes a step is killed itself. */
Test(redo, completing_is_completed_from_any_instruction)
{
	struct redo_case c = { .name = "completing",
			       .kernels = "portable",
			       .n = 200,
			       .every = 3,
			       .launch = ADAMW_LAUNCH(200, K_FOREACH) };
	struct arrays *want = shared(sizeof(*want));
	struct scene s = scene_new(&c), half = scene_new(&c);
	struct launch l = c.launch;
	struct redo_task *t;
	pid_t pid;

	fill(s.at, c.n);
	fill(want, c.n);
	place_launch(&l, want, false);
	launch_run(s.k, &l, 0, l.n);
	t = write_down(&s);
	pid = start_traced(&s, t);
	while (one_instruction(pid) && s.at->a[0][100] != want->a[0][100])
		;
	cr_assert_neq(s.at->a[0][199], want->a[0][199]);
	half.number = s.number;
	cr_assert_eq(ftruncate(redo_fd(half.redo), REDO_FRONT + REDO_WINDOW), 0);
	copy_scene(&half, &s);
	end_traced(pid);
	cr_expect_gt(watch(&half, NULL, want), 50);
	cr_expect(same(half.at, want, c.n));
	redo_task_free(t);
	scene_free(&half);
	scene_free(&s);
	munmap(want, sizeof(*want));
}

/* Phases, several launches and several threads; nothing was done yet. */
Test(redo, a_step_that_was_only_written_down_is_done)
{
	enum { N = KERNEL_NORM_BLOCK + 5 };
	struct redo_case c = { .name = "phases", .kernels = "ref", .n = N };
	struct arrays *want = shared(sizeof(*want));
	struct scene s = scene_new(&c);
	struct launch scale = { .kind = LAUNCH_SCALE, .n = N, .scale = { .factor = 0.5f } };
	struct launch sgd = { .kind = LAUNCH_SGD,
			      .n = N,
			      .sgd = { .lr = 0.1f, .tail_from = UINT64_MAX } };
	struct redo_task *t = redo_task_new(s.redo, 2, 2 * redo_cells(N));

	fill(s.at, N);
	fill(want, N);
	scale.scale.x = want->a[4];
	place_launch(&sgd, want, false);
	launch_run(s.k, &scale, 0, N);
	launch_run(s.k, &sgd, 0, N);
	scale.scale.x = s.at->a[4];
	place_launch(&sgd, s.at, false);
	redo_task_add(t, 0, &scale, find_place, s.at);
	redo_task_add(t, 1, &sgd, find_place, s.at);
	s.number = redo_task_publish(t);
	complete(&s, 2);
	cr_expect(same(s.at, want, N));
	complete(&s, 1); /* there is nothing left to do */
	cr_expect(same(s.at, want, N));
	redo_task_free(t);
	scene_free(&s);
	munmap(want, sizeof(*want));
}

/* Of two tasks the second one was interrupted, on the thread that completes the first one. */
Test(redo, tasks_are_repaired_before_one_is_completed)
{
	enum { N = 300, INTERRUPTED_AT = 128 };
	const struct kernels *k = kernels_host();
	struct arrays *at = shared(sizeof(*at));
	struct fault f = FAULT_NULL;
	struct redo_task *tasks[2];
	struct launch launches[2];
	struct redo *r, *next;
	uint64_t numbers[2];

	cr_assert_eq(redo_new(1, &r), 0);
	for (unsigned i = 0; i < 2; i++) {
		for (unsigned e = 0; e < N; e++)
			at->a[i][e] = 8;
		launches[i] = (struct launch){ .kind = LAUNCH_SCALE, .n = N };
		launches[i].scale = (struct k_scale){ .x = at->a[i], .factor = 0.5f };
		tasks[i] = redo_task_new(r, 1, redo_cells(N));
		redo_task_add(tasks[i], 0, &launches[i], find_place, at);
		numbers[i] = redo_task_publish(tasks[i]);
	}
	redo_slot_begin(redo_slot(r, 0), tasks[1], 0, 0, N);
	redo_set_undo(&launches[1], &redo_slot(r, 0)->undo);
	launch_run(k, &launches[1], 0, INTERRUPTED_AT);
	cr_assert_eq(redo_open(redo_fd(r), 1, &next, &f), 0);
	for (unsigned i = 0; i < 2; i++)
		cr_assert_eq(redo_repair(next, numbers[i], k, find_addr, at, &f), 0, "%s", f.text);
	for (unsigned i = 0; i < 2; i++)
		cr_assert_eq(redo_complete(next, numbers[i], k, 1, find_addr, at, &f), 0, "%s",
			     f.text);
	for (unsigned i = 0; i < 2; i++)
		for (unsigned e = 0; e < N; e++)
			cr_expect_eq(at->a[i][e], 4, "task %u, element %u", i, e);
	redo_free(next);
	for (unsigned i = 0; i < 2; i++)
		redo_task_free(tasks[i]);
	redo_free(r);
	munmap(at, sizeof(*at));
}

/* Of two tasks that were not begun one is kept by a successor, which completes it later, bit by bit, beside tasks
 * of its own. */
Test(redo, a_task_that_is_kept_is_completed_in_parts)
{
	const struct kernels *k = kernels_host();
	struct arrays *at = shared(sizeof(*at));
	struct fault f = FAULT_NULL;
	struct redo_task *tasks[2], *own;
	struct launch launch = { .kind = LAUNCH_SCALE, .n = MOST, .scale = { .factor = 0.5f } };
	struct redo *r, *next;
	uint64_t numbers[2];
	unsigned parts = 0;
	bool left = true;

	cr_assert_eq(redo_new(2, &r), 0);
	for (unsigned i = 0; i < 2; i++) {
		launch.scale.x = at->a[i];
		tasks[i] = redo_task_new(r, 2, redo_cells(MOST) + 7);
		redo_task_add(tasks[i], 0, &launch, find_place, at);
		numbers[i] = redo_task_publish(tasks[i]);
		cr_expect_eq(redo_task_publish(tasks[i]), numbers[i]);
	}
	for (unsigned e = 0; e < MOST; e++)
		at->a[0][e] = at->a[1][e] = 8;
	cr_assert_eq(redo_open(redo_fd(r), 2, &next, &f), 0);
	redo_keep(next, &numbers[1], 1);
	cr_expect(!redo_has(next, numbers[0]));
	cr_expect(redo_has(next, numbers[1]));
	own = redo_task_new(next, 1, 1);
	cr_expect_neq(own->head, tasks[1]->head);
	cr_expect_gt(redo_task_publish(own), numbers[1]);
	while (left && parts++ < 10)
		cr_assert_eq(redo_complete_some(next, numbers[1], k, 1, 1, find_addr, at, &left,
						&f),
			     0, "%s", f.text);
	cr_expect(!left);
	cr_expect_eq(parts, redo_cells(MOST));
	for (unsigned e = 0; e < MOST; e++)
		cr_expect(at->a[0][e] == 8 && at->a[1][e] == 4, "element %u", e);
	redo_drop(next, numbers[1]);
	cr_expect(!redo_has(next, numbers[1]));
	redo_drop(next, numbers[1]);
	redo_task_free(own);
	redo_free(next);
	for (unsigned i = 0; i < 2; i++)
		redo_task_free(tasks[i]);
	redo_free(r);
	munmap(at, sizeof(*at));
}

/* What is done once per cell would be done, and noted, once per launch. */
Test(redo, launches_that_share_cells_or_have_no_phase_are_refused)
{
	enum { LAUNCHES = 64 };
	const struct redo_case c = { .name = "shared", .kernels = "ref", .n = 1 };
	struct launch scale = { .kind = LAUNCH_SCALE, .n = 1, .scale = { .factor = 1 } };
	struct scene s = scene_new(&c);
	struct redo_task *t = redo_task_new(s.redo, LAUNCHES, LAUNCHES);
	struct fault f = FAULT_NULL;
	struct redo *r;

	scale.scale.x = s.at->a[0];
	for (unsigned i = 0; i < LAUNCHES; i++)
		redo_task_add(t, 1, &scale, find_place, s.at);
	s.number = redo_task_publish(t);
	for (unsigned damage = 0; damage < 2; damage++) {
		t->head->n_cells = damage ? LAUNCHES : 1;
		for (unsigned i = 0; i < LAUNCHES; i++)
			t->head->launches[i].first_cell = damage ? i : 0;
		t->head->launches[1].phase = damage ? UINT32_MAX : 1;
		cr_assert_eq(redo_open(redo_fd(s.redo), 1, &r, &f), 0);
		cr_expect_neq(redo_complete(r, s.number, s.k, 1, find_addr, s.at, &f), 0);
		cr_expect(strstr(f.text, "a launch is none"), "%s", f.text);
		f = FAULT_NULL;
		redo_free(r);
	}
	redo_task_free(t);
	scene_free(&s);
}

Test(redo, a_damaged_file_is_refused)
{
	const struct redo_case c = {
		.name = "damage", .kernels = "ref", .n = 100, .launch = ADAMW_LAUNCH(100, K_FOREACH)
	};
	struct scene s = scene_new(&c);
	struct redo_task *t = write_down(&s);
	struct redo_head *h = t->head;
	struct redo_launch good = h->launches[0];
	struct fault f = FAULT_NULL;
	struct redo *r;
	const struct {
		uint64_t n, cell;
		uint32_t slab;
		const char *text;
	} bad[] = {
		{ UINT64_MAX, 0, 1, "a launch is none" },
		{ 100, 5, 1, "a launch is none" },
		{ 100, 0, 77, "memory that is not there" },
		{ 100, 0, 0, "changes nothing" },
	};

	for (unsigned i = 0; i < ARRAY_SIZE(bad); i++) {
		h->launches[0] = good;
		h->launches[0].launch.n = bad[i].n;
		h->launches[0].first_cell = bad[i].cell;
		h->launches[0].at[0].slab = bad[i].slab;
		cr_assert_eq(redo_open(redo_fd(s.redo), 1, &r, &f), 0);
		cr_expect_neq(redo_complete(r, s.number, s.k, 1, find_addr, s.at, &f), 0);
		cr_expect(strstr(f.text, bad[i].text), "%s", f.text);
		f = FAULT_NULL;
		redo_free(r);
	}
	h->launches[0] = good;
	s.redo->front->format++;
	cr_assert_eq(redo_open(redo_fd(s.redo), 1, &r, &f), 0);
	cr_expect(redo_has(r, s.number));
	cr_expect_neq(redo_complete(r, s.number, s.k, 1, find_addr, s.at, &f), 0);
	cr_expect(strstr(f.text, "has format 3"), "%s", f.text);
	redo_clear(r);
	cr_expect_not(redo_has(r, s.number));
	redo_free(r);
	f = FAULT_NULL;
	s.redo->front->magic++;
	cr_expect_neq(redo_open(redo_fd(s.redo), 1, &r, &f), 0);
	cr_expect(strstr(f.text, "does not begin"), "%s", f.text);
	redo_task_free(t);
	scene_free(&s);
}
