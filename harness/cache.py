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
            fcntl.flock(handle, fcntl.LOCK_EX)
            alone = True
        yield alone
    finally:
        os.close(handle)                    # which unlocks it


def is_whole(folder, read):
    """Whether a folder of the cache is there and read(folder) finds it sound; says so if not."""
    if not os.path.exists(folder):
        return False
    try:
        read(folder)
    except UserError as e:
        print(f"{folder} is broken and is made again ({reason(e)})")
        return False
    return True


def made_once(name, read, make, source=None):
    """The folder `name` of the cache, which make(path) filled when it was first asked for.

    read(folder) raises a UserError if it is broken; then it is made again. source: a folder that
    `make` reads. Of several processes one makes it, and the others wait.
    """
    folder = os.path.join(CACHE, name)
    if is_whole(folder, read):
        return folder
    with naming(CACHE):
        os.makedirs(CACHE, exist_ok=True)       # what cannot be kept is not made
    with one_at_a_time(CACHE) as alone:
        if is_whole(folder, read):              # another process has made it meanwhile
            return folder
        shutil.rmtree(folder, ignore_errors=True)
        for left in glob.glob(f"{glob.escape(folder)}.*.tmp") if alone else ():
            shutil.rmtree(left, ignore_errors=True)                   # by one that was killed
        try:
            with new_folder(folder, source) as temporary:
                make(temporary)
        except UserError:
            if not is_whole(folder, read):      # not alone, another was faster
                raise
    return folder
