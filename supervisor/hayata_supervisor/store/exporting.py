"""All that a store has of one invocation, read from a file that nobody has open."""

from __future__ import annotations

from pathlib import Path

import lmdb

from hayata.errors import CallerError, Unavailable
from hayata_supervisor.store import layout, opening
from hayata_supervisor.store.directory import DATA, STORE
from hayata_supervisor.store.interface import Loaded
from hayata_supervisor.store.layout import NAME
from hayata_supervisor.store.reading import Reader


def read_invocation(data_dir: Path, name: str) -> tuple[Loaded, list[tuple[int, bytes]]]:
    """Read one invocation, and its whole journal. The file stays as it is.

    Raises:
        CallerError: ``unknown_invocation``.
        Unavailable: ``store_corrupt``.
    """
    path = data_dir / STORE / DATA
    opening.check_file(path)
    try:
        env = opening.open_to_read(path)
        try:
            with env.begin() as txn:
                tables = {each: env.open_db(each.encode(), txn=txn, create=False) for each in layout.TABLES}
                reader = Reader(txn, tables)
                header = reader.holder(NAME, name.encode())
                if header is None:
                    raise CallerError("unknown_invocation", f"there is no invocation {name!r} in {data_dir}")
                return reader.load(header), reader.records(header.id, 1)
        finally:
            env.close()
    except lmdb.Error as problem:
        raise Unavailable(
            "store_corrupt", f"the store in {data_dir} can't be read: {problem}", hint="hayata verify --data-dir"
        ) from problem
