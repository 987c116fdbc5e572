"""Which plan a run takes: what `pagoda plan` forecasts, with the bits of any other."""

from dataclasses import replace
from pathlib import Path

import pytest

from pagoda.config.memory import Memory
from pagoda.errors import BudgetError, ConfigError
from pagoda.forecast.forecast import forecast
from pagoda.forecast.machine import find_machine_for, with_precision
from pagoda.forecast.search import USUAL
from pagoda.mesh.mesh import open_mesh
from pagoda.optim.rule import DTYPES
from pagoda.simulate.hardware import Hardware, hardware_file, write_hardware
from pagoda.simulate.machines import find_machine
from pagoda.train import TrainConfig
from pagoda.train.choice import plan_config
from pagoda.train.metrics import read_metrics
from tests.forecast.machines import SMALL
from tests.tiny import tiny_run, trained, write_model


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TrainConfig:
    """A run of a machine that has not been measured."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    memory = Memory(host="1MiB", ssd=str(tmp_path))
    model = write_model(tmp_path, num_hidden_layers=3)
    return tiny_run(tmp_path, model=model, max_steps=2, per_device_train_batch_size=1, memory=memory)


def curve(config: TrainConfig) -> list[tuple[object, object]]:
    return [(line["loss"], line["grad_norm"]) for line in read_metrics(config.output_dir / "metrics.jsonl")]


def test_a_run_may_be_resumed_with_another_plan_and_its_bits_stay(config: TrainConfig, tmp_path: Path) -> None:
    write_hardware(SMALL, hardware_file())
    begun = replace(config, lr_scheduler_type="constant", save_steps=2)
    whole = replace(begun, max_steps=4, plan="usual", output_dir=tmp_path / "whole")
    usual, _ = trained(whole)
    trained(replace(begun, plan="usual"))
    memory = replace(config.memory, unit_limit="16KiB")  # what else the search finds depends on the machine
    resumed, _ = trained(replace(begun, max_steps=4, resume_from_checkpoint="last", plan="search", memory=memory))
    assert resumed.first_step == 3
    assert resumed.plan.layout != usual.plan.layout
    assert curve(begun) == curve(whole)


def test_a_machine_that_has_not_been_measured_takes_the_usual_plan(config: TrainConfig) -> None:
    result, shown = trained(config)
    assert result.plan.options.unit_limit is None
    assert "search" not in shown
    with pytest.raises(ConfigError, match=r"--plan search needs .*pagoda calibrate"):
        trained(replace(config, plan="search", output_dir=config.output_dir / "other"))
    write_hardware(replace(SMALL, ssd=None), hardware_file())
    result, shown = trained(replace(config, output_dir=config.output_dir.with_name("without a drive")))
    assert "no search" in shown
    assert "calibrate with --ssd" in shown
    assert result.plan.options.unit_limit is None


def test_a_command_without_a_precision_takes_what_the_hardware_multiplies_fast_and_says_why(
    config: TrainConfig, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """And `pagoda plan` takes the same, for another machine too."""
    for slowdown, precision in ((0.5, "bf16"), (1.0, "bf16"), (1.2, "fp32")):
        monkeypatch.setattr("pagoda.calibrate.matmul.cpu_slowdown", lambda dtype, slowdown=slowdown: slowdown)
        result, shown = trained(replace(config, precision=None, output_dir=tmp_path / str(slowdown)))
        assert f"Chosen: --precision {precision}: this CPU multiplies" in shown
        assert result.plan.layout.weight.dtype is DTYPES[precision]
    for hardware, precision in ((SMALL, "bf16"), (find_machine("rtx4090"), "bf16"), (slower_in_bf16(SMALL), "fp32")):
        planned, why = with_precision(replace(plan_config(config, open_mesh()), precision=None), hardware)
        assert planned.precision == precision
        assert all("multiplies" in reason for reason in why)


def slower_in_bf16(hardware: Hardware) -> Hardware:
    """The machine with a CPU that has no instructions for bf16."""
    rate = replace(hardware.cpu.fp32.reached_flop_per_s, value=hardware.cpu.fp32.reached_flop_per_s.value / 9)
    slow = replace(hardware.cpu.fp32, reached_flop_per_s=rate)
    return replace(hardware, device=None, cpu=replace(hardware.cpu, bf16=slow))


def test_what_no_plan_can_hold_is_refused_before_anything_is_written(config: TrainConfig) -> None:
    write_hardware(SMALL, hardware_file())
    with pytest.raises(BudgetError, match="host needs"):
        trained(replace(config, memory=replace(config.memory, host="100KiB")))
    assert not config.output_dir.exists()


def test_a_measured_machine_runs_what_is_forecast_and_says_so(config: TrainConfig) -> None:
    write_hardware(SMALL, hardware_file())
    open_config = replace(
        config, per_device_train_batch_size=2, activations="auto", batch_tiles="auto", tile_limit="8KiB", verbose=True
    )
    result, shown = trained(open_config)
    asked = plan_config(open_config, open_mesh())
    predicted = forecast(asked, find_machine_for(asked), measure=False)
    assert predicted.choice.best.name != USUAL
    assert result.plan.options.activations == predicted.config.activations != "auto"
    assert (result.plan.layout, result.plan.placement) == (predicted.plan.layout, predicted.plan.placement)
    assert any(slot.param.part is not None for unit in result.plan.units for slot in unit.slots)
    said = ("chosen by a search, which took", "fastest other", f"activations: {predicted.config.activations}")
    assert all(words in shown for words in (*said, "batch tiles: 1"))
