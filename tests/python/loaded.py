"""Trainers of one job in the background, for what is measured beside them."""

import contextlib
import multiprocessing
import threading
import time

spawn = multiprocessing.get_context("spawn")


def rank_of(socket, world, ranks, units, go, samples):
    import shardd

    def train(rank):
        with contextlib.suppress(shardd.Aborted):  # at the end all are killed
            trains(rank)

    def trains(rank):
        with shardd.connect(socket) as client:
            client.join("bench", world, rank)
            mine = client.register(
                [
                    shardd.UnitSpec(
                        f"u{i}", [shardd.TensorSpec("w", (16,), shardd.Init.CONSTANT, 1.0)]
                    )
                    for i in range(units)
                ]
            )
            for unit in mine[:16]:
                unit.init_seed(1)
            held = mine[0].gradient()
            samples.put((rank, held.nbytes))
            go.wait()
            at = 0
            while not done.is_set():
                at += 1
                began = time.monotonic()
                mine[1 + at % 15].gather()
                mine[1 + at % 15].release()
                if rank == 0:
                    samples.put((began, time.monotonic() - began))
                time.sleep(0.0005 if rank == 0 else 0.02)

    done = threading.Event()
    threads = [threading.Thread(target=train, args=(rank,), daemon=True) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@contextlib.contextmanager
def trainers(socket, ranks, units, processes):
    """@ranks ranks of job bench with @units units gather and release; each holds a gradient buffer.
    Gives the queue with the time of each op of rank 0: (when it began, how long it took)."""
    samples, go = spawn.SimpleQueue(), spawn.Event()
    children = [
        spawn.Process(
            target=rank_of,
            daemon=True,
            args=(socket, ranks, list(range(p, ranks, processes)), units, go, samples),
        )
        for p in range(processes)
    ]
    for child in children:
        child.start()
    try:
        for _ in range(ranks):
            samples.get()
        go.set()
        yield samples
    finally:
        for child in children:
            child.kill()
            child.join()
