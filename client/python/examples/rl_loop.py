#!/usr/bin/env python3
"""Reinforcement learning in one command: a trainer, and samplers that use its live weights.

    pip install PATH/client/python torch        # once
    python3 rl_loop.py

The trainer (this process) publishes its policy at every commit. The samplers are processes that
bind a plain bf16 copy of the model to the newest generation: nothing is copied or sent to them,
and the trainer does not wait for them. They write sequences, and send the tokens with the number
of the generation and the step of the weights. The task is to count: the reward is the share of
tokens that are larger by 1 than the one before them. The trainer learns from that by policy
gradient, with the clipped ratio of PPO, since samples are a few steps old. A third of the way a
sampler is killed (SIGKILL), and another one started in its place.

At the end it prints what each sampler did, how old the weights of the samples were, what a
generation took, and what publishing costs a step; the last line says whether the reward has risen,
and so does the exit status. Without a daemon at the socket it starts one of its own.
"""

import argparse
import contextlib
import os
import pathlib
import queue
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from multiprocessing.connection import Client, Listener

import torch
from torch import nn
from torch.nn import functional as F
from train_gpt import Block, in_sentences, number

import shardd
import shardd.torch

DEFAULT = "/run/shardd/shardd.sock"
PUBLICATION = "policy"
TOKENS, LENGTH, BATCH = 12, 8, 64  # of a sequence with its first token
CLIP = 0.2
STEPS_APART = 30  # timed at the end, with a publication and without
MOST_ENDED = 5  # samplers that end by themselves, before the loop gives up
OLDEST = 8  # steps; older samples are not used


class Policy(nn.Module):
    def __init__(self, layers=2, width=64, heads=2):
        super().__init__()
        self.tokens, self.places = nn.Embedding(TOKENS, width), nn.Embedding(LENGTH, width)
        self.blocks = nn.ModuleList([Block(width, heads) for _ in range(layers)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, TOKENS, bias=False)
        nn.init.zeros_(self.head.weight)  # all tokens are as likely: the reward begins at 1/12

    def forward(self, text):
        x = self.tokens(text) + self.places(torch.arange(text.shape[1]))
        for block in self.blocks:
            x = block(x)
        return F.log_softmax(self.head(self.norm(x)).float(), dim=-1)


def rewards(text):
    """Of each token behind the first one: 1 if it is the one before it and 1, else 0."""
    return (text[:, 1:] == (text[:, :-1] + 1) % TOKENS).float()


# ------------------------------------------------------------------------- samplers


def write_batch(model):
    """Sequences from the model as it is, and the logarithms of their tokens' probabilities."""
    text = torch.randint(TOKENS, (BATCH, 1))
    said = []
    while text.shape[1] < LENGTH:
        likely = model(text)[:, -1]
        token = torch.multinomial(likely.exp(), 1)
        said.append(likely.gather(1, token))
        text = torch.cat([text, token], 1)
    return text, torch.cat(said, 1)


def sample(options):
    """What a sampler does until the trainer ends. Its weights are the daemon's memory."""
    torch.set_num_threads(1)
    torch.manual_seed(os.getpid())
    with torch.device("meta"):
        model = Policy().eval()
    with Client(options.trainer, "AF_UNIX") as trainer, torch.no_grad(), \
            shardd.torch.Live(model, options.job, PUBLICATION, options.socket) as live:
        while True:
            began = time.perf_counter()
            with live.generation() as weights:
                swapped = time.perf_counter() - began
                text, said = write_batch(model)
                sent = (options.sampler, os.getpid(), weights.number, weights.step, swapped,
                        text.numpy(), said.numpy())
            trainer.send(sent)
            trainer.recv()  # one batch of each sampler is on its way at a time


def sampler(options):
    with contextlib.suppress(EOFError, ConnectionError, FileNotFoundError, shardd.NotFound,
                             shardd.Unavailable):
        sample(options)  # until the trainer has ended


class Samplers:
    """Their processes, and the batches that come from them."""

    def __init__(self, options, folder):
        self.options, self.batches = options, queue.Queue(maxsize=1)
        self.at = os.path.join(folder, "trainer")
        self.listener = Listener(self.at, "AF_UNIX")
        self.processes, self.ended = [None] * options.samplers, 0
        threading.Thread(target=self._accept, daemon=True).start()
        for i in range(options.samplers):
            self.start(i)

    def start(self, i):
        self.processes[i] = subprocess.Popen(
            [sys.executable, os.path.abspath(__file__), "--sampler", str(i), "--trainer", self.at,
             "--socket", self.options.socket, "--job", self.options.job],
            stdin=subprocess.DEVNULL,
            env={**os.environ, "OMP_NUM_THREADS": "1"})

    def _accept(self):
        with contextlib.suppress(OSError):
            while True:
                threading.Thread(target=self._take, args=(self.listener.accept(),),
                                 daemon=True).start()

    def _take(self, connection):
        with connection, contextlib.suppress(EOFError, OSError):
            while True:
                self.batches.put(connection.recv())
                connection.send(None)

    def look(self):
        """Start another sampler for one that has ended, a few times."""
        for i, process in enumerate(self.processes):
            if process.poll() is not None:
                self.ended += 1
                print(f"sampler {i} has ended with {process.returncode}", flush=True)
                if self.ended > MOST_ENDED:
                    raise SystemExit(f"rl_loop: {self.ended} samplers have ended")
                self.start(i)

    def next(self):
        for _ in range(60):
            self.look()
            with contextlib.suppress(queue.Empty):
                return self.batches.get(timeout=1)
        raise SystemExit("rl_loop: no sampler has sent anything for 60 s")

    def kill(self, i):
        self.processes[i].kill()
        self.processes[i].wait()

    def close(self):
        self.listener.close()
        for process in self.processes:
            process.terminate()
        for process in self.processes:
            process.wait()


# -------------------------------------------------------------------------- trainer


class Trainer:
    def __init__(self, options):
        torch.set_num_threads(1)
        torch.manual_seed(1)
        self.options, self.model = options, Policy()
        shardd.torch.init(options.socket, options.job, 0, 1)
        for block in self.model.blocks:
            shardd.torch.fully_shard(block)
        shardd.torch.fully_shard(self.model)
        self.optimizer = shardd.torch.AdamW(self.model.parameters(), lr=options.lr)
        self.step = 0
        shardd.torch.commit(0)

    def learn(self, text, said):
        """One step of policy gradient. Return: seconds that it took."""
        began = time.perf_counter()
        earned = rewards(text)
        gain = (earned - earned.mean(0)) / (earned.std(0) + 1e-3)  # better than the others here
        now = self.model(text[:, :-1]).gather(2, text[:, 1:, None])[:, :, 0]
        ratio = (now - said).exp()
        loss = -torch.minimum(ratio * gain, ratio.clamp(1 - CLIP, 1 + CLIP) * gain).mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step += 1
        shardd.torch.commit(self.step)
        return time.perf_counter() - began

    def publish(self):
        with shardd.Client(self.options.socket) as client:
            shardd.declare_publication({
                "name": PUBLICATION, "type": "bf16", "every_steps": 1,
                "buffers": self.options.samplers + 2,  # each may lease one; the newest; the next
            }, self.options.job, client)
            shardd.publish(PUBLICATION, self.options.job, client)

    def end_publication(self):
        """Return: its counts, of the status."""
        with shardd.Client(self.options.socket) as client:
            [job] = client.status(self.options.job)["jobs"]
            shardd.drop_publication(PUBLICATION, self.options.job, client)
        return job["publications"][0]

    def apart(self, batch):
        """Median seconds of a step without the publication, and with it; nobody reads."""
        taken = {True: [], False: []}
        for published in (True, False, True, False):
            if published:
                self.publish()
            taken[published] += [self.learn(*batch) for _ in range(STEPS_APART)]
            if published:
                self.end_publication()
        return statistics.median(taken[False]), statistics.median(taken[True])


class Seen:
    """What came from one sampler."""

    def __init__(self):
        self.batches, self.numbers, self.pids, self.lags, self.swaps = 0, set(), [], [], []

    def note(self, pid, generation, lag, swapped):
        self.batches += 1
        self.numbers.add(generation)
        if pid not in self.pids:
            self.pids.append(pid)
        self.lags.append(lag)
        self.swaps.append(swapped)


def train(options, trainer, samplers):
    """Return: mean reward of each step, what came from each sampler, seconds of each step, batches
    that were not used, and the last one that was."""
    means, seen, took, unused = [], [Seen() for _ in range(options.samplers)], [], 0
    kill = options.steps // 3
    # until the second one in the place of the killed one has sent something
    while trainer.step < options.steps or len(seen[0].pids) < 2:
        i, pid, generation, step, swapped, text, said = samplers.next()
        lag = trainer.step - step
        if len(seen[i].pids) == 1 and pid not in seen[i].pids:
            print(f"step {trainer.step}: sampler {i} is back", flush=True)
        seen[i].note(pid, generation, lag, swapped)
        if lag > OLDEST:
            unused += 1
            continue
        text, said = torch.from_numpy(text), torch.from_numpy(said)
        means.append(rewards(text).mean().item())
        took.append(trainer.learn(text, said))
        if trainer.step == kill:
            samplers.kill(0)
            samplers.start(0)
            print(f"step {trainer.step}: sampler 0 is killed", flush=True)
        if trainer.step % options.every == 0:
            print(f"step {trainer.step}: reward {statistics.mean(means[-options.every:]):.3f}",
                  flush=True)
    return means, seen, took, unused, (text, said)


def milliseconds(seconds):
    return f"{seconds * 1000:.2f} ms"


def report(seen, took, unused, shown, apart):
    print("\nlag: steps by which the trainer was ahead of the weights of a sample\n"
          "swap: time in which a sampler takes the newest generation")
    print(f"\n{'sampler':8}{'batches':>8}{'processes':>10}{'generations':>12}{'lag mean':>10}"
          f"{'lag max':>8}{'swap p50':>12}")
    for i, one in enumerate(seen):
        if one.batches:
            print(f"{i:<8}{one.batches:8}{len(one.pids):10}{len(one.numbers):12}"
                  f"{statistics.mean(one.lags):10.1f}{max(one.lags):8}"
                  f"{milliseconds(statistics.median(one.swaps)):>12}")
    made = int(shown["made"])
    without, with_it = apart
    for name, value in (
            ("generations made, skipped", f"{made}, {shown['skipped']}"),
            ("bytes of a generation", shown["bytes"]),
            ("publish time, mean", milliseconds(int(shown["made_us"]) / max(1, made) / 1e6)),
            ("step, median, beside samplers", milliseconds(statistics.median(took))),
            ("step, median, alone, not published", milliseconds(without)),
            ("step, median, alone, published", milliseconds(with_it)),
            ("stall of a step, noise included", milliseconds(with_it - without)),
            (f"batches unused, older than {OLDEST} steps", unused)):
        print(f"{name:40}{value:>16}")


def loop(options, folder):
    trainer = Trainer(options)
    trainer.publish()
    samplers = Samplers(options, folder)
    try:
        means, seen, took, unused, batch = train(options, trainer, samplers)
    finally:
        samplers.close()
    report(seen, took, unused, trainer.end_publication(), trainer.apart(batch))
    first, last = statistics.mean(means[:8]), statistics.mean(means[-8:])
    better = last > first + 0.1
    print(f"\nThe reward {'rose' if better else 'did not rise'} from {first:.3f} to {last:.3f} in "
          f"{len(means)} steps{': the policy has improved' if better else ''}.")
    return better


# --------------------------------------------------------------------------- daemon


def program():
    """Where shardd is: on the path, or in the source tree that this file lies in."""
    built = pathlib.Path(__file__).resolve().parents[3] / "build" / "bin" / "shardd"
    return shutil.which("shardd") or (str(built) if built.exists() else None)


def answers(socket):
    try:
        shardd.Client(socket).close()
    except shardd.Unavailable:
        return False
    return True


@contextlib.contextmanager
def daemon(options, folder):
    """There is one at the socket, or one of its own for as long as this runs."""
    options.socket = options.socket or os.environ.get("SHARDD_SOCKET")
    if answers(options.socket):
        options.socket = options.socket or DEFAULT
        yield
        return
    if options.socket:
        raise SystemExit(f"rl_loop: no daemon answers at {options.socket}: start one, or leave "
                         "--socket and SHARDD_SOCKET away, and this starts one of its own")
    path = program()
    if path is None:
        raise SystemExit("rl_loop: no daemon runs, and there is no program shardd: put it on the "
                         "PATH")
    options.socket = os.path.join(folder, "socket")
    with open(os.path.join(folder, "log"), "w+") as log:
        process = subprocess.Popen([path, "--socket", options.socket, "--backend", "host"],
                                   stdout=log, stderr=log, stdin=subprocess.DEVNULL)
        try:
            until = time.monotonic() + 20
            while not answers(options.socket):
                if process.poll() is not None or time.monotonic() > until:
                    log.seek(0)
                    raise SystemExit(f"rl_loop: the daemon did not start:\n{log.read()}")
                time.sleep(0.02)
            yield
        finally:
            process.terminate()
            process.wait(30)


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--socket", help="default: $SHARDD_SOCKET, else a daemon of its own")
    parser.add_argument("--steps", type=number(24), default=400)
    parser.add_argument("--samplers", type=number(1), default=2)
    parser.add_argument("--every", type=number(1), default=25, help="steps between lines")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--sampler", type=number(0), help=argparse.SUPPRESS)
    parser.add_argument("--job", default=f"rl-loop-{os.getpid()}", help="its name")
    parser.add_argument("--trainer", help=argparse.SUPPRESS)
    return parser.parse_args()


def main():
    options = arguments()
    if options.sampler is not None:
        sampler(options)
        return
    with tempfile.TemporaryDirectory(prefix="rl-loop-") as folder, daemon(options, folder):
        try:
            better = loop(options, folder)
        finally:
            shardd.torch.shutdown()
    sys.exit(not better)


if __name__ == "__main__":
    sys.excepthook = in_sentences
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
