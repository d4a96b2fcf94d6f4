"""The neighbours of QeRL, one paper a file, each with the functions of qerl.py that it replaces.

The loop of train_gsm8k.py calls the functions of `algo`. For QeRL that is the module qerl itself; for
`--method FILE` or `--method FILE:VARIANT` it is an object of the class `Neighbour` in that file, whose
other attributes are qerl's. `python -m methods` (__main__.py) compares a step of each.
"""
import importlib
import pkgutil

import qerl
from qerl import require


class Method:
    """What all neighbours have. A function that is not defined here or there is qerl's."""

    variants = ()                  # the names that may follow FILE: in --method, the default first

    def __init__(self, settings, variant=None):
        self.settings = settings
        self.variant = variant
        self.state = {}            # what the method learned during the run; kept in checkpoints, as JSON
        self.measured = {}         # {name: number} that metrics.jsonl should say of the last step

    def __getattr__(self, name):
        return getattr(qerl, name)

    @classmethod
    def defaults(cls, variant):
        """{setting: value} where the method's differ from the usual; flags win over them."""
        return {}

    def require_noise(self):
        """Refuse a run without noise, with which this method does something."""
        settings = self.settings
        require(settings.stages > 1 and (settings.sigma_start or settings.sigma_end),
                f"--method {settings.method}: there is no noise to control; use --sigma-start 0.01 and "
                "--stages 10")

    def check(self):
        """Refuse, by a UserError, settings that make no sense together with this method."""

    def stored_model(self, stored, folder, questions, tokenizer):
        """The folder whose weights are loaded.

        stored: the one that --quantizer made of the model's own `folder`; questions: dicts with
        "question" and "answer", to train on.
        """
        return stored

    def prepare(self, model, folder, questions, tokenizer):
        """Change the model in place, between load_model and the optimiser.

        folder: of the original weights; questions: dicts with "question", "answer" and "prompt"
        (token ids), to train on.
        """

    def sampling(self, draw, complete, generator):
        """What the loop calls to sample in the place of draw() -> train_gsm8k.Samples.

        complete(questions, phase, **options) samples and scores a group for each of them. In such a
        question "prompt" may end in the tokens of a completion that goes on there, and "begun"
        holds their text, which is scored, too. phase: its name in the seconds of metrics.jsonl;
        options: qerl.generate's; generator: on the CPU, and kept in checkpoints.
        """
        return draw


class OtherCodes(Method):
    """QeRL with --quantizer at the name that a subclass gives, and nothing else."""
    quantizer = None

    @classmethod
    def defaults(cls, variant):
        return dict(quantizer=cls.quantizer)

    def check(self):
        settings = self.settings
        require(settings.quantizer == self.quantizer,
                f"--method {settings.method}: is QeRL with --weights nvfp4 --quantizer {self.quantizer}, "
                f"not with --weights {settings.weights} --quantizer {settings.quantizer}; leave these out")


def names():
    """What --method takes, without its ":VARIANT": "qerl" and each FILE."""
    modules = pkgutil.iter_modules(__path__)
    return ["qerl", *(m.name for m in modules if not m.ispkg and m.name != "__main__")]


def look_up(name):
    """(class, variant) that --method names; raises UserError."""
    file, _, variant = name.partition(":")
    require(file in names()[1:], f"--method {name}: unknown; choose one of {', '.join(names())}")
    neighbour = importlib.import_module(f"methods.{file}").Neighbour
    offered = ", ".join(f"{file}:{v}" for v in neighbour.variants) or f"{file} alone"
    require(variant in ("", *neighbour.variants),
            f"--method {name}: {file} has no variant {variant}; choose {offered}")
    return neighbour, variant or next(iter(neighbour.variants), None)


def find(name, settings):
    """The neighbour that --method names, checked against the other settings; raises UserError."""
    neighbour, variant = look_up(name)
    method = neighbour(settings, variant)
    objective = qerl.OBJECTIVES[settings.algo]
    other_ratio = objective.log_ratio or objective.weighted_logprob
    require(not other_ratio or "policy_loss" not in vars(neighbour),
            f"--method {name}: its loss is of tokens' ratios, which --algo {settings.algo} does not clip; "
            "use --algo grpo, dapo or dr-grpo")
    method.check()
    return method
