"""What is made or fetched once and kept for later runs: the folder ~/.cache/qerl."""
import contextlib
import glob
import math
import os
import shutil
from functools import partial
from pathlib import Path

from filelock import FileLock, Timeout

from harness.run_folder import atomic_write, naming
from harness.shards import files_fingerprint, new_folder

CACHE = os.path.join(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "qerl")


@contextlib.contextmanager
def one_at_a_time(folder):
    """Wait until no other process is in here with this folder."""
    lock = FileLock(f"{folder}.lock")
    try:
        lock.acquire(blocking=False)
    except Timeout:
        print(f"waiting for another process, which makes something in {folder}", flush=True)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


# SHA-256 of all files of a folder. What it gave when the folder was made is in SEAL, which "*" omits.
fingerprint = partial(files_fingerprint, pattern="*", samples=math.inf, size=2 ** 20)
SEAL = ".sha256"


def is_sound(folder):
    """Whether a folder of the cache is there and holds, to the last bit, what was made."""
    seal = Path(folder, SEAL)
    return seal.exists() and seal.read_bytes() == fingerprint(folder).encode()


def made_once(name, make, source=None):
    """The folder `name` of the cache, which make(path) filled when it was first asked for.

    If it is broken it is made again. source: a folder that `make` reads. Of several processes one
    makes it, and the others wait.
    """
    folder = os.path.join(CACHE, name)
    if is_sound(folder):
        return folder
    with naming(CACHE):
        os.makedirs(CACHE, exist_ok=True)       # what cannot be kept is not made
    with one_at_a_time(CACHE):
        if is_sound(folder):                    # another process has made it meanwhile
            return folder
        if os.path.exists(folder):
            print(f"{folder} is broken, or of an earlier version, and is made again")
            shutil.rmtree(folder, ignore_errors=True)
        for left in glob.glob(f"{glob.escape(folder)}.*.tmp"):
            shutil.rmtree(left, ignore_errors=True)                   # by one that was killed
        with new_folder(folder, source) as temporary:
            make(temporary)
            atomic_write(f"{temporary}/{SEAL}", fingerprint(temporary))
    return folder
