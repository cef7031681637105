"""Scenarios: one TOML file each, which describes a cluster, a job and what tuners may change."""

from harness.scenario.description import Scenario
from harness.scenario.scenario import embedded, job, load, parse, show, system, workload_of

__all__ = ["Scenario", "embedded", "job", "load", "parse", "show", "system", "workload_of"]
