/*
 * A partition at each moment of a step and its commit (partition/cutfix.h), and what the store may do with what
 * either side asks of it; and the death of a daemon at each of these moments. Never do two halves commit, and when it is
 * over the job goes on, on all nodes.
 * SHARDD_TEST_LONG=1 has more runs.
 */
#include <criterion/criterion.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "fdcheck.h"
#include "longform.h"
#include "partition/cutfix.h"
#include "partition/cutline.h"

TestSuite(partition, .init = fdcheck_begin, .fini = fdcheck_end, .timeout = 3600);

#define FATES 3u /* of enum cutfix_fate; the leader's transaction may be delayed, too */
#define SIDES 2u

/* What happens in one run. */
static struct plan {
	struct cutfix_options o;
	uint64_t calm;  /* steps before anything happens */
	unsigned at;    /* the event before which the nodes are cut */
	unsigned apart; /* one of the two sides */
	unsigned late;  /* the one that notices later */
	unsigned with,
		without; /* of what the leader's side, and the other one, ask of the store: see fate_of */
	unsigned ms;    /* that it lasts */
	unsigned again; /* so many events behind its end they are cut once more; 0: never */
	unsigned apart_again;
	bool swaps; /* then the other side has the store, for longer than the leases */
	bool dies;  /* no node is cut: a daemon dies */
	struct cutfix_death death;
} plan;

#define PICKS 128u

/* What happens in another order than usual, in the step and commit behind the calm ones. */
static struct order {
	unsigned from, to;                   /* events: only there */
	unsigned n, at[PICKS], takes[PICKS]; /* pick @at takes that one */
	unsigned picks;                      /* of this run */
	uint8_t of[PICKS];                   /* that each had to choose from */
} order;

static unsigned phases[_CUTFIX_PHASE_N];
static enum cutfix_phase phase; /* of the last cut */
static unsigned runs, cuts, healed_at;
static bool counts; /* only the events */

static unsigned n_nodes(void)
{
	return plan.o.nodes ? plan.o.nodes : CUTFIX_NODES;
}

static enum cutfix_fate fate_of(unsigned i)
{
	return i < FATES ? (enum cutfix_fate)i : CUTFIX_DELAYED;
}

/* Of the side of the leader, and of the other one. */
static void give_store(unsigned apart, unsigned with, unsigned without)
{
	bool leads = apart >> plan.o.leader & 1;

	for (unsigned i = 0; i < n_nodes(); i++) {
		unsigned fate = (apart >> i & 1) == leads ? with : without;

		cutfix_store(i, fate_of(fate), fate < FATES ? 0 : fate - FATES);
	}
}

static void cut(unsigned apart)
{
	cuts++;
	give_store(apart, plan.with, plan.without);
	cutfix_cut(apart, plan.late);
}

static void strike(unsigned apart)
{
	if (!plan.dies) {
		cut(apart);
		return;
	}
	cuts++;
	cutfix_die(&plan.death);
}

/* Before each event. */
static void on_event(void)
{
	if (counts)
		return;
	if (!cuts && cutfix_events() == plan.at) {
		phase = cutfix_phase(plan.calm);
		phases[phase]++;
		strike(plan.apart);
	} else if (plan.again && healed_at && cutfix_events() == healed_at + plan.again) {
		strike(plan.apart_again);
	}
}

static void heal(void)
{
	cutfix_heal();
	for (unsigned i = 0; i < n_nodes(); i++)
		cutfix_store(i, CUTFIX_ANSWERED, 0);
}

/* Enough to repeat it. */
static void tell(void)
{
	fprintf(stderr,
		"leader %u, random %llu, schedules %d; cut before event %u, sets %u and %u late, "
		"for %u "
		"ms; the store: %u, %u; again %u events behind, set %u\n",
		plan.o.leader, (unsigned long long)plan.o.random, plan.o.schedules, plan.at,
		plan.apart, plan.late, plan.ms, plan.with, plan.without, plan.again,
		plan.apart_again);
	if (plan.dies)
		fprintf(stderr,
			"the daemon of node %u dies: what it has sent is lost %d, back %d, fate %d "
			"and "
			"delay %d of what it asks of the store\n",
			plan.death.node, plan.death.loses, plan.death.back, (int)plan.death.fate,
			(int)plan.death.delay);
	for (unsigned i = 0; i < order.n; i++)
		fprintf(stderr, "pick %u takes %u\n", order.at[i], order.takes[i]);
	for (unsigned i = 0; i < n_nodes(); i++)
		fprintf(stderr, "node %u: step %u of epoch %u; %s\n", i, (unsigned)cutfix_step(i),
			(unsigned)cutfix_epoch(i), cutfix_waits(i));
	cr_assert_fail("%s", *cutfix_wrong() ? cutfix_wrong() : "the job does not go on");
}

static void one_run(void)
{
	cuts = healed_at = order.picks = 0;
	counts = false;
	plan.o.on_event = on_event;
	cutfix_begin(&plan.o);
	(void)cutfix_train(plan.calm + 3, 500);
	cutfix_pass(plan.ms);
	heal();
	healed_at = cutfix_events();
	(void)cutfix_train(plan.calm + 4, plan.again ? 3000 : 15000);
	if (plan.again) {
		cutfix_pass(plan.ms);
		heal();
	}
	if (!cutfix_train(plan.calm + 5, 60000) || *cutfix_wrong())
		tell();
	cutfix_end();
	runs++;
}

/* The events of the step and the commit behind the calm ones. */
static void window(unsigned *ret_from, unsigned *ret_to)
{
	counts = true;
	plan.o.on_event = on_event;
	cutfix_begin(&plan.o);
	cr_assert(cutfix_train(plan.calm, 20000), "%s", cutfix_wrong());
	*ret_from = cutfix_events() + 1;
	cr_assert(cutfix_train(plan.calm + 1, 20000), "%s", cutfix_wrong());
	*ret_to = cutfix_events() + 2;
	cutfix_end();
}

/* The leader alone, or another one; who notices later; what the store does. */
static void choose(unsigned i)
{
	unsigned alone = i % SIDES ? plan.o.leader : (plan.o.leader + 1) % n_nodes();

	plan.apart = 1u << alone;
	plan.late = i / SIDES % 2 ? plan.apart : ((1u << n_nodes()) - 1) & ~plan.apart;
	plan.with = i / SIDES / 2 % (FATES + _CUTFIX_DELAY_N);
	plan.without = i / SIDES / 2 / (FATES + _CUTFIX_DELAY_N) % FATES;
}

#define CHOICES (SIDES * 2 * (FATES + _CUTFIX_DELAY_N) * FATES)

static bool under_way(void)
{
	return phase != CUTFIX_BEFORE && phase != CUTFIX_OVER;
}

/* All choices matter where a commit is under way: elsewhere nobody asks the store for one. */
static unsigned stride(void)
{
	if (longform_cut())
		return 7; /* prime to the numbers of which CHOICES is the product */
	return under_way() || longform_asked() ? 1 : 5;
}

static void at_each_moment(const struct plan *p)
{
	unsigned from, to;

	plan = *p;
	window(&from, &to);
	for (plan.at = from; plan.at <= to; plan.at++)
		for (unsigned i = 0; i < CHOICES; i += stride()) {
			choose(i);
			one_run();
			cr_assert_eq(cuts, 1);
		}
}

static void say_phases(void)
{
	static const char *const names[] = {
		"before the announcement", "announced", "asked for", "decided", "started", "over"
	};

	printf("# %u runs; the commit was, when nodes were cut:", runs);
	for (unsigned i = 0; i < _CUTFIX_PHASE_N; i++)
		printf(" %s %u%s", names[i], phases[i], i + 1 < _CUTFIX_PHASE_N ? "," : "\n");
	fflush(stdout);
}

Test(partition, at_each_moment_of_a_commit)
{
	for (unsigned leader = 0; leader < (longform_asked() ? CUTFIX_NODES : 1); leader++)
		at_each_moment(&(struct plan){ .o.leader = leader, .calm = 2, .ms = 3000 });
	say_phases();
	for (unsigned i = 0; i < _CUTFIX_PHASE_N; i++)
		cr_expect(phases[i], "no run was cut in phase %u", i);
}

static uint64_t random_state = 18;

static unsigned random_below(unsigned most)
{
	random_state ^= random_state << 13;
	random_state ^= random_state >> 7;
	random_state ^= random_state << 17;
	return (unsigned)((random_state >> 11) % most);
}

/* In any order of what arrives, in recorded steps, for longer than the leases, and again while the nodes look for a
 * leader and for the next epoch. */
Test(partition, at_random_moments_and_again)
{
	unsigned n = longform_asked() ? 20000 : longform_cut() ? 100 : 150;

	for (unsigned i = 0; i < n; i++) {
		plan = (struct plan){ .o = { .leader = random_below(CUTFIX_NODES),
					     .random = random_below(4) ? random_state : 0,
					     .schedules = random_below(3) == 0 },
				      .ms = random_below(8) ? 3000 : 13000,
				      .again = 1 + random_below(90),
				      .apart_again = 1 + random_below(6) };
		plan.calm = plan.o.schedules ? 6 : 2;
		choose(random_below(CHOICES));
		plan.at = plan.calm * 17 + random_below(60);
		one_run();
	}
	say_phases();
}

/* -- all orders --------------------------------------------------------------------------- */

static unsigned pick(unsigned n)
{
	unsigned events = cutfix_events(), k = order.picks;

	if (events < order.from || events > order.to || k == PICKS)
		return 0;
	order.of[order.picks++] = (uint8_t)n;
	for (unsigned i = 0; i < order.n; i++)
		if (order.at[i] == k)
			return order.takes[i] < n ? order.takes[i] : 0;
	return 0;
}

/* With the deviations so far; and with up to @more behind pick @first.
 * NOLINTNEXTLINE(misc-no-recursion): at most PICKS deep */
static void in_orders(unsigned first, unsigned more, void (*each)(void))
{
	uint8_t of[PICKS];
	unsigned picks;

	each();
	picks = order.picks;
	memcpy(of, order.of, sizeof(of));
	for (unsigned k = first; more && k < picks; k++)
		for (unsigned which = 1; which < of[k]; which++) {
			order.at[order.n] = k;
			order.takes[order.n++] = which;
			in_orders(k + 1, more - 1, each);
			order.n--;
		}
}

static void in_orders_of(const struct plan *p, unsigned more, void (*each)(void))
{
	plan = *p;
	order = (struct order){ 0 };
	window(&order.from, &order.to);
	plan.o.pick = pick;
	in_orders(0, more, each);
	order = (struct order){ 0 };
}

static void calm_run(void)
{
	plan.at = UINT32_MAX;
	one_run();
	cr_assert_eq(cuts, 0);
}

/* Nothing is lost, and messages arrive in every order that the links allow. */
Test(partition, every_order_of_the_messages)
{
	unsigned leaders = longform_asked() ? CUTFIX_NODES : 1;

	runs = 0;
	for (unsigned leader = 0; leader < leaders; leader++)
		in_orders_of(&(struct plan){ .o.leader = leader, .calm = 2 }, PICKS, calm_run);
	printf("# %u orders\n", runs);
	cr_expect_gt(runs, 500);
}

/* The store answers, and ranks go on, before messages that were sent earlier arrive: in up to two places,
 * together with other orders of the messages. */
Test(partition, nodes_that_are_ahead_of_messages)
{
	runs = 0;
	in_orders_of(&(struct plan){ .o.turns = true, .calm = 2 }, longform_asked() ? 3 : 2,
		     calm_run);
	printf("# %u orders\n", runs);
	cr_expect_gt(runs, 500);
}

/* At each moment of this order. The leader alone, or another one; the leader's call is answered, or lost before
 * it takes effect. */
static void cut_runs(void)
{
	unsigned picks = 0, more = longform_cut() ? SIDES : 1;

	for (plan.at = order.from; plan.at <= order.to; plan.at++)
		for (unsigned i = plan.at % more; i < 2 * SIDES; i += more) {
			choose(i % SIDES + i / SIDES * SIDES * 2);
			one_run();
			picks = order.picks > picks ? order.picks : picks;
		}
	order.picks = picks;
}

/* The nodes are cut at each moment, in all orders of messages that differ in one place; in the long form in
 * every order of them. */
Test(partition, at_each_moment_in_another_order)
{
	runs = 0;
	in_orders_of(&(struct plan){ .calm = 2, .ms = 3000 }, longform_asked() ? PICKS : 1,
		     cut_runs);
	say_phases();
	for (unsigned i = 0; i < _CUTFIX_PHASE_N; i++)
		cr_expect(phases[i], "no run was cut in phase %u", i);
}

/* -- an elastic job goes on without nodes ---------------------------------------------------- */

#define ALONE 4u /* steps that may be made while nodes are cut from each other */

static void say_epochs(void)
{
	printf("# epochs that have committed: %u of one node, %u of two, %u of three\n",
	       cutline_epochs_of(1), cutline_epochs_of(2), cutline_epochs_of(3));
	fflush(stdout);
}

static void elastic_run(void)
{
	bool all = false;

	cuts = healed_at = order.picks = 0;
	counts = false;
	plan.o.on_event = on_event;
	cutfix_begin(&plan.o);
	(void)cutfix_train(plan.calm, 20000);
	(void)cutfix_train(plan.calm + ALONE, 2000);
	cutfix_pass(plan.ms);
	if (plan.swaps) {
		give_store(plan.apart, plan.without, plan.with);
		(void)cutfix_train(plan.calm + 2 * ALONE, 15000);
	}
	heal();
	healed_at = cutfix_events();
	(void)cutfix_train(plan.calm + 2 * ALONE, plan.again ? 3000 : 15000);
	if (plan.again) {
		cutfix_pass(plan.ms);
		heal();
	}
	counts = true; /* nothing is cut any more */
	for (unsigned i = 0; i < 12 && !(all = cutfix_train(plan.calm + 3 * ALONE + i, 5000)); i++)
		; /* nodes are taken in when the others commit */
	if (!all || *cutfix_wrong())
		tell();
	cutfix_end();
	runs++;
}

/* Two nodes: one of them goes on alone, and takes the other one in again. */
Test(partition, one_node_of_two_goes_on)
{
	unsigned from, to, alone = cutline_epochs_of(1);

	runs = 0;
	for (unsigned leader = 0; leader < 2; leader++) {
		plan = (struct plan){ .o = { .nodes = 2, .elastic = true, .leader = leader },
				      .calm = 4,
				      .ms = 4000 };
		window(&from, &to);
		for (plan.at = from; plan.at <= to; plan.at++)
			for (unsigned i = 0; i < CHOICES; i += longform_asked() ? 1
							       : longform_cut() ? 37
										: 11) {
				choose(i);
				elastic_run();
				cr_assert_eq(cuts, 1);
			}
	}
	say_phases();
	say_epochs();
	cr_expect_gt(cutline_epochs_of(1), alone + runs / 4, "one node seldom went on");
}

/* One side goes on, and then the other one has the store, when the lease of the first one has ended: it has what was
 * before, and waits. */
Test(partition, the_other_side_does_not_go_on)
{
	unsigned from, to, alone = cutline_epochs_of(1);

	runs = 0;
	for (unsigned i = 0; i < 4; i++) {
		plan = (struct plan){ .o = { .nodes = 2, .elastic = true, .leader = i % 2 },
				      .calm = 4,
				      .ms = 4000,
				      .apart = 1,
				      .with = i / 2 ? CUTFIX_LOST_BEFORE : CUTFIX_ANSWERED,
				      .without = i / 2 ? CUTFIX_ANSWERED : CUTFIX_LOST_BEFORE,
				      .swaps = true };
		window(&from, &to);
		for (plan.at = from; plan.at <= to; plan.at += longform_asked() ? 1 : 3) {
			elastic_run();
			cr_assert_eq(cuts, 1);
		}
	}
	say_phases();
	say_epochs();
	cr_expect_gt(cutline_epochs_of(1), alone + runs / 2, "one node seldom went on");
}

/* Two or three nodes, in any order of what arrives, also for longer than the leases, and cut again while they look
 * for a leader, take the state of replicas, or grow. */
Test(partition, some_nodes_go_on_at_random_moments)
{
	unsigned n = longform_asked() ? 5000 : longform_cut() ? 50 : 75;

	runs = 0;
	for (unsigned i = 0; i < n; i++) {
		unsigned nodes = 2 + random_below(2);

		plan = (struct plan){ .o = { .nodes = nodes,
					     .elastic = true,
					     .leader = random_below(nodes),
					     .random = random_below(4) ? random_state : 0 },
				      .calm = 4,
				      .ms = random_below(8) ? 4000 : 13000,
				      .again = 1 + random_below(150),
				      .apart_again = 1 + random_below((1u << nodes) - 2),
				      .swaps = random_below(3) == 0 };
		choose(random_below(CHOICES));
		plan.at = plan.calm * 17 + random_below(80);
		elastic_run();
	}
	say_phases();
	say_epochs();
}

/* -- a daemon dies --------------------------------------------------------------------------- */

/* It comes back at once, or the others go on without it first. */
static void mortal_run(void)
{
	bool all = false;

	cuts = healed_at = order.picks = 0;
	counts = false;
	plan.o.on_event = on_event;
	cutfix_begin(&plan.o);
	(void)cutfix_train(plan.calm, 20000);
	(void)cutfix_train(plan.calm + ALONE, 2000);
	if (cuts && !plan.death.back)
		cutfix_come_back(plan.death.node);
	plan.death.back = true; /* the second time */
	healed_at = cutfix_events();
	(void)cutfix_train(plan.calm + 2 * ALONE, plan.again ? 3000 : 15000);
	counts = true;
	for (unsigned i = 0; i < 12 && !(all = cutfix_train(plan.calm + 3 * ALONE + i, 5000)); i++)
		; /* nodes are taken in when the others commit */
	if (!all || *cutfix_wrong())
		tell();
	cutfix_end();
	runs++;
}

static void choose_death(unsigned i)
{
	plan.dies = true;
	plan.death = (struct cutfix_death){ .node = (plan.o.leader + i) % n_nodes(),
					    .loses = i / n_nodes() % 2,
					    .back = i / n_nodes() / 2 % 2,
					    .fate = CUTFIX_LOST_BEFORE };
}

static void choose_fate(unsigned i)
{
	plan.death.fate = i ? fate_of(i) : CUTFIX_LOST_BEFORE;
	plan.death.delay = i < FATES ? 0 : i - FATES;
}

/* What it asked of the store has taken effect, or does later. */
static void die_asking(const struct plan *p, unsigned i)
{
	for (unsigned fate = CUTFIX_LOST_AFTER; fate < FATES + _CUTFIX_DELAY_N; fate++) {
		plan = *p;
		choose_death(i);
		choose_fate(fate);
		mortal_run();
	}
}

/* In the short form some of the ways at each moment: other ones at the next moment. */
static void die_at_each_moment(unsigned nodes)
{
	struct plan p = { .o = { .nodes = nodes, .elastic = true }, .calm = 4 };
	unsigned stride = longform_asked() ? 1 : longform_cut() ? 11 : 5, from, to;

	plan = p;
	window(&from, &to);
	for (p.at = from; p.at <= to; p.at++)
		for (unsigned i = p.at % stride; i < nodes * 4; i += under_way() ? 1 : stride) {
			plan = p;
			choose_death(i);
			mortal_run();
			cr_assert_eq(cuts, 1);
			if (cutfix_has_died_asking())
				die_asking(&p, i);
		}
}

/* Each daemon dies with its memory at each moment of a step and its commit: its part comes from the copies, or the
 * others go on without it, and take it in again. */
Test(partition, a_daemon_dies_at_each_moment)
{
	unsigned alone = cutline_epochs_of(1), two;

	runs = 0;
	die_at_each_moment(2);
	cr_expect_gt(cutline_epochs_of(1), alone + runs / 4, "one node seldom went on");
	two = cutline_epochs_of(2);
	die_at_each_moment(3);
	cr_expect_gt(cutline_epochs_of(2), two + runs / 8, "two nodes seldom went on");
	say_phases();
	say_epochs();
	for (unsigned i = 0; i < _CUTFIX_PHASE_N; i++)
		cr_expect(phases[i], "no daemon died in phase %u", i);
}

/* In any order of what arrives, and once more while its nodes look for a leader, take the state of copies, or grow. The
 * other nodes have the copies of it, so it may be only the same one. */
Test(partition, a_daemon_dies_at_random_moments_and_again)
{
	unsigned n = longform_asked() ? 3000 : longform_cut() ? 30 : 80;

	runs = 0;
	for (unsigned i = 0; i < n; i++) {
		unsigned nodes = 2 + random_below(2);

		plan = (struct plan){ .o = { .nodes = nodes,
					     .elastic = true,
					     .leader = random_below(nodes),
					     .random = random_below(4) ? random_state : 0 },
				      .calm = 4,
				      .again = 1 + random_below(150) };
		choose_death(random_below(nodes * 4));
		choose_fate(random_below(FATES + _CUTFIX_DELAY_N));
		plan.at = plan.calm * 17 + random_below(80);
		mortal_run();
	}
	say_phases();
	say_epochs();
}

static void lost_run(void)
{
	unsigned ahead;

	cuts = 0;
	counts = false;
	plan.o.on_event = on_event;
	cutfix_begin(&plan.o);
	(void)cutfix_train(plan.calm, 20000);
	(void)cutfix_train(plan.calm + ALONE, 4000);
	ahead = cutfix_step(1) > cutfix_step(0);
	if (cutfix_step(ahead) == plan.calm + ALONE && cutfix_step(!ahead) < plan.calm + ALONE) {
		cutfix_die(&(struct cutfix_death){
			.node = ahead, .back = true, .fate = CUTFIX_LOST_BEFORE });
		heal();
		if (cutfix_train(plan.calm + 2 * ALONE, 15000) || *cutfix_wrong())
			tell();
		runs++;
	}
	cutfix_end();
}

/* One of two nodes has gone on alone, and dies with its memory, which is in no copies: the other one must not make
 * commits behind those from what it has. It waits, or is refused. */
Test(partition, what_a_node_did_alone_is_lost_with_it)
{
	unsigned from, to, tried = 0;

	runs = 0;
	for (unsigned i = 0; i < 4; i++) {
		plan = (struct plan){
			.o = { .nodes = 2, .elastic = true, .leader = i % 2, .refuses = true },
			.calm = 4,
			.apart = 1,
			.with = i / 2 ? CUTFIX_LOST_BEFORE : CUTFIX_ANSWERED,
			.without = i / 2 ? CUTFIX_ANSWERED : CUTFIX_LOST_BEFORE
		};
		window(&from, &to);
		for (plan.at = from; plan.at <= to; plan.at += longform_asked() ? 1 : 3, tried++)
			lost_run();
	}
	say_epochs();
	cr_expect_gt(runs, tried / 2, "one node seldom went on");
}

/* Steps 5 and 6 are in no copies. One node goes back to step 4 and makes them again, and takes the other one in when
 * both have a step 6: it must not keep its own. */
Test(partition, a_step_of_the_same_number_is_another_one)
{
	for (unsigned leader = 0; leader < 2; leader++) {
		plan = (struct plan){ .o = { .nodes = 2, .elastic = true, .leader = leader } };
		cutfix_begin(&plan.o);
		cr_assert(cutfix_train(4, 20000));
		cutfix_copies(false);
		cr_assert(cutfix_train(6, 20000));
		cutfix_copies(true);
		(void)cutfix_train(5, 0); /* ranks begin no step behind it */
		cutfix_cut(1, 0);
		cutfix_pass(4000);
		cr_assert_eq(cutfix_step(0) + cutfix_step(1), 5 + 6);
		heal();
		cutfix_pass(2000);
		(void)cutfix_train(6, 2000);
		if (!cutfix_train(8, 20000) || *cutfix_wrong())
			tell();
		cutfix_end();
	}
}
