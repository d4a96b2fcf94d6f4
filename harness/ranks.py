"""Several GPUs: as many processes as torchrun starts, each of which is a rank of one run.

    torchrun --nproc_per_node=4 train_gsm8k.py --model Qwen2.5-7B

A rank samples, scores and trains on its share of a step's questions. The gradients are summed over
the ranks once a minibatch, before they are clipped, so all ranks take the same step and hold the
same adapter. The draw of noise is the same everywhere, sampling differs. Rank 0 alone writes and
speaks. Without torchrun there is one rank, and everything here returns what it was given.
"""
import os
import random
import sys
from dataclasses import replace
from statistics import fmean

import torch
import torch.distributed as dist
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from harness.batches import pick_groups, with_tensors
from harness.errors import require

# How the ranks' figures of a step become one, where that is not their mean.
JOINED = {"kl": sum, "timeouts": sum, "tokens_per_s": sum, "mismatch_max_ratio": max,
          "peak_memory_gb": max}


class Ranks:
    """The processes of a run: `count` of them, of which this is number `rank`."""

    def __init__(self):
        given = os.environ if "TORCHELASTIC_RUN_ID" in os.environ else {}      # by torchrun
        self.count = int(given.get("WORLD_SIZE", 1))
        self.rank = int(given.get("RANK", 0))
        self.local_rank = int(given.get("LOCAL_RANK", 0))      # among the `here` of this machine
        self.here = int(given.get("LOCAL_WORLD_SIZE", 1))
        self.main = self.rank == 0
        # With --shard harness.layers.SharedPasses.serve: before all that the ranks do together each of
        # them takes part in the passes of the others.
        self.serve = lambda: None

    def start(self, device):
        """Meet the other ranks, if there are any -> the device: of several, each rank's own GPU.

        From here on a GPU is the process's current one, on which kernels start. Raises UserError.
        """
        if self.count > 1 and device != "cpu":
            gpus = torch.cuda.device_count()
            require(self.here <= gpus,
                    f"--nproc-per-node {self.here}: only {gpus} GPUs are here; start as many processes")
            device = f"cuda:{self.local_rank}"
        if device != "cpu":
            torch.cuda.set_device(torch.device(device).index or 0)
        if self.count > 1:
            dist.init_process_group("gloo" if device == "cpu" else "nccl")
        return device

    def stop(self):
        """End a rank's process when all are about to: whoever is busy would miss those gone."""
        if self.count > 1:
            self.collect([self.rank])
            self.leave(0)

    def leave(self, status):
        """End the process with this exit status.

        After the ranks have met Python's own end is left out, in which gloo's threads now and then
        abort.
        """
        if self.count > 1 and dist.is_initialized():
            print(end="", flush=True)
            os._exit(status)
        sys.exit(status)

    def first_to_say(self, text):
        """Whether no other rank has said this; before the ranks have met, one of each machine says it."""
        if self.count > 1 and dist.is_initialized():
            return dist.distributed_c10d._get_default_store().add(text, 1) == 1
        return self.local_rank == 0

    def agree(self, facts):
        """Refuse a run in which rank 0, perhaps on another machine, has other facts {name: value}."""
        first = self.collect([facts])[0]
        for name, value in facts.items():
            require(value == first[name],
                    f"{name}: {value} in rank {self.rank} is {first[name]} in rank 0; give all machines "
                    "the same data, model and checkpoint")

    def settings_of_first(self, settings):
        """Rank 0's settings of train_gsm8k, with this machine's folders and device."""
        own = {name: getattr(settings, name) for name in ("model", "data", "eval", "device")}
        return replace(self.collect([settings])[0], **own)

    def share(self, questions, parts):
        """This rank's questions: its part of each of `parts` equal pieces of the list.

        So minibatch i of all ranks together is minibatch i of a single process.
        """
        numbers = torch.arange(len(questions)).view(parts, self.count, -1)
        return [questions[i] for i in numbers[:, self.rank].flatten()]

    def collect(self, items):
        """The lists of all ranks, one behind the other."""
        if self.count == 1:
            return items
        lists = [None] * self.count
        self.serve()
        dist.all_gather_object(lists, items)
        return [item for each in lists for item in each]

    def pool(self, samples, parts):
        """The train_gsm8k.Samples of all ranks as one, in the order of a single process: see share."""
        if self.count == 1:
            return samples
        every = self.collect([with_tensors(samples, torch.Tensor.cpu)])
        numbers = torch.arange(self.count * len(samples.questions)).view(self.count, parts, -1)
        pooled = pick_groups(every, numbers.transpose(0, 1).flatten().tolist())
        return with_tensors(pooled, lambda t: t.to(samples.rewards.device))

    def total(self, tensor):
        """Make a tensor its sum over the ranks -> it; on a GPU the host does not wait for it."""
        if self.count > 1:
            self.serve()
            dist.all_reduce(tensor)
        return tensor

    def differ(self, generator, seed, step):
        """Let the ranks draw different numbers; rank 0 draws those of a single process."""
        if not self.main:
            own = random.Random(f"{seed}/{self.rank}/{step}")
            generator.manual_seed(own.getrandbits(63))

    def add_gradients(self, parameters):
        """Replace each gradient by its sum over the ranks, all of them in one exchange.

        It is zero where no completion here taught anything.
        """
        for p in parameters:
            if p.grad is None:
                p.grad = torch.zeros_like(p)
        if self.count > 1:
            gradients = [p.grad for p in parameters]
            vector_to_parameters(self.total(parameters_to_vector(gradients)), gradients)

    def join(self, metrics):
        """A step's figures of all ranks as one; what is no fraction, as times are, is rank 0's."""
        every = self.collect([metrics])
        figures = [name for name, value in metrics.items() if isinstance(value, float)]
        joined = {name: JOINED.get(name, fmean)([m[name] for m in every]) for name in figures}
        return every[0] | joined
