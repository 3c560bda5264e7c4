/*
 * Publications: what a reader gets is a generation of one committed step, in the declared form, and stays
 * so for as long as it is leased; readers that die, hold on, or ask for what is not there cost nobody else
 * anything.
 */
#include <criterion/criterion.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "core/check.h"
#include "failfix.h"
#include "longform.h"
#include "request.h"

static void test_publications_begin(void)
{
	failfix_begin(NULL);
}

TestSuite(publications, .init = test_publications_begin, .fini = failfix_end, .timeout = 120);

enum { MOST_WORLD = 4, MOST_READERS = 8 };
enum { WORLD = 2, READERS = 3, UNITS = 3, STEPS = 200, ROWS = 701, COLUMNS = 36 };

/* Of rank 1 of 2: q and k of each layer one below the other, k transposed, in bf16. */
#define DECLARATION                                                                         \
	"{\"name\": \"engine\", \"type\": \"bf16\", \"every_steps\": 1, \"buffers\": 5,"    \
	" \"tp_size\": 2, \"tp_rank\": 1, \"rules\": ["                                     \
	" {\"name\": \"layers.{i}.qk\", \"sources\": ["                                     \
	"   {\"tensor\": \"layer.{i}.q\", \"slice\": {\"dim\": 0}},"                        \
	"   {\"tensor\": \"layer.{i}.k\", \"transpose\": true, \"slice\": {\"dim\": 0}}]}," \
	" {\"name\": \"norm.{i}\", \"sources\": [\"layer.{i}.norm\"], \"type\": \"fp32\"}]}"

/* Shared between a test, its trainers and its readers. */
struct play {
	stage go; /* the test's word */
	stage at[MOST_WORLD];
	unsigned world, readers;
	unsigned reads;     /* of each reader; 0: until the last step */
	stage last;         /* step of trainers that go on until the readers have read enough */
	atomic_ullong done; /* reads */
	stage reader;
	enum shardd_optimizer_when when;
	atomic_uint generations; /* that were good */
	struct told told;
};

/* Values begin again after so many steps: bf16 has no more whole numbers than 256. */
#define CYCLE 250

/* Parameters of 0, of which every step makes the number of the step, modulo CYCLE. */
static void make_units(shardd_client *c, const struct play *p, shardd_unit *ret)
{
	for (unsigned i = 0; i < UNITS; i++) {
		const uint64_t q[] = { 2 * ROWS, COLUMNS }, k[] = { COLUMNS, 2 * ROWS };
		struct shardd_tensor tensors[] = {
			{ .name = "q", .shape = q, .dims = 2 },
			{ .name = "norm", .shape = q, .dims = 1 },
			{ .name = "k", .shape = k, .dims = 2 },
		};
		struct shardd_unit_spec spec = { .size = sizeof(spec),
						 .tensors = tensors,
						 .n_tensors = 3,
						 .layout = i % 2 ? SHARDD_LAYOUT_DIM0
								 : SHARDD_LAYOUT_FLAT,
						 .compute_dtype = SHARDD_BF16,
						 .gradient_dtype = SHARDD_FP32 };
		struct shardd_unit_info info;
		char name[16];

		snprintf(name, sizeof(name), "layer.%u", i);
		spec.name = name;
		spec.optimizer.when = p->when;
		spec.optimizer.kind = SHARDD_SGD;
		spec.optimizer.lr = 1;
		TRAIN_OK(shardd_register(c, &spec, 1, &info, &train_err));
		TRAIN_OK(shardd_init_seed(c, info.unit, 1, &train_err));
		ret[i] = info.unit;
	}
}

static void hand_in(shardd_client *c, shardd_unit u, uint64_t step)
{
	struct shardd_result r;
	shardd_ticket t;
	float *g;

	TRAIN_OK(shardd_submit_gradient(c, SHARDD_OPTIONS(gradient, .unit = u), &t, &train_err));
	TRAIN_OK(shardd_wait(c, t, -1, &r, &train_err));
	g = train_alloc(r.bytes);
	for (uint64_t i = 0; i < r.bytes / sizeof(float); i++)
		g[i] = step % CYCLE ? -1 : CYCLE - 1;
	train_write(c, r.data, g, r.bytes);
	free(g);
	TRAIN_OK(shardd_reduce(c, u, &train_err));
}

static void one_step(shardd_client *c, const shardd_unit *units, uint64_t step)
{
	for (unsigned i = UNITS; i-- > 0;)
		hand_in(c, units[i], step);
	TRAIN_OK(shardd_step(c, SHARDD_WORLD, NULL, &train_err));
	if (step % 3 == 0) { /* applied, and not committed yet */
		const void *full;

		TRAIN_OK(shardd_gather(c, units[0], &full, &train_err));
		TRAIN_OK(shardd_release(c, units[0], &train_err));
	}
	TRAIN_OK(shardd_commit(c, step, NULL, 0, &train_err));
}

/* Is there a step @step? The first rank says when readers have read enough: no other one is two steps ahead of
 * it. */
static bool goes_on(const struct trainer *t, struct play *p, uint64_t step)
{
	if (p->reads && t->rank == 0 && !atomic_load(&p->last) && atomic_load(&p->go))
		stage_set(&p->last, (unsigned)step + 2);
	return p->reads ? !atomic_load(&p->last) || step <= atomic_load(&p->last) : step <= STEPS;
}

/* Trains at its own pace until the test says so. */
static int trains(const struct trainer *t)
{
	struct play *p = t->arg;
	shardd_client *c = train_join(t);
	shardd_unit units[UNITS];

	make_units(c, p, units);
	TRAIN_OK(shardd_commit(c, 0, NULL, 0, &train_err));
	if (t->rank == 0)
		TRAIN_OK(shardd_publication_declare(c, t->job, DECLARATION, NULL, &train_err));
	stage_set(&p->at[t->rank], 1);
	for (unsigned i = 0; i < p->world; i++)
		TRAINER_AWAIT(atomic_load(&p->at[i]), 60);
	for (uint64_t step = 1; goes_on(t, p, step); step++)
		one_step(c, units, step);
	stage_set(&p->at[t->rank], 2);
	TRAINER_AWAIT(atomic_load(&p->go) == 1, 90);
	train_leave(c);
	return 0;
}

static shardd_live *open_live(const struct trainer *t, shardd_client **ret_c)
{
	shardd_live *l;

	*ret_c = train_connect(t);
	TRAIN_OK(shardd_live_open(*ret_c, t->job, "engine", 0, &l, &train_err));
	return l;
}

static bool values_are(const volatile void *at, const struct shardd_published_tensor *t,
		       uint32_t bits)
{
	for (uint64_t i = 0; t->dtype == SHARDD_BF16 && i < t->bytes / 2; i++)
		if (((const volatile uint16_t *)at)[i] != bits >> 16)
			return false;
	for (uint64_t i = 0; t->dtype == SHARDD_FP32 && i < t->bytes / 4; i++)
		if (((const volatile uint32_t *)at)[i] != bits)
			return false;
	return true;
}

/* Every element is @step, in the type of the tensor. @c: NULL: it is in the process's own memory. */
static bool tensor_is(shardd_client *c, const struct shardd_published_tensor *t, uint64_t step)
{
	float value = (float)step;
	uint32_t bits;
	void *copy;
	bool is;

	memcpy(&bits, &value, sizeof(bits));
	if (!c || train_on_host())
		return values_are(t->data, t, bits);
	copy = train_alloc(t->bytes);
	train_read(c, copy, t->data, t->bytes);
	is = values_are(copy, t, bits);
	free(copy);
	return is;
}

static void check_generation(shardd_client *c, const struct shardd_generation *g)
{
	TRAINER_CHECK(g->n_tensors == 2 * UNITS);
	for (size_t i = 0; i < g->n_tensors; i++) {
		const struct shardd_published_tensor *t = &g->tensors[i];
		bool qk = strncmp(t->name, "layers.", 7) == 0;

		TRAINER_CHECK(qk || strncmp(t->name, "norm.", 5) == 0);
		TRAINER_CHECK(t->dtype == (qk ? SHARDD_BF16 : SHARDD_FP32));
		TRAINER_CHECK(t->dims == (qk ? 2 : 1));
		TRAINER_CHECK(t->shape[0] == 2 * ROWS && (!qk || t->shape[1] == COLUMNS));
		TRAINER_CHECK(tensor_is(c, t, g->step % CYCLE));
	}
}

/* Looks twice: what comes in between would show. */
static int reads(const struct trainer *t)
{
	struct play *p = t->arg;
	struct shardd_generation g;
	uint64_t last = 0;
	shardd_client *c;
	shardd_live *l = open_live(t, &c);
	unsigned n = 0;

	do {
		TRAIN_OK(shardd_live_acquire(l, last ? 0 : 60000, &g, &train_err));
		TRAINER_CHECK(g.number >= last && (p->reads || g.step <= STEPS));
		check_generation(c, &g);
		poll(NULL, 0, (int)(g.step % 3));
		check_generation(c, &g);
		if (g.number != last)
			atomic_fetch_add(&p->generations, 1);
		last = g.number;
		n++;
	} while (p->reads ? n < p->reads : g.step < STEPS);
	atomic_fetch_add(&p->done, n);
	shardd_live_close(l);
	shardd_close(c);
	return 0;
}

/* The same with copies, which come while trainers change what they were made of. */
static int fetches(const struct trainer *t)
{
	struct shardd_fetch_options o = { .size = sizeof(o), .wait_ms = 60000 };
	shardd_client *c = train_connect(t);
	struct play *p = t->arg;
	struct shardd_generation g;
	shardd_fetched *to = NULL;

	do {
		TRAIN_OK(shardd_publication_fetch(c, t->job, "engine", &o, &to, &g, &train_err));
		TRAINER_CHECK(g.number > o.newer_than && (p->reads || g.step <= STEPS));
		check_generation(NULL, &g);
		atomic_fetch_add(&p->generations, 1);
		o.newer_than = g.number;
	} while (p->reads ? atomic_load(&p->done) < p->readers * p->reads : g.step < STEPS);
	shardd_fetched_free(to);
	shardd_close(c);
	return 0;
}

static int reads_and_is_killed(const struct trainer *t)
{
	struct play *p = t->arg;
	struct shardd_generation g;
	shardd_client *c;
	shardd_live *l = open_live(t, &c);

	TRAIN_OK(shardd_live_acquire(l, 60000, &g, &train_err));
	check_generation(c, &g);
	atomic_fetch_add(&p->reader, 1);
	TRAINER_AWAIT(atomic_load(&p->go) == 1, 90);
	return 0;
}

static void hammer(enum shardd_optimizer_when when)
{
	struct play *p = trainer_shared(sizeof(*p));
	pid_t ranks[MOST_WORLD], readers[MOST_READERS], copies, dies;
	bool is_long = longform_asked();

	p->when = when;
	p->world = is_long ? MOST_WORLD : WORLD;
	p->readers = is_long ? MOST_READERS : READERS;
	p->reads = is_long ? 100000 / MOST_READERS : 0;
	for (uint32_t r = 0; r < p->world; r++)
		ranks[r] = trainer_start(&trainfix, "live", r, p->world, trains, p);
	for (uint32_t r = 0; r < p->world; r++)
		AWAIT(atomic_load(&p->at[r]), 30);
	for (uint32_t i = 0; i < p->readers; i++)
		readers[i] = trainer_start(&trainfix, "live", i, p->world, reads, p);
	copies = trainer_start(&trainfix, "live", 0, p->world, fetches, p);
	dies = trainer_start(&trainfix, "live", 0, p->world, reads_and_is_killed, p);
	AWAIT(atomic_load(&p->reader) == 1, 60);
	kill(dies, SIGKILL);
	trainer_wait(dies, 30);
	for (uint32_t i = 0; i < p->readers; i++)
		cr_assert_eq(trainer_wait(readers[i], is_long ? 900 : 90), 0);
	cr_assert_eq(trainer_wait(copies, 90), 0);
	stage_set(&p->go, 1);
	for (uint32_t r = 0; r < p->world; r++)
		cr_assert_eq(trainer_wait(ranks[r], 30), 0);
	cr_assert(!is_long || atomic_load(&p->done) == 100000);
	cr_assert_geq(atomic_load(&p->generations), p->readers + 1, "each has read one at least");
}

Test(publications, are_of_one_step_at_step, .timeout = 1200)
{
	hammer(SHARDD_OPTIM_AT_STEP);
}

Test(publications, are_of_one_step_in_backward, .timeout = 1200)
{
	hammer(SHARDD_OPTIM_IN_BACKWARD);
}

/* -------------------------------------------------------------------- one at a time */

/* One step after each word of the test. */
static int steps_when_told(const struct trainer *t)
{
	struct play *p = t->arg;
	shardd_client *c = train_join(t);
	shardd_unit units[UNITS];
	unsigned done = 0;

	make_units(c, p, units);
	TRAIN_OK(shardd_commit(c, 0, NULL, 0, &train_err));
	stage_set(&p->at[t->rank], 1);
	for (;;) {
		TRAINER_AWAIT(atomic_load(&p->go) > done, 60);
		done = atomic_load(&p->go);
		if (done == 99)
			break;
		one_step(c, units, done);
		atomic_store(&p->at[t->rank], 1 + done);
	}
	train_leave(c);
	return 0;
}

struct scene {
	struct play *p;
	pid_t ranks[WORLD];
};

static struct scene scene_begin(void)
{
	struct scene s = { .p = trainer_shared(sizeof(*s.p)) };

	s.p->when = SHARDD_OPTIM_AT_STEP;
	for (uint32_t r = 0; r < WORLD; r++)
		s.ranks[r] = trainer_start(&trainfix, "live", r, WORLD, steps_when_told, s.p);
	AWAIT(atomic_load(&s.p->at[0]) && atomic_load(&s.p->at[1]), 30);
	return s;
}

static void scene_end(struct scene *s)
{
	stage_set(&s->p->go, 99);
	for (uint32_t r = 0; r < WORLD; r++)
		cr_assert_eq(trainer_wait(s->ranks[r], 30), 0);
}

/* What a client is refused, and with which words. */
#define REFUSED(code, words, call)                \
	do {                                      \
		TRAINER_CHECK((call) == -(code)); \
		told_now(words);                  \
	} while (0)

/* In the client: the trainers make a step. */
static void step_now(struct play *p, unsigned step)
{
	stage_set(&p->go, step);
	TRAINER_AWAIT(atomic_load(&p->at[0]) == 1 + step && atomic_load(&p->at[1]) == 1 + step, 30);
}

/* Run @fn in a process that is not a rank. Two trainers make a step each time it asks for one. */
static void beside_trainers(trainer_fn fn)
{
	struct scene s = scene_begin();
	pid_t pid = trainer_start(&trainfix, "live", 0, WORLD, fn, s.p);

	cr_assert_eq(trainer_wait(pid, 60), 0);
	scene_end(&s);
}

#define EVERY_STEP "{\"name\": \"engine\", \"every_steps\": 1}"

/* The generation of the commit before the declaration. Return: its number. */
static uint64_t first_of(shardd_client *c)
{
	struct shardd_fetch_options o = { .size = sizeof(o), .wait_ms = 20000 };
	struct shardd_generation g;
	shardd_fetched *to = NULL;

	TRAIN_OK(shardd_publication_fetch(c, "live", "engine", &o, &to, &g, &train_err));
	TRAINER_CHECK(g.step == 0 && tensor_is(NULL, &g.tensors[0], 0));
	shardd_fetched_free(to);
	return g.number;
}

/* Into memory of the caller's, and what the call refuses. */
static int fetches_into_a_buffer(const struct trainer *t)
{
	struct shardd_fetch_options o = { .size = sizeof(o) };
	shardd_client *c = train_connect(t);
	struct shardd_generation g;
	shardd_fetched *to = NULL;
	uint64_t bytes;
	char *buffer;

	TRAIN_OK(shardd_publication_declare(c, "live", EVERY_STEP, &bytes, &train_err));
	o.newer_than = first_of(c);
	REFUSED(SHARDD_NOT_FOUND, "no generation newer than ",
		shardd_publication_fetch(c, "live", "engine", &o, &to, &g, &train_err));
	step_now(t->arg, 1);
	buffer = malloc(bytes + 1);
	TRAINER_CHECK(buffer);
	buffer[bytes] = 'e';
	o.wait_ms = 20000;
	o.buffer = buffer;
	o.buffer_bytes = bytes - 1;
	REFUSED(SHARDD_INVALID_ARGUMENT, "buffer_bytes is",
		shardd_publication_fetch(c, "live", "engine", &o, &to, &g, &train_err));
	TRAINER_CHECK(!to);
	o.buffer_bytes = bytes;
	TRAIN_OK(shardd_publication_fetch(c, "live", "engine", &o, &to, &g, &train_err));
	TRAINER_CHECK(g.step == 1 && g.n_tensors == 3 * UNITS && g.moved && buffer[bytes] == 'e');
	for (size_t i = 0; i < g.n_tensors; i++) {
		const char *at = g.tensors[i].data;

		TRAINER_CHECK(at >= buffer && at + g.tensors[i].bytes <= buffer + bytes);
		TRAINER_CHECK(tensor_is(NULL, &g.tensors[i], 1));
	}
	step_now(t->arg, 2);
	o.newer_than = g.number;
	TRAIN_OK(shardd_publication_fetch(c, "live", "engine", &o, &to, &g, &train_err));
	TRAINER_CHECK(g.step == 2 && !g.moved && tensor_is(NULL, &g.tensors[0], 2));
	o.buffer_bytes = 0;
	REFUSED(SHARDD_INVALID_ARGUMENT, "both set",
		shardd_publication_fetch(c, "live", "engine", &o, &to, &g, &train_err));
	REFUSED(SHARDD_INVALID_ARGUMENT, "NULL",
		shardd_publication_fetch(c, "live", "engine", NULL, NULL, &g, &train_err));
	shardd_fetched_free(to);
	shardd_fetched_free(NULL);
	free(buffer);
	shardd_close(c);
	return 0;
}

Test(publications, are_fetched_into_a_buffer)
{
	beside_trainers(fetches_into_a_buffer);
}

/* A delta changes what an earlier call has filled. It was applied there also when the caller named another
 * buffer, which got nothing; the earlier one may have been freed. */
static int fetches_into_another_buffer(const struct trainer *t)
{
	struct shardd_fetch_options o = { .size = sizeof(o), .wait_ms = 20000 };
	shardd_client *c = train_connect(t);
	struct shardd_generation g;
	shardd_fetched *to = NULL;
	uint64_t bytes;
	char *buffers[2];

	TRAIN_OK(shardd_publication_declare(
		c, "live", "{\"name\": \"engine\", \"every_steps\": 1, \"delta_percent\": 100}",
		&bytes, &train_err));
	o.newer_than = first_of(c);
	for (unsigned i = 0; i < 2; i++) {
		buffers[i] = malloc(bytes);
		TRAINER_CHECK(buffers[i]);
		step_now(t->arg, 1 + i);
		o.buffer = buffers[i];
		o.buffer_bytes = bytes;
		TRAIN_OK(shardd_publication_fetch(c, "live", "engine", &o, &to, &g, &train_err));
		o.newer_than = g.number;
		TRAINER_CHECK(g.step == 1 + i && g.moved && tensor_is(NULL, &g.tensors[0], 1 + i));
		TRAINER_CHECK((const char *)g.tensors[0].data >= buffers[i] &&
			      (const char *)g.tensors[0].data < buffers[i] + bytes);
		free(i ? buffers[0] : NULL);
	}
	o.buffer = NULL;
	o.buffer_bytes = 0;
	step_now(t->arg, 3);
	TRAIN_OK(shardd_publication_fetch(c, "live", "engine", &o, &to, &g, &train_err));
	TRAINER_CHECK(g.step == 3 && g.moved && tensor_is(NULL, &g.tensors[0], 3));
	free(buffers[1]);
	o.newer_than = g.number;
	step_now(t->arg, 4);
	TRAIN_OK(shardd_publication_fetch(c, "live", "engine", &o, &to, &g, &train_err));
	TRAINER_CHECK(g.step == 4 && !g.moved && tensor_is(NULL, &g.tensors[0], 4));
	shardd_fetched_free(to);
	shardd_close(c);
	return 0;
}

Test(publications, are_fetched_into_another_buffer)
{
	beside_trainers(fetches_into_another_buffer);
}

#define ON_REQUEST "{\"name\": \"engine\", \"rules\": []}"

static int asks_for_generations(const struct trainer *t)
{
	struct shardd_generation g, again;
	shardd_client *c = train_connect(t);
	uint64_t bytes, number;
	shardd_live *l;

	TRAIN_OK(shardd_publication_declare(c, "live", ON_REQUEST, &bytes, &train_err));
	TRAINER_CHECK(bytes >= 3u * (2 * 2 * ROWS * COLUMNS + 2 * ROWS) * sizeof(float));
	TRAIN_OK(shardd_live_open(c, "live", "engine", 0, &l, &train_err));
	REFUSED(SHARDD_NOT_FOUND, "has no generation yet",
		shardd_live_acquire(l, 0, &g, &train_err));
	REFUSED(SHARDD_FAILED_PRECONDITION, "has no generation",
		shardd_live_release(l, &train_err));
	REFUSED(SHARDD_DEADLINE_EXCEEDED, "waiting for a generation of publication 'engine'",
		shardd_live_acquire(l, 50, &g, &train_err));
	TRAIN_OK(shardd_publication_publish(c, "live", "engine", 0, &number, &train_err));
	TRAINER_CHECK(number == 1);
	TRAIN_OK(shardd_publication_publish(c, "live", "engine", 0, &number, &train_err));
	TRAINER_CHECK(number == 1); /* nothing was committed since */
	TRAIN_OK(shardd_live_acquire(l, 0, &g, &train_err));
	TRAINER_CHECK(g.step == 0 && g.moved && g.n_tensors == 3 * UNITS);
	TRAINER_CHECK(strcmp(g.tensors[0].name, "layer.0.k") == 0);
	TRAINER_CHECK(tensor_is(c, &g.tensors[0], 0));
	step_now(t->arg, 1);
	TRAIN_OK(shardd_publication_publish(c, "live", "engine", 0, &number, &train_err));
	TRAINER_CHECK(number == 2);
	TRAINER_CHECK(tensor_is(c, &g.tensors[0], 0)); /* it is leased */
	TRAIN_OK(shardd_live_acquire(l, 1000, &again, &train_err));
	TRAINER_CHECK(again.number == 2 && again.step == 1);
	TRAINER_CHECK(tensor_is(c, &again.tensors[0], 1));
	TRAIN_OK(shardd_live_acquire(l, 0, &again, &train_err));
	TRAINER_CHECK(again.number == 2 && !again.moved); /* there is no newer one */
	TRAIN_OK(shardd_live_release(l, &train_err));
	TRAIN_OK(shardd_publication_drop(c, "live", "engine", &train_err));
	REFUSED(SHARDD_NOT_FOUND, "has no publication 'engine'",
		shardd_live_acquire(l, 0, &g, &train_err));
	shardd_live_close(l);
	shardd_close(c);
	return 0;
}

/* One is made of the step that was committed, once; a reader keeps what it has. */
Test(publications, are_made_on_request)
{
	beside_trainers(asks_for_generations);
}

static int holds_all_buffers(const struct trainer *t)
{
	shardd_client *c = train_connect(t);
	struct shardd_generation g[3];
	shardd_live *l[3];

	TRAIN_OK(shardd_publication_declare(c, "live", ON_REQUEST, NULL, &train_err));
	for (unsigned i = 0; i < 3; i++) {
		step_now(t->arg, 1 + i);
		TRAIN_OK(shardd_publication_publish(c, "live", "engine", 0, NULL, &train_err));
		TRAIN_OK(shardd_live_open(c, "live", "engine", 0, &l[i], &train_err));
		TRAIN_OK(shardd_live_acquire(l[i], 0, &g[i], &train_err));
	}
	for (unsigned step = 4; step < 8; step++) {
		step_now(t->arg, step);
		REFUSED(SHARDD_RESOURCE_EXHAUSTED, "all 3 buffers of publication 'engine'",
			shardd_publication_publish(c, "live", "engine", 0, NULL, &train_err));
	}
	for (unsigned i = 0; i < 3; i++)
		TRAINER_CHECK(tensor_is(c, &g[i].tensors[0], 1 + i));
	shardd_live_close(l[1]);
	TRAIN_OK(shardd_publication_publish(c, "live", "engine", 0, NULL, &train_err));
	TRAINER_CHECK(tensor_is(c, &g[0].tensors[0], 1) && tensor_is(c, &g[2].tensors[0], 3));
	shardd_live_close(l[0]);
	shardd_live_close(l[2]);
	shardd_close(c);
	return 0;
}

/* The trainers go on, and a request says why there is no new generation. */
Test(publications, readers_that_hold_on_cost_the_trainers_nothing)
{
	beside_trainers(holds_all_buffers);
}

static bool is_readable(int fd, int ms)
{
	struct pollfd at = { .fd = fd, .events = POLLIN };

	return poll(&at, 1, ms) == 1;
}

/* Without a copy of anything: addresses, and tensors, are those of the first generation. */
static int reads_at_fixed_addresses(const struct trainer *t)
{
	shardd_client *c = train_connect(t);
	struct shardd_generation first, g;
	shardd_live *l;
	int fd;

	TRAIN_OK(shardd_publication_declare(c, "live", ON_REQUEST, NULL, &train_err));
	REFUSED(SHARDD_INVALID_ARGUMENT, "0x4",
		shardd_live_open(c, "live", "engine", 7, &l, &train_err));
	TRAIN_OK(shardd_live_open(c, "live", "engine", SHARDD_LIVE_FIXED, &l, &train_err));
	TRAIN_OK(shardd_live_fd(l, &fd, &train_err));
	TRAINER_CHECK(!is_readable(fd, 50));
	TRAIN_OK(shardd_publication_publish(c, "live", "engine", 0, NULL, &train_err));
	TRAINER_CHECK(is_readable(fd, 10000));
	TRAIN_OK(shardd_live_acquire(l, 0, &first, &train_err));
	TRAINER_CHECK(first.moved && !is_readable(fd, 50));
	for (unsigned step = 1; step < 20; step++) {
		step_now(t->arg, step);
		TRAIN_OK(shardd_publication_publish(c, "live", "engine", 0, NULL, &train_err));
		TRAINER_CHECK(is_readable(fd, 10000));
		TRAINER_CHECK(
			tensor_is(c, &first.tensors[0], step - 1)); /* not before it is taken */
		TRAIN_OK(shardd_live_acquire(l, 0, &g, &train_err));
		TRAINER_CHECK(g.step == step && !g.moved && g.tensors == first.tensors);
		for (unsigned i = 0; i < 3 * UNITS; i++)
			TRAINER_CHECK(tensor_is(c, &first.tensors[i], step));
	}
	TRAIN_OK(shardd_publication_drop(c, "live", "engine", &train_err));
	TRAINER_CHECK(is_readable(fd, 10000));
	REFUSED(SHARDD_NOT_FOUND, "has no publication 'engine'",
		shardd_live_acquire(l, 0, &g, &train_err));
	/* one with other tensors: at other addresses; those of before stay mapped */
	TRAIN_OK(shardd_publication_declare(c, "live", "{\"name\": \"engine\", \"type\": \"bf16\"}",
					    NULL, &train_err));
	TRAIN_OK(shardd_publication_publish(c, "live", "engine", 0, NULL, &train_err));
	TRAIN_OK(shardd_live_acquire(l, 0, &g, &train_err));
	TRAINER_CHECK(g.moved && g.layout != first.layout && g.tensors[0].dtype == SHARDD_BF16);
	TRAINER_CHECK(tensor_is(c, &g.tensors[0], 19));
	shardd_live_close(l);
	shardd_close(c);
	return 0;
}

Test(publications, are_at_fixed_addresses_if_asked)
{
	beside_trainers(reads_at_fixed_addresses);
}

static int declares_wrongly(const struct trainer *t)
{
	static const struct {
		const char *json, *field, *words;
	} rows[] = {
		{ "", "publication", "either publication or json" },
		{ "{", "json", "it is no JSON: line 1" },
		{ "[]", "", "it is []; it must be an object" },
		{ "{\"nme\": \"a\"}", "", "there is no 'nme'; there are name, rules" },
		{ "{\"name\": 7}", "name", "it is 7; it must be a string" },
		{ "{\"name\": \"a\", \"keep\": -1}", "keep", "an integer (0..4294967295)" },
		{ "{\"name\": \"a\", \"type\": \"int4\"}", "type",
		  "it is \"int4\"; it must be one of fp32, bf16, fp16, e4m3" },
		{ "{\"name\": \"a\", \"rules\": {}}", "rules", "it must be a list" },
		{ "{\"name\": \"a\", \"rules\": [{\"sources\": [7]}]}", "rules[0].sources[0]",
		  "it must be an object" },
		{ "{\"name\": \"a\", \"rules\": [{\"name\": \"x\", \"sources\": [\"y\"]}]}",
		  "rules[0].sources[0].tensor", "the job has no tensor 'y'" },
		{ "{\"name\": \"a\", \"name\": \"b\"}", "json", "duplicate" },
		{ "{\"name\": \"a b\"}", "name", "the name 'a b' is not possible" },
	};
	static char large[(1u << 20) + 2];
	shardd_client *c = train_connect(t);

	for (size_t i = 0; i < ARRAY_SIZE(rows); i++) {
		REFUSED(SHARDD_INVALID_ARGUMENT, rows[i].words,
			shardd_publication_declare(c, "live", rows[i].json, NULL, &train_err));
		if (strcmp(train_err.field, rows[i].field) != 0)
			fprintf(stderr, "%s: %s\n", rows[i].json, train_err.field);
		TRAINER_CHECK(strcmp(train_err.field, rows[i].field) == 0);
	}
	memset(large, ' ', sizeof(large) - 1);
	REFUSED(SHARDD_INVALID_ARGUMENT, "bytes of JSON",
		shardd_publication_declare(c, "live", large, NULL, &train_err));
	REFUSED(SHARDD_NOT_FOUND, "nowhere",
		shardd_publication_declare(c, "nowhere", ON_REQUEST, NULL, &train_err));
	REFUSED(SHARDD_NOT_FOUND, "has no publication 'x'",
		shardd_publication_publish(c, "live", "x", 0, NULL, &train_err));
	shardd_close(c);
	return 0;
}

Test(publications, wrong_declarations_name_the_field)
{
	beside_trainers(declares_wrongly);
}
