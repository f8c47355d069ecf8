"""`lmstorfs.torch.load` gives what torch and safetensors give."""

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

import lmstorfs.torch
from lmstorfs.errors import LoadError
from tests.torch.test_formats import everything, names, same, states, tensors

MIB = 1 << 20


def test_it_gives_what_torch_load_gives(tmp_path: Path) -> None:
    state = everything()
    torch.save(state, tmp_path / "a.pt")
    found = lmstorfs.torch.load(tmp_path / "a.pt")
    assert [name for name in state if not same(state[name], found[name])] == []
    found["base"][3] = -1.0
    assert found["view"][0, 0] == -1.0


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(state=st.dictionaries(names, states, max_size=6))
def test_any_state_is_loaded(tmp_path: Path, state: dict[str, Any]) -> None:
    torch.save(state, tmp_path / "a.pt")
    assert same(state, lmstorfs.torch.load(tmp_path / "a.pt"))


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(state=st.dictionaries(names, tensors, max_size=6))
def test_safetensors_are_loaded(tmp_path: Path, state: dict[str, torch.Tensor]) -> None:
    kept = {
        name: tensor for name, tensor in state.items()
        if not tensor.is_complex() and name != "__metadata__"
    }  # fmt: skip
    save_file(kept, tmp_path / "a.safetensors")
    found = lmstorfs.torch.load(tmp_path / "a.safetensors")
    assert sorted(found) == sorted(kept)
    assert all(same(kept[name], found[name]) for name in kept)


def test_a_large_tensor_comes_in_slices_into_the_given_one(tmp_path: Path) -> None:
    state = {"big": torch.rand(12 * MIB), "step": 9, "list": [torch.rand(3).t(), "x"]}
    torch.save(state, tmp_path / "a.pt")
    target = torch.zeros(12 * MIB)
    into = {"list": [torch.zeros(3), "y"], "big": target, "step": 0}
    assert lmstorfs.torch.load(tmp_path / "a.pt", into) is into
    assert into["big"] is target
    assert torch.equal(target, state["big"])
    assert torch.equal(into["list"][0], state["list"][0])
    assert (into["step"], into["list"][1]) == (9, "x")


def test_a_module_and_its_optimizer_are_filled(tmp_path: Path) -> None:
    source, target = torch.nn.Linear(300, 300), torch.nn.Linear(300, 300)
    torch.save(source.state_dict(), tmp_path / "a.pt")
    lmstorfs.torch.load(tmp_path / "a.pt", target.state_dict())
    assert torch.equal(source.weight, target.weight)
    assert torch.equal(source.bias, target.bias)


def test_layouts_that_differ_are_no_obstacle(tmp_path: Path) -> None:
    state = {"a": torch.rand(3, 4).t(), "b": torch.rand(4, 3)}
    torch.save(state, tmp_path / "a.pt")
    into = {"a": torch.zeros(4, 3), "b": torch.zeros(3, 4).t()}
    lmstorfs.torch.load(tmp_path / "a.pt", into)
    assert torch.equal(into["a"], state["a"])
    assert torch.equal(into["b"], state["b"])


@pytest.mark.parametrize(
    ("into", "told"),
    [
        ({"a": torch.zeros(2)}, r"a: the file has \(3,\) of float32, what is given is \(2,\)"),
        ({"a": torch.zeros(3, dtype=torch.int32)}, "what is given is .* of int32"),
        ({"a": 1}, "what is given is no tensor"),
        ({"b": torch.zeros(3)}, "the state: not the same names: a, b"),
        ([], "the state: not the same names: a"),
    ],
)
def test_what_does_not_fit_is_told(tmp_path: Path, into: Any, told: str) -> None:
    torch.save({"a": torch.rand(3)}, tmp_path / "a.pt")
    with pytest.raises(LoadError, match=told):
        lmstorfs.torch.load(tmp_path / "a.pt", into)
