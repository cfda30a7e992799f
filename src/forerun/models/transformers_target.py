"""A `Target` for every causal language model of transformers that takes an explicit mask.

The rows of all sequences are one batch entry. Keys are the committed slots of each sequence, then
the rows of the pass; the mask lets each row see its own sequence's slots, its ancestors and itself.
This order also suits models that forbid looking ahead by themselves.

N rows, K keys, T tapped boundaries, D hidden size.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.cache_utils import Cache
from transformers.utils import logging

from forerun.errors import CheckpointError, ConfigError, ModelError
from forerun.models.cache import KVStore
from forerun.models.foreign import reason
from forerun.models.probe import check_target, kv_shape
from forerun.models.target import Forward, Segment, TargetInfo
from forerun.models.weights import BESIDE, IGNORED, folder_weights

UNLIMITED = 1 << 20  # positions, where a config names no limit


class TransformersTarget:
    """Runs a model of transformers over packed rows.

    Raises `ModelError` when the model cannot: the constructor runs a small tree through it and
    compares with plain passes.
    """

    def __init__(self, model: Any, name: str) -> None:
        self.model = model.eval().requires_grad_(False)
        config = model.config.get_text_config()
        parameters = inspect.signature(model.forward).parameters
        # transformers 5.24 renamed it
        self.cache_name = "cache" if "cache" in parameters else "past_key_values"
        self.keeps_logits = "logits_to_keep" in parameters
        layers, self.kv_heads, self.head_dim = kv_shape(model, self.cache_name, name)
        self.info = TargetInfo(
            name=name,
            architecture=config.model_type,
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            layers=layers,
            max_length=_max_length(config),
            dtype=model.dtype,
            device=model.device,
            row_invariant=False,
            tree_invariant=False,
        )
        self.window = _window(config)
        self.blocks = _blocks(model, layers, name)
        check_target(self, model)

    @classmethod
    def load(
        cls, folder: Path, dtype: torch.dtype, device: torch.device, name: str
    ) -> TransformersTarget:
        """The model of a folder.

        Raises `ModelError` when transformers does not know it, `CheckpointError` when files are
        damaged or tensors are missing, unexpected or of another shape.
        """
        folder_weights(folder, dtype)  # finds damaged files, and says so in fewer words
        try:
            with _quiet():
                model, found = AutoModelForCausalLM.from_pretrained(
                    folder, dtype=dtype, output_loading_info=True, ignore_mismatched_sizes=True
                )
        except Exception as error:  # whatever kind: one line for the user
            raise ModelError(
                f"transformers cannot load {folder} ({reason(error)}); take another model"
            ) from error
        wrong = [*found["missing_keys"], *(key for key, *_ in found["mismatched_keys"])]
        if wrong:
            raise CheckpointError(
                f"{folder} lacks the tensor '{sorted(wrong)[0]}' in the shape that its config asks "
                "for; use the config.json that belongs to these weights"
            )
        unused = [key for key in found["unexpected_keys"] if not key.startswith(BESIDE)]
        left = sorted(key for key in unused if not IGNORED.search(key))
        if left:
            raise CheckpointError(
                f"{folder} has tensors that this architecture does not use, such as '{left[0]}'; "
                "use the config.json that belongs to these weights"
            )
        with _quiet():
            return cls(model.to(device), name)

    def new_store(self, slots: int) -> KVStore:
        """An empty key/value store for `slots` tokens."""
        i = self.info
        return KVStore(i.layers, self.kv_heads, self.head_dim, slots, i.dtype, i.device)

    @torch.inference_mode()
    def forward(
        self,
        segments: Sequence[Segment],
        store: KVStore,
        taps: Sequence[int] = (),
        layers: Sequence[int] | None = None,
    ) -> Forward:
        """See `Target.forward`. Raises `ConfigError` when `layers` is given."""
        if layers is not None:
            raise ConfigError(
                f"{self.info.name} runs through transformers, which cannot leave layers out; "
                "choose another draft than skip"
            )
        rows = _Rows(segments, self.info.device)
        options: dict[str, Any] = {self.cache_name: _RowCache(store, rows)}
        wanted = torch.tensor(rows.wanted, dtype=torch.long, device=self.info.device)
        if self.keeps_logits:
            options["logits_to_keep"] = wanted
        with _tapped(self.blocks, taps) as tapped:
            output = self.model(
                input_ids=rows.tokens_N[None],
                attention_mask=self._masks(rows),
                position_ids=rows.positions_N[None],
                use_cache=True,
                **options,
            )
        logits_NV = output.logits[0] if self.keeps_logits else output.logits[0][wanted]
        taps_RTD = torch.stack([tapped[b][0] for b in taps], 1) if taps else None
        return Forward(logits_NV.float(), taps_RTD)

    def _masks(self, rows: _Rows) -> Tensor | dict[str, Tensor]:
        full = _additive(rows.visible_NK, self.info.dtype)
        if self.window is None:
            return full
        sliding = _additive(rows.within(self.window), self.info.dtype)
        return {"full_attention": full, "sliding_attention": sliding}


class _Rows:
    """The rows of a pass side by side, and what each may see.

    committed_P: slots of the committed tokens of all sequences; slots_N: where the rows go.
    visible_NK: over the keys, which are those of committed_P, then those of the rows.
    """

    def __init__(self, segments: Sequence[Segment], device: torch.device) -> None:
        tokens: list[int] = []
        positions: list[int] = []
        committed: list[int] = []
        past_positions: list[int] = []
        slots: list[int] = []
        self.wanted: list[int] = []
        total = sum(len(segment.tokens) for segment in segments)
        past = sum(segment.span.length for segment in segments)
        visible_NK = torch.zeros(total, past + total, dtype=torch.bool)
        for segment in segments:
            span, count, first = segment.span, len(segment.tokens), len(tokens)
            assert 0 < count <= span.capacity - span.length, "rows without reserved slots"
            own = slice(first, first + count)
            ancestors_NN = _ancestors(segment)
            visible_NK[own, len(committed) : len(committed) + span.length] = True
            visible_NK[own, past + first : past + first + count] = ancestors_NN
            depths_N = ancestors_NN.sum(1) - 1
            tokens.extend(segment.tokens)
            positions.extend((span.length + depths_N).tolist())
            committed.extend(range(span.base, span.base + span.length))
            past_positions.extend(range(span.length))
            slots.extend(range(span.base + span.length, span.base + span.length + count))
            self.wanted.extend(range(first + segment.logits_from, first + count))
        self.tokens_N = torch.tensor(tokens, device=device)
        self.positions_N = torch.tensor(positions, device=device)
        self.key_positions_K = torch.tensor(past_positions + positions, device=device)
        self.committed_P = torch.tensor(committed, dtype=torch.long, device=device)
        self.slots_N = torch.tensor(slots, device=device)
        self.visible_NK = visible_NK.to(device)

    def within(self, window: int) -> Tensor:
        """visible_NK, as far as a sliding layer sees."""
        return self.visible_NK & (self.positions_N[:, None] - self.key_positions_K < window)


def _ancestors(segment: Segment) -> Tensor:
    """[rows, rows]: whether the second is the first or one of its ancestors."""
    count = len(segment.tokens)
    if segment.parents is None:
        return torch.ones(count, count, dtype=torch.bool).tril()
    ancestors_NN = torch.eye(count, dtype=torch.bool)
    for row, parent in enumerate(segment.parents):
        if parent >= 0:
            ancestors_NN[row] |= ancestors_NN[parent]
    return ancestors_NN


def _additive(visible_NK: Tensor, dtype: torch.dtype) -> Tensor:
    """What is added to attention scores, [1, 1, N, K]: 0 where visible."""
    mask_NK = torch.zeros(visible_NK.shape, dtype=dtype, device=visible_NK.device)
    return mask_NK.masked_fill_(~visible_NK, torch.finfo(dtype).min)[None, None]


class _RowCache(Cache):  # type: ignore[misc]
    """What a pass sees as transformers' cache: our store, at the rows' slots."""

    def __init__(self, store: KVStore, rows: _Rows) -> None:
        super().__init__(layers=[])
        self.store, self.rows = store, rows

    def update(
        self, keys_1HND: Tensor, values_1HND: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Write the rows' keys and values; return those of the committed tokens and the rows."""
        keys_HSD, values_HSD = self.store.kv[layer_idx]
        seen = []
        for stored_HSD, new_1HND in ((keys_HSD, keys_1HND), (values_HSD, values_1HND)):
            past_HPD = stored_HSD[:, self.rows.committed_P]
            stored_HSD[:, self.rows.slots_N] = new_1HND[0]
            seen.append(torch.cat([past_HPD[None], new_1HND], dim=2))
        return seen[0], seen[1]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Asked only to derive masks and positions, which are given."""
        return 0


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the progress bars and reports of transformers: what is wrong, our errors say."""
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity(logging.CRITICAL)
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


@contextmanager
def _tapped(blocks: Sequence[nn.Module], taps: Sequence[int]) -> Iterator[dict[int, Tensor]]:
    """Record the hidden states at layer boundaries.

    By hooks: what transformers returns as the last hidden state is behind the final norm.
    """
    tapped: dict[int, Tensor] = {}

    def before(boundary: int) -> Any:
        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            tapped[boundary] = args[0] if args else kwargs["hidden_states"]

        return hook

    def after(_: nn.Module, __: Any, output: Any) -> None:
        tapped[len(blocks)] = output[0] if isinstance(output, tuple) else output

    hooks = [
        blocks[boundary].register_forward_pre_hook(before(boundary), with_kwargs=True)
        for boundary in taps
        if boundary < len(blocks)
    ]
    if len(blocks) in taps:
        hooks.append(blocks[-1].register_forward_hook(after))
    try:
        yield tapped
    finally:
        for hook in hooks:
            hook.remove()


def _blocks(model: nn.Module, layers: int, name: str) -> Sequence[nn.Module]:
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == layers:
            return list(module)
    raise ModelError(f"{name} does not keep its {layers} layers in one list; take another model")


def _window(config: Any) -> int | None:
    """The window of sliding layers where others see everything: those models take two masks."""
    kinds = set(getattr(config, "layer_types", None) or ())
    return config.sliding_window if kinds == {"full_attention", "sliding_attention"} else None


def _max_length(config: Any) -> int:
    """Positions that the model was made for.

    Where one mask serves all layers, a window bounds the length: up to it, every layer sees all.
    Raises `ModelError` when the config names a limit that no prompt fits into.
    """
    limits = [getattr(config, "max_position_embeddings", None)]
    kinds = set(getattr(config, "layer_types", None) or ())
    if _window(config) is None and kinds != {"full_attention"}:
        limits += [getattr(config, key, None) for key in ("sliding_window", "attention_chunk_size")]
    length: int = min([limit for limit in limits if limit is not None], default=UNLIMITED)
    if length < 1:
        raise ModelError(f"the config allows {length} positions; fetch the model's own config.json")
    return length
