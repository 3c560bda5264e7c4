#!/usr/bin/env python3
"""shardd.torch with memory on GPUs: the simulator's, since this PyTorch has no CUDA
(on_simulator.py says how). Training there is compared with the same on host memory, bit for bit.

Prints one line of TAP a test.
"""

import dataclasses
import os
import threading
import types
import unittest
from unittest import mock

import fsdp
import simulator
import support
import torch
import transformer
from support import ranks
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

import shardd
import shardd.torch as st
from shardd.torch import _device

DEVICES = 2
STEPS = 4


# ------------------------------------------------------------------------- training


def images(step, rank):
    draw = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(3, 2, 6, 6, generator=draw)


def sharded(wrap=st.fully_shard, blocks=True, **options):
    model = transformer.make()
    for block in model.blocks if blocks else ():
        wrap(block, **options)
    return wrap(model, **options)


def trained(model, optimizer, rank, loss=transformer.loss, stream=None):
    """By step: the loss, and all that a state dict has."""
    seen = []
    for step in range(STEPS):
        value = loss(model, rank, step)
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        if stream is not None:
            stream.change()
        seen.append({"loss": value.detach(), **model.state_dict()})
    return seen


def adamw(rank, stream):
    model = sharded()
    return trained(model, st.AdamW(model.parameters(), lr=0.02), rank, stream=stream)


def kept_until_backward_bf16(rank, stream):
    """Also gradients that are added up, and its optimizer's state."""
    model = sharded(mp_policy=MixedPrecisionPolicy(torch.bfloat16), reshard_after_forward=False)
    optimizer = st.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with model.no_sync():
        transformer.loss(model, rank, 9).backward()
    seen = trained(model, optimizer, rank, stream=stream)
    return [*seen, flat(optimizer.state_dict())]


def flat(state):
    return {f"{p}.{key}": value for p, of_p in state["state"].items()
            for key, value in of_p.items()}


def states(rank, stream):
    """Saved, and loaded into another model, which goes on."""
    model = sharded()
    optimizer = st.Adam(model.parameters(), lr=0.02, amsgrad=True)
    seen = trained(model, optimizer, rank, stream=stream)
    rows = st.state_dict(model, full=False), st.optimizer_state_dict(optimizer, full=False)
    other = sharded()
    fresh = st.Adam(other.parameters(), lr=0.02, amsgrad=True)
    st.load_state_dict(other, rows[0])
    fresh.load_state_dict(rows[1])
    return [*seen, *trained(other, fresh, rank, stream=stream), flat(fresh.state_dict())]


def own_optimizer(rank, stream):
    model = sharded()
    optimizer = st.Sharded(torch.optim.Adagrad, model.parameters(), lr=0.05)
    seen = trained(model, optimizer, rank, stream=stream)
    return [*seen, flat(optimizer.state_dict())]


def replicated(rank, stream):
    """Buckets, batch norm whose buffers are broadcast, an optimizer in backward."""
    torch.manual_seed(2)
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(),
                          nn.Linear(64, 5))
    st.replicate(model, bucket_cap_mb=0.0002)
    optimizer = st.SGD(model.parameters(), lr=0.1, in_backward=True)

    def loss(model, rank, step):
        return model(images(step, rank)).pow(2).mean()

    return trained(model, optimizer, rank, loss, stream)


def uneven(rank, stream):
    """A rank has fewer inputs; then they agree on whose buffers count."""
    torch.manual_seed(2)
    model = st.replicate(nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)))
    optimizer = st.SGD(model.parameters(), lr=0.1)
    with model.join():
        for step in range(2 + rank):
            draw = torch.Generator().manual_seed(10 * step + rank)
            model(torch.randn(5, 4, generator=draw)).pow(2).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    return [dict(model.state_dict())]


def meta(rank, stream):
    """Values by reset_parameters, from rank 0."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(8, 9), nn.BatchNorm1d(9), nn.Linear(9, 2))
    torch.manual_seed(7 + rank)
    st.fully_shard(model[0])
    st.fully_shard(model)
    optimizer = st.AdamW(model.parameters(), lr=0.1)
    draw = torch.Generator().manual_seed(rank)
    batch = torch.randn(4, 8, generator=draw)
    return trained(model, optimizer, rank, lambda m, *_: m(batch).pow(2).mean(), stream)


def backward_in_a_thread(rank, stream):
    """As autograd has one for each GPU: the stream is set in every thread."""
    model = sharded()
    optimizer = st.AdamW(model.parameters(), lr=0.02)

    class Elsewhere:
        def __init__(self, loss):
            self.loss = loss

        def backward(self):
            thread = threading.Thread(target=self.loss.backward)
            thread.start()
            thread.join()

        def detach(self):
            return self.loss.detach()

    return trained(model, optimizer, rank, lambda *a: Elsewhere(transformer.loss(*a)), stream)


def resilient(rank, stream):
    """Steps that are committed, and the random numbers with them."""
    model = sharded()
    optimizer = st.AdamW(model.parameters(), lr=0.02)
    run, seen = st.resilient(model, {"seen": 0}), []
    while run.step < STEPS:
        with run:
            loss = transformer.loss(model, rank, run.step)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            run.state["seen"] += 1
        seen.append({"loss": loss.detach(), "seen": torch.tensor(float(run.state["seen"]))})
    return seen


def live(rank, stream):
    """A plain module that shows the weights of each step, at the same addresses."""
    model, bound, seen = sharded(), transformer.make(), []
    optimizer = st.AdamW(model.parameters(), lr=0.02)
    st.commit(1)
    with st.Live(bound) as shown:
        places = {name: value.data_ptr() for name, value in bound.named_parameters()}
        for step in range(2, 7):
            transformer.loss(model, rank, step).backward()
            optimizer.step()
            optimizer.zero_grad()
            st.commit(step)
            with shown.generation() as weights:
                assert weights.step == step, weights
                assert places == {name: p.data_ptr() for name, p in bound.named_parameters()}
                now = {name: stream.shown(p) if stream else p.clone()
                       for name, p in bound.named_parameters()}
                state = model.state_dict()
                for name, value in now.items():
                    assert torch.equal(value, state[name]), (step, name)
                seen.append(now)
                device = weights[name].device
                assert device == ((2, stream.number) if stream else (1, 0)), device
        kept = next(bound.parameters()).detach()
        try:
            shown.close()
        except shardd.InUse:
            del kept
        else:
            raise AssertionError("closed while a tensor is kept")
    return seen


def worker(rank, world, function, host, gpus, devices):
    """Both, one after the other. Return: how many gradients were late, and what differs."""
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), SHARDD_JOB=function)
    os.environ["SHARDD_SOCKET"] = host
    on_host = globals()[function](rank, None)
    st.shutdown()
    os.environ["SHARDD_SOCKET"] = gpus
    import on_simulator

    stream = on_simulator.install(devices[rank])
    on_gpu = globals()[function](rank, stream)
    where = st.session().device.id
    st.shutdown()
    finite = all(torch.as_tensor(v).float().isfinite().all() for seen in on_gpu
                 for v in seen.values())
    return where, stream.late, len(on_gpu) == len(on_host) and finite, \
        fsdp.differences(on_gpu, on_host)


@unittest.skipUnless(simulator.THERE, simulator.WHY_NOT)
class Training(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        simulator.use(DEVICES)
        cls.contexts = [support.daemon(), support.daemon(backend="cuda")]
        cls.sockets = [context.__enter__() for context in cls.contexts]

    @classmethod
    def tearDownClass(cls):
        for context in cls.contexts:
            context.__exit__(None, None, None)

    def equal(self, function, devices=(0, 0), late=True):
        for where, n, whole, different in ranks(worker, len(devices), function.__name__,
                                                *self.sockets, devices):
            self.assertEqual(different, [])
            self.assertTrue(whole)
            self.assertEqual(n > 0, late)
            self.assertIn(where, {f"cuda:{device}" for device in devices})

    def test_adamw(self):
        self.equal(adamw)

    def test_adamw_on_two_gpus(self):
        self.equal(adamw, (0, 1))

    def test_one_rank_on_the_second_gpu(self):
        self.equal(adamw, (1,))

    def test_kept_until_backward_bf16(self):
        self.equal(kept_until_backward_bf16)

    def test_states(self):
        self.equal(states)

    def test_own_optimizer(self):
        self.equal(own_optimizer)

    def test_replicated(self):
        self.equal(replicated)

    def test_uneven_inputs(self):
        self.equal(uneven)

    def test_meta_device(self):
        self.equal(meta)

    def test_backward_in_a_thread(self):
        self.equal(backward_in_a_thread)

    def test_a_live_module(self):
        self.equal(live)

    def test_a_live_module_on_the_second_gpu(self):
        self.equal(live, (1,))

    def test_resilient(self):
        self.equal(resilient)


# ------------------------------------------------------------------------- devices


class Properties:
    """What is asked of torch.cuda, where there are two GPUs."""

    def __init__(self, current=0, stream=0, initialized=True):
        self.patches = [
            mock.patch.object(torch.version, "cuda", "13.0"),
            mock.patch.multiple(
                torch.cuda, is_available=lambda: True, is_initialized=lambda: initialized,
                device_count=lambda: DEVICES, current_device=lambda: current,
                current_stream=lambda n: types.SimpleNamespace(cuda_stream=stream))]

    def __enter__(self):
        for patch in self.patches:
            patch.__enter__()

    def __exit__(self, *error):
        for patch in reversed(self.patches):
            patch.__exit__(*error)


def cuda(number):
    return torch.device("cuda", number)


@unittest.skipUnless(simulator.THERE, simulator.WHY_NOT)
class Devices(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        simulator.use(DEVICES)
        cls.contexts = [support.daemon(), support.daemon(backend="cuda")]
        cls.host, cls.gpus = [context.__enter__() for context in cls.contexts]

    @classmethod
    def tearDownClass(cls):
        for context in cls.contexts:
            context.__exit__(None, None, None)

    def tearDown(self):
        st.shutdown()

    def init(self, socket, **options):
        return st.init(socket, self.id().split(".")[-1][:60], 0, 1, **options)

    def test_torch_without_cuda_says_what_to_do(self):
        with self.assertRaisesRegex(shardd.FailedPrecondition, "cuda:0 .*built for CUDA, or use a "
                                    "daemon with host memory"):
            self.init(self.gpus)
        with self.assertRaisesRegex(shardd.FailedPrecondition, "built for CUDA"):
            self.init(self.gpus)  # nothing is left of the first: no second session, no rank
        self.assertEqual(_device.here, torch.device("cpu"))

    def test_which_device_is_asked_for(self):
        first, second = map(simulator.UUID.format, range(2))
        self.assertIsNone(_device.wanted(()))
        with Properties(current=1):
            self.assertEqual(_device.wanted(()), second)
            self.assertEqual(_device.wanted([torch.device("meta")]), second)
            self.assertEqual(_device.wanted([cuda(0), torch.device("meta")]), first)
            self.assertEqual(_device.wanted([torch.device("cuda")]), second)
            self.assertEqual(_device.wanted([torch.device("cpu")]), "host:0")
            with mock.patch.dict(os.environ, SHARDD_DEVICE=first):
                self.assertIsNone(_device.wanted([cuda(1)]))
        with Properties(initialized=False):
            self.assertIsNone(_device.wanted(()))

    def test_names_of_devices(self):
        second = simulator.UUID.format(1)
        for given, found in ((None, None), ("cpu", "host:0"), (torch.device("cpu"), "host:0"),
                             ("cuda:1", second), (cuda(1), second), (second, second),
                             ("host:0", "host:0")):
            self.assertEqual(_device.named(given), found)
        for wrong in ("meta", "gpu", 1.5):
            with self.assertRaisesRegex(shardd.InvalidArgument, "'cuda:N'"):
                _device.named(wrong)

    def test_a_session_on_the_second_gpu(self):
        with Properties(current=1):
            client = self.init(self.gpus)
            self.assertEqual(_device.here, cuda(1))
            self.assertEqual(client.device.id, "cuda:1")
            with client.alloc((4,)) as buffer:
                self.assertEqual(buffer.memory.stream, 0)
                storage = _device.storage_at(buffer.memory.address, 16)
                self.assertEqual((storage.device, storage.data_ptr(), storage.nbytes()),
                                 (cuda(1), buffer.memory.address, 16))
            self.assertEqual(_device.nothing().device, cuda(1))
            st.shutdown()
        self.assertEqual(_device.here, torch.device("cpu"))

    def test_a_gpu_without_order(self):
        real = shardd.Client.device.fget
        waits = []
        stream = types.SimpleNamespace(cuda_stream=0, synchronize=lambda: waits.append(1))
        with Properties(), \
                mock.patch.object(torch.cuda, "current_stream", lambda number: stream), \
                mock.patch.object(shardd.Client, "device", property(
                    lambda client: dataclasses.replace(real(client), streams=False))):
            client = self.init(self.gpus, device="cuda:0")
            with client.alloc((4,)) as buffer:
                self.assertIsNone(buffer.memory.stream)
                self.assertEqual(len(waits), 1)
            self.assertEqual(len(waits), 2)
            st.shutdown()

    def check(self, socket, device, sentence, current=0):
        with Properties(current=current):
            client = self.init(socket, device="cpu" if socket == self.host else f"cuda:{current}")
            with self.assertRaisesRegex(shardd.FailedPrecondition, sentence):
                _device.check(client, [torch.device("meta"), *device])
            _device.check(client, [_device.here, torch.device("meta")])

    def test_a_model_on_another_gpu(self):
        self.check(self.gpus, [cuda(1)], r"model is on cuda:1, and the daemon put this rank's "
                   rf"memory on cuda:0 \({simulator.UUID.format(0)}, PyTorch's cuda:0\): call "
                   rf"model.to\('cuda:0'\) before .*SHARDD_DEVICE={simulator.UUID.format(1)}")

    def test_a_model_on_the_processor(self):
        self.check(self.gpus, [torch.device("cpu")], r"model is on cpu.*model.to\('cuda:1'\).*"
                   "--backend host", current=1)

    def test_a_model_on_a_gpu_and_a_daemon_without(self):
        self.check(self.host, [cuda(0)], r"model is on cuda:0, and .* memory on host:0: call "
                   r"model.to\('cpu'\) before .*--backend cuda")

    def test_a_model_on_several_devices(self):
        self.check(self.host, [cuda(0), cuda(1)], "parameters are on cuda:0 and cuda:1")

    def wrap(self, socket, sentence, **environment):
        """A model on the processor, without init()."""
        environment.update(SHARDD_SOCKET=socket, SHARDD_JOB="wrapped")
        model = st.fully_shard(nn.Linear(2, 2))
        with mock.patch.dict(os.environ, environment), Properties():
            if sentence is None:
                return st.SGD(model.parameters(), lr=0.1)
            with self.assertRaisesRegex(shardd.FailedPrecondition, sentence):
                st.SGD(model.parameters(), lr=0.1)
        with shardd.connect(socket) as client:  # nobody is left in the job
            self.assertEqual([j["name"] for j in client.status()["jobs"]
                              if j["name"] == "wrapped" and j["state"] != "DELETED"], [])

    def test_a_model_is_asked_for_where_it_is(self):
        self.wrap(self.gpus, "no device 'host:0' on this node: it has cuda:0 .*; call model.to")
        self.wrap(self.gpus, "model is on cpu", SHARDD_DEVICE="cuda:0")
        self.wrap(self.host, "no device 'GPU-1'", SHARDD_DEVICE="GPU-1")
        self.assertIsNotNone(self.wrap(self.host, None))
        self.assertEqual(st.session().device.id, "host:0")

    def test_what_stands_for_a_parameter_says_the_device(self):
        self.init(self.host)
        model = st.fully_shard(nn.Linear(2, 2))
        self.assertEqual((model.weight.device, model.weight.is_cuda), (torch.device("cpu"), False))
        with torch.device("meta"):
            unknown = st.fully_shard(nn.Linear(2, 2))
        with mock.patch.object(_device, "here", cuda(1)):
            self.assertEqual((unknown.weight.device, unknown.weight.is_cuda), (cuda(1), True))

    def test_meshes_of_devices(self):
        self.init(self.host)
        mesh = types.SimpleNamespace(device_type="cuda", ndim=1, mesh=torch.tensor([0]))
        model = st.fully_shard(nn.Linear(2, 2), mesh=mesh)
        with self.assertRaisesRegex(shardd.InvalidArgument,
                                    'memory is on cpu: give init_device_mesh'):
            st.SGD(model.parameters(), lr=0.1)

    def test_ddp_s_names_of_devices(self):
        model = nn.Linear(2, 2)
        with Properties(current=1):
            for given in ([1], ["cuda:1"], cuda(1), "cuda", 1):
                _device.check_one([cuda(1), torch.device("meta")], given, "device_ids")
            for given in ([0], [0, 1], "cpu", 0):
                with self.assertRaisesRegex(shardd.InvalidArgument, "model is on cuda:1: leave"):
                    _device.check_one([cuda(1)], given, "device_ids")
        for name in ("device_ids", "output_device"):
            with self.assertRaisesRegex(shardd.InvalidArgument, f"{name} is .*model is on cpu"):
                st.replicate(model, **{name: [0]})
        st.replicate(model, device_ids=None, output_device="cpu")

    def test_offloading_needs_host_memory(self):
        self.init(self.host)
        model = st.fully_shard(nn.Linear(2, 2), offload_policy=CPUOffloadPolicy())
        with mock.patch.object(_device, "here", cuda(0)), \
                mock.patch.object(_device, "check"), \
                self.assertRaisesRegex(shardd.Unimplemented, "memory is on cuda:0"):
            st.SGD(model.parameters(), lr=0.1)
        model = st.fully_shard(nn.Linear(2, 2), offload_policy=CPUOffloadPolicy())
        st.SGD(model.parameters(), lr=0.1)

    def test_guard_after_cuda_was_used(self):
        with Properties(), self.assertRaisesRegex(shardd.FailedPrecondition, "before anything is "
                                                  "on a GPU"):
            st.guard()


if __name__ == "__main__":
    support.main()
