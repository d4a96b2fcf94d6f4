"""Command-line flags made from the fields of a dataclass, so that a setting's default and remark stand in one place."""
import argparse
from dataclasses import field, fields

import torch

from qerl import UserError


def setting(default, remark, choices=None):
    """A dataclass field with what its flag needs: the remark becomes the help, `choices` limit the values."""
    return field(default=default, metadata={"remark": remark, "choices": choices})


class Parser(argparse.ArgumentParser):
    """argparse's parser, with a UserError instead of a usage text and an exit."""

    def __init__(self, description):
        super().__init__(
            description=description,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )

    def error(self, message):
        raise UserError(f"{message}; see --help")


def default_text(name, default, presets):
    """The default as the help tells it, and where a preset has another one."""
    others = [f"{preset}: {values[name]}" for preset, values in presets.items() if name in values]
    known = [str(default)] if default is not None else []
    return f" ({', '.join(['default ' + known[0]] * len(known) + others)})" if known or others else ""


def parse_flags(settings_class, description, presets, argv=None):
    """The flags given on the command line (argv, or the process's own) as {field: value}; flags not given are left out."""
    parser = Parser(description)
    for f in fields(settings_class):
        flag = "--" + f.name.replace("_", "-")
        remark = f.metadata["remark"]
        if f.type is bool:
            parser.add_argument(flag, action="store_true", default=None, help=remark)
        else:
            text = remark + default_text(f.name, f.default, presets)
            choices = f.metadata["choices"]
            parser.add_argument(flag, type=f.type, choices=choices, metavar=None if choices else "", help=text)
    given = vars(parser.parse_args(argv))
    return {name: value for name, value in given.items() if value is not None}


def require(ok, name, value, what):
    """Raise the one line that names a flag, its value and what is wrong with it, unless ok."""
    if not ok:
        raise UserError(f"--{name.replace('_', '-')} {value}: {what}")


def check_device(name):
    """Refuse a --device that is neither the CPU nor a GPU of this machine."""
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    known = device is not None and device.type in ("cuda", "cpu")
    require(known, "device", name, "unknown; use cuda or cpu")
    if device.type == "cuda":
        there = torch.cuda.is_available() and (device.index or 0) < torch.cuda.device_count()
        require(there, "device", name, "no such CUDA GPU here; use --device cpu")
