"""Reading a GGUF file: its metadata at once, its tensors one by one.

The header is parsed here rather than by `gguf.GGUFReader`, which builds an array object per
vocabulary entry and needs 1.7 s to open a file of 49 thousand tokens and 8 s for one of 262
thousand; this takes a tenth of a second. The quantised blocks are decoded by `gguf.quants`.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import quants
from torch import Tensor

from forerun.errors import CheckpointError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
CHUNK = 1 << 22  # elements decoded at once: float32 copies of a whole embedding would not fit well

_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?"}
_SCALARS |= {10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Where a tensor lies in the file. `shape` is outermost first, as in torch."""

    shape: tuple[int, ...]
    type: Any  # gguf.GGMLQuantizationType
    offset: int  # in bytes, from the start of the file
    row_bytes: int
    rows: int


class GGUFFile:
    """`metadata` and the table of `tensors` of a file; `read` decodes one of them.

    Raises `CheckpointError` when the file is not GGUF, is cut short or is malformed.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metadata: dict[str, Any] = {}
        self.tensors: dict[str, TensorEntry] = {}
        with path.open("rb") as file:
            start = file.read(8)
            if start[:4] != MAGIC:
                raise CheckpointError(
                    f"{path} is not a GGUF file; give one that starts with 'GGUF'"
                )
            if len(start) < 8 or (version := struct.unpack("<I", start[4:])[0]) not in VERSIONS:
                found = f"version {version}" if len(start) == 8 else "no version"
                raise CheckpointError(
                    f"{path}: GGUF {found}, only 2 and 3 are read; convert it anew"
                )
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as view:
                try:
                    self._parse(_Cursor(view, len(start)))
                except (struct.error, EOFError, KeyError, ValueError) as error:
                    raise CheckpointError(
                        f"{path} is cut short or damaged ({error}); fetch it again"
                    ) from error

    def read(self, name: str, dtype: torch.dtype) -> Tensor:
        """The tensor `name` decoded to `dtype`, piece by piece to need little memory."""
        entry = self.tensors[name]
        values = torch.empty(entry.shape, dtype=dtype)
        rows_RC = values.view(entry.rows, -1)
        step = max(1, CHUNK // max(1, rows_RC.shape[1]))
        with self.path.open("rb") as file:
            file.seek(entry.offset)
            for begin in range(0, entry.rows, step):
                count = min(step, entry.rows - begin)
                raw = np.frombuffer(file.read(count * entry.row_bytes), dtype=np.uint8)
                decoded = _decode(raw.reshape(count, entry.row_bytes), entry.type, name)
                rows_RC[begin : begin + count] = torch.from_numpy(decoded)
        return values

    def _parse(self, cursor: _Cursor) -> None:
        tensor_count, metadata_count = cursor.scalar("<Q"), cursor.scalar("<Q")
        for _ in range(metadata_count):
            key = cursor.string()
            self.metadata[key] = cursor.value(cursor.scalar("<I"))
        entries = [cursor.tensor() for _ in range(tensor_count)]
        alignment = self.metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1:
            raise ValueError(f"alignment {alignment}")
        data = -(-cursor.at // alignment) * alignment
        for name, shape, kind, offset in entries:
            block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
            columns = shape[-1] if shape else 1
            if columns % block:
                raise ValueError(f"tensor {name} has rows of {columns} in blocks of {block}")
            row_bytes, rows = columns // block * block_bytes, prod(shape[:-1])
            if data + offset + rows * row_bytes > cursor.size:
                raise EOFError(f"tensor {name} ends behind the end of the file")
            self.tensors[name] = TensorEntry(shape, kind, data + offset, row_bytes, rows)


class _Cursor:
    """A position in the header."""

    def __init__(self, view: mmap.mmap, at: int) -> None:
        self.view, self.at, self.size = view, at, len(view)

    def scalar(self, layout: str) -> Any:
        (value,) = struct.unpack_from(layout, self.view, self.at)
        self.at += struct.calcsize(layout)
        return value

    def bytes(self, length: int) -> bytes:
        end = self.at + length
        if end > self.size:
            raise EOFError("the header ends behind the end of the file")
        data = self.view[self.at : end]
        self.at = end
        return data

    def string(self) -> str:
        # Token pieces need not be valid UTF-8 on their own.
        return self.bytes(self.scalar("<Q")).decode("utf-8", errors="replace")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            return self.scalar(_SCALARS[kind])
        item, count = self.scalar("<I"), self.scalar("<Q")
        if item in (_STRING, _ARRAY):
            return [self.value(item) for _ in range(count)]
        layout = np.dtype(_SCALARS[item])
        return np.frombuffer(self.bytes(count * layout.itemsize), dtype=layout).tolist()

    def tensor(self) -> tuple[str, tuple[int, ...], Any, int]:
        name = self.string()
        dimensions = [self.scalar("<Q") for _ in range(self.scalar("<I"))]
        kind = gguf.GGMLQuantizationType(self.scalar("<I"))
        return name, tuple(reversed(dimensions)), kind, self.scalar("<Q")


def _decode(raw_RB: np.ndarray[Any, Any], kind: Any, name: str) -> np.ndarray[Any, Any]:
    try:
        decoded: np.ndarray[Any, Any] = quants.dequantize(raw_RB, kind)
    except NotImplementedError:
        raise CheckpointError(
            f"tensor {name} is quantised as {kind.name}, which cannot be decoded here; "
            "take another quantisation of this model (Q8_0, Q4_K_M, ...)"
        ) from None
    return decoded if decoded.flags.writeable else decoded.copy()
