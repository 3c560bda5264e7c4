#!/bin/bash
# tests/bench/compare --quick: the table is printed, every row follows from the lines that were
# measured, and what is missing is named. Nothing here depends on how fast anything is.
set -uo pipefail
cd "$(dirname "$(readlink -f "$0")")/../.." || exit 1
build=$(dirname "${SHARDD_BIN_DIR:-build/bin}")
work=$(mktemp -d "${TMPDIR:-/tmp}/compare.XXXXXX") || exit 1
trap 'rm -rf "$work"' EXIT
failed=0
count=0

report() { # report STATUS NAME
	((++count))
	if (($1)); then
		failed=1
		printf 'not ok %d - %s\n' "$count" "$2"
		sed 's/^/# /' "$work/err" "$work/out" | tail -n 80
	else
		printf 'ok %d - %s\n' "$count" "$2"
	fi
}

compare() { # compare ARGUMENTS...
	timeout 600 tests/bench/compare --quick --build "$build" --python "$work/none" \
		--json "$work/json" "$@" >"$work/out" 2>"$work/err"
}

compare
report $? 'all of it runs without a PyTorch'

python3 - "$work/json" "$work/out" >"$work/said" 2>&1 <<'END'
import json, sys

told = json.load(open(sys.argv[1]))
table = [[cell.strip() for cell in line.strip(" |\n").split(" | ")]
         for line in open(sys.argv[2]) if line.startswith("| ")]
assert table[0] == ["what", "ours", "limit", "ratio to the limit", "peer", "times faster",
                    "target", "reached"], table[0]
rows = told["rows"]
assert [row["what"] for row in rows] == [cells[0] for cells in table[2:]]
assert len(rows) > 25, len(rows)
# with one round every figure is that of one line
times = {line[key] for line in told["lines"] for key in ("p50_us", "p99_us", "call_p50_us")
         if line.get(key) is not None}
limits = {line["limit_gb_per_s"] for line in told["lines"] if line.get("limit_gb_per_s")}
bandwidths = {line["gb_per_s"] for line in told["lines"] if line.get("gb_per_s")}

def same(a, b):
    return abs(a / b - 1) < 1e-9

for row, cells in zip(rows, table[2:]):
    assert row["ours_us"] in times and row["ours_us"] > 0, row
    for key in ("limit_us", "peer_us"):
        assert row[key] is None or row[key] in times, row
    if row["limit_us"] is not None:
        ours = "ours_p99_us" if row["target"]["figure"] == "ours_p99_us" else "ours_us"
        assert same(row["ratio_to_limit"], row[ours] / row["limit_us"]), row
    elif row["limit_gb_per_s"] is not None:
        assert row["limit_gb_per_s"] in limits and row["ours_gb_per_s"] in bandwidths, row
        assert same(row["ratio_to_limit"], row["ours_gb_per_s"] / row["limit_gb_per_s"]), row
    if row["peer_us"] is not None:
        assert same(row["times_faster"], row["peer_us"] / row["ours_us"]), row
    if row["peer_bytes"] is not None:
        assert same(row["bytes_ratio"], row["ours_bytes"] / row["peer_bytes"]), row
    target, got = row["target"], row[row["target"]["figure"]]
    want = None if got is None else \
        got >= target["value"] if target["sense"] == ">=" else got <= target["value"]
    assert row["reached"] is want, row
    assert cells[7] == {True: "yes", False: "no", None: "not measured"}[want], cells
peers = {row["peer"] for row in rows if row["peer_us"] is not None}
for name, title in (("gloo", "Gloo"), ("mpi", "Open MPI"), ("torch", "PyTorch")):
    assert (name in told["skipped"]) != (title in peers), (name, peers, told["skipped"])
    if name in told["skipped"]:
        assert f"{title}: skipped" in {row["peer"] for row in rows}, name
assert "torch" in told["skipped"]
END
rc=$?
((rc)) && cp "$work/said" "$work/err"
report $rc 'the rows follow from what was measured, and the table from the rows'

grep -Eq '^Limits, 64 KiB: copy [0-9.]+ GB/s, triad [0-9.]+ GB/s, read [0-9.]+ GB/s\.$' "$work/out"
report $? 'the limits of the machine are there'

grep -q '^Skipped: PyTorch: no PyTorch with FSDP2 in .*none: --python\.$' "$work/out"
report $? 'a peer that is missing is named'

compare --only transformer && grep -q '| PyTorch: skipped ' "$work/out" &&
	grep -q '^0 reached, 0 not reached, 1 not measured\.$' "$work/out"
report $? 'a row without its peer is not measured'

compare --only gather_peers --without gloo --without mpi --peers-build "$work/peers" &&
	grep -q '^Skipped: Gloo: not asked for' "$work/out" &&
	grep -q '^Skipped: Open MPI: not asked for' "$work/out" &&
	! grep -Eq '\| (yes|no) +\|$' "$work/out" && [[ -z $(ls "$work/peers") ]]
report $? 'peers that are not asked for are neither built nor compared with'

# A peer that gives no figures: a mpicc and a mpirun that do nothing.
mkdir "$work/bin"
printf '#!/bin/sh\nexit 0\n' >"$work/bin/mpicc"
printf '#!/bin/sh\nexit 1\n' >"$work/bin/mpirun"
chmod +x "$work/bin"/*
PATH=$work/bin:$PATH compare --only peers --without gloo
rc=$?
((rc == 1)) && grep -q 'mpirun .* ended with 1$' "$work/err"
report $? 'a peer that fails is no figure: 1, and a sentence'

! compare --only nonsense && grep -q 'the groups are gather, ' "$work/err"
report $? 'an unknown group is refused'

! compare --update && grep -q 'needs the whole of it' "$work/err"
report $? 'quick figures do not get onto the page'

printf '1..%d\n' "$count"
exit $failed
