"""What is made or fetched once and kept for later runs: the folder ~/.cache/qerl."""
import contextlib
import glob
import os
import shutil

from harness.run_folder import fcntl, naming
from harness.shards import new_folder
from qerl import UserError, reason

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


def problem(folder, read):
    """Why a folder of the cache cannot be used, in a line; None if read(folder) finds it sound."""
    if not os.path.exists(folder):
        return "is not there"
    try:
        read(folder)
    except UserError as e:
        return reason(e)
    return None


def made_once(name, read, make, source=None):
    """The folder `name` of the cache, which make(path) filled when it was first asked for.

    read(folder) raises a UserError if it is broken; then it is made again. source: a folder that
    `make` reads. Of several processes one makes it, and the others wait; where one_at_a_time cannot
    lock, each makes it and the first one's stays.
    """
    folder = os.path.join(CACHE, name)
    if problem(folder, read) is None:
        return folder
    with naming(CACHE):
        os.makedirs(CACHE, exist_ok=True)       # what cannot be kept is not made
    with one_at_a_time(CACHE) as alone:
        why = problem(folder, read)
        if why is None:                         # another process has made it meanwhile
            return folder
        if os.path.exists(folder):
            print(f"{folder} is broken and is made again ({why})")
            shutil.rmtree(folder, ignore_errors=True)
        for left in glob.glob(f"{glob.escape(folder)}.*.tmp") if alone else ():
            shutil.rmtree(left, ignore_errors=True)                   # by one that was killed
        try:
            with new_folder(folder, source) as temporary:
                make(temporary)
        except UserError:
            if problem(folder, read):           # else another one was faster
                raise
    return folder
