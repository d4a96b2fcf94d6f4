"""Several GPUs: as many processes as torchrun starts, each of which is a rank of one run.

    torchrun --nproc_per_node=4 train_gsm8k.py --model Qwen2.5-7B

A rank samples, scores and trains on its share of a step's questions. The gradients of LoRA are
summed over the ranks once a minibatch, before they are clipped, so all ranks take the same step
and hold the same adapter. The draw of noise is the same everywhere, sampling differs. Rank 0 alone
writes. Without torchrun there is one rank, and everything here returns what it was given.
"""
import contextlib
import os
import sys
from statistics import fmean

import torch
import torch.distributed as dist

from qerl import UserError

# How the ranks' figures of a step become one; the mean of them where nothing else is said.
JOINED = {"mismatch_max_ratio": max, "peak_memory_gb": max, "tokens_per_s": sum}


class Ranks:
    """The processes of a run: `count` of them, of which this is number `rank`."""

    def __init__(self):
        self.count = int(os.environ.get("WORLD_SIZE", 1))
        self.rank = int(os.environ.get("RANK", 0))
        self.main = self.rank == 0             # the one that writes and speaks

    def start(self, device):
        """Meet the other ranks; returns the device of this one: --device cuda is its own GPU."""
        if self.count == 1:
            return device
        if device == "cuda":
            device = f"cuda:{os.environ['LOCAL_RANK']}"
        if not self.main:
            sys.stdout = open(os.devnull, "w")
        dist.init_process_group("nccl" if device.startswith("cuda") else "gloo")
        return device

    def stop(self):
        if dist.is_initialized():
            dist.destroy_process_group()

    @contextlib.contextmanager
    def together(self):
        """Around a call that all ranks take part in: a rank that is gone ends it by a UserError."""
        try:
            yield
        except RuntimeError as e:
            raise UserError(f"rank {self.rank} waited for a rank that has ended ({type(e).__name__}); "
                            "see its own line, then go on with --resume")

    def share(self, items, parts=1):
        """This rank's items: of each of `parts` equal pieces of the list its part.

        So that minibatch i of all ranks together is minibatch i of one process.
        """
        size = len(items) // parts
        step = size // self.count
        starts = range(self.rank * step, len(items), size)
        return [item for start in starts for item in items[start:start + step]]

    def collect(self, items):
        """The lists of all ranks, one behind the other; what they hold is pickled on the way."""
        if self.count == 1:
            return items
        lists = [None] * self.count
        with self.together():
            dist.all_gather_object(lists, items)
        return [item for each in lists for item in each]

    def first(self, value):
        """Rank 0's value, on all ranks."""
        return self.collect([value])[0]

    def total(self, number):
        """The sum of a number over the ranks."""
        return sum(self.collect([number]))

    def add_gradients(self, parameters):
        """Replace the gradients by their sums over the ranks, in one exchange."""
        if self.count == 1:
            return
        gradients = [p.grad for p in parameters]
        line = torch.cat([g.flatten() for g in gradients])
        with self.together():
            dist.all_reduce(line)
        for gradient, summed in zip(gradients, line.split([g.numel() for g in gradients])):
            gradient.copy_(summed.view_as(gradient))

    def join(self, metrics):
        """A step's figures over all ranks; times are rank 0's."""
        every = self.collect([metrics])
        joined = dict(every[0])
        for name, value in metrics.items():
            if isinstance(value, float):
                joined[name] = JOINED.get(name, fmean)(m[name] for m in every)
        return joined
