# Sourced by the scripts of a bundle: where its programs and libraries are.
# shellcheck shell=bash
here=$(cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")" && pwd)

has_library() {
	{ ldconfig -p || /sbin/ldconfig -p; } 2>/dev/null | grep -q "^[[:space:]]*$1 "
}

if [[ -d $here/bin ]]; then
	export SHARDD_BIN_DIR=$here/bin SHARDD_LIB_DIR=$here/lib PATH=$here/bin:$PATH
fi
# Where drivers and toolkits put their own programs.
PATH=$PATH:/usr/local/nvidia/bin:/usr/local/cuda/bin
libraries=$here/lib
has_library libstdc++.so.6 || libraries+=:$here/lib/cxx
libraries+=${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}

# ours COMMAND...: with the bundle's libraries. The machine's own programs do without:
# they may need newer ones.
ours() { LD_LIBRARY_PATH=$libraries "$@"; }

# A wheel's NCCL, where the system has none: in the folders Python looks into.
nccl_of_python() {
	local python
	for python in python3 python; do
		command -v "$python" >/dev/null || continue
		"$python" -c '
import glob, os, sys
for d in sys.path:
    for f in sorted(glob.glob(os.path.join(d, "nvidia", "*", "lib", "libnccl.so.2"))):
        print(f)
' 2>/dev/null | head -n 1
		return
	done
}

# Sets SHARDD_LIBNCCL, if there is one that the loader does not find by itself.
find_nccl() {
	[[ -z ${SHARDD_LIBNCCL-} ]] || return 0
	has_library libnccl.so.2 && return 0
	SHARDD_LIBNCCL=$(nccl_of_python)
	if [[ -n $SHARDD_LIBNCCL ]]; then
		export SHARDD_LIBNCCL
	else
		unset SHARDD_LIBNCCL
		return 1
	fi
}
