"""Folders of a model's weights, written tensor by tensor; whole or absent.

As transformers writes them: model.safetensors or, where that would be too large for the memory that
a shard takes before it is written, model-0000i-of-0000n.safetensors and an index of them.
"""
import contextlib
import glob
import json
import os
import shutil
import uuid

import safetensors
import safetensors.torch

import qerl

SHARD_BYTES = 2 * 10 ** 9          # of a shard at most, unless one tensor alone is larger

INDEX = "model.safetensors.index.json"


@contextlib.contextmanager
def writing(folder):
    """Around what writes there: a full disk, or a missing permission, is a UserError."""
    try:
        yield
    except (OSError, safetensors.SafetensorError) as e:
        text = getattr(e, "strerror", None) or qerl.reason(e)
        raise qerl.UserError(f"{folder}: cannot be written ({text}); free some space, or choose another "
                             "folder") from e


class ShardWriter:
    """Keeps the tensors that it is given until they fill a shard, then writes them."""

    def __init__(self, folder):
        self.folder = folder
        self.shards = []           # a list of the names in each that is written
        self.waiting = {}          # {name: tensor on the CPU} of the next
        self.waiting_bytes = 0
        self.total_bytes = 0

    def add(self, name, tensor):
        """Take charge of a tensor of any device."""
        if self.waiting and self.waiting_bytes + tensor.nbytes > SHARD_BYTES:
            self.write_shard()
        self.waiting[name] = tensor.cpu().contiguous()
        self.waiting_bytes += tensor.nbytes
        self.total_bytes += tensor.nbytes

    def path(self, number):
        """Where a shard is written before their count is known."""
        return f"{self.folder}/{number}.safetensors"

    def write_shard(self):
        path = self.path(len(self.shards))
        with writing(self.folder):
            safetensors.torch.save_file(self.waiting, path, {"format": "pt"})
            # The library gives a file to its owner alone; here whoever may enter the folder reads it.
            os.chmod(path, os.stat(self.folder).st_mode & 0o666)
            with open(path, "rb+") as f:
                os.fsync(f.fileno())
        self.shards.append(list(self.waiting))
        self.waiting = {}
        self.waiting_bytes = 0

    def close(self):
        """Write the last shard, give all their names, and write the index if there are several."""
        self.write_shard()
        count = len(self.shards)
        names = [f"model-{i + 1:05}-of-{count:05}.safetensors" for i in range(count)]
        if count == 1:
            names = ["model.safetensors"]
        place = {}                                     # tensor name -> name of its file
        with writing(self.folder):
            for i, name in enumerate(names):
                os.rename(self.path(i), f"{self.folder}/{name}")
                place.update(dict.fromkeys(self.shards[i], name))
            if count > 1:
                index = {"metadata": {"total_size": self.total_bytes}, "weight_map": place}
                with open(f"{self.folder}/{INDEX}", "w") as f:
                    json.dump(index, f, indent=1)


def size_gb(folder):
    """What the weights of a folder take on disk, in 10^9 bytes."""
    paths = glob.glob(f"{glob.escape(folder)}/*.safetensors")
    return sum(os.path.getsize(path) for path in paths) / 1e9


def copy_companions(source, folder):
    """Copy what stands beside the weights: configs, tokenizer, chat template."""
    for path in sorted(glob.glob(f"{glob.escape(source)}/*")):
        companion = path.endswith((".json", ".txt", ".jinja", "tokenizer.model"))
        if companion and "safetensors" not in os.path.basename(path):
            shutil.copy(path, folder)


def write_config(source, folder, quantization=None):
    """Write the config.json of the folder `source` with another quantization_config, or none."""
    with open(f"{source}/config.json") as f:
        config = json.load(f)
    config.pop("quantization_config", None)
    if quantization:
        config["quantization_config"] = quantization
    with open(f"{folder}/config.json", "w") as f:
        json.dump(config, f, indent=1)


def check_new_folder(out, source):
    """Refuse to write a model to `out` where something is, or into the folder that is read, if any."""
    qerl.require(not os.path.lexists(out) or os.path.isdir(out),
                 f"{out}: is a file; choose another folder")
    qerl.require(not os.path.isdir(out) or not os.listdir(out),
                 f"{out}: is not empty; choose another folder, or remove what it holds")
    if source:
        read = os.path.realpath(source)
        inside = os.path.commonpath([read, os.path.realpath(out)]) == read
        qerl.require(not inside, f"{out}: lies in the model's own folder {source}; choose another")


@contextlib.contextmanager
def new_folder(out, source):
    """Give a folder beside `out` to be filled; it becomes `out` when all has gone well.

    source: the folder that is read, or None. A kill leaves at most OUT.xxxxxxxx.tmp. Raises UserError.
    """
    check_new_folder(out, source)
    temporary = f"{os.path.abspath(out)}.{uuid.uuid4().hex[:8]}.tmp"
    try:
        with writing(out):
            os.makedirs(temporary)
        yield temporary
        with writing(out):
            if os.path.isdir(out):                     # an empty one; Windows renames onto none
                os.rmdir(out)
            os.rename(temporary, out)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
