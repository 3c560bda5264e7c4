# Several nodes on one machine; sourced by quickstart, whose functions and variables it uses.
#
# A node is a holder with its daemon, the daemon's etcd, and trainers. As root each node is in
# a network, process and mount namespace of its own, with one cable to a switch, which is a
# bridge in one more network namespace: nothing of the machine's own network is changed. A
# namespace lives as long as its first process, the keeper, which dies with this script,
# and everything in the namespace dies with the keeper. Without root all nodes are on 127.0.0.1.

job=quickstart
apart=0       # whether the nodes have namespaces
switch=''     # the keeper of the switch
keeper=()     # of each node: the process that unshare was started as
first=()      # of each node: the first process of its namespaces
holder=()     # of each node
ranks_of=()   # of each node: the processes that its trainers were started as
host=()       # of each node: its address
port=()       # of each node: the port of the daemon; etcd has the next two
output=''     # descriptor of what trainers print to
last=$nodes   # the node that is killed
world=$((nodes * ranks))

# ---------------------------------------------------------------- processes

# tree PID...: these processes and all that they have started, parents first.
tree() {
	{ cat /proc/[0-9]*/stat 2>/dev/null || :; } | sed 's/(.*)/-/' | awk -v roots="$*" '
		{ child[$4] = child[$4] " " $1; lives[$1] = $3 != "Z" }
		function show(p,  n, i, list) {
			if (lives[p])
				print p
			n = split(child[p], list)
			for (i = 1; i <= n; i++)
				show(list[i])
		}
		END { n = split(roots, list); for (i = 1; i <= n; i++) show(list[i]) }'
}

# named NAME PID...: those of the tree that are this program.
named() {
	local name=$1 p
	shift
	for p in $(tree "$@"); do
		! runs "$p" "$name" || printf '%s\n' "$p"
	done
}

# kill_tree PID...: parents first, so that a holder starts no other daemon.
kill_tree() {
	local p
	for p in $(tree "$@"); do
		kill -KILL "$p" 2>/dev/null || :
	done
}

# Processes that live on must not keep the reader of the output waiting.
drop_output() { [[ -z $output ]] || exec {output}>&-; }

# At the end, or at any other time. Standard error: bash tells of each child that is killed.
nodes_clean_up() {
	local n
	for ((n = 1; n <= nodes; n++)); do
		# shellcheck disable=SC2086
		kill_tree ${holder[n]-} ${ranks_of[n]-} ${keeper[n]-}
	done
	[[ -z $switch ]] || kill_tree "$switch"
	drop_output
	wait || :
} 2>/dev/null

nodes_show_logs() {
	local n
	for ((n = 1; n <= nodes; n++)); do
		if [[ -s $work/node$n/log ]]; then
			printf '\nlast lines of the daemon of node%d:\n' "$n" >&2
			tail -n 20 "$work/node$n/log" >&2
		fi
	done
}

# ---------------------------------------------------------------- the network

# new_namespaces OPTION...: sets made (what to kill) and inside (the first process in them).
new_namespaces() {
	local tries=200
	{
		drop_output
		exec setpriv --pdeathsig KILL unshare --net "$@" --kill-child --fork -- sleep infinity
	} 2>/dev/null &
	made=$!
	disown "$made" # bash is not to tell when it is killed
	until inside=$(named sleep "$made") && [[ -n $inside ]]; do
		((tries-- > 0)) && runs "$made" || return 1
		sleep 0.02
	done
}

# Run ip in the namespace of a process.
ip_of() {
	local target=$1
	shift
	nsenter -t "$target" -n -- ip "$@"
}

make_switch() {
	new_namespaces || return 1
	switch=$made switch_in=$inside
	ip_of "$switch_in" link add name switch type bridge && ip_of "$switch_in" link set dev switch up
}

# plug_in NODE: a network with a cable to the switch.
plug_in() {
	new_namespaces --pid --mount --mount-proc || return 1
	keeper[$1]=$made first[$1]=$inside
	ip_of "$switch_in" link add name "node$1" type veth peer name eth0 netns "$inside" &&
		ip_of "$switch_in" link set dev "node$1" master switch up &&
		ip_of "$inside" address add "${host[$1]}/24" dev eth0 &&
		ip_of "$inside" link set dev lo up && ip_of "$inside" link set dev eth0 up
}

# Some containers give root no namespaces.
may_have_namespaces() {
	((EUID == 0)) || { why_not='this user is not root'; return 1; }
	if ! why_not=$({ unshare --net --pid --mount --mount-proc --fork -- ip link add name switch type bridge; } 2>&1); then
		why_not="the kernel refuses namespaces (${why_not##*$'\n'})"
		return 1
	fi
}

# Three ports in a row where nobody listens.
find_ports() {
	local p tries=100
	while ((tries-- > 0)); do
		p=$((20000 + RANDOM % 10000))
		if ! { : <"/dev/tcp/127.0.0.1/$p" || : <"/dev/tcp/127.0.0.1/$((p + 1))" ||
			: <"/dev/tcp/127.0.0.1/$((p + 2))"; } 2>/dev/null && [[ " ${port[*]-} " != *" $p "* ]]; then
			printf '%d' "$p"
			return
		fi
	done
	fail 'no free ports on 127.0.0.1'
}

make_network() {
	local n
	title "network of $nodes nodes"
	if may_have_namespaces; then
		apart=1
		make_switch || fail 'the network cannot be made'
		for ((n = 1; n <= nodes; n++)); do
			host[n]=10.77.0.$n port[n]=7400
			plug_in "$n" || fail "the network of node$n cannot be made"
		done
		say "each node has namespaces of its own, and a cable to one switch: ${host[*]}"
		return
	fi
	for ((n = 1; n <= nodes; n++)); do
		host[n]=127.0.0.1 port[n]=$(find_ports)
	done
	say "no namespaces: $why_not; all nodes are on 127.0.0.1, at the ports ${port[*]}"
}

# on NODE COMMAND...: run it on the node, as this process.
on() {
	local node=$1
	shift
	if ((apart)); then
		exec nsenter -t "${first[node]}" -n -p -m -- "$@"
	fi
	exec "$@"
}

# -------------------------------------------------------------- the daemons

seeds() {
	local n list=''
	for ((n = 1; n <= nodes; n++)); do
		list+="\"node$n=${host[n]}:$((port[n] + 1)):$((port[n] + 2))\", "
	done
	printf '%s' "${list%, }"
}

configure() {
	local n names=()
	title 'certificates and configuration'
	for ((n = 1; n <= nodes; n++)); do
		names+=("node$n=${host[n]}")
	done
	deploy/certificates --dir "$work/certificates" "${names[@]}"
	for ((n = 1; n <= nodes; n++)); do
		mkdir "$work/node$n"
		cat >"$work/node$n/shardd.yaml" <<-END
		socket: $work/node$n/shardd.sock
		backend: host
		coord: embedded
		coord_seeds: [$(seeds)]
		coord_dir: $work/node$n/etcd
		cluster: quickstart
		node_name: node$n
		replicas: 1
		peer_listen: "${host[n]}:${port[n]}"
		peer_ca: $work/certificates/node$n/ca.pem
		peer_cert: $work/certificates/node$n/node.pem
		peer_key: $work/certificates/node$n/node.key
		END
	done
	printf '\n$ cat shardd.yaml (of node1)\n'
	cat "$work/node1/shardd.yaml"
}

# ctl NODE ARGUMENT...
ctl() { (on "$1" shardctl --socket "$work/node$1/shardd.sock" "${@:2}"); }

start_node() {
	local tries=600
	{
		drop_output
		on "$1" shardd-holder -- shardd --config "$work/node$1/shardd.yaml"
	} 2>>"$work/node$1/log" &
	holder[$1]=$!
	until ctl "$1" health >/dev/null 2>&1; do
		runs "${holder[$1]}" || fail "the daemon of node$1 did not start"
		((tries-- > 0)) || fail "the daemon of node$1 was not ready in time"
		sleep 0.05
	done
}

etcd_of() {
	(on 1 env ETCDCTL_API=3 etcdctl --endpoints "https://${host[1]}:$((port[1] + 1))" \
		--cacert "$work/certificates/node1/ca.pem" --cert "$work/certificates/node1/node.pem" \
		--key "$work/certificates/node1/node.key" "$@")
}

# The names of the nodes that etcd knows, in a line.
members() {
	etcd_of get --prefix --keys-only /shardd/quickstart/members/ 2>/dev/null | sed -n 's|.*/members/||p' | xargs
}

wait_for_members() {
	local until=$((SECONDS + 60)) now=''
	while now=$(members) && (($(wc -w <<<"$now") != nodes)); do
		((SECONDS < until)) || fail "after 60 s etcd has the nodes '$now', not all $nodes"
		sleep 0.2
	done
}

start_nodes() {
	local n
	title "$nodes daemons"
	for ((n = 1; n <= nodes; n++)); do
		start_node "$n"
		say "node$n: shardd runs, pid $(named shardd "${holder[n]}")"
	done
	wait_for_members
	for ((n = 1; n <= nodes; n++)); do
		[[ -z $(named etcd "${holder[n]}") ]] || say "node$n runs etcd, pid $(named etcd "${holder[n]}")"
	done
	say "members of the cluster: $(members)"
}

# --------------------------------------------------------------- the trainers

# nodes_look NODE: see look of quickstart.
nodes_look() { ctl "$1" --json status >"$work/status.json" && read_status; }

# All tables in one piece.
show_nodes() {
	local n table all=''
	for n in "$@"; do
		table=$(ctl "$n" status) || fail "shardctl status failed on node$n"
		all+=$'\n$ shardctl status (on node'$n$')\n'$table$'\n'
	done
	printf '%s\n' "$all"
}

start_trainers() {
	local n=$1 l batch=$(((64 + world - 1) / world * world))
	ctl "$n" job create "$job" --world-size "$world" --keep >/dev/null
	ranks_of[n]=''
	for ((l = 0; l < ranks; l++)); do
		on "$n" env RANK=$(((n - 1) * ranks + l)) WORLD_SIZE="$world" LOCAL_RANK="$l" \
			LOCAL_WORLD_SIZE="$ranks" SHARDD_SOCKET="$work/node$n/shardd.sock" SHARDD_JOB="$job" \
			charlm --data "$data" --steps "$steps" --batch "$batch" >&"$output" 2>&1 &
		ranks_of[n]+=" $!"
	done
}

# The trainers' lines go to run.log, which begins again with each start of all, and to the reader.
start_all_trainers() {
	local n
	rm -f "$work/output"
	mkfifo "$work/output"
	mark=0
	tee "$work/run.log" <"$work/output" | sed -u 's/^/  | /' &
	printer=$!
	exec {output}>"$work/output"
	for ((n = 1; n <= nodes; n++)); do
		start_trainers "$n"
	done
}

end_output() {
	drop_output
	output=''
	wait "$printer"
	printer=''
}

# any_runs NODE...: a trainer of these nodes runs.
any_runs() {
	local n p
	for n in "$@"; do
		for p in ${ranks_of[n]}; do
			! runs "$p" || return 0
		done
	done
	return 1
}

# train_until TEXT CONDITION...: as look_until of quickstart, on node 1.
train_until() {
	local text=$1 seen=-1 until=$((SECONDS + 60))
	shift
	while nodes_look 1; do
		if "$@"; then
			return
		fi
		any_runs "${alive[@]}" || fail "the training ended before $text"
		if ((step != seen)); then
			seen=$step until=$((SECONDS + 60))
		fi
		((SECONDS < until)) || fail "no step in 60 s; waited until $text"
		sleep 0.02
	done
	fail 'the daemon of node1 does not answer'
}

has_begun() { ((step > steps / 4)); }

# ---------------------------------------------------------- a daemon's death

# What trainers have said since the mark: a number of lines.
mark=0
set_mark() { mark=$(wc -l <"$work/run.log"); }
said() { tail -n "+$((mark + 1))" "$work/run.log"; }

# Why ranks went back to the last commit, and how many did; how many have joined again.
reasons() { said | sed -n 's/^rank [0-9]* returns to the last commit: //p' | sort -u; }
ranks_told() { said | sed -n 's/^rank \([0-9]*\) returns to the last commit: .*/\1/p' | sort -un | wc -l; }
ranks_resumed() { said | sed -n 's/^rank \([0-9]*\) resumed at step .*/\1/p' | sort -un | wc -l; }

kill_daemon() {
	local p etcd
	p=$(named shardd "${holder[$1]}") etcd=$(named etcd "${holder[$1]}")
	nodes_look "$1"
	set_mark
	step_killed=$step
	kill -KILL "$p"
	say "-- step $step: killed the daemon of node$1 with SIGKILL: shardd $p${etcd:+, and with it etcd $etcd}"
}

# The holder keeps the memory of its jobs and starts the next daemon.
wait_for_daemon() {
	local until=$((SECONDS + 60))
	until (($(ranks_resumed) == world)) && nodes_look "$1" 2>/dev/null && ((step > step_killed)); do
		((SECONDS < until)) || fail "60 s after the daemon of node$1 was killed the job does not go on"
		any_runs "${alive[@]}" || fail 'the training ended before the job went on'
		sleep 0.05
	done
	say "-- step $step: the holder has started the next daemon, pid $(named shardd "${holder[$1]}"), with the memory of the job."
	say "   All $world ranks, in the same processes, have joined again at step $(said | sed -n 's/.* resumed at step \([0-9]*\):.*/\1/p' | sort -un | xargs), and train on. Why they did:"
	reasons | sed 's/^/   /'
}

# ------------------------------------------------------------- a node's death

kill_node() {
	local p name all killed=''
	# shellcheck disable=SC2086
	all=$(tree "${holder[$1]}" ${ranks_of[$1]} ${keeper[$1]-})
	set_mark
	for p in $all; do
		name=$(cat "/proc/$p/comm" 2>/dev/null) || continue
		[[ $name == @(shardd-holder|shardd|etcd|charlm) ]] && killed+="$name $p, "
	done
	{
		# shellcheck disable=SC2086
		kill_tree $all
		# shellcheck disable=SC2086
		wait "${holder[$1]}" ${ranks_of[$1]} || :
	} 2>/dev/null
	for p in $all; do
		wait_end 10 "$p" || fail "pid $p of node$1 still runs"
	done
	holder[$1]='' ranks_of[$1]='' keeper[$1]=''
	say "-- step $step: killed node$1 with SIGKILL: ${killed%, }"
}

wait_for_reasons() {
	local until=$((SECONDS + 30)) others=$((world - ranks))
	until (($(ranks_told) >= others)); do
		((SECONDS < until)) || fail "30 s later only $(ranks_told) of $others ranks of the other nodes know that node$last is gone"
		sleep 0.05
	done
	say "-- all $others ranks of the other nodes know, and say why they wait now:"
	reasons | sed 's/^/   /'
}

bring_back() {
	say "-- node$1 starts again, $([[ ! -d $work/node$1/etcd/data ]] || printf "with its etcd's data, and ")without its memory of the job"
	if ((apart)); then
		plug_in "$1" || fail "the network of node$1 cannot be made again"
	fi
	start_node "$1"
	wait_for_members
	say "node$1: shardd runs, pid $(named shardd "${holder[$1]}"); members of the cluster: $(members)"
	start_trainers "$1"
}

# What the daemons answered the ranks that came to train on: sets verdict to goes-on or refused.
goes_on() { ((step > step_killed)); }
refusal() { said | sed -n 's/^charlm: //p' | sort -u; }

# What the daemons say of that.
show_restored() {
	local n
	for ((n = 1; n <= nodes; n++)); do
		sed -n 's/^[^ ]* \(warn\|info\)  \(cluster restores from replicas\|job restored\)/\2/p' "$work/node$n/log" | sed "s/^/   node$n: /"
	done
}

watch_return() {
	local until=$((SECONDS + 60))
	step_killed=$step verdict=''
	until [[ -n $verdict ]]; do
		nodes_look 1 || fail 'the daemon of node1 does not answer'
		if goes_on; then
			verdict=goes-on
		elif ! any_runs "${alive[@]}" && [[ -n $(refusal) ]]; then
			verdict=refused
		fi
		((SECONDS < until)) || fail "60 s after node$last came back the job neither goes on nor is refused"
		sleep 0.05
	done
}

# ------------------------------------------------------------------- the whole

end_training() {
	local n p status
	for ((n = 1; n <= nodes; n++)); do
		for p in ${ranks_of[n]}; do
			status=0
			wait "$p" || status=$?
			((status == 0)) || fail "a trainer of node$n ended with exit status $status"
		done
		ranks_of[n]=''
	done
	end_output
}

stop_nodes() {
	local n p
	title 'stop'
	for ((n = 1; n <= nodes; n++)); do
		nodes_look "$n" || fail "the daemon of node$n does not answer"
		((step == steps)) || fail "the last committed step is $step on node$n, not $steps"
	done
	ctl 1 job delete "$job" # on all nodes
	for ((n = nodes; n >= 1; n--)); do
		p=$(named shardd-holder "${holder[n]}")
		kill -TERM "$p"
		wait_end 30 "$p" || fail "the daemon of node$n did not end within 30 s of SIGTERM"
		wait "${holder[n]}" || fail "the daemon of node$n ended with exit status $?"
		p=$(tree "${holder[n]}")
		[[ -z $p ]] || fail "processes of node$n are left: $p"
		holder[n]=''
		((!apart)) || { p=$(tree "${first[n]}"); [[ $p == "${first[n]}" ]] || fail "processes of node$n are left: $p"; }
		[[ ! -e $work/node$n/shardd.sock ]] || fail "the daemon of node$n left its socket"
	done
	nodes_clean_up
	rm -rf "$work"
	work=''
	say 'all daemons ended with exit status 0; no process, namespace, socket or file is left'
}

nodes_run() {
	local n
	make_network
	configure
	start_nodes
	title "training: $world trainers on $nodes nodes, $steps steps, on $data"
	alive=()
	for ((n = 1; n <= nodes; n++)); do
		alive+=("$n")
	done
	start_all_trainers
	train_until 'a quarter of the steps was done' has_begun
	say "-- step $step: all $world ranks train"
	show_nodes "${alive[@]}"
	title 'the death of a daemon'
	kill_daemon 1
	wait_for_daemon 1
	title "the death of node$last"
	nodes_look 1
	kill_node "$last"
	unset 'alive[-1]'
	wait_for_reasons
	show_nodes "${alive[@]}"
	title "the return of node$last"
	nodes_look 1
	bring_back "$last"
	watch_return
	[[ $verdict == goes-on ]] || fail "the daemons refuse to go on: $(refusal)"
	say "-- step $step: the job goes on, at step $(said | sed -n 's/.* resumed at step \([0-9]*\):.*/\1/p' | sort -un | xargs), with what the other nodes had of node$last:"
	show_restored
	end_training
	title 'after the training'
	alive+=("$last")
	show_nodes "${alive[@]}"
	check_loss
	stop_nodes
}
