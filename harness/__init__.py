"""What a run needs and the story in train_gsm8k.py does not.

    answers       the answer in a text, and whether it is right
    batches       a step's completions as rows, cut to fit the memory
    command       the command line: flags of a dataclass, errors as one line
    data          the questions, their order and their prompts
    engines       what computes: qerl, fast, or a neighbour from methods/
    errors        an error that the user can mend
    evaluation    how many held-out questions a policy answers rightly
    export        what other programs read: the adapter, a model in NVFP4
    fast          qerl.py, faster
    flags         the settings: what they may be, what is taken where none is given
    folders       files and folders that a stop leaves whole, and the cache
    layers        layers whose weights are trained themselves or cut over GPUs
    loading       careful loading of a model's folder
    machine       what memory has room for; what a run takes
    policy        the policy, its text and its questions, found and loaded
    ranks         several processes
    report        report.html and curve.png
    run           what lasts of a run: checkpoint, log, summary
    small_policy  the built-in policy and its problems
"""
import sys

if not __debug__:                      # before qerl.py is imported, which refuses it with a traceback
    print("error: python -O leaves out the checks of qerl.py; start Python without -O and without "
          "PYTHONOPTIMIZE", file=sys.stderr)
    sys.exit(2)
