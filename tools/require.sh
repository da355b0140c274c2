#!/bin/sh
# Checks that the machine has what a build needs; names what is missing.
python=$1
missing=0

say() {
    echo "tpu_dist needs $1." >&2
    echo "    $2" >&2
    missing=1
}

if ! command -v "$python" >/dev/null; then
    say "Python 3.11 or newer, but '$python' was not found" \
        "Install it, or name another one: make PYTHON=/path/to/python3.11"
elif ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
    say "Python 3.11 or newer, but '$python' is $("$python" -V 2>&1)" \
        "Install a newer one and name it: make PYTHON=/path/to/python3.11"
elif ! "$python" -c 'import ensurepip' 2>/dev/null; then
    say "Python's venv module" "Install it, on Debian and Ubuntu as python3-venv."
elif ! test -e "$("$python" -c 'import sysconfig; print(sysconfig.get_paths()["include"])')/Python.h"; then
    say "Python's header files" "Install them, on Debian and Ubuntu as python3-dev."
fi

if ! command -v "${CXX:-c++}" >/dev/null && ! command -v g++ >/dev/null; then
    say "a C++20 compiler (g++ 11 or newer)" "Install g++, on Debian and Ubuntu as g++."
elif ! echo 'int main() { return []<class T>(T x) { return x; }(0); }' |
    ${CXX:-c++} -std=c++20 -fsyntax-only -x c++ - 2>/dev/null; then
    say "a compiler with C++20, which '${CXX:-c++}' is not" \
        "Install g++ 11 or newer, and name it if it is not the default: make CXX=g++-13"
fi

if ! command -v cargo >/dev/null; then
    say "the Rust toolchain" "Install it with rustup (see the Rust home page), or your distribution's package."
else
    wanted=$(sed -n 's/^rust-version = "\(.*\)"/\1/p' Cargo.toml)
    have=$(rustc --version | cut -d' ' -f2 | cut -d- -f1)
    if [ "$(printf '%s\n%s\n' "$wanted" "$have" | sort -V | head -n1)" != "$wanted" ]; then
        say "Rust $wanted or newer, but rustc is $have" "Run: rustup update stable"
    fi
fi

exit $missing
