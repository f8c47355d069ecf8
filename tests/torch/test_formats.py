"""The files that the helper writes are those that torch and safetensors read."""

import os
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from lmstorfs.errors import SaveError, UnsavableError
from lmstorfs.torch import Checkpointer
from lmstorfs.torch.archive import _central_header, _descriptor, _local_header, _Record
from lmstorfs.torch.pieces import Layout

DTYPES = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32,
    torch.int16, torch.int8, torch.uint8, torch.bool, torch.complex64, torch.complex128,
    torch.float8_e4m3fn, torch.float8_e5m2, torch.uint16, torch.uint32, torch.uint64,
]  # fmt: skip


def rendered(layout: Layout) -> bytes:
    return b"".join(
        piece if isinstance(piece, bytes) else bytes(piece.view()) for piece in layout.pieces()
    )


def filled(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Return a tensor of random bytes (of 0 and 1 where the type has no others)."""
    if dtype == torch.bool:
        return torch.randint(0, 2, shape).to(dtype)
    count = torch.Size(shape).numel() * torch.empty(0, dtype=dtype).element_size()
    if not count:
        return torch.empty(shape, dtype=dtype)
    raw = torch.frombuffer(bytearray(os.urandom(count)), dtype=torch.uint8)
    return raw.view(dtype).reshape(shape)


def same(one: Any, other: Any) -> bool:
    """Whether two states are equal to the last bit, and share memory in the same places."""
    if isinstance(one, torch.Tensor):
        if type(one) is not type(other) or one.dtype != other.dtype or one.shape != other.shape:
            return False
        if one.is_meta or one.layout != torch.strided:
            return one.is_meta == other.is_meta and (
                one.is_meta or same(one.to_dense(), other.to_dense())
            )
        if one.is_quantized:
            return torch.equal(one, other)
        strides = one.stride() == other.stride() or not one.numel()
        return strides and raw(one) == raw(other)
    if isinstance(one, dict):
        return type(one) is type(other) and list(one) == list(other) and all(
            same(one[key], other[key]) for key in one
        )  # fmt: skip
    if isinstance(one, list | tuple):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and one == other


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.detach().resolve_conj().contiguous().flatten().view(torch.uint8).numpy().tobytes()


def everything() -> dict[str, Any]:
    base = torch.arange(100.0)
    return {
        "base": base,
        "view": base[3:7].view(2, 2),
        "transposed": torch.rand(3, 4).t(),
        "expanded": torch.rand(3, 1).expand(3, 5),
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(0, 7),
        "meta": torch.empty(3, device="meta"),
        "coo": torch.eye(4).to_sparse(),
        "csr": torch.eye(4).to_sparse_csr(),
        "quantised": torch._make_per_tensor_quantized_tensor(
            torch.arange(4, dtype=torch.int8), 0.1, 0
        ),
        "conjugate": torch.rand(3, dtype=torch.complex64).conj(),
        "parameter": torch.nn.Parameter(torch.rand(2, 2)),
        "nested": OrderedDict(a=[1, (2.5, "é", None, True)], b={"deep": torch.rand(2)}),
        **{str(dtype): filled(dtype, 2, 3) for dtype in DTYPES},
    }


def test_what_torch_load_reads_is_equal(tmp_path: Path) -> None:
    state = everything()
    with Checkpointer() as checkpointer:
        checkpointer.save(state, tmp_path / "all.pt")
    for mapped in (False, True):
        found = torch.load(tmp_path / "all.pt", weights_only=True, mmap=mapped)
        assert [name for name in state if not same(state[name], found[name])] == []
        found["base"][3] = -1.0
        assert found["view"][0, 0] == -1.0  # they share memory, as they did


def test_python_objects_come_back(tmp_path: Path) -> None:
    module = torch.nn.Linear(3, 3)
    with Checkpointer() as checkpointer:
        checkpointer.save({"model": module, "path": tmp_path}, tmp_path / "objects.pt")
    found = torch.load(tmp_path / "objects.pt", weights_only=False)
    assert found["path"] == tmp_path
    assert torch.equal(found["model"].weight, module.weight)


def test_with_checksums_the_file_is_torchs_own(tmp_path: Path) -> None:
    state = everything()
    torch.save(state, tmp_path / "stock.pt")
    (tmp_path / "ours").mkdir()
    with Checkpointer(checksums=True, max_host_memory=300, chunk_bytes=100) as checkpointer:
        checkpointer.save(state, tmp_path / "ours/stock.pt")
    assert (tmp_path / "ours/stock.pt").read_bytes() == (tmp_path / "stock.pt").read_bytes()
    with zipfile.ZipFile(tmp_path / "ours/stock.pt") as archive:
        assert archive.testzip() is None


def test_archives_above_four_gib_have_64_bit_numbers() -> None:
    size, offset = 5 << 30, 6 << 30
    record = _Record(b"big/data/1", None, size, offset)
    assert (offset + len(_local_header(record))) % 64 == 0
    assert _descriptor(record)[8:] == size.to_bytes(8, "little") * 2
    extra = _central_header(record)[46 + len(record.name) :]
    numbers = [int.from_bytes(extra[4 + 8 * n :][:8], "little") for n in range(3)]
    assert (extra[:4], numbers) == (b"\x01\x00\x18\x00", [size, size, offset])


names = st.text(st.characters(codec="utf-8", exclude_categories=("Cs",)), max_size=12)
shapes = st.lists(st.integers(0, 5), max_size=3)
tensors = st.builds(lambda dtype, shape: filled(dtype, *shape), st.sampled_from(DTYPES), shapes)
scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | names
states = st.recursive(
    tensors | scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(names, inner, max_size=4),
    max_leaves=12,
)


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    state=st.dictionaries(names, states, max_size=6),
    chunk=st.integers(100, 3000),
    checksums=st.booleans(),
    in_place=st.booleans(),
)
def test_any_state_comes_back(
    tmp_path: Path, state: dict[str, Any], chunk: int, checksums: bool, in_place: bool
) -> None:
    path = tmp_path / "any.pt"
    with Checkpointer(
        max_host_memory=3 * chunk, chunk_bytes=chunk, checksums=checksums
    ) as checkpointer:
        checkpointer.save(state, path, in_place=in_place)
    assert same(state, torch.load(path, weights_only=True))
    if checksums:
        written = path.read_bytes()
        torch.save(state, path)
        assert path.read_bytes() == written


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(state=st.dictionaries(names, tensors, max_size=8))
def test_safetensors_files_are_those_of_its_own_library(
    tmp_path: Path, state: dict[str, torch.Tensor]
) -> None:
    kept = {
        name: tensor for name, tensor in state.items()
        if not tensor.is_complex() and name != "__metadata__"
    }  # fmt: skip
    stock, ours = tmp_path / "stock.safetensors", tmp_path / "ours.safetensors"
    save_file(kept, stock, metadata={"format": "pt"})
    with Checkpointer() as checkpointer:
        checkpointer.save(kept, ours, metadata={"format": "pt"})
    assert ours.read_bytes() == stock.read_bytes()
    assert same(kept, {name: load_file(ours)[name] for name in kept})


@pytest.mark.parametrize(
    ("state", "told"),
    [
        ({"a": torch.rand(3, 4).t()}, "a is not contiguous"),
        ({"a": torch.eye(3).to_sparse()}, "a: safetensors does not hold"),
        ({"a": [1]}, "a flat dict of names and tensors"),
    ],
)
def test_what_safetensors_cannot_hold_is_refused(
    tmp_path: Path, state: dict[str, Any], told: str
) -> None:
    with Checkpointer() as checkpointer, pytest.raises(UnsavableError, match=told):
        checkpointer.save(state, tmp_path / "x.safetensors")
    assert list(tmp_path.iterdir()) == []


def test_shared_memory_is_refused_by_safetensors(tmp_path: Path) -> None:
    base = torch.rand(8)
    with Checkpointer() as checkpointer, pytest.raises(SaveError, match="share memory"):
        checkpointer.save({"a": base, "b": base[2:5]}, tmp_path / "x.safetensors")
    with Checkpointer() as checkpointer:  # parts that do not overlap are two tensors
        checkpointer.save({"a": base[:4], "b": base[4:]}, tmp_path / "x.safetensors")
    found = load_file(tmp_path / "x.safetensors")
    assert torch.equal(torch.cat([found["a"], found["b"]]), base)
