"""The kernels of sampling: noise, draws and cuts against the reference, in distribution, and row by row."""

from __future__ import annotations

import pytest
import torch
from scipy import stats

from paceline.ops.sample import draw_candidates, gumbel, gumbel_of_vocabulary, last_kept, ref
from paceline.ops.topk.ref import order_keys
from paceline.sampling import SamplingRows, pick

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


def mixed_rows(count: int, device: str = "cuda") -> SamplingRows:
    return SamplingRows.from_lists(
        [(0.0, 1.0, 0.7, 1.3, 2.0)[i % 5] for i in range(count)],
        [(0, 20, 0, 100, 1, 0, 5000)[i % 7] for i in range(count)],
        [(1.0, 0.9, 0.3, 1.0)[i % 4] for i in range(count)],
        [(0.0, 0.02, 0.0)[i % 3] for i in range(count)],
        [i * 0x9E3779B97F4A7C15 for i in range(count)],
        [i % 3 for i in range(count)],
        range(50, 50 + count),
        device,
    )


def test_noise_is_the_reference_s() -> None:
    rows, ids = mixed_rows(33), torch.randint(248_320, (33, 100))
    cpu = mixed_rows(33, "cpu")
    # a rounding or two of values up to 23; another word of Philox would be off by about 1
    whole = gumbel_of_vocabulary(rows.seed, rows.choice, rows.position, 5001)
    expected = ref.gumbel_of_vocabulary(cpu.seed, cpu.choice, cpu.position, 5001)
    torch.testing.assert_close(whole.cpu(), expected, rtol=1e-6, atol=1e-6)
    some = gumbel(rows.seed, rows.choice, rows.position, ids.cuda())
    torch.testing.assert_close(some.cpu(), ref.gumbel(cpu.seed, cpu.choice, cpu.position, ids), rtol=1e-6, atol=1e-6)
    assert torch.equal(gumbel(rows.seed, rows.choice, rows.position, torch.arange(5001, device="cuda")), whole)


@pytest.mark.parametrize("vocab", [701, 20_001])
def test_picks_equal_the_reference_except_at_near_ties(vocab: int) -> None:
    logits = torch.randn(210, vocab, generator=torch.Generator().manual_seed(vocab)) * 2
    logits[::3] = logits[::3].round()
    picks, expected = pick(logits.cuda(), mixed_rows(210)).cpu(), pick(logits, mixed_rows(210, "cpu"))
    # Scores within about 1e-6 of each other, or ids within a rounding of a filter's edge: 1 row in thousands.
    assert (picks != expected).sum() <= 1


def test_cuts_keep_what_the_reference_keeps() -> None:
    rows, cpu = mixed_rows(140), mixed_rows(140, "cpu")
    logits = torch.randn(140, 20_001, generator=torch.Generator().manual_seed(1)) * 1.5
    logits[7], logits[14:21] = 0.0, logits[14:21].round()
    cut = last_kept(logits.cuda(), rows.temperature, rows.top_k, rows.top_p, rows.limits).cpu()
    expected = ref.last_kept(logits, cpu.temperature, cpu.top_k, cpu.top_p, cpu.limits)
    keys = order_keys(logits, torch.arange(20_001))
    kept, wanted = ((keys >= c[:, None]).sum(dim=1) for c in (cut, expected))
    # Sums are in another order: 20,000 weights give relative differences of about 1e-6, a few ids in the widest nucleus.
    assert ((kept - wanted).abs() <= 1 + wanted * 1e-4).all()
    by_rank = (cpu.top_p == 1) | (cpu.temperature == 0)
    assert torch.equal(kept[by_rank], wanted[by_rank])


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "min_p"),
    [
        (1.0, 0, 1.0, 0.0),
        (0.6, 0, 1.0, 0.05),
        (1.0, 7, 1.0, 0.0),
        (1.3, 0, 0.9, 0.0),
        (1.3, 70, 0.9, 0.0),
        (0.7, 20, 0.95, 0.0),
    ],
)
def test_picks_follow_the_exact_distribution(temperature: float, top_k: int, top_p: float, min_p: float) -> None:
    draws, vocab = 20_000, 701
    logits = torch.randn(vocab, generator=torch.Generator().manual_seed(2))
    rows = SamplingRows.from_lists(
        [temperature] * draws,
        [top_k] * draws,
        [top_p] * draws,
        [min_p] * draws,
        range(draws),
        [0] * draws,
        [17] * draws,
        "cuda",
    )
    observed = pick(logits.cuda().expand(draws, vocab), rows).cpu().bincount(minlength=vocab).double()
    weights = ((logits.double() - logits.max()) / temperature).exp()
    ordered, order = weights.sort(descending=True)
    ordered[top_k or vocab :] = 0
    ordered[ordered.cumsum(0) - ordered >= top_p * ordered.sum()] = 0
    ordered[ordered < min_p] = 0
    expected = torch.zeros(vocab, dtype=torch.float64).scatter(0, order, ordered / ordered.sum() * draws)
    assert observed[expected == 0].sum() == 0
    common = expected >= 5
    f_observed, f_expected = observed[common], expected[common]
    f_expected = f_expected * f_observed.sum() / f_expected.sum()
    assert stats.chisquare(f_observed.numpy(), f_expected.numpy()).pvalue > 1e-4


def test_extreme_logits() -> None:
    logits = torch.full((7, 20_001), -1e4)
    logits[0, 50] = 1e4
    logits[1] = -torch.inf
    logits[1, 60] = -1e4
    logits[2] = torch.nan
    logits[2, 70] = -3e38
    logits[3, 80] = torch.inf
    logits[4] = -torch.inf
    logits[5, :] = -3.4e38
    logits[5, 19_990] = 3.4e38
    logits[6, :] = torch.nan
    for temperature in (0.0, 1e-37, 1e-6, 1.0, 100.0):
        for top_k, top_p, min_p in (
            (0, 1.0, 0.0),
            (5, 1.0, 0.0),
            (100, 0.9, 0.0),
            (0, 0.9, 0.0),
            (0, 1.0, 0.1),
            (5, 0.9, 0.1),
        ):
            rows = SamplingRows.from_lists(
                [temperature] * 7, [top_k] * 7, [top_p] * 7, [min_p] * 7, range(7), [0] * 7, [17] * 7, "cuda"
            )
            assert pick(logits.cuda(), rows).tolist() == [50, 60, 70, 80, 0, 19_990, 0], (temperature, top_k, top_p, min_p)


@pytest.mark.parametrize("vocab", [701, 20_001])
def test_a_row_does_not_depend_on_its_batch(vocab: int) -> None:
    logits, rows = torch.randn(70, vocab, device="cuda") * 2, mixed_rows(70)
    ids = torch.stack([torch.randperm(vocab, device="cuda")[:16] for _ in range(70)])
    scores = logits.gather(1, ids)

    def everything(index: list[int]) -> list[torch.Tensor]:
        r = rows.select(index)
        key = (r.seed, r.choice, r.position)
        return [
            pick(logits[index], r),
            draw_candidates(scores[index], ids[index], r.temperature, *key),
            gumbel(*key, ids[index]),
            gumbel_of_vocabulary(*key, vocab),
            last_kept(logits[index], r.temperature, r.top_k, r.top_p, r.limits),
        ]

    alone = [torch.cat(parts) for parts in zip(*(everything([i]) for i in range(70)), strict=True)]
    for count in (*range(1, 70, 3), 70):
        order = torch.randperm(70)[:count].tolist()
        for got, expected in zip(everything(order), alone, strict=True):
            assert torch.equal(got, expected[order])


def test_rows_of_nobody_and_a_captured_pick() -> None:
    """Rows that fill a batch up may hold anything; a pick is captured once and runs with other contents."""
    logits, rows = torch.randn(21, 20_001, device="cuda") * 2, mixed_rows(21)
    given = (rows.temperature, rows.top_k, rows.top_p, rows.min_p, rows.seed, rows.choice, rows.position)
    pick(logits, rows)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        picks = pick(logits, rows)
    for turn in range(3):
        logits.copy_(torch.randn(21, 20_001, device="cuda") * 2)
        rows.position.add_(turn)
        expected = pick(logits, rows).clone()
        graph.replay()
        assert torch.equal(picks, expected)
    logits[14:] = torch.nan
    logits[17:19] = torch.inf
    for x in given:
        x[14:] = torch.nan if x.is_floating_point() else -(2**60)
    rows.temperature[18:] = 1.0
    graph.replay()
    assert torch.equal(picks[:14], expected[:14])
    assert ((picks >= 0) & (picks < 20_001)).all()
