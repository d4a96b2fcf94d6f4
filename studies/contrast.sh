#!/usr/bin/env bash
# Make the runs of results/claims/contrast.md: of each seed its four arms, all on this machine.
#
#     studies/contrast.sh FOLDER GPUS EACH "SEED ..." MODEL DATA
#     studies/contrast.sh FOLDER                 only pack what is there so far
#
# GPUS and EACH are those of studies/runs.sh, MODEL and DATA folders. FOLDER's name is the machine's in
# the record: no two machines may have the same. After an interruption call it again. FOLDER's
# starts.jsonl has a line a start, behind one of the commit, the checksum of all inputs (code, model and
# data), the card and the versions; other inputs are refused. FOLDER.tgz gets all files of less than
# 4 MB, so no weights. COMMIT names the commit where git does not know it.
set -eu
folder=$1 here=$(dirname "$0")
export PYTHON=${PYTHON:-python}
common="--train-norms --steps 100 --save-every 50 --max-new-tokens 400 --slots 512 --micro-tokens 8192
    --no-exact --validation 512 --eval-every 25 --validation-samples 4 --skip-eval-before
    --eval-questions 660 --eval-samples 16"
if [ $# -gt 1 ]; then
    gpus=$2 each=$3 seeds=$4 model=$5 data=$6
    mkdir -p "$folder"
    inputs=$(
        set -o pipefail
        LC_ALL=C                               # one order of files on each machine
        cat *.py harness/*.py methods/*.py methods/parts/*.py studies/*.* "$data"/*.jsonl \
            "$model"/{*config.json,tokenizer.json,*.safetensors} | sha256sum | cut -c 1-16
    )
    common="$common --model $model --data $data"
    if grep -s '"commit"' "$folder/starts.jsonl" | grep -qv "$inputs"; then
        echo "$folder: has runs of other code, model or data; name a new folder" >&2
        exit 2
    fi
    commit=${COMMIT:-$(git rev-parse HEAD)}
    "$PYTHON" - "$(basename "$folder")" "$commit" "$inputs" << 'END' >> "$folder/starts.jsonl"
import json, sys
from harness.machine import environment
from train_gsm8k import Settings
machine, commit, inputs = sys.argv[1:]
print(json.dumps({"machine": machine, "commit": commit, "inputs": inputs, **environment(Settings.device)}))
END
    for seed in $seeds; do                     # a seed's arms in random order: none has a GPU of its own
        {
            "$here/arms.sh" 1e-4 "$seed" gptq+aqn gptq bf16 -- $common        # P, N, B
            "$here/arms.sh" 5e-5 "$seed" bf16 -- $common                      # H
        } | sort --random-sort --random-source=<(yes "$seed")
    done | "$here/runs.sh" "$folder" "$gpus" "$each"
fi
find "$folder" -type f -size -4000k | tar czf "$folder.tgz" -T -
