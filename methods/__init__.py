"""The neighbours of QeRL, one paper a file, and here what each of them may replace.

`Method` is QeRL itself. Its methods are the places in the loop of train_gsm8k.py where a neighbour
differs: a file beside this one derives a class `Neighbour` from it that replaces some of them.
`--method FILE` or `--method FILE:VARIANT` trains with it; `python -m methods` (__main__.py) compares a
step of each.
"""
import importlib
import os
import re

import qerl
from qerl import UserError


class Method:
    """QeRL. Letters in shapes as in qerl.py: N completions, C tokens of the longest."""

    variants = ()                  # the names that may follow FILE: in --method, the default first
    loss_scale_growth = 2000       # float16's loss scale doubles after so many steps without overflow

    def __init__(self, settings, variant=None):
        self.settings = settings
        self.variant = variant
        self.state = {}            # what the method learned during the run; kept in checkpoints, as JSON

    @classmethod
    def defaults(cls, variant):
        """{setting: value} where the method's differ from the usual; flags win over them."""
        return {}

    def check(self):
        """Refuse, by a UserError, settings that make no sense together with this method."""

    def stored_model(self, folder, questions, tokenizer):
        """The folder whose weights are loaded: the model's, or one of other codes (--quantizer).

        questions: dicts with "question" and "answer", to train on.
        """
        quantizer = self.settings.quantizer
        if quantizer == "rtn":
            return folder
        from methods.parts.quantizers import quantized_folder       # which few runs need
        return quantized_folder(folder, quantizer, questions, tokenizer, self.settings.device)

    def fits_questions(self):
        """Whether stored_model's weights are fitted to the questions, and others with other data."""
        return self.settings.quantizer in ("awq", "gptq")

    def prepare(self, model, folder, questions, tokenizer):
        """Between load_model and the optimiser: change the model in place.

        folder: of the original weights; questions: dicts with "question", "answer" and "prompt"
        (token ids), to train on.
        """

    def reference(self, model):
        """The context in which the model is the reference policy of the KL term (Eq. 3)."""
        return qerl.adapters_off(model)

    def noise(self, model, sigma, generator):
        """The context in which a step's completions are sampled: AQN (Eq. 7-10)."""
        return qerl.adaptive_quantization_noise(model, sigma, generator)

    def generate(self, model, prompts, max_new_tokens, group_size, **options):
        """Sample the completions of a step, inside `noise` -> qerl.Rollout."""
        return qerl.generate(model, prompts, max_new_tokens, group_size, **options)

    def explore(self, samples, complete, generator):
        """Between scoring and the advantages, inside `noise`: may add groups -> train_gsm8k.Samples.

        complete(questions, phase, **options) samples and scores a group for each of them. In such a
        question "prompt" may end in the tokens of a completion that goes on there, and "begun"
        holds their text, which is scored, too. phase: its name in the seconds of metrics.jsonl;
        options: qerl.generate's; generator: on the CPU.
        """
        return samples

    def advantages(self, samples):
        """How much better a completion did than the others of its question, float32 [P, G] (Eq. 4)."""
        return qerl.group_advantages(samples.rewards, self.settings.algo)

    def old_logprobs(self, model, batch):
        """log π_old: of the policy before this step's updates and without noise, float32 [N, C]."""
        return batch.logprobs_under(model, self.settings.micro_tokens)

    def token_weights(self, minibatch):
        """Each token's share of the loss of a harness.batches.Batch, float32 [N, C]."""
        settings = self.settings
        return qerl.token_weights(minibatch.mask, settings.algo, settings.max_new_tokens)

    def loss(self, logprobs, micro_batch):
        """(loss with gradient, KL to the reference) of some completions of a minibatch (Eq. 3).

        logprobs: log π_θ, float32 [B, C]; micro_batch: a harness.batches.Batch of B completions.
        """
        importance = None
        if self.settings.tis:      # corrects for the policy that sampled
            importance = qerl.truncated_importance(
                micro_batch.old_logprobs, micro_batch.rollout_logprobs, self.settings.tis)
        return qerl.policy_loss(
            logprobs, micro_batch.old_logprobs, micro_batch.advantages, micro_batch.weights,
            self.settings.clip_low, self.settings.clip_high,
            micro_batch.ref_logprobs, self.settings.beta, importance,
        )

    def before_updates(self, batch):
        """Prepare a step's updates; -> what else metrics.jsonl should say of it, {name: number}."""
        return {}

    def after_updates(self):
        """Put back what was prepared; -> the same, of what `loss` saw in the updates."""
        return {}


class OtherCodes(Method):
    """QeRL with --quantizer at the name that a subclass gives, and nothing else."""
    quantizer = None

    @classmethod
    def defaults(cls, variant):
        return dict(quantizer=cls.quantizer)

    def check(self):
        given = self.settings.quantizer
        qerl.require(self.settings.weights == "nvfp4",
                     f"--method {self.settings.method}: its codes are NVFP4's, not "
                     f"{self.settings.weights}'s; use --weights nvfp4")
        qerl.require(given == self.quantizer,
                     f"--method {self.settings.method}: chooses the codes as --quantizer "
                     f"{self.quantizer} does; use --quantizer {given} alone")


def names():
    """What --method takes, without its ":VARIANT": "qerl" and each FILE."""
    here = os.path.dirname(__file__)
    files = sorted(f[:-3] for f in os.listdir(here) if re.fullmatch(r"[a-z]\w*\.py", f))
    return ["qerl", *files]


def look_up(name):
    """(class, variant) that --method names; raises UserError."""
    file, _, variant = name.partition(":")
    if file not in names():
        raise UserError(f"--method {name}: unknown; choose one of {', '.join(names())}")
    neighbour = Method if file == "qerl" else importlib.import_module(f"methods.{file}").Neighbour
    if variant and variant not in neighbour.variants:
        offered = ", ".join(f"{file}:{v}" for v in neighbour.variants) or f"{file} alone"
        raise UserError(f"--method {name}: {file} has no variant {variant}; choose {offered}")
    return neighbour, variant or next(iter(neighbour.variants), None)


def defaults(name):
    """The settings that --method changes where no flag gives them."""
    neighbour, variant = look_up(name)
    return neighbour.defaults(variant)


def find(name, settings):
    """The Method that --method names, checked against the other settings; raises UserError."""
    neighbour, variant = look_up(name)
    method = neighbour(settings, variant)
    method.check()
    return method
