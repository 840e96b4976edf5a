#!/usr/bin/env bash
# Tests, measures and profiles the project on an AMD GPU, and packs what it learns into one archive to send back,
# first_run_<host>_<date>.tar.gz in the current folder. It should take about a quarter of an hour, once .venv is there.
#
# Usage: site/first_run_on_amd.sh [--dry-run] [-- OPTIONS]
#
#   --dry-run     print the command lines and do nothing
#   -- OPTIONS    options of tiny_llama_v3.py for all of its runs, such as those of a smaller model
#
# Each part has its own log and time limit; if one fails, the others go on. Nothing personal is in the archive beyond
# what profilers/doctor.sh prints, which are paths, and the name of the host: the parts see no variables of the
# environment but those of Python, of ROCm and of where programs and libraries are.
#
# PYTHON chooses the interpreter, which needs tests/requirements.txt; without it, .venv is made or completed first.
# Exit codes: 0 all parts passed, 1 one failed, 2 the request cannot be met, 130 interrupted (the logs are kept).
set -euo pipefail
GIVEN=${PYTHON:-}
# shellcheck source=profilers/python.sh
source "$(dirname "${BASH_SOURCE[0]}")/../profilers/python.sh"

DRY_RUN='' ARGUMENTS=()
while (($#)); do
    case $1 in
    --dry-run) DRY_RUN=1 && shift ;;
    -h | --help) sed -n '2,/^[^#]/{/^#/s/^# \{0,1\}//p}' "$0" && exit 0 ;;
    --) ARGUMENTS=("${@:2}") && break ;;
    *) die "unknown option $1: options of tiny_llama_v3.py go after -- (--help lists ours)" ;;
    esac
done

: "${KFD_DEVICE:=/dev/kfd}"
if [[ -z $DRY_RUN ]]; then
    [[ -r $KFD_DEVICE && -w $KFD_DEVICE ]] ||
        die "there is no AMD GPU, or no permission on $KFD_DEVICE: profilers/doctor.sh names the remedy"
    if [[ -z $GIVEN ]]; then
        make -C "$ROOT" .venv/dev.stamp || die "make failed, see above; or set PYTHON"
        PYTHON=$ROOT/.venv/bin/python
    fi
fi
TORCH_BUILD=$("$PYTHON" -c 'from profilers import rocm; print(rocm.torch_build())' 2>/dev/null || true)
[[ -n $DRY_RUN || $TORCH_BUILD == rocm* ]] ||
    die "the PyTorch of $PYTHON is built for ${TORCH_BUILD:-nothing, it is missing} (docs/rocm.md, Install)"
NAME=first_run_$(uname -n | tr -c '[:alnum:].\n-' _)_$(date +%Y%m%d_%H%M%S)
RESULT=$PWD/$NAME
[[ -n $DRY_RUN ]] || mkdir "$RESULT" || die "$RESULT cannot be made: change to another folder"

# Recordings may hold the environment, which may hold secrets.
for name in $(compgen -e); do
    case $name in
    PATH | HOME | TMPDIR | LANG | LC_* | LD_* | PYTHON* | VIRTUAL_ENV | CONDA_* | OMP_* | MPL* | XDG_CACHE_HOME) ;;
    AITER_* | AMD* | CUDA_* | GPU_* | HIP* | HSA_* | KFD_* | MIOPEN_* | PYTORCH_* | ROC* | TORCH* | TRITON_*) ;;
    *) declare +x "$name" ;; # it may be called like a variable of this script, which keeps its value
    esac
done

# Prints a command line so that it can be typed again.
quoted() {
    local line
    printf -v line '%q ' "$@"
    echo "${line% }"
}

# Passes a signal on to the running part, waits until it ends, and exits; a second Ctrl-C ends at once.
stop() {
    trap 'kill -KILL -- "-$CHILD" 2>/dev/null; exit 130' INT
    trap '' TERM HUP
    if [[ -n $CHILD ]]; then
        kill -s "$1" -- "-$CHILD" 2>/dev/null || true
        while kill -0 -- "-$CHILD" 2>/dev/null; do sleep 0.1; done
    fi
    echo "first_run_on_amd.sh: interrupted" >&2
    exit "$2"
}

# part NAME SECONDS COMMAND: runs a command with a time limit, its output in NAME.log, and adds a row to the table.
part() {
    local log=$RESULT/$1.log status=0 result begin=$SECONDS
    if [[ -n $DRY_RUN ]]; then
        quoted "${@:3}"
        return
    fi
    echo "--- $1, at most $2 s"
    quoted "${@:3}" >"$log"
    set -m # a process group, which timeout and stop signal as a whole
    timeout -k 15 "${@:2}" >>"$log" 2>&1 </dev/null &
    CHILD=$!
    set +m
    wait "$CHILD" || status=$?
    CHILD=
    case $status in
    0) result=passed ;;
    124) result="timed out" ;;
    *) result="failed ($status)" ;;
    esac
    [[ $result == passed ]] || FAILED=1
    ROWS+=("$(printf '%-16s %-11s %4s s  %s' "$1" "$result" $((SECONDS - begin)) "$log")")
}

# recording NAME SECONDS TOOL ARGUMENTS: without torch.profiler in the place of a tool that cannot be used.
recording() {
    part "$1" "$2" "$ROOT/get_$1.sh" --tool "$3" --output "$RESULT/$1" "${@:4}" -- "${ARGUMENTS[@]}"
}

CHILD='' FAILED='' ROWS=()
trap 'stop INT 130' INT
trap 'stop TERM 143' TERM
trap 'stop HUP 129' HUP
[[ -z $DRY_RUN ]] || quoted cd "$ROOT"
cd "$ROOT"
CHECK=("$PYTHON" tiny_llama_v3.py --check --num-steps 1 "${ARGUMENTS[@]}" --output-dir "$RESULT/runs")
part doctor 180 profilers/doctor.sh
part tests 600 "$PYTHON" -m pytest -p no:cacheprovider -n 4 -m "not slow" tests/core/test_kernels.py
part same_bits 180 "$PYTHON" -m pytest -p no:cacheprovider -rA tests/core/test_same_bits.py
part check_fp32 120 "${CHECK[@]}"
part check_bf16 120 "${CHECK[@]}" --use-amp
part stages 300 "$PYTHON" -m exercises.performance_debugging.replay --beyond --no-profile --num-steps 10 \
    --output "$RESULT/stages" -- "${ARGUMENTS[@]}"
part kernels 300 "$PYTHON" -m benchmarks.kernels --output-dir "$RESULT"
part steps 300 "$PYTHON" -m benchmarks.steps --sizes small medium --windows 3 --time-limit 200 --output-dir "$RESULT" \
    --rows triton "sdpa compile" "triton graph" "torch graph" "sdpa compile graph"
recording trace 120 rocprofv3
recording hotspots 120 rocprofv3
recording counters 180 rocprofv3 --pmc
recording rocprof_compute 300 rocprof-compute
recording rocprof_sys 180 rocprof-sys

[[ -z $DRY_RUN ]] || exit 0
# What is known to be bad about this GPU with this ROCm and Triton, and the remedies, stands beside the results.
KNOWN_BAD=$(grep -A 1 '^WARN  stack ' "$RESULT/doctor.log" || true)
printf '%s\n' '' "${ROWS[@]}" '' ${KNOWN_BAD:+"$KNOWN_BAD" ''} | tee "$RESULT/summary.txt"
tar -czf "$RESULT.tar.gz" -C "${RESULT%/*}" "$NAME" || die "the archive cannot be written; all is in $RESULT" 1
echo "Send this file: $RESULT.tar.gz"
[[ -z $FAILED ]] || exit 1
