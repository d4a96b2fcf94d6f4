"""A run's folder: chosen, created, locked; a stop at any moment leaves its files whole.

    metrics.jsonl            one object a step
    samples.jsonl            all completions of one question, at the first step and each checkpoint
    answers_before.jsonl     each held-out question with the policy's answers, before training
    answers_after.jsonl      and after it
    checkpoint.safetensors   what --resume goes on from; one file, so that it is whole or absent
    adapter/                 LoRA as PEFT stores it
    summary.json, curve.png, report.html; eval.json and answers_now.jsonl with --eval-only
    .lock                    held while a process runs here
"""
import contextlib
import glob
import json
import os
import sys

from filelock import FileLock, Timeout

from qerl import UserError

FILES = ["checkpoint.safetensors", "adapter", "metrics.jsonl", "samples.jsonl", "answers_*.jsonl",
         "summary.json", "curve.png", "report.html", "eval.json"]


def atomic_write(path, data):
    """Write str or bytes beside `path`, then rename.

    A reader, or who comes after a kill -9, finds the old file or the new one, never half of one.
    """
    temporary = f"{path}.tmp"
    with naming(temporary):
        try:
            with open(temporary, "wb") as f:
                f.write(data.encode("utf-8", "replace") if isinstance(data, str) else data)
                f.flush()
                os.fsync(f.fileno())
        except OSError:                     # half a file only fills a disk that is full
            with contextlib.suppress(OSError):
                os.remove(temporary)
            raise
    os.replace(temporary, path)


@contextlib.contextmanager
def naming(path):
    """Let an OSError name the file, which one from write or fsync does not."""
    try:
        yield
    except OSError as e:
        e.filename = e.filename or path
        raise


@contextlib.contextmanager
def creating(folder, flag="--out"):
    """Around what first writes in the folder of a flag, so that an OSError names them."""
    try:
        yield
    except OSError as e:
        raise UserError(f"{flag} {folder}: cannot be written ({e.strerror}); choose another folder")


def choose_folder(stem, resume):
    """The folder of a run that --out does not name: stem-N.

    With --resume the newest that has a checkpoint, else a new one.
    """
    needed = "checkpoint.safetensors" if resume else ""     # a start that failed is not resumed
    found = glob.glob(f"{glob.escape(stem)}-[0-9]*/{needed}")
    numbers = [os.path.dirname(path).rsplit("-", 1)[1] for path in found]
    newest = max((int(n) for n in numbers if n.isdecimal()), default=0)     # "1²" is no number
    if not resume:
        return new_folder_after(stem, newest)
    if not newest:
        raise UserError(
            f"--resume: there is no run {stem}-N with a checkpoint; name its folder with --out "
            "or start without --resume"
        )
    return f"{stem}-{newest}"


def new_folder_after(stem, number):
    """Create stem-N, N above `number` and the first that no other run has taken meanwhile."""
    with creating(f"{stem}-{number + 1}"):
        while True:
            number += 1
            with contextlib.suppress(FileExistsError):
                os.makedirs(f"{stem}-{number}")
                return f"{stem}-{number}"


def open_folder(out, resume):
    """Create and lock the folder of a run; returns the lock, to be kept until the process ends."""
    if resume and not os.path.isdir(out):
        raise UserError(
            f"--resume --out {out}: no such folder; name a run's or start without --resume"
        )
    lock = FileLock(f"{out}/.lock")
    with creating(out):
        os.makedirs(out, exist_ok=True)
        try:
            lock.acquire(blocking=False)
        except Timeout:
            raise UserError(f"--out {out}: in use by a running process; wait for it or choose another folder")
        except NotImplementedError:         # by some network file systems
            print(f"warning: --out {out}: cannot be locked; start no second run there", file=sys.stderr)
    try:
        refuse_to_overwrite(out, resume)
    except UserError:
        lock.release()
        raise
    return lock


def traces(out):
    """The files of a run in this folder; logs that are still empty do not count."""
    found = [name for pattern in FILES for name in glob.glob(pattern, root_dir=out)]
    begun = ("metrics.jsonl", "samples.jsonl")
    return [name for name in found if name not in begun or os.path.getsize(f"{out}/{name}")]


def refuse_to_overwrite(out, resume):
    """A folder's files stay: a new run needs an empty one, --resume the checkpoint of the run."""
    found = traces(out)
    # Before its first checkpoint a run writes these at most.
    later = [name for name in found if name != "answers_before.jsonl"]
    resumable = not later or "checkpoint.safetensors" in found
    if found and not resume:
        going_on = "add --resume to go on with it or " if resumable else ""
        raise UserError(
            f"--out {out}: already holds a run ({found[0]}); {going_on}choose another folder"
        )
    if not resumable:
        raise UserError(
            f"--resume --out {out}: has no checkpoint.safetensors, but {later[0]} is there and stays; "
            "start a new run in another --out"
        )


def remove_if_empty(lock):
    """Take away the folder of a run of which nothing came but the lock."""
    out = os.path.dirname(lock.lock_file)
    if os.listdir(out) == [".lock"]:
        lock.release()                      # Windows removes no open file
        with contextlib.suppress(OSError):  # "." or a link stays, and a lock that another took
            os.remove(lock.lock_file)
            os.rmdir(out)


def read_jsonl(path):
    """The objects of a file, one a line; a line that is none, as one torn by a kill, is left out."""
    objects = []
    if os.path.exists(path):
        with open(path, encoding="utf-8", errors="replace") as f:
            for line in f:
                try:
                    objects.append(json.loads(line))
                except (ValueError, RecursionError):
                    continue
    return objects


def write_jsonl(path, objects):
    atomic_write(path, "".join(json.dumps(o) + "\n" for o in objects))


def append_jsonl(path, entry):
    """Add a line; behind one that a kill has torn it begins a new one."""
    with naming(path), open(path, "ab+") as f:
        torn = b""
        if f.seek(0, os.SEEK_END):
            f.seek(-1, os.SEEK_END)
            torn = b"\n" if f.read() != b"\n" else b""
        f.write(torn + json.dumps(entry, allow_nan=False).encode() + b"\n")


def read_log(folder, last_step):
    """The metrics up to last_step. What a killed process logged after it is cut from the files.

    A log that was lost ends no run: it goes on without the steps that it lacks.
    """
    kept = {}
    for name in ("metrics.jsonl", "samples.jsonl"):
        kept[name] = [o for o in read_jsonl(f"{folder}/{name}") if o["step"] <= last_step]
        write_jsonl(f"{folder}/{name}", kept[name])
    metrics = kept["metrics.jsonl"]
    if len(metrics) < last_step:
        print(f"warning: {folder}/metrics.jsonl lacks {last_step - len(metrics)} of the "
              f"{last_step} steps before; it goes on with step {last_step + 1}", file=sys.stderr)
    return metrics
