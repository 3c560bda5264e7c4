"""``python -m shardd.load NAME FILE...``: loads a base (docs/adapters.md) from safetensors
files."""

from __future__ import annotations

import argparse
import sys

from .base import load_base
from .errors import SharddError


def main(arguments: list[str]) -> int:
    """Return: 0, 1 (refused), 2 (usage)."""
    parser = argparse.ArgumentParser(
        prog="python -m shardd.load",
        description="Load frozen parameters into the daemon's memory, once for all jobs that name "
                    "them. 'shardctl job delete NAME' drops them.")
    parser.add_argument("name", help="name of the base, as for attach_base() in the jobs")
    parser.add_argument("files", nargs="+", help="safetensors files, or folders that contain them")
    parser.add_argument("--socket", help="of the daemon; default: $SHARDD_SOCKET")
    parser.add_argument("--replace", action="store_true",
                        help="replace a base of that name that no process uses")
    parser.add_argument("--skip", action="append", default=[], metavar="TENSOR",
                        help="leave this tensor out; may be repeated")
    parser.add_argument("--ttl", type=int, default=0, metavar="SECONDS",
                        help="how long to keep the base after its last use; default: job_ttl_s")
    parser.add_argument("--private", action="store_true",
                        help="closed to administrators, too")
    given = parser.parse_args(arguments)
    try:
        nbytes = load_base(given.name, given.files, given.socket, given.replace, given.skip,
                           given.ttl, private=given.private)
    except (SharddError, OSError) as error:
        print(f"shardd.load: {error}", file=sys.stderr)
        return 1
    print(f"base {given.name}: {nbytes} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
