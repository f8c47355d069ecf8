# Set-up shared by mount/demo and tests/run; sourced, never run.
#
#   prepare ROOT demo|test
#
# Brings the Debian packages, the virtual environment ROOT/.venv and the Python packages that lmstorfs
# needs, each only where it is missing, with one line on what it does. What was installed is written
# down in .venv/.prepared, so that a second run costs a few milliseconds.
#
# TORCH_SPEC names the torch to install. The default is one exact release on purpose: where its CPU
# build lies on the machine it is taken, while a bare `torch` brings several GB for GPUs.
# PYTHON names the interpreter that the virtual environment is made from.

TORCH_SPEC=${TORCH_SPEC:-torch==2.13.0}

say() { printf 'set-up: %s\n' "$*"; }

fail() {
    printf 'set-up: %s\n' "$*" >&2
    exit 1
}

# The tests' extras cover the demo's.
extras_for() {
    case $1 in
        demo) echo torch ;;
        test) echo torch,test,bench ;;
        *) fail "'$1' is no kind of set-up; write demo or test" ;;
    esac
}

# Whether the machine has what Debian's package $1 is wanted for. Asked of the machine and not of dpkg:
# a compiler or an rsync that came another way is as good.
has() {
    case $1 in
        gcc) command -v cc >/dev/null || command -v gcc >/dev/null ;;
        fuse3) command -v fusermount3 >/dev/null ;;
        libfuse3-dev) pkg-config --exists fuse3 2>/dev/null ;;
        pkg-config) command -v pkg-config >/dev/null ;;
        libc6-dev) [ -e /usr/include/stdio.h ] ;;
        rsync) command -v rsync >/dev/null ;;
        iproute2) command -v ip >/dev/null && command -v tc >/dev/null ;;
        util-linux) command -v nsenter >/dev/null ;;
        attr) command -v setfattr >/dev/null ;;
        python3) command -v "${PYTHON:-python3}" >/dev/null ;;
        python3-venv) "${PYTHON:-python3}" -c 'import ensurepip, venv' 2>/dev/null ;;
        python3-dev) "${PYTHON:-python3}" -c 'import os, sysconfig
raise SystemExit(not os.path.exists(sysconfig.get_path("include") + "/Python.h"))' 2>/dev/null ;;
    esac
}

prepare_packages() {
    local wanted=(python3 python3-venv python3-dev gcc libc6-dev fuse3 pkg-config libfuse3-dev)
    local missing=() package log
    [ "$1" = test ] && wanted+=(rsync iproute2 util-linux attr)
    for package in "${wanted[@]}"; do
        has "$package" || missing+=("$package")
    done
    [ ${#missing[@]} -eq 0 ] && return
    if ! command -v apt-get >/dev/null; then
        fail "missing what Debian calls: ${missing[*]}; install these with your package manager"
    fi
    if [ "$(id -u)" -ne 0 ]; then
        fail "missing Debian packages; run as root: apt-get install ${missing[*]}"
    fi
    say "installing Debian packages: ${missing[*]}"
    log=$(mktemp)
    if ! { { apt-get -qq update || true; } &&
        DEBIAN_FRONTEND=noninteractive apt-get -qq -y --no-install-recommends install "${missing[@]}"; } \
        </dev/null >"$log" 2>&1; then
        cat "$log" >&2
        rm -f "$log"
        fail "apt-get could not install: ${missing[*]}"
    fi
    rm -f "$log"
    for package in "${missing[@]}"; do
        has "$package" || fail "$package is installed, and still not usable with ${PYTHON:-python3}"
    done
}

prepare_environment() {
    local root=$1 python=$1/.venv/bin/python
    if [ -x "$python" ] && "$python" -c 'import pip' 2>/dev/null; then
        return
    fi
    "${PYTHON:-python3}" -c 'import sys; raise SystemExit(sys.version_info < (3, 11))' ||
        fail "lmstorfs needs Python 3.11 or newer; name one with PYTHON=/path/to/python3.11"
    say "making the virtual environment $root/.venv"
    "${PYTHON:-python3}" -m venv --clear "$root/.venv"
}

# What the environment was made from: if any of it changes, it is brought up to date.
fingerprint() {
    { cat "$1/pyproject.toml" && echo "$1 $TORCH_SPEC"; } | sha256sum | cut -d ' ' -f 1
}

prepare() {
    local root=$1 kind=$2 extras stamp want pip
    extras=$(extras_for "$kind")
    want=$(fingerprint "$root")
    stamp=$root/.venv/.prepared
    prepare_packages "$kind"
    prepare_environment "$root"
    if grep -qsx -e "$want $extras" -e "$want $(extras_for test)" "$stamp"; then
        return
    fi
    pip=("$root/.venv/bin/python" -m pip -qq --disable-pip-version-check install)
    say "installing $TORCH_SPEC"
    if ! "${pip[@]}" "$TORCH_SPEC" </dev/null; then
        say "$TORCH_SPEC is not to be had here; taking the release that pip finds"
    fi
    say "installing lmstorfs[$extras]"
    "${pip[@]}" -e "$root[$extras]" </dev/null
    echo "$want $extras" >"$stamp"
}
