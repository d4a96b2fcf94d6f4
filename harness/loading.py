"""Loading a model with a bar that says how many of its layers are there."""
import contextlib

from tqdm import tqdm

import qerl
from harness.ranks import Ranks


def load_with_progress(folder, *settings, checkpoint_class=qerl.Checkpoint, desc="loading", **options):
    """qerl.load_model; what takes longer than two seconds shows a bar on stderr."""
    with contextlib.ExitStack() as stack:

        def make_checkpoint(files, *rest):
            checkpoint = checkpoint_class(files, *rest)
            make_layer = checkpoint.linear
            blocks = {name.split(".")[2] for name in files if name.startswith("model.layers.")}
            bar = stack.enter_context(tqdm(
                total=len(blocks), desc=desc, unit="layer", delay=2, disable=not Ranks().main))

            def linear(prefix, leaves, *shape):
                layer = make_layer(prefix, leaves, *shape)
                if leaves == ["down_proj"]:            # the last one of a block
                    bar.update()
                return layer

            checkpoint.linear = linear
            return checkpoint

        return qerl.load_model(folder, *settings, checkpoint_class=make_checkpoint, **options)
