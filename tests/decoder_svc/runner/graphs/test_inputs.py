"""Memory of graphs: named parts of one buffer, and block tables that stay from step to step."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from decoder_svc.runner.graphs.inputs import BlockTable, InputBuffer, PoolShape
from decoder_svc.runner.host_transfer import HostTransfer

TRANSFER = HostTransfer(torch.device("cpu"))
POOL = PoolShape(max_blocks=6, unread_block=99)


def test_parts_get_their_numbers_in_one_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = InputBuffer(
        {"flags": (torch.bool, (3,)), "ids": (torch.int64, (2, 2)), "few": (torch.int32, (1,))}, TRANSFER
    )
    addresses = {name: part.data_ptr() for name, part in buffer.parts.items()}
    copies: list[Tensor] = []
    copy = TRANSFER.copy

    def noted(staged: Tensor, target: Tensor) -> None:
        copies.append(target)
        copy(staged, target)

    monkeypatch.setattr(TRANSFER, "copy", noted)
    with buffer.staged() as staged:
        staged["flags"][:], staged["ids"][:], staged["few"][:] = (True, False, True), ((1, 2), (3, 4)), 5
    assert len(copies) == 1
    assert {name: part.tolist() for name, part in buffer.parts.items()} == {
        "flags": [True, False, True], "ids": [[1, 2], [3, 4]], "few": [5],
    }  # fmt: skip
    assert {name: part.data_ptr() for name, part in buffer.parts.items()} == addresses
    assert all(address % 16 == addresses["flags"] % 16 for address in addresses.values())


def staged_entries(table: BlockTable, rows: list[list[int]], num_changes: int) -> torch.Tensor:
    places, blocks = np.full(num_changes, -1, dtype=np.int64), np.full(num_changes, -1, dtype=np.int32)
    table.stage(tuple(np.array(row) for row in rows), len(rows), places, blocks)
    table.recorded_changes(torch.from_numpy(places), torch.from_numpy(blocks)).apply()
    return table.entries


@pytest.mark.parametrize("num_changes", [2, 50])
def test_a_table_has_the_steps_entries_whether_few_or_all_of_them_are_copied(num_changes: int) -> None:
    table = BlockTable(4, POOL, TRANSFER)
    for rows in ([[1, 2, 3]], [[1, 2, 3, 4], [5]], [[7] * 6, [8] * 6, [9]], [[7] * 6]):
        entries = staged_entries(table, rows, num_changes)
        for found, wanted in zip(entries.tolist(), rows, strict=False):
            assert found[: len(wanted)] == wanted
        assert set(entries[3].tolist()) == {POOL.unread_block}, "a row of no sequence"


def test_a_sequence_with_more_blocks_than_a_row_is_refused() -> None:
    with pytest.raises(ValueError, match="7 blocks"):
        staged_entries(BlockTable(1, POOL, TRANSFER), [[1] * 7], 9)
