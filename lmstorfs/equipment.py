"""What a daemon works with, made from its configuration: tiers, catalog, its part in a mirror."""

import os
import socket
from pathlib import Path

from lmstorfs.catalog import SqliteCatalog
from lmstorfs.checkpoint.mirror.peer import Identity, PeerAddress
from lmstorfs.checkpoint.mirror.service import Replicas
from lmstorfs.checkpoint.mirror.source import ReplicaSource, take_catalog
from lmstorfs.config import PARTS, MountConfig, mount_name
from lmstorfs.errors import SetupError
from lmstorfs.tiers import Tier


def tiers_of(config: MountConfig) -> list[Tier]:
    """Return the tiers, fastest first."""
    budget = config.ram_bytes - config.replica_bytes
    tiers = [Tier("ram", config.state / PARTS["ram"], budget)]
    for number, ssd in enumerate(config.ssd):
        directory = Path(ssd.path) / f"lmstorfs-{mount_name(config.mountpoint)}"
        directory.mkdir(mode=0o700, exist_ok=True)
        tiers.append(Tier(f"ssd{number}", directory, ssd.budget_bytes))
    return tiers


def open_catalog(config: MountConfig) -> SqliteCatalog:
    """Open the catalog; with `recover_from` and none there yet, the dead node's one is taken.

    Raises `SetupError` where that cannot be had, or a catalog of another origin is in its place.
    """
    path = config.state / PARTS["catalog"]
    if config.recover_from is not None and not path.exists():
        who = _identity(config, config.recover_origin, 0)
        take_catalog(peer_address(config, config.recover_from), who, path)
    catalog = SqliteCatalog(path)
    if catalog.db.meta("origin") is None:
        catalog.db.set_meta("origin", os.urandom(16).hex())
        catalog.db.set_meta("epoch", "0")
    if config.recover_from is not None and catalog.db.meta("succeeded") is None:
        catalog.close()
        raise SetupError(
            f"--recover-from needs an empty state directory, and {config.state} has a catalog of "
            "its own; give another --state, or leave --recover-from out"
        )
    return catalog


def identity(config: MountConfig, catalog: SqliteCatalog) -> Identity:
    """Return who this node is to a mirror."""
    return _identity(config, catalog.db.meta("origin") or "", int(catalog.db.meta("epoch") or 0))


def _identity(config: MountConfig, origin: str, epoch: int) -> Identity:
    return Identity(
        origin=origin,
        epoch=epoch,
        mountpoint=config.mountpoint,
        store=config.store.url,
        label=socket.gethostname(),
        keep=config.keep_replicas,
    )


def peer_address(config: MountConfig, address: str) -> PeerAddress:
    """Return where a mirror is, with what proves that we belong together."""
    return PeerAddress(address=address, secret_file=config.secret_file)


def replica_source(config: MountConfig, catalog: SqliteCatalog) -> ReplicaSource | None:
    """Return the mirror that holds replicas of this node's, or its predecessor's, files."""
    address = config.recover_from or config.mirror
    if address is None:
        return None
    return ReplicaSource(peer_address(config, address), identity(config, catalog))


def replicas_kept(config: MountConfig) -> Replicas | None:
    """Return what keeps replicas for other nodes, where this one is to. Raises `SetupError`."""
    if config.listen is None:
        return None
    directory = config.state / PARTS["ram"] / PARTS["replicas"]
    return Replicas(config.listen, config.secret_file, directory, config.replica_bytes)
