#compdef shardctl
# Completion of shardctl in zsh. What a word may become is what `shardctl --complete` prints.

_shardctl() {
	local line
	local -a plain described before
	before=("${(@Q)words[2,CURRENT-1]}")
	while IFS= read -r line; do
		case $line in
		:file) _files ;;
		:dir) _files -/ ;;
		:command) _command_names -e ;;
		*$'\t'*) described+=("${line%%$'\t'*}:${line#*$'\t'}") ;;
		*) plain+=("$line") ;;
		esac
	done < <(${~words[1]} --complete "${before[@]}" "${(Q)PREFIX}" 2>/dev/null)
	(( ! $#described )) || _describe verb described
	(( ! $#plain )) || compadd -- $plain
}

_shardctl "$@"
