"""The check for GPUs runs to its end on a processor, with a tiny shape."""

from __future__ import annotations

import pytest

from bench import gpu_check


def test_it_runs_on_a_processor(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_check, "BATCHES", (1, 2))
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    gpu_check.main(shape="tiny", tokens=8)
    lines = capsys.readouterr().out.splitlines()
    heads = [line.split(":")[0] for line in lines[1:]]
    assert heads[:3] == ["pass, batch  1", "pass, batch  2", "step, batch 1"]
    assert heads[3:] == [
        f"{name}, batch  {batch}" for name in ("eagle3", "dflash") for batch in (1, 2)
    ]
