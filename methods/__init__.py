"""The neighbours of QeRL: each file has one paper, as the functions of qerl.py that it replaces.

The loop of train_gsm8k.py calls the functions of its `engine`. For `--method FILE` or `--method
FILE:VARIANT` that is an object of the class `Neighbour` in that file; `Method`, its base, says where the
functions come from that it does not define.
"""
import importlib
import pkgutil

import qerl
from harness import fast
from harness.errors import require

# Files that --quantizer names, and --method does not: they choose NVFP4's codes. Besides these there
# is "rtn", rounding to the nearest code.
QUANTIZERS = {"four-over-six": "four_over_six", "awq": "awq", "gptq": "gptq"}


class Method:
    """The base of all neighbours: the functions that a step calls, as QeRL has them.

    A neighbour may also define `resample`, in the place of train_gsm8k.dynamic_sampling.
    """
    variants = ()                  # the names that may follow FILE: in --method, the default first

    adaptive_quantization_noise = staticmethod(qerl.adaptive_quantization_noise)
    generate = staticmethod(fast.generate)
    group_advantages = staticmethod(qerl.group_advantages)
    token_weights = staticmethod(qerl.token_weights)
    token_logprobs = staticmethod(fast.token_logprobs)
    reference_policy = staticmethod(qerl.reference_policy)
    policy_loss = staticmethod(qerl.policy_loss)
    mismatch = staticmethod(qerl.mismatch)

    def __init__(self, settings, variant=None):
        self.settings = settings
        self.variant = variant
        self.state = {}            # what the method learned during the run; checkpoints keep it as JSON
        self.measured = {}         # {name: number} of the last step, for metrics.jsonl

    @classmethod
    def defaults(cls, variant):
        """{setting: value} of the defaults that the method changes; flags win over them."""
        return {}

    def check(self):
        """Raise a UserError for settings that this method cannot work with."""

    def stored_model(self, stored, folder, questions, tokenizer):
        """The folder from which the weights are loaded.

        folder: the model's own; stored: the folder that --quantizer made of it; questions: dicts with
        "question" and "answer", the training set.
        """
        return stored

    def prepare(self, model, folder, questions, tokenizer):
        """Change the model in place, between load_model and the optimiser.

        folder: that of the original weights; questions: dicts with "question", "answer" and "prompt"
        (token ids), the training set.
        """


def names():
    """The names that --method takes, without ":VARIANT": "qerl" and each FILE."""
    files = [m.name for m in pkgutil.iter_modules(__path__) if not m.ispkg]
    return ["qerl", *(f for f in files if f not in QUANTIZERS.values())]


def look_up(name):
    """(class, variant) that --method names; raises UserError."""
    file, _, variant = name.partition(":")
    require(file in names()[1:], f"--method {name}: unknown; choose one of {', '.join(names())}")
    neighbour = importlib.import_module(f"methods.{file}").Neighbour
    offered = ", ".join(f"{file}:{v}" for v in neighbour.variants) or f"{file} alone"
    require(variant in ("", *neighbour.variants),
            f"--method {name}: {file} has no variant {variant}; choose {offered}")
    return neighbour, variant or next(iter(neighbour.variants), None)


def defaults(name):
    """The settings that --method `name` changes where no flag gives them."""
    neighbour, variant = look_up(name)
    return neighbour.defaults(variant)


def find(name, settings):
    """The neighbour that --method names, checked against the other settings; raises UserError."""
    neighbour, variant = look_up(name)
    method = neighbour(settings, variant)
    objective = qerl.OBJECTIVES[settings.algo]
    other_ratio = objective.log_ratio or objective.weighted_logprob
    require(not other_ratio or neighbour.policy_loss is Method.policy_loss,
            f"--method {name}: its loss is of tokens' ratios, which --algo {settings.algo} does not clip; "
            "use --algo grpo, dapo or dr-grpo")
    method.check()
    return method
