#!/usr/bin/env python3
"""What shardd.torch does beside numbers: bad input, whole states, failures, branches that differ.

Prints one line of TAP a test.
"""

import copy
import gc
import os
import pickle
import shutil
import subprocess
import sys
import threading
import unittest
import unittest.mock
import warnings
import weakref

import fsdp
import support
import torch
from torch import nn

import shardd
import shardd.torch as st


def model(seed=1):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


def wrapped(seed=1, **options):
    net = model(seed)
    st.fully_shard(net[0], **options)
    return st.fully_shard(net, **options)


def numbers(step, rank=0, *shape):
    draw = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(*(shape or (5, 4)), generator=draw)


def train(net, optimizer, steps, rank=0):
    for step in range(steps):
        net(numbers(step, rank)).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(4, 9), nn.Linear(9, 4)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


class OneRank(fsdp.OneRank):
    def refused(self, kind, text):
        return self.assertRaisesRegex(kind, text)

    # -- bad input

    def test_a_parameter_that_is_sharded_says_so(self):
        net = wrapped()
        with self.refused(shardd.FailedPrecondition, "'weight' is sharded.* torch.no_grad"):
            net[0].weight.sum()
        with self.refused(shardd.FailedPrecondition, r"p.detach\(\).clone\(\)"):
            copy.deepcopy(net[0].weight)
        with torch.no_grad():
            whole = net[0].weight.detach().clone()  # the only rank has all of it
        self.assertTrue(torch.equal(whole, net.state_dict()["0.weight"]))
        nn.init.zeros_(net[0].weight)
        st.SGD(net.parameters(), lr=0.1)
        self.assertFalse(net.state_dict()["0.weight"].any())
        with torch.no_grad():
            net[0].weight[1].fill_(2.0)
            net[0].bias.view(2, 4)[1, 2:] = 3.0
        self.assertEqual(net.state_dict()["0.weight"].sum().item(), 2.0 * whole[1].numel())
        self.assertEqual((net.state_dict()["0.bias"] == 3.0).nonzero().flatten().tolist(), [6, 7])
        self.assertIn("sharded parameter", repr(net[0].weight))

    def test_type_and_device_cannot_be_changed(self):
        net = wrapped()
        with self.refused(shardd.FailedPrecondition, r"call .to\(\) before it"):
            net.double()
        net.to("cpu")  # nothing changes
        with self.refused(shardd.InvalidArgument, "float64"):
            st.fully_shard(nn.Linear(2, 2).double())(torch.ones(1, 2).double())

    def test_type_and_device_of_what_is_gathered(self):
        net = st.replicate(model())
        net(numbers(0))
        net.double()
        with self.refused(shardd.FailedPrecondition, "type, device or data of parameter"):
            net(numbers(0))
        net = st.fully_shard(model(), reshard_after_forward=False)
        net(numbers(0))
        with self.refused(shardd.FailedPrecondition, r"call .to\(\) before it"):
            net.double()

    def test_forwards_of_two_threads(self):
        class Waits(nn.Module):
            def __init__(self):
                super().__init__()
                self.layer, self.inside, self.on = nn.Linear(4, 3), threading.Event(), None

            def forward(self, x):
                self.inside.set()
                if self.on:
                    self.on.wait(30)
                return self.layer(x)

        for wrap in (st.replicate, st.fully_shard):
            net = wrap(Waits())
            net(numbers(0))
            net.inside.clear()
            net.on = threading.Event()
            other = threading.Thread(target=net, args=(numbers(0),))
            other.start()
            net.inside.wait(30)
            with self.refused(shardd.FailedPrecondition, "two threads"):
                net(numbers(0))
            net.on.set()
            other.join()
            net(numbers(0)).sum().backward()  # in turns

    def test_a_job_of_another_shape(self):
        st.shutdown()
        st.init(job="shaped", world_size=1, rank=0, lifetime=shardd.Lifetime.KEEP)
        wrapped()(numbers(0))
        st.shutdown()
        with self.refused(shardd.SharddError, "'shaped' has world size 1, not 2: .*job delete"):
            st.init(job="shaped", world_size=2, rank=0)
        st.init(job="shaped", world_size=1, rank=0, resume=True)
        other = st.fully_shard(nn.Sequential(nn.Linear(4, 9), nn.Tanh(), nn.Linear(9, 3)))
        with self.refused(shardd.SharddError, "registered with.*job delete"):
            other(numbers(0))

    def test_an_optimizer_built_before_wrapping(self):
        net = model()
        early = list(net.parameters())
        st.fully_shard(net)
        with self.refused(shardd.InvalidArgument, "call fully_shard first"):
            st.AdamW(early)

    def test_what_fsdp2_modules_can(self):
        from torch.distributed.fsdp import FSDPModule

        net = wrapped()
        own = {name for name in vars(FSDPModule) if not name.startswith("_")}
        self.assertEqual({name for name in own if not hasattr(net, name)}, set())
        self.assertIsInstance(net, st.FSDPModule)
        self.assertNotIsInstance(model(), st.FSDPModule)
        st.share_comm_ctx([net, net[0]])
        with self.refused(shardd.InvalidArgument, "Sequential is not wrapped"):
            st.share_comm_ctx([net, model()])
        with self.refused(shardd.InvalidArgument, "has no method 'generate'"):
            st.register_fsdp_forward_method(net, "generate")
        with self.refused(shardd.InvalidArgument, "divide factor is 0"):
            net.set_gradient_divide_factor(0)
        for name in ("set_all_reduce_hook", "set_custom_all_gather", "set_custom_reduce_scatter"):
            with self.refused(shardd.Unimplemented, f"{name}: .* none of your code"):
                getattr(net, name)(None)
        with self.refused(shardd.FailedPrecondition, "FSDPLinear is a part of one"):
            net[0].reset_iter_state()
        with self.refused(shardd.Unimplemented, "divided as DistributedDataParallel"):
            st.replicate(model()).set_gradient_divide_factor(2.0)
        with self.refused(shardd.Unimplemented, "find_unused_parameters=True"):
            st.replicate(model()).set_reduce_scatter_unused_params(True)
        st.SGD(net.parameters(), lr=0.1)
        net.set_is_last_backward(True)
        net.set_modules_to_forward_prefetch([net])
        handle = net.unshard(async_op=True)
        self.assertIsInstance(handle, st.UnshardHandle)
        handle.wait()
        net.reset_iter_state()
        self.assertNotIn("gathered", repr(net))
        net.set_requires_all_reduce(False)  # there are no replicas
        net(numbers(0)).sum().backward()
        self.assertIsNotNone(net[0].weight.grad)

    def test_an_optimizer_of_torch_built_before_wrapping(self):
        net = model()
        early = torch.optim.SGD(net.parameters(), lr=0.1)
        st.fully_shard(net)
        other = torch.optim.SGD(model().parameters(), lr=0.1)
        with self.refused(shardd.FailedPrecondition, "built before fully_shard.*afterwards"):
            early.step()
        other.step()

    def test_an_optimizer_built_after_the_first_forward(self):
        net = wrapped()
        net(numbers(0))
        with self.refused(shardd.FailedPrecondition, "before the first forward"):
            st.AdamW(net.parameters())

    def test_a_function_of_torch_clips_sharded_gradients(self):
        net, plain = wrapped(), model()
        ours = torch.optim.SGD(net.parameters(), lr=0.1)
        theirs = torch.optim.SGD(plain.parameters(), lr=0.1)
        for m, optimizer in ((net, ours), (plain, theirs)):
            m(numbers(0)).sum().backward()
            norm = torch.nn.utils.clip_grad_norm_(m.parameters(), 0.01)
            self.assertGreater(norm.item(), 0.01)
            optimizer.step()
        for name, value in plain.state_dict().items():
            self.assertTrue(torch.equal(value, net.state_dict()[name]), name)

    def test_an_optimizer_without_some_parameters(self):
        net = wrapped()
        with self.refused(shardd.InvalidArgument, "no parameter '2.bias'"):
            st.AdamW([p for p in net.parameters() if p.ndim > 1])

    def test_modules_that_come_after_wrapping(self):
        def append(net):
            net.append(nn.Linear(4, 4))

        def replace(net):
            net[0] = nn.Linear(4, 8)

        def at_the_root(net):
            net.gain = nn.Parameter(torch.ones(1))

        for change in (append, replace, at_the_root):
            for wrap in (wrapped, lambda: st.replicate(model())):
                st.shutdown()
                st.init(job=f"changed-{change.__name__}", world_size=1, rank=0)
                net = wrap()
                st.SGD(net.parameters(), lr=0.1)
                change(net)
                with self.refused(shardd.FailedPrecondition, "added, removed or replaced"):
                    net(numbers(0))

    def test_what_a_guard_is_asked_for_in_vain(self):
        net = wrapped()
        with self.refused(shardd.FailedPrecondition, "summon_full_params"):
            net[0].weight.data = torch.zeros(8, 4)
        with self.refused(shardd.Unimplemented, "register_post_accumulate_grad_hook"):
            net[0].weight.register_hook(print)
        with self.refused(shardd.Unimplemented, "state_dict"):
            pickle.dumps(net)
        for whole, text in ((torch.optim.LBFGS, "all tensors of a model at once"),
                            (torch.optim.Adafactor, "whole=True")):
            with self.refused(shardd.Unimplemented, text):
                st.Sharded(whole, net.parameters())
        with self.refused(shardd.InvalidArgument, "MixedPrecisionPolicy"):
            st.fully_shard(model(), mp_policy="bf16")
        with self.refused(shardd.InvalidArgument, "give a module, or a list of modules"):
            st.fully_shard("model")

    def test_steps_of_resilient_are_not_nested(self):
        net = wrapped()
        optimizer = st.SGD(net.parameters(), lr=0.1)
        run = st.resilient(net)
        with run:
            with self.refused(shardd.FailedPrecondition, "before the next one begins"), run:
                pass
            train(net, optimizer, 1)
        self.assertEqual(run.step, 1)

    def test_groups_of_sharded_are_those_of_torch(self):
        def groups(net):
            return [{"params": list(net[0].parameters()), "lr": 0.5},
                    {"params": [net[2].weight]}, {"params": net[2].bias}]

        net, plain = wrapped(), model()
        ours = st.Sharded(torch.optim.Adam, groups(net), lr=0.1)
        theirs = torch.optim.Adam(groups(plain), lr=0.1)
        self.assertEqual([(g["lr"], len(g["params"])) for g in ours.param_groups],
                         [(g["lr"], len(g["params"])) for g in theirs.param_groups])
        self.assertEqual(ours.defaults, theirs.defaults)
        for optimizer, m in ((ours, net), (theirs, plain)):
            schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.2, total_steps=5)
            for step in range(4):
                m(numbers(step)).pow(2).mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                schedule.step()
        for name, value in plain.state_dict().items():
            self.assertTrue(torch.equal(value, net.state_dict()[name]), name)

    def test_states_by_name_are_loaded_by_name(self):
        net = wrapped()
        optimizer = st.Sharded(torch.optim.Adam, net.parameters(), lr=0.1)
        train(net, optimizer, 2)
        saved = st.optimizer_state_dict(optimizer)
        saved["param_groups"][0]["params"].reverse()
        optimizer.load_state_dict(saved)
        again = st.optimizer_state_dict(optimizer)
        for name, state in saved["state"].items():
            self.assertTrue(torch.equal(state["exp_avg"], again["state"][name]["exp_avg"]), name)
        saved["param_groups"][0]["params"][0] = "nobody"
        with self.refused(shardd.InvalidArgument, "has the same"):
            optimizer.load_state_dict(saved)

    def test_parameters_of_before_replicate(self):
        """DDP's are the same objects as before. A program that had kept them clipped, froze and
        averaged values that nobody trains, without an error."""
        net = model()
        kept = list(net.parameters())
        st.replicate(net)
        st.SGD(net.parameters(), lr=0.1)
        self.assertEqual([(tuple(p.shape), p.numel(), p.requires_grad) for p in kept],
                         [(tuple(p.shape), p.numel(), True) for p in net.parameters()])
        self.assertIn("of before replicate()", repr(kept[0]))
        for use in (lambda: kept[0].grad, lambda: kept[0].requires_grad_(False),
                    lambda: setattr(kept[0], "requires_grad", False),
                    lambda: torch.nn.utils.clip_grad_norm_(kept, 1.0),
                    lambda: kept[0].detach().clone(), lambda: kept[0].data,
                    lambda: torch.zeros(3).lerp_(kept[0], 0.5), lambda: torch.stack(kept[:1]),
                    lambda: setattr(kept[0], "grad", None)):
            with self.assertRaisesRegex(shardd.FailedPrecondition, "model.parameters()"):
                use()

    def test_a_frozen_parameter_of_a_replicated_model(self):
        net, plain = model(), model()
        for m in (net, plain):
            m[0].bias.requires_grad_(False)
        st.replicate(net)
        ours = st.Sharded(torch.optim.SGD, net.parameters(), lr=0.1)
        theirs = torch.optim.SGD(plain.parameters(), lr=0.1)
        train(net, ours, 2)
        train(plain, theirs, 2)
        for name, value in plain.state_dict().items():
            self.assertTrue(torch.equal(value, net.state_dict()[name]), name)

    def test_an_optimizer_can_be_built_after_a_refused_one(self):
        net = wrapped()
        with self.refused(ValueError, "learning rate"):
            st.Sharded(torch.optim.Adam, net.parameters(), lr=-1.0)
        train(net, st.Sharded(torch.optim.Adam, net.parameters(), lr=0.1), 1)

    def test_a_model_that_is_dropped_is_freed(self):
        net = wrapped()
        optimizer = st.Sharded(torch.optim.Adagrad, net.parameters(), lr=0.1)
        net(numbers(0)).sum().backward()
        optimizer.step()
        alive = weakref.ref(net), weakref.ref(optimizer)
        del net, optimizer
        gc.collect()
        self.assertEqual([a() for a in alive], [None, None])

    def test_a_parameter_added_or_replaced(self):
        net = wrapped()
        net(numbers(0))
        net[0].extra = nn.Parameter(torch.ones(1))
        with self.refused(shardd.FailedPrecondition, "added, removed or replaced"):
            net(numbers(0))
        del net[0].extra
        net[0].bias = nn.Parameter(torch.ones(8))
        with self.refused(shardd.FailedPrecondition, "replaced after fully_shard"):
            net(numbers(0))

    def test_requires_grad_changed_after_wrapping(self):
        net = wrapped()
        net(numbers(0))
        net[0].bias.requires_grad_(False)
        net(numbers(0)).sum().backward()
        self.assertIsNone(net[0].bias.grad)
        self.assertIsNotNone(net[0].weight.grad)

    def test_requires_grad_of_what_was_frozen(self):
        net = model()
        net[0].bias.requires_grad_(False)
        st.fully_shard(net)
        net(numbers(0))
        net[0].bias.requires_grad_(True)
        net(numbers(0)).sum().backward()
        self.assertIsNotNone(net[0].bias.grad)

    def test_tied_across_units(self):
        net = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
        net[1].weight = net[0].weight
        st.fully_shard(net[0])
        with self.refused(shardd.InvalidArgument, "tied to 'weight' of FSDPLinear"):
            st.fully_shard(net)

    def test_what_is_not_there(self):
        with self.refused(shardd.Unimplemented, "offload_policy"):
            st.fully_shard(model(), offload_policy=1)
        with self.refused(shardd.InvalidArgument, "reshard_after_forward"):
            st.fully_shard(model(), reshard_after_forward="yes")
        with self.refused(shardd.InvalidArgument, "shard_placement_fn is 1"):
            st.fully_shard(model(), shard_placement_fn=1)
        with self.refused(shardd.InvalidArgument, "ModuleList has no forward"):
            st.fully_shard(nn.ModuleList())
        net = wrapped()
        with self.refused(shardd.FailedPrecondition, "already called"):
            st.fully_shard(net)

    def test_settings_that_cannot_change(self):
        net = wrapped()
        optimizer = st.AdamW(net.parameters(), lr=0.1)
        net(numbers(0)).sum().backward()
        optimizer.param_groups[0]["amsgrad"] = True
        with self.refused(shardd.Unimplemented, "amsgrad is True now and was False"):
            optimizer.step()
        optimizer.param_groups[0].update(amsgrad=False, betas=(0.5, 1.5))
        with self.refused(shardd.InvalidArgument, "settings.beta2 is 1.5"):
            optimizer.step()
        with self.refused(shardd.Unimplemented, "amsgrad is True in the state"):
            optimizer.load_state_dict({**optimizer.state_dict(), "param_groups": [
                {**optimizer.state_dict()["param_groups"][0], "amsgrad": True}]})
        with self.assertRaisesRegex(ValueError, "more than one parameter group"):
            optimizer.add_param_group({"params": list(net.parameters())[:1]})
        for lr, text in ((torch.tensor([0.1, 0.2]), "2 elements"),
                         (torch.tensor(0.1).half(), "tensor of torch.float16")):
            with self.refused(shardd.InvalidArgument, text):
                st.AdamW(wrapped(2).parameters(), lr=lr)
        with self.refused(shardd.InvalidArgument, "foreach"):
            st.AdamW(wrapped(2).parameters(), lr=torch.tensor(0.1), foreach=True)

    def test_a_momentum_that_comes_later(self):
        net = wrapped()
        optimizer = st.SGD(net.parameters(), lr=0.1)
        optimizer.param_groups[0]["momentum"] = 0.5
        net(numbers(0)).sum().backward()
        with self.refused(shardd.Unimplemented, "was 0 when the optimizer was built"):
            optimizer.step()

    def test_what_is_sent_of_settings(self):
        net = wrapped()
        biases = [p for p in net.parameters() if p.dim() == 1]
        weights = [p for p in net.parameters() if p.dim() > 1]
        optimizer = st.AdamW([{"params": weights}, {"params": biases, "weight_decay": 0.0}])
        self.assertEqual(optimizer.rates(), (1e-3, []), "the daemon was told of the decay")
        first, second = optimizer.param_groups
        first["lr"] = second["lr"] = 0.5
        self.assertEqual(optimizer.rates(), (0.5, []))
        second["lr"] = 0.25
        rate, (one, other) = optimizer.rates()
        self.assertEqual((rate, one.lr, list(one.units)), (None, 0.5, []))
        self.assertEqual((other.lr, other.weight_decay, len(other.units)), (0.25, 0.0, 2))
        for group in optimizer.param_groups:
            group.update(lr=0.5, betas=(0.5, 0.6), weight_decay=0.25)
        rate, [one] = optimizer.rates()
        self.assertEqual((rate, one.betas, list(one.units)), (None, (0.5, 0.6), []),
                         "equal ones are one")

    def test_sparse_gradients(self):
        nets = []
        for sparse in (True, False):
            torch.manual_seed(1)
            nets.append(st.fully_shard(nn.Embedding(5, 3, sparse=sparse)))
            optimizer = st.SGD(nets[-1].parameters(), lr=0.1)
            for rows in ([1, 2, 2], [2, 4, 0]):
                nets[-1](torch.tensor(rows)).pow(2).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        self.assertTrue(torch.equal(*(net.state_dict()["weight"] for net in nets)))

    def test_fork_after_connect(self):
        net = wrapped()
        net(numbers(0))
        read, write = os.pipe()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            child = os.fork()
        if child == 0:
            try:
                net(numbers(0))
                said = "no error"
            except shardd.FailedPrecondition as error:
                said = str(error)
            os.write(write, said.encode())
            os._exit(0)
        os.waitpid(child, 0)
        self.assertIn("fork", os.read(read, 1000).decode())
        os.close(read)
        os.close(write)

    # -- states

    def test_state_dict_is_that_of_the_plain_model(self):
        for net in (wrapped(), st.fully_shard(model())):
            for _ in range(2):  # before and after the daemon has it
                state = net.state_dict()
                for name, value in model().state_dict().items():
                    self.assertTrue(torch.equal(state[name], value), name)
                net(numbers(0))
            model().load_state_dict(state)

    def test_load_state_dict(self):
        other = model(7).state_dict()
        for used in (False, True):
            net = wrapped()
            if used:
                net(numbers(0))
            net.load_state_dict(other)
            out = net(numbers(0))
            plain = model(7)
            self.assertTrue(torch.equal(out, plain(numbers(0))))
        with self.refused(RuntimeError, "size mismatch"):
            net.load_state_dict({**other, "0.weight": torch.ones(2, 2)})
        self.assertTrue(torch.equal(net(numbers(0)), plain(numbers(0))))

    def test_state_in_bf16_is_kept_in_fp32(self):
        policy = fsdp.fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16)
        net = wrapped(mp_policy=policy)
        self.assertEqual(net(numbers(0)).dtype, torch.bfloat16)
        self.assertTrue(torch.equal(net.state_dict()["0.weight"], model()[0].weight))

    def test_summon_full_params(self):
        net = wrapped()
        for used in (False, True):
            with st.summon_full_params(net), torch.no_grad():
                net[0].weight.fill_(0.25 + used)
            with st.summon_full_params(net, writeback=used is False):
                self.assertEqual(net[0].weight[0, 0].item(), 0.25 + used)
            net(numbers(0))
        self.assertEqual(net.state_dict()["0.weight"][7, 3].item(), 1.25)

    def test_from_the_meta_device(self):
        with torch.device("meta"):
            net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
        st.fully_shard(net[0])
        st.fully_shard(net)
        torch.manual_seed(1)
        before = torch.random.get_rng_state()
        optimizer = st.SGD(net.parameters(), lr=0.1)
        self.assertTrue(torch.equal(before, torch.random.get_rng_state()))
        weight = net.state_dict()["0.weight"]
        self.assertTrue(0 < weight.abs().max() <= 0.5)
        train(net, optimizer, 2)
        self.assertFalse(torch.equal(weight, net.state_dict()["0.weight"]))
        with torch.device("meta"):
            net = nn.ParameterList([torch.empty(3)])

        class Holds(nn.Module):
            def __init__(self):
                super().__init__()
                self.held = net

            def forward(self, x):
                return x

        with self.refused(shardd.InvalidArgument, "reset_parameters"):
            st.fully_shard(Holds())(numbers(0))

    def test_strides_that_would_be_lost(self):
        conv = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        for wrap in (st.fully_shard, st.replicate):
            with self.refused(shardd.Unimplemented, "strides .27, 1, 9, 3.: .*contiguous_format"):
                wrap(conv)
        layer = nn.Linear(3, 2)
        layer.weight = nn.Parameter(torch.ones(3, 2).t())
        with self.refused(shardd.Unimplemented, "'weight' has the strides .1, 2."):
            st.fully_shard(layer)
        # inputs may be: the result is what a plain module has
        conv = nn.Conv2d(3, 4, 3)
        x = torch.ones(2, 3, 8, 8).to(memory_format=torch.channels_last)
        expected = conv(x)
        with torch.no_grad():
            self.assertTrue(torch.equal(st.fully_shard(conv)(x), expected))

    def test_a_graph_of_gradients(self):
        for module in (nn.Linear(3, 2), nn.LayerNorm(3)):
            net = st.fully_shard(module)
            st.SGD(net.parameters(), lr=0.1)
            with self.refused(shardd.Unimplemented, "create_graph=True"):
                net(numbers(0)[:, :3]).pow(2).sum().backward(create_graph=True)
            net(numbers(0)[:, :3]).pow(2).sum().backward()  # the next pass is a new one

    def test_the_job_goes_on_in_the_next_process(self):
        st.shutdown()
        st.init(job="kept", world_size=1, rank=0, lifetime=shardd.Lifetime.KEEP)
        net = wrapped(1)
        train(net, st.AdamW(net.parameters(), lr=0.1), 3)
        st.commit(3, {"data": 30})
        state = net.state_dict()
        st.shutdown()
        st.init(job="kept", world_size=1, rank=0, resume=True)
        self.assertEqual(st.session().member.step, 3)
        other = wrapped(2)  # its own values do not count
        st.AdamW(other.parameters(), lr=0.1)
        for name, value in other.state_dict().items():
            self.assertTrue(torch.equal(value, state[name]), name)

    # -- training

    def test_an_exception_in_forward(self):
        class Raises(nn.Module):
            def __init__(self):
                super().__init__()
                self.inner, self.bad = nn.Linear(4, 4), False

            def forward(self, x):
                x = self.inner(x)
                if self.bad:
                    raise KeyError("bad")
                return x

        net = Raises()
        st.fully_shard(net.inner)
        st.fully_shard(net)
        optimizer = st.SGD(net.parameters(), lr=0.1)
        for bad in (False, True, False):
            net.bad = bad
            if bad:
                with self.assertRaises(KeyError):
                    net(numbers(0))
                self.assertNotIn("gathered", repr(net))
            else:
                train(net, optimizer, 1)

    def test_an_exception_in_backward(self):
        net = wrapped()
        optimizer = st.SGD(net.parameters(), lr=0.1)

        def bad(gradient):
            raise KeyError("bad")

        x = numbers(0)
        out = net[1](net[0](x))
        del out
        hidden = net[0].register_forward_hook(lambda m, a, o: o.register_hook(bad) and None)
        with self.assertRaises(KeyError):
            net(x).sum().backward()
        hidden.remove()
        optimizer.zero_grad()
        before = net.state_dict()["2.bias"]
        net(x).sum().backward()
        optimizer.step()
        self.assertTrue(torch.allclose(before - net.state_dict()["2.bias"], torch.tensor(0.5)))

    def test_a_module_that_returns_nothing(self):
        class Keeps(nn.Module):
            def __init__(self):
                super().__init__()
                torch.manual_seed(1)
                self.a, self.b, self.loss = nn.Linear(4, 4), nn.Linear(4, 4), None

            def forward(self, x):
                self.loss = self.b(torch.tanh(self.a(x))).pow(2).mean()

        class Outer(nn.Module):
            def __init__(self):
                super().__init__()
                self.inner = Keeps()

            def forward(self, x):
                self.inner(x)
                return self.inner.loss

        net, plain = Outer(), Outer()
        st.fully_shard(net.inner)
        st.fully_shard(net)
        for m, kind in ((net, st.SGD), (plain, torch.optim.SGD)):
            optimizer = kind(m.parameters(), lr=0.1)
            for step in range(2):
                m(numbers(step)).backward()
                optimizer.step()
                optimizer.zero_grad()
        for name, value in plain.state_dict().items():
            self.assertTrue(torch.equal(value, net.state_dict()[name]), name)

    def test_zero_grad_drops_what_was_reduced(self):
        net = wrapped()
        optimizer = st.SGD(net.parameters(), lr=0.1)
        before = net.state_dict()
        for sync in (True, False):
            net.set_requires_gradient_sync(sync)
            net(numbers(0)).sum().backward()
            optimizer.zero_grad()
        net.set_requires_gradient_sync(True)
        optimizer.step()
        for name, value in net.state_dict().items():
            self.assertTrue(torch.equal(value, before[name]), name)

    def test_however_gradients_are_dropped(self):
        """The daemon drops them, too: the next step is by what came after."""
        def of_the_model(net, optimizer):
            net.zero_grad()

        def one_by_one(net, optimizer):
            for p in net.parameters():
                p.grad = None

        for wrap in (wrapped, lambda: st.replicate(model(), bucket_cap_mb=1e-4)):
            for drop in (of_the_model, one_by_one, lambda net, optimizer: optimizer.zero_grad()):
                for late in (False, True):  # behind the next forward
                    if drop is one_by_one and (late or wrap is not wrapped):
                        continue  # those are not the guards: see the manual
                    st.shutdown()
                    st.init(job=f"dropped-{id(drop)}-{late}"[:60], world_size=1, rank=0)
                    net, plain = wrap(), model()
                    optimizer = st.SGD(net.parameters(), lr=0.1)
                    theirs = torch.optim.SGD(plain.parameters(), lr=0.1)
                    net(numbers(0)).sum().backward()
                    if late:
                        loss = net(numbers(1)).sum()
                        drop(net, optimizer)
                    else:
                        drop(net, optimizer)
                        loss = net(numbers(1)).sum()
                    loss.backward()
                    optimizer.step()
                    plain(numbers(1)).sum().backward()
                    theirs.step()
                    for name, value in plain.state_dict().items():
                        self.assertTrue(torch.equal(value, net.state_dict()[name]), name)

    def test_some_gradients_are_dropped_or_all(self):
        net, plain = wrapped(), model()
        ours = st.SGD(net.parameters(), lr=0.1, momentum=0.9)
        theirs = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
        for step in range(4):
            for m, optimizer in ((net, ours), (plain, theirs)):
                m(numbers(step)).sum().backward()
                if step in (1, 2):
                    m[0].weight.grad = None
                if step == 2:
                    m(numbers(9)).sum().backward()  # it has one again
                if step == 3:
                    for p in m.parameters():
                        p.grad = None
                optimizer.step()
                optimizer.zero_grad()
            for name, value in plain.state_dict().items():
                self.assertTrue(torch.equal(value, net.state_dict()[name]), f"{step}: {name}")

    def test_gradients_of_inputs_reduce_nothing(self):
        net = wrapped()
        optimizer = st.SGD(net.parameters(), lr=0.1)
        x = numbers(0).requires_grad_()
        [gradient] = torch.autograd.grad(net(x).sum(), x)
        plain = model()
        y = numbers(0).requires_grad_()
        [expected] = torch.autograd.grad(plain(y).sum(), y)
        self.assertTrue(torch.equal(gradient, expected))
        before = net.state_dict()
        optimizer.step()
        self.assertTrue(torch.equal(before["0.bias"], net.state_dict()["0.bias"]))

    def test_backward_twice_through_one_graph(self):
        net, plain = wrapped(), model()
        optimizer = st.SGD(net.parameters(), lr=0.1)
        ours = torch.optim.SGD(plain.parameters(), lr=0.1)
        for m in (net, plain):
            value = m(numbers(0)).pow(2).mean()
            value.backward(retain_graph=True)
            value.backward()
        optimizer.step()
        ours.step()
        for name, value in plain.state_dict().items():
            self.assertTrue(torch.equal(value, net.state_dict()[name]), name)

    def test_eval_without_gradients(self):
        net, plain = wrapped(), model()
        optimizer = st.SGD(net.parameters(), lr=0.1)
        net.eval()
        with torch.no_grad():
            self.assertTrue(torch.equal(net(numbers(0)), plain(numbers(0))))
        net.train()
        train(net, optimizer, 1)

    def test_two_models_in_one_process(self):
        a, b = wrapped(1), wrapped(2)
        one, two = st.SGD(a.parameters(), lr=0.1), st.SGD(b.parameters(), lr=0.1)
        a(numbers(0)).sum().backward()
        b(numbers(0)).sum().backward()
        before = b.state_dict()["0.bias"]
        one.step()
        self.assertTrue(torch.equal(before, b.state_dict()["0.bias"]))
        two.step()
        self.assertFalse(torch.equal(before, b.state_dict()["0.bias"]))
        with self.refused(shardd.InvalidArgument, "several models"):
            st.SGD([*a.parameters(), *b.parameters()])

    def test_ignored_parameters_stay(self):
        net = model()
        kept = net[2].bias
        st.fully_shard(net, ignored_params={kept})
        optimizer = st.SGD([p for p in net.parameters() if p is not kept], lr=0.1)
        train(net, optimizer, 1)
        self.assertIs(net[2].bias, kept)
        self.assertIsNotNone(kept.grad)

    def test_loss_scaling(self):
        net, plain = wrapped(), model()
        optimizer = st.SGD(net.parameters(), lr=0.1)
        other = torch.optim.SGD(plain.parameters(), lr=0.1)
        ours = st.GradScaler(init_scale=1024.0, growth_interval=2)
        theirs = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
        for step in range(6):
            for scaler, m, o in ((ours, net, optimizer), (theirs, plain, other)):
                value = m(numbers(step)).pow(2).mean()
                if step == 3:
                    value = value * float("inf")
                scaler.scale(value).backward()
                scaler.step(o)
                scaler.update()
                o.zero_grad()
            self.assertEqual(ours.get_scale(), theirs.get_scale())
        for name, value in plain.state_dict().items():
            self.assertTrue(torch.equal(value, net.state_dict()[name]), name)

    def test_learning_rates_of_groups(self):
        net, plain = wrapped(), model()

        def groups(m):
            return [{"params": list(m[0].parameters()), "lr": 0.5},
                    {"params": list(m[2].parameters()), "lr": 0.25}]

        ours, theirs = st.SGD(groups(net)), torch.optim.SGD(groups(plain))
        for optimizer, m in ((ours, net), (theirs, plain)):
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
            for step in range(3):
                m(numbers(step)).pow(2).mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                scheduler.step()
        for name, value in plain.state_dict().items():
            self.assertTrue(torch.equal(value, net.state_dict()[name]), name)
        ours.param_groups[0]["lr"] = 0.0  # in another proportion
        before = net.state_dict()
        net(numbers(9)).pow(2).mean().backward()
        ours.step()
        for name, value in net.state_dict().items():
            self.assertEqual(torch.equal(value, before[name]), name.startswith("0."), name)

    def test_compiled_blocks(self):
        torch._dynamo.reset()
        nets = [Block(), Block()]
        ours, theirs = (nn.Sequential(net, nn.Linear(4, 1)) for net in nets)
        theirs.load_state_dict(ours.state_dict())
        st.fully_shard(ours[0]).compile(backend="aot_eager")
        st.fully_shard(ours)
        torch._dynamo.utils.counters.clear()
        train(ours, st.SGD(ours.parameters(), lr=0.1), 3)
        self.assertGreater(torch._dynamo.utils.counters["stats"]["unique_graphs"], 0)
        train(theirs, torch.optim.SGD(theirs.parameters(), lr=0.1), 3)
        for name, value in theirs.state_dict().items():
            torch.testing.assert_close(ours.state_dict()[name], value, msg=name)

    def compiled(self, backend, call):
        """Train a compiled model of several units, and the same as it is. Return: both states."""
        torch._dynamo.reset()
        torch.manual_seed(3)
        ours, theirs = (nn.Sequential(nn.Linear(4, 16), Block(), nn.Tanh(), nn.Linear(16, 4),
                                      Block(), nn.Linear(4, 1)) for _ in range(2))
        for net in (ours, theirs):
            net[1] = nn.Sequential(nn.Linear(16, 4), Block(), nn.Linear(4, 16))
        theirs.load_state_dict(ours.state_dict())
        for inner in (ours[1], ours[4]):
            st.fully_shard(inner)
        st.fully_shard(ours)
        optimizer = st.SGD(ours.parameters(), lr=0.1)
        if call == "method":
            ours.compile(backend=backend)
            compiled = ours
        else:
            compiled = torch.compile(ours, backend=backend)
        torch._dynamo.utils.counters.clear()
        train(compiled, optimizer, 2)
        graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        self.assertGreater(graphs, 0)
        train(compiled, optimizer, 4)
        with torch.no_grad():
            compiled.eval()
            out = compiled(numbers(9))
        train(compiled.train(), optimizer, 2)
        train(theirs, torch.optim.SGD(theirs.parameters(), lr=0.1), 2)
        train(theirs, torch.optim.SGD(theirs.parameters(), lr=0.1), 4)
        torch.testing.assert_close(out, theirs.eval()(numbers(9)))
        train(theirs.train(), torch.optim.SGD(theirs.parameters(), lr=0.1), 2)
        self.assertLessEqual(torch._dynamo.utils.counters["stats"]["unique_graphs"], 3 * graphs,
                             "compiled again in each step")
        state = ours.state_dict()
        return [(name, state[name], value) for name, value in theirs.state_dict().items()]

    def test_a_compiled_model(self):
        for call in ("method", "function"):
            # which says when something was compiled too often
            with self.assertNoLogs("torch._dynamo.convert_frame", "WARNING"):
                states = self.compiled("aot_eager", call)
            for name, ours, theirs in states:
                self.assertTrue(torch.equal(ours, theirs), (call, name))
            st.shutdown()
            st.init(job="again", world_size=1, rank=0)

    @unittest.skipUnless(shutil.which("g++"), "inductor needs a compiler")
    def test_a_model_compiled_by_inductor(self):
        for name, ours, theirs in self.compiled("inductor", "method"):
            torch.testing.assert_close(ours, theirs, msg=name)

    def test_repr_shows_units_bytes_and_state(self):
        net = wrapped()
        self.assertIn("not registered yet", repr(net))
        net.unshard()
        self.assertIn("unit 'root': 2 parameters, 0.00 MiB, gathered", repr(net))
        net.reshard()
        self.assertIn("sharded", repr(net))


GUARDED = """
import os, signal
import shardd.torch as st
st.init(guard=True, job="guarded", rank=0, world_size=1)
restarts = st.guard()
st.session().commit(restarts + 1)
print("life", restarts, flush=True)
if restarts < 3:
    os.kill(os.getpid(), signal.SIGKILL)
st.shutdown()
"""


class Launchers(unittest.TestCase):
    def test_a_guarded_process_joins_again_at_once(self):
        with support.daemon() as socket:
            path = str(support.ROOT / "client" / "python")
            done = subprocess.run(
                [sys.executable, "-B", "-c", GUARDED], text=True, capture_output=True, timeout=120,
                env=dict(os.environ, PYTHONPATH=path, SHARDD_SOCKET=socket))
        self.assertEqual((done.returncode, done.stdout.split("\n")[:-1]),
                         (0, [f"life {n}" for n in range(4)]), done.stderr)

    def test_a_daemon_that_is_not_there(self):
        with self.assertRaisesRegex(shardd.Unavailable, "Start one with"):
            st.init(socket="/nonexistent/socket", job="x", rank=0, world_size=1)

    def test_several_ranks_without_a_name(self):
        with unittest.mock.patch.dict(os.environ, RANK="0", WORLD_SIZE="2"):
            for name in ("SHARDD_JOB", "TORCHELASTIC_RUN_ID", "SLURM_JOB_ID", "MASTER_PORT"):
                os.environ.pop(name, None)
            with self.assertRaisesRegex(shardd.FailedPrecondition, "SHARDD_JOB"):
                st.init()


if __name__ == "__main__":
    support.main()
