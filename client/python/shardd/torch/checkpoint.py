"""Checkpoints of the daemon from and to PyTorch's distributed checkpoints.

::

    python -m shardd.torch.checkpoint SRC DST --to dcp --optimizer-from groups.json
    python -m shardd.torch.checkpoint SRC DST --to shardd --like /srv/checkpoints/my-job

or :func:`to_dcp` and :func:`from_dcp`, or ``shardctl checkpoint convert``, which runs this. The
distributed checkpoint is what a program with FSDP2, DistributedDataParallel or a plain model gives
to and gets from ``torch.distributed.checkpoint``, as ``{"model": get_model_state_dict(model),
"optim": get_optimizer_state_dict(model, optimizer)}``. All values keep their bits. The manual is
docs/checkpoints.md.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from ..errors import SharddError
from ._converted import Converted
from ._from_dcp import from_dcp
from ._to_dcp import to_dcp


def _alias(text: str) -> tuple[str, str]:
    new, equals, old = text.partition("=")
    if not (new and equals and old):
        raise argparse.ArgumentTypeError(f"'{text}' is not NEW=EXISTING")
    return new, old


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> Any:
        self.exit(2, f"shardctl: INVALID_ARGUMENT: checkpoint convert: {message}\n")


def _parser() -> argparse.ArgumentParser:
    p = _Parser(prog="python -m shardd.torch.checkpoint", allow_abbrev=False,
                description="Convert checkpoints of the daemon from and to PyTorch's distributed "
                            "checkpoints; shardctl(1) describes the options.")
    p.add_argument("src")
    p.add_argument("dst")
    p.add_argument("--to", choices=("dcp", "shardd"), required=True)
    p.add_argument("--step", type=int)
    p.add_argument("--root", default="root")
    p.add_argument("--model-key", default="model")
    p.add_argument("--optim-key", default="optim")
    p.add_argument("--alias", type=_alias, action="append", default=[], dest="aliases")
    p.add_argument("--no-optimizer", action="store_true", dest="without_optimizer")
    p.add_argument("--shardctl")
    p.add_argument("--json", action="store_true")
    p.add_argument("--optimizer-from", dest="optimizer")  # --to dcp
    p.add_argument("--like")  # from here on: --to shardd
    p.add_argument("--like-job")
    p.add_argument("--unit", action="append", dest="units")
    p.add_argument("--leave-out", action="append")
    p.add_argument("--allow-unstepped", action="store_true", default=None)
    p.add_argument("--job")
    p.add_argument("--socket")
    return p


_BOTH = ("step", "root", "model_key", "optim_key", "aliases", "without_optimizer", "shardctl")
_ONLY = {"dcp": ("optimizer",),
         "shardd": ("like", "like_job", "units", "leave_out", "allow_unstepped", "job")}


def _run(options: argparse.Namespace, parser: argparse.ArgumentParser) -> Converted:
    given = {k: v for k, v in vars(options).items() if v is not None}
    given["aliases"] = dict(given["aliases"])
    for to, names in _ONLY.items():
        wrong = [n for n in names if n in given and to != options.to]
        if wrong:
            name = {"optimizer": "optimizer-from", "units": "unit"}.get(wrong[0], wrong[0])
            parser.error(f"--{name.replace('_', '-')} is for --to {to}")
    chosen = {k: given[k] for k in (*_BOTH, *_ONLY[options.to]) if k in given}
    if options.to == "dcp":
        return to_dcp(options.src, options.dst, **chosen)
    return from_dcp(options.src, options.dst, socket=options.socket, **chosen)


def _report(done: Converted, as_json: bool) -> None:
    if as_json:
        print(json.dumps({"path": done.path, "step": done.step, "parameters": done.parameters,
                          "left_out": done.left_out, "lacks": done.lacks}))
        return
    print(f"step {done.step} in {done.path}: {done.parameters} parameters")
    for what in done.left_out:
        print(f"left out: {what}")
    for what in done.lacks:
        print(f"was not there: {what}")


def main(arguments: list[str]) -> int:
    """Return: 0, 1 (refused), 2 (usage)."""
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        done = _run(options, parser)
    except SharddError as error:
        print(f"shardctl: {error.name}: {error.text}", file=sys.stderr)
        return 1
    except FileNotFoundError as error:
        print(f"shardctl: NOT_FOUND: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"shardctl: INTERNAL: {error}", file=sys.stderr)
        return 1
    _report(done, options.json)
    return 0


__all__ = ["Converted", "from_dcp", "to_dcp"]

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
