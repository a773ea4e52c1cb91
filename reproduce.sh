#!/usr/bin/env bash
# From a fresh clone to every figure, table and verdict this machine can make; needs bash 3.2 and Python 3.11 or newer.
#
# usage: ./reproduce.sh [paper | all | quick | gpu | duels] [--results DIR] [--out DIR]
#        ./reproduce.sh setup | test [PYTEST ARGUMENTS] | help
#
#   paper: the paper's figures and tables, a verdict on every claim of it (the default);  all: our own studies as well
#   quick: a smaller pass over the same road;  gpu: what CUDA devices can give;  duels: races on this machine
#   --results DIR: the records;  --out DIR: the report and its figures
#   setup: only install, and say what is ready;  test: the default test suite
#
#   PYTHON               the Python of a new environment; default: python3, python3.13, ...: the first that fits.
#                        Its torch is used and never replaced if 2.9 or newer; otherwise torch==2.13.0 is installed
#   RPBENCH_VENV         the environment's folder, new or existing; default: .venv beside this script
#   RPBENCH_TORCH        cpu: torch==2.13.0, even where another is there; cuda: the newest torch of the index
#   RPBENCH_TORCH_SPEC   another requirement for torch, for example torch==2.12.1
#   RPBENCH_TORCH_INDEX  the index URL torch is installed from; that of PyTorch's CPU wheels gets the small build
#   Mirrors, proxies and certificates: as pip is configured, or by uv's own variables, such as UV_DEFAULT_INDEX
set -euo pipefail
say() { printf 'reproduce.sh: %s\n' "$*" >&2; }
fail() { say "$*"; exit 1; }
refuse() { say "$*"; exit 2; }

main() {
  local verb=paper # also where only its options are given
  if [ $# -gt 0 ] && [[ $1 != --results* && $1 != --out* ]]; then verb=$1 && shift; fi
  case $verb in
    paper | all | quick | gpu | duels | test) ;;
    full) refuse "full is now called all: ./reproduce.sh all" ;;
    setup) [ $# -eq 0 ] || refuse "setup takes no arguments, got '$*'; see ./reproduce.sh --help" ;;
    help | -h | --help) sed -n '/^# usage/,/^set/s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" && return ;;
    *) refuse "unknown verb '$verb': choose paper, all, quick, gpu, duels, setup, test or help; see --help" ;;
  esac
  case ${RPBENCH_TORCH:-cpu} in
    cpu) SPEC=${RPBENCH_TORCH_SPEC:-torch==2.13.0} MIB=3072 ;;
    cuda) SPEC=${RPBENCH_TORCH_SPEC:-torch>=2.9} MIB=8192 ;;
    *) refuse "RPBENCH_TORCH=$RPBENCH_TORCH: choose cpu or cuda; RPBENCH_TORCH_SPEC names a certain one" ;;
  esac
  INDEX=${RPBENCH_TORCH_INDEX:-} ASKED=${RPBENCH_TORCH:-}${RPBENCH_TORCH_SPEC:-}${RPBENCH_TORCH_INDEX:-}
  [ -z "$ASKED" ] || ASKED=$(cksum <<<"$SPEC $INDEX") # a certain torch; a sum, because a URL may hold a password
  ROOT=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd -P)
  VENV=${RPBENCH_VENV:-$ROOT/.venv}
  [[ $VENV == /* ]] || VENV=$PWD/$VENV
  P=$VENV/bin/python STATE=$VENV/rpbench-setup LOG=$VENV/rpbench-setup/setup.log TOOL=$VENV/rpbench-setup/uv/bin
  cd -- "$ROOT"
  unset PYTHONDONTWRITEBYTECODE # containers set it; every process would then compile torch and all else again
  is_ready || set_up
  export MPLBACKEND=Agg PYTHONUTF8=1 WANDB_SILENT="${WANDB_SILENT:-true}"
  case $verb in
    setup) echo "ready: Python $(python_of "$P"), torch $(torch_of "$P"), in $VENV" ;;
    test) exec "$P" -m pytest "$@" ;;
    *) exec "$P" -m analysis.driver.reproduce "$verb" "$@" ;;
  esac
}

# The stamp is written last, so it stands only where a whole set-up of these very files and versions does.
is_ready() { [ "$(cat "$STATE/stamp" 2>/dev/null)" = "$(fingerprint)" ] && is_asked; }
is_asked() { [ -z "$ASKED" ] || [ "$ASKED" = "$(cat "$STATE/torch" 2>/dev/null)" ]; }
fingerprint() { { "$P" -VV; torch_of "$P"; echo "$ROOT"; cat pyproject.toml requirements.lock; } 2>/dev/null | cksum; }
# These two print a version, and fail where it is too old.
python_of() { ask "$1" 'print("%d.%d.%d" % sys.version_info[:3]); sys.exit(sys.version_info < (3, 11))'; }
torch_of() { ask "$1" 'import importlib.metadata as m; v = m.version("torch"); print(v)
sys.exit([int(n) for n in v.split(".")[:2]] < [2, 9])'; }
ask() { "$1" -c "import sys; $2" 2>/dev/null; }

set_up() {
  local started=$SECONDS torch
  [ -w "$ROOT" ] || fail "$ROOT cannot be written: all results go there; copy the clone to a folder of your own"
  find_python
  { mkdir -p "$STATE" && touch "$STATE/lock"; } 2>/dev/null || fail "$VENV cannot be written; see RPBENCH_VENV"
  exec 9>>"$STATE/lock" # locked as long as this script or what it starts lives; a file system may know no locks
  "$PY" -c 'import fcntl; fcntl.flock(9, fcntl.LOCK_EX | fcntl.LOCK_NB)' 2>/dev/null || {
    say "another set-up works in the same folder; waiting for it"
    "$PY" -c 'import fcntl, signal; signal.alarm(1800); fcntl.flock(9, fcntl.LOCK_EX)' 2>/dev/null || [ $? -eq 1 ] ||
      fail "no turn in half an hour: end the other one, or name another folder with RPBENCH_VENV"
  }
  is_ready || install_all
  exec 9>&-
  say "set up in $((SECONDS - started)) s"
}

find_python() { # PY: that of an environment which stands; otherwise the first that fits
  local version old=''
  if [ -e "$VENV/pyvenv.cfg" ] || [ -d "$VENV/conda-meta" ]; then
    if version=$(python_of "$P"); then PY=$P && return; fi
    [ -z "$version" ] || fail "$VENV holds Python $version: 3.11 or newer is needed; delete it, or set RPBENCH_VENV"
  elif [ ! -d "$STATE" ] && [ -n "$(ls -A "$VENV" 2>/dev/null)" ]; then
    fail "$VENV is neither empty nor a Python environment: name a new folder with RPBENCH_VENV"
  fi
  if [ -n "${PYTHON:-}" ]; then set -- "$PYTHON"; else set -- python3 python3.13 python3.12 python3.11; fi
  for PY; do
    if version=$(python_of "$PY"); then PY=$(command -v "$PY") && return; fi
    old=${old:-${version:+$PY is Python $version}}
  done
  fail "${old:-${PYTHON:-python3} does not run here}: rpbench needs Python 3.11 or newer; name one: PYTHON=/its/path"
}

install_all() {
  local free torch again=''
  if torch=$(torch_of "$PY") && [ -z "$ASKED" ]; then MIB=1536; else torch=''; fi
  free=$(df -Pk "$STATE" 2>/dev/null | awk 'NR == 2 { print int($4 / 1024) }') || free='' # not every disk says
  [ "${free:-$MIB}" -ge "$MIB" ] || fail "$free MiB are free for $VENV, $MIB MiB are needed; RPBENCH_VENV names another"
  if [ -e "$STATE/unfinished" ]; then again=--reinstall; fi # a killed uv leaves packages that look installed
  touch "$STATE/unfinished"
  get_uv
  if [ "$PY" != "$P" ]; then
    say "making $VENV with Python $(python_of "$PY")${torch:+ and its torch $torch}"
    logged "$TOOL/uv" venv --allow-existing ${torch:+--system-site-packages} --python "$PY" "$VENV" || explain "$VENV"
    # Where $PY is a virtual environment, that option shows what lies under it, not what is in it.
    [ -z "$torch" ] || ask "$PY" 'import site; print(*site.getsitepackages(), sep="\n")' \
      >"$(ask "$P" 'import site; print(site.getsitepackages()[0])')/rpbench-borrowed.pth"
  fi
  torch=$(torch_of "$P") || true
  if [ -z "$torch" ] || [ -e "$STATE/torch-half" ] || ! is_asked; then
    touch "$STATE/torch-half"
    again=--reinstall install "$SPEC" "$SPEC" ${INDEX:+--default-index "$INDEX"}
    echo "$ASKED" >"$STATE/torch" && rm "$STATE/torch-half"
  fi
  torch=$(torch_of "$P") || fail "$VENV holds torch $torch: 2.9 or newer is needed; see RPBENCH_TORCH_SPEC"
  install "the packages of requirements.lock" --no-deps --require-hashes -r requirements.lock
  install rpbench --no-deps --editable .
  logged "$P" -c 'import hydra, matplotlib, numba, numpy, pandas, pyarrow, pytest, torch, wandb' ||
    explain "packages that work here (delete $VENV and run this again)"
  logged "$P" -m compileall -q rpbench analysis baselines || true # a broken file says so when it is used
  fingerprint >"$STATE/stamp.new" && mv -f "$STATE/stamp.new" "$STATE/stamp" && rm "$STATE/unfinished"
}

get_uv() {
  unset PIP_CONSTRAINT UV_CONSTRAINT UV_SYSTEM_PYTHON # some containers set what fights the lock
  if ! "$TOOL/uv" --version >/dev/null 2>&1; then
    say "installing uv with $PY (log: $LOG)"
    rm -rf "$STATE/uv"
    logged "$PY" -m venv "$STATE/uv" || explain "uv: it takes Python's venv module (Debian, Ubuntu: python3-venv)"
    TMPDIR=$STATE/uv PIP_USER=0 PIP_INDEX_URL=${PIP_INDEX_URL:-${UV_DEFAULT_INDEX:-}} \
      logged "$TOOL/python" -m pip install --retries 1 --timeout 15 "uv>=0.9,<1" || explain uv
  fi
  eval "$("$TOOL/python" -m pip config list | "$TOOL/python" analysis/driver/uv_settings.py)"
}
install() { # what it is called, and words for uv
  say "installing $1 (log: $LOG)"
  # shellcheck disable=SC2086 # no option is no word
  logged "$TOOL/uv" pip install --python "$P" ${NO_INDEX:-} $again -b requirements.lock "${@:2}" || explain "$1"
}
logged() { # in the background, so that a signal ends the command at once and not only this script
  "$@" >"$LOG" 2>&1 </dev/null &
  trap 'kill $! && wait $! || true; say "interrupted; the same command goes on from here"; exit 130' INT TERM HUP
  wait $! && trap - INT TERM HUP
}
explain() { # pip and uv say a lot; the reader needs one sentence
  ! grep -qE 'error sending request|ConnectionError|[cC]onnection (broken|error)|Max retries|Timeout|SSLError' "$LOG" ||
    fail "no package index can be reached while installing $1: check the network, the proxy and the index" \
      "(PIP_INDEX_URL, UV_DEFAULT_INDEX, RPBENCH_TORCH_INDEX), and run this again (log: $LOG)"
  fail "could not install $1: $({ grep -E '^(ERROR|error)|cause:' "$LOG" || tail "$LOG"; } | tr -s '\n ' ' ')(log: $LOG)"
}

main "$@"
