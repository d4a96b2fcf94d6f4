"""What a run measures beside the learning, and where else it sends its metrics."""
import contextlib
import os
import platform
import shlex
import sys
import time

import torch
import transformers

import qerl
from qerl import UserError

try:
    import resource
except ImportError:                         # Windows knows it, too, by another name
    resource = None


class Clock:
    """Seconds spent in each phase of a step: `with clock("rollout"): ...`."""

    def __init__(self, device):
        self.device = torch.device(device)
        self.restart()

    def restart(self):
        self.seconds = {}
        self.began = time.perf_counter()

    @contextlib.contextmanager
    def __call__(self, phase):
        start = time.perf_counter()
        yield
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - start

    def since_restart(self):
        return time.perf_counter() - self.began


def peak_memory_gb(device):
    """The most memory in use so far, in 10^9 bytes: of the GPU, or of the process on a CPU.

    0 on Windows, which Python does not ask.
    """
    if torch.device(device).type == "cuda":
        return torch.cuda.max_memory_allocated() / 1e9
    if resource is None:
        return 0.0
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e9


def command_line():
    """The command that started this process, as far as a process can know."""
    program = ["python"]
    if torch.distributed.is_available() and torch.distributed.is_torchelastic_launched():
        program = ["torchrun", f"--nproc_per_node={os.environ['LOCAL_WORLD_SIZE']}"]
    return shlex.join([*program, os.path.basename(sys.argv[0]), *sys.argv[1:]])


def environment(device):
    """Date, hardware and versions, as every file of results states them."""
    hardware = f"{platform.machine()} CPU, {torch.get_num_threads()} threads"
    if torch.device(device).type == "cuda":
        hardware = torch.cuda.get_device_name()
    return {
        "date": time.strftime("%Y-%m-%d"),
        "hardware": hardware,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "triton": qerl.kernels and qerl.kernels.triton.__version__,
    }


def flat(metrics):
    """{"seconds": {"rollout": 1}} -> {"seconds/rollout": 1}: numbers, as trackers want them."""
    numbers = {}
    for key, value in metrics.items():
        if isinstance(value, dict):
            numbers.update((f"{key}/{inner}", v) for inner, v in value.items())
        else:
            numbers[key] = value
    return numbers


def open_tracker(name, folder, settings, state):
    """A function (metrics, step) that sends a step's metrics to TensorBoard or Weights & Biases.

    Without a name it does nothing. settings: what the tracker shows as the run's configuration;
    state: of the run, which keeps W&B's id so that a resumed run goes on there. Raises UserError.
    """
    try:
        if name == "tensorboard":
            from torch.utils.tensorboard import SummaryWriter
            writer = SummaryWriter(folder, purge_step=state["step"] + 1)
            return lambda metrics, step: [
                writer.add_scalar(key, value, step) for key, value in flat(metrics).items()]
        if name == "wandb":
            import wandb
            run = wandb.init(project="qerl", name=os.path.basename(folder), dir=folder,
                             config=settings, id=state.get("wandb"), resume="allow")
            state["wandb"] = run.id
            return lambda metrics, step: run.log(flat(metrics), step=step)
    except Exception as e:                  # no package, no key, no connection
        raise UserError(f"--log {name}: {qerl.reason(e)}; pip install {name}, log in there, or leave "
                        "--log out")
    return lambda metrics, step: None
