#!/bin/bash
# Every case of shardd-bench gives well-formed lines with figures that can be; wrong
# arguments end it with 2 and a sentence; nothing is left running or lying about.
set -uo pipefail
cd "$(dirname "$(readlink -f "$0")")/../.." || exit 1
bench=${SHARDD_BIN_DIR:-build/bin}/shardd-bench
work=$(mktemp -d "${TMPDIR:-/tmp}/bench.XXXXXX") || exit 1
trap 'rm -rf "$work"' EXIT
export TMPDIR=$work
failed=0
count=0

report() { # report STATUS NAME
	((++count))
	if (($1)); then
		failed=1
		printf 'not ok %d - %s\n' "$count" "$2"
	else
		printf 'ok %d - %s\n' "$count" "$2"
	fi
}

# case_lines CASE NAMES ARGUMENTS...: the lines are those named, in that order.
case_lines() {
	local name=$1 want=$2
	shift 2
	timeout 120 "$bench" --json --bytes 65536 --repeat 3 "$@" "$name" >"$work/out" 2>"$work/err"
	local rc=$?
	((rc == 0)) && [[ ! -s $work/err ]] && python3 - "$work/out" "$want" <<'END'
import json, sys

lines = [json.loads(line) for line in open(sys.argv[1])]
assert [line["case"] for line in lines] == sys.argv[2].split(), lines
keys = {"case", "ranks", "bytes", "dtype", "n", "p50_us", "p99_us", "gb_per_s",
        "limit_gb_per_s", "ratio_to_limit"}
for line in lines:
    assert keys <= set(line), line
    case = line["case"]
    if case.startswith("limit_"):
        assert line["limit_gb_per_s"] > 0 and line["p50_us"] is None, line
    elif case.startswith("memory"):
        assert line["held_bytes"] >= line["formula_bytes"], line
        assert line["overhead_percent"] >= 0, line
    else:
        assert line["n"] >= 3 and 0 < line["p50_us"] <= line["p99_us"], line
    if line["gb_per_s"] is not None:
        ratio = line["gb_per_s"] / line["limit_gb_per_s"]
        assert abs(ratio / line["ratio_to_limit"] - 1) < 0.01, line
END
	rc=$?
	((rc)) && sed 's/^/# /' "$work/out" "$work/err"
	report $rc "$name $*: lines $want"
}

case_lines gather gather
case_lines gather gather --ranks 4
case_lines gather_cast 'gather_cast_first gather_cast_later gather_cast_nop'
case_lines gather_cast 'gather_cast_first gather_cast_later gather_cast_nop' --dtype fp16 --ranks 1
case_lines reduce reduce
case_lines reduce reduce --dtype bf16 --ranks 4
case_lines reduce reduce --dtype fp16 --ranks 3
case_lines adamw adamw
case_lines norm norm
case_lines grpc_rtt 'grpc_rtt grpc_echo'
case_lines attach 'attach_connect attach_join attach_register attach_gather attach'
case_lines status 'status status_command' --ranks 3
case_lines limits 'limit_copy limit_triad limit_read'
case_lines memory 'memory_shard memory_full memory_grad memory'
case_lines memory 'memory_shard memory_full memory_grad memory' --dtype bf16 --ranks 3
case_lines sgd sgd
case_lines reduce_adamw 'reduce_adamw reduce_adamw_apart reduce_adamw_copied'
case_lines reduce_adamw 'reduce_adamw reduce_adamw_apart reduce_adamw_copied' --dtype bf16 --ranks 3
case_lines transformer transformer
case_lines scale 'scale_register scale_op scale_op_few scale_status scale_echo' --ranks 5 --units 40
case_lines attach_units 'units_connect units_join units_register units_first attach_first units_gather units_again attach_units' --units 20
case_lines adamw_kept 'adamw_plain adamw_kept'
case_lines restart 'restart_told restart_join restart_register restart restart_step restart_calm_step restart_all_told restart_all_join restart_all_register restart_all restart_all_step restart_all_calm_step' --units 20
case_lines checkpoint 'checkpoint_step checkpoint_paused_step checkpoint_calm_step checkpoint_save checkpoint_still checkpoint_dd' --units 2
case_lines resize 'resize_stays resize_stays_back resize_status resize_moves resize_moves_back resize_status' --units 20
case_lines publish_transforms 'publish_bf16 publish_fp16 publish_fp32 publish_e4m3_tensor publish_e4m3_block publish_joined publish_rows publish_columns publish_transposed publish_padded' --ranks 2
case_lines publish_swap 'publish_swap publish_swap_fixed swap_bare_out swap_bare_in swap_bare_out_again swap_bare_in_again' --units 20
# every case that measures one op by itself
for name in release gradient accumulate alloc free begin_pass end_pass set_reshard set_prefetch \
	unit_buffers init barrier commit verify set_factors plan join_uneven clip clip_value unscale copy_shard drop_gradients \
	reduce_sparse next_shard shard_done all_reduce broadcast broadcast_buffers summon return_full \
	convert drop_units ddp_create ddp_forward ddp_backward ddp_ready ddp_finish; do
	case_lines "$name" "$name"
done
case_lines accumulate accumulate --dtype bf16 --ranks 3
case_lines all_reduce all_reduce --dtype fp16 --ranks 2
case_lines broadcast_buffers broadcast_buffers --dtype fp16 --ranks 2

# Every op of the daemon's table is named by a case.
every_op_has_a_case() {
	local ops op lacking=() entries
	mapfile -t ops < <(sed -n 's/^\t\.name = "\([A-Za-z]*\)",$/\1/p' daemon/{gather,reduce,step,unitio,ddp}/*.c)
	# DdpBucket is in the table and no method
	entries=$((1 + $(grep -c '^[[:space:]]OP(' proto/methods.h)))
	((${#ops[@]} == entries)) ||
		{ printf '# %d names for %d ops\n' ${#ops[@]} "$entries"; return 1; }
	"$bench" --help | sed -n 's/.* \[\(.*\)\]$/\1/p' | tr ' ' '\n' >"$work/measured"
	for op in "${ops[@]}"; do
		[[ $op == @(ReadBytes|WriteBytes) ]] && continue # libshardd has no function for them
		grep -qx "$op" "$work/measured" || lacking+=("$op")
	done
	((${#lacking[@]} == 0)) || { printf '# without a case: %s\n' "${lacking[*]}"; return 1; }
}
every_op_has_a_case
report $? 'every op has a case'

# refused SENTENCE ARGUMENTS...
refused() {
	local want=$1
	shift
	timeout 20 "$bench" "$@" >"$work/out" 2>"$work/err"
	local rc=$?
	((rc == 2)) && [[ ! -s $work/out ]] && grep -q -- "$want" "$work/err"
	report $? "refused with 2: $*"
}

refused 'no case is given'
refused 'there is none of that name' nonsense
refused 'a number from 1 to 64' --ranks 0 gather
refused 'a number from 1 to 64' --ranks 65 gather
refused 'fp32, bf16 or fp16' --dtype int8 gather
refused '4 to 1024GiB' --bytes 3 gather
refused '4 to 1024GiB' --bytes 1XiB gather
refused '4 to 1024GiB' --bytes 18446744073709551616 gather
refused 'a number from 1 to 1000000' --repeat -1 gather
refused 'at most 107 bytes' --socket "/$(printf 'x%.0s' {1..200})" gather
refused '--help' --nonsense gather

timeout 20 "$bench" --socket "$work/none" gather >"$work/out" 2>"$work/err"
[[ $? == 1 && ! -s $work/out ]] && grep -q 'no daemon answers' "$work/err"
report $? 'no daemon at the given socket: 1 and a sentence'

# Without the holder nothing would be kept: no other daemon takes its place.
mkdir "$work/alone" && cp "$bench" "${bench%/*}/shardd" "$work/alone"
LD_LIBRARY_PATH=$(readlink -f "${bench%/*}/../lib") PATH=/usr/bin:/bin \
	timeout 20 "$work/alone/shardd-bench" --units 2 checkpoint >"$work/out" 2>"$work/err"
[[ $? == 1 && ! -s $work/out ]] && grep -q 'cannot start shardd-holder: No such file' "$work/err"
report $? 'no shardd-holder beside it: 1 and a sentence'

# Interrupted in the middle: the trainers and the daemon go, too.
"$bench" --repeat 1000000 grpc_rtt >"$work/out" 2>"$work/err" &
pid=$!
for ((i = 0; i < 400; i++)); do
	daemon=$(pgrep -P "$pid" -x shardd) && (($(pgrep -c -P "$pid") >= 2)) && break
	sleep 0.05
done
kill -TERM "$pid"
wait "$pid"
rc=$?
((rc == 143)) && [[ -n ${daemon:-} ]] && ! kill -0 "$daemon" 2>/dev/null
report $? 'interrupted: ends with 143 and takes its daemon along'

shopt -s nullglob
left=("$work"/shardd-bench-*)
((${#left[@]} == 0))
report $? 'no folder is left'
printf '1..%d\n' "$count"
exit $failed
