"""Makes formats.gguf and formats.f32 of crates/engine/tests/fixtures: blocks of every format, and gguf-py's values.

    pip install gguf==0.19.0 && python scripts/gguf_fixtures.py

The blocks are random bytes with scales set on purpose: negative, zero, subnormal, largest. Two runs give the same
bytes.
"""

from pathlib import Path

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType, GGUFWriter, quants

FOLDER = Path(__file__).resolve().parent.parent / "crates/engine/tests/fixtures"
# Half-precision numbers: 1, -1, the smallest subnormal, a negative subnormal, the largest subnormal, zero, -0, a common
# scale, a negative one, the largest.
HALVES = np.array([0x3C00, 0xBC00, 0x0001, 0x8155, 0x03FF, 0x0000, 0x8000, 0x2A66, 0x9E01, 0x7BFF], dtype="<u2")
# Bytes where the half-precision numbers of a block stand.
SCALES = {
    "Q4_0": [0],
    "Q4_1": [0, 2],
    "Q5_0": [0],
    "Q5_1": [0, 2],
    "Q8_0": [0],
    "Q4_K": [0, 2],
    "Q5_K": [0, 2],
    "Q6_K": [208],
    "Q2_K": [80, 82],
    "Q3_K": [108],
    "IQ4_NL": [0],
    "IQ4_XS": [0],
    "MXFP4": [],
}
# What the first bytes of the blocks of MXFP4 are: exponents, the first two of which give subnormal scales.
EXPONENTS = np.array([0, 1, 2, 3, 127, 128, 250, 100, 130, 200], dtype=np.uint8)
ROWS = 2


def blocks(name: str, rng: np.random.Generator) -> np.ndarray:
    """Rows of blocks, each scale of HALVES at least once."""
    _, size = GGML_QUANT_SIZES[GGMLQuantizationType[name]]
    count = len(HALVES)
    data = rng.integers(0, 256, (count, size), dtype=np.uint8)
    for shift, at in enumerate(SCALES[name]):
        data[:, at : at + 2] = np.roll(HALVES, 3 * shift).view(np.uint8).reshape(count, 2)
    if name == "Q8_0":
        data[:, 2:5] = [0x80, 0x7F, 0xFF]  # -128, 127, -1
    if name == "MXFP4":
        data[:, 0] = EXPONENTS
    if name == "Q6_K":
        data[:, 192:194] = [0x80, 0x7F]
    return data.reshape(ROWS, -1)


def main() -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(22)
    writer = GGUFWriter(FOLDER / "formats.gguf", "fixture")
    writer.add_uint8("fixture.u8", 200)
    writer.add_int8("fixture.i8", -100)
    writer.add_uint16("fixture.u16", 60000)
    writer.add_int16("fixture.i16", -30000)
    writer.add_uint32("fixture.u32", 4_000_000_000)
    writer.add_int32("fixture.i32", -2_000_000_000)
    writer.add_uint64("fixture.u64", 2**63)
    writer.add_int64("fixture.i64", -(2**62))
    writer.add_float32("fixture.f32", 1e-5)
    writer.add_float64("fixture.f64", 0.1)
    writer.add_bool("fixture.bool", True)
    writer.add_string("fixture.string", "Größe <|end|> \n")
    writer.add_array("fixture.strings", ["a", "", "ñ", "Ġthe"])
    writer.add_array("fixture.numbers", [1, -2, 3])
    writer.add_key_value("fixture.floats", [0.5, -1.5], GGUFValueType.ARRAY, GGUFValueType.FLOAT32)
    writer.add_array("fixture.bools", [True, False])
    expected = []
    for name in SCALES:
        data = blocks(name, rng)
        kind = GGMLQuantizationType[name]
        writer.add_tensor(f"blocks.{name.lower()}", data, raw_dtype=kind)
        expected.append(quants.dequantize(data, kind))
    plain = rng.standard_normal((3, 5)).astype(np.float32)
    plain[0, 0], plain[1, 1] = 1e-40, -0.0
    writer.add_tensor("plain.f32", plain)
    expected.append(plain)
    half = plain.astype(np.float16)
    writer.add_tensor("plain.f16", half)
    expected.append(half.astype(np.float32))
    brain = quants.quantize(plain, GGMLQuantizationType.BF16)
    writer.add_tensor("plain.bf16", brain, raw_dtype=GGMLQuantizationType.BF16)
    expected.append(quants.dequantize(brain, GGMLQuantizationType.BF16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    values = np.concatenate([values.astype("<f4").ravel() for values in expected])
    assert np.isfinite(values).all()
    values.tofile(FOLDER / "formats.f32")
    print(f"{len(expected)} tensors, {values.size} values")


if __name__ == "__main__":
    main()
