"""What computes a run: an engine, which is qerl or harness.fast, or a neighbour of the folder methods."""
import importlib
import inspect

import qerl
from harness.errors import UserError, reason
from harness.folders import run_file


def usual_engine(settings):
    """The engine where --engine names none: what you read runs until you name a model."""
    if settings.method.endswith(".py"):
        return "plain"
    needs_fast = is_neighbour(settings.method) or settings.shard or settings.lora_rank == 0
    return "fast" if needs_fast or settings.model else "plain"


def find_engine(settings):
    """The module that --engine names; fast.py and its kernels are imported only when they are asked for."""
    return qerl if settings.engine == "plain" else importlib.import_module("harness.fast")


def may_be_exact(settings, processes):
    """Whether a run's settings leave room for exact sampling; the machine may still lack what it needs."""
    return settings.engine == "fast" and settings.method == "qerl" and processes == 1


def is_neighbour(name):
    """Whether --method NAME is a file of the folder methods."""
    return name != "qerl" and not name.endswith(".py")


def neighbours():
    """The package methods. It lies above this one, so it is looked up by name, where a flag asks for it."""
    return importlib.import_module("methods")


def find_method(settings):
    """The neighbour that --method names, a methods.Method, or None. A FILE.py changes qerl."""
    if settings.method.endswith(".py"):
        replace_functions(settings.method)
    return neighbours().find(settings.method, settings) if is_neighbour(settings.method) else None


def replace_functions(path):
    """Let the functions of a file take the place of qerl's own, also in FORMATS (docs/lab).

    A function in which NotImplementedError still stands is not written yet; qerl's stays.
    """
    try:
        found = vars(run_file(path))
    except (Exception, SystemExit) as e:
        raise UserError(f"--method {path}: cannot be run ({reason(e)}); mend the file")
    taken = []
    for name, function in found.items():
        code = getattr(inspect.unwrap(function), "__code__", None) if callable(function) else None
        written = code and code.co_filename == path and "NotImplementedError" not in code.co_names
        if written and hasattr(qerl, name):
            for format in qerl.FORMATS.values():
                if format.quantize is getattr(qerl, name):
                    format.quantize = function
            setattr(qerl, name, function)
            taken.append(name)
    print(f"of {path}: {', '.join(taken) or 'no function is written yet'}; qerl.py's others")
