"""Folders of a model's weights: written whole or not at all, kept in a cache, packed in NVFP4.

Such a packed folder is compressed-tensors' "nvfp4-pack-quantized", as llm-compressor writes it and as
qerl.load_model, vLLM and transformers read it.
"""
import contextlib
import glob
import hashlib
import inspect
import json
import math
import os
import shutil
import uuid
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import safetensors
import safetensors.torch
import torch
from filelock import FileLock, Timeout
from tqdm import tqdm
from transformers import AutoConfig, GenerationConfig

import qerl
from harness.ranks import Ranks
from harness.run_folder import atomic_write, naming

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


# --------------------------------------------------------------------------------------------------
# What is made or fetched once and kept for later runs: the folder ~/.cache/qerl

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


# --------------------------------------------------------------------------------------------------
# Loading with a bar; NVFP4

def load_with_progress(folder, *settings, checkpoint_class=qerl.Checkpoint, desc="loading", **options):
    """qerl.load_model; what takes longer than two seconds shows a bar on stderr."""
    with tqdm(desc=desc, unit="layer", delay=2, disable=not Ranks().main) as bar:

        def make_checkpoint(files, *rest):
            checkpoint = checkpoint_class(files, *rest)
            make_layer = checkpoint.linear
            bar.total = sum(name.endswith("input_layernorm.weight") for name in files)

            def linear(prefix, leaves, *shape):
                bar.update(leaves == ["down_proj"])    # the last one of a block
                return make_layer(prefix, leaves, *shape)

            checkpoint.linear = linear
            return checkpoint

        return qerl.load_model(folder, *settings, checkpoint_class=make_checkpoint, **options)


# What compressed-tensors calls NVFP4A16: weights in NVFP4, activations as they are.
NVFP4A16 = {
    "quant_method": "compressed-tensors",
    "format": "nvfp4-pack-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head"],
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": {
        "num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16,
        "symmetric": True, "dynamic": False, "scale_dtype": "torch.float8_e4m3fn",
    }}},
}


def is_packed(folder):
    """Whether a layer of this folder is in 4 bits."""
    return qerl.Checkpoint(qerl.open_tensors(folder, "cpu")).is_packed


def require_16_bit(folder, flag):
    """Refuse a folder of which a layer is in 4 bits: `flag` needs the weights before that."""
    qerl.require(not is_packed(folder), f"{flag}: {folder} is in 4 bits already; give the model before it "
                                        "was quantised, or leave the flag out")


def named_parts(name, packed, block_scale, global_scale):
    """What quantize_nvfp4 returns of the layer `name`, under compressed-tensors' names."""
    return {
        f"{name}.weight_packed": packed,
        f"{name}.weight_scale": block_scale,
        f"{name}.weight_global_scale": global_scale,
    }


def stacked_parts(names, sizes, packed, block_scale, global_scale):
    """The same, on the CPU, of layers that were quantised as one, stacked along out.

    They share a global scale: vLLM multiplies q, k, v and gate, up as one weight and keeps the largest
    of their global scales for all, so different ones would decode to other weights than those stored.
    """
    rows = zip(names, packed.split(sizes), block_scale.split(sizes))
    found = {}
    for name, codes, scales in rows:
        found.update(named_parts(name, codes.cpu(), scales.cpu(), global_scale.cpu().clone()))
    return found


def write_packed_folder(source, found, folder):
    """Write the model of the 16-bit folder `source` with other tensors in their place.

    found: {name: tensor}; a layer's "NAME.weight_packed" stands for its "NAME.weight".
    """
    files = qerl.open_tensors(source, "cpu")
    writer = ShardWriter(folder)
    for name, tensor in found.items():
        writer.add(name, tensor)
    for name, file in files.items():
        if name not in found and f"{name}_packed" not in found:
            writer.add(name, file.get_tensor(name))
    writer.close()
    copy_companions(source, folder, NVFP4A16)


def quantize_as_one(weights, size=2 ** 20):
    """quantize_nvfp4 of weights [out, in] stacked along out, so many numbers at a time.

    So that it takes little memory. A last row with the largest number of all gives each of these
    pieces the global scale of the whole.
    """
    rows = max(1, size // weights[0].shape[1])
    last = torch.zeros_like(weights[0][:1])
    last[0, 0] = max(weight.abs().max() for weight in weights)
    codes = []
    scales = []
    for piece in torch.cat(weights).split(rows):
        packed, block_scale, global_scale = qerl.quantize_nvfp4(torch.cat([piece, last]))
        codes.append(packed[:-1])
        scales.append(block_scale[:-1])
    return torch.cat(codes), torch.cat(scales), global_scale


@dataclass
class Packer(qerl.Checkpoint):
    """Writes what a model reads, its linear layers in NVFP4, and keeps nothing of it.

    The layers that QeRL stacks are those that vLLM multiplies as one: see stacked_parts.
    """
    writer: ShardWriter = None

    def tensor(self, name, shape):
        self.writer.add(name, self.read(name, shape))
        return torch.empty(shape, device="meta")

    def norm(self, name, size, eps):
        return self.tensor(f"{name}.weight", (size,))

    def linear(self, prefix, leaves, sizes, in_features, bias):
        names = [f"{prefix}.{leaf}" for leaf in leaves]
        qerl.require(in_features % 16 == 0, f"layer {names[0]} has {in_features} input features, not "
                                            "divisible by NVFP4's block of 16; it cannot be saved so")
        weights = [self.read(f"{name}.weight", (size, in_features)) for name, size in zip(names, sizes)]
        parts = quantize_as_one(weights)
        for name, tensor in stacked_parts(names, sizes, *parts).items():
            self.writer.add(name, tensor)
        if bias:
            for name, size in zip(names, sizes):
                self.tensor(f"{name}.bias", (size,))


def write_rounded_folder(source, folder, device):
    """Write the model of the 16-bit folder `source`, its layers rounded to NVFP4 one after the other.

    device: where they are rounded; neither it nor the host ever holds the whole model.
    """
    writer = ShardWriter(folder)
    load_with_progress(source, device=device, desc="quantising",
                       checkpoint_class=partial(Packer, writer=writer))
    writer.close()
    copy_companions(source, folder, NVFP4A16)


def save_packed(source, out, device, calibrated=None):
    """Write the 16-bit folder `source` in NVFP4 to the new folder `out`, and say so.

    calibrated(): a folder of NVFP4 weights to be copied; without it they are rounded, on device.
    """
    check_new_folder(out, source)
    require_16_bit(source, "--save-quantized")
    made = calibrated() if calibrated else None
    with new_folder(out, source) as temporary:
        if made:
            for name in os.listdir(made):
                if "safetensors" in name:       # the weights; the tokenizer is the source's of now
                    shutil.copyfile(f"{made}/{name}", f"{temporary}/{name}")
            copy_companions(source, temporary, NVFP4A16)
        else:
            write_rounded_folder(source, temporary, device)
    print(f"saved {out}, {size_gb(out):.3g} GB of weights; docs/serving.md says who reads it")


def cached_folder(source, name, key, make):
    """The folder that make(path) filled when it was first asked for with this key (JSON).

    It is made of the weights in the folder `source`, and named after it and `name`. It is made
    again once these weights, or the code of make's module, have changed.
    """
    code = inspect.getsource(inspect.getmodule(make))
    made_of = json.dumps([policy_fingerprints(source, ()), code, *key])
    digest = hashlib.sha256(made_of.encode()).hexdigest()
    name = f"{model_name(source)}-{name}-{digest[:12]}"
    return made_once(name, make, source)


def model_name(folder):
    """What a folder's model is called; in Hugging Face's cache its own name is only a hash."""
    path = os.path.realpath(folder)
    above, name = os.path.split(path)
    if os.path.basename(above) == "snapshots":
        name = os.path.basename(os.path.dirname(above)).rpartition("--")[2]
    return name


def policy_fingerprints(folder, eos):
    """What a policy is made of: {"weights": of the folder's files, "config": of config.json and eos}.

    Each a SHA-256; of the weights that of pieces of them, which other weights or codes do not share.
    """
    with open(f"{folder}/config.json", "rb") as f:
        config = hashlib.sha256(f.read() + repr(sorted(eos)).encode())
    return {"weights": files_fingerprint(folder), "config": config.hexdigest()}
