#!/usr/bin/env bash
# Print the runs of a study, a line each, for studies/runs.sh: arms.tsv's at each rate and seed.
#
#     studies/arms.sh "RATE ..." "SEED ..." "ARM" ["ARM" ...] -- [FLAGS OF ALL RUNS]
#
# In the flags SEED stands for the run's seed: --start-seed SEED gives each its own small policy. Of
# a flag that is there twice the last counts: weights round to the nearest code, unless an arm has
# another --quantizer. pass@1 is the mean of four answers to each question.
set -eu
rates=$1 seeds=$2
shift 2
arms=()
while [ $# -gt 0 ] && [ "$1" != -- ]; do
    arms+=("$1")
    shift
done
shift
for rate in $rates; do
    for seed in $seeds; do
        for arm in "${arms[@]}"; do
            flags=$(awk -F '\t' -v arm="$arm" '$2 == arm { print $3 }' "$(dirname "$0")/arms.tsv")
            [ -n "$flags" ] || { echo "studies/arms.tsv has no arm $arm" >&2; exit 2; }
            common=${*//SEED/$seed}
            name=$(tr -s ' :/' - <<< "$arm")-lr$rate-seed$seed
            echo "$name --lr $rate --seed $seed --quantizer rtn --eval-samples 4 $common $flags"
        done
    done
done
