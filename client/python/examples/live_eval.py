#!/usr/bin/env python3
"""Evaluate the live weights of a training run while it goes on, without a copy of them.

    shardctl run -n 2 --job gpt -- python3 train_gpt.py --data FILE --resilient --steps 1000
    python3 live_eval.py --job gpt --data OTHER_FILE

The trainer must commit its steps (--resilient does so). This process is not one of its ranks. It
maps the daemon's own memory, computes the model's loss at the last committed step on the first
bytes of a file, and prints one line with step and loss for each step that it sees. The trainer
delays its next step while this process reads, but never longer than the daemon's reader_hold_ms.
The options of the model are those of train_gpt.py, with the same defaults. This process ends with
the job, or after --evals.
"""

import argparse
import json
import os
import sys
import time

import torch
from torch.nn import functional as F
from train_gpt import Gpt, in_sentences, model_arguments, number, parsed

import shardd
import shardd.torch

TOO_OFTEN = 5  # evaluations in a row that were overtaken


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--job", default=os.environ.get("SHARDD_JOB"),
                        help="the job's name; default: $SHARDD_JOB")
    parser.add_argument("--socket", help="the daemon's socket; default: $SHARDD_SOCKET")
    model_arguments(parser)
    parser.add_argument("--samples", type=number(1), default=8)
    parser.add_argument("--evals", type=number(0), default=0,
                        help="number of evaluations; 0: until the job ends")
    parser.add_argument("--wait", type=float, default=60.0,
                        help="seconds to wait for the job, and for each commit")
    parser.add_argument("--json", action="store_true", help="print one JSON object per line")
    options = parsed(parser)
    if not options.job:
        parser.error("--job is missing and SHARDD_JOB is not set: give one of them")
    if not 0 < options.wait < 1e6:
        parser.error(f"--wait {options.wait}: must be above 0 and below 1000000 seconds")
    return options


def samples(options):
    """The first bytes of the file."""
    needed = options.samples * options.length + 1
    data = bytearray(options.data.read_bytes()[:needed])
    if len(data) < needed:
        raise SystemExit(f"live_eval: --data has {len(data)} bytes, {needed} are needed: give a "
                         "larger file or fewer --samples")
    text = torch.frombuffer(data, dtype=torch.uint8).long()
    return text[:-1].view(-1, options.length), text[1:].view(-1, options.length)


def loss_of(model, given, wanted):
    with torch.no_grad():
        return F.cross_entropy(model(given).flatten(0, 1), wanted.flatten()).item()


def reader_of(options):
    """Return a reader of the job; wait until the job exists."""
    until = time.monotonic() + options.wait
    while True:
        try:
            return shardd.read(options.job, options.socket, name="live_eval")
        except shardd.NotFound:
            if time.monotonic() > until:
                raise SystemExit(
                    f"live_eval: no job '{options.job}' appeared within {options.wait:g} s: start "
                    f"its trainers with `shardctl run --job {options.job}`, or wait longer "
                    "(--wait); `python -m shardd` lists the existing jobs") from None
            time.sleep(0.05)


def loss_of_step(options, reader, model, given, wanted, last):
    """The committed step, and its loss; None if that step is the @last one."""
    try:
        with shardd.torch.live(model, reader, timeout=options.wait) as step:
            return step, None if step == last else loss_of(model, given, wanted)
    except shardd.DeadlineExceeded as error:
        raise SystemExit(
            f"live_eval: {error.text}. The trainers of job '{options.job}' committed nothing "
            f"for {options.wait:g} s: run them with --resilient, and if a step takes longer than "
            "that, wait longer (--wait)") from None


def evaluate(options, reader, model, given, wanted):
    """Evaluate until the job or the daemon ends."""
    seen, last, overtaken = 0, None, 0
    while not options.evals or seen < options.evals:
        try:
            step, loss = loss_of_step(options, reader, model, given, wanted, last)
        except shardd.Overtaken:  # it took too long: the result is not valid
            overtaken += 1
            if overtaken == TOO_OFTEN:
                print("live_eval: an evaluation takes longer than the trainers wait: "
                      "evaluate fewer --samples, or raise the daemon's reader_hold_ms",
                      file=sys.stderr)
            continue
        except (shardd.NotFound, shardd.Unavailable):
            if not seen:
                raise  # the job ended too early, or has another model
            return
        overtaken = 0
        if loss is None:
            time.sleep(0.005)
            continue
        values = {"step": step, "loss": loss}
        print(json.dumps(values) if options.json else f"step {step}: loss {loss:.4f}", flush=True)
        seen, last = seen + 1, step


def main():
    options = arguments()
    torch.set_num_threads(1)
    given, wanted = samples(options)
    model = Gpt(options.layers, options.width, options.heads, options.length).eval()
    with reader_of(options) as reader:
        evaluate(options, reader, model, given, wanted)


if __name__ == "__main__":
    sys.excepthook = in_sentences
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
