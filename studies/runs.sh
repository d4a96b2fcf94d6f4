#!/usr/bin/env bash
# Make runs of train_gsm8k.py, several at once, and go on with those that were stopped.
#
#     studies/runs.sh FOLDER GPUS EACH < LIST       with EACH runs at once on each of so many GPUs
#
# A line of LIST is a name and flags. A run stands in FOLDER/NAME, and its output in FOLDER/NAME.log.
# It is done when it has its summary.json or, with --eval-only, its eval.json. A failed one is tried
# again by the next call. FOLDER/starts.jsonl has a line for each start, which says whether the run
# went on from a checkpoint. PYTHON names another interpreter. It needs GNU's xargs.
set -u
export FOLDER=$1 GPUS=$2 PYTHON=${PYTHON:-python}
at_once=$(($2 * $3))
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((($(nproc) + at_once - 1) / at_once))}
mkdir -p "$FOLDER"

one_run() {
    read -ra words <<< "$1"
    local folder=$FOLDER/${words[0]} resumed=false resume=()
    if [ -e "$folder/summary.json" ] || [ -e "$folder/eval.json" ]; then return; fi
    if [ -e "$folder/checkpoint" ]; then resumed=true resume=(--resume); fi
    printf '{"name": "%s", "started": "%s", "resumed": %s}\n' \
        "${words[0]}" "$(date -u +%FT%TZ)" "$resumed" | tee -a "$FOLDER/starts.jsonl"
    CUDA_VISIBLE_DEVICES=$((SLOT % GPUS)) "$PYTHON" train_gsm8k.py "${words[@]:1}" "${resume[@]}" \
        --out "$folder" >> "$folder.log" 2>&1 || echo "${words[0]}: status $?; $folder.log says why"
}
export -f one_run
xargs -d '\n' -n 1 -P "$at_once" --process-slot-var=SLOT bash -c 'one_run "$1"' bash
