"""Loading a model with a bar that says how many of its layers are there."""
import contextlib
import re

from tqdm import tqdm

import qerl
from harness.ranks import Ranks


def blocks_in(files):
    """How many transformer blocks the tensors of a folder name; files: see qerl.open_tensors."""
    numbers = (re.match(r"model\.layers\.(\d+)\.", name) for name in files)
    return len({number[1] for number in numbers if number})


def load_with_progress(folder, *settings, checkpoint_class=qerl.Checkpoint, desc="loading", **options):
    """qerl.load_model; what takes longer than two seconds shows a bar on stderr."""
    with contextlib.ExitStack() as stack:

        def make_checkpoint(files, *rest):
            checkpoint = checkpoint_class(files, *rest)
            make_layer = checkpoint.linear
            bar = stack.enter_context(tqdm(
                total=blocks_in(files), desc=desc, unit="layer", delay=2, disable=not Ranks().main))

            def linear(prefix, leaves, *shape):
                layer = make_layer(prefix, leaves, *shape)
                if leaves == ["down_proj"]:            # the last one of a block
                    bar.update()
                return layer

            checkpoint.linear = linear
            return checkpoint

        return qerl.load_model(folder, *settings, checkpoint_class=make_checkpoint, **options)
