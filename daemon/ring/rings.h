/*
 * The rings of all sessions, on the loop: which rings are polled, when the loop may sleep, and how
 * submissions are processed. Loop thread only.
 *
 *   ASLEEP --eventfd--> HOT (looked at in every turn of the loop) --nothing for spin_us--> ASLEEP
 *      '-------------- its session ends --------------> CLOSED, freed by its handle
 *
 * A submission ends in op_submit, as a call does, and its op's end is its completion.
 */
#ifndef SHARDD_RING_RINGS_H
#define SHARDD_RING_RINGS_H

#include <stdbool.h>
#include <stdint.h>
#include <uv.h>

#include "core/list.h"
#include "core/quota.h"
#include "session/session.h"

struct ring;

struct rings_counts {
	uint64_t submissions, completions, wakes; /* wakes: of clients */
};

struct rings {
	uv_loop_t *loop;
	uint32_t entries;     /* of a queue */
	uint32_t spin_us;     /* as configured */
	uint32_t spin_now_us; /* 0 while cores are scarce */
	unsigned idle_turns;  /* in a row in which nothing was there */
	uint32_t cores;
	uint32_t count;
	struct quota account; /* of their memory: the daemon's own, for sessions may be in no job */
	struct list all;
	struct list left;  /* of sessions that ended: other processes have their memory */
	uint64_t swept_us; /* when those were last checked */
	struct list hot;   /* to be polled */
	struct list news;  /* whose clients may need a wake-up */
	uv_prepare_t prepare;
	uv_idle_t idle;
	bool open;
	struct rings_counts past; /* of rings that are over */
};

/* @max_ops: unanswered ones of a session. @spin_us: see ring_spin_us. Sessions of @s get
 * their rings here from now on. */
void rings_init(struct rings *r, uv_loop_t *loop, struct sessions *s, uint32_t max_ops,
		uint32_t spin_us);

/* Change the setting. */
void rings_set_spin(struct rings *r, uint32_t spin_us);

/* Nothing is taken or posted any more: the daemon ends, and waiting clients must see that, not the
 * effects on other ops. */
void rings_stop(struct rings *r);

/* Of all rings since the start. */
void rings_count(const struct rings *r, struct rings_counts *ret);

/* Close its handles; all sessions must be gone. Safe to call twice. */
void rings_close(struct rings *r);

#endif
