"""How a run ends that cannot go on: one line with the thing and the remedy, and an exit status."""
import contextlib
import errno
import os
import sys
from dataclasses import dataclass

import safetensors
from filelock import BaseFileLock

from harness.memory import is_out_of_memory
from harness.ranks import Ranks
from harness.run_folder import remove_if_empty
from qerl import UserError

LESS_MEMORY = ("lower --slots (rollout) or --micro-tokens (update); if the model itself does not fit, "
               "use 4-bit --weights, --quantizer rtn or a smaller --model")
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@dataclass
class Run:
    """What the last line of a run that stops has to know of it."""
    folder: str = None             # where it lives; None: nothing to go on with
    lock: BaseFileLock = None      # of the folder, released at the end


@contextlib.contextmanager
def one_line():
    """Around a whole program: an error that the user can mend is one line, not a traceback.

    Gives a Run to be filled in. Exit status: 2; after Ctrl-C 130, after a closed pipe 141.
    """
    run = Run()
    if hasattr(sys.stdout, "reconfigure"):  # a folder's name may have letters that it cannot show
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        yield run
    except UserError as e:
        leave_no_empty_folder(run)
        end(str(e))
    except BrokenPipeError:
        sys.exit(141)
    except (OSError, safetensors.SafetensorError) as e:
        leave_no_empty_folder(run)
        end(f"{what_failed(e, run.folder)}{how_to_go_on(run.folder)}")
    except RecursionError:
        end("JSON nested too deeply, in a line of --data or in the model's config.json; "
            "mend or remove it")
    except RuntimeError as e:               # torch.OutOfMemoryError is one; a CPU's is a plain one
        if not is_out_of_memory(e):
            raise
        end(f"out of memory; {LESS_MEMORY}{how_to_go_on(run.folder)}")
    except KeyboardInterrupt:
        ranks = Ranks()
        if not ranks.local_rank:
            print(f"\nstopped{how_to_go_on(run.folder)}", file=sys.stderr)
        ranks.leave(130)
    finally:
        if run.lock:
            run.lock.release()
        flush_quietly()


def leave_no_empty_folder(run):
    """Take a new run's folder away again, if nothing came of it."""
    if run.lock:
        remove_if_empty(run.lock)
    if run.folder and not os.path.isdir(run.folder):
        run.folder = None


def end(message):
    """End with an error's line and status 2."""
    print(f"error: {message}", file=sys.stderr)
    flush_quietly()
    Ranks().leave(2)


def what_failed(error, folder):
    """What an operating system's error is about, and the remedy."""
    file = getattr(error, "filename", None)
    if getattr(error, "errno", None) in FULL or "No space left" in str(error):
        place = os.path.dirname(os.path.abspath(file)) if file else folder or "the cache"
        return f"{place}: the disk is full, or the file larger than it may be; free some space"
    if isinstance(error, PermissionError):
        if file and os.path.isfile(file) and not os.access(file, os.R_OK):
            return f"{error}; let it be read"
        return f"{error}; let it be written, and close the program that has it open"
    return f"{error}; mend or remove what it names"


def how_to_go_on(folder):
    """What to type after a stop, if there is something to go on with."""
    if folder is None:
        return ""
    return f"; go on with the same command and --resume --out {folder}"


def flush_quietly():
    """Write what is still to be printed; to nowhere if no one reads on, as after `| head`."""
    if sys.stdout is None:                  # closed before the start
        return
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
