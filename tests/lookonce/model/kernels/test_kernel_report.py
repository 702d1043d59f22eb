"""A service's log and metrics say which kernels it uses."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, generate_latest
from structlog.testing import capture_logs

from lookonce.local.local_stack import LocalStack
from lookonce.model.kernels.kernel_choice import KernelChoice
from lookonce.model.kernels.kernel_report import report_kernels


def test_the_choices_of_a_process_are_logged_and_exported() -> None:
    choice = KernelChoice("linear layers float32", "native", {"native": 0.002, "pytorch": 0.005})
    registry = CollectorRegistry()
    with capture_logs() as logs:
        report_kernels(registry, [choice])
    (line,) = logs
    assert (line["event"], line["implementation"]) == ("kernel chosen", "native")
    assert line["milliseconds"] == {"native": 2.0, "pytorch": 5.0}
    sample = 'lookonce_kernel_speed_ratio{implementation="native",operation="linear layers float32"} 2.5'
    assert sample in generate_latest(registry).decode()


def test_both_services_report_their_operations(stack: LocalStack) -> None:
    for process, operations in (
        (stack.encoders[0], {"linear layers of images", "attention of images"}),
        (stack.decoders[0], {"linear layers", "attention"}),
    ):
        lines = [line for line in process.log_path.read_text().splitlines() if "kernel chosen" in line]
        assert len(lines) == len(operations)
        assert all(any(f"{operation} float32" in line for line in lines) for operation in operations)
