"""benchmarks/peers.py trains what it says: the systems that need no installation agree, and its machinery holds."""

import itertools
import json
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch.distributed as dist

import peers
from peer_suite.process import Peer, Task, Turns
from peer_suite.report import by_ram
from peer_suite.systems import PLAIN, SYSTEMS
from turns import HERE, TurnFailed, TurnTaker

TASK = Task("llama-15m", {8: 2, 16: 1}, layers=1, micro_batches=2)
SOME = (PLAIN, "pagoda-ssd")


def losses_of(name: str, given: Task, folder: Path) -> list[float]:
    """Of three steps, of one after a checkpoint, and of the same one after the checkpoint has been read back."""
    folder.mkdir()
    task = json.loads(json.dumps(asdict(given)))
    turns = Turns(name, task, str(folder))
    try:
        turns.start()
        turns.train(8, 2)
        turns.save()
        turns.batches[16], again = itertools.tee(turns.batches[16])
        turns.train(16, 1)
        turns.load()
        turns.batches[16] = again
        turns.train(16, 1)
    finally:
        if turns.trainer is not None:
            turns.trainer.close()
        if dist.is_initialized():
            dist.destroy_process_group()
    return [float(loss) for loss in (folder / "losses").read_text().split()]


@pytest.mark.slow
@pytest.mark.parametrize("task", [TASK, replace(TASK, precision="fp32", lora_rank=4)], ids=["all of it", "LoRA, fp32"])
def test_systems_that_need_no_installation_train_the_same_and_resume(task: Task, tmp_path: Path) -> None:
    losses = {name: losses_of(name, task, tmp_path / name) for name in SOME}
    plain = losses[PLAIN]
    assert len(plain) == 5
    assert plain[0] != plain[1] != plain[2]
    for name, of in losses.items():
        assert of[3] == of[4], f"{name} goes on from its checkpoint"
        assert of == pytest.approx(plain, rel=0.05), name  # Pagoda draws other initial weights


def test_a_turn_that_fails_is_an_error_with_its_reason() -> None:
    code = "import turns; turns.serve({'good': lambda: print('noise'), 'bad': lambda: {}['key']})"
    taker = TurnTaker("it", [sys.executable, "-c", code], {"PYTHONPATH": str(HERE)})
    assert 0 <= taker.turn("good") < 1
    with pytest.raises(TurnFailed, match="KeyError: 'key'"):
        taker.turn("bad")
    with pytest.raises(TurnFailed, match="ended with exit code 1"):
        taker.turn("good")
    taker.close()


@pytest.mark.parametrize("known", [0, 5])
@pytest.mark.parametrize("first", [0, 3, 40])
@pytest.mark.parametrize("most", [0, 1, 7, 100, 300])
def test_the_largest_model_is_found_from_either_side(most: int, first: int, known: int) -> None:
    tried: list[int] = []

    def failure(layers: int) -> str | None:
        tried.append(layers)
        return None if layers <= most else "too large"

    found, reason = peers.most_layers(failure, first, min(known, most), 200)
    assert found <= most
    assert min(most, 200) < max(found + 1, found * peers.CLOSE_ENOUGH)
    assert reason == ("more were not tried" if most > 200 else "too large")
    assert len({*tried}) == len(tried) < 15


def test_a_process_that_takes_too_much_memory_is_ended(tmp_path: Path) -> None:
    peer = Peer(PLAIN, TASK, tmp_path, tmp_path, limit=64 << 20)
    with pytest.raises(TurnFailed, match=r"takes more than 64.* of RAM"):
        peer.turn("start")
    peer.close()
    assert not [*tmp_path.iterdir()]


@pytest.mark.slow
def test_a_run_writes_its_figures_and_goes_on_where_it_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, page = tmp_path / "peers.json", tmp_path / "page.md"
    page.write_text("before\n<!-- figures: benchmarks/peers.py writes them -->\n<!-- end of figures -->\nafter\n")
    command = ["peers.py", "--ssd", str(tmp_path), "--out", str(out), "--docs", str(page), "--model", "gpt-1x64"]
    command += ["--tokens", "8", "16", "--rounds", "2", "--limits", "600MiB"]
    monkeypatch.setenv("GOMP_SPINCOUNT", "10000")
    monkeypatch.setenv("KMP_BLOCKTIME", "1")

    def run(*more: str) -> dict[str, object]:
        monkeypatch.setattr(sys, "argv", [*command, *more])
        peers.main()
        found: dict[str, object] = json.loads(out.read_text())
        return found

    first = run("--part", "speed", "--systems", PLAIN, "pagoda-ssd")
    second = run("--part", "speed", "--systems", PLAIN, "pagoda-ssd", "fsdp2-offload")
    speed = second["speed"]["bf16"]["figures"]
    earlier = first["speed"]["bf16"]["figures"]
    assert {**speed, "fsdp2-offload": None} == {**earlier, "fsdp2-offload": None}
    third = run("--part", "speed", "--systems", PLAIN, "--micro-batches", "2")
    assert third["speed"]["bf16"] == second["speed"]["bf16"]
    assert [*third["speed"]["bf16, 2 micro-batches a step"]["figures"]] == [PLAIN]
    for figures in speed.values():
        assert set(figures["tokens"]) == {"8", "16"}
        assert figures["start_s"] > 0
        assert figures["save_s"] > 0
        assert figures["load_s"] > 0
    assert speed["pagoda-ssd"]["tokens"]["8"]["written_bytes"] > speed[PLAIN]["tokens"]["8"]["written_bytes"]
    assert page.read_text().startswith("before\n")
    assert SYSTEMS["pagoda-ssd"].label in page.read_text()
    for plot in ("peers_time.png", "peers_tokens.png"):
        assert (tmp_path / plot).stat().st_size > 1000


def test_what_trains_in_less_ram_trains_in_more() -> None:
    limits = {
        "6GiB": {"a": {"parameters": 20}, "b": {"parameters": 9}},
        "3GiB": {"a": {"parameters": 49}, "b": {"parameters": 4}},
    }
    grown = by_ram(limits)
    assert [(limit, of["a"]["parameters"], of["b"]["parameters"]) for limit, of in grown.items()] == [
        ("3GiB", 49, 4),
        ("6GiB", 49, 9),
    ]
