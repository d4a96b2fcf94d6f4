"""Command-line flags made from the fields of a dataclass.

So a setting's default and what --help says of it stand in one place.
"""
import argparse
import inspect
import os
import re
from dataclasses import field, fields

import torch

import qerl
from qerl import UserError


def setting(default, remark, choices=None):
    """A dataclass field that is also a flag: --help says `remark`, `choices` limit the values."""
    return field(default=default, metadata={"remark": remark, "choices": choices})


class Parser(argparse.ArgumentParser):
    """argparse's parser, with a UserError instead of a usage text and an exit."""

    def __init__(self, description, **options):
        super().__init__(
            description=description,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
            **options,
        )

    def error(self, message):
        raise UserError(f"{message}; see --help")

    def parse_args(self, argv=None):
        args = super().parse_args(argv)
        for name, value in vars(args).items():
            require_value(name, value)
        return args


def default_text(name, default, presets):
    """The end of a flag's help, its default and where a preset differs: (default 64; small 16)."""
    parts = []
    if default is not None:
        parts.append(f"default {default}")
    for preset, values in presets.items():
        if name in values:
            parts.append(f"{preset} {values[name]}")
    return f" ({'; '.join(parts)})" if parts else ""


def parse_flags(settings_class, description, presets, argv=None):
    """The flags given on the command line, as {field: value}; flags not given are left out.

    argv: the command line, by default the process's own. --help ends with what the docstring of
    settings_class says after its first line.
    """
    legend = inspect.getdoc(settings_class).partition("\n\n")[2]
    parser = Parser(description, usage="%(prog)s [flags]", epilog=legend)
    for f in fields(settings_class):
        flag = "--" + f.name.replace("_", "-")
        remark = f.metadata["remark"]
        if f.type is bool:
            parser.add_argument(flag, action="store_true", default=None, help=remark)
        elif f.type is list:
            parser.add_argument(flag, nargs="+", metavar="NAME", help=remark)
        else:
            choices = f.metadata["choices"]
            metavar = None if choices else f.type.__name__.upper()
            remark += default_text(f.name, f.default, presets)
            parser.add_argument(flag, type=f.type, choices=choices, metavar=metavar, help=remark)
    given = vars(parser.parse_args(argv))
    return {name: value for name, value in given.items() if value is not None}


def require_value(name, value):
    """Refuse an empty text, as an unset variable of the shell leaves it, or a NUL, also in a list."""
    values = value if isinstance(value, list) else [value]
    require_flag("" not in values, name, "''", "is empty; give a value or leave the flag out")
    require_flag("\0" not in str(value), name, repr(value), "holds a NUL, which no name can")


def require_flag(ok, name, value, what):
    """Unless ok, raise the one line that names a flag, its value and what is wrong with it."""
    if not ok:
        raise UserError(f"--{name.replace('_', '-')} {value}: {what}")


def check_device(name):
    """Refuse a --device that is neither the CPU nor a GPU of this machine."""
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    mps = device is not None and device.type == "mps"
    require_flag(not mps, "device", name,
                 "Apple's GPUs have no float8, in which NVFP4 keeps its scales, and nothing here "
                 "was tried on one; use --device cpu")
    known = device is not None and device.type in ("cuda", "cpu")
    require_flag(known, "device", name, "unknown; use cuda or cpu")
    require_flag(device.type != "cpu" or not device.index, "device", name,
                 "a CPU has no number; use --device cpu")
    if device.type == "cuda":
        there = torch.cuda.is_available() and (device.index or 0) < torch.cuda.device_count()
        require_flag(there, "device", name, "no such CUDA GPU here; use --device cpu")


def use_device(name):
    """The torch.device of this name; a GPU becomes the current one, on which kernels start."""
    device = torch.device(name)
    if device.type == "cuda":
        torch.cuda.set_device(device.index or 0)
    return device


def dtype_name(given, device):
    """--dtype as it was given or, if that is auto, the name of the dtype that suits the device."""
    if given != "auto":
        return given
    return str(qerl.default_dtype(torch.device(device))).removeprefix("torch.")


def full_name(model):
    """Qwen2.5-3B -> Qwen/Qwen2.5-3B-Instruct; other names and folders stay."""
    if not model or not model.startswith("Qwen") or "/" in model or os.path.isdir(model):
        return model
    chat = "-Instruct" if re.fullmatch(r"Qwen2\.5(-Coder|-Math)?-[\d.]+B", model) else ""
    if os.environ.get("RANK", "0") == "0":             # of torchrun's processes the first speaks
        print(f"--model {model} means Qwen/{model}{chat}")
    return f"Qwen/{model}{chat}"
