"""Points for docs/lab/student.py, by function and in all; README.md here describes the lab.

    python docs/lab/check.py                             all functions
    python docs/lab/check.py sample policy_loss          these alone, in seconds
    python docs/lab/check.py --file solution.py --json   another file; for a program that grades

The exit status is 0 only with all points. cases.json has the inputs, the right results, and what
likely mistakes give. NVFP4's bytes in it are by compressed-tensors, log-probabilities by
transformers, the rest is by hand. Each function runs in a process of its own: one that hangs or ends
the process costs its own points alone.
"""
import argparse
import contextlib
import functools
import importlib.util
import inspect
import json
import multiprocessing
import os
import sys
import traceback
import types
from pathlib import Path

import torch

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent.parent))            # where qerl.py is

import qerl

NOT_WRITTEN = "raise NotImplementedError"              # a function with this line is not written yet
CASES = json.loads((HERE / "cases.json").read_text(encoding="utf-8"))      # {function: its cases}


# --------------------------------------------------------------------------------------------------
# How a function is tried. Most cases call it with their arguments and look at the result. The other
# ways are functions here, which get the student's function; a case names its way as "try".

def gradient(function, by, **given):
    """Of the first result's sum by one argument."""
    given[by].requires_grad_()
    found = function(**given)
    found = found[0] if isinstance(found, tuple) else found
    return torch.autograd.grad(found.sum(), given[by])[0]


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
        noisy = [norm.weight if norm.noisy_weight is None else norm.noisy_weight for norm in norms]
    return [(scale - 3).detach() / 0.1 for scale in noisy]


def spread_of_noise(function):
    """The standard deviation of each norm's noise, and the mean of their product, to one digit."""
    own, deeper = noise(function, 0)
    return [round(number.item(), 1) for number in (own.std(), deeper.std(), (own * deeper).mean())]


def repeated_noise(function):
    """Is the noise of a seed that of the same seed, and that of another?"""
    first, again, other = map(functools.partial(noise, function), (1, 1, 2))
    return [first[0].equal(again[0]), first[0].equal(other[0])]


def after_the_block(function, error):
    """How many of two norms have noise, and how many have another weight than before."""
    model, norms = two_norms()
    with contextlib.suppress(KeyError):
        with function(model, 0.1):
            if error:
                raise KeyError
    noisy = [norm.noisy_weight is not None for norm in norms]
    return [sum(noisy), sum(not norm.weight.eq(3).all() for norm in norms)]


def shares(function, probabilities, **given):
    """Of the tokens among 8000 draws, to one digit."""
    logits = torch.tensor(probabilities).log().expand(8000, -1)
    tokens, _, _ = function(logits, generator=torch.Generator().manual_seed(0), **given)
    counts = tokens.bincount(minlength=len(probabilities))
    return [round(count / 8000, 1) for count in counts.tolist()]


WAYS = {way.__name__: way for way in (
    gradient, has_gradient, spread_of_noise, repeated_noise, after_the_block, shares)}


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


def same(found, right):
    """Are they equal to five digits, tensors in shape and dtype, too?"""
    try:
        if isinstance(right, list):
            return len(found) == len(right) and all(map(same, found, right))
        found = float(found) if isinstance(right, float) else found
        near = 0 if getattr(right, "itemsize", 4) == 1 else 1e-5         # a byte is equal or not
        torch.testing.assert_close(found, right, rtol=near, atol=near)
        return True
    except Exception:
        return False


def shown(value):
    """A result as text, floats to five digits."""
    if isinstance(value, torch.Tensor):
        return f"{shown(value.tolist())} ({value.dtype})".replace("torch.", "")
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(shown, value))}]"
    return f"{value:.5g}" if isinstance(value, float) else str(value)


def described(error, file):
    """An exception in a line, with the last line of the student's file that it came through."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__)
             if frame.filename == str(file)]
    place = f" in line {lines[-1]} of {file.name}" if lines else ""
    return f"{type(error).__name__}{place}: {error}"


def run_case(function, case, file):
    """(the case's points or 0, lines that say what was wrong)"""
    right = decoded(case["right"])
    arguments = {name: decoded(value) for name, value in case["arguments"].items()}
    if "try" in case:
        function = functools.partial(WAYS[case["try"]], function)
    expected = [case["given"], f"  expected {shown(right)}"]
    try:
        found = function(**arguments)
    except Exception as error:
        return 0, [*expected, f"  raised {described(error, file)}"]
    if same(found, right):
        return case["points"], []
    likely = [text for text, wrong in case["mistakes"].items() if same(found, decoded(wrong))]
    return 0, [*expected, f"  found {shown(found)}", *(f"  likely: {text}" for text in likely)]


# --------------------------------------------------------------------------------------------------
# One function

def load(file):
    """A Python file as a module."""
    spec = importlib.util.spec_from_file_location("student", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def grade(name, file):
    """(points, lines) of a function, as it is in this file."""
    try:
        function = getattr(load(file), name)
    except Exception as error:
        return 0, [f"{file.name} cannot be loaded: {described(error, file)}"]
    if NOT_WRITTEN in inspect.getsource(function):
        return 0, ["not written yet"]
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
# Command line

def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(CASES))
    parser.add_argument("--file", type=Path, default=HERE / "student.py", help="the file to check")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--limit", type=float, default=60, help="seconds for one function")
    args = parser.parse_args()
    for name in args.names:
        if name not in CASES:
            parser.error(f"no function {name}; choose {', '.join(CASES)}")
    if not args.file.is_file():
        parser.error(f"no file {args.file}")

    graded = {}
    for name in args.names or CASES:
        points, lines = grade_apart(name, args.file.resolve(), args.limit)
        of = sum(case["points"] for case in CASES[name])
        graded[name] = {"points": points, "of": of, "help": lines}
        if not args.json:
            print(f"{name:30}{points:3} of {of}", *lines, sep="\n    ", flush=True)
    points, of = (sum(one[key] for one in graded.values()) for key in ("points", "of"))
    if args.json:
        print(json.dumps({"points": points, "of": of, "functions": graded}, indent=1))
    else:
        print(f"{points} of {of} points")
    sys.exit(points < of)


if __name__ == "__main__":
    main()
