# shellcheck shell=bash
# Sourced by the profiling scripts: their options, the choice of the tool, the folder of a result, running and logging.
# parse_arguments, choose_tool and start_result set TOOL, RESULT (a folder) and PROGRAM (an array).
SCRIPT=$(basename "$0")

note() { printf '%s\n' "$*"; }

# die [status] message
die() {
    local status=2
    if [[ $1 =~ ^[0-9]+$ ]]; then
        status=$1
        shift
    fi
    printf '%s: error: %s\n' "$SCRIPT" "$*" >&2
    exit "$status"
}

pwd -P >/dev/null 2>&1 || die "the current folder was deleted: change to another one"
ROOT=$(CDPATH='' cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
: "${ROCM_PATH:=/opt/rocm}" "${KFD_DEVICE:=/dev/kfd}"
PATH=$PATH:$ROCM_PATH/bin

# ----------------------------------------------------------------------------------------------------------------------
# Python

# Sets PYTHON, an absolute path: as requested, of the project, or of the system. Fails if there is none.
choose_python() {
    local own=$ROOT/.venv/bin/python
    if [[ -z ${PYTHON:-} ]]; then
        PYTHON=python3
        if [[ -x $own ]]; then PYTHON=$own; fi
    fi
    # rocprof-compute of ROCm 6 does not search the PATH and changes the folder.
    local path
    path=$(command -v "$PYTHON") || return
    [[ $path == /* ]] || path=$PWD/$path
    PYTHON=$path
}

# module_command NAME ARGUMENTS: sets COMMAND, which runs profilers/NAME.py from any folder.
module_command() {
    COMMAND=(env "PYTHONPATH=$ROOT${PYTHONPATH:+:$PYTHONPATH}" "$PYTHON" -m "profilers.$1" "${@:2}")
}

# Prints a command line so that it can be typed again.
quoted() {
    local line
    printf -v line '%q ' "$@"
    echo "${line% }"
}

# ----------------------------------------------------------------------------------------------------------------------
# Options

# The comment at the top of a script is its help.
# shellcheck disable=SC2153  # the script that sources this file names its TOOLS
print_help() {
    sed -n '2,/^[^#]/{/^#/s/^# \{0,1\}//p}' "$0"
    cat <<TXT

  --output DIR   where the result goes; must be new or empty
  --stage N      profile a stage of the workshop (tiny_llama_v3.py --list-stages)
  --tool NAME    $(IFS='|' && echo "${TOOLS[*]}|auto"); auto, the default, takes the first that works here
  --dry-run      print the command lines and do nothing
  -- OPTIONS     options of tiny_llama_v3.py, after --batch-size 8 --seq-len 128 --num-steps $STEPS; behind a second --
                 those of the profiler itself

PYTHON chooses the interpreter, ROCM_PATH the ROCm installation. Exit codes: 0 done, 1 nothing was recorded or a part is
missing, 2 the request cannot be met, 130 interrupted; otherwise that of the program or the profiler.
TXT
}

# parse_arguments "$@": a script sets TOOLS before, and handles options of its own in take_option, which sets CONSUMED
# to the number of words that it used.
parse_arguments() {
    : "${TOOLS:?the script that sources this file names its tools}"
    OUTPUT='' STAGE='' DRY_RUN='' TOOL=auto ARGUMENTS=() TOOL_ARGUMENTS=()
    : "${STEPS:=10}"
    while (($#)); do
        case $1 in
        --output | --stage | --tool)
            (($# > 1)) && [[ $2 != --* ]] || die "$1 needs a value (--help lists the options)"
            case $1 in
            --output) OUTPUT=$2 ;;
            --stage) STAGE=$2 ;;
            --tool) TOOL=$2 ;;
            esac
            shift 2
            ;;
        --dry-run) DRY_RUN=1 && shift ;;
        -h | --help) print_help && exit 0 ;;
        --)
            shift
            while (($#)) && [[ $1 != -- ]]; do ARGUMENTS+=("$1") && shift; done
            (($# < 2)) || TOOL_ARGUMENTS=("${@:2}")
            break
            ;;
        *)
            CONSUMED=0
            if declare -F take_option >/dev/null; then take_option "$@"; fi
            ((CONSUMED)) || die "unknown option $1: options of tiny_llama_v3.py go after -- (--help lists ours)"
            shift "$CONSUMED"
            ;;
        esac
    done
    [[ -z $STAGE || $STAGE =~ ^[1-9][0-9]*$ ]] || die "--stage $STAGE is not a number: tiny_llama_v3.py --list-stages"
    [[ -z $STAGE ]] || compgen -G "$ROOT/exercises/performance_debugging/v3_stage${STAGE}_*" >/dev/null ||
        die "there is no --stage $STAGE: tiny_llama_v3.py --list-stages names those that there are"
    REQUESTED=$TOOL
    [[ " ${TOOLS[*]} auto " == *" $TOOL "* ]] || die "--tool $TOOL: choose one of ${TOOLS[*]} auto"
    choose_python || die "there is no Python at PYTHON=$PYTHON: run make, or give another"
}

# ----------------------------------------------------------------------------------------------------------------------
# The tool. An obstacle is the rest of a sentence about a tool, with reason and remedy, or empty.

# rocm_obstacle EXECUTABLE
rocm_obstacle() {
    local release
    if ! command -v "$1" >/dev/null; then
        echo "is not installed or not on PATH (module load rocm, or add the bin folder of ROCm 6.3 or newer)"
        return
    fi
    release=$(rocm_release "$1")
    if ((release < 603)); then
        echo "is of ROCm $(dotted "$release"), and lacks options that are used here: load ROCm 6.3 or newer"
    elif [[ ! -e $KFD_DEVICE ]]; then
        echo "finds no AMD GPU: $KFD_DEVICE does not exist (a container needs --device=/dev/kfd --device=/dev/dri)"
    elif [[ ! -r $KFD_DEVICE || ! -w $KFD_DEVICE ]]; then
        echo "has no permission on $KFD_DEVICE: join its group with sudo usermod -aG $(stat -c %G "$KFD_DEVICE") \$USER" \
            "and log in again (a container needs --group-add $(stat -c %g "$KFD_DEVICE"))"
    elif [[ $TORCH_BUILD != rocm* ]]; then
        echo "would record nothing: the PyTorch of $PYTHON is built for ${TORCH_BUILD:-nothing, it is missing}" \
            "(docs/rocm.md, Install, names the three ways to one for ROCm)"
    fi
}

ncu_obstacle() {
    if ! command -v nvidia-smi >/dev/null || ! nvidia-smi -L >/dev/null 2>&1; then
        echo "finds no NVIDIA GPU: nvidia-smi lists none"
    elif ! command -v ncu >/dev/null; then
        echo "is not installed or not on PATH (install Nsight Compute, or add CUDA's bin folder)"
    elif [[ $TORCH_BUILD != cuda* ]]; then
        echo "would record nothing: the PyTorch of $PYTHON is built for ${TORCH_BUILD:-nothing, it is missing}"
    fi
}

obstacle_of() {
    case $1 in
    torch) ;;
    ncu) ncu_obstacle ;;
    rocprof-sys) rocm_obstacle rocprof-sys-sample ;;
    *) rocm_obstacle "$1" ;;
    esac
}

# rocm_release EXECUTABLE: 604, 700, ... of the installation of a tool. Without ROCm a dry run uses ROCM_VERSION.
rocm_release() {
    local tool path version=''
    if ! command -v "$1" >/dev/null; then
        version=${ROCM_VERSION:-7.0}
    fi
    for tool in "$1" rocprofv3; do # a link may lead from bin into libexec, or into a folder of the tool's own
        path=$(command -v "$tool") || continue
        path=$(readlink -f "$path")
        while [[ -z $version && $path == /*/* ]]; do
            path=$(dirname "$path")
            if [[ -r $path/.info/version ]]; then read -r version <"$path/.info/version" || true; fi
        done
    done
    [[ -n $version ]] || version=$(rocprofv3 --version 2>/dev/null | sed -n 's/^ *rocm_version: *//p') || true
    if [[ -z $version && -r $ROCM_PATH/.info/version ]]; then read -r version <"$ROCM_PATH/.info/version" || true; fi
    if [[ ! $version =~ ^[0-9]+\.[0-9]+ ]]; then
        case $(rocprofv3 --help 2>/dev/null) in
        *rocpd*) version=7.0 ;;
        *--pmc*) version=6.4 ;;
        *) version=6.2 ;;
        esac
    fi
    [[ $version =~ ^([0-9]+)\.([0-9]+) ]]
    echo $((BASH_REMATCH[1] * 100 + BASH_REMATCH[2]))
}

# 7.0 for 700
dotted() { echo "$(($1 / 100)).$(($1 % 100))"; }

# Sets TOOL, and RELEASE (major * 100 + minor) for ROCm's tools, and prints the tool as the first line of a script.
choose_tool() {
    local candidate obstacle reason=''
    module_command torch_build
    TORCH_BUILD=$("${COMMAND[@]}" 2>/dev/null) || true
    if [[ $TOOL == auto ]]; then
        for candidate in "${TOOLS[@]}"; do
            obstacle=$(obstacle_of "$candidate")
            [[ -n $obstacle ]] || break
            reason+="${reason:+; }$candidate $obstacle"
        done
        TOOL=$candidate
    else
        obstacle=$(obstacle_of "$TOOL")
        [[ -z $obstacle || -n $DRY_RUN ]] || die "--tool $TOOL cannot be used: it $obstacle"
    fi
    if [[ $TOOL == torch && ${#TOOL_ARGUMENTS[@]} -gt 0 ]]; then
        die "torch.profiler takes no options of its own: leave out \"${TOOL_ARGUMENTS[*]}\"${reason:+ ($reason)}"
    fi
    case $TOOL in
    torch) note "Tool: torch.profiler, through tiny_llama_v3.py --profile${reason:+ ($reason)}" ;;
    ncu) note "Tool: ncu, NVIDIA Nsight Compute${reason:+ ($reason)}" ;;
    *)
        RELEASE=$(rocm_release "${TOOL/rocprof-sys/rocprof-sys-sample}")
        note "Tool: $TOOL of ROCm $(dotted "$RELEASE")"
        warn_of_second_rocm
        ;;
    esac
}

# A PyTorch wheel may contain a ROCm of its own.
warn_of_second_rocm() {
    if [[ $TORCH_BUILD == rocm* && $TORCH_BUILD != "rocm $(dotted "$RELEASE")" ]]; then
        note "Note: two ROCm installations. PyTorch brings ROCm ${TORCH_BUILD#rocm }, $TOOL is of $(dotted "$RELEASE"):" \
            "it may record nothing, or crash. If so, load the ROCm ${TORCH_BUILD#rocm } module, or use AMD's PyTorch" \
            "container."
    fi
}

# fall_back_to_torch REASON STATUS: with --tool auto; otherwise the script ends.
fall_back_to_torch() {
    [[ $REQUESTED == auto ]] || fail "$2" "$1"
    note "Tool: torch.profiler from here on ($1)"
    TOOL=torch
}

# ----------------------------------------------------------------------------------------------------------------------
# The result: a folder with a file INCOMPLETE until it is finished, which is renamed to DIR.failed if a step fails.

# Sets PROCESS, the number of this process, and PROCESSES, if started by torchrun, srun, Open MPI or MPICH.
find_launcher() {
    PROCESS=0 PROCESSES=1
    local names number count
    for names in RANK:WORLD_SIZE SLURM_PROCID:SLURM_STEP_NUM_TASKS OMPI_COMM_WORLD_RANK:OMPI_COMM_WORLD_SIZE \
        PMI_RANK:PMI_SIZE; do
        number=${names%:*} count=${names#*:}
        if [[ -n ${!number:-} ]] && ((${!count:-1} > 1)); then
            PROCESS=${!number} PROCESSES=${!count}
            return
        fi
    done
}

# start_result traces/trace: sets RESULT, PROGRAM (the run to be profiled) and, for several processes, TOGETHER, a line
# that explains how to read the results of all.
start_result() {
    local number=0 base
    find_launcher
    base=$1_$(date +%Y%m%d_%H%M%S)
    ((PROCESSES == 1)) || [[ -n $OUTPUT ]] || die "$PROCESSES processes need one folder for all: name it by --output"
    RESULT=${OUTPUT:-$base}
    while [[ -z $OUTPUT && (-e $RESULT || -e $RESULT.failed) ]]; do
        number=$((number + 1)) RESULT=${base}_$number
    done
    # Absolute and without "..", which rocprof-compute refuses.
    RESULT=$(realpath -m -- "$RESULT")
    TOGETHER=
    if ((PROCESSES > 1)); then
        # shellcheck disable=SC2034  # the scripts print it
        TOGETHER=$(suggestion "All $PROCESSES processes in one table" hotspots "$RESULT")
        RESULT=$RESULT/rank_$PROCESS
    fi
    if [[ -e $RESULT && ! -d $RESULT || -n $(ls -A "$RESULT" 2>/dev/null) ]]; then
        die "--output $OUTPUT exists and is not an empty folder: give a new one"
    fi
    PROGRAM=("$PYTHON" "$ROOT/tiny_llama_v3.py" --batch-size 8 --seq-len 128 --num-steps "$STEPS")
    PROGRAM+=(${STAGE:+--stage "$STAGE"} --output-dir "$RESULT/run" ${ARGUMENTS[@]+"${ARGUMENTS[@]}"})
    [[ -z $DRY_RUN ]] || return 0
    rm -rf "$RESULT.failed"
    # shellcheck disable=SC2015  # one message for both
    mkdir -p "$RESULT" 2>/dev/null && touch "$RESULT/INCOMPLETE" "$RESULT/log.txt" 2>/dev/null ||
        die "--output $RESULT cannot be written to: give another folder"
    LOG=$RESULT/log.txt
    CHILD=
    trap 'stop INT 130' INT
    trap 'stop TERM 143' TERM
    trap 'stop HUP 129' HUP
    trap 'set_aside' EXIT
}

# begin_result traces/trace ARGUMENTS: calls these three functions.
begin_result() {
    parse_arguments "${@:2}"
    choose_tool
    start_result "$1"
}

# Runs on an exit before finish_result.
set_aside() {
    [[ -d ${RESULT:-} ]] || return 0
    rm -f "$RESULT/INCOMPLETE"
    mv "$RESULT" "$RESULT.failed"
    note "What there is, with the log, is in $RESULT.failed" >&2
}

# Passes a signal on to the running program, waits until it ends, and exits; a second Ctrl-C ends at once.
stop() {
    trap 'kill -KILL -- "-$CHILD" 2>/dev/null; exit 130' INT
    trap '' TERM HUP
    if [[ -n $CHILD ]]; then
        kill -s "$1" -- "-$CHILD" 2>/dev/null || true
        while kill -0 -- "-$CHILD" 2>/dev/null; do sleep 0.1; done
    fi
    printf '%s: interrupted\n' "$SCRIPT" >&2
    exit "$2"
}

# Prints a command line, runs it in the folder IN if that is set, and logs both; returns its status.
# It has a process group of its own, which stop signals as a whole; tee ends after the others.
run_logged() {
    local line status=0
    line="${IN:+cd $(quoted "$IN") && }$(quoted "$@")"
    if [[ -n $DRY_RUN ]]; then
        note "$line"
        return
    fi
    LOG_END=$(wc -c <"$LOG")
    note "+ $line" | tee -a "$LOG"
    set -m
    (
        set +m -o pipefail
        trap : INT TERM HUP
        [[ -z ${IN:-} ]] || cd "$IN" || exit
        "$@" 2>&1 </dev/null | (trap '' INT TERM HUP && exec tee -a "$LOG")
    ) &
    CHILD=$!
    set +m
    wait "$CHILD" || status=$?
    CHILD=
    return "$status"
}

# Calls run_logged. If it fails, ends the script with the same status and, if known, the reason.
run_or_fail() {
    local status=0
    run_logged "$@" || status=$?
    ((status == 0)) || fail "$status" "$(explain "$status")"
}

fail() {
    die "$1" "$2; the log: $RESULT.failed/log.txt"
}

# miss WHAT: notes that a part of the result is missing. The rest is kept and reported; finish_result ends with 1.
MISSING=()
miss() {
    MISSING+=("$1")
    note "Missing: $1"
}

# Explains known errors in the log of the last command.
explain() {
    local patterns=(
        'Cannot find a supported arch|not supported.*gfx|Unsupported.*gfx'
        "rocprof-compute does not support this GPU: it wants an MI200, MI300 or newer; get_counters.sh --pmc may do"
        'Request exceeds the capabilities of the hardware'
        "too many counters for one pass: name fewer, or several --pmc"
        'No HIP GPUs are available'
        "PyTorch sees no GPU. If it does without the profiler, two ROCm installations meet: load the one PyTorch was built for"
        'Unable to open /dev/kfd|/dev/kfd.*Permission denied'
        "no permission on /dev/kfd: join the groups render and video, and log in again"
        'ERR_NVGPUCTRPERM'
        "the driver lets only an administrator read GPU counters: run as root, or set NVreg_RestrictProfilingToAdminUsers=0"
        'Failed to initialize the profiler|LibraryNotLoaded'
        "ncu cannot reach the GPU's counters on this machine (a virtual machine or sandbox, often)"
        'No kernels were profiled'
        "ncu saw no kernel within a range named step: did the program use the GPU?"
        "rocprofv3_avail_module|rocprofiler-sdk avail module"
        "rocprof-compute finds no list of counters: install the package rocprofiler-sdk of the same ROCm"
        "package was not found|ModuleNotFoundError"
        "a Python package is missing (see the log): for rocprof-compute, pip install -r its requirements.txt in a venv of its own"
        'An instance of rocprof is already running'
        "another rocprof is running: wait for it, or profile one process only"
    ) i
    for ((i = 0; i < ${#patterns[@]}; i += 2)); do
        if tail -c "+$((LOG_END + 1))" "$LOG" | grep -qE -- "${patterns[i]}"; then
            echo "${patterns[i + 1]}" && return
        fi
    done
    echo "$TOOL or the program ended with status $1"
}

# require_file PATTERN [SUBFOLDER [REMEDY]]: the profilers end with status 0 even if they recorded nothing.
require_file() {
    [[ -z $DRY_RUN ]] || return 0
    local found remedy=${3:-"does the program use the GPU? Is a second ROCm in the way?"}
    found=$(find "$RESULT${2:+/$2}" -name "$1" -size +0 2>/dev/null | sort | head -n 1)
    [[ -n $found ]] || fail 1 "$TOOL recorded nothing, it left no $1: $remedy"
    note "Recorded: $found"
}

# report NAME ARGUMENTS: runs profilers/NAME.py on the recordings; its output is also written to the log.
report() {
    module_command "$@"
    run_or_fail "${COMMAND[@]}"
}

# report_or_miss WHAT NAME ARGUMENTS: the same, but if it fails the recordings are kept.
report_or_miss() {
    local status=0
    module_command "${@:2}"
    run_logged "${COMMAND[@]}" || status=$?
    ((status == 0)) || miss "$1: profilers.$2 ended with status $status"
}

# suggestion TEXT NAME ARGUMENTS: prints a command line of profilers/NAME.py.
suggestion() {
    module_command "${@:2}"
    echo "$1: $(quoted "${COMMAND[@]}")"
}

# finish_result "what to open it with"
finish_result() {
    [[ -z $DRY_RUN ]] || exit 0
    rm "$RESULT/INCOMPLETE"
    trap - EXIT
    note
    note "Results: $RESULT"
    printf '%s\n' "$@"
    ((${#MISSING[@]} == 0)) || die 1 "the result lacks a part: $(IFS=';' && echo "${MISSING[*]}"); the log: $LOG"
}

# ----------------------------------------------------------------------------------------------------------------------
# rocprofv3

# rocprofv3_command FOLDER/NAME OPTIONS: sets COMMAND, which records PROGRAM into FOLDER/NAME_*. The user's options come
# last, as the last one counts.
rocprofv3_command() {
    COMMAND=(rocprofv3 "${@:2}" -d "${1%/*}" -o "${1##*/}")
    COMMAND+=(${TOOL_ARGUMENTS[@]+"${TOOL_ARGUMENTS[@]}"} -- "${PROGRAM[@]}")
}

# record_timeline NAME: records a trace for Perfetto and the tables for the reports in one run.
record_timeline() {
    local formats=(csv pftrace)
    ((RELEASE < 700)) || formats+=(rocpd)
    rocprofv3_command "$RESULT/$1" --runtime-trace --stats --output-format "${formats[@]}"
    run_or_fail "${COMMAND[@]}"
    require_file '*_results.pftrace'
    require_file '*_kernel_stats.csv'
}
