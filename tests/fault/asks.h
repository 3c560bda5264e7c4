/* What ranks of a scene ask for: one request each, with all that it points to. */
#ifndef SHARDD_TESTS_FAULT_ASKS_H
#define SHARDD_TESTS_FAULT_ASKS_H

#include "scenes.h"

#define ASK(name) void name(struct scene *s, unsigned r)

ASK(ask_seed_plain);
ASK(ask_seed);
ASK(ask_read_gathered);
ASK(ask_read_gradient);
ASK(ask_write_gradient);
ASK(ask_step);
ASK(ask_commit);
ASK(ask_begin_forward);
ASK(ask_end_forward);
ASK(ask_next_shard);
ASK(ask_gather_zero);
ASK(ask_release_zero);
ASK(ask_plan);
ASK(ask_own);
ASK(ask_from_root);
ASK(ask_alloc);
ASK(ask_free_buffer);
ASK(ask_reduce_twice);
ASK(ask_defer);
ASK(ask_leave_out);
ASK(ask_all_reduce);
ASK(ask_average);
ASK(ask_most);
ASK(ask_all_reduce_and_free);
ASK(ask_broadcast);
ASK(ask_barrier);
ASK(ask_clip);
ASK(ask_clip_value);
ASK(ask_unscale);
ASK(ask_step_and_commit);
ASK(ask_set_reshard);
ASK(ask_set_prefetch);
ASK(ask_broadcast_buffers);
ASK(ask_summon_state);
ASK(ask_return_it);
ASK(ask_return_written);
ASK(ask_summon_and_return);
ASK(ask_convert);
ASK(ask_unfreeze);
ASK(ask_drop_units);
ASK(ask_verify);
ASK(ask_set_factors);
ASK(ask_read_shard);
ASK(ask_write_shard);
ASK(ask_write_gradient_shard);
ASK(ask_drop);
ASK(ask_join_uneven);
ASK(ask_uneven_reduce);
ASK(ask_uneven_reduce_twice);
ASK(ask_join_even);
ASK(ask_ddp_create);
ASK(ask_ready_dense);
ASK(ask_ready_rows);
ASK(ask_ready_and_finish);
ASK(ask_uneven_pass);
ASK(ask_reduce_sparse);
ASK(ask_backward_but_last);
ASK(ask_gradient_plain);
ASK(ask_reduce_plain);
ASK(ask_gradient);
ASK(ask_reduce);
ASK(ask_accumulate);
ASK(ask_gather);
ASK(ask_release);
ASK(ask_summon);
ASK(ask_unit_buffers);
ASK(ask_shard_done);
ASK(ask_ddp_forward);
ASK(ask_ddp_backward);
ASK(ask_ddp_finish);

/* All of them, for random ones. None submits more than MOST_OF_AN_ASK ops. */
#define MOST_OF_AN_ASK 4u
extern const ask_fn all_asks[];
extern const size_t n_all_asks;

#endif
