"""studies/peers.py without its peers: TRL's settings."""
import pytest

from studies import peers
from studies.step import settings_for


@pytest.mark.parametrize("name,prompts,group", [("Qwen2.5-1.5B", 64, 8), ("Qwen2.5-3B", 3, 5)])
def test_trl_makes_one_update_of_all_completions(name, prompts, group):
    trl = pytest.importorskip("trl")
    settings = settings_for("cpu")
    tuning = peers.tuning_for(name, prompts * group, settings.max_new_tokens)
    arguments = peers.trainer_arguments("out", settings, prompts, group, 4, tuning)
    config = trl.GRPOConfig(**arguments, use_cpu=True, bf16=False)
    assert config.generation_batch_size == prompts * group
