"""A table of the methods: each trains the built-in policy for two steps, the second one with noise.

    python -m methods                            all methods and their variants, on a CPU
    python -m methods flashrl jetrl:training     these

KL is that of the sampling policy to the trained one, in nats a token (K3). "left" is the effective
sample size: the fraction of completions that is left after weighting them by their ratio. Entropy is
in nats a token. "gradient" is its norm at the last update. All figures are those of the second step.
"""
import contextlib
import io
import json
import tempfile

import methods
import train_gsm8k
from harness.command import Parser, one_line

HEADER = "method                              KL   left  entropy  gradient  rollout s  update s"
ROW = ("{name:30} {mismatch_kl:7.5f} {effective_completions:6.1%} {entropy:8.3f} {gradient_norm:9.4f} "
       "{seconds[rollout]:10.1f} {seconds[update]:9.1f}")


def every_variant():
    """All names that --method takes."""
    first, *files = methods.names()
    yield first
    for name in files:
        neighbour, _ = methods.look_up(name)
        yield from [f"{name}:{variant}" for variant in neighbour.variants] or [name]


def second_step(name):
    """The last line of metrics.jsonl of a run of two steps; the first step has no noise."""
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        train_gsm8k.train(train_gsm8k.arguments([
            "--method", name, "--steps", "2", "--stages", "2", "--skip-eval-before",
            "--eval-questions", "1", "--device", "cpu", "--out", folder]))
        with open(f"{folder}/metrics.jsonl", encoding="utf-8") as log:
            return json.loads(log.readlines()[-1])


def main(argv=None):
    with one_line():
        parser = Parser(__doc__, prog="python -m methods")
        parser.add_argument("names", nargs="*", metavar="NAME", help="as --method takes it")
        print(HEADER)
        for name in parser.parse_args(argv).names or every_variant():
            print(ROW.format(name=name, **second_step(name)), flush=True)


if __name__ == "__main__":
    main()
