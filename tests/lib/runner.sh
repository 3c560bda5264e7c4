# What tests/run runs its entries with: start, time limit, counts, cleaning up.
# Sourced, bash 5.1 or newer.
#
# An entry is a program. Kind `criterion`: its tests are counted from its TAP file.
# Kind `script`: from TAP lines on its standard output ("ok - name", "not ok - name",
# "ok - name # SKIP reason"); without such lines it is one test, and exit status 77
# means skipped, with the last line of output as the reason. Whatever an entry
# starts carries SHARDD_TEST_ID in its environment; what is still there after its
# end is killed and makes it fail.

entry_config=() entry_group=() entry_name=() entry_kind=()
entry_limit=() entry_target=() entry_command=()
declare -A broken_build=() sum_passed=() sum_failed=() sum_skipped=() sum_ms=() sum_cpu=()
sum_order=() skipped_lines=() failed_lines=() failed_why=() time_lines=()
scratch=''
shopt -s nullglob

say() { printf '%s\n' "$*"; }

# add CONFIG GROUP NAME KIND SECONDS TARGET COMMAND...
# COMMAND: a program with arguments, or a function of tests/run.
add() {
	entry_config+=("$1") entry_group+=("$2") entry_name+=("$3") entry_kind+=("$4")
	entry_limit+=("$5") entry_target+=("$6")
	shift 6
	entry_command+=("$(printf '%q ' "$@")")
}

full_name() { printf '%s/%s/%s' "${entry_group[$1]}" "${entry_config[$1]}" "${entry_name[$1]}"; }

drop_entry() {
	unset "entry_config[$1]" "entry_group[$1]" "entry_name[$1]" "entry_kind[$1]" \
		"entry_limit[$1]" "entry_target[$1]" "entry_command[$1]"
}

keep_only() {
	local i
	[[ -n $1 ]] || return 0
	for i in "${!entry_name[@]}"; do
		[[ $(full_name "$i") == *"$1"* ]] || drop_entry "$i"
	done
	((${#entry_name[@]})) || say "tests/run: no test has '$1' in its name; --list shows them"
}

print_entries() {
	local i
	for i in "${!entry_name[@]}"; do
		full_name "$i"
		printf '\n'
	done
}

# ------------------------------------------------------------- begin and end

begin() {
	scratch=$(mktemp -d "${TMPDIR:-/tmp}/shardd-test.XXXXXX") || exit 1
	chmod 711 "$scratch" # trainers of other users must get to their daemon's socket
	trap clean_up EXIT
	trap 'say "tests/run: interrupted"; exit 130' INT TERM HUP
}

# Print the pids of what carries the mark $1 (a prefix). Zombies have no environment.
marked() {
	grep -lsz -- "^SHARDD_TEST_ID=$1" /proc/[0-9]*/environ 2>/dev/null | cut -d/ -f3
}

clean_up() {
	local pids
	trap - INT TERM HUP
	mapfile -t pids < <(jobs -p; marked "$scratch/")
	((${#pids[@]})) && kill -KILL "${pids[@]}" 2>/dev/null
	wait 2>/dev/null
	rm -rf "$scratch"
}

# -------------------------------------------------------------- one entry

# A process that was told to go may need a moment: look for up to three seconds.
kill_leftovers() {
	local pids tries
	for ((tries = 0; tries < 30; tries++)); do
		mapfile -t pids < <(marked "$1")
		((${#pids[@]})) || return 0
		sleep 0.1
	done
	printf '# left running: %s\n' "$(ps -o pid=,args= -p "$(IFS=,; echo "${pids[*]}")")"
	kill -KILL "${pids[@]}" 2>/dev/null
	return 1
}

milliseconds() { printf '%s' $((${EPOCHREALTIME//[.,]/} / 1000)); }

# execute DIR LIMIT BUILD COMMAND: in a process group of its own, which timeout ends.
execute() {
	export SHARDD_TEST_ID=$1/ TMPDIR=$1/t
	export SHARDD_BUILD_DIR=$PWD/$3 SHARDD_BIN_DIR=$PWD/$3/bin SHARDD_LIB_DIR=$PWD/$3/lib
	# A shardctl with a sanitizer takes a multiple of the time to start, and most tests ask it for little.
	[[ $3 == build || $4 == *test_shardctl* || ! -x build/bin/shardctl ]] || export TEST_SHARDCTL=$PWD/build/bin/shardctl
	# A background job of this shell ignores SIGINT; a test must not inherit that.
	exec env --default-signal=INT --default-signal=QUIT timeout --kill-after=10 "$2" bash -c "$4"
}

# The body of a background job: leaves out, tap, rc, ms and cpu in its folder.
run_entry() {
	local i=$1 dir=$scratch/$1 command=${entry_command[$1]} start rc
	local TIMEFORMAT='%U %S'
	mkdir -p "$dir/t"
	if [[ ${entry_kind[i]} == criterion ]]; then
		command+=" -j$2 --tap=$dir/tap"
	fi
	start=$(milliseconds)
	# in braces: a subshell of which the time is asked for itself says nothing
	{ time { (execute "$dir" "${entry_limit[i]}" "$(build_dir "${entry_config[i]}")" "$command") \
		>"$dir/out" 2>&1 </dev/null; }; } 2>"$dir/cpu"
	rc=$?
	case $rc in
	124 | 137) printf '# ended after its time limit of %s s\n' "${entry_limit[i]}" >>"$dir/out" ;;
	esac
	kill_leftovers "$dir/" >>"$dir/out" || rc=1
	printf '%s\n' "$rc" >"$dir/rc"
	printf '%s\n' $(($(milliseconds) - start)) >"$dir/ms"
}

# ----------------------------------------------------------------- counting

# tally KEY NAME PASSED FAILED SKIPPED MS
tally() {
	if [[ ! -v sum_passed[$1] ]]; then
		sum_order+=("$1")
		sum_passed[$1]=0 sum_failed[$1]=0 sum_skipped[$1]=0 sum_ms[$1]=0
	fi
	((sum_passed[$1] += $3, sum_failed[$1] += $4, sum_skipped[$1] += $5, sum_ms[$1] += $6))
	if (($4)); then
		failed_lines+=("$2")
		printf '  FAIL  %-44s %d passed, %d failed, %d skipped  %s s\n' "$2" "$3" "$4" "$5" "$(seconds "$6")"
	else
		printf '  ok    %-44s %d passed%s  %s s\n' "$2" "$3" "$( (($5)) && printf ', %d skipped' "$5")" "$(seconds "$6")"
	fi
}

seconds() { printf '%d.%d' $(($1 / 1000)) $(($1 % 1000 / 100)); }

# count_tap FILE NAME: sets passed, failed, skipped and planned (-1: no plan).
count_tap() {
	local line
	passed=0 failed=0 skipped=0 planned=-1
	while IFS= read -r line; do
		case $line in
		1..*) planned=${line#1..} planned=${planned%%[!0-9]*} ;;
		'not ok '*) ((failed++)) ;;
		'ok '*'# SKIP'*)
			((skipped++))
			[[ $line =~ ^ok\ [0-9\ ]*-?\ *(.*[^ ])\ *#\ SKIP\ *(.*)$ ]]
			skipped_lines+=("$2: ${BASH_REMATCH[1]}: ${BASH_REMATCH[2]}")
			;;
		'ok '*) ((passed++)) ;;
		esac
	done < <(grep -aE '^(1\.\.[0-9]|(not )?ok )' "$1" 2>/dev/null)
}

# why_failed FILE: of each test that failed there, its TAP line and the last lines of what it said next;
# without one, the file's last lines. A log that was cut in the middle still has this, as it is printed last.
why_failed() {
	awk '
	function flush() {
		if (head == "") return
		print "  " substr(head, 1, 300)
		for (i = n > 6 ? n - 6 : 0; i < n; i++) print "    " substr(said[i], 1, 600)
		head = ""
		shown++
	}
	/^1\.\.[0-9]|^(not )?ok / { flush(); n = 0; if (/^not/) head = $0; next }
	/[^ ]/ { said[n++] = $0 }
	END {
		flush()
		if (!shown) for (i = n > 6 ? n - 6 : 0; i < n; i++) print "    " substr(said[i], 1, 600)
	}' "$1"
}

# note_time KEY NAME MS FILE: for the table and print_slowest. FILE: seconds in user and system mode.
note_time() {
	local user system cpu
	read -r user system <"$4"
	cpu=$((10#${user/./} + 10#${system/./}))
	((sum_cpu[$1] += cpu))
	time_lines+=("$3 $cpu $2")
}

# The entries that took longest, and the processor time of each with all that it started.
print_slowest() {
	local ms cpu name
	printf '\n# %9s %9s  slowest\n' seconds 'cpu s'
	printf '%s\n' "${time_lines[@]}" | sort -rn | head -n 20 | while read -r ms cpu name; do
		printf '# %9s %9s  %s\n' "$(seconds "$ms")" "$(seconds "$cpu")" "$name"
	done
}

# A program that ended badly, or reported fewer tests than it has, failed, whatever
# else it said.
count_entry() {
	local i=$1 dir=$scratch/$1 name rc
	name=$(full_name "$i")
	rc=$(<"$dir/rc")
	if [[ ${entry_kind[i]} == criterion ]]; then
		count_tap "$dir/tap" "$name"
	else
		count_tap "$dir/out" "$name"
	fi
	if ((planned >= 0 && passed + failed + skipped < planned)); then
		printf '# of %d tests only %d reported\n' $planned $((passed + failed + skipped)) >>"$dir/out"
		failed=$((planned - passed - skipped))
	fi
	if ((passed + failed + skipped == 0)); then
		if [[ ${entry_kind[i]} == script && $rc == 77 ]]; then
			skipped=1
			skipped_lines+=("$name: $(tail -n 1 "$dir/out")")
		elif [[ ${entry_kind[i]} == script && $rc == 0 ]]; then
			passed=1
		else
			[[ ${entry_kind[i]} == script ]] || printf '# no test reported\n' >>"$dir/out"
			failed=1
		fi
	elif ((rc != 0 && rc != 77 && failed == 0)); then
		failed=1
	fi
	note_time "${entry_group[i]} ${entry_config[i]}" "$name" "$(<"$dir/ms")" "$dir/cpu"
	tally "${entry_group[i]} ${entry_config[i]}" "$name" $passed $failed $skipped "$(<"$dir/ms")"
	if ((failed)); then
		printf -- '---- output of %s, exit status %s\n' "$name" "$rc"
		cat "$dir/out"
		printf -- '----\n'
		failed_why+=("$name: exit status $rc
$(if grep -aq '^not ok ' "$dir/tap" 2>/dev/null; then why_failed "$dir/tap"; else why_failed "$dir/out"; fi)")
	fi
	rm -rf "$dir"
}

# ------------------------------------------------------------------- groups

# run_build CONFIG COMMAND...: its output is shown only when it fails. In the
# background, so that a signal ends it at once.
run_build() {
	local config=$1 start ok=1 TIMEFORMAT='%U %S'
	shift
	start=$(milliseconds)
	printf '  ...   build %s\n' "$config"
	{ time { (export SHARDD_TEST_ID=$scratch/build; "$@") >"$scratch/build" 2>&1 </dev/null; }; } \
		2>"$scratch/build-cpu" &
	wait $! || ok=0
	note_time "build $config" "build/$config" $(($(milliseconds) - start)) "$scratch/build-cpu"
	if ((ok)); then
		tally "build $config" "build/$config" 1 0 0 $(($(milliseconds) - start))
	else
		broken_build[$config]=1
		tally "build $config" "build/$config" 0 1 0 $(($(milliseconds) - start))
		printf -- '---- output of the build %s\n' "$config"
		cat "$scratch/build"
		printf -- '----\n'
		failed_why+=("build/$config:
$(grep -m 5 -E 'error|FAILED' "$scratch/build")")
	fi
}

# reap: wait for one of the entries in `running`, a variable of run_groups, and count it.
reap() {
	local pid
	wait -n -p pid "${!running[@]}"
	count_entry "${running[$pid]}"
	((used -= weights[$pid]))
	unset "running[$pid]" "weights[$pid]"
}

# in_order GROUP...: the entries of these groups as they are to start, in `mine`: first those that
# starts_early names, so that nothing long is left for the end; last those that run alone.
in_order() {
	local i group name early=() alone=()
	mine=()
	for group in "$@"; do
		for i in "${!entry_group[@]}"; do
			[[ ${entry_group[i]} == "$group" ]] || continue
			name=$(full_name "$i")
			if is_alone "$name"; then
				alone+=("$i")
			elif starts_early "$name"; then
				early+=("$i")
			else
				mine+=("$i")
			fi
		done
	done
	mine=("${early[@]}" "${mine[@]}" "${alone[@]}")
}

# run_groups CORES GROUP...: all their entries, side by side on so many cores. weight_of says how many
# thirds of a core an entry takes, inner_of how many of its own tests run at a time; what is_alone names
# has the machine to itself. These are functions of tests/run that get GROUP/CONFIG/NAME.
run_groups() {
	local i name weight room=$((3 * $1)) cores=$1 used=0 mine inner=0
	declare -A running=() weights=()
	shift
	in_order "$@"
	# A lone program may use all cores for its own tests.
	((${#mine[@]} == 1)) && inner=$cores
	for i in "${mine[@]}"; do
		name=$(full_name "$i")
		if [[ -v broken_build[${entry_config[i]}] && ${entry_group[i]} != lint ]]; then
			tally "${entry_group[i]} ${entry_config[i]}" "$name (not built)" 0 1 0 0
			continue
		fi
		weight=$(weight_of "$name")
		is_alone "$name" && weight=$room
		while ((${#running[@]} && used + weight > room)); do
			reap
		done
		run_entry "$i" "$((inner ? inner : $(inner_of "$name")))" &
		running[$!]=$i weights[$!]=$weight
		((used += weight))
	done
	while ((${#running[@]})); do
		reap
	done
}

finish() {
	local key group config passed=0 failed=0 skipped=0 ran=0
	printf '\n# %-12s %-6s %8s %8s %8s %9s %9s\n' group build passed failed skipped seconds 'cpu s'
	for key in "${sum_order[@]}"; do
		read -r group config <<<"$key"
		printf '# %-12s %-6s %8d %8d %8d %9s %9s\n' "$group" "$config" "${sum_passed[$key]}" \
			"${sum_failed[$key]}" "${sum_skipped[$key]}" "$(seconds "${sum_ms[$key]}")" \
			"$(seconds "${sum_cpu[$key]:-0}")"
		((passed += sum_passed[$key], failed += sum_failed[$key], skipped += sum_skipped[$key]))
		[[ $group == build ]] || ((ran += sum_passed[$key]))
	done
	((${#time_lines[@]})) && print_slowest
	((${#skipped_lines[@]})) && printf 'skipped: %s\n' "${skipped_lines[@]}"
	((${#failed_why[@]})) && printf '%s\n' "${failed_why[@]}"
	((${#failed_lines[@]})) && printf 'failed: %s\n' "${failed_lines[@]}"
	printf '%d passed, %d failed, %d skipped\n' "$passed" "$failed" "$skipped"
	((failed == 0 && ran > 0))
	exit
}
