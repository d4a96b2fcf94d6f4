#!/usr/bin/env bash
# Make the runs of results/claims/contrast.md: of each seed its four arms, all on this machine.
#
#     studies/contrast.sh FOLDER GPUS EACH "SEED ..." --model MODEL --data FOLDER [FLAGS]
#     studies/contrast.sh FOLDER                 only pack what is there so far
#
# GPUS and EACH are those of studies/runs.sh, which may be called again. FOLDER's starts.jsonl has a
# line a start, behind one of the commit, the card and the versions. FOLDER.tgz gets all files of less
# than 4 MB, so no weights. COMMIT names the code where git does not know it.
set -eu
folder=$1 here=$(dirname "$0")
export PYTHON=${PYTHON:-python}
common="--train-norms --steps 100 --save-every 50 --max-new-tokens 400 --slots 512 --micro-tokens 8192
    --no-exact --validation 512 --eval-every 25 --validation-samples 4 --skip-eval-before
    --eval-questions 660 --eval-samples 16"
if [ $# -gt 1 ]; then
    gpus=$2 each=$3 seeds=$4
    shift 4
    mkdir -p "$folder"
    "$PYTHON" - "${COMMIT:-$(git rev-parse HEAD)}" << 'END' >> "$folder/starts.jsonl"
import json, sys
from harness.machine import environment
from train_gsm8k import Settings
print(json.dumps({"commit": sys.argv[1], **environment(Settings.device)}))
END
    for seed in $seeds; do
        "$here/arms.sh" 1e-4 "$seed" gptq+aqn gptq bf16 -- $common "$@"            # P, N, B
        "$here/arms.sh" 5e-5 "$seed" bf16 -- $common "$@"                          # H
    done | "$here/runs.sh" "$folder" "$gpus" "$each"
fi
find "$folder" -type f -size -4000k | tar czf "$folder.tgz" -T -
