"""Is the engine fit for a GPU? An 8B target and drafts of published shapes, all of random weights.

    python -m bench.gpu_check                    # CUDA where there is one, less than five minutes
    python -m bench.gpu_check --shape tiny       # anywhere

Drafts are accepted by a coin, so that their networks need not be any good. Printed are: what passes
cost, and how near that is to reading the weights once (the rest is launches: where it is large,
decoding needs CUDA graphs); what a step of the engine takes beside its pass; what the plan makes of
both drafts, and how near its expectation was.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any

import torch
import typer
from torch import Tensor

from bench import random_drafts
from forerun.core import Draft, Request, SamplingParams, Verdict
from forerun.drafters import DraftContext, Drafter, make_drafter
from forerun.engine.costs import Costs, Load, fit, loads, sample
from forerun.engine.engine import Engine
from forerun.models.architecture import DecoderConfig
from forerun.models.cache import KVStore
from forerun.models.decoder import Decoder
from forerun.models.hub import LoadedModel
from forerun.models.weights import Weights
from forerun.verify.base import Verifier
from forerun.verify.follow import Follow, root_rows

PREFIX, BATCHES, WANTED = 128, (1, 2, 4, 8, 16, 32, 64), 0.1
ACCEPTED = 0.7  # chance of a drafted token, if those before it are right

# Llama-3.1-8B; drafts of one layer (EAGLE-3) or five (DFlash) of its shape.
LARGE: dict[str, Any] = {
    "vocab_size": 128_256,
    "hidden_size": 4096,
    "layers": 32,
    "intermediate_size": 14_336,
    "heads": 32,
    "kv_heads": 8,
    "head_dim": 128,
}
TINY: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "layers": 8,
    "intermediate_size": 128,
    "heads": 4,
    "kv_heads": 2,
    "head_dim": 16,
}
SHAPES = {"8b": LARGE, "tiny": TINY}
LAYER = ("intermediate_size", "heads", "kv_heads", "head_dim")


class Noise(Weights):
    """Makes every tensor that is asked for, where it is needed."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__({}, "noise", dtype)
        self._device = device
        self._noise = torch.Generator(device).manual_seed(0)

    def take(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        made = torch.empty(shape, dtype=dtype or self.dtype, device=self._device)
        if len(shape) == 1:
            return made.fill_(1.0)
        return made.normal_(std=shape[-1] ** -0.5, generator=self._noise)


class Coin(Verifier):
    """Accepts drafted tokens by chance, in place of a draft that was trained."""

    name = "coin"
    lossless = False

    def __init__(self) -> None:
        self._dice = random.Random(0)

    def judge(
        self, requests: Sequence[Request], drafts: Sequence[Draft], logits_NV: Tensor
    ) -> list[Verdict]:
        best = logits_NV.argmax(-1).tolist()
        verdicts = []
        for draft, root in zip(drafts, root_rows(drafts), strict=True):
            path: list[int] = []
            for node, parent in enumerate(draft.parents):
                if parent == (path[-1] if path else -1) and self._dice.random() < ACCEPTED:
                    path.append(node)
            verdicts.append(Verdict(path, best[root + 1 + path[-1] if path else root]))
        return verdicts


def make_target(shape: str, device: torch.device) -> Decoder:
    config = DecoderConfig("llama", max_length=4096, norm_eps=1e-5, rope_theta=5e5, **SHAPES[shape])
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    return Decoder(config, Noise(dtype, device), dtype, device, f"random-{shape}")


def floor_seconds(target: Decoder) -> float:
    """Of reading all weights of a pass once, at the speed of a copy within the device."""
    c = target.config
    heads = (c.heads + c.kv_heads) * c.head_dim
    weights = c.layers * c.hidden_size * (2 * heads + 3 * c.intermediate_size)
    size = (weights + c.vocab_size * c.hidden_size) * target.dtype.itemsize
    block = torch.ones(2**26, dtype=torch.uint8, device=target.device)
    times = []
    for _ in range(5):
        begin = perf_counter()
        block.clone()[-1].item()  # waits
        times.append(perf_counter() - begin)
    return size * min(times) / (2 * len(block))


def run(engine: Engine, batch: int, tokens: int) -> None:
    """Decode a batch to its end."""
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    dice = random.Random(1)
    vocab = engine.target.info.vocab_size
    for _ in range(batch):
        engine.add([dice.randrange(vocab) for _ in range(PREFIX)], params)
    while engine.busy:
        engine.step()


def pass_lines(target: Decoder, store: KVStore) -> Iterator[str]:
    """The table of costs: one row of each of so many sequences."""
    floor = floor_seconds(target)
    found = sample(target, store, [Load(batch, 1, PREFIX) for batch in BATCHES], limit=20.0)
    for load, seconds in found.items():
        yield (
            f"pass, batch {load.sequences:2}: {1000 * seconds:8.3f} ms, "
            f"{seconds / floor:5.2f} x reading the weights once"
        )


def step_line(target: Decoder, store: KVStore, costs: Costs, tokens: int) -> str:
    """What a plain step at batch 1 takes beside its pass."""
    engine = Engine(target, store=store, verifier=Follow())
    run(engine, 1, tokens)
    stats = engine.stats
    prefix = PREFIX + tokens // 2
    taken = sample(target, store, [Load(1, 1, prefix)])[Load(1, 1, prefix)]
    step = stats.step_seconds / (stats.passes - 1)  # the first ends the prompt
    beside = step / taken - 1
    verdict = "fine" if beside <= WANTED else f"more than {WANTED:.0%}"
    return (
        f"step, batch 1: {1000 * step:.3f} ms, its pass {1000 * taken:.3f} ms, "
        f"{beside:.1%} beside it: {verdict}; fitted {1000 * costs.seconds([prefix], [1]):.3f} ms"
    )


def plan_lines(
    target: Decoder, store: KVStore, costs: Costs, drafts: dict[str, Path], tokens: int
) -> Iterator[str]:
    """Throughput with each draft as the plan expected it and as it came."""
    for name, folder in drafts.items():
        for batch in BATCHES:
            stats = _run(target, store, costs, None, batch, tokens)
            plain = stats.emitted_tokens / stats.step_seconds
            drafter = _drafter(f"{name}:{folder}", target, store)
            stats = _run(target, store, costs, drafter, batch, tokens)
            expected = stats.passes + sum(stats.expected_in)
            seconds = stats.predicted_seconds + stats.draft_seconds
            measured = stats.emitted_tokens / stats.step_seconds
            yield (
                f"{name}, batch {batch:2}: expected {expected / seconds:8.1f} tok/s, measured "
                f"{measured:8.1f}, plain {plain:8.1f}; {stats.rows_per_pass:.2f} rows a pass, "
                f"{stats.tokens_per_pass:.2f} tokens"
            )


def _run(
    target: Decoder,
    store: KVStore,
    costs: Costs,
    drafter: Drafter | None,
    batch: int,
    tokens: int,
) -> Any:
    engine = Engine(
        target,
        store=store,
        verifier=Coin(),
        drafter=drafter,
        max_num_seqs=batch,
        costs=costs,
    )
    run(engine, batch, tokens)
    return engine.stats


def _drafter(spec: str, target: Decoder, store: KVStore) -> Drafter:
    def refuse(model: str) -> LoadedModel:
        raise AssertionError(f"{model} is no part of this")

    made = make_drafter(spec, DraftContext(target, store, None, refuse))
    assert made
    return made


def main(
    shape: Annotated[str, typer.Option(help="8b or tiny; auto: 8b on CUDA.")] = "auto",
    tokens: Annotated[int, typer.Option(help="Of each answer.")] = 64,
) -> None:
    """Print the checks."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if shape == "auto":
        shape = "8b" if device.type == "cuda" else "tiny"
    target = make_target(shape, device)
    store = target.new_store(2 * max(BATCHES) * (PREFIX + tokens + 64))
    where = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    print(f"{target.info.name} in {target.info.dtype} on {where}")
    for line in pass_lines(target, store):
        print(line, flush=True)
    costs = fit(sample(target, store, loads(store.slots), limit=10.0))
    print(step_line(target, store, costs, tokens), flush=True)
    layer = {name: SHAPES[shape][name] for name in LAYER}
    with tempfile.TemporaryDirectory() as folder:
        drafts = random_drafts.write(
            Path(folder), target.info, ("eagle3", "dflash"), layer, dflash_layers=5
        )
        for line in plan_lines(target, store, costs, drafts, tokens):
            print(line, flush=True)


if __name__ == "__main__":
    typer.run(main)
