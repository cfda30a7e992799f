"""A stand-in engine in a process of its own: asked, stopped between questions, and given up."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from bench.engines import Engine, PeerError
from bench.lane import Lane

WORKERS = Path(__file__).parents[2] / "bench" / "workers"
ECHO = f"""
import sys
sys.path.insert(0, {str(WORKERS)!r})
from protocol import serve

def load(options):
    print("a line that an engine prints")
    def generate(prompts, max_tokens, first):
        first()
        assert max_tokens < 100, "too many"
        return [prompt[:max_tokens] for prompt in prompts]
    return generate

serve(load, ["pytest"])
"""


@dataclass(frozen=True)
class StandIn(Engine):
    """An engine whose worker is a given script."""

    script: Path = Path()

    @property
    def python(self) -> Path:
        return Path(sys.executable)

    @property
    def worker(self) -> Path:
        return self.script


@pytest.fixture
def engine(tmp_path: Path) -> StandIn:
    script = tmp_path / "worker.py"
    script.write_text(ECHO, encoding="utf-8")
    return StandIn("standin", ("plain",), "", script=script)


def stops(pid: int) -> bool:
    """Whether the process is stopped; a moment may pass until the signal is delivered."""
    for _ in range(1000):
        status = Path(f"/proc/{pid}/stat").read_text(encoding="ascii")
        if status.rsplit(")", 1)[1].split()[0] == "T":
            return True
        time.sleep(0.005)
    return False


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads /proc")
def test_answers_and_stands_still_between_questions(engine: StandIn, tmp_path: Path) -> None:
    with Lane(engine, "plain", tmp_path, [9], tmp_path) as lane:
        assert stops(lane.process.pid)
        answer = lane.ask([[1, 2, 9, 3], [4, 5, 6, 7]], max_tokens=3)
        assert stops(lane.process.pid)
    assert answer.outputs == [[1, 2], [4, 5, 6]]  # cut before the stop token
    assert answer.tokens == 5
    assert answer.ttft is not None
    assert 0 <= answer.ttft <= answer.seconds
    assert lane.peak_rss_mb > 1
    assert lane.process.returncode == 0
    assert "a line that an engine prints" in lane.log.read_text(encoding="utf-8")


def test_a_dead_engine_is_reported_with_its_log(engine: StandIn, tmp_path: Path) -> None:
    with (
        pytest.raises(PeerError, match=r"standin plain has ended; see .*standin-plain\.log"),
        Lane(engine, "plain", tmp_path, [9], tmp_path) as lane,
    ):
        lane.ask([[1]], max_tokens=100)
    assert "too many" in lane.log.read_text(encoding="utf-8")
