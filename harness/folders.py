"""Folders that a stop at any moment leaves whole: a run's, a model's, and the cache ~/.cache/qerl.

A run's has

    metrics.jsonl            one object a step
    samples.jsonl            all completions of one question, at the first step and each checkpoint
    answers_before.jsonl     each held-out question with the policy's answers, before training
    answers_after.jsonl      and after it
    checkpoint               what --resume goes on from; one file, so that it is whole or absent
    adapter/                 LoRA as PEFT stores it
    model/                   with --lora-rank 0, at the end: a folder that transformers loads
    summary.json, curve.png, report.html; eval.json and answers_now.jsonl with --eval-only
    .lock                    held while a process runs here
"""
import contextlib
import glob
import hashlib
import itertools
import json
import os
import shutil
import sys
import types
from pathlib import Path

from filelock import FileLock, Timeout
from transformers import AutoConfig, GenerationConfig

from harness.errors import UserError, require


CHECKPOINT = "checkpoint"
LOCK = ".lock"


@contextlib.contextmanager
def named(path):
    """Inside, an error of the system that names no file, as of a full disk, names this one."""
    try:
        yield
    except OSError as e:
        e.filename = e.filename or str(path)
        raise


def atomic_write(path, data):
    """Write str or bytes beside `path`, then rename.

    A reader, or who comes after a kill -9, finds the old file or the new one, never half of one.
    """
    temporary = Path(f"{path}.tmp")
    try:
        with named(path), open(temporary, "wb") as f:
            f.write(data.encode("utf-8", "replace") if isinstance(data, str) else data)
            f.flush()
            os.fsync(f.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)              # so that a full disk is not filled by it


def run_file(path):
    """A user's Python file as a module, which pickle and type hints find by its name."""
    module = types.ModuleType(Path(path).stem)
    module.__file__ = path
    sys.modules.setdefault(module.__name__, module)
    sys.path.append(str(Path(path).resolve().parent))          # it may import its neighbours
    exec(compile(Path(path).read_bytes(), path, "exec"), vars(module))
    return module


def newest_run():
    """The folder that --resume means without --out."""
    found = glob.glob(f"runs/*/{CHECKPOINT}")
    require(found, "--resume: no run under runs/ has a checkpoint; name its folder with --out or start "
                   "without --resume")
    return os.path.dirname(max(found, key=os.path.getmtime))


def new_run(stem):
    """Create the folder of a run that --out does not name: stem-N."""
    for number in itertools.count(1):
        with contextlib.suppress(FileExistsError):
            os.makedirs(f"{stem}-{number}")
            return f"{stem}-{number}"


def open_folder(out, resume):
    """Create and lock the folder of a run; returns the lock, to be kept until the process ends."""
    if os.path.lexists(out) and not resume:
        require(os.path.isdir(out), f"{out}: is a file; choose a folder")
        # A stop before the first step leaves these.
        require(set(os.listdir(out)) <= {LOCK, f"{CHECKPOINT}.tmp"},
                f"{out}: is not empty; choose another folder, or go on by --resume if a run is in it")
    os.makedirs(out, exist_ok=True)
    lock = FileLock(f"{out}/{LOCK}")
    try:
        with named(lock.lock_file):            # a file system may have no locks
            lock.acquire(blocking=False)
    except Timeout:
        raise UserError(f"--out {out}: in use by a running process; wait for it or choose another folder")
    return lock


def read_json(path):
    return json.loads(Path(path).read_bytes())


def write_json(path, value):
    atomic_write(path, json.dumps(value, indent=1))


def parsed(content):
    """What JSON says; None if it is none."""
    try:
        return json.loads(content)
    except (ValueError, RecursionError):               # bytes that are no UTF-8 are a ValueError
        return None


def read_jsonl(path):
    """The objects of a file, one a line; a line that is none, as one torn by a kill, is left out."""
    lines = Path(path).read_bytes().splitlines() if os.path.exists(path) else []
    return [o for o in map(parsed, lines) if isinstance(o, dict)]


def read_steps(path):
    """The objects of a run's metrics.jsonl or samples.jsonl that have a step's number."""
    return [o for o in read_jsonl(path) if isinstance(o.get("step"), int)]


def write_jsonl(path, objects):
    atomic_write(path, "".join(json.dumps(o) + "\n" for o in objects))


def append_jsonl(path, entry):
    with named(path), open(path, "ab") as f:
        f.write(json.dumps(entry, allow_nan=False).encode() + b"\n")


def cut_log(folder, last_step):
    """Take from a run's files what a killed process logged after this step."""
    for name in ("metrics.jsonl", "samples.jsonl"):
        kept = [o for o in read_steps(f"{folder}/{name}") if o["step"] <= last_step]
        write_jsonl(f"{folder}/{name}", kept)


# --------------------------------------------------------------------------------------------------
# Folders of a model's weights

def fingerprint(parts):
    """SHA-256 of bytes, and of other values as Python writes them, one behind the other."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part if isinstance(part, bytes) else repr(part).encode())
    return digest.hexdigest()


def weight_pieces(folder):
    """Each weights file's length and 256 pieces of 4 KiB, in which other weights differ."""
    for path in sorted(Path(folder).glob("*.safetensors")):
        length = path.stat().st_size
        yield length
        with open(path, "rb") as f:
            for place in range(0, length, max(4096, length // 256)):
                f.seek(place)
                yield f.read(4096)


def policy_fingerprints(folder, eos):
    """{what a policy is made of: its fingerprint}; eos: the token ids that end a completion."""
    config = Path(folder, "config.json").read_bytes()
    return {"weights or 4-bit codes": fingerprint(weight_pieces(folder)),
            "config.json or the EOS tokens": fingerprint([config, sorted(eos)])}


def generation_config(folder):
    """The GenerationConfig of a model's folder; without a file of it, what config.json says."""
    if os.path.exists(f"{folder}/generation_config.json"):
        found = GenerationConfig.from_pretrained(folder)
    else:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        found = GenerationConfig.from_model_config(config)
    ends = found.eos_token_id if isinstance(found.eos_token_id, list) else [found.eos_token_id]
    require(all(end is None or type(end) is int and end in range(2 ** 31) for end in ends),
            f"eos_token_id is {found.eos_token_id}, not a token's number or a list of such")
    return found


@contextlib.contextmanager
def new_folder(out):
    """Give a folder beside `out` to be filled; it becomes `out` when all has gone well.

    A kill leaves at most OUT.tmp, which the next call removes.
    """
    require(not os.path.lexists(out), f"{out}: is there already; name a new folder")
    temporary = f"{os.path.abspath(out)}.tmp"
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        with named(out):
            os.makedirs(temporary)
            yield temporary
        os.rename(temporary, out)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


# --------------------------------------------------------------------------------------------------
# What is made or fetched once and kept for later runs

CACHE = os.path.join(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "qerl")


def made_once(name, make):
    """The folder `name` of the cache, which make(path) filled when it was first asked for.

    It is whole, because it gets its name last. Of several processes one makes it, the others wait.
    """
    folder = os.path.join(CACHE, name)
    if not os.path.isdir(folder):
        os.makedirs(CACHE, exist_ok=True)           # what cannot be kept is not made
        with named(f"{CACHE}.lock"), FileLock(f"{CACHE}.lock"):
            if not os.path.isdir(folder):           # else another process has made it meanwhile
                with new_folder(folder) as temporary:
                    make(temporary)
    return folder
