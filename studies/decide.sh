#!/usr/bin/env bash
# Print the runs of the experiment in results/claims/experiment.md, a line each, for studies/runs.sh.
#
#     studies/decide.sh start MODEL DATA                            each format's start: 256 answers
#     studies/decide.sh train MODEL DATA SIGMA SEED SEED ...        four arms with these seeds
#     studies/decide.sh control MODEL DATA SIGMA SEED SEED ...      BF16, hotter rollouts, no noise
#     studies/decide.sh round MODEL DATA FOLDER SEED SEED ...       its BF16 adapters, 4-bit codes
set -eu
what=$1 model=$2 data=$3
shift 3
common="--model $model --data $data --max-new-tokens 320 --slots 1024 --micro-tokens 8192"
no_noise="--sigma-start 0 --sigma-end 0"
bf16="--weights bf16"
gptq="--weights nvfp4 --quantizer gptq"
rtn="--weights nvfp4 --quantizer rtn"
test="--eval-questions 660"
learn="--steps 100 --save-every 50 --lr 1.5e-4 --skip-eval-before $test --eval-samples 8 $common"

case $what in
start)
    for seed in 0 1 2 3; do
        for format in gptq bf16; do
            echo "start-$format-$seed ${!format} --eval-only $test --eval-samples 64" \
                "--seed $seed $common"
        done
    done ;;
train | control)
    noise="--sigma-start $1 --sigma-end $(awk "BEGIN { print $1 / 20 }")"
    shift
    for seed in "$@"; do
        if [ "$what" = control ]; then
            echo "control-$seed $bf16 --method temperature $noise --seed $seed $learn"
            continue
        fi
        for format in gptq bf16; do
            echo "$format-$seed ${!format} $no_noise --seed $seed $learn"
            echo "$format+noise-$seed ${!format} $noise --seed $seed $learn"
        done
    done ;;
round)
    folder=$1
    shift
    for seed in "$@"; do
        for format in gptq rtn; do
            echo "round-$format-$seed ${!format} --adapter $folder/bf16-$seed/adapter" \
                "--eval-only $test --eval-samples 8 --seed $seed $common"
        done
    done ;;
esac
