"""Compiled kernels for processors: built once per machine with its C compiler, then cached.

`library()` returns None where there is no compiler or FORERUN_KERNELS=0; callers then use the plain
PyTorch path of `models/layers.py`, which computes the same thing more slowly.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import torch
from torch import Tensor

from forerun.home import cache_folder, written_whole

FOLDER = Path(__file__).parent
VOIDS = (
    "prepare",
    "run",
    "append",
    "linear",
    "norm",
    "add_silu",
    "logits",
    "best",
    "settle",
    "joined_learn",
)
ROUNDS = ("eagle", "medusa", "dflash", "counting", "joined")
SOURCES, HEADERS = sorted(FOLDER.glob("*.c")), sorted(FOLDER.glob("*.h"))
FLAGS = ("-O3", "-march=native", "-std=gnu11", "-fPIC", "-shared", "-Wno-psabi", "-fno-math-errno")

MAX_HEAD, MAX_GROUP, LANES, COLUMNS = 256, 64, 16, 32  # as in kernels.h, attention.c, vectors.h


class Pass(ctypes.Structure):
    """Mirror of `Pass` in kernels.h."""

    _fields_ = (
        ("rows", ctypes.c_int32),
        ("segments", ctypes.c_int32),
        ("base", ctypes.c_void_p),
        ("length", ctypes.c_void_p),
        ("first", ctypes.c_void_p),
        ("node", ctypes.c_void_p),
        ("parent", ctypes.c_void_p),
        ("position", ctypes.c_void_p),
        ("straight", ctypes.c_void_p),
        ("query", ctypes.c_void_p),
        ("narrow", ctypes.c_void_p),
        ("wide", ctypes.c_void_p),
    )


class Matrix(ctypes.Structure):
    """Mirror of `Matrix` in kernels.h."""

    _fields_ = (
        ("weight", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("in_", ctypes.c_int32),
        ("out", ctypes.c_int32),
    )


class Layer(ctypes.Structure):
    """Mirror of `Layer` in kernels.h."""

    _fields_ = (
        ("bf16", ctypes.c_int32),
        ("heads", ctypes.c_int32),
        ("kv_heads", ctypes.c_int32),
        ("head_dim", ctypes.c_int32),
        ("slots", ctypes.c_int64),
        ("key", ctypes.c_void_p),
        ("value", ctypes.c_void_p),
        ("cosine", ctypes.c_void_p),
        ("sine", ctypes.c_void_p),
        ("q_norm", ctypes.c_void_p),
        ("k_norm", ctypes.c_void_p),
        ("norm_eps", ctypes.c_float),
        ("scale", ctypes.c_float),
        ("softcap", ctypes.c_float),
        ("window", ctypes.c_int32),
        ("anchored", ctypes.c_int32),
        ("both_ways", ctypes.c_int32),
        ("gelu", ctypes.c_int32),
        ("qkv", Matrix),
        ("o", Matrix),
        ("gate_up", Matrix),
        ("down", Matrix),
        ("before_attention", ctypes.c_void_p),
        ("after_attention", ctypes.c_void_p),
        ("before_mlp", ctypes.c_void_p),
        ("after_mlp", ctypes.c_void_p),
        ("beside", ctypes.c_void_p),
        ("normed_residual", ctypes.c_int32),
    )


class Taps(ctypes.Structure):
    """Mirror of `Taps` in kernels.h."""

    _fields_ = (
        ("count", ctypes.c_int32),
        ("boundary", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
    )


class Draw(ctypes.Structure):
    """Mirror of `Draw` in choosing.c."""

    _fields_ = (
        ("logits", ctypes.c_void_p),
        ("key", ctypes.c_uint64),
        ("top_p", ctypes.c_double),
        ("temperature", ctypes.c_float),
        ("least", ctypes.c_float),
        ("top_k", ctypes.c_int32),
    )


@functools.cache
def library() -> ctypes.CDLL | None:
    """The compiled kernels, or None where they cannot be had."""
    compiler = _compiler()
    if compiler is None or os.environ.get("FORERUN_KERNELS") == "0":
        return None
    try:
        return _declare(ctypes.CDLL(str(_build(compiler))))
    except (OSError, subprocess.SubprocessError):
        return None  # a compiler that cannot compile, a folder that cannot be written


def for_scores(scores: Tensor) -> ctypes.CDLL | None:
    """The compiled kernels where they can read these scores: float32 on a processor."""
    return library() if scores.is_cpu and scores.dtype is torch.float32 else None


def _compiler() -> str | None:
    names = (os.environ.get("CC"), "cc", "gcc", "clang")
    return next((path for name in names if name and (path := shutil.which(name))), None)


def _build(compiler: str) -> Path:
    try:
        return _compiled([compiler, *FLAGS, *_openmp()])
    except subprocess.CalledProcessError:
        return _compiled([compiler, *FLAGS])  # one that knows no OpenMP: on one thread


def _compiled(command: list[str]) -> Path:
    """The library that this command makes of the sources, from the cache if it is there."""
    key = hashlib.sha256()
    for source in (*HEADERS, *SOURCES):
        key.update(source.read_bytes())
    for part in (torch.__version__, *command, processor()):
        key.update(part.encode())
    built = cache_folder() / "kernels" / f"{key.hexdigest()[:16]}.so"
    if built.exists():
        return built
    print("forerun: compiling for this processor, once; takes seconds", file=sys.stderr)
    with written_whole(built) as fresh:
        _run([*command, *map(str, SOURCES), "-o", str(fresh), "-lm"])
    return built


def _run(command: list[str]) -> None:
    subprocess.run(command, check=True, capture_output=True, timeout=300)


def _openmp() -> list[str]:
    """Link the OpenMP runtime that torch brought: two of them would fight for the cores."""
    bundled = sorted((Path(torch.__file__).parent / "lib").glob("libgomp*.so*"))
    bundled += sorted((Path(torch.__file__).parent.parent / "torch.libs").glob("libgomp*.so*"))
    return ["-fopenmp", *map(str, bundled[:1])]


def processor() -> str:
    """What `-march=native` stands for here."""
    cpuinfo = Path("/proc/cpuinfo")
    if not cpuinfo.exists():
        return platform.processor() + platform.machine()
    fields = dict(
        line.split(":", 1)
        for line in cpuinfo.read_text().split("\n\n")[0].split("\n")
        if ":" in line
    )
    named = {key.strip(): value for key, value in fields.items()}
    return named.get("model name", "") + named.get("flags", named.get("Features", ""))


def _declare(lib: ctypes.CDLL) -> ctypes.CDLL:
    pointer, int32, real = ctypes.c_void_p, ctypes.c_int32, ctypes.c_float
    lib.prepare.argtypes = (pointer,)
    lib.run.argtypes = (pointer, pointer, int32, pointer, pointer, pointer)
    lib.append.argtypes = (pointer, pointer, int32, pointer)
    lib.linear.argtypes = (pointer, pointer, pointer, int32, int32)
    lib.norm.argtypes = (pointer, pointer, real, pointer, int32, int32, int32)
    lib.add_silu.argtypes = (pointer, pointer, ctypes.c_int64, pointer, int32, int32, int32)
    lib.best.argtypes = (pointer, int32, int32, int32, int32, pointer, pointer)
    lib.choose.argtypes, lib.choose.restype = (pointer, int32, int32, pointer), None
    lib.logits.argtypes = (pointer, pointer, real, pointer, pointer, pointer, int32, int32)
    lib.rank.argtypes = (*lib.logits.argtypes, int32, int32, pointer, pointer)
    lib.follow.argtypes = (pointer, int32, pointer, pointer, int32, pointer, pointer)
    for name in VOIDS:
        getattr(lib, name).restype = None
    lib.settle.argtypes = (pointer, pointer, pointer, int32)
    trees = (pointer, int32)
    lib.eagle_round.argtypes = (pointer, pointer, ctypes.c_double, pointer, *trees)
    lib.medusa_round.argtypes = (pointer, pointer, pointer, pointer, *trees)
    lib.dflash_round.argtypes = (pointer, pointer, int32, pointer, pointer, *trees)
    lib.counting_round.argtypes = (pointer, pointer, pointer, *trees)
    lib.joined_round.argtypes = (pointer, pointer, pointer, pointer, *trees)
    lib.joined_learn.argtypes = (pointer, pointer, pointer, int32)
    for name in ("rank", *(f"{name}_round" for name in ROUNDS)):
        getattr(lib, name).restype = ctypes.c_double
    return lib
