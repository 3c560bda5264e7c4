/* Debug mode: what stays usable, and what else there is in the process. */
#include <criterion/criterion.h>
#include <pthread.h>
#include <sched.h>
#include <setjmp.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "core/check.h"
#include "debugfix.h"

enum { N = DEBUGFIX_N };

static const struct shardd_optimizer sgd = { .kind = SHARDD_SGD, .lr = 1 };

/* ------------------------------------------------------------- what stays usable */

static int neighbours_trainer(const struct trainer *t)
{
	shardd_client *c = debugfix_join(t);
	struct shardd_unit_spec like = { .optimizer = sgd };
	float ones[N], *gradients[2];
	const float *params[2], *again;
	shardd_unit u[2] = { train_zero_unit(c, "a", N, &like), train_zero_unit(c, "b", N, &like) };

	for (unsigned i = 0; i < 2; i++)
		TRAIN_OK(shardd_gather(c, u[i], (const void **)&params[i], &train_err));
	TRAIN_OK(shardd_release(c, u[0], &train_err));
	for (unsigned i = 0; i < N; i++)
		TRAINER_CHECK(params[1][i] == 0);
	TRAIN_OK(shardd_gather(c, u[0], (const void **)&again, &train_err));
	TRAINER_CHECK(again == params[0] && again[N - 1] == 0);
	for (unsigned i = 0; i < 2; i++)
		TRAIN_OK(shardd_release(c, u[i], &train_err));
	for (unsigned i = 0; i < 2; i++)
		TRAIN_OK(shardd_gradient(c, u[i], (void **)&gradients[i], &train_err));
	for (unsigned i = 0; i < N; i++)
		ones[i] = gradients[0][i] = 1;
	TRAIN_OK(shardd_reduce(c, u[0], &train_err));
	memcpy(gradients[1], ones, sizeof(ones));
	TRAIN_OK(shardd_reduce(c, u[1], &train_err));
	TRAIN_OK(shardd_step(c, SHARDD_WORLD, NULL, &train_err));
	for (unsigned i = 0; i < 2; i++) {
		TRAIN_OK(shardd_gather(c, u[i], (const void **)&params[i], &train_err));
		TRAINER_CHECK(params[i][0] == -1 && params[i][N - 1] == -1);
		TRAIN_OK(shardd_release(c, u[i], &train_err));
	}
	train_leave(c);
	return 0;
}

Test(debug_process, neighbours_on_the_same_page_stay_usable, .timeout = 60, .init = trainfix_begin,
     .fini = trainfix_end)
{
	debugfix_host_only();
	debugfix_run_quietly(2, neighbours_trainer);
}

/* Rank 1 comes after rank 0's deadline, and is told the same. */
static int refused_trainer(const struct trainer *t)
{
	shardd_client *c = debugfix_join(t);
	struct shardd_unit_spec like = { .optimizer = sgd };
	shardd_unit u = train_zero_unit(c, "unit", N, &like);
	struct told *told = t->arg;
	float *gradient;

	TRAIN_OK(shardd_gradient(c, u, (void **)&gradient, &train_err));
	for (unsigned i = 0; i < N; i++)
		gradient[i] = 1;
	if (t->rank == 0) {
		shardd_set_timeout(c, 100);
		TRAIN_FAILS(shardd_reduce(c, u, &train_err), SHARDD_DEADLINE_EXCEEDED);
		shardd_set_timeout(c, 0);
		__atomic_store_n(&told->survived, true, __ATOMIC_RELEASE);
	} else {
		while (!__atomic_load_n(&told->survived, __ATOMIC_ACQUIRE))
			sched_yield();
		TRAIN_FAILS(shardd_reduce(c, u, &train_err), SHARDD_DEADLINE_EXCEEDED);
	}
	TRAINER_CHECK(gradient[N - 1] == 1);
	gradient[0] = 1;
	TRAIN_OK(shardd_reduce(c, u, &train_err));
	train_leave(c);
	return 0;
}

Test(debug_process, an_op_that_fails_gives_nothing_back, .timeout = 60, .init = trainfix_begin,
     .fini = trainfix_end)
{
	debugfix_host_only();
	debugfix_run_quietly(2, refused_trainer);
}

/* shardd_read and shardd_write return an error instead. */
static int copies_trainer(const struct trainer *t)
{
	shardd_client *c = debugfix_join(t);
	struct shardd_unit_spec like = { .optimizer = sgd };
	shardd_unit u = train_zero_unit(c, "layer3", N, &like);
	float some[N] = { 0 };
	const void *data;
	void *gradient;

	TRAIN_OK(shardd_gather(c, u, &data, &train_err));
	TRAIN_OK(shardd_read(c, some, data, sizeof(some), &train_err));
	TRAIN_FAILS(shardd_read(c, some, data, sizeof(some) + 1, &train_err),
		    SHARDD_INVALID_ARGUMENT);
	TRAIN_FAILS(shardd_write(c, (void *)data, some, 4, &train_err), SHARDD_INVALID_ARGUMENT);
	TRAINER_CHECK(
		strstr(train_err.text, "the parameters of unit 'layer3', which are read-only"));
	TRAIN_OK(shardd_release(c, u, &train_err));
	TRAIN_FAILS(shardd_read(c, some, data, 4, &train_err), SHARDD_INVALID_ARGUMENT);
	TRAINER_CHECK(strstr(train_err.text, "'layer3', which Release gave back"));
	TRAIN_OK(shardd_gradient(c, u, &gradient, &train_err));
	TRAIN_OK(shardd_write(c, gradient, some, sizeof(some), &train_err));
	TRAIN_OK(shardd_reduce(c, u, &train_err));
	TRAIN_FAILS(shardd_write(c, gradient, some, 4, &train_err), SHARDD_INVALID_ARGUMENT);
	TRAINER_CHECK(strstr(train_err.text, "'layer3', which Reduce gave back"));
	train_leave(c);
	return 0;
}

Test(debug_process, copies_are_refused_in_what_was_given_back, .timeout = 60,
     .init = trainfix_begin, .fini = trainfix_end)
{
	debugfix_host_only();
	debugfix_run_quietly(1, copies_trainer);
}

/* ------------------------------------------------------------------- the process */

static sigjmp_buf after_fault;
static struct told *handler_told;

static void own_handler(int number, siginfo_t *info, void *context)
{
	(void)context;
	handler_told->calls++;
	handler_told->survived = number == SIGSEGV && info->si_addr == handler_told->at;
	siglongjmp(after_fault, 1);
}

/* The application's own handler goes on as it would have, more than once. */
static int handler_trainer(const struct trainer *t)
{
	struct sigaction own = { .sa_sigaction = own_handler, .sa_flags = SA_SIGINFO };
	shardd_client *c;
	shardd_unit u;
	const void *data;

	debugfix_on(t->arg);
	handler_told = t->arg;
	TRAINER_CHECK(sigaction(SIGSEGV, &own, NULL) == 0);
	c = train_join(t);
	u = train_zero_unit(c, "layer3", N, NULL);
	TRAIN_OK(shardd_gather(c, u, &data, &train_err));
	TRAIN_OK(shardd_release(c, u, &train_err));
	for (volatile unsigned i = 0; i < 2; i++) {
		if (sigsetjmp(after_fault, 1) == 0)
			debugfix_read(handler_told, data);
		TRAINER_CHECK(handler_told->survived && handler_told->calls == i + 1);
		handler_told->survived = false;
	}
	/* a fault of another kind is none of ours */
	if (sigsetjmp(after_fault, 1) == 0)
		debugfix_write(handler_told,
			       mmap(NULL, 1, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
	TRAINER_CHECK(handler_told->survived && handler_told->calls == 3);
	train_leave(c);
	return 0;
}

Test(debug_process, a_handler_of_the_application_is_called, .timeout = 60, .init = trainfix_begin,
     .fini = trainfix_end)
{
	struct told *told;
	const char *first;

	debugfix_host_only();
	told = told_new();
	trainfix_run(1, handler_trainer, told);
	first = strstr(told_text(told), "gave back");
	cr_assert(first && strstr(first + 1, "gave back"), "%s", told_text(told));
	cr_assert(!strstr(strstr(first + 1, "gave back") + 1, "gave back"), "%s", told_text(told));
	told_free(told);
}

static int unrelated_trainer(const struct trainer *t)
{
	shardd_client *c = debugfix_join(t);

	(void)c;
	debugfix_write(t->arg, mmap(NULL, 1, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
	return 0;
}

static int sent_trainer(const struct trainer *t)
{
	shardd_client *c = debugfix_join(t);

	(void)c;
	kill(getpid(), SIGSEGV);
	((struct told *)t->arg)->survived = true;
	return 0;
}

Test(debug_process, faults_of_others_end_as_before, .timeout = 60, .init = trainfix_begin,
     .fini = trainfix_end)
{
	static const trainer_fn fns[] = { unrelated_trainer, sent_trainer };

	debugfix_host_only();
	for (size_t i = 0; i < ARRAY_SIZE(fns); i++) {
		struct told *told = told_new();
		pid_t pid = trainer_start(&trainfix, "test", 0, 1, fns[i], told);

		cr_assert_eq(trainer_wait(pid, 60), 128 + SIGSEGV);
		cr_assert(!told->survived);
		cr_assert(told_nothing(told), "%s", told_text(told));
		debugfix_delete("test");
		told_free(told);
	}
}

/* A child of a fork has the same memory, and the same sentence. */
static int fork_trainer(const struct trainer *t)
{
	struct told *told = t->arg;
	shardd_client *c = debugfix_join(t);
	shardd_unit a = train_zero_unit(c, "layer3", N, NULL);
	shardd_unit b = train_zero_unit(c, "layer4", N, NULL);
	const void *lost, *kept;
	int status;
	pid_t pid;

	TRAIN_OK(shardd_gather(c, a, &lost, &train_err));
	TRAIN_OK(shardd_gather(c, b, &kept, &train_err));
	TRAIN_OK(shardd_release(c, a, &train_err));
	pid = fork();
	TRAINER_CHECK(pid >= 0);
	if (pid == 0) {
		debugfix_read(told, kept);
		shardd_close(c); /* the parent's: nothing happens */
		debugfix_read(told, kept);
		told->survived = false;
		debugfix_read(told, lost);
		_exit(0);
	}
	TRAINER_CHECK(waitpid(pid, &status, 0) == pid);
	TRAINER_CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGSEGV && !told->survived);
	TRAIN_OK(shardd_gather(c, a, &lost, &train_err));
	debugfix_read(told, lost);
	TRAIN_OK(shardd_release(c, a, &train_err));
	TRAIN_OK(shardd_release(c, b, &train_err));
	train_leave(c);
	return 0;
}

Test(debug_process, a_child_of_a_fork_is_told_too, .timeout = 60, .init = trainfix_begin,
     .fini = trainfix_end)
{
	struct told *told;

	debugfix_host_only();
	told = told_new();
	trainfix_run(1, fork_trainer, told);
	cr_assert(strstr(told_text(told), "'layer3', which Release gave back (rank 0)"), "%s",
		  told_text(told));
	told_free(told);
}

struct worker {
	shardd_client *c;
	shardd_unit u;
};

static void *work(void *arg)
{
	const struct worker *w = arg;

	for (unsigned i = 0; i < 200; i++) {
		const float *params;
		float *gradient;

		TRAIN_OK(shardd_gather(w->c, w->u, (const void **)&params, &train_err));
		TRAINER_CHECK(params[0] == 0 && params[N - 1] == 0);
		TRAIN_OK(shardd_release(w->c, w->u, &train_err));
		TRAIN_OK(shardd_gradient(w->c, w->u, (void **)&gradient, &train_err));
		gradient[0] = gradient[N - 1] = 0;
		TRAIN_OK(shardd_accumulate(w->c, w->u, &train_err));
	}
	return NULL;
}

static int threads_trainer(const struct trainer *t)
{
	enum { THREADS = 4 };
	static const char *const names[THREADS] = { "a", "b", "c", "d" };
	struct worker workers[THREADS];
	pthread_t threads[THREADS];
	shardd_client *c = debugfix_join(t);

	for (unsigned i = 0; i < THREADS; i++)
		workers[i] = (struct worker){ c, train_zero_unit(c, names[i], N, NULL) };
	for (unsigned i = 0; i < THREADS; i++)
		TRAINER_CHECK(pthread_create(&threads[i], NULL, work, &workers[i]) == 0);
	for (unsigned i = 0; i < THREADS; i++)
		pthread_join(threads[i], NULL);
	train_leave(c);
	return 0;
}

Test(debug_process, threads_do_not_take_each_others_memory, .timeout = 60, .init = trainfix_begin,
     .fini = trainfix_end)
{
	debugfix_host_only();
	debugfix_run_quietly(1, threads_trainer);
}

/* More buffers than keep their addresses. */
static int many_trainer(const struct trainer *t)
{
	shardd_client *c = debugfix_join(t);
	shardd_unit u = train_zero_unit(c, "unit", N, NULL);
	const float *params;

	for (unsigned i = 0; i < 20000; i++) {
		uint64_t buffer;
		void *data;

		TRAIN_OK(shardd_alloc(c, 100, &buffer, &data, &train_err));
		*(char *)data = 1;
		TRAIN_OK(shardd_free(c, buffer, &train_err));
	}
	TRAIN_OK(shardd_gather(c, u, (const void **)&params, &train_err));
	TRAINER_CHECK(params[0] == 0);
	TRAIN_OK(shardd_release(c, u, &train_err));
	train_leave(c);
	return 0;
}

Test(debug_process, addresses_are_given_up_in_the_end, .timeout = 60, .init = trainfix_begin,
     .fini = trainfix_end)
{
	debugfix_host_only();
	debugfix_run_quietly(1, many_trainer);
}

/* ------------------------------------------------------------------------ tickets */

static int tickets_trainer(const struct trainer *t)
{
	shardd_client *c = debugfix_join(t);
	shardd_unit u = train_zero_unit(c, "layer3", N, NULL);
	shardd_ticket ticket;

	TRAIN_OK(shardd_submit_gather(c, SHARDD_OPTIONS(gather, .unit = u), &ticket, &train_err));
	TRAIN_OK(shardd_submit_barrier(c, SHARDD_OPTIONS(barrier, .group = SHARDD_WORLD), &ticket,
				       &train_err));
	for (unsigned i = 0; i < 10; i++)
		TRAIN_OK(shardd_submit_release(c, SHARDD_OPTIONS(release, .unit = u), &ticket,
					       &train_err));
	TRAIN_OK(shardd_submit_release(c, SHARDD_OPTIONS(release, .unit = u), &ticket, &train_err));
	TRAIN_OK(shardd_detach(c, ticket, &train_err)); /* nobody is to wait for this one */
	shardd_close(c);
	return 0;
}

Test(debug_process, tickets_that_nobody_waited_for_are_reported, .timeout = 60,
     .init = trainfix_begin, .fini = trainfix_end)
{
	struct told *told = told_new();
	const char *text;

	trainfix_run(1, tickets_trainer, told);
	text = told_text(told);
	cr_assert(strstr(text, "shardd: nobody waited for the ticket of Gather of unit 'layer3' "
			       "(rank 0): wait for every ticket before you close\n"),
		  "%s", text);
	cr_assert(strstr(text, "the ticket of Barrier (rank 0)"), "%s", text);
	cr_assert(strstr(text, "shardd: nor for 2 more tickets (rank 0)\n"), "%s", text);
	debugfix_delete("test");
	told_free(told);
}

/* --------------------------------------------------------------------- the switch */

static int value_trainer(const struct trainer *t)
{
	struct shardd_options o = { .size = sizeof(o), .socket = t->socket };
	shardd_client *c;

	TRAINER_CHECK(setenv("SHARDD_DEBUG", "yes", 1) == 0);
	TRAIN_FAILS(shardd_connect(&o, &c, &train_err), SHARDD_INVALID_ARGUMENT);
	TRAINER_CHECK(strstr(train_err.text, "SHARDD_DEBUG=\"yes\" is neither 0 nor 1"));
	TRAINER_CHECK(setenv("SHARDD_DEBUG", "0", 1) == 0);
	TRAIN_OK(shardd_connect(&o, &c, &train_err));
	shardd_close(c);
	return 0;
}

Test(debug_process, other_values_are_refused, .timeout = 60, .init = trainfix_begin,
     .fini = trainfix_end)
{
	trainfix_run(1, value_trainer, NULL);
}

static int gpu_trainer(const struct trainer *t)
{
	shardd_client *c = debugfix_join(t);
	shardd_unit u = train_zero_unit(c, "unit", N, NULL);
	float some[N];

	train_params(c, u, some, sizeof(some));
	train_leave(c);
	return 0;
}

Test(debug_process, says_that_it_cannot_protect_a_gpu, .timeout = 60, .init = trainfix_begin,
     .fini = trainfix_end)
{
	struct told *told = told_new();

	trainfix_run(1, gpu_trainer, told);
	cr_assert_eq(strstr(told_text(told), "shardd: SHARDD_DEBUG=1 cannot protect memory of a "
					     "GPU") == NULL,
		     train_on_host(), "%s", told_text(told));
	told_free(told);
}

/* ------------------------------------------------------------- the same bits as ever */

static int training_trainer(const struct trainer *t)
{
	static const char *const names[] = { "a", "b", "c" };
	struct shardd_unit_spec like = { .optimizer = { .kind = SHARDD_ADAMW, .lr = 0.01 },
					 .compute_dtype = SHARDD_BF16 };
	struct told *told = t->arg;
	shardd_client *c = train_join(t);
	shardd_unit u[3];

	for (unsigned i = 0; i < 3; i++) {
		u[i] = train_register(c, names[i], N, &like).unit;
		TRAIN_OK(shardd_init_seed(c, u[i], 7, &train_err));
		like.compute_dtype = i ? SHARDD_FP16 : SHARDD_FP32;
	}
	for (unsigned step = 0; step < 5; step++) {
		float numbers[N];

		for (unsigned i = 0; i < 3; i++) {
			train_fill(numbers, N, step * 100 + i * 10 + t->rank);
			train_reduce(c, u[i],
				     i == 0   ? DTYPE_BF16
				     : i == 1 ? DTYPE_FP32
					      : DTYPE_FP16,
				     numbers, N);
		}
		TRAIN_OK(shardd_step(c, SHARDD_WORLD, NULL, &train_err));
		TRAIN_OK(shardd_commit(c, step, NULL, 0, &train_err));
	}
	for (unsigned i = 0; i < 3; i++) {
		void *data;

		TRAIN_OK(shardd_summon(c, u[i], &data, &train_err));
		if (t->rank == 0)
			train_read(c, told->params[i], data, sizeof(told->params[i]));
		TRAIN_OK(shardd_return(c, u[i], false, &train_err));
	}
	train_leave(c);
	return 0;
}

static int training_in_debug_mode(const struct trainer *t)
{
	debugfix_on(t->arg);
	return training_trainer(t);
}

Test(debug_process, training_has_the_same_bits, .timeout = 60, .init = trainfix_begin,
     .fini = trainfix_end)
{
	struct told *plain = told_new(), *debug = told_new();

	trainfix_run(2, training_trainer, plain);
	trainfix_run(2, training_in_debug_mode, debug);
	cr_assert_arr_eq(plain->params, debug->params, sizeof(plain->params));
	cr_assert_neq(plain->params[0][0], 0);
	if (train_on_host())
		cr_assert(told_nothing(debug), "%s", told_text(debug));
	told_free(plain);
	told_free(debug);
}
