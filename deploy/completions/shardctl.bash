# Completion of shardctl in bash. What a word may become is what `shardctl --complete` prints.

_shardctl() {
	local cur=${COMP_WORDS[COMP_CWORD]} program word line words=() more=()
	# bash makes three words of --step=5
	for word in "${COMP_WORDS[@]:1:COMP_CWORD}"; do
		[[ $word == '=' ]] || words+=("$word")
	done
	if [[ $cur == '=' ]]; then
		cur=''
		words+=('')
	fi
	program=$(type -P -- "${COMP_WORDS[0]/#\~/$HOME}") || program=shardctl
	COMPREPLY=()
	while IFS= read -r line; do
		more=()
		case $line in
		:file) mapfile -t more < <(compgen -f -- "$cur") ;;
		:dir) mapfile -t more < <(compgen -d -- "$cur") ;;
		:command) mapfile -t more < <(compgen -c -- "$cur") ;;
		*) more=("${line%%$'\t'*}") ;;
		esac
		[[ $line != :* ]] || compopt -o filenames 2>/dev/null
		COMPREPLY+=("${more[@]}")
	done < <("$program" --complete "${words[@]}" 2>/dev/null)
}

complete -F _shardctl shardctl
