import pytest
import torch

from ulysses_comm.simulate import simulate_all_to_all


def test_rows_go_where_the_counts_say():
    inputs = [torch.tensor([1, 2, 3]), torch.tensor([10, 20]), torch.tensor([100])]
    counts = [[1, 0, 2], [1, 1, 0], [0, 1, 0]]
    outputs = simulate_all_to_all(inputs, counts)
    assert [output.tolist() for output in outputs] == [[1, 10], [20, 100], [2, 3]]
    # New memory: what is sent is never what is received.
    assert not {t.data_ptr() for t in inputs} & {t.data_ptr() for t in outputs}


def test_the_transposed_counts_bring_everything_back():
    counts = [[1, 0, 2], [1, 1, 0], [0, 1, 0]]
    inputs = [torch.randn(sum(row), 2, 3) for row in counts]
    back = [list(column) for column in zip(*counts, strict=True)]
    again = simulate_all_to_all(simulate_all_to_all(inputs, counts), back)
    for tensor, original in zip(again, inputs, strict=True):
        assert torch.equal(tensor, original)


@pytest.mark.parametrize(
    ("counts", "text"),
    [
        ([[1, 1]], "must be 2 x 2"),
        ([[1, 1], [1]], "must be 2 x 2"),
        ([[1, 1], [1, 0]], r"rank 1 sends \[1, 0\] rows, which add up to 1, but its input has 2"),
        ([[3, -1], [1, 1]], r"rank 0 sends \[3, -1\]"),
    ],
)
def test_rejects_counts_that_do_not_fit(counts, text):
    with pytest.raises(ValueError, match=text):
        simulate_all_to_all([torch.ones(2), torch.ones(2)], counts)
