#!/usr/bin/env python3
"""Evaluate the live weights of a training run while it goes on, without a copy of them.

    shardctl run -n 2 --job gpt -- python3 train_gpt.py --data FILE --resilient --steps 1000
    python3 live_eval.py --job gpt --data OTHER_FILE

The trainer commits its steps (--resilient does); this process is none of its ranks. It maps the
daemon's own memory, computes the loss of the model as of the last committed step on the first
bytes of a file, and prints step and loss, a line for each step that it has seen. The trainer waits with
the next step while this reads, but never longer than the daemon's reader_hold_ms. Options of
the model are train_gpt.py's, with the same defaults. Ends with the job, or after --evals.
"""

import argparse
import json
import os
import pathlib
import time

import torch
from torch.nn import functional as F
from train_gpt import Gpt

import shardd
import shardd.torch


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--job", default=os.environ.get("SHARDD_JOB"), help="else $SHARDD_JOB")
    parser.add_argument("--socket", help="of the daemon; else $SHARDD_SOCKET")
    parser.add_argument("--data", required=True, type=pathlib.Path, help="any file")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--length", type=int, default=64, help="bytes of a sample")
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--evals", type=int, default=0, help="end after so many; 0: with the job")
    parser.add_argument("--wait", type=float, default=60.0,
                        help="seconds for the job to come, and for each commit")
    parser.add_argument("--json", action="store_true", help="one object a line")
    options = parser.parse_args()
    if not options.job:
        parser.error("--job is missing, and SHARDD_JOB is not set")
    return options


def samples(options):
    """The first bytes of the file."""
    bytes_of_all = options.samples * options.length + 1
    text = torch.frombuffer(bytearray(options.data.read_bytes()[:bytes_of_all]),
                            dtype=torch.uint8).long()
    if len(text) < bytes_of_all:
        raise SystemExit(f"--data has {len(text)} bytes, {bytes_of_all} are needed")
    return text[:-1].view(-1, options.length), text[1:].view(-1, options.length)


def loss_of(model, given, wanted):
    with torch.no_grad():
        return F.cross_entropy(model(given).flatten(0, 1), wanted.flatten()).item()


def reader_of(options):
    """A reader of the job, as soon as that is there."""
    until = time.monotonic() + options.wait
    while True:
        try:
            return shardd.read(options.job, options.socket, name="live_eval")
        except shardd.NotFound:
            if time.monotonic() > until:
                raise
            time.sleep(0.05)


def evaluate(options, reader, model, given, wanted):
    """Return: how many steps were evaluated."""
    seen, last = 0, None
    while not options.evals or seen < options.evals:
        try:
            with shardd.torch.live(model, reader, timeout=options.wait) as step:
                loss = None if step == last else loss_of(model, given, wanted)
        except shardd.Overtaken:
            continue  # it took too long: what was computed is not to be used
        except (shardd.NotFound, shardd.Unavailable):
            break  # the job, or the daemon, has ended
        if loss is None:
            time.sleep(0.005)
            continue
        values = {"step": step, "loss": loss}
        print(json.dumps(values) if options.json else f"step {step}: loss {loss:.4f}", flush=True)
        seen, last = seen + 1, step
    return seen


def main():
    options = arguments()
    torch.set_num_threads(1)
    given, wanted = samples(options)
    model = Gpt(options.layers, options.width, options.heads, options.length).eval()
    with reader_of(options) as reader:
        if not evaluate(options, reader, model, given, wanted):
            raise SystemExit(f"job '{options.job}' has committed no step")


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
