"""Adam in a rotated basis: what it is without rotation, what the basis is, and that it restarts."""

from __future__ import annotations

import copy
from itertools import pairwise
from pathlib import Path
from random import Random

import pytest
import torch
from pipelines import ListFeed, assert_same_bits, make_job, regression, train, train_plainly
from replay import Pipeline, cut, noisy_model, random_kills
from torch import Tensor, nn

from spectrain.optimizers import BasisRotation

torch.set_num_threads(1)


def steps(optimizer: torch.optim.Optimizer, param: Tensor, count: int, seed: int = 0) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        param.grad = torch.randn(param.shape, generator=generator)
        optimizer.step()


@pytest.mark.parametrize("shape", [(5,), (), (2, 3, 4)])
def test_what_is_no_matrix_is_updated_as_by_adam(shape: tuple[int, ...]) -> None:
    param, plain = (nn.Parameter(torch.ones(shape)) for _ in range(2))
    steps(BasisRotation([param], lr=0.1, eps=1e-16), param, 5)
    steps(torch.optim.Adam([plain], lr=0.1), plain, 5)
    torch.testing.assert_close(param, plain)


def test_a_diagonal_gradient_needs_no_rotation() -> None:
    param, plain = (nn.Parameter(torch.ones(4, 4)) for _ in range(2))
    ours = BasisRotation([param], lr=0.1, eps=1e-12, refresh_every=1)
    adam = torch.optim.Adam([plain], lr=0.1, eps=1e-6)
    for step in range(6):
        for each in (param, plain):
            each.grad = torch.diag(torch.tensor([4.0, 3.0, 2.0, 1.0])) * (step + 1)
        ours.step()
        adam.step()
    torch.testing.assert_close(param, plain, rtol=1e-4, atol=1e-5)


def test_the_bases_become_the_eigenvectors_of_the_gradients_moments() -> None:
    generator = torch.Generator().manual_seed(1)
    left, right = (torch.linalg.qr(torch.randn(4, 4, generator=generator)).Q for _ in range(2))
    param = nn.Parameter(torch.zeros(4, 4))
    optimizer = BasisRotation([param], lr=0.0, refresh_every=1)
    for _ in range(60):
        param.grad = left @ torch.diag(torch.tensor([8.0, 4.0, 2.0, 1.0])) @ right.T
        optimizer.step()
    state = optimizer.state[param]
    for found, expected in ((state["left_basis"], left), (state["right_basis"], right)):
        torch.testing.assert_close((found.T @ expected).abs(), torch.eye(4), atol=1e-4, rtol=0)


def test_bases_stay_orthogonal_and_are_refreshed_every_so_often() -> None:
    param = nn.Parameter(torch.zeros(3, 5))
    optimizer = BasisRotation([param], refresh_every=3)
    bases: list[Tensor] = []
    for count in range(7):
        steps(optimizer, param, 1, seed=count)
        bases.append(optimizer.state[param]["right_basis"].clone())
    changes = [not torch.equal(old, new) for old, new in pairwise(bases)]
    assert changes == [False, False, True, False, False, True]
    torch.testing.assert_close(bases[-1].T @ bases[-1], torch.eye(5), atol=1e-5, rtol=0)


def test_decay_is_decoupled() -> None:
    param = nn.Parameter(torch.ones(2, 2))
    optimizer = BasisRotation([param], lr=0.1, weight_decay=0.5)
    param.grad = torch.zeros(2, 2)
    optimizer.step()
    torch.testing.assert_close(param.detach(), torch.full((2, 2), 0.95))


@pytest.mark.parametrize(
    "changes",
    [
        {"lr": -1.0},
        {"eps": 0.0},
        {"betas": (0.9, 1.0)},
        {"weight_decay": -1.0},
        {"refresh_every": 0},
    ],
)
def test_arguments_out_of_range_are_refused(changes: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=str(next(iter(changes)))):
        BasisRotation([nn.Parameter(torch.ones(1))], **changes)


def test_a_closure_gives_the_loss() -> None:
    param = nn.Parameter(torch.ones(2, 2))
    optimizer = BasisRotation([param], lr=0.1)

    def closure() -> float:
        optimizer.zero_grad()
        loss = param.square().sum()
        loss.backward()
        return loss.item()

    assert optimizer.step(closure) == 4
    assert optimizer.step(closure) < 4


def test_its_state_goes_on_in_another_one() -> None:
    param, other = (nn.Parameter(torch.ones(3, 5)) for _ in range(2))
    optimizer, successor = BasisRotation([param]), BasisRotation([other])
    steps(optimizer, param, 7)
    other.data.copy_(param)
    successor.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for optimizer_, each in ((optimizer, param), (successor, other)):
        steps(optimizer_, each, 5, seed=3)
    assert torch.equal(param, other)


def test_one_stage_is_a_plain_loop_and_several_are_restarted_to_the_same_bits(
    tmp_path: Path,
) -> None:
    job = make_job(noisy_model, optimizer=lambda params: BasisRotation(params, lr=0.01))
    feed = ListFeed(regression(12))
    quiet = train(job, feed, cut(3), "stash")
    for seed in range(3):
        random = Random(seed)
        pipeline = Pipeline(
            job=job, feed=feed, layer_counts=cut(3), directory=tmp_path, method="stash", every=3
        )
        pipeline.run(random, random_kills(random, 3))
        assert pipeline.kills > 0
        assert_same_bits(pipeline.state(), quiet.state)
    smooth = make_job(
        lambda: nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)), optimizer=job.optimizer
    )
    assert_same_bits(train(smooth, feed, [3], "stash").state, train_plainly(smooth, feed)[0])
