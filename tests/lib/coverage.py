"""Tables of what gcovr counted: lines and branches of daemon/, and what no test reaches.

usage: coverage.py TREE GCOVR-JSON [FUNCTIONS-FILE]
"""

import json
import os
import re
import sys

CHECK = re.compile(r"\bCHECK\(")


def check_lines(path: str) -> set[int]:
    """The lines of each CHECK: only a bug takes the branch to its failure."""
    with open(path, encoding="utf-8") as file:
        text = file.read()
    lines: set[int] = set()
    for match in CHECK.finditer(text):
        depth, end = 1, match.end()
        while depth and end < len(text):
            depth += {"(": 1, ")": -1}.get(text[end], 0)
            end += 1
        first = text.count("\n", 0, match.start()) + 1
        lines.update(range(first, first + text.count("\n", match.start(), end) + 1))
    return lines


class Count:
    """Lines and branches, counted and reached."""

    def __init__(self) -> None:
        self.lines = [0, 0]
        self.branches = [0, 0]
        self.decisions = [0, 0]

    def add(self, other: "Count") -> None:
        for name in ("lines", "branches", "decisions"):
            mine, its = getattr(self, name), getattr(other, name)
            mine[0] += its[0]
            mine[1] += its[1]


def percent(pair: list[int]) -> str:
    return f"{100 * pair[1] / pair[0]:.1f}%" if pair[0] else "-"


def count_file(tree: str, entry: dict) -> tuple[Count, list[tuple[str, int, int, int]]]:
    """Return a file's counts, and (name, lines, missed lines, missed branches) of each function."""
    total = Count()
    checks = check_lines(os.path.join(tree, entry["file"]))
    starts = sorted((f["lineno"], f["name"]) for f in entry["functions"])
    missed = {name: [0, 0, 0] for _, name in starts}
    for line in entry["lines"]:
        number = line["line_number"]
        if line.get("gcovr/noncode"):
            continue
        total.lines[0] += 1
        total.lines[1] += line["count"] > 0
        taken = [branch["count"] > 0 for branch in line["branches"]]
        total.branches[0] += len(taken)
        total.branches[1] += sum(taken)
        if number in checks:
            taken = []
        total.decisions[0] += len(taken)
        total.decisions[1] += sum(taken)
        owner = [name for start, name in starts if start <= number]
        if owner:
            missed[owner[-1]][0] += 1
            missed[owner[-1]][1] += line["count"] == 0
            missed[owner[-1]][2] += len(taken) - sum(taken)
    return total, [(name, *missed[name]) for _, name in starts]


def main() -> int:
    tree, report = sys.argv[1:3]
    with open(report, encoding="utf-8") as file:
        entries = json.load(file)["files"]
    folders: dict[str, Count] = {}
    functions = []
    for entry in entries:
        count, missed = count_file(tree, entry)
        folder = os.path.dirname(entry["file"])
        folders.setdefault(folder, Count()).add(count)
        functions += [(entry["file"], *each) for each in missed]
    whole = Count()
    print(f"{'folder':<18} {'lines':>12} {'':>6} {'branches':>12} {'':>6} {'less CHECK':>12}")
    for folder, count in [*sorted(folders.items()), ("all", whole)]:
        cells = [f"{pair[1]}/{pair[0]}".rjust(12) + percent(pair).rjust(7)
                 for pair in (count.lines, count.branches, count.decisions)]
        print(f"{folder:<18} " + " ".join(cells))
        if count is not whole:
            whole.add(count)
    if len(sys.argv) > 3:
        with open(sys.argv[3], "w", encoding="utf-8") as file:
            for path, name, lines, lost, branches in sorted(functions):
                if lost or branches:
                    what = f"lines {lines} missed {lost} branches missed {branches}"
                    print(f"{path}:{name} {what}", file=file)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
