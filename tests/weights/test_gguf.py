"""The GGUF container: what is read, and how damaged files are refused."""

from __future__ import annotations

import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
from tiny_models import random_tensors, target_metadata, target_shapes, tiny_target, write_gguf

from paceline.errors import LoadError
from paceline.weights.gguf import GgufFile


def test_metadata_and_tensors_equal_what_was_written(tmp_path: Path) -> None:
    metadata, tensors = target_metadata(), random_tensors(target_shapes(), lambda name: "Q6_K")
    file = GgufFile(write_gguf(tmp_path / "a.gguf", "qwen35", metadata, tensors))
    assert file.architecture == "qwen35"
    assert set(metadata) < set(file.metadata)
    for key, value in metadata.items():
        assert file.metadata[key] == (pytest.approx(value) if isinstance(value, float) else value)
    assert list(file.tensors) == list(tensors)
    for name, (array, kind) in tensors.items():
        assert (file.tensors[name].qtype, file.tensors[name].shape) == (kind, target_shapes()[name])
        assert file.tensors[name].data.numpy().tobytes() == array.tobytes()


def test_arrays_read_in_one_step_equal_the_packages_reader(tmp_path: Path) -> None:
    metadata = {
        "x.text": ["", "a", "żółć \U0001f98a"],
        "x.flags": [True, False, True],
        "x.signed": [-1, 2],
        "x.real": [0.5, -2.0],
        "general.alignment": 64,
    }
    path = write_gguf(tmp_path / "a.gguf", "x", metadata, {"t": (np.zeros(3, np.float32), "F32")})
    reader = gguf.GGUFReader(path)
    file = GgufFile(path)
    assert {key: file.metadata[key] for key in metadata} == {key: reader.fields[key].contents() for key in metadata}


def test_the_file_is_mapped_and_never_written(tmp_path: Path) -> None:
    path = tiny_target(tmp_path / "a.gguf")
    before = path.read_bytes()
    GgufFile(path).tensors["output_norm.weight"].data.fill_(7)
    assert path.read_bytes() == before


def test_split_files_are_one_model(tmp_path: Path) -> None:
    tensors = random_tensors(target_shapes())
    first = write_gguf(tmp_path / "m.gguf", "qwen35", target_metadata(), tensors, split_tensors=20)
    file = GgufFile(first)
    assert len(file.paths) == 3
    assert {name: tensor.data.numpy().tobytes() for name, tensor in file.tensors.items()} == {
        name: array.tobytes() for name, (array, _) in tensors.items()
    }
    with pytest.raises(LoadError, match=r"part 2 of 3; open the first one, m-00001-of-00003\.gguf"):
        GgufFile(file.paths[1])
    file.paths[2].unlink()
    with pytest.raises(LoadError, match=r"m-00003-of-00003\.gguf: no such file"):
        GgufFile(first)


def test_a_split_file_under_another_name_is_refused(tmp_path: Path) -> None:
    first = write_gguf(tmp_path / "m.gguf", "qwen35", target_metadata(), random_tensors(target_shapes()), split_tensors=20)
    renamed = first.rename(tmp_path / "other.gguf")
    with pytest.raises(LoadError, match="one of 3 parts, but not named like"):
        GgufFile(renamed)


def test_missing_file_and_wrong_magic(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match=r"nothing\.gguf: no such file"):
        GgufFile(tmp_path / "nothing.gguf")
    (tmp_path / "text.gguf").write_text("hello, this is not a model file")
    with pytest.raises(LoadError, match=r"text\.gguf: not a GGUF file: it starts with b'hell'"):
        GgufFile(tmp_path / "text.gguf")


@pytest.mark.parametrize("version", [1, 4, 3 << 24])
def test_unsupported_version_is_named(tmp_path: Path, version: int) -> None:
    path = tiny_target(tmp_path / "a.gguf")
    data = bytearray(path.read_bytes())
    data[4:8] = struct.pack("<I", version)
    path.write_bytes(data)
    with pytest.raises(LoadError, match=f"GGUF version {version} is not supported"):
        GgufFile(path)


def test_truncated_tensor_data_names_both_sizes(tmp_path: Path) -> None:
    path = tiny_target(tmp_path / "a.gguf")
    data = path.read_bytes()
    path.write_bytes(data[:-50_000])
    with pytest.raises(LoadError, match=rf"truncated: tensor \S+ ends at byte [\d,]+, the file has {len(data) - 50_000:,}"):
        GgufFile(path)


def test_a_file_cut_anywhere_is_a_load_error(tmp_path: Path) -> None:
    path = tiny_target(tmp_path / "a.gguf")
    data = path.read_bytes()
    for size in [*range(0, 120), *range(120, len(data), len(data) // 60)]:
        path.write_bytes(data[:size])
        with pytest.raises(LoadError, match=r"a\.gguf: "):
            GgufFile(path)


def test_absurd_counts_are_a_load_error(tmp_path: Path) -> None:
    path = tiny_target(tmp_path / "a.gguf")
    data = bytearray(path.read_bytes())
    for at in (8, 16):  # number of tensors, number of key-value pairs
        damaged = data.copy()
        damaged[at : at + 8] = struct.pack("<Q", 2**40)
        path.write_bytes(damaged)
        with pytest.raises(LoadError, match="damaged header or truncated metadata"):
            GgufFile(path)


@pytest.mark.parametrize("key", ["tokenizer.chat_template", "tokenizer.ggml.tokens"])
def test_text_that_is_not_utf8_names_file_and_key(tmp_path: Path, key: str) -> None:
    path = tiny_target(tmp_path / "a.gguf", **{key: "abcabc" if "template" in key else ["x", "abcabc"]})
    path.write_bytes(path.read_bytes().replace(b"abcabc", b"abc\xffbc"))
    with pytest.raises(LoadError, match=rf"a\.gguf: {key} holds text that is not UTF-8: byte 3 is 0xff"):
        GgufFile(path).metadata[key]
