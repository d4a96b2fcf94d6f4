"""studies/peers.py without its peers: TRL's settings."""
import pytest

from studies import peers
from studies.step import settings_for


def test_trl_makes_one_update_of_all_completions():
    """Fifteen: no multiple of the micro-batch that is tuned for this size."""
    trl = pytest.importorskip("trl")
    settings = settings_for("cpu")
    tuning = peers.tuning_for("Qwen2.5-3B", 3 * 5, settings.max_new_tokens)
    arguments = peers.trainer_arguments("out", settings, 3, 5, 4, tuning)
    config = trl.GRPOConfig(**arguments, use_cpu=True, bf16=False)
    assert config.generation_batch_size == 15
