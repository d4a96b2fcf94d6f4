"""The command line: flags made from a dataclass, errors as one line."""
import argparse
import contextlib
import inspect
import json
import os
import re
import shlex
import sys
import traceback
from dataclasses import fields

import safetensors

import qerl
from harness.ranks import Ranks
from harness.errors import UserError, require


class Parser(argparse.ArgumentParser):
    """argparse's parser, with a UserError instead of a usage text and an exit."""

    def __init__(self, description, **options):
        super().__init__(
            description=description,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
            **options,
        )
        # Of arguments without a type. A shell leaves the ~ of --out=~/x; no text but a path begins so.
        self.register("type", None, os.path.expanduser)

    def error(self, message):
        raise UserError(f"{message}; see --help")

    def format_help(self):
        if callable(self.epilog):
            self.epilog = self.epilog()
        return super().format_help()


def JSON_object(text):
    value = json.loads(text)
    if not isinstance(value, dict):
        raise ValueError
    return value


KINDS = {
    bool: {"action": argparse.BooleanOptionalAction},
    dict: {"type": JSON_object},
    list: {"nargs": "+", "action": "extend"},
    str: {},
}


def parse_flags(settings_class, description, presets, choices, argv):
    """The flags given on the command line, as {field: value}; flags not given are left out.

    presets: {name: {field: its default there}}; choices: {field: the values that it may have}; argv:
    the command line, None: the process's own. --help ends with the source of settings_class,
    in which a comment behind each field says what it is.
    """
    def legend():                       # for --help alone: under a profiler there is no source of it
        lines = [inspect.getsource(settings_class)]
        lines += [f"--{name}: {', '.join(values)}" for name, values in choices.items()]
        lines += [f"--preset {name}: {values}" for name, values in presets.items()]
        return "\n".join(lines)

    parser = Parser(description, usage="%(prog)s [flags]", epilog=legend,
                    argument_default=argparse.SUPPRESS)
    for f in fields(settings_class):
        parser.add_argument("--" + f.name.replace("_", "-"), help=argparse.SUPPRESS,
                            **KINDS.get(f.type, {"type": f.type}))
    return vars(parser.parse_args(argv))


def require_flag(ok, name, value, what):
    """Unless ok, raise the one line that names a flag, its value, if it takes one, and what is wrong."""
    given = "" if value is True else f" {value}"
    require(ok, f"--{name.replace('_', '-')}{given}: {what}")


def full_name(model):
    """Qwen2.5-3B -> Qwen/Qwen2.5-3B-Instruct; other names and folders stay."""
    if not model.startswith("Qwen") or "/" in model or os.path.isdir(model):
        return model
    chat = "-Instruct" if re.fullmatch(r"Qwen2\.5(-Coder|-Math)?-[\d.]+B", model) else ""
    print(f"--model {model} means Qwen/{model}{chat}")
    return f"Qwen/{model}{chat}"


def command_line():
    """The command that started this process, as far as a process can know."""
    ranks = Ranks()
    program = f"torchrun --nproc_per_node={ranks.here}" if ranks.count > 1 else "python"
    return f"{program} {shlex.join([os.path.basename(sys.argv[0]), *sys.argv[1:]])}"


# --------------------------------------------------------------------------------------------------
# How a program ends that cannot go on: one line with the thing and the remedy, and an exit status

MEMORY = ("out of memory; lower --slots (rollout) or --micro-tokens (update); if the model itself does "
          "not fit, use 4-bit --weights, --quantizer rtn or a smaller --model")


@contextlib.contextmanager
def one_line():
    """Around a whole program: an error that the user can mend is one line, not a traceback.

    Gives the process's Ranks. Exit status: 2; after Ctrl-C 130, after a closed pipe 141.
    """
    ranks = Ranks()
    if not ranks.main:                      # rank 0 alone prints to it
        sys.stdout = open(os.devnull, "w", encoding="utf-8")
    elif hasattr(sys.stdout, "reconfigure"):           # it may lack letters of a folder's name
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        words = sys.argv[1:]
        require(not any(word == "" or word.endswith("=") for word in words),
                f"{shlex.join(words)}: a value is empty; give one or leave the flag out")
        yield ranks
        print(end="", flush=True)
    except BrokenPipeError:                 # no one reads on, as after `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        ranks.leave(141)
    except KeyboardInterrupt as e:
        end(ranks, e, "stopped", status=130)
    except (UserError, OSError, safetensors.SafetensorError) as e:
        end(ranks, e, e)
    except AssertionError as e:
        if traceback.extract_tb(e.__traceback__)[-1].filename != qerl.__file__:
            raise
        end(ranks, e, e)
    except RuntimeError as e:               # torch.OutOfMemoryError is one; a CPU's is a plain one
        if not re.search("out of memory|can't allocate memory", str(e)):
            raise
        end(ranks, e, MEMORY)


def end(ranks, error, why, status=2):
    """End with an error's line and this status; error.go_on says how to go on (run.run_folder)."""
    if ranks.first_to_say(str(why)):
        print(f"error: {why}{getattr(error, 'go_on', '')}", file=sys.stderr)
    ranks.leave(status)
