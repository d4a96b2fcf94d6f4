"""Folders of a model's weights, written tensor by tensor; whole or absent.

As transformers writes them: model.safetensors or, where that would be too large for the memory that
a shard takes before it is written, model-0000i-of-0000n.safetensors and an index of them.
"""
import contextlib
import glob
import hashlib
import json
import os
import shutil
import uuid

import safetensors
import safetensors.torch
from transformers import AutoConfig, GenerationConfig

import qerl
from harness.run_folder import atomic_write

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
                atomic_write(f"{self.folder}/{INDEX}", json.dumps(index, indent=1))


def size_gb(folder):
    """What the weights of a folder take on disk, in 10^9 bytes."""
    paths = glob.glob(f"{glob.escape(folder)}/*.safetensors")
    return sum(os.path.getsize(path) for path in paths) / 1e9


def files_fingerprint(folder, pattern="*.safetensors", samples=256, size=4096):
    """SHA-256 of pieces of the files in a folder, by default the weights', which others do not share.

    samples: pieces of `size` bytes in each file at most; math.inf: all bytes.
    """
    digest = hashlib.sha256()
    for path in sorted(glob.glob(f"{glob.escape(folder)}/{pattern}")):
        length = os.path.getsize(path)
        digest.update(str(length).encode())
        with open(path, "rb") as f:
            for place in range(0, length, max(size, length // samples)):
                f.seek(place)
                digest.update(f.read(size))
    return digest.hexdigest()


def generation_config(folder):
    """The GenerationConfig of a model's folder; without a file of it, what config.json says."""
    if os.path.exists(f"{folder}/generation_config.json"):
        return GenerationConfig.from_pretrained(folder)
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    return GenerationConfig.from_model_config(config)


def copy_companions(source, folder, quantization=None):
    """Copy what stands beside the weights, with another quantization_config, or none.

    These are configs, tokenizer, chat template. The generation_config.json has the token ids alone:
    whoever serves the folder samples from the policy that was evaluated here, without a
    repetition_penalty, top_k and the like.
    """
    for path in sorted(glob.glob(f"{glob.escape(source)}/*")):
        companion = path.endswith((".json", ".txt", ".jinja", "tokenizer.model"))
        if companion and "safetensors" not in os.path.basename(path):
            shutil.copy(path, folder)


    stored = generation_config(source)
    ids = {name: getattr(stored, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    atomic_write(f"{folder}/generation_config.json", json.dumps(ids, indent=1))
    with open(f"{source}/config.json", "rb") as f:
        config = json.load(f)
    config.pop("quantization_config", None)
    if quantization:
        config["quantization_config"] = quantization
    atomic_write(f"{folder}/config.json", json.dumps(config, indent=1))


def check_new_folder(out, source):
    """Refuse to write a model to `out` where something is, or into the folder that is read, if any."""
    empty = os.path.isdir(out) and not os.listdir(out)
    qerl.require(empty or not os.path.lexists(out),
                 f"{out}: is a file, or is not empty; choose another folder, or remove what it holds")
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
