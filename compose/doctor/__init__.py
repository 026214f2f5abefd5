"""The checks of `penstock doctor`: each yields findings, and a finding that is not ok names its fix.

    environment --> settings --> machine, broker, workers, registry --> findings: ok, warning, broken

installed.py, configuration.py, security.py need no broker; broker.py, workers.py, deployments.py and foreign_keys.py
ask it. The checks change nothing, wait at most two seconds for a broker that does not answer, and show no secret.
"""

from __future__ import annotations

from penstock.compose.doctor.examination import examine
from penstock.compose.doctor.findings import Finding

__all__ = ["Finding", "examine"]
