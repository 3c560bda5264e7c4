#!/usr/bin/env python3
"""Evaluate the live weights of a training run while it goes on, without a copy of them.

    shardctl run -n 2 --job gpt -- python3 train_gpt.py --data FILE --resilient --steps 1000
    python3 live_eval.py --job gpt --data OTHER_FILE

The trainer commits its steps (--resilient does); this process is none of its ranks. It maps the
daemon's own memory, computes the loss of the model as of the last committed step on the first
bytes of a file, and prints step and loss, a line for each step that it has seen. The trainer
waits with the next step while this reads, but never longer than the daemon's reader_hold_ms.
Options of the model are train_gpt.py's, with the same defaults. Ends with the job, or after
--evals.
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
    parser.add_argument("--job", default=os.environ.get("SHARDD_JOB"), help="else $SHARDD_JOB")
    parser.add_argument("--socket", help="of the daemon; else $SHARDD_SOCKET")
    model_arguments(parser)
    parser.add_argument("--samples", type=number(1), default=8)
    parser.add_argument("--evals", type=number(0), default=0,
                        help="end after so many; 0: with the job")
    parser.add_argument("--wait", type=float, default=60.0,
                        help="seconds for the job to come, and for each commit")
    parser.add_argument("--json", action="store_true", help="one object a line")
    options = parsed(parser)
    if not options.job:
        parser.error("--job is missing, and SHARDD_JOB is not set")
    if not 0 < options.wait < 1e6:
        parser.error(f"--wait {options.wait}: is to be more than 0 seconds, and less than 1000000")
    return options


def samples(options):
    """The first bytes of the file."""
    needed = options.samples * options.length + 1
    data = bytearray(options.data.read_bytes()[:needed])
    if len(data) < needed:
        raise SystemExit(f"live_eval: --data has {len(data)} bytes, {needed} are needed: another "
                         "file, or fewer --samples")
    text = torch.frombuffer(data, dtype=torch.uint8).long()
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
                raise SystemExit(
                    f"live_eval: no job '{options.job}' has come in {options.wait:g} s: start its "
                    f"trainers with `shardctl run --job {options.job}`, or wait longer (--wait); "
                    "`python -m shardd` lists the jobs that are there") from None
            time.sleep(0.05)


def loss_of_step(options, reader, model, given, wanted, last):
    """The committed step, and its loss; None if that step is the @last one."""
    try:
        with shardd.torch.live(model, reader, timeout=options.wait) as step:
            return step, None if step == last else loss_of(model, given, wanted)
    except shardd.DeadlineExceeded as error:
        raise SystemExit(
            f"live_eval: {error.text}. The trainers of job '{options.job}' have committed nothing "
            f"for {options.wait:g} s: they are to run with --resilient, and if a step takes longer "
            "wait longer (--wait)") from None


def evaluate(options, reader, model, given, wanted):
    """Until the job, or the daemon, ends."""
    seen, last, overtaken = 0, None, 0
    while not options.evals or seen < options.evals:
        try:
            step, loss = loss_of_step(options, reader, model, given, wanted, last)
        except shardd.Overtaken:  # it took too long: what was computed is not to be used
            overtaken += 1
            if overtaken == TOO_OFTEN:
                print("live_eval: the trainers do not wait as long as an evaluation takes: "
                      "evaluate fewer --samples, or set the daemon's reader_hold_ms higher",
                      file=sys.stderr)
            continue
        except (shardd.NotFound, shardd.Unavailable):
            if not seen:
                raise  # it has ended too early, or is of another model
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
