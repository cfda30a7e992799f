"""Drafts without the rows that their target has anyway, in a layout of forerun alone.

Training freezes what a draft shares with its target: the output matrix is rows of the target's, and
often the larger half of the file. A folder that leaves them out is told by its config.json:

    config.json           as in its own layout; `lent_by_target` says which tensors are left out,
                          which matrix of which target they are rows of, and the hash of each
    forerun.safetensors   all other tensors. Other engines look for no such name: one of them would
                          take a missing output matrix for the target's own and draft nonsense

The rows are read from the files of the target, in the type in which they were left out, whatever
type it runs in. They must have the very hash: on another model the draft is refused.

V tokens of the target, U of the draft, C hidden size.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file
from torch import Tensor

from forerun.config import Settings
from forerun.errors import CheckpointError, ConfigError
from forerun.models.describe import located
from forerun.models.hub import DTYPES, decoder_weights, locate, read_config
from forerun.models.weights import NAMES, Entry, Weights, folder_weights

LAYOUT = "forerun"  # as `forerun export` calls it
KEY, FILE = "lent_by_target", "forerun.safetensors"
BESIDE = "mask_embedding.pt"  # the one file that drafts have beside config and weights

Matrix = Literal["head", "embedding"]


class Rows(Settings):
    """A tensor that is left out. matrix: of the target. sha256: of its bytes, row after row."""

    title = KEY

    matrix: Matrix
    shape: tuple[int, int]
    dtype: Literal["float32", "bfloat16", "float16"]
    sha256: str


class Lent(Settings):
    """What is left out of a draft. target: as it was called when the draft was written."""

    title = KEY

    target: str
    tensors: dict[str, Rows]


def lent(folder: Path) -> Lent | None:
    """What a folder leaves out; None: it is whole. Raises `CheckpointError` for a damaged entry."""
    if not (folder / "config.json").exists():
        return None
    stated = read_config(folder).get(KEY)
    if stated is None:
        return None
    try:
        return Lent(**stated)
    except (ConfigError, TypeError) as error:
        raise CheckpointError(f"{folder}: {error}; fetch its own config.json") from None


def draft_weights(
    folder: Path,
    dtype: torch.dtype | None,
    rename: Callable[[str], str | None] = str,
    names: Sequence[str] = NAMES,
    target: str | None = None,
) -> Weights:
    """`folder_weights` of a draft, what its target lends among them.

    target: the model that lends; None: the one that the folder names, if it is here. It is read
    only when a tensor of it is. Raises `CheckpointError` as `folder_weights` does, and, when such a
    tensor is read, where the target has other rows.
    """
    left_out = lent(folder)
    if left_out is None:
        return folder_weights(folder, dtype, rename, names)
    if not (folder / FILE).exists():
        raise CheckpointError(f"{folder} has no {FILE}, which its config.json tells of; fetch it")
    weights = folder_weights(folder, dtype, rename, (FILE,))
    for published, rows in left_out.tensors.items():
        name = rename(published) or published
        if name in weights:
            raise CheckpointError(
                f"{folder}: {name} is stored, but config.json says that the target lends it; use "
                "the config.json that belongs to these weights"
            )
        read = _reader(folder, weights, rows, left_out.target, target)
        weights.entries[name] = Entry(rows.shape, read)
    return weights


def _reader(
    folder: Path, weights: Weights, rows: Rows, made_for: str, target: str | None
) -> Callable[[torch.dtype | None], Tensor]:
    def read(dtype: torch.dtype | None) -> Tensor:
        if target is None:
            located(made_for)  # nothing is fetched only to look at a draft
        model = target or made_for
        ids_U = draft_ids(weights) if rows.matrix == "head" else None
        found_UC = _rows(model, rows.matrix, DTYPES[rows.dtype], ids_U)
        if found_UC is None or found_UC.shape != rows.shape or _sha256(found_UC) != rows.sha256:
            raise CheckpointError(
                f"{folder} was made for {made_for} and takes rows of it that are others in "
                f"{model}; choose a draft that was made for this model"
            )
        return found_UC if dtype is None else found_UC.to(dtype)

    return read


def draft_ids(weights: Weights) -> Tensor | None:
    """The target's ids of a draft's tokens, [U]; None: it drafts all of them."""
    if entry := weights.entries.get("d2t"):
        return entry.read(torch.int64) + torch.arange(entry.shape[0])
    if entry := weights.entries.get("token_map"):
        return entry.read(torch.int64)
    return None


def _rows(model: str, matrix: Matrix, dtype: torch.dtype, ids_U: Tensor | None) -> Tensor | None:
    """Rows of a matrix of a model, read from its files; None where it has no such rows."""
    _, weights = decoder_weights(locate(model), dtype)
    name = "lm_head.weight"
    if matrix == "embedding" or name not in weights:
        name = "model.embed_tokens.weight"
    entry = weights.entries.get(name)
    if entry is None or (ids_U is not None and int(ids_U.max()) >= entry.shape[0]):
        return None
    rows_VC = entry.read(dtype)
    return rows_VC if ids_U is None else rows_VC[ids_U]


def _sha256(rows_UC: Tensor) -> str:
    return hashlib.sha256(rows_UC.contiguous().view(torch.uint8).numpy().data).hexdigest()


# ---- writing ------------------------------------------------------------------------------------


def leave_out(folder: Path, out: Path, target: str) -> None:
    """Write a whole draft without the rows that `target` has to the bit.

    Everything else stays as it is, so that the family's exporter gives back the very files. Raises
    `ConfigError` where nothing can be left out.
    """
    if lent(folder):
        raise ConfigError(f"{folder} leaves out rows of its target already; copy it")
    weights = folder_weights(folder, None)
    ids_U = draft_ids(weights)
    kept: dict[str, Tensor] = {}
    shared: dict[str, Rows] = {}
    for name, entry in weights.entries.items():
        tensor = entry.read(None)
        rows = _shared(name, tensor, target, ids_U)
        if rows:
            shared[name] = rows
        else:
            kept[name] = tensor.contiguous()
    if not shared:
        raise ConfigError(
            f"{folder} has no matrix that is rows of {target}, so nothing can be left out; "
            "name the model that it was trained for, or publish it as it is"
        )
    published: dict[str, Any] = read_config(folder)
    published[KEY] = Lent(target=target, tensors=shared).model_dump(mode="json")
    out.mkdir(parents=True, exist_ok=True)
    save_file(kept, out / FILE, metadata={"format": "pt"})
    text = json.dumps(published, indent=2) + "\n"
    (out / "config.json").write_text(text, encoding="utf-8")
    if (folder / BESIDE).exists():
        shutil.copy(folder / BESIDE, out)


def _shared(name: str, tensor: Tensor, target: str, ids_U: Tensor | None) -> Rows | None:
    """What to write of a tensor that the target has, too; None: it has not."""
    matrix: Matrix
    if name.startswith(("lm_head.", "lm_heads.")):
        matrix = "head"
    elif name == "embed_tokens.weight":
        matrix, ids_U = "embedding", None
    else:
        return None
    theirs = _rows(target, matrix, tensor.dtype, ids_U)
    if theirs is None or theirs.shape != tensor.shape or not torch.equal(theirs, tensor):
        return None
    facts: dict[str, Any] = {
        "matrix": matrix,
        "shape": tuple(tensor.shape),
        "dtype": str(tensor.dtype).removeprefix("torch."),
    }
    return Rows(**facts, sha256=_sha256(tensor))


def sentence(folder: Path) -> list[str]:
    """What is left out, in plain words; empty where the folder is whole."""
    left_out = lent(folder)
    if left_out is None:
        return []
    sources = " and ".join(sorted({rows.matrix for rows in left_out.tensors.values()}))
    return [
        f"without {', '.join(left_out.tensors)}, whose rows are taken from the {sources} of "
        f"{left_out.target}; it runs on that model alone, and 'forerun export' writes it out whole "
        "for other engines"
    ]
