"""The packaged SmolLM2 in the forms that other engines read, with the same weights in each.

    python bench/export_hf.py SmolLM2-135M-Instruct.Q4_1.gguf OUT

The packaged file holds 4-bit weights. Each form holds what they stand for: `OUT/hf`, a folder of
bf16 safetensors with its tokenizer, `OUT/bf16.gguf`, and `OUT/f16.gguf` with the same values for
OpenVINO, which reads no bf16. The folder is written by transformers (this runs in its own
environment), not by forerun, so that a fault in forerun's reader shows up as different text.
"""

from __future__ import annotations

import sys
from pathlib import Path

import gguf
import torch
from gguf import GGMLQuantizationType, LlamaFileType
from gguf.quants import dequantize, quantize
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

BF16, F16 = GGMLQuantizationType.BF16, GGMLQuantizationType.F16
FILE_TYPES = {BF16: LlamaFileType.MOSTLY_BF16, F16: LlamaFileType.MOSTLY_F16}


def export_folder(source: Path, folder: Path) -> None:
    """Write `source` (GGUF) as a Hugging Face folder in bf16."""
    where = {"pretrained_model_name_or_path": source.parent, "gguf_file": source.name}
    unpacked = GgufConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(
        **where, dtype=torch.bfloat16, quantization_config=unpacked
    )
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(**where).save_pretrained(folder)


def export_gguf(source: Path, target: Path, kind: GGMLQuantizationType) -> None:
    """Write `source` as GGUF, matrices rounded to bf16 and kept as `kind`, vectors as they are."""
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, arch=reader.fields["general.architecture"].contents())
    replaced = (
        "GGUF.",
        "general.architecture",
        "general.file_type",
        "general.quantization_version",
    )
    for name, field in reader.fields.items():
        if not name.startswith(replaced):
            sub_type = field.types[-1] if len(field.types) > 1 else None
            writer.add_key_value(name, field.contents(), field.types[0], sub_type)
    writer.add_file_type(FILE_TYPES[kind])
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type)
        if values.ndim == 1:
            writer.add_tensor(tensor.name, values)
        else:
            rounded = dequantize(quantize(values, BF16), BF16)
            writer.add_tensor(tensor.name, quantize(rounded, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def export(source: Path, out: Path) -> None:
    """Write all three forms into `out`; none is left half-written."""
    out.mkdir(parents=True, exist_ok=True)
    for kind, name in ((BF16, "bf16.gguf"), (F16, "f16.gguf")):
        part = out / f"{name}.part"
        export_gguf(source, part, kind)
        part.rename(out / name)
    export_folder(source, out / "hf.part")
    (out / "hf.part").rename(out / "hf")


if __name__ == "__main__":
    export(Path(sys.argv[1]), Path(sys.argv[2]))
