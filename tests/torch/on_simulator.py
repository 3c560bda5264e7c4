"""shardd.torch on a simulated GPU, with a PyTorch that has no CUDA.

What PyTorch would compute on the GPU the processor computes, in the memory where the simulator has
the GPU's. The processor waits for the GPU's stream when an op was answered, as a kernel behind it
would. Gradients arrive in their buffer late: when a reduction is submitted they are taken out, and
a copy that puts them back stands on the stream, behind a wait that ends only afterwards. So an op
that is not ordered with the stream reduces NaNs.
"""

import ctypes as C

import simulator
import torch

import shardd
from shardd.torch import _device
from shardd.torch._device import HOST
from shardd.torch._types import TORCH_DTYPES

PER_NAN = 0xFF  # every byte of a number that is none


class Stream:
    """The current stream of all threads, and what is late on it."""

    def __init__(self, number=0):
        self.gpu, self.number = simulator.Gpu(number), number
        self.now = self.gpu.stream()
        self.late = 0  # gradients, so far
        self._buffers = {}  # of gradients, by unit: address, bytes
        self._pinned = {}  # by size
        self._lent = {}  # by where the processor finds it: address

    def change(self):
        """Another one, which runs behind this one, as PyTorch's wait_stream has it."""
        other = self.gpu.stream()
        self.gpu.follow(other, self.now)
        self.now = other

    def host(self, address, nbytes):
        return self.gpu.host_address(self.now, address, nbytes)

    def lend(self, memory):
        """A tensor of @memory: of what is mapped there now, unlike on a GPU."""
        at = self.host(memory.address, memory.nbytes)
        self._lent[at] = memory.address
        storage = torch._C._construct_storage_from_data_pointer(at, HOST, memory.nbytes)
        storage.memory = memory._mapped.look()  # as from_dlpack's tensors keep it in use
        kind = TORCH_DTYPES[memory.dtype]
        return torch.empty(0, dtype=kind).set_(storage, 0, memory.shape)

    def shown(self, tensor):
        """A copy of what a GPU would find at the address of @tensor, which was lent."""
        at = self.host(self._lent[tensor.data_ptr()], tensor.nbytes)
        return torch.frombuffer(bytearray(C.string_at(at, tensor.nbytes)),
                                dtype=tensor.dtype).view(tensor.shape)

    def asked(self, unit, finish):
        """The finish of an op that asks for a gradient buffer."""
        def remember(result):
            self._buffers[unit] = result.data, result.bytes
            return finish(result)

        return remember

    def take_out(self, unit):
        """The gradients of @unit leave their buffer; what brings them back is on the stream."""
        address, nbytes = self._buffers[unit]
        at = self.host(address, nbytes)
        pinned = self._pinned.setdefault((unit, nbytes), self.gpu.pinned(nbytes))
        C.memmove(pinned, at, nbytes)
        self.gpu.hold(self.now)
        C.memset(at, PER_NAN, nbytes)
        self.gpu.copy_in(self.now, address, pinned)
        self.late += 1


def install(number=0):
    """This process's PyTorch computes on GPU @number of the simulator. Return: its stream."""
    stream = Stream(number)
    real_wait, real_submit = shardd.Ticket.wait, shardd.Client.submit

    def take(client):
        assert client.where.dlpack == (2, number), client.where.dlpack
        client.follow_stream(lambda: stream.now)

    def storage_at(address, nbytes):
        return torch._C._construct_storage_from_data_pointer(
            stream.host(address, nbytes) if nbytes else 0, torch.device("cpu"), nbytes)

    def wait(ticket, timeout=None):
        value = real_wait(ticket, timeout)
        stream.gpu.synchronize(stream.now)
        return value

    def submit(client, op, *arguments, finish, **options):
        stream.gpu.enter()
        if op == "gradient":
            finish = stream.asked(arguments[0], finish)
        if op != "reduce":
            return real_submit(client, op, *arguments, finish=finish, **options)
        stream.take_out(arguments[0])
        try:
            return real_submit(client, op, *arguments, finish=finish, **options)
        finally:
            stream.gpu.let_go()

    _device.wanted = lambda devices: simulator.UUID.format(number)
    _device.take, _device.storage_at = take, storage_at
    _device.of, _device.lent = lambda dlpack: HOST, stream.lend
    _device.on_host = lambda: False
    shardd.Ticket.wait, shardd.Client.submit = wait, submit
    return stream
