"""What is made or fetched once and kept for later runs: the folder ~/.cache/qerl."""
import contextlib
import glob
import math
import os
import shutil
from functools import partial
from pathlib import Path

from harness.run_folder import atomic_write, fcntl, naming
from harness.shards import files_fingerprint, new_folder
from qerl import UserError

CACHE = os.path.join(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "qerl")


@contextlib.contextmanager
def one_at_a_time(folder):
    """Wait until no other process is in here with this folder.

    Gives whether that is so: Windows, and some network file systems, cannot lock a folder.
    """
    if fcntl is None:
        yield False
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        alone = False
        with contextlib.suppress(OSError):
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                print(f"waiting for another process, which makes something in {folder}", flush=True)
                fcntl.flock(handle, fcntl.LOCK_EX)
            alone = True
        yield alone
    finally:
        os.close(handle)                    # which unlocks it


# SHA-256 of all files of a folder. What it gave when the folder was made is in SEAL, which "*" omits.
fingerprint = partial(files_fingerprint, pattern="*", samples=math.inf, size=2 ** 20)
SEAL = ".sha256"


def is_sound(folder):
    """Whether a folder of the cache is there and holds, to the last bit, what was made."""
    seal = Path(folder, SEAL)
    return seal.exists() and seal.read_text("utf-8") == fingerprint(folder)


def made_once(name, make, source=None):
    """The folder `name` of the cache, which make(path) filled when it was first asked for.

    If it is broken it is made again. source: a folder that `make` reads. Of several processes one
    makes it, and the others wait; where one_at_a_time cannot lock, each makes it and the first one's
    stays.
    """
    folder = os.path.join(CACHE, name)
    if is_sound(folder):
        return folder
    with naming(CACHE):
        os.makedirs(CACHE, exist_ok=True)       # what cannot be kept is not made
    with one_at_a_time(CACHE) as alone:
        if is_sound(folder):                    # another process has made it meanwhile
            return folder
        if os.path.exists(folder):
            print(f"{folder} is broken, or of an earlier version, and is made again")
            shutil.rmtree(folder, ignore_errors=True)
        for left in glob.glob(f"{glob.escape(folder)}.*.tmp") if alone else ():
            shutil.rmtree(left, ignore_errors=True)                   # by one that was killed
        try:
            with new_folder(folder, source) as temporary:
                make(temporary)
                atomic_write(f"{temporary}/{SEAL}", fingerprint(temporary))
        except UserError:
            if not is_sound(folder):            # else another one was faster
                raise
    return folder
