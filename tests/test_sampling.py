"""Noise against published vectors, picks against exact distributions, and the law: a row does not see its batch."""

import dataclasses
import math
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from scipy import stats

from paceline import sampling
from paceline.ops.sample import gumbel, gumbel_of_vocabulary
from paceline.ops.sample.ref import gumbel_from_bits, philox, prefix_sums, scaled, tree_sum
from paceline.ops.topk import argmax
from paceline.sampling import SamplingRows, pick, pick_candidates

DRAWS = 20_000


@pytest.fixture
def any_threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def same_rows(
    count: int, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0, first_seed: int = 0
) -> SamplingRows:
    """Rows that differ in the seed only."""
    return SamplingRows.from_lists(
        [temperature] * count,
        [top_k] * count,
        [top_p] * count,
        [min_p] * count,
        range(first_seed, first_seed + count),
        [0] * count,
        [17] * count,
    )


# ---- noise


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((2**32 - 1,) * 4, (2**32 - 1,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_equals_the_known_answers_of_random123(
    counter: tuple[int, int, int, int], key: tuple[int, int], expected: tuple[int, int, int, int]
) -> None:
    c0, c1, c2, c3 = (torch.tensor(word) for word in counter)
    words = philox((c0, c1, c2, c3), (torch.tensor(key[0]), torch.tensor(key[1])))
    assert tuple(int(word) for word in words) == expected


def test_noise_is_finite_for_extreme_bits() -> None:
    bits = torch.tensor([0, 1, 2**24 - 1, 2**24, 2**31, 2**32 - 257, 2**32 - 128, 2**32 - 2, 2**32 - 1])
    noise = gumbel_from_bits(bits)
    assert noise.isfinite().all()
    assert noise[0] == pytest.approx(33 * math.log(2), rel=1e-6)  # v = 2**-33
    assert noise[-1] == pytest.approx(-math.log(24 * math.log(2)), rel=1e-6)  # v = 1 - 2**-24
    assert (noise[1:] <= noise[:-1]).all()


def test_noise_is_standard_gumbel() -> None:
    rows = same_rows(200)
    noise = gumbel_of_vocabulary(rows.seed, rows.choice, rows.position, 500).flatten().numpy()
    assert stats.kstest(noise, "gumbel_r").pvalue > 1e-4


def test_noise_is_keyed_by_the_token_id() -> None:
    rows = same_rows(3, first_seed=2**64 - 2)  # both key words change on the way to 0
    whole = gumbel_of_vocabulary(rows.seed, rows.choice, rows.position, 1001)
    ids = torch.stack([torch.randperm(1001)[:37] for _ in range(3)])
    assert torch.equal(gumbel(rows.seed, rows.choice, rows.position, ids), whole.gather(1, ids))
    assert torch.equal(gumbel(rows.seed, rows.choice, rows.position, ids[0]), whole[:, ids[0]])
    assert torch.equal(gumbel_of_vocabulary(rows.seed, rows.choice, rows.position, 130), whole[:, :130])


def test_the_layout_of_counter_and_key() -> None:
    rows = SamplingRows.from_lists([1.0], [0], [1.0], [0.0], [0x0123456789ABCDEF], [3], [70_000])
    counter = (torch.tensor(30), torch.tensor(70_000), torch.tensor(3), torch.tensor(0))
    words = philox(counter, (torch.tensor(0x89ABCDEF), torch.tensor(0x01234567)))
    noise = gumbel(rows.seed, rows.choice, rows.position, torch.tensor([120, 121, 122, 123]))
    assert torch.equal(noise[0], gumbel_from_bits(torch.stack(words)))


def test_seeds_are_taken_modulo_two_to_the_64() -> None:
    seeds = [0, 2**64, -1, 2**64 - 1, 2**63, -(2**63)]
    count = len(seeds)
    rows = SamplingRows.from_lists([1.0] * count, [0] * count, [1.0] * count, [0.0] * count, seeds, [0] * count, [5] * count)
    assert rows.seed.tolist() == [0, 0, -1, -1, -(2**63), -(2**63)]
    noise = gumbel_of_vocabulary(rows.seed, rows.choice, rows.position, 50)
    assert torch.equal(noise[0], noise[1]) and torch.equal(noise[2], noise[3]) and torch.equal(noise[4], noise[5])
    assert len({tuple(row) for row in noise.tolist()}) == 3


# ---- distribution


def exact(logits: list[float], temperature: float, top_k: int, top_p: float, min_p: float) -> np.ndarray:
    """Probabilities by the definition, in float64."""
    weights = np.exp((np.array(logits) - max(logits)) / temperature)
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    if top_k > 0:
        order = order[:top_k]
    total, before = sum(weights[i] for i in order), 0.0
    kept: list[int] = []
    for i in order:
        if before < top_p * total or not kept:
            kept.append(i)
        before += weights[i]
    kept = [i for i in kept if weights[i] >= min_p * weights[kept[0]]]
    probabilities = np.zeros(len(logits))
    probabilities[kept] = weights[kept] / weights[kept].sum()
    return probabilities


def assert_drawn_from(picks: torch.Tensor, probabilities: np.ndarray) -> None:
    counts = np.bincount(picks.numpy(), minlength=len(probabilities))
    assert counts[probabilities == 0].sum() == 0
    expected = probabilities * counts.sum()
    common = expected >= 5
    observed, wanted = [*counts[common], counts[~common].sum()], [*expected[common], expected[~common].sum()]
    if wanted[-1] < 5:  # too few to count on their own
        rest, rest_wanted = observed.pop(), wanted.pop()
        observed[-1] += rest
        wanted[-1] += rest_wanted
    assert len(wanted) == 1 or stats.chisquare(observed, wanted).pvalue > 1e-4


FILTERS = [
    (1.0, 0, 1.0, 0.0),
    (0.6, 0, 1.0, 0.0),
    (1.7, 0, 1.0, 0.0),
    (1.0, 7, 1.0, 0.0),
    (1.0, 0, 0.8, 0.0),
    (1.0, 0, 1.0, 0.05),
    (1.3, 12, 0.7, 0.0),
    (1.3, 12, 1.0, 0.2),
    (1.3, 0, 0.9, 0.1),
    (0.7, 20, 0.95, 0.02),
    (1.0, 1, 1.0, 0.0),
    (1.0, 0, 1e-6, 0.0),
    (1.0, 0, 1.0, 1.0),
    (100.0, 0, 1.0, 0.0),
    (1.0, 500, 0.9, 0.0),
]


@pytest.mark.parametrize("filters", FILTERS)
def test_picks_follow_the_exact_distribution(filters: tuple[float, int, float, float]) -> None:
    logits = torch.randn(50, generator=torch.Generator().manual_seed(1)).mul(2)
    logits[[3, 30, 31]] = logits.max()  # ties that the filters cut through
    logits[[10, 40]] = -torch.inf
    picks = pick(logits.expand(DRAWS, 50), same_rows(DRAWS, *filters))
    assert_drawn_from(picks, exact(logits.tolist(), *filters))


@pytest.mark.parametrize("filters", [(1.0, 0, 0.6, 0.0), (1.1, 0, 1.0, 0.001), (0.8, 100, 0.97, 0.01)])
def test_picks_follow_the_exact_distribution_over_a_larger_vocabulary(
    filters: tuple[float, int, float, float],
) -> None:
    logits = torch.randn(3001, generator=torch.Generator().manual_seed(2)).mul(2.5)
    picks = torch.cat([pick(logits.expand(2000, 3001), same_rows(2000, *filters, seed)) for seed in range(0, DRAWS, 2000)])
    assert_drawn_from(picks, exact(logits.tolist(), *filters))


def test_positions_and_choices_draw_independently() -> None:
    logits = torch.randn(50, generator=torch.Generator().manual_seed(3))
    rows = same_rows(1).select([0] * DRAWS)
    expected = exact(logits.tolist(), 1.0, 0, 1.0, 0.0)
    assert_drawn_from(pick(logits.expand(DRAWS, 50), rows.at(torch.arange(DRAWS))), expected)
    assert_drawn_from(pick(logits.expand(DRAWS, 50), dataclasses.replace(rows, choice=torch.arange(DRAWS))), expected)
    # Two equally likely tokens at positions p and p + 1: four pairs, equally often.
    coin = pick(torch.zeros(DRAWS, 2), rows.at(torch.arange(DRAWS)))
    assert_drawn_from(coin[::2] * 2 + coin[1::2], np.full(4, 0.25))


# ---- edges


def test_temperature_towards_zero_equals_greedy() -> None:
    logits = torch.randn(40, 300, generator=torch.Generator().manual_seed(4))
    logits[:, 7] = logits[:, 200] = 9.0  # greedy takes the lower id
    greedy = pick(logits, same_rows(40, temperature=0.0, top_k=5, top_p=0.5, min_p=0.5))
    assert torch.equal(greedy, argmax(logits)) and greedy.tolist() == [7] * 40
    logits[:, 200] -= 0.01
    for temperature in (1e-6, 1e-37, 1e-42, 1e-300):
        for filters in ((0, 1.0, 0.0), (9, 1.0, 0.0), (0, 0.9, 0.0), (0, 1.0, 0.1)):
            assert torch.equal(pick(logits, same_rows(40, temperature, *filters)), greedy)


@pytest.mark.parametrize("temperature", [0.0, 1e-6, 1.0, 100.0])
@pytest.mark.parametrize("filters", [(0, 1.0, 0.0), (5, 1.0, 0.0), (0, 0.9, 0.0), (0, 1.0, 0.1), (5, 0.9, 0.1)])
def test_extreme_logits(temperature: float, filters: tuple[int, float, float]) -> None:
    logits = torch.full((7, 200), -1e4)
    logits[0, 50] = 1e4
    logits[1] = -torch.inf
    logits[1, 60] = -1e4
    logits[2] = torch.nan
    logits[2, 70] = -3e38
    logits[3, 80] = torch.inf
    logits[4] = -torch.inf  # nothing to choose from
    logits[5, :] = -3.4e38
    logits[5, 90] = 3.4e38
    logits[6, :] = torch.nan
    picks = pick(logits, same_rows(7, temperature, *filters))
    assert picks.tolist() == [50, 60, 70, 80, 0, 90, 0]


def test_a_tie_at_the_cut_keeps_the_lower_id() -> None:
    logits = torch.zeros(500, 100)
    assert set(pick(logits, same_rows(500, top_k=3)).tolist()) == {0, 1, 2}
    assert set(pick(logits, same_rows(500, top_p=0.045)).tolist()) == {0, 1, 2, 3, 4}


def test_the_width_that_is_looked_at_first_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.randn(60, 3001, generator=torch.Generator().manual_seed(5)) * torch.linspace(0.1, 8, 60)[:, None]
    weights = tree_sum(logits.softmax(dim=1))
    assert weights.allclose(torch.ones(60))
    rows = SamplingRows.from_lists(
        [1.0] * 60, [0, 0, 40] * 20, [0.5, 0.95, 0.99] * 20, [0.0] * 60, range(60), [0] * 60, range(60)
    )
    monkeypatch.setattr(sampling, "_FIRST_WIDTH", 3001)
    expected = pick(logits, rows)
    for width, widening in ((2, 2), (64, 16), (255, 3)):
        monkeypatch.setattr(sampling, "_FIRST_WIDTH", width)
        monkeypatch.setattr(sampling, "_WIDENING", widening)
        assert torch.equal(pick(logits, rows), expected)


def test_a_prefix_sum_does_not_depend_on_what_follows() -> None:
    x = torch.rand(5, 777, generator=torch.Generator().manual_seed(6))
    sums = prefix_sums(x)
    assert sums.allclose(x.double().cumsum(dim=1).float())
    for width in (1, 2, 63, 64, 65, 500):
        assert torch.equal(prefix_sums(x[:, :width]), sums[:, :width])


# ---- the drafter's draw


def test_candidates_are_drawn_with_the_target_s_noise() -> None:
    logits = torch.randn(50, 300, generator=torch.Generator().manual_seed(7))
    rows = SamplingRows.from_lists(
        [0.0, 0.7, 1.0, 1e-6, 30.0] * 10, [0] * 50, [1.0] * 50, [0.0] * 50, range(50), [0] * 50, range(50)
    )
    ids = torch.stack([torch.randperm(300) for _ in range(50)])
    index = pick_candidates(logits.gather(1, ids), ids, rows)
    assert torch.equal(ids.gather(1, index[:, None])[:, 0], pick(logits, rows))


def test_a_tie_of_candidates_goes_to_the_lower_id() -> None:
    ids = torch.tensor([[9, 4, 7], [1, 2, 3]])
    scores = torch.tensor([[2.0, 2.0, 2.0], [0.0, 5.0, 5.0]])
    assert pick_candidates(scores, ids, same_rows(2, temperature=0.0)).tolist() == [1, 1]


# ---- the law


def test_a_row_does_not_depend_on_its_batch(any_threads: None) -> None:
    vocab = 701
    generator = torch.Generator().manual_seed(8)
    logits = torch.randn(70, vocab, generator=generator).mul(2)
    rows = SamplingRows.from_lists(
        ([0.0, 1.0, 0.7, 1.3, 1.0, 0.9, 2.0] * 10),
        ([0, 0, 20, 0, 0, 50, -1] * 10),
        ([1.0, 1.0, 0.95, 0.9, 1.0, 1.0, 0.99] * 10),
        ([0.0, 0.0, 0.0, 0.0, 0.05, 0.1, 0.01] * 10),
        range(70),
        [i % 3 for i in range(70)],
        range(100, 170),
    )
    ids = torch.randint(vocab, (70, 16), generator=generator)
    spread = torch.zeros(70, 2 * vocab)
    spread[:, ::2] = logits

    def everything(logits: torch.Tensor, rows: SamplingRows, ids: torch.Tensor) -> list[torch.Tensor]:
        weighed = scaled(logits, rows.temperature[:, None].clamp(min=0.5))
        return [
            pick(logits, rows),
            pick_candidates(logits[:, :16], ids, rows),
            gumbel_of_vocabulary(rows.seed, rows.choice, rows.position, vocab),
            gumbel(rows.seed, rows.choice, rows.position, ids),
            weighed,
            weighed.exp(),
            tree_sum(weighed.exp()),
            prefix_sums(weighed.exp()),
        ]

    alone = [everything(logits[i : i + 1], rows.select([i]), ids[i : i + 1]) for i in range(70)]
    expected = [torch.cat(parts) for parts in zip(*alone, strict=True)]
    some = (1, 5, 34, 70)
    for threads, counts in ((1, range(1, 71)), (2, some), (3, some), (4, some)):
        torch.set_num_threads(threads)
        for count in counts:
            order = torch.randperm(70, generator=generator)[:count]
            head = torch.arange(count)
            for index, batch in ((order, logits[order]), (head, spread[:count, ::2])):
                got = everything(batch, rows.select(index.tolist()), ids[index])
                assert all(torch.equal(a, b[index]) for a, b in zip(got, expected, strict=True))
