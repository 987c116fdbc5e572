"""Several threads of a user may run one wrapped model: forwards wait for each other, and gradients are those of all."""

import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from zoo import ALL_ON_SSD, squeeze

import pagoda
from pagoda.parameters.hidden import hidden_class, views_of

from .conftest import Wrap
from .loops import assert_same_state, backward, inputs, layers

SOON_S = 30


def in_threads(*work: Callable[[], Any]) -> list[Any]:
    """Run functions at once. Returns their results, or the errors that they raised."""
    results: list[Any] = [None] * len(work)

    def run(index: int) -> None:
        try:
            results[index] = work[index]()
        except Exception as error:
            results[index] = error

    threads = [threading.Thread(target=run, args=(index,), daemon=True) for index in range(len(work))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SOON_S)
    assert not any(thread.is_alive() for thread in threads)
    return results


def test_a_forward_waits_for_the_forward_of_another_thread(wrap: Wrap) -> None:
    model, _ = wrap(layers())
    inside, seen = threading.Event(), []

    def watch(*_: object) -> None:
        seen.append(threading.get_ident())
        inside.set()

    model.layers[1].register_forward_pre_hook(watch)
    model.layers[1].register_forward_hook(lambda *_: (inside.wait(SOON_S), threading.Event().wait(0.1), None)[-1])

    def second() -> torch.Tensor:
        inside.wait(SOON_S)
        return forward(1)

    @torch.no_grad()
    def forward(seed: int) -> torch.Tensor:
        loss: torch.Tensor = model(inputs(seed), [0, 1, 1, 2])
        return loss

    expected = [forward(0), forward(1)]
    seen.clear()
    inside.clear()
    assert in_threads(lambda: forward(0), second) == expected
    assert len(set(seen[:2])) == len(set(seen[2:])) == 1, "each thread passes the layer twice, without the other"


@pytest.mark.parametrize("activations", ["keep", "recompute"])
def test_threads_that_train_at_once_add_up_their_gradients(activations: str, wrap: Wrap, tmp_path: Path) -> None:
    """Integers, so that sums do not depend on the order. One forward waits for its backward while others run. Backwards
    wait for each other, because those that meet are refused."""
    backward_alone = threading.Lock()

    class Integers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(3))
            for param in self.parameters():
                nn.init.ones_(param)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x) / 64
            return x.sum()

    def trained(run: Callable[[Callable[[float], None]], object]) -> dict[str, torch.Tensor]:
        memory = squeeze(Integers(), ALL_ON_SSD, tmp_path, unit_limit="20KiB")
        model, optimizer = wrap(Integers(), memory, rule=pagoda.SGD(lr=1.0), precision="fp32", activations=activations)

        def turn(value: float) -> None:
            for _ in range(8):
                loss = model(torch.full((2, 64), value))
                with backward_alone:
                    loss.backward()

        run(turn)
        optimizer.step()
        weights: dict[str, torch.Tensor] = model.state_dict()
        optimizer.close()
        return weights

    expected = trained(lambda turn: (turn(1.0), turn(2.0)))
    met = trained(lambda turn: in_threads(lambda: turn(1.0), lambda: turn(2.0)))
    for name, weight in expected.items():
        assert torch.equal(met[name], weight), name


def test_backwards_of_two_threads_that_meet_at_a_parameter_are_refused(wrap: Wrap) -> None:
    model, optimizer = wrap(layers())
    parameter = model.layers[0][0].weight
    first_is_in, second_is_in, first_has_ended = (threading.Event() for _ in range(3))

    def meet(*_: object) -> None:
        if not first_is_in.is_set():
            first_is_in.set()
            second_is_in.wait(SOON_S)
        elif not second_is_in.is_set():
            second_is_in.set()
            first_has_ended.wait(SOON_S)

    torch.autograd.graph.get_gradient_edge(parameter).node.register_prehook(meet)

    def first() -> None:
        try:
            backward(model, 0)
        finally:
            first_has_ended.set()

    def second() -> None:
        first_is_in.wait(SOON_S)
        backward(model, 1)

    told = in_threads(first, second)
    assert isinstance(told[0], pagoda.UsageError)
    assert "ran backward at once" in str(told[0])
    optimizer.zero_grad()
    backward(model, 0)
    optimizer.step()


ALL = [*range(6)]


def _state_dict(model: nn.Module) -> None:
    with suppress(pagoda.UsageError):  # an update came in between
        model.state_dict()


READS: dict[str, Callable[[nn.Module], object]] = {
    "forward": torch.no_grad()(lambda model: model(inputs(9), ALL)),
    "function": lambda model: [param.clone() for param in model.parameters()],
    "state dict": _state_dict,
    "full state dict": pagoda.full_state_dict,
    "masters": pagoda.trainable_state_dict,
}


@pytest.mark.parametrize("name", READS)
def test_what_another_thread_reads_changes_no_bit_of_training(name: str, wrap: Wrap, tmp_path: Path) -> None:
    def steps(model: Any, optimizer: Any, goes_on: Callable[[int], bool]) -> list[float]:
        losses: list[float] = []
        while goes_on(len(losses)):
            losses.append(backward(model, len(losses), ALL))
            optimizer.step()
            if len(losses) % 2:
                optimizer.synchronize()  # updates may wait for the other thread's forward
        return losses

    memory = squeeze(layers(6), ALL_ON_SSD, tmp_path, precision="fp32")
    read, trained = wrap(layers(6), memory, precision="fp32"), threading.Event()
    reads = 0

    def train() -> list[float]:
        try:
            return steps(*read, lambda taken: taken < 6 or (reads < 20 and taken < 300))
        finally:
            trained.set()

    def others() -> None:
        nonlocal reads
        while not trained.is_set():
            READS[name](read[0])
            reads += 1

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        losses, told = in_threads(train, others)
    finally:
        sys.setswitchinterval(interval)
    assert told is None
    assert isinstance(losses, list), losses
    alone = wrap(layers(6), pagoda.Memory(host="64MiB"), precision="fp32")
    assert losses == steps(*alone, lambda taken: taken < len(losses))
    assert_same_state(read, alone)


@pytest.mark.parametrize("func", [torch.Tensor.clone, torch.Tensor.detach])
def test_what_another_threads_forward_shows_since_a_function_was_called_is_read_as_it_is(func: Any) -> None:
    """The class of a parameter changes between the call and what looks for hidden tensors in its arguments."""
    shown = nn.Parameter(torch.randn(3))
    assert torch.equal(hidden_class(nn.Parameter).__torch_function__(func, (), (shown,)), shown)
    assert torch.equal(views_of(func, (shown,), {})[0], shown)
