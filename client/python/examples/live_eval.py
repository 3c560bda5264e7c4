#!/usr/bin/env python3
"""Evaluate the live weights of a training run while it goes on, without a copy of them.

    shardctl run -n 2 --job gpt -- python3 train_gpt.py --data FILE --resilient --steps 1000
    python3 live_eval.py --job gpt --data OTHER_FILE

The trainer must commit its steps (--resilient does so). This process is not one of its ranks. It
asks for a generation of the last committed step, maps it, computes the model's loss on the first
bytes of a file, and prints one line with step and loss for each generation that it sees. The
trainer does not wait for it. The options of the model are those of train_gpt.py, with the same
defaults. This process ends with the job, or after --evals.
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


def bound(options, model):
    """Bind the model to the job's generations; wait until the job exists and has committed."""
    until = time.monotonic() + options.wait
    while True:
        left = until - time.monotonic()
        try:
            return shardd.torch.Live(model, options.job, socket=options.socket,
                                     wait=max(left, 0.001))
        except shardd.NotFound as error:
            if "no job" not in error.text:
                raise SystemExit(f"live_eval: {error.text}: build the model as its trainers do"
                                 ) from None
            if left < 0:
                raise SystemExit(
                    f"live_eval: no job '{options.job}' appeared within {options.wait:g} s: start "
                    f"its trainers with `shardctl run --job {options.job}`, or wait longer "
                    "(--wait); `python -m shardd` lists the existing jobs") from None
            time.sleep(0.05)
        except shardd.DeadlineExceeded as error:
            raise nothing_came(options, error) from None


def nothing_came(options, error):
    return SystemExit(
        f"live_eval: {error.text}. The trainers of job '{options.job}' committed nothing for "
        f"{options.wait:g} s: run them with --resilient, and if a step takes longer than that, "
        "wait longer (--wait)")


def evaluate(options, live, model, given, wanted):
    """Evaluate until the job or the daemon ends."""
    seen, wait = 0, 0
    while not options.evals or seen < options.evals:
        try:
            with live.generation(wait) as weights:
                values = {"step": weights.step, "loss": loss_of(model, given, wanted)}
        except shardd.DeadlineExceeded as error:
            raise nothing_came(options, error) from None
        except (shardd.NotFound, shardd.Unavailable):
            return
        print(json.dumps(values) if options.json else
              f"step {values['step']}: loss {values['loss']:.4f}", flush=True)
        seen, wait = seen + 1, options.wait


def main():
    options = arguments()
    torch.set_num_threads(1)
    given, wanted = samples(options)
    model = Gpt(options.layers, options.width, options.heads, options.length).eval()
    with bound(options, model) as live:
        evaluate(options, live, model, given, wanted)


if __name__ == "__main__":
    sys.excepthook = in_sentences
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
