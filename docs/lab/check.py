"""Points for docs/lab/student.py, by function and in all; README.md here describes the lab.

    python docs/lab/check.py                             all functions
    python docs/lab/check.py sample policy_loss          these alone, in seconds
    python docs/lab/check.py --file solution.py --json   another file; for a program that grades

The exit status is 0 only with all points. cases.json has the inputs, the right results, and what
likely mistakes give. NVFP4's bytes in it are by compressed-tensors, log-probabilities by
transformers, the rest is by hand. A result that is right but for its dtype has half of a case's
points. Each function runs in a process of its own: one that hangs or ends the process costs its own
points alone.
"""
import argparse
import contextlib
import functools
import inspect
import json
import multiprocessing
import os
import runpy
import sys
import traceback
import types
from pathlib import Path

HERE = Path(__file__).resolve().parent
CASES = json.loads((HERE / "cases.json").read_text(encoding="utf-8"))      # {function: its cases}


def arguments():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(CASES))
    parser.add_argument("--file", type=Path, default=HERE / "student.py", help="the file to check")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--limit", type=float, default=60, help="seconds for one function")
    args = parser.parse_args()
    for name in set(args.names).difference(CASES):
        parser.error(f"no function {name}; choose {', '.join(CASES)}")
    if not args.file.is_file():
        parser.error(f"no file {args.file}")
    return args


if __name__ == "__main__":
    args = arguments()             # before torch is imported: a wrong name is refused at once

import torch

sys.path.insert(0, str(HERE.parent.parent))            # where qerl.py is
import qerl


# --------------------------------------------------------------------------------------------------
# How a function is tried. Most cases call it with their arguments and look at the result. The other
# ways are functions here, which get the student's function; a case names its way as "try".

def gradient(function, by, **given):
    """By one argument, of a tuple's first tensor, or of the sum of a tensor's only row."""
    given[by].requires_grad_()
    function(**given)[0].sum().backward()
    return given[by].grad


def has_gradient(function, **given):
    return function(**given).requires_grad


def two_norms():
    """(a model, its two RMSNorms: the model's own and a deeper one); their scales are all 3."""
    own, deeper = (qerl.RMSNorm(name, torch.full((65536,), 3.0), 1e-6) for name in "ab")
    return torch.nn.ModuleList([own, torch.nn.ModuleList([deeper])]), [own, deeper]


def noise(function, seed):
    """(w + Z - w) / 0.1 of the two norms, with sigma 0.1; 0 of a norm without noise."""
    model, norms = two_norms()
    with function(model, 0.1, torch.Generator().manual_seed(seed)):
        return [(norm.scale - 3) / 0.1 for norm in norms]


def spread_of_noise(function):
    """Four figures of the noise, to one digit.

    The standard deviation of each norm's noise, the mean of their product, and the mean magnitude.
    """
    own, deeper = noise(function, 0)
    figures = [own.std(), deeper.std(), (own * deeper).mean(), own.abs().mean()]
    return torch.stack(figures).round(decimals=1).tolist()


def repeated_noise(function):
    """Is the noise of a seed that of the same seed, and that of another?"""
    first, again, other = (noise(function, seed)[0] for seed in (1, 1, 2))
    return [first.equal(again), first.equal(other)]


def after_the_block(function, error):
    """[norms with noise, norms with another weight than before, did the program go on after it?]"""
    model, norms = two_norms()
    goes_on = False
    with contextlib.suppress(KeyError):
        with function(model, 0.1):
            if error:
                raise KeyError
        goes_on = True
    return [sum(norm.noisy_weight is not None for norm in norms),
            sum(not norm.weight.eq(3).all() for norm in norms), goes_on]


def shares(function, probabilities, **given):
    """Of three tokens among 8000 draws, half from each of two rows, to one digit."""
    logits = torch.tensor(probabilities).log().repeat(4000, 1)
    tokens = function(logits, generator=torch.Generator().manual_seed(0), **given)[0]
    counts = tokens.bincount(minlength=3)
    return (counts / 8000).round(decimals=1).tolist()


def refused(function, by, **given):
    """Does it work, but raise an error if a text that it cannot use is one argument, too?"""
    function(**given)
    try:
        function(**given, **{by: "unusable"})
        return False
    except Exception:
        return True


# --------------------------------------------------------------------------------------------------
# One case

KINDS = {
    "frozen": lambda rows: types.SimpleNamespace(multiply=lambda x: x @ torch.tensor(rows).T),
    "model": lambda folder: qerl.load_model(str(HERE / folder), "bf16", lora_rank=2),
    "dtype": lambda name: getattr(torch, name),
}


def decoded(value):
    """A value of cases.json: {"float32": [1]} is a tensor of that dtype, and a list stays a list."""
    if isinstance(value, list):
        return [decoded(part) for part in value]
    if not isinstance(value, dict):
        return value
    (kind, content), = value.items()
    return KINDS[kind](content) if kind in KINDS else torch.tensor(content).to(getattr(torch, kind))


def likeness(found, right):
    """1 if they are equal to five digits, tensors in shape, too; half if not in dtype; else 0."""
    try:
        if isinstance(right, list):
            return min(map(likeness, found, right)) * (len(found) == len(right))
        if isinstance(right, str):
            return found == right
        found = float(found) if isinstance(right, float) else found
        found, right = map(torch.as_tensor, (found, right))
        torch.testing.assert_close(found.double(), right.double(), rtol=1e-5, atol=1e-5)
        return 1 if found.dtype == right.dtype else 0.5
    except Exception:
        return 0


def shown(value):
    """A result as text, floats to five digits."""
    if isinstance(value, torch.Tensor):
        return f"{shown(value.tolist())} ({value.dtype})".replace("torch.", "")
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(shown, value))}]"
    return f"{value:.5g}" if isinstance(value, float) else str(value)


def described(error, file):
    """An exception's first line, with the last line of the file that it came through."""
    places = [f" in line {frame.lineno} of {file.name}"
              for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(file)]
    return f"{type(error).__name__}{''.join(places[-1:])}: {error}".splitlines()[0]


def run_case(function, case, file):
    """(the case's points, half of them or 0; lines that say what was wrong)"""
    right = decoded(case["right"])
    arguments = {name: decoded(value) for name, value in case["arguments"].items()}
    if "try" in case:
        function = functools.partial(globals()[case["try"]], function)
    try:
        found = function(**arguments)
    except Exception as error:
        found = described(error, file)
    share = likeness(found, right)
    if share == 1:
        return case["points"], []
    likely = [f"  likely: {text}" for text, wrong in case["mistakes"].items()
              if likeness(found, decoded(wrong))]
    return share * case["points"], [
        case["given"], f"  expected {shown(right)}", f"  found {shown(found)}", *likely]


# --------------------------------------------------------------------------------------------------
# One function

def grade(name, file):
    """(points, lines) of a function, as it is in this file."""
    try:
        function = runpy.run_path(str(file)).get(name)
    except Exception as error:
        return 0, [f"{file.name} cannot be loaded: {described(error, file)}"]
    code = getattr(inspect.unwrap(function), "__code__", None)
    if not code or "NotImplementedError" in code.co_names:   # train_gsm8k.py has the same rule
        return 0, ["not written yet: the file has no `def` of it, or still NotImplementedError"]
    points, lines = zip(*(run_case(function, case, file) for case in CASES[name]))
    return sum(points), sum(lines, [])


def send_grade(name, file, connection):
    """In a process of its own. What the student prints goes to the error output."""
    sys.stdout = sys.stderr
    torch.set_num_threads(1)
    connection.send(grade(name, file))


def grade_apart(name, file, limit):
    """(points, lines) of a function, which has `limit` seconds."""
    unix = hasattr(os, "fork")
    context = multiprocessing.get_context("forkserver" if unix else "spawn")
    if unix:
        context.set_forkserver_preload(["torch", "qerl"])
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=send_grade, args=(name, file, sender))
    process.start()
    sender.close()
    try:
        if receiver.poll(limit):
            return receiver.recv()
        return 0, [f"no result within {limit:g} seconds: does a loop never end?"]
    except EOFError:
        return 0, ["the process ended without a result: does the function call exit()?"]
    finally:
        process.kill()


# --------------------------------------------------------------------------------------------------
# All functions

def main(args):
    graded = {}
    for name in args.names or CASES:
        points, lines = grade_apart(name, args.file.resolve(), args.limit)
        of = sum(case["points"] for case in CASES[name])
        graded[name] = {"points": points, "of": of, "help": lines}
        if not args.json:
            print(f"{name:30}{points:3g} of {of}", *lines, sep="\n    ", flush=True)
    points, of = (sum(one[key] for one in graded.values()) for key in ("points", "of"))
    if args.json:
        print(json.dumps({"points": points, "of": of, "functions": graded}, indent=1))
    else:
        print(f"{points:g} of {of} points")
    sys.exit(points < of)


if __name__ == "__main__":
    main(args)
