"""Can a model of transformers be given a tree? Found out by giving it one.

Plain passes over each path of a small tree are compared with one pass over packed rows: the tree,
behind a prefix in slots that had other content, beside another sequence. A few passes of a few
tokens, whatever the size of the model.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from forerun.errors import ModelError
from forerun.models.foreign import reason
from forerun.models.invariance import check_finite
from forerun.models.target import Segment

if TYPE_CHECKING:
    from forerun.models.transformers_target import TransformersTarget

PREFIX, FIRST, SECOND, OTHER = [3, 1, 4, 1], [5, 9], [2, 6, 5], [8, 9, 7]
TOLERANCE, TOLERANCE_HALF = 1e-3, 0.1  # root mean square, of the spread of the logits


def kv_shape(model: Any, cache_name: str, name: str) -> tuple[int, int, int]:
    """Layers, key/value heads and head size, as a plain pass leaves them in the cache.

    Raises `ModelError` when the model keeps something else than keys and values of every token.
    """
    kind = model.config.model_type
    output = _run(model, name, input_ids=_ids(model, PREFIX), use_cache=True)
    cache = getattr(output, cache_name, None)
    layers = getattr(cache, "layers", None)
    if not layers or not all(_is_plain(layer) for layer in layers):
        raise ModelError(
            f"{name} ({kind}) keeps a recurrent state, not the keys and values of every token; a "
            "state cannot be rewound to drop rejected tokens; take a model with attention in all "
            "layers"
        )
    shapes = {tuple(part.shape) for layer in layers for part in (layer.keys, layer.values)}
    if len(shapes) != 1 or len(shape := shapes.pop()) != 4 or shape[2] != len(PREFIX):
        raise ModelError(
            f"{name} ({kind}) keeps keys and values of different shapes, which do not fit into one "
            "store; take another model"
        )
    return len(layers), shape[1], shape[3]


def _is_plain(layer: Any) -> bool:
    has_keys = isinstance(getattr(layer, "keys", None), Tensor)
    return has_keys and not hasattr(layer, "conv_states") and not hasattr(layer, "recurrent_states")


@torch.inference_mode()
def check_target(target: TransformersTarget, model: Any) -> None:
    """Raises `ModelError` when packed rows do not give the logits of plain passes, and
    `CheckpointError` when those are not finite.
    """
    name, kind = target.info.name, model.config.model_type
    if "local" in getattr(model.config, "attention_layers", ()):
        raise ModelError(f"{name} ({kind}) masks by the order of keys; take another model")
    paths = (PREFIX + FIRST, PREFIX + SECOND, OTHER)
    plain = [_run(model, name, input_ids=_ids(model, path)).logits[0].float() for path in paths]
    expected = torch.cat([plain[0][len(PREFIX) :], plain[1][len(PREFIX) :], plain[2]])
    check_finite(expected, name)
    try:
        packed = _packed(target)
    except Exception as error:
        raise ModelError(
            f"{name} ({kind}) cannot check drafts: it does not take an explicit mask and "
            f"positions, as models with ALiBi do not ({reason(error)}); take another model"
        ) from error
    tolerance = TOLERANCE if target.info.dtype == torch.float32 else TOLERANCE_HALF
    if not (packed - expected).square().mean().sqrt() <= tolerance * expected.std():
        raise ModelError(
            f"{name} ({kind}) cannot check drafts: it does not follow an explicit mask and "
            "positions, as models with ALiBi do not; take another model"
        )


def _packed(target: TransformersTarget) -> Tensor:
    vocab = target.info.vocab_size
    prefix, first, second, other = (
        [token % vocab for token in part] for part in (PREFIX, FIRST, SECOND, OTHER)
    )
    store = target.new_store(256)
    span, beside = store.open(), store.open()
    for use in (beside, span):
        store.reserve(use, 16)
    target.forward([Segment(beside, [1, 2, 3, 4, 5])], store)  # leaves other content in its slots
    target.forward([Segment(span, prefix)], store)
    store.commit(span, range(len(prefix)))
    parents = [-1, 0, -1, 2, 3]
    segments = [Segment(span, first + second, parents), Segment(beside, other)]
    return target.forward(segments, store).logits_NV


def _ids(model: Any, tokens: list[int]) -> Tensor:
    vocab = model.config.get_text_config().vocab_size
    return torch.tensor([[token % vocab for token in tokens]], device=model.device)


@torch.inference_mode()
def _run(model: Any, name: str, **inputs: Any) -> Any:
    try:
        return model(**inputs)
    except Exception as error:
        raise ModelError(f"{name} does not run ({reason(error)}); take another model") from error
