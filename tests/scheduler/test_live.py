"""Block tables: what a row has been shown stays as it was."""

from torch_kda.scheduler.live import BlockTable


def test_block_table_views_do_not_change():
    """A row holds a view: growing or replacing never changes what it shows."""
    table = BlockTable([1, 2])
    views = [(table.ids, [1, 2])]
    expected = [1, 2]
    for block in range(3, 40):
        table.extend([block])
        expected.append(block)
        views.append((table.ids, list(expected)))
        if block % 10 == 0:
            table.replace({1: [100 + block], 2: [200 + block]})
            expected[1:3] = [100 + block, 200 + block]
            views.append((table.ids, list(expected)))
    assert all(view.tolist() == shown for view, shown in views)
    assert len(table) == 39 and BlockTable().ids.tolist() == []


def test_block_table_grows_in_place():
    """Mostly no copy: the views share memory."""
    table = BlockTable(range(100))
    table.extend([100])
    first = table.ids
    table.extend([101])
    assert first.base is table.ids.base
