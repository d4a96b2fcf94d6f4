"""The tables of a study."""
import pytest

import bench
from common import run_main
from harness.errors import UserError
from harness.folders import read_json, write_jsonl
from studies import results
from test_qerl import HERE


def test_a_folders_runs_have_a_studys_tables(tmp_path, capsys):
    """Two seeds of two arms: noise gives 2 and 4 points. What was not measured leaves its cell empty."""
    for seed in (0, 1):
        for arm, after in (("nvfp4", 0.5), ("nvfp4+aqn", 0.52 + 0.02 * seed)):
            run = tmp_path / f"{arm}-lr0.001-seed{seed}"
            run.mkdir()
            write_jsonl(run / "summary.json", [{
                "settings": {"model": None, "lr": 1e-3, "seed": seed}, "steps": 1, "seconds": 9.0,
                "hardware": "none", "accuracy_after": after, "greedy_after": after}])
            write_jsonl(run / "metrics.jsonl", [{
                "step": 1, "accuracy": 0.25, "entropy": 0.3, "mismatch_kl": 0.0, "peak_memory_gb": 0.5,
                "seconds": {"step": 1.0}}])
    results.main([str(tmp_path), "--base", "nvfp4"])
    printed = capsys.readouterr().out
    assert "| small | nvfp4+aqn | 0.001 | 2 | 1 |  |  | 53.0 ± 1.0 | 53.0 ± 1.0 | 25.0 |" in printed
    assert "| small | nvfp4+aqn | 0.001 | 2 | 3.0 ± 1.0 | 3.0 ± 1.0 | 0.0 |  |" in printed
    with pytest.raises(UserError, match="neither a study of results/runs.csv nor a folder"):
        results.main([str(tmp_path / "none")])


def test_a_card_is_two_lines_of_its_page(tmp_path):
    """A CPU lacks the columns of a layer, which are measured on a GPU."""
    run_main("card", "--device cpu --out", tmp_path / "card", program=bench)
    nvfp4, bf16 = read_json(tmp_path / "card.json")["rows"]
    page = (HERE / "results/cards.md").read_text(encoding="utf-8")
    titles = next(line for line in page.splitlines() if line.startswith("| hardware"))
    columns = titles.strip("| ").split(" | ")
    assert [column for column in columns if column in nvfp4] == list(nvfp4) == list(bf16)
    assert nvfp4["GB of weights"] < bf16["GB of weights"]
    for row in nvfp4, bf16:
        assert 0 < row["tokens/s x 1"] < row["tokens/s x 512"]
