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
: "${ROCM_PATH:=/opt/rocm}" "${ROCM_PARENT:=/opt}" "${KFD_DEVICE:=/dev/kfd}"
PATH=$PATH:$ROCM_PATH/bin
IN='' LOG='' RECORDING='' # not what the environment calls so

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
  --tool-path P  this profiler of ROCm: its file, or a folder that has it in it or in its bin
  --dry-run      print the command lines and do nothing
  -- OPTIONS     options of tiny_llama_v3.py, after --batch-size 8 --seq-len 128 --num-steps $STEPS; behind a second --
                 those of the profiler itself

PYTHON chooses the interpreter. ROCm's profiler is the one that comes with PyTorch, else one of the same release, else
the first on PATH or in ROCM_PATH, else the newest below /opt. Exit codes: 0 done, 1 nothing was recorded or a part is
missing, 2 the request cannot be met, 130 interrupted; otherwise that of the program or the profiler.
TXT
}

# parse_arguments "$@": a script sets TOOLS and STEPS before, and handles options of its own in take_option, which sets
# CONSUMED to the number of words that it used.
parse_arguments() {
    : "${TOOLS:?the script that sources this file names its tools, and STEPS}"
    OUTPUT='' STAGE='' DRY_RUN='' TOOL=auto TOOL_PATH='' ARGUMENTS=() TOOL_ARGUMENTS=()
    while (($#)); do
        case $1 in
        --output | --stage | --tool | --tool-path)
            (($# > 1)) && [[ $2 != --* ]] || die "$1 needs a value (--help lists the options)"
            case $1 in
            --output) OUTPUT=$2 ;;
            --stage) STAGE=$2 ;;
            --tool) TOOL=$2 ;;
            --tool-path) TOOL_PATH=$2 ;;
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
    [[ " ${TOOLS[*]} auto " == *" $TOOL "* ]] || die "--tool $TOOL: choose one of ${TOOLS[*]} auto"
    [[ -z $TOOL_PATH ]] || resolve_tool_path
    REQUESTED=$TOOL
    choose_python || die "there is no Python at PYTHON=$PYTHON: run make, or give another"
}

# ----------------------------------------------------------------------------------------------------------------------
# The tool. An obstacle is the rest of a sentence about a tool, with reason and remedy, or empty.

# rocm_obstacle TOOL
rocm_obstacle() {
    local release
    find_rocm_tool "$1"
    if [[ $FOUND != */* ]]; then
        echo "is not installed or not on PATH (module load rocm, or add the bin folder of ROCm 6.3 or newer)"
        return
    fi
    release=$(rocm_release "$FOUND")
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
    *) rocm_obstacle "$1" ;;
    esac
}

executable_of() { echo "${1/%rocprof-sys/rocprof-sys-sample}"; }

# Turns TOOL_PATH into the path of an executable, and asks for that tool.
resolve_tool_path() {
    local name path
    [[ $TOOL != auto ]] || TOOL=${TOOLS[0]}
    [[ $TOOL == rocprof* ]] || die "--tool-path names a profiler of ROCm, and --tool $TOOL is none: leave one out"
    name=$(executable_of "$TOOL")
    for path in "$TOOL_PATH" "$TOOL_PATH"{,/bin}"/$name"; do
        [[ ! -f $path || ! -x $path ]] || break
    done
    [[ -f $path && -x $path ]] ||
        die "--tool-path $TOOL_PATH: there is no $name: give its file, or the folder of one installation of ROCm"
    TOOL_PATH=$(realpath -s -- "$path")
}

# Prints the folders where profilers of ROCm may be. Wheels of PyTorch for ROCm 7.13 and newer bring packages with them.
# Up to 7.2 a release is in /opt/rocm-X.Y.Z, later ones are in /opt/rocm/core-X.Y.
rocm_folders() {
    [[ -z $WHEELS ]] || printf '%s/bin\n' "$WHEELS"/_rocm_{sdk_core,profiler}
    tr : '\n' <<<"$PATH"
    printf '%s\n' "$ROCM_PARENT"/rocm{,-*,/core,/core-*}/bin | sort -Vr
}

# find_rocm_tool TOOL: sets FOUND, its path, or its bare name if it is not installed, and WHY.
find_rocm_tool() {
    local folder path name
    name=$(executable_of "$1")
    FOUND=${TOOL_PATH:-$name} WHY=${TOOL_PATH:+named by --tool-path}
    while [[ -z $TOOL_PATH ]] && read -r folder; do
        path=$folder/$name
        [[ -f $path && -x $path ]] || continue
        if [[ $path == */_rocm_*/bin/* ]]; then
            WHY="which comes with this PyTorch"
        elif [[ $TORCH_BUILD == "rocm $(dotted "$(rocm_release "$path")")" ]]; then
            WHY="of the release of this PyTorch"
        else
            [[ $FOUND == */* ]] || FOUND=$path WHY="the first that was found"
            continue
        fi
        FOUND=$path
        return
    done < <(rocm_folders)
}

# rocm_release PATH: 604, 700, 1000 of the installation of a tool. Without ROCm a dry run uses ROCM_VERSION.
rocm_release() {
    local tool path version='' launcher
    [[ $1 == */* ]] || version=${ROCM_VERSION:-10.0}
    for launcher in "${1%/*}/rocprofv3" "${1%/_rocm_*}/_rocm_sdk_core/bin/rocprofv3" rocprofv3; do
        [[ ! -x $launcher ]] || break
    done
    for tool in "$1" "$launcher"; do # a link may lead from bin into libexec, or into a folder of the tool's own
        path=$(command -v "$tool") || continue
        path=$(readlink -f "$path")
        while [[ -z $version && $path == /*/* ]]; do
            path=$(dirname "$path")
            if [[ -r $path/.info/version ]]; then read -r version <"$path/.info/version" || true; fi
        done
    done
    [[ -n $version ]] || version=$("$launcher" --version 2>/dev/null | sed -n 's/^ *rocm_version: *//p') || true
    if [[ -z $version && -r $ROCM_PATH/.info/version ]]; then read -r version <"$ROCM_PATH/.info/version" || true; fi
    [[ $version =~ ^[0-9]+\.[0-9]+ ]] || version=6.4 # older than 7.0, as there is no --version
    [[ $version =~ ^([0-9]+)\.([0-9]+) ]]
    echo $((10#${BASH_REMATCH[1]} * 100 + 10#${BASH_REMATCH[2]})) # decimal: 08 would be octal
}

# 7.0 for 700
dotted() { echo "$(($1 / 100)).$(($1 % 100))"; }

# has_option OPTION SINCE ARGUMENTS: whether the tool's help, which ARGUMENTS print, names an option. A dry run without
# the tool goes by the release that has it first.
has_option() {
    [[ $FOUND == */* ]] || return $((RELEASE < $2))
    [[ $("${LAUNCH[@]}" "${@:3}" 2>&1 </dev/null) == *"$1"* ]]
}

# Sets TOOL and, for ROCm's tools, FOUND, RELEASE (major * 100 + minor) and LAUNCH, the words that start it. Prints the
# tool as the first line of a script.
choose_tool() {
    local candidate obstacle reason=''
    module_command torch_build
    TORCH_BUILD=$("${COMMAND[@]}" 2>/dev/null) || true
    WHEELS=$("$PYTHON" -c 'from importlib.util import find_spec
print(find_spec("_rocm_sdk_core").submodule_search_locations[0])' 2>/dev/null) || true
    WHEELS=${WHEELS%/*}
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
        find_rocm_tool "$TOOL"
        RELEASE=$(rocm_release "$FOUND")
        note "Tool: $TOOL of ROCm $(dotted "$RELEASE"): $FOUND, ${WHY:-which is not installed here}"
        choose_launch
        ;;
    esac
}

# Sets LAUNCH. A profiler that comes with PyTorch works only with the libraries beside it.
choose_launch() {
    local name core=${FOUND%/_rocm_*}/_rocm_sdk_core libraries=${FOUND%/bin/*}/lib
    name=$(executable_of "$TOOL")
    LAUNCH=("$FOUND")
    [[ $(command -v "$name") != "$FOUND" ]] || LAUNCH=("$name")
    [[ $FOUND != */* ]] || PATH=$PATH:${FOUND%/*} # for rocminfo and its like
    if [[ $FOUND == */_rocm_*/bin/* ]]; then
        [[ $libraries == "$core/lib" ]] || libraries+=:$core/lib
        LAUNCH=(env "LD_LIBRARY_PATH=$libraries${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}" "$FOUND")
        [[ $TOOL != rocprofv3 ]] || LAUNCH+=(--rocm-root "$core")
    elif [[ $TORCH_BUILD == rocm* && $TORCH_BUILD != "rocm $(dotted "$RELEASE")" ]]; then
        note "Note: two ROCm installations. PyTorch brings ROCm ${TORCH_BUILD#rocm }, $TOOL is of $(dotted "$RELEASE"):" \
            "it may record nothing, or crash. If so, ${WHEELS:+pip install 'rocm[profiler]', }load the ROCm" \
            "${TORCH_BUILD#rocm } module, or use AMD's PyTorch container."
    fi
}

# fall_back_to_torch REASON STATUS: with --tool auto; otherwise the script ends.
fall_back_to_torch() {
    [[ $REQUESTED == auto ]] || fail "$2" "$1"
    note "Tool: torch.profiler from here on ($1)"
    TOOL=torch
}

# ----------------------------------------------------------------------------------------------------------------------
# The result: a folder with a file INCOMPLETE until it is finished, which is renamed to FAILED if a step fails. Nothing
# that exists already is written over or deleted.

# Sets PROCESS, the number of this process, and PROCESSES, if started by torchrun, srun, Open MPI or MPICH. In (( )) bash
# would execute what a variable of the environment contains, so only digits get there.
find_launcher() {
    PROCESS=0 PROCESSES=1
    local names number count
    for names in RANK:WORLD_SIZE SLURM_PROCID:SLURM_STEP_NUM_TASKS OMPI_COMM_WORLD_RANK:OMPI_COMM_WORLD_SIZE \
        PMI_RANK:PMI_SIZE; do
        number=${names%:*} count=${names#*:}
        [[ -n ${!number:-} && -n ${!count:-} ]] || continue
        [[ ${!number} =~ ^[0-9]{1,9}$ && ${!count} =~ ^[0-9]{1,9}$ ]] ||
            die "$number=${!number} and $count=${!count} are not numbers: unset them, or start with torchrun or srun"
        ((10#${!count} > 1)) || continue
        PROCESS=$((10#${!number})) PROCESSES=$((10#${!count}))
        return
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
    while [[ -z $OUTPUT && -e $RESULT ]]; do
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
    number=0 FAILED=$RESULT.failed
    while [[ -e $FAILED || -L $FAILED ]]; do number=$((number + 1)) FAILED=${RESULT}_$number.failed; done
    [[ -z $DRY_RUN ]] || return 0
    # INCOMPLETE must be new: of two runs that want this folder, one gets it.
    # shellcheck disable=SC2015  # one message for all
    mkdir -p "$RESULT" 2>/dev/null && (set -C && : >"$RESULT/INCOMPLETE" && : >"$RESULT/log.txt") 2>/dev/null ||
        die "--output $RESULT cannot be written to, or another run has just begun there: give another folder"
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

# Runs on an exit before finish_result. A folder that cannot be renamed, as a container's volume, stays INCOMPLETE.
set_aside() {
    trap - EXIT
    if mv -nT "$RESULT" "$FAILED" 2>/dev/null && [[ ! -d $RESULT ]]; then
        rm -f "$FAILED/INCOMPLETE"
    else
        FAILED=$RESULT
    fi
    note "What there is, with the log, is in $FAILED" >&2
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
    set_aside
    die "$1" "$2; the log: $FAILED/log.txt"
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
        '^[a-z_0-9]+\.py: error: '
        "the program cannot do what its options ask for: see its message above"
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
        "package was not found|ModuleNotFoundError|does not meet version requirements"
        "a Python package is missing (see the log): for rocprof-compute, pip install -r its requirements.txt in a venv of its own"
        'unrecognized arguments|Unrecognized command line option'
        "$TOOL of this release has no such option: its own --help lists those that it has"
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

# find_recording PATTERN... : sets RECORDING, the first file that fits one of them. The profilers end with status 0 even
# if they recorded nothing; then the status is 1, and REASON is set.
find_recording() {
    local pattern names=()
    for pattern; do names+=(-o -name "$pattern"); done
    RECORDING=$(find "$RESULT" \( "${names[@]:1}" \) -size +0 2>/dev/null | sort | head -n 1)
    REASON="$TOOL recorded nothing, it left no $*: does the program use the GPU? Is a second ROCm in the way?"
    if [[ -n $RECORDING ]]; then note "Recorded: $RECORDING"; else [[ -n $DRY_RUN ]]; fi
}

# require_file PATTERN... : without such a file the script ends.
require_file() {
    find_recording "$@" && return
    [[ " ${TOOL_ARGUMENTS[*]-} " == *" --profile-mpi-ranks "* ]] || fail 1 "$REASON"
    finish_result "No recording of process $PROCESS, as it is none of --profile-mpi-ranks or used no GPU."
    exit
}

# report_or_miss WHAT NAME ARGUMENTS: runs profilers/NAME.py on the recordings, and logs its output. If it fails they
# are kept.
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
    COMMAND=("${LAUNCH[@]}" "${@:2}" -d "${1%/*}" -o "${1##*/}")
    COMMAND+=(${TOOL_ARGUMENTS[@]+"${TOOL_ARGUMENTS[@]}"} -- "${PROGRAM[@]}")
}

# record_timeline NAME: records a trace for Perfetto and the tables for the reports in one run.
record_timeline() {
    local formats=(csv pftrace)
    ! has_option rocpd 700 --help || formats+=(rocpd)
    rocprofv3_command "$RESULT/$1" --runtime-trace --stats --output-format "${formats[@]}"
    run_or_fail "${COMMAND[@]}"
    require_file '*_results.pftrace'
    require_file '*_kernel_stats.csv'
}
