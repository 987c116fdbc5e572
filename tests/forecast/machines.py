"""A small machine to plan for, whose figures are round."""

from pagoda.simulate.hardware import Cpu, Drive, Figure, Hardware, MatmulRate

MIB, GIB = float(1 << 20), float(1 << 30)


def figure(value: float) -> Figure:
    return Figure(value, "made up")


RATE = MatmulRate(figure(2e11), figure(1e11))
SMALL = Hardware(
    "small",
    Cpu(
        cores=2,
        memory_bytes=figure(1 * GIB),
        memory_bytes_per_s=figure(4e10),
        update_params_per_s=figure(1e9),
        bf16=RATE,
        fp32=RATE,
        copy_bytes_per_s=figure(1e10),
        gradient_bytes_per_s=figure(5e9),
    ),
    ssd=Drive(
        capacity_bytes=figure(2 * GIB),
        read_bytes_per_s=figure(1e9),
        write_bytes_per_s=figure(5e8),
        both_bytes_per_s=figure(7e8),
        endurance_bytes=figure(1e15),
        cpu_share=figure(0.1),
    ),
)
