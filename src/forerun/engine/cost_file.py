"""The costs of passes, kept from one start to the next: measuring takes a second or two.

One file for each model, type and machine, in `costs/` of the cache folder. What is wrong in it, the
engine corrects while it runs. FORERUN_COSTS=0 measures at every start and keeps nothing; to measure
anew and keep that, delete the file.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import sys
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import astuple
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from forerun.engine.costs import Costs, Load, fit, loads, sample
from forerun.home import cache_folder, written_whole
from forerun.models import kernels
from forerun.models.cache import KVStore
from forerun.models.target import Target
from forerun.versions import versions

Measured = Mapping[Load, float]

_known: weakref.WeakKeyDictionary[Target, tuple[Measured, str]] = weakref.WeakKeyDictionary()


def measure(target: Target, store: KVStore) -> Costs:
    """What passes cost here: from the file, else by timing passes over scratch rows. Once for a
    target; leaves the store as it was."""
    if target not in _known:
        wanted = loads(min(store.free_slots, target.info.max_length))
        _known[target] = _from_file(target, store, wanted)
    return fit(_known[target][0])


def source(target: Target) -> str | None:
    """In words, where the costs of a target come from; None where nobody asked for them."""
    return _known[target][1] if target in _known else None


def _from_file(target: Target, store: KVStore, wanted: Sequence[Load]) -> tuple[Measured, str]:
    if os.environ.get("FORERUN_COSTS") == "0":
        return sample(target, store, wanted), "measured"
    key = _key(target, wanted)
    path = _path(key)
    try:
        if path.exists():
            return _read(path, key), f"kept in {path}"
    except (OSError, ValueError, LookupError, TypeError) as error:
        what = " ".join(str(error).split()) or type(error).__name__
        print(f"forerun: {path} is of no use ({what}); measuring again", file=sys.stderr)
    found = sample(target, store, wanted)
    try:
        _write(path, key, found)
    except OSError as error:
        return found, f"measured, but cannot be kept in {path} ({error.strerror})"
    return found, f"measured, and kept in {path} from now on"


def _key(target: Target, wanted: Sequence[Load]) -> dict[str, Any]:
    """All that costs depend on."""
    info = target.info
    on_gpu = info.device.type == "cuda"
    backend = getattr(target, "backend", target)
    return {
        "machine": torch.cuda.get_device_name(info.device) if on_gpu else kernels.processor(),
        "device": info.device.type,
        "threads": torch.get_num_threads(),
        "model": info.name,
        "shape": [info.architecture, info.vocab_size, info.hidden_size, info.layers],
        "dtype": str(info.dtype).removeprefix("torch."),
        "computed_by": getattr(backend, "build", type(backend).__name__),
        "loads": [list(astuple(load)) for load in wanted],
    }


def _path(key: Mapping[str, Any]) -> Path:
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:12]
    name = re.sub(r"[^\w.-]+", "-", str(key["model"])).strip("-")[-40:]
    return cache_folder() / "costs" / f"{name}-{key['dtype']}-{digest}.json"


def _read(path: Path, key: Mapping[str, Any]) -> Measured:
    """Raises `ValueError` and others for what cannot be used."""
    record = json.loads(path.read_text(encoding="utf-8"))
    for name, now in {"versions": versions("forerun", "torch"), "key": dict(key)}.items():
        if record[name] != now:
            raise ValueError(f"it has other {name}")
    found = {Load(*load): float(seconds) for *load, seconds in record["seconds"]}
    if Load(1, 1) not in found or not all(0 < each < math.inf for each in found.values()):
        raise ValueError("it lacks times")
    return found


def _write(path: Path, key: Mapping[str, Any], found: Measured) -> None:
    record = {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "versions": versions("forerun", "torch"),
        "key": key,
        "seconds": [[*astuple(load), seconds] for load, seconds in found.items()],
    }
    with written_whole(path) as fresh:
        fresh.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
