"""Run the engine, write a number down: workloads, comparisons, reports."""

from dspark.measure.ties import Difference, differences, kernel_noise
from dspark.measure.workloads import WORKLOADS

__all__ = ["WORKLOADS", "Difference", "differences", "kernel_noise"]
