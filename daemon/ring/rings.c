#include "ring/rings.h"

#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <sys/uio.h>
#include <unistd.h>

#include "core/check.h"
#include "core/cleanup.h"
#include "core/clock.h"
#include "core/log.h"
#include "ring/rings_impl.h"

/* Submissions taken from one ring before the next one has its turn. */
#define BATCH 64
/* Most polls of the rings between two turns of the loop, so that nothing else waits long. */
#define LOOKS 64
/* How often to check whether clients still have the memory of rings that are over. */
#define SWEEP_US 100000u
/* Idle turns of the loop before it yields the core to others. */
#define YIELD_TURNS 2u

/* ------------------------------------------------------------------ waking */

void ring_post(struct ring *r, uint64_t tag, uint16_t code, const void *data, uint32_t bytes)
{
	ring_queue_post(&r->q, tag, code, data, bytes);
	if (list_empty(&r->news))
		list_append(&r->rings->news, &r->news);
}

/* Once for all that was posted meanwhile. */
static void rings_tell(struct rings *rings)
{
	while (!list_empty(&rings->news)) {
		struct ring *r = list_first(&rings->news, struct ring, news);

		list_unlink(&r->news);
		ring_queue_wake(&r->q);
	}
}

/* ------------------------------------------------------------------ looking */

static void rings_turn_out(struct ring *r)
{
	log_warn("ring", "session ended session=%llu pid=%d reason=\"its ring is corrupt\"",
		 (unsigned long long)r->session->id, (int)proc_pid(r->session->proc));
	r->broken = true;
	conn_close(r->session->conn);
}

/* Return: how many were taken. Does nothing while it is running already: a taken submission may end
 * a call that calls this again. */
static unsigned rings_take(struct ring *r, unsigned most)
{
	struct ring_submission s;
	unsigned n = 0;
	int ready;

	if (r->broken || r->taking)
		return 0;
	r->taking = true;
	ready = ring_queue_ready(&r->q);
	while (ready > 0 && n < most && n < (unsigned)ready) {
		if (ring_queue_take(&r->q, &s)) {
			ready = -1;
			break;
		}
		n++;
		ring_submit(r, &s);
	}
	r->taking = false;
	if (n)
		ring_queue_taken(&r->q);
	if (n && r->cancels && ready >= 0)
		ring_cancel(r);
	if (ready < 0)
		rings_turn_out(r);
	return n;
}

static void rings_cool(struct ring *r)
{
	if (r->broken || ring_queue_sleep(&r->q))
		list_unlink(&r->hot);
}

/* Poll each hot ring once. Return: whether there was a submission. */
static bool rings_look(struct rings *rings)
{
	uint64_t now = clock_now_us();
	struct ring *r, *tmp;
	bool any = false;

	list_for_each (r, tmp, &rings->hot, hot) {
		if (rings_take(r, BATCH)) {
			r->last_us = now;
			any = true;
		} else if (now - r->last_us >= rings->spin_now_us) {
			rings_cool(r);
		}
	}
	rings_tell(rings);
	return any;
}

/* The loop does not sleep while this is active. */
static void rings_on_idle(uv_idle_t *idle)
{
	struct rings *rings = idle->data;

	bool any = false;

	for (unsigned i = 0; i < LOOKS && !any && !list_empty(&rings->hot); i++) {
		any = rings_look(rings);
		if (!any)
			ring_pause();
	}
	rings->idle_turns = any ? 0 : rings->idle_turns + 1;
	if (list_empty(&rings->hot))
		uv_idle_stop(idle);
	else if (rings->idle_turns > YIELD_TURNS)
		sched_yield(); /* the submitting process may have been placed on this core */
}

static void rings_heat(struct ring *r)
{
	struct rings *rings = r->rings;

	r->last_us = clock_now_us();
	if (!list_empty(&r->hot))
		return;
	ring_queue_awake(&r->q);
	list_append(&rings->hot, &r->hot);
	uv_idle_start(&rings->idle, rings_on_idle);
}

/* ------------------------------------------------------- memory of those that are over */

static void rings_ring_free_if_over(struct ring *r)
{
	if (!r->released || !r->closed)
		return;
	free(r->by_tag);
	free(r);
}

/* Free its memory, and the charge for it. */
static void rings_ring_release(struct ring *r)
{
	list_unlink(&r->link);
	quota_return(&r->rings->account, MEM_CONTROL, r->q.bytes);
	user_charge_deinit(&r->charge);
	ring_queue_deinit(&r->q);
	r->released = true;
	rings_ring_free_if_over(r);
}

/* A client that ends its sessions and keeps their rings, or gives them to others, stays charged for
 * them. A client that unmaps its ring, or exits, does not wait for this. */
static void rings_sweep(struct rings *rings, bool all)
{
	struct ring *r, *tmp;

	list_for_each (r, tmp, &rings->left, link)
		if (all || !ring_queue_is_held(&r->q))
			rings_ring_release(r);
	rings->swept_us = clock_now_us();
}

/* Before the loop sleeps. */
static void rings_on_prepare(uv_prepare_t *prepare)
{
	struct rings *rings = prepare->data;

	rings_tell(rings);
	if (!list_empty(&rings->left) && clock_now_us() - rings->swept_us >= SWEEP_US)
		rings_sweep(rings, false);
}

/* The client shares the file's flags, so a blocking read must be impossible regardless of them. */
static ssize_t rings_clear_event(int fd)
{
	uint64_t count;
	struct iovec iov = { &count, sizeof(count) };

	return preadv2(fd, &iov, 1, -1, RWF_NOWAIT);
}

static void rings_on_event(uv_poll_t *poll, int status, int events)
{
	struct ring *r = poll->data;

	(void)status;
	(void)events;
	MAGIC_CHECK(r, RING_STRUCT_MAGIC);
	(void)!rings_clear_event(r->event_fd);
	r->n_woken++;
	rings_heat(r);
	if (!r->broken)
		ring_cancel(r);
}

/* Kernels before 5.8 cannot; there everything goes over gRPC. */
static bool rings_can_clear_events(void)
{
	_cleanup_(fd_closep) int fd = eventfd(1, EFD_CLOEXEC | EFD_NONBLOCK);

	return fd >= 0 && rings_clear_event(fd) == sizeof(uint64_t);
}

/* ------------------------------------------------------------------ sessions */

/* Spinning pays only while no other thread needs the core. */
static void rings_choose_spin(struct rings *rings)
{
	struct ring *r, *tmp;

	rings->spin_now_us = rings->count < rings->cores ? rings->spin_us : 0;
	list_for_each (r, tmp, &rings->all, link)
		atomic_store_explicit(&r->q.shared->spin_us, rings->spin_now_us,
				      memory_order_relaxed);
}

static void rings_on_poll_closed(uv_handle_t *handle)
{
	struct ring *r = handle->data;

	fd_close(r->event_fd);
	r->closed = true;
	rings_ring_free_if_over(r);
}

static void rings_add(struct rings_counts *c, const struct ring *r)
{
	c->submissions += r->q.n_taken;
	c->completions += r->q.n_posted;
	c->wakes += r->q.n_wakes;
}

void rings_count(const struct rings *rings, struct rings_counts *ret)
{
	struct ring *r, *tmp;

	*ret = rings->past;
	list_for_each (r, tmp, (struct list *)&rings->all, link)
		rings_add(ret, r);
}

/* The session ends, and so do its completions. */
static void rings_close_ring(struct session *s)
{
	struct ring *r = STEAL_PTR(s->ring);

	MAGIC_CHECK(r, RING_STRUCT_MAGIC);
	ring_forget_calls(r);
	list_unlink(&r->link);
	list_unlink(&r->hot);
	list_unlink(&r->news);
	r->rings->count--;
	rings_add(&r->rings->past, r);
	ring_queue_end(&r->q);
	r->magic = 0;
	r->session = NULL;
	rings_choose_spin(r->rings);
	uv_close((uv_handle_t *)&r->poll, rings_on_poll_closed);
	if (ring_queue_is_held(&r->q))
		list_append(&r->rings->left, &r->link);
	else
		rings_ring_release(r);
}

/* Take the submissions that came before: a call that arrives by another way comes after them. */
static void rings_catch_up(struct session *s)
{
	struct ring *r = s->ring;

	rings_take(r, r->q.entries);
}

static struct ring *rings_ring_new(struct rings *rings, struct session *s)
{
	struct ring *r = calloc(1, sizeof(*r));

	if (r)
		r->by_tag = calloc(rings->entries, sizeof(*r->by_tag));
	if (!r || !r->by_tag) {
		free(r);
		return NULL;
	}
	r->magic = RING_STRUCT_MAGIC;
	r->rings = rings;
	r->session = s;
	r->event_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
	list_init(&r->link);
	list_init(&r->hot);
	list_init(&r->news);
	list_init(&r->calls);
	return r;
}

/* Fails without memory, or if the ring would exceed its user's limit. */
static int rings_open_ring(struct rings *rings, struct session *s, int *ret_fd, struct fault *f)
{
	struct user_charge charge = USER_CHARGE_NULL;
	struct ring *r;
	int rc;

	if (user_charge(&charge, session_account(s), USER_MEMORY, ring_queue_bytes(rings->entries),
			f))
		return -EDQUOT;
	r = rings_ring_new(rings, s);
	rc = !r ? -ENOMEM : r->event_fd < 0 ? -EMFILE : 0;

	if (rc == 0)
		rc = uv_poll_init(rings->loop, &r->poll, r->event_fd);
	if (rc == 0) {
		r->poll.data = r;
		rc = ring_queue_init(&r->q, rings->entries, ret_fd);
		r->released = rc != 0;
		if (rc)
			uv_close((uv_handle_t *)&r->poll, rings_on_poll_closed);
	} else if (r) {
		fd_close(r->event_fd);
		free(r->by_tag);
		free(r);
	}
	if (rc) {
		user_charge_deinit(&charge);
		return rc;
	}
	r->charge = charge;
	uv_poll_start(&r->poll, UV_READABLE, rings_on_event);
	CHECK(quota_charge(&rings->account, MEM_CONTROL, r->q.bytes) == 0); /* it has no limit */
	list_append(&rings->all, &r->link);
	rings->count++;
	s->ring = r;
	rings_choose_spin(rings);
	return 0;
}

static int rings_get(struct session *s, uint32_t part, int *ret_fd, uint64_t *ret_bytes,
		     struct fault *f)
{
	struct rings *rings = s->sessions->rings_data;
	int r;

	if (part > SHD1_RING_EVENT)
		return fault_set(f, FAULT_INVALID, "part", "a ring has no part %u", part);
	if (part == SHD1_RING_MEMORY && s->ring)
		return fault_set(f, FAULT_STATE, NULL, "this session already has a ring");
	if (part == SHD1_RING_EVENT && !s->ring)
		return fault_set(f, FAULT_STATE, NULL, "this session has no ring");
	if (part == SHD1_RING_EVENT) {
		*ret_fd = fcntl(s->ring->event_fd, F_DUPFD_CLOEXEC, 3);
		r = *ret_fd < 0 ? -errno : 0;
	} else {
		r = rings_open_ring(rings, s, ret_fd, f);
	}
	if (r && f->code)
		return f->code;
	if (r)
		return fault_errno(f, r, "making a ring");
	*ret_bytes = s->ring->q.bytes;
	return 0;
}

static void rings_info(const struct session *s, struct session_ring_info *ret)
{
	const struct ring *r = s->ring;

	*ret = (struct session_ring_info){ .bytes = r->q.bytes,
					   .submissions = r->q.n_taken,
					   .completions = r->q.n_posted,
					   .wakes = r->q.n_wakes,
					   .woken = r->n_woken,
					   .full = r->q.n_full };
}

static uint64_t rings_bytes_of_all(const struct sessions *s)
{
	const struct rings *rings = s->rings_data;

	return rings->account.used;
}

/* ------------------------------------------------------------------ all of them */

static uint32_t rings_count_cores(void)
{
	cpu_set_t set;

	return sched_getaffinity(0, sizeof(set), &set) ? 1 : (uint32_t)CPU_COUNT(&set);
}

void rings_init(struct rings *r, uv_loop_t *loop, struct sessions *s, uint32_t max_ops,
		uint32_t spin_us)
{
	static const struct session_rings ops = { rings_get, rings_catch_up, rings_close_ring,
						  rings_info, rings_bytes_of_all };

	*r = (struct rings){ .loop = loop,
			     .entries = ring_queue_entries(max_ops),
			     .spin_us = spin_us,
			     .cores = rings_count_cores(),
			     .open = true };
	quota_init(&r->account, NULL, 0);
	list_init(&r->all);
	list_init(&r->left);
	list_init(&r->hot);
	list_init(&r->news);
	uv_prepare_init(loop, &r->prepare);
	uv_idle_init(loop, &r->idle);
	r->prepare.data = r;
	r->idle.data = r;
	uv_prepare_start(&r->prepare, rings_on_prepare);
	uv_unref((uv_handle_t *)&r->prepare);
	s->rings = rings_can_clear_events() ? &ops : NULL;
	s->rings_data = r;
}

void rings_set_spin(struct rings *r, uint32_t spin_us)
{
	r->spin_us = spin_us;
	rings_choose_spin(r);
}

void rings_stop(struct rings *rings)
{
	struct ring *r, *tmp;

	list_for_each (r, tmp, &rings->all, link) {
		r->broken = true;
		ring_forget_calls(r);
	}
}

void rings_close(struct rings *r)
{
	if (!r->open)
		return;
	rings_sweep(r, true);
	CHECK(list_empty(&r->all) && !r->account.used);
	r->open = false;
	uv_close((uv_handle_t *)&r->prepare, NULL);
	uv_close((uv_handle_t *)&r->idle, NULL);
}
