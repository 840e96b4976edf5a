#!/usr/bin/env bash
# The python, python3 and torchrun in the .venv of a reader of the pages. With SMALL, the programs of a block for another
# machine get a small size behind their own options, of which the last one of a kind counts. With SHORT, a run of the
# page's own model has one sequence and two steps.
model=(--hidden-dim 32 --num-layers 1 --num-heads 2 --num-kv-heads 1 --ffn-dim 32 --vocab-size 256 --warmup-steps 1)
tiny=("${model[@]}" --batch-size 1 --seq-len 16 --num-steps 2)
run=("$REAL_PYTHON")
[ "${0##*/}" != torchrun ] || run+=(-m torch.distributed.run)
if [ -n "${SHORT:-}" ]; then
    for word; do
        case ${word##*/} in
        tiny_llama_v3.py | v3_stage*.py) exec "${run[@]}" "$@" --batch-size 1 --num-steps 2 --warmup-steps 1 ;;
        esac
    done
fi
[ -n "${SMALL:-}" ] || exec "${run[@]}" "$@"
if [ "$1 ${2:-}" = "-m exercises.performance_debugging.replay" ]; then
    own=() theirs=() profile=--no-profile
    while (($#)) && [ "$1" != -- ]; do own+=("$1") && shift; done
    (($#)) && shift && theirs=("$@")
    # Its profiles are read afterwards.
    if [[ " ${own[*]} " == *" --stages 4,5 "* ]] || ((${#own[@]} == 2)); then profile=; fi
    [[ " ${own[*]} " != *" --laptop "* ]] || exec "${run[@]}" "${own[@]}" --stages 1,5,6 -- "${theirs[@]}" "${model[@]}"
    exec "${run[@]}" "${own[@]}" --batch-size 1 --seq-len 8 --num-steps 1 $profile -- "${theirs[@]}" "${model[@]}"
fi
for word; do
    case ${word##*/} in
    tiny_llama_v3.py | v3_stage*.py | profilers.host_profile) exec "${run[@]}" "$@" "${tiny[@]}" ;;
    run_triton_profiling.py) exec "${run[@]}" "$@" --seq-len 16 ;;
    profilers.hotspots) break ;; # which is told the name of a program
    train.py) exec "${run[@]}" "$@" --n_layer=1 --n_head=1 --n_embd=8 --block_size=8 --batch_size=1 --max_iters=1 \
        --eval_iters=1 --gradient_accumulation_steps=4 --compile=False --device=cpu ;;
    esac
done
exec "${run[@]}" "$@"
