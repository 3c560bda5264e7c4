"""The simulated GPUs of tests/sim for tests in Python: streams, and what is at device addresses."""

import ctypes as C
import os
import pathlib
import threading
import time

from support import ROOT

DIR = pathlib.Path(os.environ.get("SHARDD_SIM_DIR", ROOT / "build" / "tests" / "sim"))
THERE = (DIR / "libcuda.so.1").exists()
WHY_NOT = "this build has no CUDA (nvcc and cuda.h): nothing to load the simulator"
UUID = "GPU-513dda7e-1c0d-4a11-9e57-00000000000{}"  # of a device
NOT_READY = 600


def use(devices):
    """This process, and those it starts, have so many GPUs. Before anything loads libcuda."""
    os.environ.update(SHARDD_LIBCUDA=str(DIR / "libcuda.so.1"), SHARDD_SIM_DEVICES=str(devices),
                      SHARDD_LIBNCCL=str(DIR / "libnccl.so.2"))


class Gpu:
    """A GPU of this process, whose primary context is this thread's from here on."""

    def __init__(self, number=0):
        self.lib = C.CDLL(os.environ["SHARDD_LIBCUDA"])
        self.context = C.c_void_p()
        self._call("cuInit", 0)
        self._call("cuDevicePrimaryCtxRetain", C.byref(self.context), number)
        self.enter()
        self._word = C.c_uint64()
        self._call("cuMemAlloc_v2", C.byref(self._word), C.c_size_t(8))
        self._helper = self.stream()
        self._steps = []

    def _call(self, name, *arguments):
        result = getattr(self.lib, name)(*arguments)
        assert result == 0, f"{name}: {result}"

    def enter(self):
        """Make it this thread's."""
        self._call("cuCtxSetCurrent", self.context)

    def stream(self):
        """A new one, which waits for no other."""
        made = C.c_void_p()
        self._call("cuStreamCreateWithPriority", C.byref(made), 1, 0)
        return made.value

    def synchronize(self, stream):
        self._call("cuStreamSynchronize", C.c_void_p(stream))

    def idle(self, stream):
        """Is all done that was put on it?"""
        result = self.lib.cuStreamQuery(C.c_void_p(stream))
        assert result in (0, NOT_READY), result
        return result == 0

    def pinned(self, nbytes):
        """Host memory that copies read when the stream comes to them."""
        made = C.c_void_p()
        self._call("cuMemAllocHost_v2", C.byref(made), C.c_size_t(nbytes))
        return (C.c_char * nbytes).from_address(made.value)

    def copy_in(self, stream, address, pinned):
        """Put a copy of @pinned to @address on the stream."""
        self._call("cuMemcpyHtoDAsync_v2", C.c_uint64(address), pinned, C.c_size_t(len(pinned)),
                   C.c_void_p(stream))

    def copy_out(self, stream, pinned, address):
        self._call("cuMemcpyDtoHAsync_v2", pinned, C.c_uint64(address), C.c_size_t(len(pinned)),
                   C.c_void_p(stream))

    def hold(self, stream):
        """What is put on the stream from here on waits for :meth:`let_go`."""
        self._call("cuMemsetD8Async", self._word, 0, C.c_size_t(8), C.c_void_p(self._helper))
        self.synchronize(self._helper)
        self._call("cuStreamWaitValue64_v2", C.c_void_p(stream), self._word, C.c_uint64(1), 0)

    def let_go(self):
        self._call("cuStreamWriteValue64_v2", C.c_void_p(self._helper), self._word, C.c_uint64(1),
                   0)

    def busy(self, stream, seconds):
        """What is put on the stream from here on runs so much later: a kernel that lasts."""
        until = time.monotonic() + seconds
        kept = C.CFUNCTYPE(C.c_int, C.c_void_p)(lambda _: time.monotonic() >= until)
        self._steps.append(kept)
        self._call("sim_stream_enqueue", C.c_void_p(stream), kept, None)

    def follow(self, stream, first):
        """What is put on @stream from here on runs after what is on @first."""
        event = C.c_void_p()
        self._call("cuEventCreate", C.byref(event), 2)
        self._call("cuEventRecord", event, C.c_void_p(first))
        self._call("cuStreamWaitEvent", C.c_void_p(stream), event, 0)
        self._call("cuEventDestroy_v2", event)

    def host_address(self, stream, address, nbytes):
        """Where the processor finds the memory at @address when what is on @stream has been done:
        waits for that. The simulator alone can say it; a real GPU's memory is on the GPU."""
        found, done = [], threading.Event()

        def step(_):
            self.lib.sim_translate.restype = C.c_void_p
            found.append(self.lib.sim_translate(C.c_uint64(address), C.c_size_t(nbytes), 0))
            done.set()
            return 1

        kept = C.CFUNCTYPE(C.c_int, C.c_void_p)(step)
        self._call("sim_stream_enqueue", C.c_void_p(stream), kept, None)
        self.synchronize(stream)
        assert done.is_set() and found[0], hex(address)
        return found[0]
