#!/usr/bin/env bash
# From a fresh clone to every figure, table and verdict this machine can make; --help explains.
# Needs bash 3.2 and Python 3.11 or newer; whatever else it needs, it installs into one folder.
set -euo pipefail

MIN_PYTHON=3.11
MIN_TORCH=2.9
PINNED_TORCH=torch==2.13.0

usage() {
  cat <<EOF
usage: ./reproduce.sh [paper | all | quick] [--results DIR] [--out DIR]
       ./reproduce.sh setup | test [PYTEST ARGUMENTS] | help

  paper   the paper's figures and tables, and a verdict on every claim of it (the default; some minutes)
  all     our own studies as well: every experiment any machine can run, the duels among them (about two hours)
  quick   a smaller pass over the same road
          --results DIR: the records; --out DIR: the report and its figures
  setup   only install, and say what is ready
  test    the default test suite; further arguments go to pytest

Each verb first sets up an environment in .venv and keeps it: the second time nothing is installed. An
interrupted set-up goes on where it stopped. To start afresh, delete .venv.

A torch the chosen Python already has is used as it is and never replaced. Otherwise $PINNED_TORCH is
installed. On Linux the default package index may hold that version only as a CUDA build, several times
larger; set RPBENCH_TORCH_INDEX to the index URL of PyTorch's CPU wheels to get the CPU build.

  PYTHON               the Python a new environment is made with, $MIN_PYTHON or newer; default: the first
                       that fits among python3, python3.13, python3.12, python3.11
  RPBENCH_VENV         the environment's folder, new or existing; default: .venv beside this script
  RPBENCH_TORCH        cpu: $PINNED_TORCH, even where another torch is there already;
                       cuda: the newest torch>=$MIN_TORCH of the index
  RPBENCH_TORCH_SPEC   another requirement for torch, for example torch==2.12.1
  RPBENCH_TORCH_INDEX  the index URL torch is installed from
EOF
}

say() { printf 'reproduce.sh: %s\n' "$*" >&2; }
fail() { say "$*"; exit 1; }
refuse() { say "$*"; exit 2; }

main() {
  local verb=paper # also where only its options are given
  if [ $# -gt 0 ] && [[ $1 != --results* && $1 != --out* ]]; then
    verb=$1
    shift
  fi
  case $verb in
    paper | all | quick | test) ;;
    full) refuse "full is now called all: ./reproduce.sh all" ;;
    setup) [ $# -eq 0 ] || refuse "setup takes no arguments, got '$*'; see ./reproduce.sh --help" ;;
    help | -h | --help) usage; return ;;
    *) refuse "unknown verb '$verb': choose paper, all, quick, setup, test or help; see ./reproduce.sh --help" ;;
  esac
  locate
  choose_torch
  is_ready || set_up

  export MPLBACKEND=Agg PYTHONUTF8=1 WANDB_SILENT="${WANDB_SILENT:-true}"
  case $verb in
    paper | all | quick) exec "$P" -m analysis.driver.reproduce "$verb" "$@" ;;
    test) exec "$P" -m pytest "$@" ;;
    setup) echo "ready: Python $(version_of "$P"), torch $(torch_version), in $VENV" ;;
  esac
}

locate() {
  VENV=${RPBENCH_VENV:-}
  case $VENV in '' | /*) ;; *) VENV=$PWD/$VENV ;; esac
  ROOT=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd -P)
  cd -- "$ROOT"
  VENV=${VENV:-$ROOT/.venv}
  P=$VENV/bin/python
  STATE=$VENV/rpbench-setup
  LOG=$STATE/pip.log
  SCRATCH=$STATE/tmp
}

# SPEC and INDEX say what torch to install; REQUEST is empty unless the user asked for a certain one.
choose_torch() {
  case ${RPBENCH_TORCH:-cpu} in
    cpu) SPEC=$PINNED_TORCH NEEDED_GIB=3 ;;
    cuda) SPEC="torch>=$MIN_TORCH" NEEDED_GIB=8 ;;
    *) refuse "RPBENCH_TORCH=$RPBENCH_TORCH: choose cpu or cuda; RPBENCH_TORCH_SPEC names a certain one" ;;
  esac
  SPEC=${RPBENCH_TORCH_SPEC:-$SPEC}
  INDEX=${RPBENCH_TORCH_INDEX:-}
  REQUEST=
  if [ -n "${RPBENCH_TORCH:-}${RPBENCH_TORCH_SPEC:-}$INDEX" ]; then
    REQUEST=$(printf '%s' "$SPEC $INDEX" | cksum) # a sum, because an index URL may hold a password
  fi
}

# The stamp is written last, so it stands only where a whole set-up for these very files and versions does.
is_ready() {
  local stamped='' request=''
  [ -x "$P" ] && [ -f "$STATE/stamp" ] || return 1
  { read -r stamped && read -r request; } <"$STATE/stamp" || true
  [ "$stamped" = "$(fingerprint)" ] || return 1
  [ -z "$REQUEST" ] || [ "$REQUEST" = "$request" ]
}

fingerprint() {
  "$P" -c '
import hashlib, pathlib, sys
from importlib.metadata import version
root = pathlib.Path(sys.argv[1])
files = [(root / name).read_text() for name in ("pyproject.toml", "constraints.txt")]
print(hashlib.sha256("\0".join([sys.version, version("torch"), str(root), *files]).encode()).hexdigest())
' "$ROOT" 2>/dev/null
}

set_up() {
  local started=$SECONDS
  check_folder
  if environment_stands; then PY=$P; else PY=$(find_python); fi
  lock
  if is_ready; then # another run did it while this one waited
    exec 9>&-
    return
  fi
  rm -rf "$STATE/stamp" "$SCRATCH" # what an interrupted set-up left
  prepare_pip
  check_space
  if environment_stands; then forget_half_installed; else make_environment; fi
  touch "$STATE/unfinished"
  repair_pip
  install_torch
  install_rest
  check_imports
  printf '%s\n%s\n' "$(fingerprint)" "$REQUEST" >"$STATE/stamp.new"
  mv -f "$STATE/stamp.new" "$STATE/stamp"
  rm -rf "$STATE/unfinished" "$SCRATCH"
  exec 9>&-
  say "set up in $((SECONDS - started)) s"
}

# ---- the folder, the Python and the environment

check_folder() {
  [ -w "$ROOT" ] || fail "$ROOT cannot be written: the installation and all results go there;" \
    "copy the clone to a folder of your own"
  if [ -e "$VENV" ] && [ ! -e "$VENV/pyvenv.cfg" ] && [ ! -d "$STATE" ] && [ ! -d "$VENV/conda-meta" ] \
    && [ -n "$(ls -A "$VENV" 2>/dev/null)" ]; then
    fail "$VENV is neither empty nor a Python environment: nothing is installed there;" \
      "name a new folder with RPBENCH_VENV"
  fi
}

find_python() {
  local candidate version seen=
  if [ -n "${PYTHON:-}" ]; then set -- "$PYTHON"; else set -- python3 python3.13 python3.12 python3.11; fi
  for candidate; do
    version=$(version_of "$candidate") || continue
    if at_least "$MIN_PYTHON" "$version"; then
      printf '%s\n' "$candidate"
      return
    fi
    seen=${seen:-"$candidate is Python $version"}
  done
  [ -n "$seen" ] || seen="${PYTHON:-python3} does not run here"
  fail "$seen: rpbench needs Python $MIN_PYTHON or newer; install one, or name it:" \
    "PYTHON=/path/to/python3.12 ./reproduce.sh"
}

version_of() { "$1" -c 'import sys; print("%d.%d.%d" % sys.version_info[:3])' 2>/dev/null; }

# at_least 3.11 3.12.1: compares the first two numbers.
at_least() {
  local least_minor=${1#*.} minor=${2#*.}
  minor=${minor%%[!0-9]*}
  [ "${2%%.*}" -gt "${1%%.*}" ] || { [ "${2%%.*}" -eq "${1%%.*}" ] && [ "$minor" -ge "$least_minor" ]; }
}

environment_stands() {
  local version
  [ ! -e "$STATE/making" ] && version=$(version_of "$P") || return 1
  at_least "$MIN_PYTHON" "$version" || fail "$VENV holds Python $version: rpbench needs Python $MIN_PYTHON" \
    "or newer; delete that folder, or name another with RPBENCH_VENV"
}

# One set-up at a time. The lock belongs to open file 9: it lives as long as this script or a pip it started.
lock() {
  { mkdir -p "$STATE" && : >>"$STATE/lock"; } 2>/dev/null || fail "$VENV cannot be written:" \
    "the environment goes there; name another folder with RPBENCH_VENV"
  exec 9>>"$STATE/lock"
  "$PY" -c '
import fcntl, signal, sys
signal.signal(signal.SIGINT, signal.SIG_DFL)
try:
    fcntl.flock(9, fcntl.LOCK_EX | fcntl.LOCK_NB)
except BlockingIOError:
    print("reproduce.sh: another set-up works in the same folder; waiting for it", file=sys.stderr)
    signal.alarm(1800)
    fcntl.flock(9, fcntl.LOCK_EX)
except OSError:
    pass  # a file system without locks
' || fail "another set-up holds $VENV: only one may work there;" \
    "end it, or name another folder with RPBENCH_VENV"
}

check_space() {
  local free_kib needed_kib=$((NEEDED_GIB * 1024 * 1024))
  if [ -e "$STATE/torch-constraint.txt" ]; then
    needed_kib=$((512 * 1024)) # an update of what is there
  elif torch_version >/dev/null; then
    needed_kib=$((1536 * 1024))
  fi
  free_kib=$(df -Pk "$STATE" 2>/dev/null | awk 'NR == 2 { print $4 }') || return 0
  case $free_kib in '' | *[!0-9]*) return 0 ;; esac # this file system does not say
  [ "$free_kib" -ge "$needed_kib" ] || fail "$((free_kib / 1024)) MiB are free for $VENV: the set-up needs" \
    "$((needed_kib / 1024)) MiB; free some, or name a folder on another disk with RPBENCH_VENV"
}

make_environment() {
  local torch='' options=''
  "$PY" -c 'import ensurepip, venv' 2>/dev/null || fail "$PY has no venv module: the environment is made" \
    "with it; install it (Debian, Ubuntu: the package python3-venv), or name another Python with PYTHON"
  if [ -z "$REQUEST" ]; then
    torch=$("$PY" -c 'import torch; print(torch.__version__)' 2>/dev/null) || torch=''
  fi
  if [ -n "$torch" ] && ! at_least "$MIN_TORCH" "$torch"; then
    say "leaving the torch $torch of $PY alone: $MIN_TORCH is the oldest that serves"
    torch=''
  fi
  [ -z "$torch" ] || options=--system-site-packages
  say "making $VENV with Python $(version_of "$PY")${torch:+ and its torch $torch}; this takes some minutes"
  touch "$STATE/making" "$STATE/unfinished"
  remove_dead_links
  # shellcheck disable=SC2086 # no option is no word
  run_logged "$PY" -m venv $options "$VENV" || fail_with_log "could not make $VENV"
  [ -z "$torch" ] || borrow_packages
  rm -f "$STATE/making"
}

# venv keeps links to a Python that is gone.
remove_dead_links() {
  local link
  for link in "$VENV"/bin/python*; do
    if [ -L "$link" ] && [ ! -e "$link" ]; then rm -f "$link"; fi
  done
}

# Where $PY is a virtual environment, --system-site-packages shows what lies under it, not what is in it.
borrow_packages() {
  local site
  site=$("$P" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  "$PY" -c '
import sys, sysconfig
if sys.prefix != sys.base_prefix:
    print(*sorted({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}), sep="\n")
' >"$site/rpbench-borrowed.pth"
}

# ---- packages

prepare_pip() {
  export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1 PIP_PROGRESS_BAR=off PIP_USER=0
  # In the environment too, because a pip that builds a package starts another pip.
  export PIP_RETRIES=1 PIP_TIMEOUT=15 PIP_DEFAULT_TIMEOUT=15
  unset PIP_CONSTRAINT # some containers set one that fights ours; torch is held in place below
}

# A pip that was killed leaves packages which look installed. Forget them; pip then writes them whole.
forget_half_installed() {
  [ -e "$STATE/unfinished" ] || return 0
  "$P" -c '
import pathlib, shutil, sys, sysconfig
from importlib.metadata import PathDistribution
since = pathlib.Path(sys.argv[1]).stat().st_mtime
for info in pathlib.Path(sysconfig.get_path("purelib")).glob("*.dist-info"):
    if info.stat().st_mtime >= since - 1:
        files = PathDistribution(info).files  # None without a RECORD, which pip writes last
        if files is None or not all(f.locate().exists() for f in files if f.suffix != ".pyc"):
            shutil.rmtree(info)
' "$STATE/unfinished"
}

repair_pip() {
  local version
  if ! version=$(pip_version); then
    say "pip is missing or broken; putting it back"
    "$P" -c '
import pathlib, shutil, sysconfig
for part in ("pip", "pip-*.dist-info", "~ip*"):
    for path in pathlib.Path(sysconfig.get_path("purelib")).glob(part):
        shutil.rmtree(path)
'
    run_logged "$P" -m ensurepip --default-pip || fail_with_log "could not put pip into $VENV"
    version=$(pip_version)
  fi
  # The first pip that knows both --group and --build-constraint.
  at_least 25.3 "$version" || pip_install "a newer pip" "pip>=25.3"
}

pip_version() { "$P" -c 'import pip._internal.cli.main, pip; print(pip.__version__)' 2>/dev/null; }

torch_version() { "$P" -c 'from importlib.metadata import version; print(version("torch"))' 2>/dev/null; }

# torch comes first and is then held, because a plain install of the rest would fetch the newest CUDA build.
install_torch() {
  local version
  if ! torch_serves; then
    # One that this script installed makes way; another is pip's to judge.
    if [ -e "$STATE/torch-request" ]; then
      run_logged "$P" -m pip uninstall --yes torch || fail_with_log "could not remove the torch of $VENV"
    fi
    pip_install "$SPEC" --upgrade "$SPEC" ${INDEX:+--index-url "$INDEX"}
    printf '%s\n' "$REQUEST" >"$STATE/torch-request"
    [ -n "$REQUEST" ] || report_cuda
  fi
  version=$(torch_version)
  at_least "$MIN_TORCH" "$version" || fail "$VENV holds torch $version: rpbench needs $MIN_TORCH or newer;" \
    "name a newer one with RPBENCH_TORCH_SPEC, or another environment with RPBENCH_VENV"
}

report_cuda() {
  if "$P" -c 'import torch; raise SystemExit(torch.version.cuda is None)' 2>/dev/null; then
    say "the index holds $SPEC as a CUDA build; it serves, and --help says how to get the smaller CPU build"
  fi
}

# There is a torch, and either nobody asked for a certain one or this is it.
torch_serves() {
  torch_version >/dev/null || return 1
  [ -z "$REQUEST" ] || [ "$REQUEST" = "$(cat "$STATE/torch-request" 2>/dev/null)" ]
}

install_rest() {
  printf 'torch==%s\n' "$(torch_version)" >"$STATE/torch-constraint.txt"
  pip_install "the other packages" -c constraints.txt -c "$STATE/torch-constraint.txt" \
    --build-constraint constraints.txt --editable . --group dev
}

check_imports() {
  run_logged "$P" -c 'import hydra, matplotlib, numba, numpy, pandas, pyarrow, pytest, torch, wandb' \
    || fail_with_log "installed, but not usable: delete $VENV and run this again"
}

pip_install() {
  local what=$1
  shift
  say "installing $what (log: $LOG)"
  run_logged "$P" -m pip install --retries 1 --timeout 15 "$@" || explain_pip "$what"
}

# pip says a lot; the reader needs one sentence. The order matters: a full disk can break a connection too.
explain_pip() {
  local unreachable='connection broken|[cC]onnection error|Max retries exceeded|NewConnectionError'
  unreachable="$unreachable|ConnectTimeout|ReadTimeout|NameResolutionError|ProxyError|SSLError"
  unreachable="$unreachable|not a trusted or secure host" # what pip says of plain http
  if grep -qE 'No space left on device|Errno 28|Disk quota exceeded' "$LOG"; then
    fail "the disk is full while installing $1: $VENV and the cache of pip need room;" \
      "free some and run this again, it goes on from here (log: $LOG)"
  elif grep -qE 'Read-only file system|Permission denied' "$LOG"; then
    fail_with_log "pip may not write while installing $1"
  elif grep -qE "$unreachable" "$LOG"; then
    fail "no package index can be reached while installing $1: the set-up downloads packages; check the" \
      "network (or PIP_INDEX_URL, RPBENCH_TORCH_INDEX, the proxy) and run this again, it goes on from here" \
      "(log: $LOG)"
  fi
  fail_with_log "pip could not install $1"
}

fail_with_log() {
  local last
  last=$(grep -E '^(ERROR|error|[A-Za-z.]*Error)' "$LOG" | head -n 1 || true)
  [ -n "$last" ] || last=$(grep -v '^[[:space:]]*$' "$LOG" | tail -n 1 || true)
  fail "$1 (log: $LOG)${last:+; it says: $last}"
}

# In the background, so that a signal ends the command at once and not only this script. What pip unpacks
# stays in the environment: on the disk whose space was checked, and found again when pip was killed.
run_logged() {
  local child
  mkdir -p "$SCRATCH"
  TMPDIR=$SCRATCH "$@" >"$LOG" 2>&1 </dev/null &
  child=$!
  trap 'kill "$child"; say "interrupted; the same command goes on from here"; exit 130' INT TERM HUP
  wait "$child" || { trap - INT TERM HUP; return 1; }
  trap - INT TERM HUP
}

main "$@"
