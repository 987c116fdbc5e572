"""Offloaded activations leave and come back within a window of bytes, and before backward needs them."""

from itertools import accumulate, takewhile

from hypothesis import given, strategies as st

from pagoda.plan.activations import window_of
from pagoda.schedule.activations import Activation, GraphActivations
from pagoda.schedule.waits import InFlight


class Moving:
    """An activation on its way out."""

    done = False


class Driver:
    """What moves the activations of all graphs, and notes it."""

    def __init__(self) -> None:
        self.leaving = InFlight[Moving]()
        self.out: dict[Activation, Moving] = {}
        self.back: list[Activation] = []

    def new_graph(self) -> GraphActivations[Moving]:
        return GraphActivations(self.leaving, self.offload, self.back.append)

    def offload(self, activation: Activation) -> Moving:
        assert activation not in self.out
        moving = self.out[activation] = Moving()
        return moving


@given(data=st.data(), sizes=st.lists(st.integers(1, 9), min_size=1, max_size=12))
def test_a_window_of_bytes_leaves_at_once_and_the_next_that_backward_uses_are_back(
    data: st.DataObject, sizes: list[int]
) -> None:
    driver = Driver()
    graph = driver.new_graph()
    saved = [Activation(nbytes) for nbytes in sizes]
    still_held = data.draw(st.sets(st.sampled_from(saved)))
    for count, activation in enumerate(saved, 1):
        graph.save(activation)
        if activation not in still_held:
            graph.leave(activation)
        for moving in driver.leaving.above(graph.window):
            moving.done = True
        on_their_way = sum(each.nbytes for each, moving in driver.out.items() if not moving.done)
        assert on_their_way <= window_of(max(sizes[:count]))
    assert not driver.back
    window = window_of(max(sizes))
    graph.begin_backward()
    left = saved[::-1]
    while left:
        sums = accumulate(activation.nbytes for activation in left)
        ahead = left[: sum(1 for _ in takewhile(lambda total: total <= window, sums))]
        assert ahead, "the largest fits"
        assert [each for each in driver.back if not each.over] == ahead
        for activation in data.draw(st.sets(st.sampled_from(left))):  # nobody else holds it any more
            moved = len(driver.out)
            if activation in still_held:
                still_held.remove(activation)
                graph.leave(activation)
                assert (len(driver.out) > moved) == (activation not in driver.back)
        gone = data.draw(st.sets(st.sampled_from(left)))
        for activation in gone:
            activation.over = True
        used = left.pop(0)
        graph.use(used)
        left = [activation for activation in left if activation not in gone]
    assert len({*driver.back}) == len(driver.back)


def test_a_backward_reads_ahead_what_its_own_graph_has_saved() -> None:
    """Micro-batches of a pipeline go forward one after another, and backward in the same order."""
    driver = Driver()
    graphs = [driver.new_graph() for _ in range(2)]
    saved = [[Activation(1) for _ in range(4)] for _ in graphs]
    for graph, activations in zip(graphs, saved, strict=True):
        for activation in activations:
            graph.save(activation)
            graph.leave(activation)
    graphs[0].begin_backward()
    graphs[0].use(saved[0][3])
    assert driver.back == saved[0][:0:-1]


def test_what_could_not_be_brought_back_is_tried_again() -> None:
    driver = Driver()
    failures = [OSError()]

    def bring_back(activation: Activation) -> None:
        if failures:
            raise failures.pop()
        driver.back.append(activation)

    graph = GraphActivations(driver.leaving, driver.offload, bring_back)
    activation = Activation(1)
    graph.save(activation)
    try:
        graph.use(activation)
    except OSError:
        graph.use(activation)
    assert driver.back == [activation]
