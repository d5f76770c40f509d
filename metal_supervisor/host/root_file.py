"""Installation of a file as root, without root reading anything that its user, or an engine of that user, can write.

The content comes on standard input, and its digest as an argument: a command that is cut off halfway installs nothing.
The new file is made beside the target and renamed, so that it replaces it at once, in a directory that only root can
change, as all above it: elsewhere a name could become a link between two steps. BSD's install(1) refuses /dev/stdin.
"""

from __future__ import annotations

import hashlib

SHELL = "/bin/sh"
NAME = "metal-supervisor"
"""$0, which begins the shell's own messages."""
SUDOERS = "sudoers"
SCRIPT = """\
set -euf
PATH=/usr/bin:/bin:/usr/sbin:/sbin
umask 077
fail() { echo "$1" >&2; exit 1; }
roots_alone() (
  cd -P "$1"
  me=$(id -u) sticky=
  while [ -n "$(find . -prune \\( -user 0 -o -user "$me" \\) \\( $sticky ! -perm -020 ! -perm -002 \\))" ]; do
    [ "$(pwd)" != / ] || exit 0
    cd ..
    sticky='-perm -1000 -o'
  done
  fail "$(pwd) can be changed by others than root: chown root and chmod go-w make it root's"
)
path=$1 mode=$2 digest=$3 kind=$4
name=${path##*/}
[ -d "${path%/*}/" ] || (umask 022; mkdir -p "${path%/*}/")
roots_alone "${path%/*}/"
cd -P "${path%/*}/"
[ ! -d "$name" ] || fail "$path is a directory"
new=$(mktemp "./.$name.XXXXXX")
trap 'rm -f "$new"' EXIT
trap 'exit 1' HUP INT TERM
cat >"$new"
if command -v sha256sum >/dev/null; then sum=$(sha256sum <"$new"); else sum=$(shasum -a 256 <"$new"); fi
[ "${sum%% *}" = "$digest" ] || fail "what arrived for $path is not what was sent; nothing was changed"
[ "$kind" != sudoers ] || visudo -cf "$new" >&2 || fail "visudo refuses it; nothing was changed"
chown "$(id -u):$(id -g)" "$new"
chmod "$mode" "$new"
mv -f "$new" "$name"
"""


def command(path: str, mode: int, content: bytes, *, sudoers: bool = False) -> list[str]:
    """Arguments of a shell that reads the content and puts it in place. `sudoers`: only if visudo accepts it."""
    digest = hashlib.sha256(content).hexdigest()
    return [SHELL, "-c", SCRIPT, NAME, path, f"{mode:04o}", digest, SUDOERS if sudoers else ""]
