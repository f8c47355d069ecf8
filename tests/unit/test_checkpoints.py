"""Which checkpoint a file belongs to, by the names that trainers give."""

import stat
from pathlib import Path

import pytest

from lmstorfs.catalog import ROOT_INO, SqliteCatalog
from lmstorfs.checkpoint import checkpoint_of
from lmstorfs.checkpoint.checkpoints import Checkpoint, group
from lmstorfs.store import Kind, ObjectInfo


@pytest.mark.parametrize(
    ("path", "checkpoint"),
    [
        # TorchTitan, torch.distributed.checkpoint
        ("step_10/__0_0.distcp", "step_10"),
        ("step_10/.metadata", "step_10"),
        ("outputs/checkpoint/step-1000/__3_1.distcp", "outputs/checkpoint/step-1000"),
        ("dcp/__0_0.distcp", "dcp"),
        # transformers' Trainer
        ("checkpoint-500/model-00001-of-00002.safetensors", "checkpoint-500"),
        ("out/checkpoint-500/rng_state_0.pth", "out/checkpoint-500"),
        ("out/checkpoint-500/global_step500/mp_rank_00_model_states.pt", "out/checkpoint-500"),
        # DeepSpeed, Megatron
        ("global_step100/mp_rank_00_model_states.pt", "global_step100"),
        (
            "global_step100/bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt",
            "global_step100",
        ),
        ("iter_0000100/mp_rank_00/model_optim_rng.pt", "iter_0000100"),
        ("iter_0000100/mp_rank_00_000/model_optim_rng.pt", "iter_0000100"),
        # Lightning
        ("epoch=3-step=30.ckpt", "epoch=3-step=30.ckpt"),
        (
            "lightning_logs/version_0/checkpoints/epoch=3-step=30.ckpt",
            "lightning_logs/version_0/checkpoints/epoch=3-step=30.ckpt",
        ),
        # a model's files in a directory, or a file by itself
        ("model/model-00001-of-00002.safetensors", "model"),
        ("llama/config.json", "llama"),
        ("model.pt", "model.pt"),
        ("model_10.pt", "model_10.pt"),
        ("run/model_10.pt", "run/model_10.pt"),
        # runs and models with numbers in their names above the step
        ("run-2024/step_10/x", "run-2024/step_10"),
        ("llama-3-8b/run1/checkpoint-500/optimizer.pt", "llama-3-8b/run1/checkpoint-500"),
        (
            "2024-12-02/14-30-00/checkpoints/step_7/model.pt",
            "2024-12-02/14-30-00/checkpoints/step_7",
        ),
        ("exp1/step_10/rank0/shard.bin", "exp1/step_10"),
        ("exp1/step_10/model_7.bin", "exp1/step_10"),
        ("llama-3-8b/model-00001-of-00004.safetensors", "llama-3-8b"),
        ("llama-3-8b/tokenizer.json", "llama-3-8b"),
        ("exp1/100/model.pt", "exp1/100"),
        ("exp1/ckpt_100.pt", "exp1/ckpt_100.pt"),
        # while it is being saved
        ("tmp-checkpoint-500/model.safetensors", "tmp-checkpoint-500"),
        ("step_10.tmp/model.pt", "step_10.tmp"),
    ],
)
def test_a_file_belongs_to_the_checkpoint_that_a_person_would_name(
    path: str, checkpoint: str
) -> None:
    assert checkpoint_of(path) == checkpoint


@pytest.fixture
def catalog(tmp_path: Path) -> SqliteCatalog:
    return SqliteCatalog(tmp_path / "catalog.db")


def add(
    catalog: SqliteCatalog, folder: str, name: str, *, digest: bool = True, stored: bool = False
) -> int:
    inode = catalog.resolve(folder) or catalog.create(
        ROOT_INO, folder.encode(), mode=stat.S_IFDIR | 0o755, uid=0, gid=0
    )
    file = catalog.create(
        inode.ino, name.encode(), mode=stat.S_IFREG | 0o644, uid=0, gid=0, writing=True, tier="ram"
    )
    version = catalog.contents.close_version(file.ino, 10, 1, writing=False)
    if digest:
        catalog.contents.set_digest(file.ino, version, "d")
    if stored:
        key = f"{folder}/{name}"
        info = ObjectInfo(key=key, kind=Kind.FILE, size=10, etag="e", mtime_ns=1)
        catalog.contents.stored(file.ino, version, key, info, attributes_changed=False)
        catalog.contents.set_digest(file.ino, version, "d")
    return file.ino


def grouped(catalog: SqliteCatalog, opened: frozenset[int] = frozenset()) -> list[Checkpoint]:
    return group(catalog.contents.recent(100), catalog.path, opened.__contains__, 10)


def test_a_checkpoint_is_complete_when_every_file_is_closed_and_has_a_digest(
    catalog: SqliteCatalog,
) -> None:
    first = add(catalog, "step_1", "a")
    second = add(catalog, "step_1", "b", digest=False)
    assert [(c.path, c.files, c.complete) for c in grouped(catalog)] == [("step_1", 2, False)]
    catalog.contents.set_digest(second, catalog.get(second).version, "d")
    assert grouped(catalog)[0].complete
    assert not grouped(catalog, frozenset({first}))[0].complete


def test_a_copy_counts_when_it_has_every_file(catalog: SqliteCatalog) -> None:
    add(catalog, "step_1", "a", stored=True)
    add(catalog, "step_1", "b")
    add(catalog, "step_2", "a", stored=True)
    newest, oldest = grouped(catalog)
    assert (newest.path, newest.copies.store, newest.word) == ("step_2", True, "stored")
    assert (oldest.path, oldest.copies.store, oldest.word) == ("step_1", False, "written")
    assert oldest.copies.ram


def test_a_temporary_name_is_never_complete(catalog: SqliteCatalog) -> None:
    add(catalog, "step_1.tmp", "a", stored=True)
    assert not grouped(catalog)[0].complete
