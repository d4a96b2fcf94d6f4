"""A run's folder: chosen, created, locked; a stop at any moment leaves its files whole.

    metrics.jsonl            one object a step
    samples.jsonl            all completions of one question, at the first step and each checkpoint
    answers_before.jsonl     each held-out question with the policy's answers, before training
    answers_after.jsonl      and after it
    checkpoint.safetensors   what --resume goes on from; one file, so that it is whole or absent
    adapter/                 LoRA as PEFT stores it
    summary.json, curve.png, report.html
"""
import contextlib
import glob
import json
import os

from qerl import UserError

try:
    import fcntl
except ImportError:                         # Windows: runs are not locked
    fcntl = None

CACHE = os.path.join(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "qerl")


def atomic_write(path, data):
    """Write str or bytes beside `path`, then rename.

    A reader, or who comes after a kill -9, finds the old file or the new one, never half of one.
    """
    temporary = f"{path}.tmp"
    with open(temporary, "wb") as f:
        f.write(data.encode("utf-8", "replace") if isinstance(data, str) else data)
        f.flush()
        os.fsync(f.fileno())
    os.replace(temporary, path)


@contextlib.contextmanager
def creating(out):
    """Around what first writes in the folder --out, so that an OSError names it."""
    try:
        yield
    except OSError as e:
        raise UserError(f"--out {out}: cannot be written ({e.strerror}); choose another folder")


def choose_folder(stem, resume):
    """The folder of a run that --out does not name: stem-N.

    With --resume the newest that has a checkpoint, else a new one.
    """
    needed = "checkpoint.safetensors" if resume else ""     # a start that failed is not resumed
    found = glob.glob(f"{glob.escape(stem)}-[0-9]*/{needed}")
    numbers = [os.path.dirname(path).rsplit("-", 1)[1] for path in found]
    newest = max((int(n) for n in numbers if n.isdigit()), default=0)
    if not resume:
        return f"{stem}-{newest + 1}"
    if not newest:
        raise UserError(
            f"--resume: there is no run {stem}-N with a checkpoint; name its folder with --out "
            "or start without --resume"
        )
    return f"{stem}-{newest}"


def open_folder(out, resume):
    """Create and lock the folder of a run; returns the lock, to be kept until the process ends."""
    if resume and not os.path.isdir(out):
        raise UserError(
            f"--resume --out {out}: no such folder; name a run's or start without --resume"
        )
    with creating(out):
        os.makedirs(out, exist_ok=True)
        lock = open(f"{out}/lock", "w")
    if fcntl is not None:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UserError(
                f"--out {out}: in use by a running process; wait for it or choose another folder"
            )
    traces = ("metrics.jsonl", "checkpoint.safetensors")
    used = any(os.path.exists(f"{out}/{name}") for name in traces)
    if used and not resume:
        raise UserError(
            f"--out {out}: already holds a run; add --resume to go on with it "
            "or choose another folder"
        )
    return lock


def remove_if_empty(out):
    """Take away the folder of a run of which nothing came but the lock."""
    if os.listdir(out) == ["lock"]:
        os.remove(f"{out}/lock")
        with contextlib.suppress(OSError):  # "." or a link stays
            os.rmdir(out)


def read_jsonl(path):
    """The objects of a file, one a line, up to the first line that is none (torn by a kill)."""
    objects = []
    if os.path.exists(path):
        with open(path, encoding="utf-8", errors="replace") as f:
            for line in f:
                try:
                    objects.append(json.loads(line))
                except ValueError:
                    break
    return objects


def write_jsonl(path, objects):
    atomic_write(path, "".join(json.dumps(o) + "\n" for o in objects))


def append_jsonl(path, entry):
    with open(path, "a", encoding="utf-8") as f:
        f.write(json.dumps(entry) + "\n")


def read_log(folder, last_step):
    """The metrics up to last_step. What a killed process logged after it is cut from the files."""
    path = f"{folder}/metrics.jsonl"
    metrics = read_jsonl(path)[:last_step]
    if len(metrics) < last_step:
        raise UserError(
            f"{path}: not the log of this run's first {last_step} steps; "
            "start again in another --out"
        )
    samples = [s for s in read_jsonl(f"{folder}/samples.jsonl") if s["step"] <= last_step]
    write_jsonl(path, metrics)
    write_jsonl(f"{folder}/samples.jsonl", samples)
    return metrics
