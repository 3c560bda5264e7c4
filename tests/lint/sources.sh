# Which files the lint scripts look at; sourced. Build folders are never searched.
cd "$(dirname "$(readlink -f "$0")")/../.." || exit 1

# files PATTERN...: names that match any of the patterns, one a line.
files() {
	local pattern names=()
	for pattern in "$@"; do
		names+=(-o -name "$pattern")
	done
	find . \( -path './build*' -o -path ./.git -o -name __pycache__ \) -prune -o \
		-type f \( "${names[@]:1}" \) -print | sed 's|^\./||' | sort
}

# Scripts without an extension, known by their first line.
scripts() {
	find . \( -path './build*' -o -path ./.git -o -name __pycache__ \) -prune -o \
		-type f ! -name '*.[ch]' -size -200k -exec grep -lIm1 "^#!.*$1" {} + |
		sed 's|^\./||' | sort
}
