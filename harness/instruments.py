"""What a run measures beside the learning, and where else it sends its metrics."""
import contextlib
import importlib
import os
import platform
import shlex
import sys
import time

import torch
import transformers

import qerl
from harness.run_folder import atomic_write
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
        "triton": getattr(qerl.fp4_kernels.triton, "__version__", None),
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


def import_tracker(name):
    """The module of TensorBoard or Weights & Biases, imported only here; None without a name."""
    modules = {"tensorboard": "torch.utils.tensorboard", "wandb": "wandb"}
    try:
        return name and importlib.import_module(modules[name])
    except ImportError:
        raise UserError(
            f"--log {name}: the package {name} is not installed; pip install {name}, "
            "or leave --log out"
        )


def open_tracker(name, folder, settings, last_step=None):
    """A function (step, metrics) that sends a step's metrics to TensorBoard or Weights & Biases.

    Without a name it does nothing. settings: what the tracker shows as the run's configuration.
    last_step: the step after which a resumed run goes on; what the tracker has of later ones is
    replaced, and it goes on with the same run.
    """
    if name is None:
        return lambda step, metrics: None
    module = import_tracker(name)
    if name == "wandb":
        run = wandb_run(module, folder, settings, resumed=last_step is not None)
        return lambda step, metrics: run.log(flat(metrics), step=step)
    purge_step = None if last_step is None else last_step + 1
    writer = module.SummaryWriter(folder, purge_step=purge_step)

    def write(step, metrics):
        for key, value in flat(metrics).items():
            writer.add_scalar(key, value, step)
        writer.flush()
    return write


def wandb_run(wandb, folder, settings, resumed):
    """Begin a run at Weights & Biases or, if resumed, go on with the one whose id the folder has.

    Of a step that it has already, wandb keeps what it has.
    """
    path = f"{folder}/wandb_id"
    known = None
    if resumed and os.path.exists(path):
        with open(path, encoding="utf-8") as f:
            known = f.read().strip()
    try:
        run = wandb.init(
            project="qerl", name=os.path.basename(folder), dir=folder, config=settings,
            id=known, resume="allow",
        )
    except Exception as e:                  # no key, no connection, or the run was deleted there
        raise UserError(
            f"--log wandb: no run could be opened ({qerl.reason(e)}); type wandb login, remove "
            f"{path} if its run was deleted, or leave --log out"
        )
    atomic_write(path, run.id)
    return run
