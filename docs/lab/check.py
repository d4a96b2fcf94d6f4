"""Points for docs/lab/student.py and mycases.py, in all; README.md here describes the lab.

    python docs/lab/check.py                        all functions, and the cases
    python docs/lab/check.py sample policy_loss     these alone, in seconds
    python docs/lab/check.py cases                  mycases.py alone
    python docs/lab/check.py --file NAME.py --json  another file; printed in Gradescope's format

The exit status is 0 only with all points. Half of a function's points are for the cases in
cases.json: inputs, right results, and what likely mistakes give. NVFP4's bytes in it are by
compressed-tensors, log-probabilities by transformers, the rest is by hand. The other half is for
a hundred random inputs, all of them; --seed draws others. Their right results are those of qerl.py.

A result is right if its type, device, shape and values are, and if the function has changed none of
its arguments. If only the dtype is wrong, it has half of the points. Each function runs in a
process of its own: one that hangs or ends the process costs its own points alone.

A case of mycases.py counts if it gives, twice, the same result with the right function, another one
with the wrong function of wrong.py, and says why.
"""
import os
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(os.path.dirname(HERE))          # where qerl.py is
# A file of the student's that is called numpy.py must not take the place of the package.
sys.path[:] = [folder for folder in sys.path if os.path.abspath(folder) != HERE]

import argparse
import contextlib
import copy
import functools
import inspect
import json
import math
import multiprocessing
import random
import runpy
import traceback
from dataclasses import dataclass
from pathlib import Path
from random import choice, randint, uniform
from types import SimpleNamespace

HERE = Path(HERE)
POINTS = {
    "quantize_nvfp4": 6,
    "dequantize_blocks": 3,
    "lora_linear": 3,
    "adaptive_quantization_noise": 5,
    "noise_sigma": 3,
    "sample": 5,
    "group_advantages": 4,
    "token_logprobs": 5,
    "policy_loss": 6,
    "cases": 30,
}
RANDOM_INPUTS = 100


def arguments():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(POINTS))
    parser.add_argument("--file", type=Path, default=HERE / "student.py",
                        help="the file to check; mycases.py is beside it")
    parser.add_argument("--json", action="store_true", help="print results as Gradescope reads them")
    parser.add_argument("--limit", type=float, default=60, help="seconds for one function")
    parser.add_argument("--seed", type=int, default=0, help="of the random inputs")
    args = parser.parse_args()
    for name in set(args.names).difference(POINTS):
        parser.error(f"nothing is called {name}; choose {', '.join(POINTS)}")
    if not args.file.is_file():
        parser.error(f"no file {args.file}")
    return args


if __name__ == "__main__":
    args = arguments()             # before torch is imported: a wrong name is refused at once

import torch

sys.path.insert(0, ROOT)
import qerl

REFERENCE = {name: getattr(qerl, name) for name in POINTS if name != "cases"}


# --------------------------------------------------------------------------------------------------
# How a function is tried. Most cases call it with their arguments and look at the result. The other
# ways are functions here, which get the student's function; a case names its way as "try".

def gradient(function, by, **given):
    """By one argument, of a tensor's sum or that of the first of several; by a Toy's logits of each token."""
    given[by].requires_grad_()
    result = function(**given)
    if isinstance(result, tuple) and result[1].requires_grad:
        raise AssertionError("the second result has a gradient; it should have none")
    first = result if isinstance(result, torch.Tensor) else result[0]
    first.sum().backward()
    return given[by].tables.grad.sum((0, 1)) if by == "model" else given[by].grad


def has_gradient(function, **given):
    return function(**given).requires_grad


def wide(function):
    """y of a layer that is so wide that no computer has memory for B A; a part of it."""
    row = torch.ones(1, 10 ** 7)
    identity = SimpleNamespace(multiply=lambda x, bias=None: x.clone())
    return function(row, identity, None, 0 * row, row.T, 1.0)[0, :2]


def two_norms(weight=3.0):
    """(a model, its two RMSNorms: the model's own and a smaller, deeper one); all scales are `weight`."""
    own, deeper = (qerl.RMSNorm("a", torch.full((size,), weight), 1e-6) for size in (65536, 32768))
    return torch.nn.ModuleList([own, torch.nn.ModuleList([deeper])]), [own, deeper]


def noise(function, seed, sigma=0.1, weight=3.0):
    """(w + Z - w) / sigma of the two norms; 0 of a norm without noise."""
    model, norms = two_norms(weight)
    with function(model, sigma, torch.Generator().manual_seed(seed)):
        return [(norm.scale - weight) / sigma for norm in norms]


def spread_of_noise(function, **given):
    """Five figures of the noise, to one digit.

    The standard deviation of each norm's noise, the mean of their product, the mean magnitude, and 1
    if some noise is beyond 3.5.
    """
    own, deeper = noise(function, 0, **given)
    figures = [own.std(), deeper.std(), (own[:32768] * deeper).mean(), own.abs().mean(),
               own.abs().max().gt(3.5).float()]
    return torch.stack(figures).round(decimals=1).tolist()


def repeated_noise(function):
    """Is the noise of a seed that of the same seed, and that of another?"""
    first, again, other = (noise(function, seed)[0] for seed in (1, 1, 2))
    return [first.equal(again), first.equal(other)]


def noise_of_a_norm(function):
    """Of a model that is one norm: noisy_weight's type and dtype.

    And is it the same in two blocks without a generator, and in two with one?
    """
    norm = two_norms()[1][0]
    one = torch.Generator()
    drawn = []
    for generator in (None, None, one, one):
        with function(norm, 0.1, generator):
            drawn.append(norm.noisy_weight)
    first, second, third, fourth = drawn
    return [type(first).__name__, shown(first.dtype), first.equal(second), third.equal(fourth)]


def without_noise(function):
    """At sigma 0: do the two norms compute with their own weights?"""
    model, norms = two_norms()
    with function(model, 0.0):
        return [norm.scale.equal(norm.weight) for norm in norms]


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


def frequencies(function, logits, **given):
    """Of the tokens, in 4000 draws from each row [B, V]."""
    generator = torch.Generator().manual_seed(0)
    rows = logits.repeat(4000, 1)
    tokens, logprobs, _ = function(rows, generator=generator, **given)
    right = (rows / given.get("temperature", 1)).log_softmax(1).gather(1, tokens[:, None])[:, 0]
    assert likeness(logprobs, right), "logprob is not that of the token that was drawn"
    return tokens.bincount(minlength=logits.shape[1]) / len(tokens)


def drawn_again(function):
    """Are two draws of 100 tokens equal, without a generator and with one?"""
    def draw(generator):
        return function(torch.zeros(100, 5), generator=generator)[0]
    return [draw(generator).equal(draw(generator)) for generator in (None, torch.Generator())]


def shares(function, probabilities, **given):
    """Of three tokens among draws from two rows, to one digit."""
    logits = torch.tensor(probabilities).log()
    return frequencies(function, logits, **given).round(decimals=1).tolist()


def drawn(function, probabilities, temperature=1.0, **given):
    """What 4000 draws from one row gave.

    [the number of different tokens, are they the likeliest, are their shares as their probabilities?]
    """
    logits = torch.tensor(probabilities).log()
    share = frequencies(function, logits[None], temperature=temperature, **given)
    there = share > 0
    p = (logits / temperature).softmax(0)
    likeliest = p[there].min() >= p.where(~there, 0).max()
    p = p * there / p[there].sum()
    return [there.sum().item(), likeliest.item(), (share - p).abs().max().item() < 0.04]


def refused(function, by, values, **given):
    """Does it work, but raise an error if one argument has any of these values?"""
    function(**given)
    for value in values:
        with contextlib.suppress(Exception):
            function(**given, **{by: value})
            return False
    return True


# --------------------------------------------------------------------------------------------------
# Random inputs: for each function one that draws a case without a result. What is compared in
# bfloat16 has small whole numbers, so that it does not depend on the order of operations.

@dataclass
class Frozen:
    """A weight [out, in] of lora_linear."""
    weight: torch.Tensor

    def multiply(self, x, bias=None):
        y = x @ self.weight.to(x.dtype).T
        return y if bias is None else y + bias


class Toy(torch.nn.Module):
    """Logits of seven tokens depend on the token and on the sum of all before; token 0's are very low."""

    def __init__(self, dtype):
        super().__init__()
        self.tables = torch.nn.Parameter(torch.randn(2, 7, 7, dtype=dtype))

    def forward(self, tokens):
        of_token, of_all = self.tables[:, tokens]                            # [B, T, V] each
        logits = of_token + of_all.cumsum(1)
        logits[..., 0] -= 150
        return logits

    def extra_repr(self):
        return f"logits in {self.tables.dtype}"


def whole(*shape, dtype=torch.int8):
    """-1, 0 and 1; in float32 thirds of these, which bfloat16 cannot hold."""
    return torch.randint(-1, 2, shape).to(dtype) / (3 if dtype == torch.float32 else 1)


def a_weight():
    return {"weight": torch.randn(2, 32) * 10 ** torch.randn(2, 1)}


def bytes_and_scales():
    return {"packed": torch.randint(256, (2, 4), dtype=torch.uint8), "table": torch.randn(16),
            "scale": torch.rand(2, choice([1, 2, 4])),
            "dtype": choice([torch.float32, torch.bfloat16])}


def a_layer():
    dtype = choice([torch.float32, torch.bfloat16])
    rank = randint(1, 3)
    return {"x": whole(*choice([(1,), (3,), (2, 3)]), 6, dtype=dtype), "weight": Frozen(whole(5, 6)),
            "bias": choice([None, whole(5, dtype=dtype)]), "A": whole(rank, 6, dtype=dtype),
            "B": whole(5, rank, dtype=dtype), "scale": choice([0.5, 2.0])}


def sigma_and_weight():
    return {"try": "spread_of_noise", "sigma": uniform(0.01, 1), "weight": uniform(-3, 3)}


def a_step():
    steps = randint(1, 60)
    start, end = choice([(0.0, 0.0), (0.01, 0.01), (0.001, 0.1), (0.1, 0.001)])
    return {"step": randint(0, steps - 1), "steps": steps, "stages": randint(1, 6),
            "start": start, "end": end}


def probabilities():
    p = torch.rand(6) + 0.4
    return {"try": "drawn", "probabilities": (p / p.sum()).tolist(), "temperature": uniform(0.5, 2),
            "top_p": choice([1.0, uniform(0.1, 1)])}


def one_likely_token():
    """Which is the only one that can be drawn: at temperature 0, or with a low top_p."""
    logits = torch.rand(5, 6).argsort(1) * choice([0.75, 60.0])
    temperature = choice([0.0, 0.35, 1.0, 2.0])
    return {"logits": logits.to(choice([torch.float32, torch.bfloat16])), "temperature": temperature,
            "top_p": choice([1.0, 0.1]) if temperature == 0 else 0.1}


def some_rewards():
    shape = randint(1, 4), randint(2, 16)
    return {"rewards": choice([
        torch.randint(2, shape).float(), 5 * torch.randn(shape), 1e-3 * torch.rand(shape)])}


def completions_of_prompts():
    B, C = randint(1, 4), randint(1, 4)
    return {"model": Toy(choice([torch.float32, torch.bfloat16])),
            "prompts": [[randint(0, 6) for _ in range(randint(1, 4))] for _ in range(B)],
            "completions": torch.randint(7, (B, C)), "length": torch.randint(1, C + 1, (B,)),
            "temperature": choice([0.7, 1.0, 2.0])}


def a_batch():
    shape = randint(1, 4), randint(1, 4)
    logprobs, old, ref, rollout = 1.5 * torch.randn(4, *shape) - 4
    return {"logprobs": logprobs, "old_logprobs": old,
            "advantages": torch.randn(choice([shape, shape[:1]])),
            "weights": torch.rand(shape) * (torch.rand(shape) < 0.8),
            "clip_low": uniform(0.1, 0.6), "clip_high": uniform(0.1, 5),
            "ref_logprobs": choice([None, ref]), "beta": choice([0.0, 0.5]),
            "rollout_logprobs": choice([None, rollout])}


def one_of(*draws):
    return lambda: choice(draws)()


# What draws a function's arguments; if these have "try", it is the way in which they are tried.
RANDOM = {
    "quantize_nvfp4": a_weight,
    "dequantize_blocks": bytes_and_scales,
    "lora_linear": one_of(
        a_layer, lambda: {"try": "gradient", "by": choice(["x", "A", "B"]), **a_layer()}),
    "adaptive_quantization_noise": sigma_and_weight,
    "noise_sigma": a_step,
    "sample": one_of(one_likely_token, one_likely_token, probabilities),
    "group_advantages": some_rewards,
    "token_logprobs": one_of(completions_of_prompts, lambda: {
        "try": "gradient", "by": "model", **completions_of_prompts(), "model": Toy(torch.float32)}),
    "policy_loss": one_of(a_batch, lambda: {"try": "gradient", "by": "logprobs", **a_batch()}),
}


def random_case(name, number):
    """A case as those in cases.json; its right result is the reference's."""
    random.seed(number)
    torch.manual_seed(number)
    arguments = RANDOM[name]()
    way = arguments.pop("try", None)
    right = tried(REFERENCE[name], way)(**copy.deepcopy(arguments))
    told = ", ".join(f"{key} {shown(value)}" for key, value in arguments.items())
    told += f" (tried by {way} of check.py)" if way else ""
    return {"given": f"random input {number}: {told}", "try": way, "arguments": arguments,
            "right": right, "mistakes": {}}


# --------------------------------------------------------------------------------------------------
# One case

KINDS = {
    "frozen": lambda rows: Frozen(torch.tensor(rows)),
    "model": lambda folder: qerl.load_model(str(HERE / folder), "bf16", lora_rank=2),
    "dtype": lambda name: getattr(torch, name),
}


def decoded(thing):
    """An object of cases.json: {"float32": [1]} is a tensor of that dtype; most stay as they are."""
    if len(thing) != 1:
        return thing
    (kind, content), = thing.items()
    if kind in KINDS:
        return KINDS[kind](content)
    dtype = getattr(torch, kind, None)
    return torch.tensor(content).to(dtype) if isinstance(dtype, torch.dtype) else thing


CASES = json.loads((HERE / "cases.json").read_text(encoding="utf-8"), object_hook=decoded)


def likeness(found, right):
    """1 if they are the same kind of thing and equal to five digits; half if not in dtype; else 0."""
    try:
        if isinstance(right, (list, tuple)):
            return min(map(likeness, found, right)) * (len(found) == len(right))
        if isinstance(right, float):
            return type(found) is not torch.Tensor and math.isclose(found, right, rel_tol=1e-5)
        if not isinstance(right, torch.Tensor):
            return found == right
        if type(found) is not torch.Tensor or found.device != right.device:
            return 0
        torch.testing.assert_close(found.double(), right.double(), rtol=1e-5, atol=1e-5)
        return 1 if found.dtype == right.dtype else 0.5
    except Exception:
        return 0


def content(value):
    """What a call may not change in an argument."""
    if isinstance(value, torch.nn.Module):
        return [*value.state_dict().values(), *(module.training for module in value.modules())]
    return value.weight if isinstance(value, Frozen) else value


def shown(value):
    """A result as text, floats to five digits."""
    try:
        if isinstance(value, torch.Tensor):
            return f"{shown(value.tolist())} ({value.dtype})".replace("torch.", "")
        if isinstance(value, (list, tuple)):
            return f"[{', '.join(map(shown, value))}]"
        return f"{value:.5g}" if isinstance(value, float) else " ".join(str(value).split())[:300]
    except Exception:
        return f"a {type(value).__name__} that cannot be shown"


def described(error, file):
    """An exception in a line, with the last line of the file that it came through."""
    places = [f" in line {frame.lineno} of {file.name}"
              for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(file)]
    return f"{type(error).__name__}{''.join(places[-1:])}: {shown(error)}"


def tried(function, way):
    """The function, or one that tries it in this way."""
    return functools.partial(globals()[way], function) if way else function


def run_case(function, case, file):
    """(1 if the result is right, half if but for its dtype, or 0; lines that say what was wrong)"""
    given = copy.deepcopy(case["arguments"])
    try:
        found = tried(function, case.get("try"))(**given)
    except Exception as error:
        found = described(error, file)
    share = likeness(found, case["right"])
    help_ = [f"likely: {text}" for text, wrong in case["mistakes"].items() if likeness(found, wrong)]
    if share == 0.5:
        help_.append("likely: the values are right, but a dtype is not")
    for name, value in case["arguments"].items():
        if not likeness(content(given[name]), content(value)):
            share = 0
            help_.append(f"likely: you change the argument {name}; it should stay as it was given")
    if share == 1:
        return 1, []
    told = [f"expected {shown(case['right'])}", f"found {shown(found)}", *help_]
    return share, [case["given"], *(f"  {line}" for line in told)]


# --------------------------------------------------------------------------------------------------
# One function

def grade(name, file, seed=0):
    """(points, lines) of a function, as it is in this file."""
    try:
        function = runpy.run_path(str(file)).get(name)
    except Exception as error:
        return 0, [f"{file.name} cannot be loaded: {described(error, file)}"]
    code = getattr(inspect.unwrap(function), "__code__", None)
    # harness/engines.py has the same rule
    if not code or code.co_filename != str(file) or "NotImplementedError" in code.co_names:
        return 0, ["not written yet: the file has no `def` of it, or still NotImplementedError"]
    theirs, ours = (of.co_varnames[:of.co_argcount]
                    for of in (code, inspect.unwrap(REFERENCE[name]).__code__))
    if theirs[:len(ours)] != ours[:len(theirs)]:
        return 0, ["the arguments should be those of the `def` in student.py, in their order"]
    fixed = [run_case(function, case, file) for case in CASES[name]]
    shares, lines = zip(*fixed)
    # The first random input that is not right decides.
    drawn = (run_case(function, random_case(name, RANDOM_INPUTS * seed + i), file)
             for i in range(RANDOM_INPUTS))
    share, random_lines = next((result for result in drawn if result[0] < 1), (1, []))
    points = POINTS[name] * (sum(shares) / len(shares) + share) / 2
    return round(points, 2), sum(lines, []) + random_lines


# --------------------------------------------------------------------------------------------------
# The cases of mycases.py

def wrong_functions():
    """{name: (the right function, the wrong one)} of wrong.py"""
    found = runpy.run_path(str(HERE / "wrong.py")).items()
    return {name: (REFERENCE[name[:-2]], wrong) for name, wrong in found if name[:-2] in REFERENCE}


def why_not(case, right, wrong, file):
    """Why a case does not count, in a line; None if it counts."""
    if case is None:
        return "no case yet"
    if len((case.__doc__ or "").split()) < 4:
        return "no docstring of four words or more that says why the results differ"
    # Wrapped, so that a case cannot tell the functions by their names.
    first, second, other = (lambda *args, _of=function, **given: _of(*args, **given)
                            for function in (right, right, wrong))
    try:
        expected, again = case(first), case(second)
    except Exception as error:
        return f"it fails with the right function: {described(error, file)}"
    if likeness(again, expected) < 1:
        return "the right function gives it two results; seed what is drawn, return tensors or numbers"
    try:
        found = case(other)
    except Exception as error:
        return f"the wrong function should give another result, no error: {described(error, file)}"
    return f"both functions give {shown(expected)}" if likeness(found, expected) == 1 else None


def grade_cases(file):
    """(points, lines) of a file of cases, functions that are called as the wrong ones."""
    if not file.is_file():
        return 0, [f"no case yet: there is no file {file.name}"]
    try:
        cases = runpy.run_path(str(file))
    except Exception as error:
        return 0, [f"{file.name} cannot be loaded: {described(error, file)}"]
    functions = wrong_functions()
    reasons = {name: why_not(cases.get(name), *both, file) for name, both in functions.items()}
    lines = [f"{name}: {reason}" for name, reason in reasons.items() if reason]
    unknown = [f"{name}: wrong.py has none" for name in cases
               if name[:-2] in REFERENCE and name not in reasons]
    return POINTS["cases"] * (1 - len(lines) / len(functions)), lines + unknown


# --------------------------------------------------------------------------------------------------
# Processes

def send_grade(name, args, connection):
    """In a process of its own. What the student prints goes to the error output."""
    os.dup2(2, 1)
    torch.set_num_threads(1)
    if name == "cases":
        result = grade_cases(args.file.resolve().with_name("mycases.py"))
    else:
        result = grade(name, args.file.resolve(), args.seed)
    connection.send_bytes(json.dumps(result).encode())


def grade_apart(name, args):
    """(points, lines) of a function or of the cases, in args.limit seconds."""
    unix = hasattr(os, "fork")
    context = multiprocessing.get_context("forkserver" if unix else "spawn")
    if unix:
        context.set_forkserver_preload(["torch", "qerl"])
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=send_grade, args=(name, args, sender))
    process.start()
    sender.close()
    try:
        if not receiver.poll(args.limit):
            return 0, [f"no result within {args.limit:g} seconds: does a loop never end?"]
        points, lines = json.loads(receiver.recv_bytes())
        if 0 <= points <= POINTS[name]:
            return points, lines
        return 0, ["the file has sent points of its own"]
    except EOFError:
        return 0, ["the process ended without a result: does the function call exit()?"]
    finally:
        process.kill()


# --------------------------------------------------------------------------------------------------
# All

def main(args):
    # The processes look for modules in ROOT, and not in the folder in which this was called.
    os.environ.update(PYTHONPATH=ROOT, PYTHONSAFEPATH="1")
    tests = []
    for name in args.names or POINTS:
        points, lines = grade_apart(name, args)
        of = POINTS[name]
        tests.append({"name": name, "score": points, "max_score": of, "output": "\n".join(lines)})
        if not args.json:
            print(f"{name:30}{points:5g} of {of}", *lines, sep="\n    ", flush=True)
    points, of = (sum(test[key] for test in tests) for key in ("score", "max_score"))
    if args.json:
        print(json.dumps({"score": round(points, 2), "tests": tests}, indent=1))
    else:
        print(f"{points:g} of {of} points")
    sys.exit(points < of)


if __name__ == "__main__":
    main(args)
